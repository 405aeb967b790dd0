# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Write `configuration.md` from the docstring of `DAPOConfig`, which describes each field once.

python docs/configuration.py
"""

from pathlib import Path

from trl_dapo import DAPOConfig
from trl_dapo.settings.help import read_fields


PAGE = Path(__file__).with_suffix(".md")
INTRO = """\
# Configuration

On this page you can look up every field that `DAPOConfig` adds to TRL's `GRPOConfig`, and the fields of `GRPOConfig`
whose description it extends. All fields of `GRPOConfig` keep their meaning, with one exception: `loss_type="dapo"`
divides by the tokens of each optimizer step. Three of its fields have other defaults: `epsilon_high` and the two
settings of the correction for vLLM. With the defaults of the added fields, dynamic sampling is on. How it works, and
what its settings cost, is on the page [dynamic sampling](dynamic_sampling.md).

An empty default stands for `None`. A value that cannot be used is refused at the start of a run, and the message says
what to do instead. `trl-dapo train --help` lists all fields.

<!-- Written by configuration.py from the docstring of DAPOConfig. -->"""


def describe(doc: str) -> str:
    """
    Return the page.

    Args:
        doc (`str`):
            A docstring in TRL's format: fields under `Parameters:`, grouped by `> Heading`.

    Returns:
        `str`: Markdown with a table for each group.
    """
    lines, heading = [INTRO], None
    for name, entry in read_fields(doc).items():
        if entry.heading != heading:
            heading = entry.heading
            lines += ["", f"## {heading}", "", "| field | default | meaning |", "|---|---|---|"]
        default = "" if entry.default is None else f"`{entry.default}`"
        meaning = entry.text.replace("|", "\\|")
        lines.append(f"| `{name}` | {default} | {meaning} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(describe(DAPOConfig.__doc__))

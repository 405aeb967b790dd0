# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes `configuration.md` from the docstring of `DAPOConfig`, which describes each field once.

python docs/configuration.py
"""

from pathlib import Path

from trl_dapo import DAPOConfig
from trl_dapo.settings.help import read_fields


PAGE = Path(__file__).with_suffix(".md")
INTRO = """\
# Configuration

These are the fields that `DAPOConfig` adds to TRL's `GRPOConfig`, or says more of. Every field of `GRPOConfig` keeps
its meaning, but that `loss_type="dapo"` divides by the tokens of each step. Three of their defaults differ:
`epsilon_high` and the two of the correction for vLLM. A value that cannot be honoured is refused at the start, with
the way out in the message. `trl-dapo train --help` lists all fields.

<!-- Written by configuration.py from the docstring of DAPOConfig. -->"""


def describe(doc: str) -> str:
    """
    The page.

    Args:
        doc (`str`):
            A docstring in TRL's format: fields under `Parameters:`, their groups as `> Heading`.

    Returns:
        `str`: Markdown, with a table for each group.
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

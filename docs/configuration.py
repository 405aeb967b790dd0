# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes `configuration.md` from the docstring of `DAPOConfig`, which describes each field once.

python docs/configuration.py
"""

import inspect
import re
import textwrap
from pathlib import Path

from trl_dapo import DAPOConfig


PAGE = Path(__file__).with_suffix(".md")
INTRO = """\
# Configuration

What `DAPOConfig` adds to TRL's `GRPOConfig`, every field of which keeps its meaning. Three defaults differ from what
TRL's `loss_type="dapo"` does already: `epsilon_high` and the two of the correction for vLLM. A value that cannot be
honoured is refused when the config or the trainer is made, with the way out in the message. `trl-dapo train --help`
lists all fields.

<!-- Written by configuration.py from the docstring of DAPOConfig. -->"""
FIELD = re.compile(r"^(\w+) \(`([^`]*)`, \*optional\*(?:, defaults to `(.*?)`)?\):$")


def describe(doc: str) -> str:
    """
    The page.

    Args:
        doc (`str`):
            A docstring in TRL's format: fields under `Parameters:`, their groups as `> Heading`.

    Returns:
        `str`: Markdown, with a table for each group.
    """
    lines, rows = [INTRO], []
    _, _, fields = doc.partition("Parameters:\n")
    for line in textwrap.dedent(re.split(r"^\S", fields, flags=re.MULTILINE)[0]).splitlines():
        if line.startswith("> "):
            head = ["", f"## {line.removeprefix('> ')}", "", "| field | default | meaning |", "|---|---|---|"]
            lines, rows = [*lines, *map(_row, rows), *head], []
        elif match := FIELD.match(line):
            rows.append((match[1], match[3], []))
        elif line.strip():
            rows[-1][2].append(line.strip())
    return "\n".join([*lines, *map(_row, rows)]) + "\n"


def _row(row: tuple[str, str | None, list[str]]) -> str:
    name, default, text = row
    # In tables and outside of Python, a reference is its name.
    meaning = re.sub(r"\[`~[\w.]*?(\w+)`\]", r"`\1`", " ".join(text)).replace("|", "\\|")
    return f"| `{name}` | {'' if default is None else f'`{default}`'} | {meaning} |"


if __name__ == "__main__":
    PAGE.write_text(describe(inspect.cleandoc(DAPOConfig.__doc__)))

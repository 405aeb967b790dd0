# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Write the map of the package in `design.md` from the first lines of its files and folders.

python docs/package_map.py
"""

import ast
import re
from pathlib import Path


PAGE = Path(__file__).with_name("design.md")
PACKAGE = PAGE.parents[1] / "trl_dapo"
START, END = "<!-- package map: python docs/package_map.py -->", "<!-- end of package map -->"


def first_line(file: Path) -> str:
    """Return the first line of a file's docstring, or an empty string if it has none."""
    return (ast.get_docstring(ast.parse(file.read_text())) or "").partition("\n")[0].strip()


def draw_map() -> str:
    """Return the list of files and folders of the package, each with its description."""
    folders = {f"{file.parent.name}/": first_line(file) for file in sorted(PACKAGE.glob("*/__init__.py"))}
    files = {file.name: first_line(file) for file in sorted(PACKAGE.glob("*.py")) if file.stem != "__init__"}
    lines = [f"  {name:<16} {what}".rstrip() for name, what in (folders | files).items()]
    return "\n".join(["```", "trl_dapo/", *lines, "```"])


def fill_in(page: str) -> str:
    """Return the page with the current map."""
    block = f"{START}\n\n{draw_map()}\n\n{END}"
    return re.sub(f"{re.escape(START)}.*?{re.escape(END)}", lambda _: block, page, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(fill_in(PAGE.read_text()))

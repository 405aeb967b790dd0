# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Tables for a terminal and for a page."""

import re

from rich.console import Console
from rich.table import Table


console = Console(width=140)


def say(line):
    """Print a line of prose unchanged."""
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def print_table(title, columns, rows, left=1):
    """Print a table. The first `left` columns are left-justified, and the others right-justified."""
    table = Table(title=title)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < left else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def row_of(*cells):
    return f"| {' | '.join(map(str, cells))} |"


def markdown(columns, rows):
    """Return the lines of a table in Markdown."""
    return [row_of(*columns), "|---" * len(columns) + "|", *(row_of(*row) for row in rows)]


def fill_block(page, start, end, lines):
    """Return a page with these lines between two marks, if it has the marks."""
    block = "\n".join([start, "", *lines, "", end])
    return re.sub(f"{re.escape(start)}.*?{re.escape(end)}", lambda _: block, page, flags=re.DOTALL)

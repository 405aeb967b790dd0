# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Tables, on a terminal and on a page."""

import re

from rich.console import Console
from rich.table import Table


console = Console(width=140)


def say(line):
    """A line of prose, as it is."""
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def print_table(title, columns, rows, left=1):
    """Rows as they come; behind the first columns all stand on the right."""
    table = Table(title=title)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < left else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def row_of(*cells):
    return f"| {' | '.join(map(str, cells))} |"


def markdown(columns, rows):
    """Lines of a page's table."""
    return [row_of(*columns), "|---" * len(columns) + "|", *(row_of(*row) for row in rows)]


def fill_block(page, start, end, lines):
    """A page with these lines between two marks, where it has them."""
    block = "\n".join([start, "", *lines, "", end])
    return re.sub(f"{re.escape(start)}.*?{re.escape(end)}", lambda _: block, page, flags=re.DOTALL)

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""How docstrings are written, where more than one way would do."""

import ast
import re
import textwrap
from pathlib import Path


MODULES = sorted((Path(__file__).parent.parent / "trl_dapo").rglob("*.py"))
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def raises_sections(path):
    """The `Raises` sections of a module, without their heading."""
    for node in ast.walk(ast.parse(path.read_text())):
        docstring = ast.get_docstring(node) if isinstance(node, DOCUMENTED) else None
        for section in re.findall(r"^Raises:\n((?: {4}.*\n?)+)", docstring or "", re.MULTILINE):
            yield textwrap.dedent(section)


def test_what_is_raised_is_written_in_one_way():
    sections = [(path.name, section) for path in MODULES for section in raises_sections(path)]
    assert len(sections) == sum(path.read_text().count("Raises:\n") for path in MODULES) > 50  # none is passed over
    entry = re.compile(r"[A-Z]\w+(, [A-Z]\w+)*: \S| ")  # a line with a margin goes on with the one before
    assert [found for found in sections if not all(map(entry.match, found[1].splitlines()))] == []

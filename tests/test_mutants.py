# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""What a mutant changes, and what is never changed."""

import mutants
import pytest


pytestmark = pytest.mark.fast

MODULE = '''
@decorated(by=1)
def f(a, b: Literal[2] = 3, *rest: int):
    """4 + 5"""
    assert a + b
    return [f"{a + 1}"] if a and not b else zip(a < b, rest, strict=True)
'''


def test_each_mutant_changes_one_thing_in_its_place(tmp_path, monkeypatch):
    monkeypatch.setattr(mutants, "PACKAGE", tmp_path)
    path = tmp_path / "room.py"
    path.write_text(MODULE)
    found = {name: text.decode() for name, text in mutants.mutants_of(path).items()}
    assert found == {
        "room.py f: 3 -> 4 #1": MODULE.replace("= 3", "= (4)"),
        "room.py f: a and (not b) -> not (a and (not b)) #1": MODULE.replace("a and not b", "(not (a and (not b)))"),
        "room.py f: a and (not b) -> a or not b #1": MODULE.replace("a and not b", "(a or not b)"),
        "room.py f: not b -> b #1": MODULE.replace("not b", "(b)"),
        "room.py f: a < b -> a <= b #1": MODULE.replace("a < b", "(a <= b)"),
    }

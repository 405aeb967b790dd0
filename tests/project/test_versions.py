# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The tables of releases in docs/limits.md."""

import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "docs"))

import versions  # noqa: E402


pytestmark = pytest.mark.fast
LIBRARIES = ("torch", "transformers", "trl")


def pinned(file):
    lines = [line.split("==") for line in (ROOT / file).read_text().splitlines() if "==" in line and line[0] != "#"]
    return {name: release for name, release in lines if name in LIBRARIES}


def test_the_page_has_the_runs_that_were_noted():
    page = versions.PAGE.read_text()
    assert versions.fill_in(page, "tested", versions.table_of_runs()) == page


def test_every_python_that_is_declared_and_the_lowest_versions_and_those_of_the_constraints_were_run():
    runs = [{name: run[name] for name in LIBRARIES} for run in versions.read_runs()]
    assert all(pinned(file) in runs for file in ("requirements/lowest.txt", "constraints.txt"))
    declared = (ROOT / "pyproject.toml").read_text()
    ran = {run["python"].rpartition(".")[0] for run in versions.read_runs()}
    assert ran == set(versions.PYTHONS)
    assert [python for python in ran if f"Python :: {python}" not in declared] == []

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""What docs/limits.md says of releases, and what the check of the resolver takes for a failure."""

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


@pytest.mark.parametrize("file", ["requirements/lowest.txt", "constraints.txt"])
def test_the_lowest_versions_and_those_of_the_constraints_were_run(file):
    assert pinned(file) in [{name: run[name] for name in LIBRARIES} for run in versions.read_runs()]


def test_every_python_that_is_declared_was_run():
    declared = (ROOT / "pyproject.toml").read_text()
    ran = {run["python"].rpartition(".")[0] for run in versions.read_runs()}
    assert ran == set(versions.PYTHONS)
    assert [python for python in ran if f"Python :: {python}" not in declared] == []


def test_a_bound_that_shuts_vllm_out_or_takes_an_older_trl_with_it_is_told(monkeypatch):
    monkeypatch.setattr(versions, "resolve", lambda *of: {"trl": "1.16.0", "vllm": "0.31.0"})
    assert versions.why_shut_out("3.12", "", "1.16.0") is None
    monkeypatch.setattr(versions, "resolve", lambda *of: {"trl": "1.14.2", "vllm": "0.21.0"})
    assert versions.why_shut_out("3.12", "", "1.16.0") == (
        "vLLM 0.21.0 comes with TRL 1.14.2, and 1.16.0 is the newest"
    )

    def nothing(*of):
        raise ValueError("No solution found")

    monkeypatch.setattr(versions, "resolve", nothing)
    assert versions.why_shut_out("3.12", "", "1.16.0") == "No solution found"

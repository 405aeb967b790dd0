# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Short runs sample, train on and log the same as when they were recorded: see `golden_runs.py`.

Only three of the runs with two processes are made here, since each takes seconds on two cores. `python
tests/golden_runs.py compare` makes all of them.
"""

import json

import golden_runs
import pytest


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return golden_runs.make_models(tmp_path_factory.mktemp("models"))


def close(value):
    """Return the same record with numbers that may differ by rounding. Texts, whole numbers and order may not."""
    if isinstance(value, dict):
        return {name: close(part) for name, part in value.items()}
    if isinstance(value, list):
        return [close(part) for part in value]
    return pytest.approx(value, rel=1e-5, abs=1e-6) if isinstance(value, float) else value


@pytest.mark.parametrize("name", [*golden_runs.CASES, "two_default", "two_both_on", "two_screen_2", "two_resumed"])
def test_a_run_does_what_it_did_when_it_was_recorded(name, models, tmp_path):
    found, expected = golden_runs.run_case(name, models, tmp_path), json.loads(golden_runs.file_of(name).read_text())
    for key in ("sampled", "trained", "logs", "weights"):
        assert found[key] == close(expected[key]), key


def test_every_recording_is_of_a_run():
    assert {path.stem for path in golden_runs.RECORDINGS.glob("*.json")} == set(golden_runs.NAMES)

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Variables of a launcher, and what shells and schedulers leave of them."""

import subprocess
import sys

import pytest

from trl_dapo.settings.environment import is_set, num_processes_of


@pytest.mark.fast
@pytest.mark.parametrize(
    ("value", "num", "has_a_value"),
    [
        (None, 1, False),
        ("", 1, False),
        (" ", 1, False),
        ("0", 1, True),
        ("-1", 1, True),
        ("many", 1, True),
        ("1", 1, True),
        ("8", 8, True),
        (" 8\n", 8, True),
    ],
)
def test_what_states_no_number_of_processes_states_one(monkeypatch, value, num, has_a_value):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if value is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", value)
    assert (num_processes_of("LOCAL_WORLD_SIZE"), is_set("LOCAL_WORLD_SIZE")) == (num, has_a_value)


@pytest.mark.parametrize("value", ["", "0"])
def test_the_rewards_are_imported_whatever_a_scheduler_left_behind(monkeypatch, value):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", value)
    subprocess.run([sys.executable, "-c", "import trl_dapo.rewards"], check=True, timeout=200)

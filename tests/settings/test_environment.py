# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Environment variables of a launcher, also empty ones that shells and job schedulers leave behind."""

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
def test_a_variable_without_a_number_of_processes_means_one_process(monkeypatch, value, num, has_a_value):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if value is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", value)
    assert (num_processes_of("LOCAL_WORLD_SIZE"), is_set("LOCAL_WORLD_SIZE")) == (num, has_a_value)


@pytest.mark.parametrize("value", ["", "0"])
def test_rewards_can_be_imported_with_an_invalid_number_of_processes(monkeypatch, value):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", value)
    subprocess.run([sys.executable, "-c", "import trl_dapo.rewards"], check=True, timeout=200)

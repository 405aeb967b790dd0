# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Every setting of `GRPOConfig` has a case in tests/grpo_settings.yaml or a reason why not, and cases are compared."""

import dataclasses
from fnmatch import fnmatch

import grpo_settings
import pytest
from trl import GRPOConfig

from trl_dapo import DAPOConfig


def test_every_setting_of_grpoconfig_has_a_case_or_a_reason_why_not():
    fields = {field.name for field in dataclasses.fields(GRPOConfig)}
    assert grpo_settings.CASES.keys() | grpo_settings.ELSEWHERE.keys() == fields
    assert not grpo_settings.CASES.keys() & grpo_settings.ELSEWHERE.keys()
    for pattern in " ".join(grpo_settings.TABLE["elsewhere"].values()).split():
        assert any(fnmatch(field, pattern) for field in fields), pattern
    for field, cases in grpo_settings.CASES.items():
        assert all(field in settings for settings in cases), field


@pytest.mark.parametrize("settings", [{"temperature": 0.7}, {"beta": 0.1}], ids=str)
def test_a_setting_that_both_trainers_honour_is_the_same(settings):
    assert grpo_settings.compare(settings) is None


def test_a_setting_that_one_trainer_ignores_is_told_with_both_figures(monkeypatch):
    class Ignores(DAPOConfig):
        def __post_init__(self):
            self.learning_rate = 1e-3
            super().__post_init__()

    monkeypatch.setattr(grpo_settings, "DAPOConfig", Ignores)
    assert grpo_settings.compare({}) == "learning_rate of step 1: 0.01, and 0.001"

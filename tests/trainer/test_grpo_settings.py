# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Every setting of `GRPOConfig` has a case in tests/grpo_settings.yaml or a reason why not, and cases are compared."""

import dataclasses
from fnmatch import fnmatch

import grpo_settings
import pytest
from trl import GRPOConfig


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

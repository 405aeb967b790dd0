# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
import dataclasses

import pytest
from helpers import tiny_config
from trl import GRPOConfig


def test_the_defaults_are_the_papers(tmp_path):
    args = tiny_config(tmp_path)
    assert (args.epsilon, args.epsilon_high, args.beta, args.loss_type) == (0.2, 0.28, 0.0, "dapo")
    assert args.scale_rewards == "group"
    assert args.use_dynamic_sampling
    assert (args.dynamic_sampling_max_rounds, args.dynamic_sampling_on_exhausted) == (10, "top_up")
    assert args.overlong_buffer_length is None


def test_what_dapo_does_not_name_keeps_trls_default():
    ours = {field.name: field.default for field in dataclasses.fields(tiny_config_class())}
    changed = {"epsilon_high", "beta", "loss_type", "epsilon"}
    for field in dataclasses.fields(GRPOConfig):
        if field.name not in changed:
            assert ours[field.name] == field.default, field.name


def tiny_config_class():
    from trl_dapo import DAPOConfig

    return DAPOConfig


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"overlong_buffer_length": 9}, r"between 1 and `max_completion_length` \(8\), got 9"),
        ({"overlong_buffer_length": 0}, "got 0"),
        ({"overlong_penalty_factor": -0.5, "overlong_buffer_length": 4}, "must not be negative, got -0.5"),
        ({"overlong_penalty_factor": 2.0}, "`overlong_penalty_factor=2.0` has no effect without"),
        ({"num_generations": 1}, "at least 2, got 1"),
        ({"dynamic_sampling_min_accuracy": 0.5, "dynamic_sampling_max_accuracy": 0.5}, "got 0.5 and 0.5"),
        ({"dynamic_sampling_min_accuracy": -0.1}, "got -0.1 and 1.0"),
        ({"dynamic_sampling_max_accuracy": 1.5}, "got 0.0 and 1.5"),
        # Of 4 completions 1, 2 or 3 are right: none of 0.25, 0.5, 0.75 lies between 0.3 and 0.45.
        ({"dynamic_sampling_min_accuracy": 0.3, "dynamic_sampling_max_accuracy": 0.45}, "No group of 4 completions"),
        ({"dynamic_sampling_on_exhausted": "retry"}, "'top_up', 'error', got 'retry'"),
        ({"dynamic_sampling_rewards": []}, "is empty"),
        ({"clip_ratio_c": 1.0}, "above 1, got 1.0"),
        ({"clip_ratio_c": 10.0, "loss_type": "grpo"}, "needs `loss_type='dapo'`, got 'grpo'"),
        ({"overlong_filtering": False, "mask_truncated_completions": True}, "contradicts"),
    ],
)
def test_a_wrong_value_is_refused_with_the_number_in_the_message(tmp_path, overrides, message):
    with pytest.raises(ValueError, match=message):
        tiny_config(tmp_path, **overrides)


@pytest.mark.parametrize("name", ["overlong_filtering", "mask_truncated_completions"])
def test_overlong_filtering_and_trls_name_for_it_are_one_setting(tmp_path, name):
    args = tiny_config(tmp_path, **{name: True})
    assert args.overlong_filtering is True
    assert args.mask_truncated_completions is True
    assert tiny_config(tmp_path).overlong_filtering is False


def test_a_band_that_some_group_can_meet_is_accepted(tmp_path):
    args = tiny_config(tmp_path, dynamic_sampling_min_accuracy=0.25, dynamic_sampling_max_accuracy=0.75)
    assert args.dynamic_sampling_min_accuracy == 0.25  # 2 of 4 lies between

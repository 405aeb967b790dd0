# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Shaping of rewards: the soft overlong punishment, and scaling."""

import math
import pickle

import pytest

from trl_dapo.rewards import SoftOverlongPunishment, scale_reward, soft_overlong_punishment


pytestmark = pytest.mark.fast


def test_equation_13_at_the_lengths_of_the_paper():
    lengths = [0, 16_384, 16_385, 18_432, 20_480, 20_481, 1_000_000]
    punishments = soft_overlong_punishment(lengths, max_length=20_480, buffer_length=4_096)
    assert punishments == [0.0, 0.0, -1 / 4_096, -0.5, -1.0, -1.0, -1.0]


@pytest.mark.parametrize("factor", [0.1, 0.3, 1.0, 2.5])
def test_the_factor_is_the_floor_and_is_met_exactly(factor):
    punishments = soft_overlong_punishment([9, 10, 11], max_length=10, buffer_length=3, penalty_factor=factor)
    assert punishments == [pytest.approx(-factor * 2 / 3), -factor, -factor]


def test_a_factor_of_zero_punishes_nothing_and_a_buffer_of_the_maximum_from_the_first_token_on():
    assert soft_overlong_punishment([5, 50], max_length=10, buffer_length=10, penalty_factor=0.0) == [0.0, 0.0]
    assert soft_overlong_punishment([0, 1, 4], max_length=4, buffer_length=4) == [0.0, -0.25, -1.0]


def test_the_reward_function_counts_token_ids_that_the_model_wrote_and_survives_pickling():
    punish = pickle.loads(pickle.dumps(SoftOverlongPunishment(max_completion_length=10, buffer_length=4)))
    assert punish.__name__ == "soft_overlong_punishment"
    rewards = punish(prompts=["p"] * 3, completions=["c"] * 3, completion_ids=[[7] * 6, [7] * 8, [7] * 12])
    assert rewards == [0.0, -0.5, -1.0]
    # The rest of these completions was written by tools.
    assert punish(completion_ids=[[7] * 12, [7] * 12], completion_lengths=[6, 8]) == [0.0, -0.5]
    punish = pickle.loads(pickle.dumps(SoftOverlongPunishment(10, 4, penalty_factor=2.0)))
    assert punish(completion_ids=[[7] * 8]) == [-1.0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ((10, 0, 1.0), "got 0"),
        ((10, 11, 1.0), r"\(11 tokens\).*\(10 tokens\).* is 2 here\."),
        ((10, 4, -0.5), "got -0.5"),
        ((10, 4, float("nan")), "got nan"),
    ],
)
def test_the_error_for_a_setting_that_is_not_allowed_contains_the_number(settings, message):
    with pytest.raises(ValueError, match=message):
        SoftOverlongPunishment(*settings)
    max_length, buffer_length, factor = settings
    with pytest.raises(ValueError, match=message):
        soft_overlong_punishment([1], max_length=max_length, buffer_length=buffer_length, penalty_factor=factor)


def test_rewards_are_clamped_and_moved_to_the_target_range_whose_ends_are_met_exactly():
    scaled = scale_reward([0.0, 0.25, 1.0], source_min=0.0, source_max=1.0, target_min=-1.0, target_max=1.0)
    assert scaled == [-1.0, -0.5, 1.0]
    scaled = scale_reward([-3.0, 7.0, math.inf], source_min=0.0, source_max=2.0, target_min=10.0, target_max=20.0)
    assert scaled == [10.0, 20.0, 20.0]

    scaled = scale_reward([0.1, 0.7], source_min=0.1, source_max=0.7, target_min=-0.3, target_max=0.9)
    assert scaled == [-0.3, 0.9]


def test_a_sample_without_a_reward_gets_no_scaled_reward():
    scaled = scale_reward([None, math.nan, 1], source_min=0.0, source_max=1.0, target_min=0.0, target_max=5.0)
    assert scaled == pytest.approx([math.nan, math.nan, 5.0], nan_ok=True)


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ((1.0, 1.0, 0.0, 1.0), "source minimum.*got 1.0 and 1.0"),
        ((0.0, 1.0, 2.0, -2.0), "target minimum.*got 2.0 and -2.0"),
        ((0.0, math.inf, 0.0, 1.0), "source minimum.*got 0.0 and inf"),
    ],
)
def test_the_error_for_an_empty_or_infinite_range_contains_its_numbers(bounds, message):
    names = ("source_min", "source_max", "target_min", "target_max")
    with pytest.raises(ValueError, match=message):
        scale_reward([0.5], **dict(zip(names, bounds, strict=True)))

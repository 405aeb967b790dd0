# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
import math

import pytest

from trl_dapo.rewards import scale_reward


pytestmark = pytest.mark.fast


def test_rewards_are_clamped_and_moved_to_the_target_range_whose_ends_are_met_exactly():
    scaled = scale_reward([0.0, 0.25, 1.0], source_min=0.0, source_max=1.0, target_min=-1.0, target_max=1.0)
    assert scaled == [-1.0, -0.5, 1.0]
    scaled = scale_reward([-3.0, 7.0, math.inf], source_min=0.0, source_max=2.0, target_min=10.0, target_max=20.0)
    assert scaled == [10.0, 20.0, 20.0]

    scaled = scale_reward([0.1, 0.7], source_min=0.1, source_max=0.7, target_min=-0.3, target_max=0.9)
    assert scaled == [-0.3, 0.9]


def test_a_sample_without_a_reward_stays_without():
    scaled = scale_reward([None, math.nan, 1], source_min=0.0, source_max=1.0, target_min=0.0, target_max=5.0)
    assert scaled == pytest.approx([math.nan, math.nan, 5.0], nan_ok=True)


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ((1.0, 1.0, 0.0, 1.0), "source range.*got 1.0 to 1.0"),
        ((0.0, 1.0, 2.0, -2.0), "target range.*got 2.0 to -2.0"),
        ((0.0, math.inf, 0.0, 1.0), "source range.*got 0.0 to inf"),
    ],
)
def test_an_empty_or_endless_range_is_refused_with_its_numbers(bounds, message):
    names = ("source_min", "source_max", "target_min", "target_max")
    with pytest.raises(ValueError, match=message):
        scale_reward([0.5], **dict(zip(names, bounds, strict=True)))

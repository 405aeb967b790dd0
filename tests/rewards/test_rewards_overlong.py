# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
import pickle

import pytest

from trl_dapo.rewards import SoftOverlongPunishment, soft_overlong_punishment


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
    # Of some of which tools wrote the rest.
    assert punish(completion_ids=[[7] * 12, [7] * 12], completion_lengths=[6, 8]) == [0.0, -0.5]
    punish = pickle.loads(pickle.dumps(SoftOverlongPunishment(10, 4, penalty_factor=2.0)))
    assert punish(completion_ids=[[7] * 8]) == [-1.0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ((10, 0, 1.0), "got 0"),
        ((10, 11, 1.0), r"\(11 tokens\).*\(10 tokens\).*: 2\."),
        ((10, 4, -0.5), "got -0.5"),
        ((10, 4, float("nan")), "got nan"),
    ],
)
def test_settings_without_a_meaning_are_refused_with_the_number(settings, message):
    with pytest.raises(ValueError, match=message):
        SoftOverlongPunishment(*settings)
    max_length, buffer_length, factor = settings
    with pytest.raises(ValueError, match=message):
        soft_overlong_punishment([1], max_length=max_length, buffer_length=buffer_length, penalty_factor=factor)

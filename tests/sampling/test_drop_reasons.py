# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Which groups train, by hand."""

import math

import pytest
import torch

from trl_dapo.sampling.drop_reasons import REASONS, Criterion, count_correct, drop_reasons, is_correct, task_reward


pytestmark = pytest.mark.fast


NAN, INF = math.nan, math.inf


def reason_of(rewards, masked=None, **criterion):
    masked = None if masked is None else torch.tensor([masked], dtype=torch.bool)
    (reason,) = drop_reasons(torch.tensor([rewards]), masked, Criterion(**criterion))
    return reason


def test_a_group_with_one_winner_is_accepted():
    assert reason_of([0.0, 0.0, 1.0, 0.0]) is None


def test_an_all_wrong_group_is_dropped():
    assert reason_of([0.0, 0.0, 0.0]) == "all_wrong"
    assert reason_of([-1.0, -1.0, -1.0]) == "all_wrong"


def test_an_all_correct_group_is_dropped():
    assert reason_of([1.0, 1.0, 1.0]) == "all_correct"


def test_graded_rewards_without_spread_are_constant():
    assert reason_of([0.3] * 8) == "constant"


def test_full_score_is_the_callers():
    assert reason_of([1.0, 1.0], full_score=2.0) == "constant"
    assert reason_of([2.0, 2.0], full_score=2.0) == "all_correct"


def test_what_is_short_of_the_full_score_by_the_tolerance_is_all_correct():
    assert reason_of([1.5, 1.5], full_score=2.0, tolerance=0.5) == "all_correct"
    assert reason_of([1.25, 1.25], full_score=2.0, tolerance=0.5) == "constant"


@pytest.mark.parametrize("num_generations", [8, 16, 32, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_float_noise_of_a_constant_group_never_passes(num_generations, dtype):
    """A standard deviation as the criterion would accept 186 of these 401 groups in float32."""
    values_N = torch.arange(-200, 201, dtype=dtype) / 100
    reasons = drop_reasons(values_N[:, None].repeat(1, num_generations), None, Criterion())
    assert None not in reasons
    assert reasons.count("all_wrong") == 201  # -2.00, -1.99 ... 0.00
    assert reasons.count("constant") == 99  # 0.01 ... 0.99
    assert reasons.count("all_correct") == 101  # 1.00 ... 2.00


def test_spread_within_the_tolerance_is_none():
    assert reason_of([0.5, 0.5 + 1e-7]) == "constant"
    assert reason_of([0.5, 0.5 + 1e-3]) is None
    assert reason_of([0.5, 0.5 + 1e-3], tolerance=0.01) == "constant"


def test_unscored_completions_count_for_nothing():
    assert reason_of([NAN, 0.0, 0.0]) == "all_wrong"  # counted as zero it would hide, counted as NaN it would pass
    assert reason_of([NAN, 1.0, 1.0]) == "all_correct"  # as a zero it would fake a spread
    assert reason_of([NAN, 1.0, 0.0]) is None


def test_fewer_than_two_scored_completions_are_unscored():
    assert reason_of([NAN, NAN, NAN]) == "unscored"
    assert reason_of([NAN, 1.0, NAN]) == "unscored"


def test_an_infinite_reward_never_trains():
    assert reason_of([INF, 0.0, 1.0]) == "unscored"
    assert reason_of([-INF, 0.0, 1.0]) == "unscored"
    assert reason_of([-INF, 0.0, 1.0], masked=[1, 0, 0]) == "unscored"  # it still enters the mean


def test_a_group_whose_only_winner_is_masked_is_dropped():
    assert reason_of([0.0, 0.0, 0.0, 1.0], masked=[0, 0, 0, 1]) == "masked"


def test_a_group_whose_only_loser_is_masked_is_dropped():
    assert reason_of([1.0, 1.0, 0.0], masked=[0, 0, 1]) == "masked"


def test_a_masked_completion_does_not_hide_the_spread_of_the_others():
    assert reason_of([0.0, 1.0, 1.0], masked=[0, 0, 1]) is None


def test_fewer_than_two_live_completions_are_masked():
    assert reason_of([0.0, 1.0, 0.0], masked=[1, 1, 0]) == "masked"
    assert reason_of([0.0, 0.0, 0.0], masked=[1, 1, 1]) == "masked"
    assert reason_of([NAN, 1.0, 0.0], masked=[0, 0, 1]) == "masked"


def test_masking_is_not_blamed_for_a_group_that_would_be_dropped_anyway():
    assert reason_of([0.0, 0.0, 1.0], masked=[0, 0, 1], min_accuracy=0.4) == "all_wrong"  # 1/3 is outside the band
    assert reason_of([0.0, 0.0, 0.0], masked=[0, 0, 1]) == "all_wrong"
    assert reason_of([1.0, 1.0, 1.0], masked=[0, 0, 1]) == "all_correct"
    assert reason_of([NAN, NAN, 1.0], masked=[1, 0, 0]) == "unscored"


def test_the_accuracy_band_is_exclusive():
    band = {"min_accuracy": 0.25, "max_accuracy": 0.75}
    assert reason_of([1.0, 0.0, 0.0, 0.0], **band) == "outside_band"  # 1/4
    assert reason_of([1.0, 1.0, 0.0, 0.0], **band) is None  # 2/4
    assert reason_of([1.0, 1.0, 1.0, 0.0], **band) == "outside_band"  # 3/4


@pytest.mark.parametrize("num_correct", range(1, 10))
def test_a_bound_that_is_not_a_binary_fraction_is_exclusive_too(num_correct):
    rewards = [1.0] * num_correct + [0.0] * (10 - num_correct)
    assert reason_of(rewards, min_accuracy=num_correct / 10) == "outside_band"
    assert reason_of(rewards, max_accuracy=num_correct / 10) == "outside_band"


def test_the_accuracy_is_that_of_live_scored_completions():
    rewards, masked = [1.0, 0.0, 1.0, 1.0, NAN], [0, 0, 1, 1, 0]
    assert reason_of(rewards, masked, max_accuracy=0.6) is None  # 1/2, not 3/4 or 3/5


def test_a_tightened_end_does_not_bind_the_other():
    assert reason_of([0.4, 0.6], min_accuracy=0.1) is None  # accuracy 1, no upper bound
    assert reason_of([-1.0, -2.0], max_accuracy=0.9) is None  # accuracy 0, no lower bound


def test_graded_rewards_that_differ_above_the_threshold_are_accepted():
    assert reason_of([0.4, 0.6, 0.9]) is None


def test_a_reward_at_the_threshold_is_not_correct_in_any_precision():
    assert reason_of([0.3, 0.3], accuracy_threshold=0.3) == "all_wrong"  # float32(0.3) is above the double 0.3
    assert reason_of([0.3, 0.2], accuracy_threshold=0.3, min_accuracy=0.1) == "outside_band"


def test_groups_are_judged_apart_and_whole():
    rewards_NG = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0], [0.5, 0.5, 0.5], [0.0, 1.0, 1.0]])
    assert drop_reasons(rewards_NG, None, Criterion()) == [None, "all_wrong", "all_correct", "constant", None]


def test_the_odd_one_out_keeps_its_group():
    """Judged row by row against the others' deviation, the only winner would be dropped and 15 equal rows kept."""
    assert reason_of([1.0] + [0.0] * 15) is None
    assert reason_of([0.0] + [1.0] * 15) is None


def test_equal_prompts_stay_two_groups():
    """Merged, two constant groups of one prompt would pass as one of 2 G with spread."""
    assert drop_reasons(torch.tensor([[0.0, 0.0], [1.0, 1.0]]), None, Criterion()) == ["all_wrong", "all_correct"]


def test_every_verdict_is_one_of_the_reasons():
    rewards_NG = torch.tensor(
        [[1.0, 1.0, 1.0], [0.0, 0.0, 0.0], [0.5, 0.5, 0.5], [1.0, 0.0, 0.0], [NAN, NAN, 1.0], [1.0, 1.0, 0.0]]
    )
    masked_NG = torch.zeros(6, 3, dtype=torch.bool)
    masked_NG[5, 2] = True
    assert drop_reasons(rewards_NG, masked_NG, Criterion(min_accuracy=0.4)) == list(REASONS)


# ---- The deciding reward ----


def test_only_the_deciding_columns_count():
    rewards_BF = torch.tensor([[1.0, -0.5, 1.0], [0.0, -0.1, 1.0]])
    reward_B = task_reward(rewards_BF, torch.tensor([2.0, 1.0, 0.5]), torch.tensor([True, False, True]))
    assert reward_B.tolist() == [2.5, 0.5]


def test_an_all_wrong_group_does_not_pass_on_a_length_penalty():
    rewards_BF = torch.tensor([[0.0, 0.0], [0.0, -0.3], [0.0, -0.7], [0.0, -1.0]])
    weights_F, is_task_F = torch.ones(2), torch.tensor([True, False])
    assert drop_reasons(task_reward(rewards_BF, weights_F, is_task_F).view(1, 4), None, Criterion()) == ["all_wrong"]


def test_a_function_that_gave_no_reward_adds_nothing():
    rewards_BF = torch.tensor([[1.0, NAN], [NAN, 1.0], [NAN, NAN]])
    reward_B = task_reward(rewards_BF, torch.tensor([1.0, 3.0]), torch.tensor([True, True]))
    assert reward_B[:2].tolist() == [1.0, 3.0]
    assert reward_B[2].isnan()


def test_a_completion_scored_by_other_functions_only_is_unscored():
    reward_B = task_reward(torch.tensor([[NAN, 1.0]]), torch.ones(2), torch.tensor([True, False]))
    assert reward_B.isnan().tolist() == [True]


def test_the_sum_is_made_in_double_precision():
    rewards_BF = torch.tensor([[2.0**24, 1.0]])  # in float32 the sum would be 2^24 again
    assert task_reward(rewards_BF, torch.ones(2), torch.tensor([True, True])).item() == 2**24 + 1


def test_a_completion_is_correct_above_the_threshold_by_more_than_the_tolerance():
    criterion = Criterion(accuracy_threshold=0.5, tolerance=0.1)
    assert is_correct(torch.tensor([0.5, 0.55, 0.65, NAN]), criterion).tolist() == [False, False, True, False]


def test_the_rest_of_a_group_counts_as_the_group_does():
    """Right, wrong, and then twice right: 2 of the 2 new ones. Scores of 0.2 and 0.4 have their upper half right."""
    rewards = torch.tensor([[1.0, 0.0, 1.0, 1.0], [0.2, 0.4, 0.4, 0.4]])
    assert count_correct(rewards, None, [None, None], Criterion()) == [(3, 4), (3, 4)]
    assert count_correct(rewards, None, [None, None], Criterion(), num_known=2) == [(2, 2), (2, 2)]

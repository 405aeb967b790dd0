# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The decision whether a group is accepted, with examples computed by hand."""

import math
import re

import pytest
import torch

from trl_dapo.sampling.drop_reasons import REASONS, Criterion, count_correct, drop_reasons, is_correct, task_reward
from trl_dapo.sampling.group_filter import apply_group_filter


pytestmark = pytest.mark.fast


NAN, INF = math.nan, math.inf


def reason_of(rewards, masked=None, **criterion):
    masked = None if masked is None else torch.tensor([masked], dtype=torch.bool)
    (reason,) = drop_reasons(torch.tensor([rewards]), masked, Criterion(**criterion))
    return reason


BAND = {"min_accuracy": 0.25, "max_accuracy": 0.75}
VERDICTS = {
    "one winner": ([0.0, 0.0, 1.0, 0.0], {}, None),
    # If each row were compared with the deviation of the others, the only correct row would be dropped and 15 equal
    # ones kept.
    "one winner of 16": ([1.0] + [0.0] * 15, {}, None),
    "all wrong": ([0.0, 0.0, 0.0], {}, "all_wrong"),
    "all below zero": ([-1.0, -1.0, -1.0], {}, "all_wrong"),
    "all correct": ([1.0, 1.0, 1.0], {}, "all_correct"),
    "graded without spread": ([0.3] * 8, {}, "constant"),
    "graded, above the threshold": ([0.4, 0.6, 0.9], {}, None),
    "short of the full score": ([1.0, 1.0], {"full_score": 2.0}, "constant"),
    "the full score": ([2.0, 2.0], {"full_score": 2.0}, "all_correct"),
    "short of the full score by the tolerance": ([1.5, 1.5], {"full_score": 2.0, "tolerance": 0.5}, "all_correct"),
    "spread within the tolerance": ([0.5, 0.5 + 1e-7], {}, "constant"),
    "spread beyond the tolerance": ([0.5, 0.5 + 1e-3], {}, None),
    "spread within a wider one": ([0.5, 0.5 + 1e-3], {"tolerance": 0.01}, "constant"),
    "spread of the tolerance": ([0.5, 0.75], {"full_score": 2.0, "tolerance": 0.25}, "constant"),
    # If an unscored completion counted as zero, it would hide or create a difference; as NaN, the group would be
    # accepted.
    "unscored, and all wrong": ([NAN, 0.0, 0.0], {}, "all_wrong"),
    "unscored, and all correct": ([NAN, 1.0, 1.0], {}, "all_correct"),
    "unscored, and a winner": ([NAN, 1.0, 0.0], {}, None),
    "none scored": ([NAN, NAN, NAN], {}, "unscored"),
    "one scored": ([NAN, 1.0, NAN], {}, "unscored"),
    "infinite": ([INF, 0.0, 1.0], {}, "unscored"),
    "infinite and masked": ([-INF, 0.0, 1.0], {"masked": [1, 0, 0]}, "unscored"),  # it still counts for the mean
    "the only winner is masked": ([0.0, 0.0, 0.0, 1.0], {"masked": [0, 0, 0, 1]}, "masked"),
    "one of two winners is masked": ([0.0, 1.0, 1.0], {"masked": [0, 0, 1]}, None),
    "one is live": ([0.0, 1.0, 0.0], {"masked": [1, 1, 0]}, "masked"),
    "no completion counts": ([0.0, 0.0, 0.0], {"masked": [1, 1, 1]}, "masked"),
    "one of the live is scored": ([NAN, 1.0, 0.0], {"masked": [0, 0, 1]}, "masked"),
    # Masking is not the reason if a group would be dropped anyway: 1/3 is outside the band.
    "masked, and below the band": ([0.0, 0.0, 1.0], {"masked": [0, 0, 1], "min_accuracy": 0.4}, "all_wrong"),
    "masked, and all correct": ([1.0, 1.0, 1.0], {"masked": [0, 0, 1]}, "all_correct"),
    "masked, and unscored": ([NAN, NAN, 1.0], {"masked": [1, 0, 0]}, "unscored"),
    "at the lower end of the band": ([1.0, 0.0, 0.0, 0.0], BAND, "outside_band"),
    "inside the band": ([1.0, 1.0, 0.0, 0.0], BAND, None),
    "at the upper end of the band": ([1.0, 1.0, 1.0, 0.0], BAND, "outside_band"),
    # An accuracy of 1/2, not 3/4 or 3/5.
    "accuracy of the live and scored": ([1, 0, 1, 1, NAN], {"masked": [0, 0, 1, 1, 0], "max_accuracy": 0.6}, None),
    "accuracy 1, no upper end": ([0.4, 0.6], {"min_accuracy": 0.1}, None),
    "accuracy 0, no lower end": ([-1.0, -2.0], {"max_accuracy": 0.9}, None),
    # A reward at the threshold is not correct in any precision. float32(0.3) is above the double 0.3.
    "at the threshold": ([0.3, 0.3], {"accuracy_threshold": 0.3}, "all_wrong"),
    "above the threshold by the tolerance": ([0.75] * 2, {"accuracy_threshold": 0.5, "tolerance": 0.25}, "all_wrong"),
    "at the threshold, and below it": ([0.3, 0.2], {"accuracy_threshold": 0.3, "min_accuracy": 0.1}, "outside_band"),
}


@pytest.mark.parametrize("case", VERDICTS)
def test_a_group_trains_where_live_scored_completions_differ_and_lie_within_the_band(case):
    rewards, options, reason = VERDICTS[case]
    assert reason_of(rewards, **options) == reason


@pytest.mark.parametrize("num_generations", [8, 16, 32, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_float_noise_of_a_constant_group_never_passes(num_generations, dtype):
    """With a standard deviation as the criterion, 186 of these 401 groups would be accepted in float32."""
    values_N = torch.arange(-200, 201, dtype=dtype) / 100
    reasons = drop_reasons(values_N[:, None].repeat(1, num_generations), None, Criterion())
    assert None not in reasons
    assert reasons.count("all_wrong") == 201  # -2.00, -1.99 ... 0.00
    assert reasons.count("constant") == 99  # 0.01 ... 0.99
    assert reasons.count("all_correct") == 101  # 1.00 ... 2.00


@pytest.mark.parametrize("num_correct", range(1, 10))
def test_a_bound_that_is_not_a_binary_fraction_is_exclusive_too(num_correct):
    rewards = [1.0] * num_correct + [0.0] * (10 - num_correct)
    assert reason_of(rewards, min_accuracy=num_correct / 10) == "outside_band"
    assert reason_of(rewards, max_accuracy=num_correct / 10) == "outside_band"


def test_groups_are_judged_apart_and_whole():
    """Joined into one, two constant groups of a prompt would be accepted as a larger group whose rewards differ."""
    rewards_NG = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0], [0.5, 0.5, 0.5], [0.0, 1.0, 1.0]])
    assert drop_reasons(rewards_NG, None, Criterion()) == [None, "all_wrong", "all_correct", "constant", None]
    assert {reason for *_, reason in VERDICTS.values()} == {None, *REASONS}


# ---- The reward that decides ----


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
    criterion = Criterion(accuracy_threshold=0.5, tolerance=0.25)
    assert is_correct(torch.tensor([0.5, 0.75, 0.8, NAN]), criterion).tolist() == [False, False, True, False]


def test_the_rest_of_a_group_counts_as_the_group_does():
    """
    Correct, incorrect, and then twice correct: 2 of the 2 new ones. For graded scores, those above the middle count as
    correct.
    """
    rewards = torch.tensor([[1.0, 0.0, 1.0, 1.0], [0.2, 0.4, 0.4, 0.4], [0.25, 0.5, 0.75, 0.5]])
    assert count_correct(rewards, None, [None] * 3, Criterion()) == [(3, 4), (3, 4), (1, 4)]
    assert count_correct(rewards, None, [None] * 3, Criterion(), num_known=2) == [(2, 2), (2, 2), (1, 2)]


# ---- A user's rule ----


def test_a_users_rule_sees_each_groups_rewards_by_name_and_its_rows():
    seen = []

    def rule(rewards, rows):
        seen.append((rewards, [row["completion"] for row in rows]))
        return "easy" if sum(rewards["accuracy"]) > 1 else None

    rewards = torch.tensor([[1.0, 0.5], [1.0, math.nan], [0.0, 0.5], [1.0, 0.25]])
    rows = [{"completion": text} for text in "abcd"]
    assert apply_group_filter(rule, rewards, ["accuracy", "style"], rows, 2) == ["easy", None]
    assert seen[0][0]["accuracy"] == [1.0, 1.0]
    assert math.isnan(seen[0][0]["style"][1])
    assert seen[1] == ({"accuracy": [0.0, 1.0], "style": [0.5, 0.25]}, ["c", "d"])


def test_a_rule_may_change_the_rows_that_it_is_handed():
    rows = [{"prompt": [{"content": "2+2"}], "completion": [{"content": text}]} for text in ("4", "5")]

    def careless(rewards, rows):
        for row in rows:
            row["prompt"][0]["content"] = row["completion"][0]["content"] = "gone"

    assert apply_group_filter(careless, torch.zeros(2, 1), ["accuracy"], rows, 2) == [None]
    assert [(row["prompt"], row["completion"]) for row in rows] == [
        ([{"content": "2+2"}], [{"content": "4"}]),
        ([{"content": "2+2"}], [{"content": "5"}]),
    ]


@pytest.mark.parametrize("said", ["", False, 0, ["never right"]])
def test_what_is_no_reason_is_refused(said):
    message = f"`group_filter` returned {said!r}: it must return `None` to train on the group, or the reason"
    with pytest.raises(TypeError, match=re.escape(message)):
        apply_group_filter(lambda rewards, rows: said, torch.zeros(2, 1), ["right"], [{}] * 2, 2)

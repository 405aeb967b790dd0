# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The task reward: which functions decide, which completions are correct, and the line that describes it."""

import math

import pytest
import torch

from trl_dapo.rewards.checks import distinct_names
from trl_dapo.rewards.task_reward import TaskReward
from trl_dapo.sampling.drop_reasons import drop_reasons


pytestmark = pytest.mark.fast


def choose(names, chosen=None, weights=None, **options):
    return TaskReward.choose(names, torch.tensor(weights or [1.0] * len(names)), chosen, **options)


def test_the_only_function_except_length_penalties_or_the_named_one_decides():
    task = choose(["accuracy", "soft_overlong_punishment"])
    assert (task.names, task.shaping, task.is_decided) == (("accuracy",), ("soft_overlong_punishment",), True)
    task = choose(["accuracy", "format"], ["accuracy", "accuracy"], weights=[2.0, 0.5])
    assert (task.names, task.shaping) == (("accuracy",), ("format",))
    assert task.weighted_sum(torch.tensor([[1.0, 1.0], [0.0, 1.0]])).tolist() == [1.0, 0.0]
    assert task.is_correct(torch.tensor([[1.0, 0.0], [0.0, 1.0]])).tolist() == [True, False]


def test_several_functions_that_are_not_named_decide_by_their_sum_without_correctness():
    task = choose(["accuracy", "format"], weights=[2.0, 0.5])
    assert (task.names, task.shaping, task.is_decided) == (("accuracy", "format"), (), False)
    rewards = torch.tensor([[1.0, 1.0], [0.0, 1.0], [0.0, 1.0], [0.0, 1.0]])
    assert task.weighted_sum(rewards).tolist() == [2.5, 0.5, 0.5, 0.5]
    # The second group is well-formatted but incorrect. Without correctness it is constant, not all correct.
    assert drop_reasons(task.weighted_sum(rewards).view(2, 2), None, task.criterion) == [None, "constant"]


@pytest.mark.parametrize(
    "options", [{"min_accuracy": 0.25}, {"max_accuracy": 0.75}, {"accuracy_threshold": 0.5}], ids=str
)
def test_a_setting_that_needs_correctness_asks_for_the_name(options):
    (name,) = options
    with pytest.raises(
        ValueError, match=f"`dynamic_sampling_{name}=.*several reward functions decide together: 'accuracy', "
    ):
        choose(["accuracy", "format"], **options)
    assert choose(["accuracy", "format"], ["accuracy"], **options).is_decided
    why = choose(["accuracy", "format"]).why_no_correctness
    assert "needs to know which completions are correct, but several" in why
    assert "`dynamic_sampling_rewards`" in why


def test_if_the_only_function_is_a_length_penalty_it_decides_without_correctness():
    alone = choose(["soft_overlong_punishment"])
    assert (alone.names, alone.is_decided) == (("soft_overlong_punishment",), False)


def test_each_prompt_counts_once_in_the_accuracy_and_skipped_ones_with_their_expectation():
    groups = [torch.tensor([[1.0], [0.0]]), torch.ones(4, 1), torch.full((2, 1), math.nan)]
    assert choose(["accuracy"]).metrics(groups, [0.3]) == {"task_accuracy": pytest.approx((0.5 + 1 + 0.3) / 3)}
    why = choose(["score"], models=["score"]).why_no_correctness
    assert "'score' gives scores. Set `dynamic_sampling_accuracy_threshold`" in why


def test_the_best_reward_distinguishes_all_correct_from_constant():
    task = choose(["accuracy"], best=10.0)
    assert drop_reasons(torch.tensor([[10.0, 10.0], [2.0, 2.0]]), None, task.criterion) == ["all_correct", "constant"]


@pytest.mark.parametrize("total", [100.0, 1000.3])
def test_two_rewards_of_one_sum_are_equal_however_large_and_however_they_share_it(total):
    """Each is rounded to float32 by itself, so that the sums are up to 1e-4 apart."""
    task = choose(["accuracy", "style"])
    first_B = torch.rand(4000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * total
    rewards_BF = torch.stack([first_B, total - first_B], dim=1).float()
    assert task.weighted_sum(rewards_BF).unique().numel() > 1
    assert task.drop_reasons(rewards_BF, None, 8) == ["constant"] * 500
    # What they share may be far less than either: here the sum is 0.3.
    rewards_BF = torch.stack([total + first_B, 0.3 - total - first_B], dim=1).float()
    assert task.drop_reasons(rewards_BF, None, 8) == ["constant"] * 500


def test_groups_with_different_rewards_are_accepted_however_large_the_rewards_are():
    task = choose(["score"])
    assert task.drop_reasons(torch.tensor([[1e6], [1e6 + 1]]), None, 2) == [None]
    assert task.drop_reasons(torch.tensor([[1000.3], [1000.301]]), None, 2) == [None]


def test_a_reward_that_equals_the_threshold_is_not_above_it_however_large():
    """float32(100.3) is 100.30000305, which is above the double 100.3 by more than 1e-6."""
    task = choose(["score"], accuracy_threshold=100.3)
    rewards_BF = torch.tensor([[100.3], [100.4]])
    assert task.is_correct(rewards_BF).tolist() == [False, True]
    assert task.metrics([rewards_BF]) == {"task_accuracy": 0.5}
    assert task.count_correct(rewards_BF, None, [None]) == [(1, 2)]
    assert task.drop_reasons(rewards_BF[[0, 0]], None, 2) == ["all_wrong"]
    task = choose(["accuracy", "style"], ["accuracy", "style"], accuracy_threshold=100.3)
    assert task.is_correct(torch.tensor([[70.1, 30.2], [60.2, 40.1], [60.2, 40.2]])).tolist() == [False, False, True]


def test_values_that_differ_only_by_rounding_count_as_one():
    """100.3 and its neighbour in float32, which is 7.6e-6 above: with 0 two values, which are verdicts."""
    next_to = torch.nextafter(torch.tensor(100.3), torch.tensor(101.0)).item()
    assert choose(["score"]).having_seen(torch.tensor([[0.0], [100.3], [next_to]])).has_correctness
    assert not choose(["score"]).having_seen(torch.tensor([[0.0], [100.3], [100.4]])).has_correctness


def test_a_group_is_all_correct_by_the_best_reward_of_the_functions_that_scored_it():
    """Each of two named rewards is `None` for the other's prompts. The best sum is 1 there, and 2 if both score."""
    task = choose(["math", "code"], ["math", "code"])
    nan = math.nan
    rewards_BF = torch.tensor([[1.0, nan]] * 2 + [[nan, 1.0]] * 2 + [[1.0, 1.0]] * 2 + [[1.0, 0.0]] * 2)
    assert task.drop_reasons(rewards_BF, None, 2) == ["all_correct", "all_correct", "all_correct", "constant"]
    # A completion that both functions scored could have got 2. A completion that neither scored does not count.
    rewards_BF = torch.tensor([[1.0, nan], [1.0, 0.0], [1.0, nan], [nan, nan], [1.0, nan], [0.5, 0.5]])
    assert task.drop_reasons(rewards_BF[:2], None, 2) == ["constant"]
    assert task.drop_reasons(rewards_BF[[2, 2, 3]], None, 3) == ["all_correct"]
    # Weights and the ends of `reward_scaling` count: 0.5 x 10 of one, 2 x 10 of the other.
    task = choose(["math", "code"], ["math", "code"], weights=[0.5, 2.0], best=10.0)
    rewards_BF = torch.tensor([[10.0, nan]] * 2 + [[nan, 10.0]] * 2 + [[nan, 2.5]] * 2)
    assert task.drop_reasons(rewards_BF, None, 2) == ["all_correct", "all_correct", "constant"]


@pytest.mark.parametrize("weight", [0.0, 0.5, 3.0])
def test_the_weight_of_the_deciding_reward_does_not_change_its_threshold(weight):
    """With weight 0 accuracy only decides which groups are accepted, as in verl's recipe."""
    task = choose(["accuracy", "style"], ["accuracy"], weights=[weight, 1.0], accuracy_threshold=0.5)
    rewards = torch.tensor([[1.0, 0.0], [0.4, 0.0], [1.0, 0.0], [1.0, 0.0]])
    assert task.is_correct(rewards).tolist() == [True, False, True, True]
    assert drop_reasons(task.weighted_sum(rewards).view(2, 2), None, task.criterion) == [None, "all_correct"]


def test_less_of_a_reward_with_a_negative_weight_is_better():
    task = choose(["errors"], weights=[-0.25], accuracy_threshold=-1.5)
    assert task.is_correct(torch.tensor([[1.0], [2.0]])).tolist() == [True, False]
    assert "A completion is correct if minus 'errors' is above -1.5." in task.describe()


def test_a_reward_of_weight_0_that_is_not_named_is_only_logged():
    task = choose(["accuracy", "length"], weights=[1.0, 0.0])
    assert (task.names, task.shaping, task.is_decided) == (("accuracy",), (), True)
    # A completion that accuracy cannot score does not become incorrect by a reward without weight.
    assert math.isnan(task.weighted_sum(torch.tensor([[math.nan, 7.0]])).item())


def test_names_that_cannot_decide_are_refused():
    with pytest.raises(ValueError, match=r"names 'style', whose weight in `reward_weights` is 0.*Name only this"):
        choose(["accuracy", "style"], ["accuracy", "style"], weights=[1.0, 0.0])
    with pytest.raises(
        ValueError, match=r"names '<lambda>', which is not a .* Choose from '<lambda>_1', '<lambda>_2'\."
    ):
        choose(distinct_names(["<lambda>", "<lambda>"]), ["<lambda>"])


def test_functions_with_the_same_name_get_numbers_that_no_other_name_has():
    assert distinct_names(["f", "g", "f", "f_1"]) == ["f_2", "g", "f_3", "f_1"]
    assert distinct_names(["f", "g"]) == ["f", "g"]


def test_length_penalties_never_decide_next_to_another_function():
    penalties = distinct_names(["soft_overlong_punishment_reward"] * 2)
    assert choose(["accuracy", *penalties]).names == ("accuracy",)
    with pytest.raises(ValueError, match=r"a length penalty"):
        choose(["accuracy", *penalties], penalties[:1])


@pytest.mark.parametrize(
    ("task", "filtered", "expected"),
    [
        (
            choose(["accuracy", "format"], ["accuracy"], min_accuracy=0.25),
            False,
            "A group is accepted if 'accuracy' differs between its completions, and if the share of correct "
            "completions is above 0.25 and below 1. A completion is correct if 'accuracy' is above 0. 'format' only "
            "shapes the advantages.",
        ),
        (
            choose(["accuracy", "format", "soft_overlong_punishment"]),
            False,
            "A group is accepted if the weighted sum of 'accuracy', 'format' differs between its completions. No "
            "reward function says which completions are correct, so avg@k, pass@k and maj@k are left out. "
            "'soft_overlong_punishment' only shapes the advantages.",
        ),
        (
            choose(["accuracy", "format"]),
            True,
            "`group_filter` decides which groups are accepted. No reward function says which completions are correct, "
            "so avg@k, pass@k and maj@k are left out. Name the function that does in `dynamic_sampling_rewards`.",
        ),
        (
            choose(["accuracy"]),
            True,
            "`group_filter` decides which groups are accepted. A completion is correct if 'accuracy' is above 0. If "
            "this reward takes more than two values, no completion counts as correct, unless you set "
            "`dynamic_sampling_accuracy_threshold`.",
        ),
    ],
)
def test_the_line_at_the_start_says_which_rewards_decide_and_which_only_shape(task, filtered, expected):
    assert (task.describe(True) if filtered else task.describe()) == expected


@pytest.mark.parametrize(
    ("options", "rewards", "accuracy"),
    [
        ({}, [0.0, 1.0, 1.0, math.nan], 2 / 3),
        ({}, [-1.0, 1.0, -1.0, -1.0], 1 / 4),
        ({}, [0.0, 1.0, 2.0, 2.0], None),  # a count; all but the first would be "correct"
        ({"models": ["score"]}, [-0.5, -0.5, -0.5, -0.5], None),  # scores; no completion would be correct
        ({"models": ["score"], "accuracy_threshold": -1.0}, [-0.5, -0.5, -2.0, -0.25], 3 / 4),
        ({"chosen": ["score"]}, [0.0, 0.5, 1.0, 1.0], 3 / 4),
    ],
)
def test_rewards_say_what_is_correct_if_they_have_two_values_or_were_named(options, rewards, accuracy):
    task, rewards_BF = choose(["score"], **options), torch.tensor(rewards)[:, None]
    # Two rewards at a time, as from two rounds.
    seen = task.having_seen(rewards_BF[:2]).having_seen(rewards_BF[2:])
    assert seen.metrics([rewards_BF]) == ({} if accuracy is None else {"task_accuracy": pytest.approx(accuracy)})
    assert ("is correct if" in seen.describe()) == (accuracy is not None)
    assert seen.drop_reasons(rewards_BF, None, 4) == task.drop_reasons(rewards_BF, None, 4)
    ((_, num_scored),) = seen.count_correct(rewards_BF, None, [None])
    assert num_scored == rewards_BF.isfinite().sum()

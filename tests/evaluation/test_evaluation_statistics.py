# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Figures of an evaluation and their intervals, by hand."""

import itertools
import math

import numpy as np
import pytest

from trl_dapo.evaluation import avg_at_k, estimate_mean, estimate_share, maj_at_k, pass_at_k


pytestmark = pytest.mark.fast


def verdicts(num_correct, k):
    return [[True] * num_correct + [False] * (k - num_correct)]


def test_avg_at_k_is_the_share_of_correct_completions_of_each_problem():
    assert avg_at_k([[True, False, False, False], [True, True, True, False]]).tolist() == [0.25, 0.75]


@pytest.mark.parametrize(("num_correct", "k"), list(itertools.product(range(7), range(1, 7))))
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_completion(num_correct, k):
    subsets = list(itertools.combinations(verdicts(num_correct, 6)[0], k))
    (probability,) = pass_at_k(verdicts(num_correct, 6), k)
    assert probability == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


def test_pass_at_k_by_hand():
    # 5 completions, 2 correct, 3 tries: one way in C(5, 3) = 10 to draw the three wrong ones
    assert pass_at_k(verdicts(2, 5), 3).tolist() == pytest.approx([0.9])


def test_pass_at_k_holds_where_binomials_have_hundreds_of_digits():
    exact = 1 - math.comb(1997, 500) / math.comb(2000, 500)
    assert pass_at_k(verdicts(3, 2000), 500)[0] == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("k", [0, 5])
def test_pass_at_k_needs_k_completions(k):
    with pytest.raises(ValueError, match=f"pass@{k} needs k from 1 to the 4"):
        pass_at_k(verdicts(1, 4), k)


def majority(answers, right):
    return maj_at_k([answers], [[answer == right for answer in answers]])[0]


def test_the_most_frequent_answer_decides():
    assert majority(["3", "7", "7"], "7") == 1.0
    assert majority(["3", "3", "7"], "7") == 0.0


def test_tied_answers_share_the_verdict_in_any_order():
    for answers in set(itertools.permutations(["7", "7", "3", "3", "5"])):
        assert majority(answers, "7") == 1 / 2
    assert majority(["1", "2", "3"], "3") == pytest.approx(1 / 3)


def test_completions_without_an_answer_have_no_vote():
    assert majority([None, None, None, "7"], "7") == 1.0
    assert maj_at_k([[None, None]], [[False, False]]).tolist() == [0.0]


def test_an_answer_with_several_verdicts_counts_its_share():
    assert maj_at_k([["x", "x", "x", "x"]], [[True, True, True, False]]).tolist() == [0.75]


def test_an_interval_of_differences_has_no_width_where_all_problems_agree():
    assert estimate_mean([0.25] * 30) == (0.25, 0.25, 0.25)


def test_none_or_all_of_thirty_solved_is_no_certainty():
    # Wilson with z = 1.95996: the bound at 0 of n is z^2 / (n + z^2) = 3.8415 / 33.8415
    assert estimate_share([0.0] * 30) == pytest.approx((0.0, 0.0, 0.11351), abs=1e-5)
    assert estimate_share([1.0] * 30) == pytest.approx((1.0, 1 - 0.11351, 1.0), abs=1e-5)
    # the more problems, the surer
    assert estimate_share([0.0] * 1000).high == pytest.approx(3.8415 / 1003.8415, abs=1e-6)


def test_equal_shares_between_have_wilsons_interval():
    # the bounds are the roots of (0.25 - p)^2 = z^2 p (1 - p) / 30
    mean, low, high = estimate_share([0.25] * 30)
    assert mean == 0.25
    for bound in (low, high):
        assert (0.25 - bound) ** 2 == pytest.approx(1.959964**2 * bound * (1 - bound) / 30, rel=1e-5)
    assert low < 0.25 < high


def test_shares_that_differ_have_the_bootstraps_interval():
    assert estimate_share([0.0] * 29 + [1.0]) == estimate_mean([0.0] * 29 + [1.0])


def test_a_difference_is_no_share():
    with pytest.raises(ValueError, match="between 0 and 1"):
        estimate_share([0.5, -0.5])


def test_an_interval_is_that_of_resampled_problems():
    values = np.random.default_rng(1).choice([0.0, 0.25, 0.5, 1.0], size=40)
    resampled = values[np.random.default_rng(2).integers(0, 40, size=(20_000, 40))].mean(axis=1)
    estimate = estimate_mean(values)
    assert estimate.mean == pytest.approx(values.mean())
    assert [estimate.low, estimate.high] == pytest.approx(np.quantile(resampled, [0.025, 0.975]).tolist(), abs=0.01)


def test_an_interval_of_a_hundred_coin_flips_is_ten_points_to_each_side():
    # standard error 0.5 / sqrt(100) = 0.05, times 1.96
    mean, low, high = estimate_mean([0.0, 1.0] * 50)
    assert (mean, low, high) == pytest.approx((0.5, 0.402, 0.598), abs=0.01)


def test_the_same_seed_gives_the_same_interval():
    values = np.linspace(0, 1, 50)
    assert estimate_mean(values, seed=3) == estimate_mean(values, seed=3)
    assert estimate_mean(values, seed=3) != estimate_mean(values, seed=4)

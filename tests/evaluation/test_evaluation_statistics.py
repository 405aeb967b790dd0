# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Figures of an evaluation and their intervals, by hand."""

import itertools
import math

import numpy as np
import pytest

from trl_dapo.evaluation import avg_at_k, estimate_mean, maj_at_k, pass_at_k


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


def test_pass_at_k_is_exact_if_binomials_have_hundreds_of_digits():
    exact = 1 - math.comb(1997, 500) / math.comb(2000, 500)
    assert pass_at_k(verdicts(3, 2000), 500)[0] == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("k", [0, 5])
def test_pass_at_k_needs_k_completions(k):
    with pytest.raises(ValueError, match=f"pass@{k} cannot be computed: k must be between 1 and .* 4"):
        pass_at_k(verdicts(1, 4), k)


def majority(answers, right):
    return maj_at_k([answers], [[answer == right for answer in answers]])[0]


def test_the_most_frequent_answer_decides_and_completions_without_an_answer_have_no_vote():
    assert majority(["3", "7", "7"], "7") == 1.0
    assert majority(["3", "3", "7"], "7") == 0.0
    assert majority([None, None, None, "7"], "7") == 1.0
    assert maj_at_k([[None, None]], [[False, False]]).tolist() == [0.0]


def test_tied_answers_share_the_verdict_in_any_order_and_an_answer_with_several_counts_its_share():
    for answers in set(itertools.permutations(["7", "7", "3", "3", "5"])):
        assert majority(answers, "7") == 1 / 2
    assert majority(["1", "2", "3"], "3") == pytest.approx(1 / 3)
    assert maj_at_k([["x", "x", "x", "x"]], [[True, True, True, False]]).tolist() == [0.75]


# The squared quantile of Student's t distribution, which replaces 1.96, for 30 and for 100 problems
T30, T100 = 2.04523**2, 1.98422**2


def likelihood_ratio(share, p, num):
    """Return twice the log likelihood ratio of `num` problems, a share of them solved, against probability p."""
    unsolved = (1 - share) * math.log((1 - share) / (1 - p))
    return 2 * num * (share * math.log(share / p) + unsolved)


def test_the_interval_has_a_width_if_all_or_no_problems_are_solved():
    # Wilson: the bound at 0 of n is t^2 / (n + t^2) = 4.18297 / 34.18297
    assert estimate_mean([0.0] * 30) == pytest.approx((0.0, 0.0, 0.12237), abs=5e-5)
    assert estimate_mean([1.0] * 30) == pytest.approx((1.0, 1 - 0.12237, 1.0), abs=5e-5)
    # the more problems, the surer
    assert estimate_mean([0.0] * 1000).high == pytest.approx(3.851 / 1003.851, abs=1e-5)


def test_one_of_thirty_solved_is_between_a_likelihood_ratio_and_a_score():
    mean, low, high = estimate_mean([0.0] * 29 + [1.0])
    assert mean == pytest.approx(1 / 30)
    assert likelihood_ratio(1 / 30, low, 30) == pytest.approx(T30, rel=1e-3)
    assert (high - 1 / 30) ** 2 == pytest.approx(T30 * high * (1 - high) / 30, rel=1e-3)


def test_an_interval_of_a_hundred_coin_flips_is_ten_points_to_each_side():
    # standard error 0.5 / sqrt(100) = 0.05, times 1.96
    mean, low, high = estimate_mean([0.0, 1.0] * 50)
    assert (mean, low, high) == pytest.approx((0.5, 0.402, 0.598), abs=1e-3)
    assert likelihood_ratio(0.5, high, 100) == pytest.approx(T100, rel=1e-3)


def test_the_interval_has_a_width_if_no_problem_differs():
    # the rule of three: of 30 that agree, up to 3 in 30 others may not, with some room for either sign
    mean, low, high = estimate_mean([0.0] * 30, ends=(-1, 1))
    assert mean == 0
    assert low == pytest.approx(-high)
    assert 3 / 30 < high < 4 / 30


def test_equal_values_leave_more_room_on_the_side_of_the_farther_end():
    mean, low, high = estimate_mean([0.25] * 30)
    # an unseen problem may be 0.25 below or 0.75 above: three times as far
    assert (mean - low) * 3 == pytest.approx(high - mean, rel=0.05)
    assert 0.75 * 3 / 30 < high - mean < 0.75 * 4 / 30


def test_many_problems_that_vary_have_students_interval():
    values = np.random.default_rng(1).normal(0.5, 0.1, size=2000)
    half = 1.961 * values.std() / math.sqrt(2000)
    assert estimate_mean(values) == pytest.approx(
        (values.mean(), values.mean() - half, values.mean() + half), abs=1e-4
    )


def test_a_difference_is_never_known_better_than_to_two_problems():
    # If 30 problems differ by 0.01, half of them upwards, Student's t gives 2.045 * 0.0102 / sqrt(30) = 0.0038.
    estimate = estimate_mean([0.01, -0.01] * 15, (-1, 1))
    assert (estimate.low, estimate.high) == pytest.approx((-2 / 30, 2 / 30))
    # A score has no sign that unseen problems could change.
    assert estimate_mean([0.51, 0.49] * 15).high == pytest.approx(0.5 + 0.0038, abs=3e-4)


def test_no_interval_is_without_width_or_leaves_the_scale_and_values_mirrored_have_it_mirrored():
    rng = np.random.default_rng(0)
    samples = [[0.0], [1.0], [0.3], [0.1] * 3, [1.0, 1.0 - 1e-14], [0.0] * 29 + [1 / 32]]
    samples += [rng.choice(rng.beta(0.2, 0.2, size=3), size=n) for n in (1, 2, 5, 30) for _ in range(5)]
    for values in map(np.array, samples):
        assert estimate_mean(1 - values)[1:] == pytest.approx(1 - np.array(estimate_mean(values)[:0:-1]), abs=1e-9)
        for estimate, (least, most) in (estimate_mean(values), (0, 1)), (estimate_mean(values, ends=(-1, 1)), (-1, 1)):
            mean, low, high = estimate
            assert least <= low <= mean <= high <= most
            assert high - low > 0.01


@pytest.mark.parametrize(
    ("accuracies", "tries"),
    [([0.0] * 97 + [0.25, 0.5, 0.75], 1), ([0.0] * 30 + [0.01] * 65 + [0.5] * 5, 1), ([0.9] * 90 + [0.3] * 10, 8)],
    ids=["three in a hundred", "a long tail", "pass@8"],
)
def test_an_interval_holds_the_truth_of_skewed_problems(accuracies, tries):
    # a bootstrap's percentiles hold it in 53, 83 and 83 of a hundred; 88 is three standard errors below 95
    rng, accuracies = np.random.default_rng(0), np.array(accuracies)
    num_held = 0
    for _ in range(100):
        drawn = rng.choice(accuracies, size=30)
        _, low, high = estimate_mean(pass_at_k(rng.random((30, 8)) < drawn[:, None], tries))
        num_held += low <= (1 - (1 - accuracies) ** tries).mean() <= high
    assert num_held >= 88


@pytest.mark.parametrize("value", [1.5, -0.5, math.nan])
def test_a_share_lies_between_0_and_1(value):
    with pytest.raises(ValueError, match="must be between 0 and 1"):
        estimate_mean([0.5, value])


def test_a_mean_of_nothing_and_verdicts_without_completions_are_refused():
    with pytest.raises(ValueError, match="no problem to take a mean over"):
        estimate_mean([])
    for verdicts in ([True, False], [[], []]):
        with pytest.raises(ValueError, match=r"Verdicts must be of shape \(problems, completions\)"):
            avg_at_k(verdicts)

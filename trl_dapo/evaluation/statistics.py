# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Figures of an evaluation: one value a problem, and the mean over problems with its interval.

The unit is the problem, not the completion: k completions of one problem are far from independent, and an interval
that took them for independent would be too narrow.
"""

from collections import Counter
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike


# P problems, K completions of one problem, D distinct values.

NUM_RESAMPLES = 10_000
CONFIDENCE = 0.95


class Estimate(NamedTuple):
    """A mean over problems with its 95 % interval."""

    mean: float
    low: float
    high: float


def avg_at_k(correct: ArrayLike) -> np.ndarray:
    """
    Share of correct completions of each problem.

    Args:
        correct (`array_like` of `bool`):
            Verdicts of shape (P, K).

    Returns:
        `np.ndarray` of shape (P,): Shares in `[0, 1]`.
    """
    return _verdicts(correct).mean(axis=1)


def pass_at_k(correct: ArrayLike, k: int) -> np.ndarray:
    """
    Probability that one of `k` completions of each problem is correct, from K of them, without bias.

    `1 - C(K - c, k) / C(K, k)` with `c` correct completions (Chen et al. 2021, arXiv 2107.03374, equation 1).

    Args:
        correct (`array_like` of `bool`):
            Verdicts of shape (P, K).
        k (`int`):
            Number of tries, from 1 to K.

    Returns:
        `np.ndarray` of shape (P,): Probabilities.

    Raises:
        ValueError: If there are fewer than `k` completions a problem.
    """
    correct_PK = _verdicts(correct)
    num_completions = correct_PK.shape[1]
    if not 1 <= k <= num_completions:
        raise ValueError(f"pass@{k} needs k from 1 to the {num_completions} completions of a problem.")
    # C(K - c, k) / C(K, k) is the product of 1 - k / i over i from K - c + 1 to K: one table serves every c.
    factors = 1 - k / np.arange(num_completions, k - 1, -1)
    all_fail = np.concatenate([[1.0], np.cumprod(factors), np.zeros(k - 1)])
    return 1 - all_fail[correct_PK.sum(axis=1)]


def maj_at_k(answers: Sequence[Sequence[str | None]], correct: ArrayLike) -> np.ndarray:
    """
    Whether the most frequent answer of each problem is correct; 0 where none has an answer.

    Where several answers are equally frequent, each is taken to win with the same probability: two answers with three
    votes each, one of them right, count 0.5.

    Args:
        answers (`Sequence[Sequence[str | None]]`):
            Extracted answers of shape (P, K). `None` has no vote.
        correct (`array_like` of `bool`):
            Verdicts of the same shape.

    Returns:
        `np.ndarray` of shape (P,): Expected verdicts in `[0, 1]`.
    """
    correct_PK = _verdicts(correct)
    return np.array([_vote(*problem) for problem in zip(answers, correct_PK, strict=True)])


def problem_figures(
    num_correct: Sequence[int], num_completions: Sequence[int], maj: Sequence[float], k: int
) -> dict[str, np.ndarray]:
    """Every metric of an evaluation, one value a problem."""
    # A problem that the dataset lists repeatedly has a multiple of `k` completions. pass@j is there for each power of
    # two below k and for k.
    correct_P, completions_P = np.asarray(num_correct), np.asarray(num_completions)

    def pass_at(j: int) -> np.ndarray:
        values_P = np.empty(len(correct_P))
        for num in np.unique(completions_P):
            chosen = completions_P == num
            values_P[chosen] = pass_at_k(np.arange(num) < correct_P[chosen, None], j)
        return values_P

    tries = [j for j in range(2, k) if j.bit_count() == 1] + [k]  # powers of two
    return {
        f"avg@{k}": correct_P / completions_P,
        **{f"pass@{j}": pass_at(j) for j in tries},
        f"maj@{k}": np.array(maj),
    }


def estimate_mean(values: ArrayLike, seed: int = 0) -> Estimate:
    """
    Mean over problems, with a 95 % percentile interval from 10,000 bootstrap samples of the problems.

    Args:
        values (`array_like` of `float`):
            One value a problem, of shape (P,); in a paired comparison its difference.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the resampling.

    Returns:
        [`Estimate`]: Mean and bounds, which coincide where all values agree.

    Raises:
        ValueError: If there is no value.
    """
    values_P = np.asarray(values, dtype=np.float64)
    if values_P.size == 0:
        raise ValueError("There is no problem to take a mean over.")
    # How often each distinct value is drawn is multinomial: the same bootstrap as drawing P problems, at D a sample.
    values_D, num_D = np.unique(values_P, return_counts=True)
    draws = np.random.default_rng(seed).multinomial(values_P.size, num_D / values_P.size, size=NUM_RESAMPLES)
    means = draws @ values_D / values_P.size
    low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Estimate(float(values_P.mean()), float(low), float(high))


def estimate_share(values: ArrayLike, seed: int = 0) -> Estimate:
    """
    Mean over problems of values from 0 to 1, with a 95 % interval that is never without width.

    Where all values agree, resampling shows no other mean. There the interval is Wilson's (E. B. Wilson 1927, JASA 22,
    209-212) for the mean as a share of P problems: 0 to 11.4 % for 0 of 30. Of all values from 0 to 1 with that mean,
    solved and unsolved vary most, so that it is not too narrow.

    Args:
        values, seed:
            As in [`estimate_mean`], values in `[0, 1]`.

    Returns:
        [`Estimate`]: Mean and bounds, in `[0, 1]`.

    Raises:
        ValueError: If there is no value, or one is not a share.
    """
    values_P = np.asarray(values, dtype=np.float64)
    if not ((values_P >= 0) & (values_P <= 1)).all():
        raise ValueError("A share lies between 0 and 1.")
    estimate = estimate_mean(values_P, seed)
    if values_P.min() < values_P.max():
        return estimate
    share, num = estimate.mean, values_P.size
    z2 = NormalDist().inv_cdf((1 + CONFIDENCE) / 2) ** 2
    centre = (share + z2 / (2 * num)) / (1 + z2 / num)
    half = np.sqrt(z2 * (share * (1 - share) / num + z2 / (4 * num**2))) / (1 + z2 / num)
    # At 0 and 1 one bound is the share itself, but for the last digit.
    return Estimate(share, float(min(max(centre - half, 0.0), share)), float(max(min(centre + half, 1.0), share)))


def _verdicts(correct: ArrayLike) -> np.ndarray:
    correct_PK = np.asarray(correct, dtype=bool)
    if correct_PK.ndim != 2 or correct_PK.shape[1] == 0:
        raise ValueError(f"Verdicts must be of shape (problems, completions), got {correct_PK.shape}.")
    return correct_PK


def _vote(answers: Sequence[str | None], correct_K: np.ndarray) -> float:
    """Expected verdict of one problem's majority."""
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    winning = max(votes.values())
    # A symbolic scorer may give one answer several verdicts (one spelling, killed once): its share counts.
    num_correct = Counter(answer for answer, is_correct in zip(answers, correct_K, strict=True) if is_correct)
    tied = [num_correct[answer] / winning for answer, num_votes in votes.items() if num_votes == winning]
    return sum(tied) / len(tied)

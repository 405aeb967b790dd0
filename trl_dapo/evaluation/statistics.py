# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Metrics of an evaluation: one value per problem, and the mean over problems with its interval.

The unit is the problem, not the completion. The k completions of a problem are far from independent, so an interval
over completions would be too narrow.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike


# Suffixes: P problems, K completions of one problem, S samples of problems, D distinct values, E these and two more.

_EQUAL = 1e-12  # values that differ by at most this differ only by rounding
_STEEPEST, _HALVINGS = 1e9, 70  # largest slope, and steps of bisection
_UNSEEN = 2  # unseen problems that may differ by 1 in either direction, however small the observed differences are


class Estimate(NamedTuple):
    """A mean over problems with its 95% interval."""

    mean: float
    low: float
    high: float


def avg_at_k(correct: ArrayLike) -> np.ndarray:
    """Return the share of correct completions of each problem, from verdicts of shape (P, K)."""
    return _verdicts(correct).mean(axis=1)


def pass_at_k(correct: ArrayLike, k: int) -> np.ndarray:
    """
    Return the probability that at least one of `k` completions of each problem is correct.

    The verdicts have the shape (P, K). The estimate is equation 1 of arXiv 2107.03374.
    """
    correct_PK = _verdicts(correct)
    num_completions = correct_PK.shape[1]
    if not 1 <= k <= num_completions:
        raise ValueError(
            f"pass@{k} cannot be computed: k must be between 1 and the number of completions per problem, "
            f"{num_completions}."
        )
    return _pass_at(correct_PK.sum(axis=1), np.full(len(correct_PK), num_completions), k)


def maj_at_k(answers: Sequence[Sequence[str | None]], correct: ArrayLike) -> np.ndarray:
    """
    Return for each problem whether its most frequent answer is correct, from verdicts of shape (P, K).

    If several answers are most frequent, the value is the share of correct ones. `None` does not count as an answer.
    """
    return np.array([_vote(*problem) for problem in zip(answers, _verdicts(correct), strict=True)])


def count_problem(correct: Sequence[bool | None], answers: Sequence[str | None]) -> dict[str, Any]:
    """Return the counts of a problem's scored completions from which all metrics can be computed."""
    verdicts = [bool(verdict) for verdict in correct]
    return {"num_correct": sum(verdicts), "num_completions": len(verdicts), "maj": _vote(answers, verdicts)}


def has_votes(is_stated: Sequence[bool], states_answers: bool) -> bool:
    """Return whether maj@k is meaningful: a scorer gave the answers, or most completions have one."""
    return states_answers or 2 * sum(is_stated) >= len(is_stated)


def problem_figures(problems: Sequence[Mapping[str, Any]], k: int) -> dict[str, np.ndarray]:
    """
    Return every metric of an evaluation with one value per problem, from the counts of [`count_problem`].

    pass@j is computed for k and for each power of two below k. A problem that is in several rows of the dataset has a
    multiple of k completions.
    """
    names = ("num_correct", "num_completions", "maj")
    correct_P, completions_P, maj_P = (np.array([problem[name] for problem in problems]) for name in names)
    tries = [j for j in range(2, k) if j.bit_count() == 1] + [k]
    return {
        f"avg@{k}": correct_P / completions_P,
        **{f"pass@{j}": _pass_at(correct_P, completions_P, j) for j in tries},
        f"maj@{k}": maj_P,
    }


def estimate_mean(values: ArrayLike, ends: tuple[float, float] = (0.0, 1.0)) -> Estimate:
    """
    Return the mean over problems with a 95% interval, which always has a width.

    docs/evaluation.md shows how often the interval contains the true mean.

    Args:
        values (`ArrayLike`):
            One value per problem.
        ends (`tuple[float, float]`, *optional*, defaults to `(0.0, 1.0)`):
            Smallest and largest possible value.

    Raises:
        ValueError: If there is no value, or one that is not between `ends`.
    """
    values_P = np.asarray(values, dtype=np.float64)
    if values_P.size == 0:
        raise ValueError("There is no problem to take a mean over.")
    if not ((values_P >= ends[0]) & (values_P <= ends[1])).all():
        raise ValueError(
            f"The values must be between {ends[0]:g} and {ends[1]:g}, got {values_P.min():g} to {values_P.max():g}."
        )
    values_D, counts_D = np.unique(values_P, return_counts=True)
    (low,), (high,) = interval_of_means(values_D, counts_D[None], ends).tolist()
    return Estimate(float(values_P.mean()), low, high)


def interval_of_means(values_D: np.ndarray, counts_SD: np.ndarray, ends: tuple[float, float]) -> np.ndarray:
    """
    Return the bounds of the means of S samples, with shape (2, S).

    Args:
        values_D (`np.ndarray`):
            The distinct values.
        counts_SD (`np.ndarray`):
            How often each value is in each sample.
        ends (`tuple[float, float]`):
            Smallest and largest possible value.
    """
    # The sample's distribution is tilted until it has a given mean: the share of each value is multiplied by
    # exp(slope * value). The mean is in the interval if the score test, with the variance of the tilted distribution,
    # or the likelihood ratio test does not reject it. If every problem is either solved or not, the interval of the
    # score test is Wilson's. Half a problem is added on either side.
    num_S1 = counts_SD.sum(axis=1, keepdims=True)
    mean_S1 = counts_SD @ values_D[:, None] / num_S1
    points_SD = values_D - mean_S1
    points_SD[np.abs(points_SD) < _EQUAL] = 0
    reach_S2 = _reach(points_SD, counts_SD, ends - mean_S1)
    points_SE = np.hstack([points_SD, reach_S2])
    with np.errstate(divide="ignore"):
        log_weights_SE = np.log(np.hstack([counts_SD, np.full_like(reach_S2, 0.5)]))

    def tilted(slopes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        exponents = log_weights_SE + slopes * points_SE
        log_totals = np.logaddexp.reduce(exponents, axis=-1, keepdims=True)
        shares = np.exp(exponents - log_totals)
        means = (shares * points_SE).sum(axis=-1, keepdims=True)
        return means, (shares * (points_SE - means) ** 2).sum(axis=-1, keepdims=True), log_totals

    def holds(slopes: np.ndarray) -> np.ndarray:
        means, variances, log_totals = tilted(sides * slopes)
        by_score, by_likelihood = means**2 <= limit_S1 * variances, 2 * (log_totals - likeliest_S1) <= limit_S1
        return (sides * means <= 0) | by_score | by_likelihood

    sides = np.array([-1, 1])[:, None, None]
    # Quantile of Student's t distribution by the Cornish-Fisher expansion, exact to 1% from five degrees of freedom.
    z, freedom_S1 = 1.959964, np.maximum(num_S1 - 1, 2)
    t_S1 = z + (z**3 + z) / (4 * freedom_S1) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom_S1**2)
    limit_S1 = t_S1**2 / num_S1
    likeliest_S1 = tilted(_largest(lambda slopes: tilted(slopes)[0] < 0, -_STEEPEST, num_S1.shape))[2]
    offsets = tilted(sides * _largest(holds, 0.0, (2, *num_S1.shape)))[0]
    # Even if the differences of all observed problems are small, a few unseen problems may differ by much.
    least_S1 = -_UNSEEN * min(ends[0], 0.0) / num_S1
    return np.clip(mean_S1 + sides * np.maximum(sides * offsets, least_S1), *ends)[:, :, 0]


def _reach(points_SD: np.ndarray, counts_SD: np.ndarray, ends_S2: np.ndarray) -> np.ndarray:
    """Return the largest distance of an unseen problem from the mean, on either side."""
    # If many problems vary similarly, it is the largest observed distance. If all are equal, it may be anywhere.
    farthest_S1 = np.abs(points_SD * (counts_SD > 0)).max(axis=1, keepdims=True)
    second_S1, fourth_S1 = ((counts_SD * points_SD**power).sum(axis=1, keepdims=True) for power in (2, 4))
    num_varying_S1 = np.divide(second_S1**2, fourth_S1, out=np.zeros_like(second_S1), where=fourth_S1 > 0)
    seen_S2 = np.clip(farthest_S1 * [-1, 1], ends_S2[:, :1], ends_S2[:, 1:])
    return seen_S2 + 0.5**num_varying_S1 * (ends_S2 - seen_S2)


def _largest(holds: Callable[[np.ndarray], np.ndarray], least: float, shape: tuple[int, ...]) -> np.ndarray:
    """Return the largest slope for which a condition holds, by bisection."""
    low, high = np.full(shape, least), np.full(shape, _STEEPEST)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        is_so = holds(middle)
        low, high = np.where(is_so, middle, low), np.where(is_so, high, middle)
    return low


def _pass_at(correct_P: np.ndarray, completions_P: np.ndarray, k: int) -> np.ndarray:
    """Return pass@k from counts. C(K - c, k) / C(K, k) is the product of 1 - c / i over the k numbers i up to K."""
    failing_Pk = 1 - correct_P[:, None] / (completions_P[:, None] - np.arange(k))
    return 1 - failing_Pk.clip(min=0).prod(axis=1)


def _verdicts(correct: ArrayLike) -> np.ndarray:
    correct_PK = np.asarray(correct, dtype=bool)
    if correct_PK.ndim != 2 or correct_PK.shape[1] == 0:
        raise ValueError(f"Verdicts must be of shape (problems, completions), got {correct_PK.shape}.")
    return correct_PK


def _vote(answers: Sequence[str | None], correct_K: Iterable[bool]) -> float:
    """Return the expected verdict on the most frequent answer of a problem."""
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    winning = max(votes.values())
    # A symbolic scorer may judge equal answers differently, for instance if it was killed once. Then the share of
    # correct ones counts.
    num_correct = Counter(answer for answer, is_correct in zip(answers, correct_K, strict=True) if is_correct)
    tied = [num_correct[answer] / winning for answer, num_votes in votes.items() if num_votes == winning]
    return sum(tied) / len(tied)

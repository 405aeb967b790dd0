# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Figures of an evaluation: one value a problem, and the mean over problems with its interval.

The unit is the problem, not the completion: k completions of one problem are far from independent, and an interval
that took them for independent would be too narrow.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike


# P problems, K completions of one problem, S samples of problems, D distinct values, E those and two more.

_EQUAL = 1e-12  # values that differ by no more than this are rounded differently
_STEEPEST, _HALVINGS = 1e9, 70  # of the slopes
_UNSEEN = 2  # problems that turn from incorrect to correct or back, whatever was seen of a difference


class Estimate(NamedTuple):
    """A mean over problems with its 95 % interval."""

    mean: float
    low: float
    high: float


def avg_at_k(correct: ArrayLike) -> np.ndarray:
    """Share of correct completions of each problem, from verdicts of shape (P, K)."""
    return _verdicts(correct).mean(axis=1)


def pass_at_k(correct: ArrayLike, k: int) -> np.ndarray:
    """Probability that one of `k` completions is correct, of verdicts (P, K), by equation 1 of arXiv 2107.03374."""
    correct_PK = _verdicts(correct)
    num_completions = correct_PK.shape[1]
    if not 1 <= k <= num_completions:
        raise ValueError(f"pass@{k} needs k from 1 to the {num_completions} completions of a problem.")
    return _pass_at(correct_PK.sum(axis=1), np.full(len(correct_PK), num_completions), k)


def maj_at_k(answers: Sequence[Sequence[str | None]], correct: ArrayLike) -> np.ndarray:
    """Whether each problem's most frequent answer is correct, of verdicts (P, K); ties share, `None` has no vote."""
    return np.array([_vote(*problem) for problem in zip(answers, _verdicts(correct), strict=True)])


def count_problem(correct: Sequence[bool | None], answers: Sequence[str | None]) -> dict[str, Any]:
    """The scored completions of a problem, in the form in which they are kept."""
    verdicts = [bool(verdict) for verdict in correct]
    return {"num_correct": sum(verdicts), "num_completions": len(verdicts), "maj": _vote(answers, verdicts)}


def has_votes(is_stated: Sequence[bool], states_answers: bool) -> bool:
    """Whether maj@k means anything: a scorer stated the answers, or most completions have one that anybody reads."""
    return states_answers or 2 * sum(is_stated) >= len(is_stated)


def problem_figures(problems: Sequence[Mapping[str, Any]], k: int) -> dict[str, np.ndarray]:
    """Every metric of an evaluation, one value a problem, from what [`count_problem`] counted."""
    # A problem that the dataset lists repeatedly has a multiple of `k` completions. pass@j is there for each power of
    # two below k and for k.
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
    Mean over problems, whose values lie between `ends`, with a 95 % interval that is never without width;
    docs/evaluation.md has how often it holds. Raises `ValueError` if there is no value, or one beyond `ends`.
    """
    values_P = np.asarray(values, dtype=np.float64)
    if values_P.size == 0:
        raise ValueError("There is no problem to take a mean over.")
    if not ((values_P >= ends[0]) & (values_P <= ends[1])).all():
        raise ValueError(f"The values must lie between {ends[0]:g} and {ends[1]:g}.")
    values_D, counts_D = np.unique(values_P, return_counts=True)
    (low,), (high,) = interval_of_means(values_D, counts_D[None], ends).tolist()
    return Estimate(float(values_P.mean()), low, high)


def interval_of_means(values_D: np.ndarray, counts_SD: np.ndarray, ends: tuple[float, float]) -> np.ndarray:
    """Both bounds, of shape (2, S), of S samples' means, from how often each value is in each of them."""
    # A mean is in the interval if it is not refuted by the sample as distribution, tilted (each value's share times
    # exp(slope * value)) until it has that mean: by the score, whose variance is the tilted one, or by the likelihood
    # ratio. For problems that are solved or not, the score's interval is Wilson's. Half a problem is added on either
    # side.
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
    # Student's t by Cornish and Fisher's expansion: within 1 % from five degrees of freedom.
    z, freedom_S1 = 1.959964, np.maximum(num_S1 - 1, 2)
    t_S1 = z + (z**3 + z) / (4 * freedom_S1) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom_S1**2)
    limit_S1 = t_S1**2 / num_S1
    likeliest_S1 = tilted(_largest(lambda slopes: tilted(slopes)[0] < 0, -_STEEPEST, num_S1.shape))[2]
    offsets = tilted(sides * _largest(holds, 0.0, (2, *num_S1.shape)))[0]
    # If differences are small in all observed problems, a few unseen problems may still differ the other way.
    least_S1 = -_UNSEEN * min(ends[0], 0.0) / num_S1
    return np.clip(mean_S1 + sides * np.maximum(sides * offsets, least_S1), *ends)[:, :, 0]


def _reach(points_SD: np.ndarray, counts_SD: np.ndarray, ends_S2: np.ndarray) -> np.ndarray:
    """Return how far from the mean an unseen problem may be, on either side."""
    # No further than the farthest that was seen, if many problems vary alike. If all agree, it may be anywhere.
    farthest_S1 = np.abs(points_SD * (counts_SD > 0)).max(axis=1, keepdims=True)
    second_S1, fourth_S1 = ((counts_SD * points_SD**power).sum(axis=1, keepdims=True) for power in (2, 4))
    num_varying_S1 = np.divide(second_S1**2, fourth_S1, out=np.zeros_like(second_S1), where=fourth_S1 > 0)
    seen_S2 = np.clip(farthest_S1 * [-1, 1], ends_S2[:, :1], ends_S2[:, 1:])
    return seen_S2 + 0.5**num_varying_S1 * (ends_S2 - seen_S2)


def _largest(holds: Callable[[np.ndarray], np.ndarray], least: float, shape: tuple[int, ...]) -> np.ndarray:
    """The largest slope for which it holds, by bisection."""
    low, high = np.full(shape, least), np.full(shape, _STEEPEST)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        is_so = holds(middle)
        low, high = np.where(is_so, middle, low), np.where(is_so, high, middle)
    return low


def _pass_at(correct_P: np.ndarray, completions_P: np.ndarray, k: int) -> np.ndarray:
    """pass@k from counts: C(K - c, k) / C(K, k) is the product of 1 - c / i over the k numbers i up to K."""
    failing_Pk = 1 - correct_P[:, None] / (completions_P[:, None] - np.arange(k))
    return 1 - failing_Pk.clip(min=0).prod(axis=1)


def _verdicts(correct: ArrayLike) -> np.ndarray:
    correct_PK = np.asarray(correct, dtype=bool)
    if correct_PK.ndim != 2 or correct_PK.shape[1] == 0:
        raise ValueError(f"Verdicts must be of shape (problems, completions), got {correct_PK.shape}.")
    return correct_PK


def _vote(answers: Sequence[str | None], correct_K: Iterable[bool]) -> float:
    """Expected verdict of one problem's majority."""
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    winning = max(votes.values())
    # A symbolic scorer may give one answer several verdicts (one spelling, killed once): its share counts.
    num_correct = Counter(answer for answer, is_correct in zip(answers, correct_K, strict=True) if is_correct)
    tied = [num_correct[answer] / winning for answer, num_votes in votes.items() if num_votes == winning]
    return sum(tied) / len(tied)

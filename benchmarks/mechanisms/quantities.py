# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
What is measured, from arrays. N groups of G completions, T tokens, R gradients of D weights.
"""

import math

import numpy as np


def pass_at(k, right_N):
    """Mean probability that one of `k` completions is right, from the probabilities that one is."""
    return float(np.mean(1 - (1 - np.asarray(right_N)) ** k))


def mean_where(values, where):
    """Mean of the values that are meant; NaN where none is."""
    values, where = np.asarray(values, dtype=float), np.asarray(where, dtype=bool)
    return float(values[where].mean()) if where.any() else math.nan


def share(part, whole):
    """How many of `whole` are `part` too; NaN of none."""
    return mean_where(part, whole)


def is_punished(rewards_NG, masked_NG):
    """Which completions are made less likely: those below their group's mean that the loss does not leave out."""
    rewards_NG = np.asarray(rewards_NG, dtype=float)
    return (rewards_NG < rewards_NG.mean(axis=1, keepdims=True) - 1e-6) & ~np.asarray(masked_NG, dtype=bool)


def roughness(values):
    """How much a curve jumps: the standard deviation of its steps from one measurement to the next."""
    return float(np.std(np.diff(values), ddof=1))


def relative_variance(gradients_RD):
    """
    Variance of a gradient over its squared mean, both without bias: the squared mean is that of products of different
    gradients. Infinite where no direction is common to them.
    """
    gram_RR = np.asarray(gradients_RD, dtype=np.float64) @ np.asarray(gradients_RD, dtype=np.float64).T
    num = len(gram_RR)
    square = np.trace(gram_RR) / num
    squared_mean = (gram_RR.sum() - np.trace(gram_RR)) / (num * (num - 1))
    return float((square - squared_mean) / squared_mean) if squared_mean > 0 else math.inf


# ---- Of a run: its curve, and what its log says of the whole; of two runs with one seed, a value for each ----


def read_at(curve, what, spent, name):
    """A curve's value where `what` has reached `spent`, by straight lines between its points."""
    return float(np.interp(spent, [point[what] for point in curve], [point[name] for point in curve]))


def mean_known(values):
    """Mean of what could be measured."""
    values = [value for value in values if not math.isnan(value)]
    return float(np.mean(values)) if values else math.nan


def late(name):
    """Mean over the last half of a run's curve."""
    return lambda *runs: [mean_known(point[name] for point in run["curve"][len(run["curve"]) // 2 :]) for run in runs]


def during(name):
    """Mean over a run's curve but for its start, which all runs share."""
    return lambda *runs: [mean_known(point[name] for point in run["curve"][1:]) for run in runs]


def roughness_of(name):
    """[`roughness`] of a run's curve."""
    return lambda *runs: [roughness([point[name] for point in run["curve"]]) for run in runs]


def of_run(name):
    """What the log says of a whole run."""
    return lambda *runs: [run[name] for run in runs]


def at_equal(what, name):
    """A figure where both runs have spent what the thriftier has spent at its end."""

    def measure(*runs):
        spent = min(run["curve"][-1][what] for run in runs)
        return [read_at(run["curve"], what, spent, name) for run in runs]

    return measure


def tokens_for_one(*runs):
    """Tokens generated for each that trains."""
    return [run["curve"][-1]["tokens"] / run["tokens that train"] for run in runs]


def verdict(low, high, direction):
    """What a 95 % interval of a difference says of the prediction that it is above (`direction` 1) or below 0 (-1)."""
    low, high = sorted((direction * low, direction * high))
    if low > 0:
        return "shown"
    return "refuted" if high < 0 else "not shown"

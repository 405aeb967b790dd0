# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
Measures: figures that are read off the curve and the log of a run. A measure takes the runs of two arms with the same
seed, and returns a value for each.
"""

import math
import statistics

import numpy as np


def read_at(curve, what, spent, name):
    """Return the value `name` of a curve at the point where `what` reaches `spent`, interpolated linearly."""
    return float(np.interp(spent, [point[what] for point in curve], [point[name] for point in curve]))


def mean_known(values):
    """Return the mean of the values that are not NaN; NaN if there is none."""
    values = [value for value in values if not math.isnan(value)]
    return float(np.mean(values)) if values else math.nan


def mean_where(values, where):
    """Return the mean of the values that `where` selects; NaN if it selects none."""
    values, where = np.asarray(values, dtype=float), np.asarray(where, dtype=bool)
    return float(values[where].mean()) if where.any() else math.nan


def mean_of(log, name):
    """Return the mean of a figure over the log entries that have it."""
    return mean_known(entry.get(name, math.nan) for entry in log)


def late(name):
    """Return a measure: the mean of a figure over the second half of the curve of each run."""
    return lambda *runs: [mean_known(point[name] for point in run["curve"][len(run["curve"]) // 2 :]) for run in runs]


def during(name):
    """Return a measure: the mean of a figure over the curve of each run, without the start, which all runs share."""
    return lambda *runs: [mean_known(point[name] for point in run["curve"][1:]) for run in runs]


def of_run(name):
    """Return a measure: a figure of the whole run."""
    return lambda *runs: [run[name] for run in runs]


def at_equal(what, name):
    """Return a measure: a figure at the point where both runs have spent what the cheaper run spent in all."""

    def measure(*runs):
        spent = min(run["curve"][-1][what] for run in runs)
        return [read_at(run["curve"], what, spent, name) for run in runs]

    return measure


def cost(run, target, what):
    """Return the tokens or seconds at the first point whose accuracy reaches the target; infinity if none does."""
    return next((point[what] for point in run["curve"] if point["accuracy"] >= target), math.inf)


def spent_to(gain, what):
    """
    Return a measure: the tokens or seconds until the accuracy has risen by `gain`. If it never does, the measure is
    what the run spent, which is less than it would have needed.
    """

    def measure(*runs):
        target = statistics.mean(run["curve"][0]["accuracy"] for run in runs) + gain
        return [min(cost(run, target, what), run["curve"][-1][what]) for run in runs]

    return measure


def spread(costs, digits=0):
    """Return the median, lowest and highest cost as text, with `-` for infinity."""
    low, middle, high = (
        "-" if math.isinf(value) else f"{value:,.{digits}f}"
        for value in (min(costs), statistics.median_low(costs), max(costs))
    )
    return f"{middle} ({low} to {high})"


def describe_shares(shares, num_seeds):
    """Return the median and the range of shares in percent as text, with the number of seeds if some are missing."""
    if not shares:
        return "not run"
    low, middle, high = (f"{100 * share:.1f}%" for share in (min(shares), statistics.median(shares), max(shares)))
    few = "" if len(shares) == num_seeds else f", {len(shares)} of {num_seeds} seeds"
    return f"{middle} ({low} to {high}{few})"

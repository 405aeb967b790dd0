# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
What is read off a run: its curve, and what its log says of the whole. A measure takes the runs of two arms with one
seed and returns a value for each.
"""

import math
import statistics

import numpy as np


def read_at(curve, what, spent, name):
    """A curve's value where `what` has reached `spent`, by straight lines between its points."""
    return float(np.interp(spent, [point[what] for point in curve], [point[name] for point in curve]))


def mean_known(values):
    """Mean of what could be measured."""
    values = [value for value in values if not math.isnan(value)]
    return float(np.mean(values)) if values else math.nan


def mean_where(values, where):
    """Mean of the values that are meant; NaN where none is."""
    values, where = np.asarray(values, dtype=float), np.asarray(where, dtype=bool)
    return float(values[where].mean()) if where.any() else math.nan


def mean_of(log, name):
    """Mean of the entries that have the figure."""
    return mean_known(entry.get(name, math.nan) for entry in log)


def late(name):
    """Mean over the last half of a run's curve."""
    return lambda *runs: [mean_known(point[name] for point in run["curve"][len(run["curve"]) // 2 :]) for run in runs]


def during(name):
    """Mean over a run's curve but for its start, which all runs share."""
    return lambda *runs: [mean_known(point[name] for point in run["curve"][1:]) for run in runs]


def of_run(name):
    """What the log says of a whole run."""
    return lambda *runs: [run[name] for run in runs]


def at_equal(what, name):
    """A figure where both runs have spent what the thriftier has spent at its end."""

    def measure(*runs):
        spent = min(run["curve"][-1][what] for run in runs)
        return [read_at(run["curve"], what, spent, name) for run in runs]

    return measure


def cost(run, target, what):
    """Tokens or seconds at the first accuracy that reaches the target; infinite if none does."""
    return next((point[what] for point in run["curve"] if point["accuracy"] >= target), math.inf)


def spent_to(gain, what):
    """
    Tokens or seconds until accuracy is higher by `gain`, of both runs. Where it never was, what the run spent: less
    than it would have needed.
    """

    def measure(*runs):
        target = statistics.mean(run["curve"][0]["accuracy"] for run in runs) + gain
        return [min(cost(run, target, what), run["curve"][-1][what]) for run in runs]

    return measure


def spread(costs, digits=0):
    """Median, lowest and highest as text; a cost that no run paid is `-`."""
    low, middle, high = (
        "-" if math.isinf(value) else f"{value:,.{digits}f}"
        for value in (min(costs), statistics.median_low(costs), max(costs))
    )
    return f"{middle} ({low} to {high})"

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
Whether a difference between runs with equal seeds holds, by Student's t test, and whether many do, by Holm's
procedure.
"""

import math
import statistics


LEVEL = 0.05


def tails(t, freedom):
    """Return the probability that Student's t is further from 0 (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    even = freedom % 2 == 0
    total, term = 0.0, math.sin(angle) if even else math.sin(angle) * math.cos(angle)
    for i in range(2 - even, freedom, 2):
        total += term
        term *= math.cos(angle) ** 2 * i / (i + 1)
    return 1 - total if even else 1 - 2 / math.pi * (angle + total)


def p_value(differences):
    """Return the p-value of Student's two-sided test that the mean of the differences is 0."""
    spread = statistics.stdev(differences) / math.sqrt(len(differences))
    mean = abs(statistics.mean(differences))
    if spread == 0:
        return 0.0 if mean else 1.0
    return tails(mean / spread, len(differences) - 1)


def interval(values):
    """Return the mean and half the width of Student's 95% interval, which is NaN for a single value."""
    if len(values) < 2:
        return values[0], math.nan
    low, high = 0.0, 100.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if tails(middle, len(values) - 1) > LEVEL else (low, middle)
    quantile = round(high, 3)  # with as many digits as in printed tables
    return statistics.mean(values), quantile * statistics.stdev(values) / math.sqrt(len(values))


def holm(p_values):
    """Return the p-values adjusted by Holm's procedure: all tests with at most `LEVEL` hold together at that level."""
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted


def verdict(low, high, direction):
    """
    Return the verdict of a 95% interval on the prediction that a difference is above (`direction` 1) or below 0 (-1).
    """
    low, high = sorted((direction * low, direction * high))
    if low > 0:
        return "shown"
    return "refuted" if high < 0 else "not shown"

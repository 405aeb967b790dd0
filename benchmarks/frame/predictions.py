# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
What was predicted before the first run that counts, and what became of it.

A prediction is of the difference of two runs with the same seed: "shown" where Student's 95 % interval of it lies on
the predicted side of 0, "refuted" where it lies on the other, else "not shown". Of twenty intervals one misses: beside
each verdict stands the one that holds by Holm's test of all of them together.
"""

import math
import re
import statistics
from collections.abc import Callable
from typing import NamedTuple

from .tables import print_table
from .verdicts import LEVEL, holm, interval, p_value, verdict


BY_CONSTRUCTION, NOT_SHOWN, NOT_REFUTED = "by construction", "not shown", "not refuted"
FEWEST = 3  # seeds of an interval


class Quantity(NamedTuple):
    """`measure` takes the runs of both arms with one seed, that of the arm first, and returns a value for each."""

    title: str
    measure: Callable
    unit: str = ""


class Prediction(NamedTuple):
    """
    `quantity` is above (`direction` 1) or below (-1) in `arm` what it is in the arm `against`, or that number.
    `by_construction`: it could not have come out otherwise, so that it shows nothing. `or_equal`: it may also be the
    same, so that the prediction is refuted if an interval lies on the other side of 0, and not refuted otherwise.
    """

    task: str
    arm: str
    against: str | float
    quantity: Quantity
    direction: int
    paper: str  # where it claims this
    by_construction: bool = False
    or_equal: bool = False

    @property
    def undecided(self):
        """The verdict if the interval says nothing."""
        return NOT_REFUTED if self.or_equal else NOT_SHOWN


class Outcome(NamedTuple):
    mine: float  # mean over seeds
    others: float
    difference: float
    low: float
    high: float
    verdict: str
    p: float


def seeds_of(results, task, arm):
    return sorted(seed for *names, seed in results if names == [task, arm])


def seeds_of_both(results, prediction):
    """Seeds with which a prediction's arm was run, and the arm that it is compared with."""
    task, arm, against, *_ = prediction
    others = seeds_of(results, task, against) if isinstance(against, str) else None
    return [seed for seed in seeds_of(results, task, arm) if others is None or seed in others]


def check(prediction, results):
    """What became of a prediction."""
    task, arm, against, quantity, direction, *_ = prediction
    pairs = []
    for seed in seeds_of_both(results, prediction):
        runs = [results[task, arm, seed]]
        if isinstance(against, str):
            pairs.append(quantity.measure(*runs, results[task, against, seed]))
        else:
            pairs.append([*quantity.measure(*runs), against])
    pairs = [pair for pair in pairs if not any(map(math.isnan, pair))]
    differences = [mine - others for mine, others in pairs]
    difference, half = interval(differences)
    half = half if len(differences) >= FEWEST else math.inf
    low, high = difference - half, difference + half
    means = [statistics.mean(values) for values in zip(*pairs, strict=True)]
    p = p_value(differences) if len(differences) > 1 else 1.0
    said = BY_CONSTRUCTION if prediction.by_construction else verdict(low, high, direction)
    if prediction.or_equal and said != "refuted":
        said = NOT_REFUTED
    return Outcome(*means, difference, low, high, said, p)


def by_holm(results, predictions):
    """Each prediction's verdict as one of all that were tested: its own, or that of an interval that says nothing."""
    run = [prediction for prediction in predictions if seeds_of_both(results, prediction)]
    tested = {prediction: check(prediction, results) for prediction in run if not prediction.by_construction}
    adjusted = dict(zip(tested, holm([outcome.p for outcome in tested.values()]), strict=True))
    held = {each: tested[each].verdict if p <= LEVEL else each.undecided for each, p in adjusted.items()}
    return [held.get(prediction, "not counted") for prediction in predictions]


def describe_outcome(prediction, results):
    """The figures of a prediction and its verdict, as they stand on the page."""
    if not seeds_of_both(results, prediction):
        return "not run yet"
    outcome = check(prediction, results)
    if prediction.quantity.unit == "%":
        shares = [f"{100 * value:.1f}" for value in outcome[:2]]
        points = [f"{100 * value:+.1f}" for value in outcome[2:5]]
        return f"{shares[0]} % beside {shares[1]} %: {points[0]} ({points[1]} to {points[2]}): {outcome.verdict}"
    large = any(1000 <= abs(value) < math.inf for value in outcome[:5])  # tokens
    mine, others = (f"{value:,.0f}" if large else f"{value:.3g}" for value in outcome[:2])
    difference, low, high = (f"{value:+,.0f}" if large else f"{value:+.3g}" for value in outcome[2:5])
    return f"{mine} beside {others}: {difference} ({low} to {high}): {outcome.verdict}"


def fill_in(page, results, heading, predictions):
    """The page with the outcomes in the last two columns of a section's table: a row for each prediction, in order."""
    head, heading, rest = page.partition(heading)
    section, *others = re.split(r"(?m)^(?=## )", rest, maxsplit=1)
    lines = section.split("\n")
    rows = [i for i, line in enumerate(lines) if line.startswith("| ")][1:]
    for i, prediction, held in zip(rows, predictions, by_holm(results, predictions), strict=True):
        cells = f" {describe_outcome(prediction, results)} ", f" {held} "
        lines[i] = "|".join([*lines[i].split("|")[:-3], *cells, ""])
    return "".join([head, heading, "\n".join(lines), *others])


def print_outcomes(results, predictions):
    """What became of every prediction whose arms were run."""
    columns = "part", "quantity", "arm, beside", "predicted", "outcome", "by Holm"
    rows = []
    for prediction, held in zip(predictions, by_holm(results, predictions), strict=True):
        if seeds_of_both(results, prediction):
            task, arm, against, quantity, direction, *_ = prediction
            predicted = "higher" if direction > 0 else "lower"
            outcome = describe_outcome(prediction, results)
            rows.append([task, quantity.title, f"{arm}, {against}", predicted, outcome, held])
    print_table("Predictions", columns, rows, left=6)

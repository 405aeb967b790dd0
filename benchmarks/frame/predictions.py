# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
Predictions that were made before the first run that counts, and their outcomes.

A prediction is about the difference between two runs with the same seed. It is "shown" if Student's 95% interval of
the difference lies on the predicted side of 0, "refuted" if it lies on the other side, and "not shown" otherwise. One
in twenty such intervals misses the true value. So each verdict comes with a second one, by Holm's test of all
predictions together.
"""

import math
import re
import statistics
from collections.abc import Callable
from typing import NamedTuple

from .tables import print_table
from .verdicts import LEVEL, holm, interval, p_value, verdict


BY_CONSTRUCTION, NOT_SHOWN, NOT_REFUTED = "by construction", "not shown", "not refuted"
FEWEST = 3  # seeds for an interval


class Quantity(NamedTuple):
    """
    A figure of runs. `measure` takes the runs of the arm and of the other arm with one seed, and returns a value for
    each.
    """

    title: str
    measure: Callable
    unit: str = ""


class Prediction(NamedTuple):
    """
    A prediction that `quantity` is higher (`direction` 1) or lower (-1) in `arm` than in the arm or the number
    `against`.

    `by_construction` means that it could not have come out differently, so it shows nothing. `or_equal` means that the
    two may also be equal: the prediction is refuted if the interval lies on the other side of 0, and not refuted
    otherwise.
    """

    task: str
    arm: str
    against: str | float
    quantity: Quantity
    direction: int
    paper: str  # where the paper claims this
    by_construction: bool = False
    or_equal: bool = False

    @property
    def undecided(self):
        """Verdict if the interval contains 0."""
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
    """Return the seeds with which both the arm of a prediction and the arm that it is compared with were run."""
    task, arm, against, *_ = prediction
    others = seeds_of(results, task, against) if isinstance(against, str) else None
    return [seed for seed in seeds_of(results, task, arm) if others is None or seed in others]


def check(prediction, results):
    """Return the outcome of a prediction."""
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
    found = BY_CONSTRUCTION if prediction.by_construction else verdict(low, high, direction)
    if prediction.or_equal and found != "refuted":
        found = NOT_REFUTED
    return Outcome(*means, difference, low, high, found, p)


def by_holm(results, predictions):
    """
    Return the verdict of each prediction by Holm's test of all predictions that were run: its own verdict if it holds,
    and otherwise the verdict of an interval that contains 0.
    """
    run = [prediction for prediction in predictions if seeds_of_both(results, prediction)]
    tested = {prediction: check(prediction, results) for prediction in run if not prediction.by_construction}
    adjusted = dict(zip(tested, holm([outcome.p for outcome in tested.values()]), strict=True))
    held = {each: tested[each].verdict if p <= LEVEL else each.undecided for each, p in adjusted.items()}
    return [held.get(prediction, "not counted") for prediction in predictions]


def describe_outcome(prediction, results):
    """Return the figures of a prediction and its verdict, as text for the page."""
    if not seeds_of_both(results, prediction):
        return "not run yet"
    outcome = check(prediction, results)
    if prediction.quantity.unit == "%":
        figures, differences = [f"{100 * value:.1f}%" for value in outcome[:2]], "{:+.1f}"
        scale = 100
    else:
        large = any(1000 <= abs(value) < math.inf for value in outcome[:5])  # tokens
        figures = [f"{value:,.0f}" if large else f"{value:.3g}" for value in outcome[:2]]
        differences = "{:+,.0f}" if large else "{:+.3g}"
        scale = 1
    difference, low, high = (differences.format(scale * value) for value in outcome[2:5])
    between = f"{low} to {high}" if math.isfinite(outcome.low) else f"fewer than {FEWEST} seeds, no interval"
    return f"{figures[0]} and {figures[1]}: {difference} ({between}): {outcome.verdict}"


def fill_in(page, results, heading, predictions):
    """
    Return the page with the outcomes in the last two columns of a section's table of predictions, which has a row per
    prediction and a column "predicted".
    """
    head, heading, rest = page.partition(heading)
    section, *others = re.split(r"(?m)^(?=## )", rest, maxsplit=1)
    lines = section.split("\n")
    (columns,) = (i for i, line in enumerate(lines) if "| predicted |" in line)
    first = columns + 2  # below the line that separates the head
    rows = range(first, next(i for i in range(first, len(lines)) if not lines[i].startswith("|")))
    for i, prediction, held in zip(rows, predictions, by_holm(results, predictions), strict=True):
        cells = f" {describe_outcome(prediction, results)} ", f" {held} "
        lines[i] = "|".join([*lines[i].split("|")[:-3], *cells, ""])
    return "".join([head, heading, "\n".join(lines), *others])


def print_outcomes(results, predictions):
    """Print the outcome of every prediction whose arms were run."""
    columns = "part", "quantity", "arm", "compared with", "predicted", "outcome", "by Holm"
    rows = []
    for prediction, held in zip(predictions, by_holm(results, predictions), strict=True):
        if seeds_of_both(results, prediction):
            task, arm, against, quantity, direction, *_ = prediction
            predicted = "higher" if direction > 0 else "lower"
            outcome = describe_outcome(prediction, results)
            rows.append([task, quantity.title, arm, str(against), predicted, outcome, held])
    print_table("Predictions", columns, rows, left=7)

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The runs as two CSV files, and what these say of the predictions."""

import csv
import math
import statistics
from typing import NamedTuple

from .mechanisms import MECHANISMS, PREDICTIONS
from .quantities import verdict


from overlap import interval  # isort: skip (tasks.py has said where it is)


RUNS, CURVES = "runs.csv", "curves.csv"
KEY = ("mechanism", "arm", "seed")
DIGITS = 5


def write_csv(results, folder):
    """A line a run, and a line a probe."""
    keys = sorted(results)
    of_runs = list(dict.fromkeys(name for key in keys for name, value in results[key].items() if _is_figure(value)))
    of_points = list(results[keys[0]]["curve"][0])
    runs = [[*key, *(_text(results[key].get(name, math.nan)) for name in of_runs)] for key in keys]
    points = [[*key, *(_text(point[name]) for name in of_points)] for key in keys for point in results[key]["curve"]]
    for name, header, rows in ((RUNS, of_runs, runs), (CURVES, of_points, points)):
        with (folder / name).open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow([*KEY, *header])
            writer.writerows(rows)


def _is_figure(value):
    return isinstance(value, float)


def _text(value):
    return "" if value != value else f"{value:.{DIGITS}g}" if isinstance(value, float) else value


def _number(text):
    return float(text) if text else float("nan")


def read_csv(folder):
    """What [`write_csv`] has written, by mechanism, arm and seed."""
    results = {}
    for name in (RUNS, CURVES):
        with (folder / name).open(newline="") as file:
            for row in csv.DictReader(file):
                key = (row.pop("mechanism"), row.pop("arm"), int(row.pop("seed")))
                figures = {column: _number(text) for column, text in row.items()}
                if name == RUNS:
                    results[key] = {**figures, "curve": []}
                else:
                    results[key]["curve"].append(figures)
    return results


def shown(value, unit):
    """A figure as it is written: shares in percent."""
    return f"{100 * value:.1f} %" if unit == "%" else f"{value:.3g}"


class Outcome(NamedTuple):
    mine: float  # mean over seeds
    others: float
    difference: float
    low: float
    high: float
    verdict: str


def check(prediction, results):
    """What became of a prediction."""
    mechanism, arm, against, quantity, direction, _ = prediction
    pairs = []
    for seed in sorted(seed for *name, seed in results if name == [mechanism, arm]):
        runs = [results[mechanism, arm, seed]]
        if against in MECHANISMS[mechanism].arms:
            pairs.append(quantity.measure(*runs, results[mechanism, against, seed]))
        else:
            pairs.append([*quantity.measure(*runs), against])
    pairs = [pair for pair in pairs if not any(map(math.isnan, pair))]
    mean, low, high = interval([mine - others for mine, others in pairs])
    means = [statistics.mean(values) for values in zip(*pairs, strict=True)]
    return Outcome(*means, mean, low, high, verdict(low, high, direction))


def print_report(results, console):
    """What became of every prediction."""
    for prediction in PREDICTIONS:
        console.print(prediction[:3], prediction.quantity.title, check(prediction, results))

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Table and picture of the runs that are kept, and what these say of the predictions."""

import math
import statistics

from matplotlib.figure import Figure
from rich.table import Table

from ..mechanisms.report import draw, print_outcomes, seeds_of
from .parts import GAIN, PARTS, PREDICTIONS, PRODUCTS, SUMS


from time_to_accuracy import cost  # isort: skip (mechanisms/tasks.py has said where it is)


KEY = ("part", "arm", "seed")
HEADING = "## A real language model\n"
DRAWN = PRODUCTS, SUMS  # arms that differ in what they spend


def print_report(results, console, path):
    """A line a part and arm, the predictions, and the picture."""
    arms = {part: [arm for arm in PARTS[part] if seeds_of(results, part, arm)] for part in PARTS}
    parts = [part for part in PARTS if arms[part]]
    columns = (
        "seeds",
        "before",
        "after",
        "least gain",
        "tokens",
        "CPU s",
        "tokens to +25",
        "CPU s to +25",
    )
    table = Table("problems", "arm", *columns, title="24 problems held out, 4 answers to each; medians over seeds")
    for part, arm in ((name, arm) for name in parts for arm in arms[name]):
        runs = [results[part, arm, seed] for seed in seeds_of(results, part, arm)]
        table.add_row(
            part,
            arm,
            str(len(runs)),
            f"{median_of(runs, 'start'):.1%}",
            f"{median_of(runs, 'accuracy'):.1%}",
            f"{100 * min(run['accuracy'] - run['start'] for run in runs):+.1f}",
            f"{median_of(runs, 'tokens'):,.0f}",
            f"{median_of(runs, 'cpu_seconds'):.0f}",
            *(to_target(runs, what) for what in ("tokens", "seconds")),
        )
    console.print(table)
    print_outcomes(results, console, PREDICTIONS)
    parts = [part for part in parts if part in DRAWN]
    figure = Figure(figsize=(13, 4 * len(parts)), layout="constrained")
    for part, row in zip(parts, figure.subplots(len(parts), 2, squeeze=False), strict=True):
        for axes, against in zip(row, ("rollouts", "tokens"), strict=True):
            draw(axes, results, part, arms[part], "accuracy", against)
            axes.set_title(f"SmolLM2-135M-Instruct: {part} held out", fontsize=10)
    figure.savefig(path, dpi=110)


def to_target(runs, what):
    """Tokens or seconds until the model was better by the target, in the median of the runs."""
    spent = statistics.median(cost(run, run["curve"][0]["accuracy"] + GAIN, what) for run in runs)
    return f"{spent:,.0f}" if spent < math.inf else "not reached"


def median_of(runs, figure):
    return statistics.median(run[figure] for run in runs)

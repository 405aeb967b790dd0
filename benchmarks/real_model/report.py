# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Table and picture of the runs that are kept, and what these say of the predictions."""

import statistics

from matplotlib.figure import Figure
from rich.table import Table

from ..mechanisms.report import draw, print_outcomes, seeds_of
from .parts import ARMS, PREDICTIONS, PRODUCTS, SECONDS, TOKENS


KEY = ("part", "arm", "seed")
HEADING = "## A real language model\n"


def print_report(results, console, path):
    """A line an arm, the predictions, and the picture."""
    arms = [arm for arm in ARMS if seeds_of(results, PRODUCTS, arm)]
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
    table = Table("arm", *columns, title="Held-out products, 4 answers to each of 24; medians over seeds")
    for arm in arms:
        runs = [results[PRODUCTS, arm, seed] for seed in seeds_of(results, PRODUCTS, arm)]
        table.add_row(
            arm,
            str(len(runs)),
            f"{median_of(runs, 'start'):.1%}",
            f"{median_of(runs, 'accuracy'):.1%}",
            f"{100 * min(run['accuracy'] - run['start'] for run in runs):+.1f}",
            f"{median_of(runs, 'tokens'):,.0f}",
            f"{median_of(runs, 'cpu_seconds'):.0f}",
            *(f"{statistics.median(quantity.measure(run)[0] for run in runs):,.0f}" for quantity in (TOKENS, SECONDS)),
        )
    console.print(table)
    print_outcomes(results, console, PREDICTIONS)
    figure = Figure(figsize=(13, 4), layout="constrained")
    for axes, against in zip(figure.subplots(1, 2), ("rollouts", "tokens"), strict=True):
        draw(axes, results, PRODUCTS, arms, "accuracy", against)
        axes.set_title("SmolLM2-135M-Instruct: held-out products", fontsize=10)
    figure.savefig(path, dpi=110)


def median_of(runs, figure):
    return statistics.median(run[figure] for run in runs)

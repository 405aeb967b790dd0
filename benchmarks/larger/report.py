# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Tables and picture of the runs that are kept, and what these say of the predictions."""

from matplotlib.figure import Figure

from ..mechanisms.report import draw, print_outcomes
from .parts import GAIN, LADDER, PREDICTIONS, ROWS_OF, TIME


import run as ladder  # isort: skip (mechanisms/tasks.py has said where these are)
import time_to_accuracy  # isort: skip


KEY = ("part", "arm", "seed")
WARM_UP = "warm-up"  # the part of the checkpoint, whose arm is its name
HEADING = "## A larger task\n"
PANELS = (  # part, what is drawn, against what
    (TIME, "accuracy", "tokens"),
    (TIME, "accuracy", "seconds"),
    (LADDER, "accuracy", "rollouts"),
    (LADDER, "entropy", "rollouts"),
    (LADDER, "length", "rollouts"),
    (LADDER, "truncated", "rollouts"),
)


def whole_seeds(results, part):
    """Seeds of which every run of a part is there."""
    seeds = sorted({seed for name, _, seed in results if name == part})
    return [seed for seed in seeds if all((part, arm, seed) in results for arm in ROWS_OF[part])]


def of_whole_seeds(results):
    """The runs of those seeds of each part of which all are there."""
    return {key: run for key, run in results.items() if key[0] in ROWS_OF and key[2] in whole_seeds(results, key[0])}


def print_report(results, console, path):
    """A table a part that has a whole seed, the predictions, and the picture."""
    (start,) = (run for (part, *_), run in results.items() if part == WARM_UP)
    done = {part: seeds for part in ROWS_OF if (seeds := whole_seeds(results, part))}
    results = of_whole_seeds(results)
    if TIME in done:
        target = {TIME: start["curve"][0]["accuracy"] + GAIN}
        time_to_accuracy.report(console, results, done[TIME], target, ROWS_OF[TIME])
    if LADDER in done:
        rungs = {(arm, seed): run for (part, arm, seed), run in results.items() if part == LADDER}
        ladder.print_table(rungs, done[LADDER], start, console)
    if done:
        print_outcomes(results, console, PREDICTIONS)
        plot(results, done, path)


def plot(results, parts, path):
    """A panel for each curve of `PANELS`."""
    panels = [panel for panel in PANELS if panel[0] in parts]
    figure = Figure(figsize=(13, 3.5 * (len(panels) // 2)), layout="constrained")
    for axes, (part, what, against) in zip(figure.subplots(len(panels) // 2, 2).flat, panels, strict=True):
        draw(axes, results, part, ROWS_OF[part], what, against)
        axes.set_title(f"{part}: {what}", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)

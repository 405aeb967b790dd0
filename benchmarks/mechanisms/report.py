# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The runs as two CSV files, and what these say of the predictions."""

import csv
import math
import re
import statistics
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from rich.table import Table

from .mechanisms import LEAST_UPPER_CLIP, MECHANISMS, PREDICTIONS
from .quantities import during, late, mean_known, read_at, tokens_for_one, verdict


from overlap import interval  # isort: skip (tasks.py has said where it is)
from verdicts import LEVEL, holm, p_value  # isort: skip


RUNS, CURVES = "runs.csv", "curves.csv"
KEY = ("mechanism", "arm", "seed")
NUM_DIGITS = 5
HEADING = "## The mechanisms\n"
BY_CONSTRUCTION = "by construction"


# ---- The CSV files ----


def write_csv(results, folder, key=KEY):
    """A line a run, and a line a probe; `key` says what the results' keys are."""
    keys = sorted(results)
    of_runs = list(dict.fromkeys(name for run in keys for name, value in results[run].items() if _is_figure(value)))
    of_points = list(results[keys[0]]["curve"][0])
    runs = [[*run, *(_text(results[run].get(name, math.nan)) for name in of_runs)] for run in keys]
    points = [[*run, *(_text(point[name]) for name in of_points)] for run in keys for point in results[run]["curve"]]
    for name, header, rows in ((RUNS, of_runs, runs), (CURVES, of_points, points)):
        with (folder / name).open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow([*key, *header])
            writer.writerows(rows)


def _is_figure(value):
    return isinstance(value, float)


def _text(value):
    """Blank where nothing was measured."""
    if not _is_figure(value):
        return value
    return "" if math.isnan(value) else f"{value:.{NUM_DIGITS}g}"


def read_csv(folder, key=KEY):
    """What [`write_csv`] has written, by mechanism, arm and seed, or what else the keys are."""
    results = {}
    for name in (RUNS, CURVES):
        with (folder / name).open(newline="") as file:
            for row in csv.DictReader(file):
                *names, seed = (row.pop(column) for column in key)
                run = (*names, int(seed))
                figures = {column: float(text) if text else math.nan for column, text in row.items()}
                if name == RUNS:
                    results[run] = {**figures, "curve": []}
                else:
                    results[run]["curve"].append(figures)
    return results


# ---- Predictions ----


class Outcome(NamedTuple):
    mine: float  # mean over seeds
    others: float
    difference: float
    low: float
    high: float
    verdict: str
    p: float


def seeds_of(results, mechanism, arm):
    return sorted(seed for *names, seed in results if names == [mechanism, arm])


def seeds_of_both(results, prediction):
    """Seeds with which a prediction's arm was run, and the arm that it is compared with."""
    mechanism, arm, against, *_ = prediction
    others = seeds_of(results, mechanism, against) if isinstance(against, str) else None
    return [seed for seed in seeds_of(results, mechanism, arm) if others is None or seed in others]


def check(prediction, results):
    """What became of a prediction."""
    mechanism, arm, against, quantity, direction, *_ = prediction
    pairs = []
    for seed in seeds_of_both(results, prediction):
        runs = [results[mechanism, arm, seed]]
        if isinstance(against, str):
            pairs.append(quantity.measure(*runs, results[mechanism, against, seed]))
        else:
            pairs.append([*quantity.measure(*runs), against])
    pairs = [pair for pair in pairs if not any(map(math.isnan, pair))]
    differences = [mine - others for mine, others in pairs]
    difference, low, high = interval(differences)
    means = [statistics.mean(values) for values in zip(*pairs, strict=True)]
    p = p_value(differences) if len(differences) > 1 else 1.0
    said = BY_CONSTRUCTION if prediction.by_construction else verdict(low, high, direction)
    return Outcome(*means, difference, low, high, said, p)


def by_holm(results, predictions=PREDICTIONS):
    """Each prediction's verdict as one of all that were tested: its own, or "not shown"."""
    run = [prediction for prediction in predictions if seeds_of_both(results, prediction)]
    tested = {prediction: check(prediction, results) for prediction in run if not prediction.by_construction}
    adjusted = dict(zip(tested, holm([outcome.p for outcome in tested.values()]), strict=True))
    held = {
        prediction: tested[prediction].verdict if p <= LEVEL else "not shown" for prediction, p in adjusted.items()
    }
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


def fill_in(page, results, heading=HEADING, predictions=PREDICTIONS):
    """The page with the outcomes in the last two columns of a section's table: a row for each prediction, in order."""
    head, heading, rest = page.partition(heading)
    section, *others = re.split(r"(?m)^(?=## )", rest, maxsplit=1)
    lines = section.split("\n")
    rows = [i for i, line in enumerate(lines) if line.startswith("| ")][1:]
    for i, prediction, held in zip(rows, predictions, by_holm(results, predictions), strict=True):
        cells = f" {describe_outcome(prediction, results)} ", f" {held} "
        lines[i] = "|".join([*lines[i].split("|")[:-3], *cells, ""])
    return "".join([head, heading, "\n".join(lines), *others])


# ---- Tables and picture ----

ARM_COLUMNS = {
    "accuracy": late("accuracy"),
    "pass@8": late("pass at 8"),
    "right with room": late("right with room"),
    "entropy": late("entropy"),
    "length": late("length"),
    "cut off": late("cut off"),
    "right, cut off": late("right but cut off"),
    "punished": during("of these punished"),
}


def print_report(results, console, path):
    """Every arm, every prediction, and the picture."""
    for name, mechanism in MECHANISMS.items():
        table = Table("arm", title=f"{mechanism.title}: means over seeds, of the last half of a run")
        for column in (*ARM_COLUMNS, "at the upper clip", "teach", "tokens", "for one that trains", "CPU s"):
            table.add_column(column, justify="right")
        for arm in mechanism.arms:
            runs = [results[name, arm, seed] for seed in seeds_of(results, name, arm)]
            ends = [run["curve"][-1] for run in runs]
            table.add_row(
                arm,
                *(_cell(mean_known(measure(*runs)), ".3f") for measure in ARM_COLUMNS.values()),
                f"{mean_of_runs(results, name, arm, 'upper-clip share'):.2%}",
                f"{mean_of_runs(results, name, arm, 'groups that teach'):.0%}",
                f"{mean_known(end['tokens'] for end in ends):,.0f}",
                f"{mean_known(tokens_for_one(*runs)):.2f}" if name == "sampling" else "",
                f"{mean_known(end['seconds'] for end in ends):.0f}",
            )
        console.print(table)
    console.print(describe_facts(results), highlight=False, soft_wrap=True)
    if not clip_binds(results):
        console.print("The upper clip does not bind: these runs say nothing about it.")
    print_outcomes(results, console)
    plot(results, path)


def print_outcomes(results, console, predictions=PREDICTIONS):
    """What became of every prediction whose arms were run."""
    table = Table("part", "quantity", "arm, beside", "predicted", "outcome", "by Holm", title="Predictions")
    for prediction, held in zip(predictions, by_holm(results, predictions), strict=True):
        if not seeds_of_both(results, prediction):
            continue
        table.add_row(
            prediction.mechanism,
            prediction.quantity.title,
            f"{prediction.arm}, {prediction.against}",
            "higher" if prediction.direction > 0 else "lower",
            describe_outcome(prediction, results),
            held,
        )
    console.print(table)


def mean_of_runs(results, name, arm, figure):
    return mean_known(results[name, arm, seed][figure] for seed in seeds_of(results, name, arm))


def clip_binds(results):
    """Whether enough tokens are at the upper clip that Clip-Higher moves."""
    return mean_of_runs(results, "clip", "0.2", "upper-clip share") >= LEAST_UPPER_CLIP


def describe_facts(results):
    """What the outcomes rest on, as it stands on the page."""
    clipped = [mean_of_runs(results, "clip", arm, "upper-clip share") for arm in MECHANISMS["clip"].arms]
    teach = mean_of_runs(results, "sampling", "off", "groups that teach")
    seeds = {seed for *_, seed in results}
    return (
        f"{len(seeds)} seeds. Tokens at an upper clip of {', '.join(MECHANISMS['clip'].arms)}: "
        f"{', '.join(f'{100 * share:.1f} %' for share in clipped)}. Groups that teach without dynamic sampling: "
        f"{100 * teach:.0f} %."
    )


def _cell(value, form):
    return "" if math.isnan(value) else f"{value:{form}}"


PANELS = (  # mechanism, what is drawn, against what
    ("clip", "entropy", "rollouts"),
    ("clip", "pass at 8", "rollouts"),
    ("token mean", "wrong length", "rollouts"),
    ("token mean", "wrong and too long", "rollouts"),
    ("overlong", "right with room", "rollouts"),
    ("overlong", "right but cut off", "rollouts"),
    ("sampling", "accuracy", "rollouts"),
    ("sampling", "accuracy", "tokens"),
    ("penalties", "cut off", "rollouts"),
)


def plot(results, path):
    """A panel for each curve of `PANELS`: means over seeds, and from the lowest to the highest."""
    figure = Figure(figsize=(13, 10), layout="constrained")
    for axes, (name, what, against) in zip(figure.subplots(3, 3).flat, PANELS, strict=True):
        draw(axes, results, name, MECHANISMS[name].arms, what, against)
        axes.set_title(f"{MECHANISMS[name].title}\n{what}", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def draw(axes, results, name, arms, what, against):
    """A curve an arm, as far as all its seeds go: their mean, and from the lowest to the highest."""
    for arm in arms:
        curves = [results[name, arm, seed]["curve"] for seed in seeds_of(results, name, arm)]
        grid = np.linspace(0, min(curve[-1][against] for curve in curves), 25)
        values = np.array([[read_at(curve, against, x, what) for x in grid] for curve in curves])
        (line,) = axes.plot(grid, values.mean(axis=0), label=arm)
        axes.fill_between(grid, values.min(axis=0), values.max(axis=0), color=line.get_color(), alpha=0.15)
    axes.set_xlabel(against)
    axes.locator_params(axis="x", nbins=5)
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)

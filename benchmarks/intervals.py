# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
Simulated share of 95% intervals of `trl-dapo eval` and `trl-dapo compare` that contain the true value.

    python -m benchmarks intervals    # 2,000 evaluations per cell; about eight minutes on one core

A cell is a distribution of accuracies over problems (a shape), a score or a change, a number of problems and a number
of completions. Problems are drawn from the shape, and completions from the accuracy of each problem. The true value is
the mean over all problems of that shape.

Writes benchmarks/intervals.csv and the table of docs/evaluation.md.
"""

from pathlib import Path

import numpy as np

from trl_dapo.evaluation.statistics import interval_of_means, pass_at_k

from .frame.kept import read_rows, write_rows
from .frame.tables import fill_block, row_of


CSV = Path(__file__).with_suffix(".csv")
DOCS = Path(__file__).parents[1] / "docs" / "evaluation.md"
START, END = "<!-- coverage: python -m benchmarks --from-kept -->", "<!-- end of coverage -->"
NUM_EVALUATIONS, NUM_TRUTH = 2_000, 1_000_000
SIZES = [(n, k) for n in (30, 100) for k in (8, 32)]
# For each shape, the shares of the problems with the Beta distribution of their accuracies, or with their one
# accuracy.
SHAPES = {
    "Beta(0.1, 0.9)": [(1, (0.1, 0.9))],
    "Beta(0.5, 5)": [(1, (0.5, 5))],
    "Beta(9, 0.5)": [(1, (9, 0.5))],
    "Beta(1, 1)": [(1, (1, 1))],
    "half 0, half 1": [(0.5, 0.0), (0.5, 1.0)],
    "all 0.5": [(1, 0.5)],
    "97 % at 0, 3 % Beta(1, 1)": [(0.97, 0.0), (0.03, (1, 1))],
    "97 % at 1, 3 % Beta(1, 1)": [(0.97, 1.0), (0.03, (1, 1))],
    "90 % at 0, 10 % at 0.2": [(0.9, 0.0), (0.1, 0.2)],
    "Beta(0.2, 8)": [(1, (0.2, 8))],
}
FIGURES = ("avg@k", "pass@4", "pass@8", "maj@k")
INCORRECT_ANSWERS = (0.5, 0.25, 0.15, 0.1)  # shares of the incorrect completions
FLIPPED, MENDED = 0.03, 0.05


# ---- Problems, completions and the true value ----


def draw(shape, size, rng):
    """Draw the accuracies of problems."""
    parts = rng.choice(len(shape), p=[share for share, _ in shape], size=size)
    drawn = [rng.beta(*of, size) if isinstance(of, tuple) else np.full(size, of) for _, of in shape]
    return np.choose(parts, drawn)


def mean_failing(shape, tries):
    """Return the mean over problems of the probability that all of `tries` completions are incorrect."""
    total = 0
    for share, of in shape:
        if isinstance(of, tuple):
            a, b = of
            total += share * np.prod([(b + i) / (a + b + i) for i in range(tries)])
        else:
            total += share * (1 - of) ** tries
    return total


def majority(num_correct, k, rng):
    """Return maj@k of problems, as `trl_dapo.evaluation.maj_at_k` counts it: answers that tie share the vote."""
    num_incorrect = rng.multinomial(k - num_correct, INCORRECT_ANSWERS)
    most = np.maximum(num_correct, num_incorrect.max(axis=-1))
    num_winners = (num_correct == most) + (num_incorrect == most[..., None]).sum(axis=-1)
    return (num_correct == most) / num_winners


def single(shape, figure, n, k, num, rng):
    """Simulate evaluations: return the score of each problem in each of them, and the true value."""
    num_correct = rng.binomial(k, draw(shape, (num, n), rng))
    if figure == "avg@k":
        return num_correct / k, 1 - mean_failing(shape, 1)
    if figure == "maj@k":
        truth = majority(rng.binomial(k, draw(shape, NUM_TRUTH, rng)), k, rng).mean()
        return majority(num_correct, k, rng), truth
    tries = int(figure.removeprefix("pass@"))
    table = pass_at_k(np.arange(k) < np.arange(k + 1)[:, None], tries)
    return table[num_correct], 1 - mean_failing(shape, tries)


def trained(accuracy, change, rng):
    """Return the accuracies after training."""
    flips = rng.random(accuracy.shape) < FLIPPED
    if change == "3 % flip":
        return np.where(flips, 1 - accuracy, accuracy)
    return accuracy + (MENDED * (1 - accuracy) if change == "5 % of failures mended" else 0)


def paired(shape, change, n, k, num, rng):
    """Simulate comparisons: return the difference of each problem in each of them, and the true value."""
    before = draw(shape, (num, n), rng)
    after = trained(before, change, rng)
    if change == "3 % flip up":
        after = np.where(rng.random(before.shape) < FLIPPED, 1.0, before)
    failing = mean_failing(shape, 1)
    truth = {
        "none": 0,
        "5 % of failures mended": MENDED * failing,
        "3 % flip": FLIPPED * (2 * failing - 1),
        "3 % flip up": FLIPPED * failing,
    }[change]
    return (rng.binomial(k, after) - rng.binomial(k, before)) / k, truth


# ---- Intervals ----


def counts_of(values):
    """Return the distinct values, and how often each evaluation has them."""
    distinct, places = np.unique(values, return_inverse=True)
    places = places.reshape(values.shape) + len(distinct) * np.arange(len(values))[:, None]
    return distinct, np.bincount(places.ravel(), minlength=len(values) * len(distinct)).reshape(len(values), -1)


def coverage(values, truth, ends):
    """Return the share of the evaluations whose interval contains the true value, and the mean width."""
    low, high = interval_of_means(*counts_of(values), ends)
    held = np.mean((low <= truth + 1e-9) & (truth - 1e-9 <= high))
    return {"held": float(held), "width": round(float(np.mean(high - low)), 4)}


# ---- Cells and the table ----


def cells():
    """Yield what is simulated: kind, shape, and score or change."""
    for shape in SHAPES:
        yield from ((single, shape, figure) for figure in FIGURES)
    for shape in SHAPES:
        yield from ((paired, shape, change) for change in ("none", "5 % of failures mended", "3 % flip"))
    yield paired, "half 0, half 1", "3 % flip up"


def simulate(num):
    rows = []
    for place, (kind, shape, what) in enumerate(cells()):
        for n, k in SIZES:
            rng = np.random.default_rng([place, n, k])
            values, truth = kind(SHAPES[shape], what, n, k, num, rng)
            found = coverage(values, truth, (0, 1) if kind is single else (-1, 1))
            rows.append({"kind": kind.__name__, "shape": shape, "what": what, "n": n, "k": k, "truth": f"{truth:.6g}"})
            rows[-1] |= found
        print(table(rows[-len(SIZES) :])[-1], flush=True)
    return rows


def table(rows):
    """Return lines of Markdown: a row for each shape and score, in percent."""
    sizes = sorted({(int(row["n"]), int(row["k"])) for row in rows})
    found = {}
    for row in rows:
        what = row["what"] if row["kind"] == "single" else f"difference: {row['what']}"
        what = what.replace("mended", "solved").replace(" %", "%")
        by_size = found.setdefault((row["shape"].replace(" %", "%"), what), {})
        by_size[int(row["n"]), int(row["k"])] = f"{100 * float(row['held']):.1f}"
    head = row_of("accuracies of the problems", "score", *(f"n = {n}, k = {k}" for n, k in sizes))
    lines = [head, "| --- " * (2 + len(sizes)) + "|"]
    return lines + [row_of(shape, what, *(of[size] for size in sorted(of))) for (shape, what), of in found.items()]


def filled_in(page):
    """Return the page with the table of the CSV file."""
    return fill_block(page, START, END, table(read_rows(CSV)))


def fill_in():
    DOCS.write_text(filled_in(DOCS.read_text()))


def main():
    rows = simulate(NUM_EVALUATIONS)
    write_rows(CSV, rows[0], [row.values() for row in rows])
    fill_in()

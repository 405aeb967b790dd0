# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
How often the 95 % intervals of `trl-dapo eval` and `trl-dapo compare` hold the truth, simulated.

    python -m benchmarks intervals    # 2,000 evaluations a cell; about eight minutes of one core

A cell is a shape of the problems' accuracies, a figure, a number of problems and of completions. Problems are drawn
from the shape, completions from each problem's accuracy; the truth is the mean over all problems of that shape.

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
# Parts of the problems with the Beta distribution of their accuracy, or with one accuracy.
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
WRONG_ANSWERS = (0.5, 0.25, 0.15, 0.1)  # shares of the wrong completions
FLIPPED, MENDED = 0.03, 0.05


# ---- Problems, completions and the truth ----


def draw(shape, size, rng):
    """Accuracies of problems."""
    parts = rng.choice(len(shape), p=[share for share, _ in shape], size=size)
    drawn = [rng.beta(*of, size) if isinstance(of, tuple) else np.full(size, of) for _, of in shape]
    return np.choose(parts, drawn)


def mean_failing(shape, tries):
    """Mean over problems of the probability that all of so many tries fail."""
    total = 0
    for share, of in shape:
        if isinstance(of, tuple):
            a, b = of
            total += share * np.prod([(b + i) / (a + b + i) for i in range(tries)])
        else:
            total += share * (1 - of) ** tries
    return total


def majority(num_right, k, rng):
    """maj@k of problems, as `trl_dapo.evaluation.maj_at_k` has it: those who tie share the verdict."""
    wrong = rng.multinomial(k - num_right, WRONG_ANSWERS)
    most = np.maximum(num_right, wrong.max(axis=-1))
    num_winners = (num_right == most) + (wrong == most[..., None]).sum(axis=-1)
    return (num_right == most) / num_winners


def single(shape, figure, n, k, num, rng):
    """Values of each evaluation's problems, and the truth."""
    num_right = rng.binomial(k, draw(shape, (num, n), rng))
    if figure == "avg@k":
        return num_right / k, 1 - mean_failing(shape, 1)
    if figure == "maj@k":
        truth = majority(rng.binomial(k, draw(shape, NUM_TRUTH, rng)), k, rng).mean()
        return majority(num_right, k, rng), truth
    tries = int(figure.removeprefix("pass@"))
    table = pass_at_k(np.arange(k) < np.arange(k + 1)[:, None], tries)
    return table[num_right], 1 - mean_failing(shape, tries)


def trained(accuracy, change, rng):
    """The accuracies after a training."""
    flips = rng.random(accuracy.shape) < FLIPPED
    if change == "3 % flip":
        return np.where(flips, 1 - accuracy, accuracy)
    return accuracy + (MENDED * (1 - accuracy) if change == "5 % of failures mended" else 0)


def paired(shape, change, n, k, num, rng):
    """The same of a comparison."""
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
    """Distinct values, and how often each evaluation has them."""
    distinct, places = np.unique(values, return_inverse=True)
    places = places.reshape(values.shape) + len(distinct) * np.arange(len(values))[:, None]
    return distinct, np.bincount(places.ravel(), minlength=len(values) * len(distinct)).reshape(len(values), -1)


def coverage(values, truth, ends):
    """Share of the evaluations whose interval holds the truth, and its mean width."""
    low, high = interval_of_means(*counts_of(values), ends)
    held = np.mean((low <= truth + 1e-9) & (truth - 1e-9 <= high))
    return {"held": float(held), "width": round(float(np.mean(high - low)), 4)}


# ---- Cells and the table ----


def cells():
    """What is simulated: kind, shape, figure or change."""
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
    """Lines of Markdown: a row for each shape and figure, in percent."""
    sizes, found = sorted({(int(row["n"]), int(row["k"])) for row in rows}), {}
    for row in rows:
        what = row["what"] if row["kind"] == "single" else f"difference: {row['what']}"
        found.setdefault((row["shape"], what), {})[int(row["n"]), int(row["k"])] = f"{100 * float(row['held']):.1f}"
    lines = [row_of("problems", "figure", *(f"n = {n}, k = {k}" for n, k in sizes)), "| --- " * (2 + len(sizes)) + "|"]
    return lines + [row_of(shape, what, *(of[size] for size in sorted(of))) for (shape, what), of in found.items()]


def filled_in(page):
    """The page with the table of the file."""
    return fill_block(page, START, END, table(read_rows(CSV)))


def fill_in():
    DOCS.write_text(filled_in(DOCS.read_text()))


def main():
    rows = simulate(NUM_EVALUATIONS)
    write_rows(CSV, rows[0], [row.values() for row in rows])
    fill_in()

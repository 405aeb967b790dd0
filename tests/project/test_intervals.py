# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The coverage of intervals: its table, what docs/evaluation.md says of it, and a few cells of it again."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks import intervals
from benchmarks.frame.kept import read_rows
from trl_dapo.evaluation import maj_at_k


pytestmark = pytest.mark.fast

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs" / "evaluation.md").read_text()


ROWS = read_rows(intervals.CSV)


def percent(row):
    return 100 * float(row["held"])


def test_every_interval_holds_the_truth_in_93_of_100():
    assert min(map(percent, ROWS)) >= 93
    assert "**Below 93 %** in no cell" in DOCS
    assert f"**Above 98 %** in {sum(percent(row) > 98 for row in ROWS)} of {len(ROWS)} cells" in DOCS


@pytest.mark.parametrize("place", [0, 55, 123], ids=lambda place: f"{ROWS[place]['shape']} {ROWS[place]['what']}")
def test_a_cell_simulated_again_is_that_of_the_file(place):
    kind, shape, what = list(intervals.cells())[place // 4]
    row = ROWS[place]
    n, k = int(row["n"]), int(row["k"])
    assert (kind.__name__, shape, what) == (row["kind"], row["shape"], row["what"])
    rng = np.random.default_rng([place // 4, n, k])
    values, truth = kind(intervals.SHAPES[shape], what, n, k, intervals.NUM_EVALUATIONS, rng)
    found = intervals.coverage(values, truth, (0, 1) if row["kind"] == "single" else (-1, 1))
    assert found["held"] == pytest.approx(float(row["held"]), abs=0.002)


def test_the_benchmarks_majority_is_the_packages():
    class Draws:
        """In place of random numbers: how the wrong completions share four answers."""

        def multinomial(self, num_wrong, shares):
            return np.array(WRONG)

    WRONG = [[3, 0, 0, 0], [1, 1, 0, 0], [2, 1, 0, 0], [0, 0, 0, 0], [4, 0, 0, 0]]
    num_right = np.array([1, 2, 2, 4, 4]) - np.array([0, 0, 0, 0, 4])
    answers = [["right"] * right + [a for a, num in zip("abcd", wrong, strict=True) for _ in range(num)]
               for right, wrong in zip(num_right, WRONG, strict=True)]  # fmt: skip
    expected = [maj_at_k([each], [[answer == "right" for answer in each]]).item() for each in answers]
    assert intervals.majority(num_right, 4, Draws()).tolist() == expected == [0, 1, 0.5, 1, 0]

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The coverage of intervals: its table, what docs/evaluation.md says about it, and a few cells simulated again."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks import intervals
from benchmarks.frame.kept import read_rows


pytestmark = pytest.mark.fast

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs" / "evaluation.md").read_text()
ROWS = read_rows(intervals.CSV)


def test_every_interval_contains_the_true_value_in_93_of_100_evaluations():
    percents = [100 * float(row["held"]) for row in ROWS]
    assert min(percents) >= 93
    assert "**Below 93%** in no cell" in DOCS
    assert f"**Above 98%** in {sum(percent > 98 for percent in percents)} of {len(ROWS)} cells" in DOCS


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

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
The CSV files of runs that are kept: runs.csv with a line per run, and curves.csv with a line per point of a curve.
"""

import csv
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from .predictions import fill_in, print_outcomes


RUNS, CURVES = "runs.csv", "curves.csv"
NUM_DIGITS = 5
BENCHMARKS = Path(__file__).parents[1]
EVIDENCE, IMAGES = BENCHMARKS / "EVIDENCE.md", BENCHMARKS / "images"


def read_rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write_rows(path, header, rows):
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)


def write_csv(results, folder, key):
    """Write results to the CSV files of a folder. `key` names the parts of their keys."""
    keys = sorted(results)
    of_runs = list(dict.fromkeys(name for run in keys for name, value in results[run].items() if _is_figure(value)))
    of_points = list(results[keys[0]]["curve"][0])
    runs = [[*run, *(_text(results[run].get(name, math.nan)) for name in of_runs)] for run in keys]
    points = [[*run, *(_text(point[name]) for name in of_points)] for run in keys for point in results[run]["curve"]]
    write_rows(folder / RUNS, [*key, *of_runs], runs)
    write_rows(folder / CURVES, [*key, *of_points], points)


def _is_figure(value):
    return isinstance(value, float)


def _text(value):
    """Return a value as text, or an empty string if it was not measured."""
    if not _is_figure(value):
        return value
    return "" if math.isnan(value) else f"{value:.0f}" if value.is_integer() else f"{value:.{NUM_DIGITS}g}"


def read_csv(folder, key):
    """Return the results that [`write_csv`] has written to a folder, if any."""
    results = {}
    for name in (RUNS, CURVES):
        for row in read_rows(folder / name) if (folder / name).exists() else ():
            *names, seed = (row.pop(column) for column in key)
            run = (*names, int(seed))
            figures = {column: float(text) if text else math.nan for column, text in row.items()}
            if name == RUNS:
                results[run] = {**figures, "curve": []}
            else:
                results[run]["curve"].append(figures)
    return results


class Study(NamedTuple):
    """A study whose runs are kept, and whose predictions have a row each in a section of EVIDENCE.md."""

    folder: Path
    key: tuple  # names of the columns that identify a run, the seed last
    heading: str  # of the section
    predictions: tuple
    counted: Callable = dict  # returns the runs that count, by task, arm and seed, from the kept ones

    def read(self):
        return read_csv(self.folder, self.key)

    def write(self, results):
        write_csv(results, self.folder, self.key)

    def filled_in(self, page):
        """Return the page with the outcomes of the predictions."""
        return fill_in(page, self.counted(self.read()), self.heading, self.predictions)

    def fill_in(self):
        EVIDENCE.write_text(self.filled_in(EVIDENCE.read_text()))

    def report(self):
        """Print the outcomes of the predictions, and write them to the page."""
        print_outcomes(self.counted(self.read()), self.predictions)
        self.fill_in()

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""What a run did, from what it left on disk: a page that stands alone, and its pictures.

runs      a folder to a log, and to samples of completions
panels    what of a log is drawn
drawing   panels to pictures
groups    what a ledger says
page      runs to a page
"""

from .drawing import plot_panel, plot_run
from .page import write_report
from .panels import PANELS, Panel
from .runs import Run, load_log_history, load_run, load_runs, series


__all__ = [
    "PANELS",
    "Panel",
    "Run",
    "load_log_history",
    "load_run",
    "load_runs",
    "plot_panel",
    "plot_run",
    "series",
    "write_report",
]

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The report of a run: an HTML page and pictures, made from the files of the run."""

from .drawing import PANELS, Panel, plot_comparison, plot_panel, plot_run
from .html import write_report
from .runs import Run, load_log_history, load_run, load_runs, series


__all__ = [
    "PANELS",
    "Panel",
    "Run",
    "load_log_history",
    "load_run",
    "load_runs",
    "plot_comparison",
    "plot_panel",
    "plot_run",
    "series",
    "write_report",
]

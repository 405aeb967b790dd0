# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Pictures of runs."""

import numpy as np
from matplotlib.figure import Figure

from .measures import read_at
from .predictions import seeds_of


def draw_panels(results, panels, arms, num_columns, size, path):
    """
    Draw a panel for each of `panels`: task, figure, what it is drawn against, and title. Each arm has a curve, up to
    the point that all of its seeds reach: their mean, and a band from the lowest to the highest.
    """
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(len(panels) // num_columns, num_columns, squeeze=False)
    for axes, (task, what, against, title) in zip(grid.flat, panels, strict=True):
        for arm in arms[task]:
            curves = [results[task, arm, seed]["curve"] for seed in seeds_of(results, task, arm)]
            spent = np.linspace(0, min(curve[-1][against] for curve in curves), 25)
            values = np.array([[read_at(curve, against, x, what) for x in spent] for curve in curves])
            (line,) = axes.plot(spent, values.mean(axis=0), label=arm)
            axes.fill_between(spent, values.min(axis=0), values.max(axis=0), color=line.get_color(), alpha=0.15)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel(against)
        axes.locator_params(axis="x", nbins=5)
        axes.legend(fontsize=8)
        axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)

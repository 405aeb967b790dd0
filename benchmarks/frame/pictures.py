# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Pictures of runs."""

import numpy as np
from matplotlib.figure import Figure

from .measures import read_at
from .predictions import seeds_of


def save(figure, path, dpi=110):
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=dpi)


def draw_panels(results, panels, arms, num_columns, size, path):
    """
    A panel for each task, figure, what it is drawn against, and title. A curve an arm, as far as all its seeds go:
    their mean, and from the lowest to the highest.
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
    save(figure, path)


def dots(axes, values, middles, title):
    """
    A row an arm, from the top: a dot a run and a bar at their middle, by arm; a run in `values` is a number and
    whether it got where it should, else its dot is hollow.
    """
    for i, (runs, middle) in enumerate(zip(values.values(), middles, strict=True)):
        for value, reached in runs:
            fill = {} if reached else {"markerfacecolor": "none"}
            axes.plot(value, i, "o", color=f"C{i}", alpha=0.6, **fill)
        if np.isfinite(middle):
            axes.plot(middle, i, "|", color=f"C{i}", markersize=20, markeredgewidth=2)
    axes.set(title=title, yticks=range(len(values)))
    axes.set_yticklabels(values)
    axes.grid(axis="x", alpha=0.3)

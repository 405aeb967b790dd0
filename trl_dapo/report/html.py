# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes the report of runs, an HTML page that needs no other file. Text of a model is escaped, never interpreted."""

import base64
import json
import os
import re
import unicodedata
from collections.abc import Callable, Sequence
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from matplotlib.figure import Figure

from ..number_format import format_count
from ..run.counts import ROLLOUTS, total
from ..version import __version__
from . import drawing
from .drawing import (
    ACCEPTED,
    AXES,
    BY_NAME,
    COMPARED,
    OF_SEVERAL_RUNS,
    ONE_RUN_EACH,
    PANELS,
    PAPER,
    REWARDS,
    RUN_COLOURS,
    Panel,
    Points,
    smooth,
)
from .runs import Run, is_number, load_runs, series


PAGE_NAME, OVERVIEW_NAME = "report.html", "overview.png"
NUM_OVERVIEW_PANELS = 6
MAX_EVALUATIONS = 12  # during training, of one run
SCORE = re.compile(r"eval_(\S+_)?(avg|pass|maj)@\d+")
MAX_CHARACTERS = 1200  # shown of a prompt or a completion; the middle is left out, because the answer is at the end
COLUMNS = {
    "reward": "reward",
    "reward of\ntrained groups": "trained_reward",
    "correct": "accuracy",
    "accepted groups\nin a batch": "accepted",
    "acceptance\nrate": "acceptance",
    "tokens generated\nper token trained": "price",
    "tokens, prompts\nincluded": "tokens",
    "last evaluation": "evaluation",
}
# A panel, its points of each run, and the function that draws it with a title and in a theme.
Picture = tuple[Panel, list[dict[str, Points]], Callable[..., Figure]]


def write_report(run_dirs: Sequence[str | os.PathLike], output_dir: str | os.PathLike | None = None) -> Path:
    """
    Write a report of one or several runs: the page `report.html`, which needs no other file, and its pictures as PNGs.

    Args:
        run_dirs (`Sequence[str | os.PathLike]`):
            Output folders of the runs.
        output_dir (`str` or `os.PathLike`, *optional*):
            Folder to write to. Defaults to `report` in the folder of the first run.

    Returns:
        `Path`: The page.

    Raises:
        FileNotFoundError: If a folder contains no log.
        ValueError: If there are more runs than colours, or nothing to draw.
    """
    runs = load_runs(run_dirs)
    if len(runs) > len(RUN_COLOURS):
        raise ValueError(
            f"A report can show at most {len(RUN_COLOURS)} runs, because that is the number of colours, got "
            f"{len(runs)}. Name fewer runs."
        )
    histories, labels = [run.log_history for run in runs], [_visible(run.label) for run in runs]
    shown = []
    for panel in PANELS:
        by_run = [panel.find(history) for history in histories]
        fewest = 2 if panel in OF_SEVERAL_RUNS else 1
        if sum(map(bool, by_run)) >= fewest:
            shown.append((panel, by_run))
    if not shown:
        raise ValueError(
            f"The log of {' and '.join(map(str, run_dirs))} contains no metric that a report shows. Let the run log "
            f"at least once."
        )
    output_dir = Path(run_dirs[0], "report") if output_dir is None else Path(output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    overview = _choose_overview([panel for panel, _ in shown], len(runs))
    (output_dir / OVERVIEW_NAME).write_bytes(drawing.render(drawing.plot_runs(histories, labels, overview), "png"))
    pictures: list[Picture] = []
    for panel, by_run in shown:
        pictures.append((panel, by_run, partial(drawing.plot_panel, panel, histories, labels)))
    for panel, by_run in _named(runs):
        pictures.append((panel, by_run, partial(drawing.plot_named, panel, by_run, labels)))
    for panel, _, plot in pictures:
        (output_dir / f"{panel.name}.png").write_bytes(drawing.render(plot(panel.title), "png"))
    path = output_dir / PAGE_NAME
    path.write_text(_page(runs, labels, pictures), encoding="utf-8")
    return path


def _choose_overview(shown: list[Panel], num_runs: int) -> list[Panel]:
    if num_runs > 1:
        # Accepted and dropped groups of several runs do not fit into one small picture. The panels that compare runs
        # come first.
        shown = [panel for panel in shown if panel not in ONE_RUN_EACH]
        shown.sort(key=lambda panel: panel not in COMPARED)
    return shown[:NUM_OVERVIEW_PANELS]


def _page(runs: list[Run], labels: list[str], pictures: list[Picture]) -> str:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(visible=_visible, cut=_cut, figure=_figure)
    environment.filters["percent"] = lambda share: "-" if share is None else f"{share:.1%}"
    template = environment.from_string(resources.files(__package__).joinpath("page.html.jinja").read_text("utf-8"))
    shown = [panel for panel, *_ in pictures]
    summaries = list(map(_summary, runs))
    return template.render(
        version=__version__,
        runs=list(zip(labels, RUN_COLOURS, runs, summaries, strict=False)),
        panels=[_described(picture, labels) for picture in pictures],
        settings=_settings(runs),
        outcomes=_outcomes_of_runs(runs),
        evaluated=[_evaluated(run.log_history) for run in runs],
        columns=_columns(summaries),
        left_out=[panel.title for panel in PANELS if panel not in (*shown, *OF_SEVERAL_RUNS)],
        notes=[f"{label}: {note}" for label, run in zip(labels, runs, strict=True) for note in run.notes],
    )


# ---- The table ----


def _summary(run: Run) -> dict[str, str | None]:
    """Return the row of a run in the table, with `None` for what was not logged."""
    log_history, step = run.log_history, f"step {run.last_step:,}"
    of = "" if run.max_steps is None else f" of {run.max_steps:,}"
    if not run.finished:
        state = f"not finished: running, or stopped at {step}{of}; {run.checkpoint or 'no checkpoint'} to resume from"
    elif run.max_steps is not None and run.last_step < run.max_steps:
        state = f"finished early, at {step}{of}"
    else:
        state = f"finished, {step}"
    generated, trained = (_total(log_history, f"dynamic_sampling/tokens_{what}") for what in ("generated", "trained"))
    _, tokens = series(log_history, "num_tokens")
    return {
        "state": state,
        "written": f"{run.written:%Y-%m-%d %H:%M %Z}" if run.written else None,
        "reward": _latest(series(log_history, "reward"), "{:.3f}"),
        "trained_reward": _latest(series(log_history, "trained_reward"), "{:.3f}"),
        "accuracy": _latest(series(log_history, "task_accuracy"), "{:.0%}"),
        "accepted": _latest(ACCEPTED.find(log_history).get("accepted"), "{:.0%}"),
        "acceptance": _latest(series(log_history, "dynamic_sampling/acceptance_rate"), "{:.0%}"),
        "price": f"{generated / trained:.2f}" if trained > 0 else None,
        "tokens": format_count(tokens[-1]) if tokens else None,
        "evaluation": _last_evaluation(log_history),
    }


def _total(log_history: list[dict], metric: str) -> float:
    """Return the sum of a metric over all rollouts of log entries with numbers."""
    return total([e for e in log_history if is_number(e.get(metric)) and is_number(e.get(ROLLOUTS, 1.0))], metric)


def _latest(points: Points | None, template: str) -> str | None:
    """Return the last value of the line in the picture, which is the mean over the last twentieth of the run."""
    return template.format(smooth(points[1])[-1]) if points and points[1] else None


def _columns(summaries: list[dict[str, str | None]]) -> dict[str, str]:
    """Return the columns of the table by their titles, without those that are empty for all runs."""
    return {title: name for title, name in COLUMNS.items() if any(summary[name] is not None for summary in summaries)}


def _last_evaluation(log_history: list[dict]) -> str | None:
    scores = [
        (value, f"{metric.removeprefix('eval_')} at step {entry['step']:,}")
        for entry in log_history
        for metric, value in entry.items()
        if re.fullmatch(r"eval_avg@\d+", metric) and is_number(value)
    ]
    before = f"{scores[0][0]:.1%} -> " if len(scores) > 1 else ""
    return f"{before}{scores[-1][0]:.1%}\n{scores[-1][1]}" if scores else None


# ---- Tables of several runs ----


def _settings(runs: list[Run]) -> list[dict[str, Any]]:
    """
    Return the settings that any run changed, with the default and the value in each run.

    Settings that differ between the runs come first.
    """
    defaults = {name: setting["default"] for run in runs for name, setting in (run.settings or {}).items()}
    rows = []
    for name, default in sorted(defaults.items()):
        values = [
            None if run.settings is None else _as_set(run.settings.get(name, {"value": default})["value"])
            for run in runs
        ]
        differs = len({*values} - {None}) > 1
        rows.append({"name": name, "default": _as_set(default), "values": values, "differs": differs})
    return sorted(rows, key=lambda row: not row["differs"])


def _as_set(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value)


def _outcomes_of_runs(runs: list[Run]) -> list[tuple[str, list[dict[str, Any] | None]]]:
    """Return what became of the groups, with the figures of each run."""
    found = [{row["outcome"]: row for row in run.groups.outcomes} if run.groups else {} for run in runs]
    names = dict.fromkeys(outcome for of_run in found for outcome in of_run)
    return [(name, [of_run.get(name) for of_run in found]) for name in names]


def _evaluated(log_history: list[dict]) -> dict[str, Any] | None:
    """Return the evaluations during training: the names of the scores, and the steps with their values."""
    scored = []
    for entry in log_history:
        values = {name: value for name, value in entry.items() if SCORE.fullmatch(name) and is_number(value)}
        if values:
            scored.append((entry["step"], values))
    if not scored:
        return None
    names = list(dict.fromkeys(name for _, values in scored for name in values))
    # The first, the last, and evaluations at equal distances between them.
    count = min(len(scored), MAX_EVALUATIONS)
    chosen = sorted({round(i * (len(scored) - 1) / max(count - 1, 1)) for i in range(count)})
    return {
        "names": [name.removeprefix("eval_") for name in names],
        "rows": [(scored[i][0], [scored[i][1].get(name) for name in names]) for i in chosen],
        "num_left_out": len(scored) - len(chosen),
    }


# ---- Pictures ----


def _described(picture: Picture, labels: list[str]) -> dict[str, Any]:
    """Return what the page needs of a panel, with its picture in each theme as a data URL."""
    panel, by_run, plot = picture
    papers = {theme: base64.b64encode(drawing.render(plot(theme=theme), "svg", theme)).decode() for theme in PAPER}
    sentences = [
        _in_words(panel, f"{label}, {name}", places, values)
        for label, of_run in zip(labels, by_run, strict=True)
        for name, (places, values) in of_run.items()
    ]
    return {
        "name": panel.name,
        "title": panel.title,
        "caption": panel.caption,
        "is_wide": panel in (*ONE_RUN_EACH, *BY_NAME) and sum(map(bool, by_run)) > 1,
        "alt": f"{panel.title}, {panel.unit} over {AXES[panel.over]}. {' '.join(sentences)}",
        **{theme: f"data:image/svg+xml;base64,{drawn}" for theme, drawn in papers.items()},
    }


def _in_words(panel: Panel, line: str, places: list[int], values: list[float]) -> str:
    """Return a description of a line in words, for readers who cannot see it."""
    between = ""
    if panel not in BY_NAME:
        values = smooth(values)
        between = f", between {min(values):.3g} and {max(values):.3g}"
    first, last = (
        f"step {place}" if panel.over == "step" else f"{place:,} tokens" for place in (places[0], places[-1])
    )
    return f"{line}: {values[0]:.3g} at {first}, {values[-1]:.3g} at {last}{between}."


def _named(runs: list[Run]) -> list[tuple[Panel, list[dict[str, Points]]]]:
    """Return the panels by reward function and by source with the lines of each run. A run with only one has none."""
    rewards = [REWARDS.find(run.log_history) for run in runs]
    sources = [run.groups.by_source if run.groups else {} for run in runs]
    named = []
    for panel, by_run in zip(BY_NAME, (rewards, sources), strict=True):
        several = [names if len(names) > 1 else {} for names in by_run]
        by_name = [{_visible(name): points for name, points in names.items()} for names in several]
        if any(by_name):
            named.append((panel, by_name))
    return named


# ---- What a model wrote ----


def _visible(text: Any) -> str:
    """Return a text in which characters are escaped that are invisible or would change the display of others."""
    return "".join(
        char
        if char in "\n\t" or unicodedata.category(char) not in ("Cc", "Cf", "Cs")
        else char.encode("unicode_escape").decode()
        for char in str(text)
    )


def _cut(text: Any, limit: int = MAX_CHARACTERS) -> tuple[str, int, str]:
    """Return the beginning of a text, the number of characters that are left out, and its end."""
    text = str(text)
    if len(text) <= limit:
        return text, 0, ""
    half = limit // 2
    return text[:half], len(text) - 2 * half, text[-half:]


def _figure(value: Any) -> str:
    """Return a reward, or another value that a reward function has logged, as text."""
    if is_number(value):
        return f"{value:.4g}"
    begin, num_left_out, end = _cut("none" if value is None else value, limit=60)
    return _visible(f"{begin} ... {end}" if num_left_out else begin)

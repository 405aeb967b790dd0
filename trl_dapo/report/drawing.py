# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The pictures of a report, panel by panel: one colour per run, one line style per metric.

Lines are running means over a twentieth of the run, with the values faintly behind. A theme is "light" or "dark".
"""

import io
import os
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ..sampling.drop_reasons import REASONS
from .runs import is_number, series


Points = tuple[list[int], list[float]]  # steps, or what else the horizontal axis is, and a value for each


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One picture."""

    name: str  # of its file
    title: str
    unit: str  # of the vertical axis
    metrics: dict[str, str]  # regular expressions of metrics, and how each is called in the legend, as in `re.sub`
    caption: str  # what to look for
    over: str = "step"  # the metric of the horizontal axis
    bottom: float | None = 0.0  # where the vertical axis begins; `None` leaves it to the values
    top: float | None = None

    def find(self, log_history: list[dict]) -> dict[str, Points]:
        """Points by name in the legend; empty if nothing of it was logged."""
        if self is OUTCOMES:
            return _shares(log_history)
        if self is INFORMATIVE:
            return _informative_shares(log_history)
        logged = dict.fromkeys(metric for entry in log_history for metric in entry)
        drawn = []
        for pattern, label in self.metrics.items():
            for metric in logged:
                match = re.fullmatch(pattern, metric)
                if match:
                    drawn.append((match.expand(label), series(log_history, metric, self.over)))
        return {label: points for label, points in drawn if points[0]}


REWARD = Panel(
    name="reward",
    title="Reward",
    unit="mean reward",
    metrics={"reward": "all that was sampled", "filtered_reward": "what the filter kept"},
    caption="The solid line should rise; it counts what was dropped, so the filter does not flatter it. The screen "
    "and the pass-rate memory sample less of prompts that are always or never solved: to compare runs, look at "
    "correct completions or at evaluations instead.",
    bottom=None,
)
REWARD_BY_TOKENS = Panel(
    name="reward_by_tokens",
    title="Reward for the same tokens",
    unit="mean reward",
    metrics={"reward": "all that was sampled"},
    caption="The same rewards over what sampling cost. TRL counts the tokens of every completion and of its prompt. "
    "A run that leaves out prompts which are always solved, by the screen or the pass-rate memory, has a lower reward "
    "for that alone.",
    over="num_tokens",
    bottom=None,
)
ACCURACY = Panel(
    name="accuracy",
    title="Correct completions",
    unit="share of completions",
    metrics={"task_accuracy": "training prompts"},
    caption="Each prompt counts once, dropped groups included, so that runs which sample differently can be compared.",
    top=1.0,
)
ACCURACY_BY_TOKENS = Panel(
    name="accuracy_by_tokens",
    title="Correct completions for the same tokens",
    unit="share of completions",
    metrics={"task_accuracy": "training prompts"},
    caption="The higher line learns more from what was sampled. TRL counts the tokens of every completion and of its "
    "prompt.",
    over="num_tokens",
    top=1.0,
)
INFORMATIVE = Panel(
    name="informative",
    title="Informative groups in a batch",
    unit="share of the groups",
    metrics={"dynamic_sampling/groups_trained": "informative"},
    caption="Only groups whose rewards differ have a gradient. GRPOTrainer trains on whatever it sampled; DAPOTrainer "
    "replaces the others, so that its line is at 1 if every batch was full.",
    top=1.05,
)
ACCEPTANCE = Panel(
    name="acceptance",
    title="Acceptance rate",
    unit="share of groups sampled",
    metrics={"dynamic_sampling/acceptance_rate": "accepted"},
    caption="If it falls, fewer groups train, or a step costs more. The next picture shows why groups are dropped.",
    top=1.0,
)
OUTCOMES = Panel(
    name="outcomes",
    title="What became of the groups sampled",
    unit="share of groups sampled",
    metrics={f"dynamic_sampling/dropped/{reason}": reason for reason in REASONS},
    caption="If all_correct grows, prompts become too easy; all_wrong: too hard; masked: completions are cut off.",
    top=1.0,
)
LENGTH = Panel(
    name="length",
    title="Completion length",
    unit="tokens",
    metrics={"completions/mean_length": "mean", "completions/max_length": "longest"},
    caption="A mean up to the limit without more reward is padding; one that collapses has found a short cut.",
)
ENTROPY = Panel(
    name="entropy",
    title="Entropy",
    unit="nats a token",
    metrics={"entropy": "policy"},
    caption="It may fall slowly; a plunge to zero means that all completions of a prompt become one and the same.",
)
TIMELINE = Panel(
    name="timeline",
    title="Time spent in the last rollouts",
    unit="seconds",
    metrics={
        "timeline/update_seconds": "updates of the last one",
        "timeline/other_seconds": "evaluations and checkpoints",
        "timeline/sampling_seconds": "sampling",
        "timeline/rewards_seconds": "rewards",
        "timeline/wait_seconds": "the trainer's wait for the server",
        "timeline/idle_seconds": "the server's wait for the trainer",
    },
    caption="Updates of the rollout before, then sampling and rewards. With a server, the server is above "
    "and the trainer below: if the trainer waits, more GPUs should sample; if the server idles, more should train.",
)
IN_FLIGHT = Panel(
    name="in_flight",
    title="Groups in flight",
    unit="groups",
    metrics={"overlap/in_flight": "asked for", "overlap/waited_for": "waited for", "overlap/overflow": "too many"},
    caption="What the server samples for later rollouts, what was waited for, and what no rollout had room for.",
)
REWARDS = Panel(
    name="rewards",
    title="Reward by function",
    unit="mean reward",
    metrics={"rewards/(.*)/mean": r"\1"},
    caption="Before filter and weights. If one rises and the one that matters does not, their sum hides it.",
    bottom=None,
)
SOURCES = Panel(
    name="sources",
    title="Acceptance rate by source",
    unit="share of groups sampled",
    metrics={},
    caption="At zero a source has nothing left to teach, or is beyond the model: the share right below says which.",
    top=1.0,
)
PANELS = (
    REWARD,
    Panel(
        name="evaluation",
        title="Evaluation during training",
        unit="share of problems",
        metrics={r"eval_avg@\d+": "avg@k", r"eval_pass@\d+": "pass@k", r"eval_maj@\d+": "maj@k"},
        caption="Reward that rises while this stands still is learned by heart, or got by a fault of the reward.",
    ),
    ACCEPTANCE,
    OUTCOMES,
    Panel(
        name="tokens",
        title="Tokens generated and trained",
        unit="tokens per rollout batch",
        metrics={"dynamic_sampling/tokens_generated": "generated", "dynamic_sampling/tokens_trained": "trained"},
        caption="The gap between the lines is the price of dynamic sampling.",
    ),
    ENTROPY,
    LENGTH,
    ACCURACY,
    ACCURACY_BY_TOKENS,
    REWARD_BY_TOKENS,
    INFORMATIVE,
    Panel(
        name="evaluation_reward",
        title="Reward in evaluations during training",
        unit="mean reward",
        metrics={"eval_reward": "evaluation prompts"},
        caption="Sampled without a filter on prompts that are not trained on: it should rise with the reward above.",
        bottom=None,
    ),
    Panel(
        name="rounds",
        title="Rounds of generation",
        unit="rounds a rollout batch",
        metrics={"dynamic_sampling/rounds": "rounds"},
        caption="Each round waits for its longest completion.",
    ),
    Panel(
        name="truncation",
        title="Completions cut off",
        unit="share of completions",
        metrics={"completions/clipped_ratio": "cut off by max_completion_length"},
        caption="Above a few percent, correct completions are lost: raise max_completion_length, or punish length "
        "softly.",
    ),
    Panel(
        name="clipping",
        title="Clipped tokens",
        unit="share of tokens",
        metrics={
            "clip_ratio/high_mean": "at the upper clip",
            "clip_ratio/low_mean": "at the lower clip",
            "clip_ratio/dual_mean": "at the dual clip",
        },
        caption="All zero with one step a rollout and no carried rows; where a share climbs, steps are too large.",
    ),
    Panel(
        name="gradient",
        title="Gradient norm",
        unit="norm before clipping",
        metrics={"grad_norm": "norm"},
        caption="Spikes that come before a drop in reward ask for a lower learning rate.",
    ),
    Panel(
        name="passes",
        title="Micro-batches",
        unit="of an optimizer step, on each process",
        metrics={"microbatches": "micro-batches"},
        caption="Under FSDP and ZeRO-3 each one gathers all weights: a larger max_tokens_per_microbatch makes fewer.",
    ),
    Panel(
        name="peak_tokens",
        title="Largest micro-batch",
        unit="tokens, padding included",
        metrics={"peak_microbatch_tokens": "on any process"},
        caption="It decides the peak of memory; above max_tokens_per_microbatch it is one row that is longer.",
    ),
    TIMELINE,
    IN_FLIGHT,
)
OF_SEVERAL_RUNS = (ACCURACY_BY_TOKENS, REWARD_BY_TOKENS)  # only drawn if at least two runs logged them
COMPARED = (ACCURACY_BY_TOKENS, INFORMATIVE)  # the first to look at if there are several runs
# Areas and bars cannot lie over one another: a picture for each run.
ONE_RUN_EACH = (OUTCOMES, TIMELINE)
BY_NAME = (REWARDS, SOURCES)  # a line for each name that a run has, in a picture for each run: see `plot_named`
# Okabe and Ito's colours, which the colour-blind can tell apart, as far as they are visible on white and on black.
RUN_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
# Tol's muted colours, for what does not stand for a run.
OUTCOME_COLOURS = {"accepted": "#44AA99", "all_correct": "#DDCC77", "all_wrong": "#882255", "constant": "#BBBBBB"}
OUTCOME_COLOURS |= {"outside_band": "#88CCEE", "unscored": "#AA4499", "masked": "#999933"}
# For reward functions, and for the sources of prompts, the largest first.
NAME_COLOURS = ("#44AA99", "#CC6677", "#DDCC77", "#999933", "#AA4499", "#88CCEE", "#7777CC", "#882255")
# For the reasons of a user's own group filter.
OTHER_COLOURS = ("#332288", "#CC6677", "#117733")
# Colours of what the trainer and a server do.
TIMELINE_COLOURS = {"update": "#88CCEE", "other": "#999933", "sampling": "#44AA99", "wait": "#CC6677"}
TIMELINE_COLOURS |= {"rewards": "#DDCC77", "idle": "#BBBBBB"}
# What is done one after the other: where the trainer samples itself, and where a server does.
TRAINER_LANE = ("update", "other", "sampling", "rewards")
SERVER_LANES = (("sampling", "idle"), ("update", "other", "wait", "rewards"))
NUM_ROLLOUTS = 8  # in the timeline
LINE_STYLES: tuple[Any, ...] = ("solid", (0, (4, 1.5)), (0, (1, 1.5)))  # as matplotlib names them, or dashes
INK = {"light": "#1f2328", "dark": "#e6edf3"}
PAPER = {"light": "#ffffff", "dark": "#0d1117"}
GRID = {"light": "#e6e9ed", "dark": "#232a33"}
OPAQUE: dict[str, Any] = {"frameon": True, "framealpha": 0.85, "edgecolor": "none"}  # a legend over what is drawn
MAX_POINTS = 600  # of a line
AXES = {"step": "optimizer step", "num_tokens": "tokens sampled so far, prompts included"}
SIZE = (4.8, 3.0)  # inches; at 100 pixels an inch two stand side by side on a page of 1000 pixels


def plot_panel(
    panel: Panel, log_histories: Sequence[list[dict]], labels: Sequence[str], title: str = "", theme: str = "light"
) -> Figure:
    """Draws one of `PANELS` for one or several runs, which have a log and a name each."""
    with _style(theme):
        if panel in ONE_RUN_EACH:
            shown = [i for i, log_history in enumerate(log_histories) if panel.find(log_history)]
            figure = _one_for_each(shown, labels, lambda place, i: _draw(place, panel, log_histories[i : i + 1]))
        else:
            # The names of the runs are below the picture and must not make it smaller.
            key_height = 0.2 * -(-len(labels) // 2) if len(labels) > 1 else 0.0
            figure = Figure(figsize=(SIZE[0], SIZE[1] + key_height), layout="constrained")
            _draw(figure.subplots(), panel, log_histories)
            _draw_key(figure, labels, num_columns=2)
        figure.suptitle(title)
        return figure


def plot_named(
    panel: Panel, by_name: Sequence[dict[str, Points]], labels: Sequence[str], title: str = "", theme: str = "light"
) -> Figure:
    """A line for each reward function or source, the first 8, in a picture for each run that has any."""

    def draw(place: Axes, i: int) -> None:
        for colour, (name, (steps, values)) in zip(NAME_COLOURS, by_name[i].items(), strict=False):
            _draw_mean(place, steps, values, color=colour, label=_shorten(name))
        place.legend(loc="best", **OPAQUE)
        _label(place, panel)

    with _style(theme):
        figure = _one_for_each([i for i, of_run in enumerate(by_name) if of_run], labels, draw)
        figure.suptitle(title)
        return figure


def _one_for_each(shown: list[int], labels: Sequence[str], draw: Callable[[Axes, int], None]) -> Figure:
    """A picture with a place for each of some runs, two in a row."""
    figure, places = _places(len(shown), min(len(shown), 2), SIZE, sharey=True)
    for place, i in zip(places, shown, strict=True):
        draw(place, i)
        if len(labels) > 1:
            place.set_title(_shorten(labels[i]), color=RUN_COLOURS[i])
    return figure


def _places(number: int, num_columns: int, size: tuple[float, float], **options: Any) -> tuple[Figure, list[Axes]]:
    """Make a picture with `num` panels, each of a size in inches."""
    num_rows = -(-number // num_columns)
    figure = Figure(figsize=(size[0] * num_columns, size[1] * num_rows), layout="constrained")
    places = list(figure.subplots(num_rows, num_columns, squeeze=False, **options).flat)
    for place in places[number:]:
        place.remove()
    return figure, places[:number]


def plot_runs(
    log_histories: Sequence[list[dict]], labels: Sequence[str], panels: Sequence[Panel] = PANELS, title: str = ""
) -> Figure:
    """Several panels in one picture; a panel whose metrics were never logged says so."""
    num_columns = 2 if len(panels) <= 4 else 3
    with _style("light"):
        figure, places = _places(len(panels), num_columns, (4.2, 2.9))
        figure.suptitle(title)
        for place, panel in zip(places, panels, strict=True):
            _draw(place, panel, log_histories)
            place.set_title(panel.title)
        _draw_key(figure, labels, num_columns)
        return figure


def plot_comparison(log_histories: dict[str, list[dict]], path: str | os.PathLike, title: str = "") -> None:
    """Draws the logs of several runs over each other, by their names: what they learned, from what, as a PNG."""
    panels = (ACCURACY, ACCURACY_BY_TOKENS, INFORMATIVE, ENTROPY)
    figure = plot_runs(list(log_histories.values()), list(log_histories), panels, title)
    _write_png(figure, path)


def plot_run(log_history: list[dict], path: str | os.PathLike, title: str = "") -> None:
    """Draws reward before and after the filter, acceptance rate, entropy and completion length of a run, as a PNG."""
    figure = plot_runs([log_history], [""], (REWARD, ACCEPTANCE, ENTROPY, LENGTH), title)
    _write_png(figure, path)


def _write_png(figure: Figure, path: str | os.PathLike) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_bytes(render(figure, "png"))


def render(figure: Figure, file_format: str, theme: str = "light") -> bytes:
    """A picture as the content of a file, which holds no date: the same log gives the same file."""
    buffer = io.BytesIO()
    with _style(theme):  # ticks are made, and take their colours, only now
        figure.savefig(buffer, format=file_format, dpi=140, metadata={"Date": None} if file_format == "svg" else None)
    return buffer.getvalue()


def smooth(values: list[float], window: int | None = None) -> list[float]:
    """Running mean over the last `window` values, by default a twentieth of them; at the start over what is there."""
    window = window or max(1, len(values) // 20)
    sums = np.convolve(values, np.ones(window))[: len(values)]
    return (sums / np.minimum(np.arange(1, len(values) + 1), window)).tolist()


def thin(values: list) -> list:
    """At most `MAX_POINTS` of them, evenly spaced, the last among them: more do not show."""
    return values[::-1][:: max(-(-len(values) // MAX_POINTS), 1)][::-1]


def _draw(axes: Axes, panel: Panel, log_histories: Sequence[list[dict]]) -> None:
    if panel in ONE_RUN_EACH:
        return (_draw_outcomes if panel is OUTCOMES else _draw_timeline)(axes, log_histories[0])
    drawn, num_points = {}, 0
    seen: set[int] = set()
    for colour, log_history in zip(RUN_COLOURS, log_histories, strict=False):
        for label, (steps, values) in panel.find(log_history).items():
            style = LINE_STYLES[list(panel.metrics.values()).index(label)]
            if len(values) >= 40:  # else nothing is smoothed
                raster = len(values) > MAX_POINTS  # drawn as pixels where a line would be megabytes
                axes.plot(steps, values, color=colour, alpha=0.22, linewidth=0.7, rasterized=raster)
            _draw_mean(axes, steps, values, color=colour, linestyle=style)
            drawn[label] = style
            num_points += len(values)
            seen.update(steps)
    if not drawn:
        _say_not_logged(axes)
    elif len(panel.metrics) > 1:
        # With several runs, the colour in the legend would be that of only one.
        colour = RUN_COLOURS[0] if len(log_histories) == 1 else matplotlib.rcParams["text.color"]
        handles = [Line2D([], [], color=colour, linestyle=style) for style in drawn.values()]
        # The best place takes seconds to find among many points.
        axes.legend(handles, list(drawn), loc="best" if num_points <= 10 * MAX_POINTS else "upper right")
    _label(axes, panel)
    if len(seen) == 1:
        axes.set_xticks([*seen])  # no parts of a step around it


def _draw_key(figure: Figure, labels: Sequence[str], num_columns: int) -> None:
    """Names the runs below the picture, where there are several: above it is the title."""
    if len(labels) > 1:
        handles = [Line2D([], [], color=colour, linewidth=3) for colour in RUN_COLOURS[: len(labels)]]
        figure.legend(handles, list(map(_shorten, labels)), loc="outside lower center", ncols=num_columns)


def _draw_mean(axes: Axes, steps: list[int], values: list[float], **style: Any) -> None:
    """The running mean of a line, of which a few points are marked."""
    axes.plot(thin(steps), thin(smooth(values)), marker="o" if len(values) < 15 else None, markersize=3, **style)


def _draw_timeline(axes: Axes, log_history: list[dict]) -> None:
    """A bar for each of the last rollouts, or two: what a server did, and below it what the trainer did meanwhile."""
    metrics = [f"timeline/{name}_seconds" for name in TRAINER_LANE]
    rollouts = [entry for entry in log_history if all(is_number(entry.get(metric)) for metric in metrics)]
    rollouts = rollouts[-NUM_ROLLOUTS:]
    drawn = set()
    for place, entry in enumerate(rollouts):
        lanes = SERVER_LANES if is_number(entry.get("timeline/wait_seconds")) else (TRAINER_LANE,)
        thickness = 0.72 / len(lanes)
        for lane, names in enumerate(lanes):
            start = 0.0
            for name in names:
                seconds = entry[f"timeline/{name}_seconds"]
                height = place + (lane - (len(lanes) - 1) / 2) * (thickness + 0.04)
                axes.barh(height, seconds, left=start, height=thickness, color=TIMELINE_COLOURS[name], linewidth=0)
                drawn.add(name)
                start += seconds
    if not rollouts:
        _say_not_logged(axes)
    axes.set_yticks(range(len(rollouts)), [str(entry["step"]) for entry in rollouts])
    axes.invert_yaxis()
    axes.set(xlabel="seconds since the rollout before was complete", ylabel="optimizer step")
    phases = [name for name in TIMELINE_COLOURS if name in drawn]
    handles = [Line2D([], [], color=TIMELINE_COLOURS[name], linewidth=5) for name in phases]
    # Above the bars, which may fill the whole width.
    axes.legend(handles, phases, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(phases), columnspacing=1.2)


def _draw_outcomes(axes: Axes, log_history: list[dict]) -> None:
    shares = OUTCOMES.find(log_history)
    if shares:
        stack, others = [thin(smooth(values)) for _, values in shares.values()], cycle(OTHER_COLOURS)
        colours = [OUTCOME_COLOURS.get(outcome) or next(others) for outcome in shares]
        axes.stackplot(thin(shares["accepted"][0]), stack, labels=list(shares), colors=colours, linewidth=0)
        axes.margins(x=0)
        handles, outcomes = axes.get_legend_handles_labels()
        axes.legend(handles[::-1], outcomes[::-1], loc="lower left", **OPAQUE)
    else:
        _say_not_logged(axes)
    _label(axes, OUTCOMES)


def _say_not_logged(axes: Axes) -> None:
    axes.text(0.5, 0.5, "not logged", ha="center", va="center", transform=axes.transAxes)


def _label(axes: Axes, panel: Panel) -> None:
    axes.set(xlabel=AXES[panel.over], ylabel=panel.unit)
    axes.locator_params(axis="x", integer=True, nbins=6)
    axes.set_ylim(panel.bottom, panel.top)


def _shorten(label: str) -> str:
    # A label that begins with an underscore is none to matplotlib; a space before it is not seen.
    return " " + (label if len(label) <= 40 else f"{label[:18]}...{label[-18:]}")


def _style(theme: str) -> AbstractContextManager[None]:
    return matplotlib.rc_context(
        {
            "font.size": 9,
            "axes.titlesize": 10,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.axisbelow": True,
            "grid.color": GRID[theme],
            "lines.linewidth": 1.6,
            "legend.frameon": False,
            "legend.fontsize": 8.5,
            "legend.facecolor": PAPER[theme],
            "legend.handlelength": 2.6,
            "text.parse_math": False,  # a run may be called `a$b$`
            "svg.hashsalt": "trl-dapo",
            **dict.fromkeys(("figure.facecolor", "axes.facecolor"), PAPER[theme]),
            **dict.fromkeys(
                ("text.color", "axes.labelcolor", "axes.edgecolor", "axes.titlecolor", "xtick.color", "ytick.color"),
                INK[theme],
            ),
        }
    )


def _informative_shares(log_history: list[dict]) -> dict[str, Points]:
    """Share of a batch's groups that have a gradient, as `DAPOTrainer` counts them and as `GRPOTrainer` does."""
    points = []
    for entry in log_history:
        trained, missing = (entry.get(f"dynamic_sampling/{name}") for name in ("groups_trained", "shortfall"))
        without = entry.get("frac_reward_zero_std")
        if is_number(trained) and is_number(missing):
            if trained + missing > 0:
                points.append((entry["step"], trained / (trained + missing)))
        elif is_number(without):
            points.append((entry["step"], 1.0 - without))
    return {"informative": ([step for step, _ in points], [share for _, share in points])} if points else {}


def _shares(log_history: list[dict]) -> dict[str, Points]:
    """Share of the groups sampled that was accepted, and that was dropped for each reason that ever occurred."""
    sampled = zip(*series(log_history, "dynamic_sampling/groups_generated"), strict=True)
    total = {step: count for step, count in sampled if count > 0}  # carried groups may have filled a rollout
    shares = {"accepted": np.ones(len(total))}
    prefix = "dynamic_sampling/dropped/"
    logged = (name.removeprefix(prefix) for entry in log_history for name in entry if name.startswith(prefix))
    for reason in dict.fromkeys([*REASONS, *logged]):
        counts = dict(zip(*series(log_history, prefix + reason), strict=True))
        if any(counts.values()):
            shares[reason] = np.array([counts.get(step, 0) / total[step] for step in total])
            shares["accepted"] -= shares[reason]
    return {outcome: ([*total], share.tolist()) for outcome, share in shares.items()} if total else {}

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The pictures of a report: panels with one colour per run and one line style per metric.

Lines are running means over a twentieth of the run, drawn over the values themselves in a lighter colour. A theme is
"light" or "dark".
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


Points = tuple[list[int], list[float]]  # steps, or other positions on the horizontal axis, and a value for each


@dataclass(frozen=True, kw_only=True)
class Panel:
    """The description of a picture."""

    name: str  # of its file
    title: str
    unit: str  # of the vertical axis
    metrics: dict[str, str]  # regular expressions of metrics, and their names in the legend, as in `re.sub`
    caption: str  # what to look for
    over: str = "step"  # the metric of the horizontal axis
    bottom: float | None = 0.0  # lower end of the vertical axis; `None` means that it depends on the values
    top: float | None = None

    def find(self, log_history: list[dict]) -> dict[str, Points]:
        """Return the points of each line by its name in the legend. Lines that were not logged are left out."""
        if self is OUTCOMES:
            return _shares(log_history)
        if self is ACCEPTED:
            return _accepted_shares(log_history)
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
    metrics={"reward": "all sampled groups", "trained_reward": "groups that train"},
    caption="The solid line should rise. It includes dropped groups, so dropping them does not make it look better. "
    "The screen and the pass-rate memory sample fewer completions of prompts that are always or never solved, which "
    "changes the mean. To compare runs, look at correct completions or at evaluations instead.",
    bottom=None,
)
REWARD_BY_TOKENS = Panel(
    name="reward_by_tokens",
    title="Reward for the same tokens",
    unit="mean reward",
    metrics={"reward": "all sampled groups"},
    caption="The same rewards over the number of sampled tokens. TRL counts the tokens of every completion and of its "
    "prompt. A run with the screen or the pass-rate memory samples fewer completions of prompts that are always "
    "solved, and has a lower mean reward for this reason alone.",
    over="num_tokens",
    bottom=None,
)
ACCURACY = Panel(
    name="accuracy",
    title="Correct completions",
    unit="share of completions",
    metrics={"task_accuracy": "training prompts"},
    caption="Each prompt counts once, and dropped groups are included. So runs that sample differently can be "
    "compared.",
    top=1.0,
)
ACCURACY_BY_TOKENS = Panel(
    name="accuracy_by_tokens",
    title="Correct completions for the same tokens",
    unit="share of completions",
    metrics={"task_accuracy": "training prompts"},
    caption="The run with the higher line learns more from the same number of sampled tokens. TRL counts the tokens "
    "of every completion and of its prompt.",
    over="num_tokens",
    top=1.0,
)
ACCEPTED = Panel(
    name="accepted",
    title="Accepted groups in a batch",
    unit="share of the groups",
    metrics={"dynamic_sampling/groups_trained": "accepted"},
    caption="A group is accepted if its rewards differ, because otherwise it has no gradient. DAPOTrainer replaces "
    "dropped groups, so its line is at 1 if every batch was full. GRPOTrainer trains on all sampled groups: its line "
    "is the share whose rewards differ.",
    top=1.05,
)
ACCEPTANCE = Panel(
    name="acceptance",
    title="Acceptance rate",
    unit="share of sampled groups",
    metrics={"dynamic_sampling/acceptance_rate": "accepted"},
    caption="If it falls, a step trains on fewer groups or costs more. The next picture shows why groups are dropped.",
    top=1.0,
)
OUTCOMES = Panel(
    name="outcomes",
    title="Accepted groups, and dropped groups by reason",
    unit="share of sampled groups",
    metrics={f"dynamic_sampling/dropped/{reason}": reason for reason in REASONS},
    caption="If all_correct grows, the prompts become too easy for the model. If all_wrong is large, they are too "
    "hard. If masked is large, too many completions are cut off.",
    top=1.0,
)
LENGTH = Panel(
    name="length",
    title="Completion length",
    unit="tokens",
    metrics={"completions/mean_length": "mean", "completions/max_length": "longest"},
    caption="If the mean length grows to the limit without more reward, the model only writes more. If it collapses, "
    "the model has found a way to get the reward without reasoning.",
)
ENTROPY = Panel(
    name="entropy",
    title="Entropy",
    unit="nats per token",
    metrics={"entropy": "policy"},
    caption="It may fall slowly. If it suddenly falls to zero, all completions of a prompt become the same.",
)
TIMELINE = Panel(
    name="timeline",
    title="Time spent in the last rollouts",
    unit="seconds",
    metrics={
        "timeline/update_seconds": "updates of the previous rollout",
        "timeline/other_seconds": "evaluations and checkpoints",
        "timeline/sampling_seconds": "sampling",
        "timeline/rewards_seconds": "rewards",
        "timeline/wait_seconds": "the trainer's wait for the server",
        "timeline/idle_seconds": "the server's wait for the trainer",
    },
    caption="Updates of the previous rollout, then sampling and rewards. With a server, the upper bar is the server "
    "and the lower bar the trainer. If the trainer waits for long, use more GPUs to sample. If the server waits for "
    "long, use more GPUs to train.",
)
IN_FLIGHT = Panel(
    name="in_flight",
    title="Groups in flight",
    unit="groups",
    metrics={
        "rollouts_ahead/in_flight": "requested",
        "rollouts_ahead/groups_waited_for": "waited for",
        "rollouts_ahead/discarded": "discarded",
    },
    caption="Groups that the server samples for later rollouts, groups that the trainer waited for, and accepted "
    "groups that no batch had room for.",
)
REWARDS = Panel(
    name="rewards",
    title="Reward by function",
    unit="mean reward",
    metrics={"rewards/(.*)/mean": r"\1"},
    caption="Rewards of all sampled groups, dropped ones included, without weights. Check that the reward that "
    "matters rises: the sum may rise because of another one.",
    bottom=None,
)
SOURCES = Panel(
    name="sources",
    title="Acceptance rate by source",
    unit="share of sampled groups",
    metrics={},
    caption="At zero, the prompts of a source are either all solved or too hard for the model. The share of correct "
    "completions in the table below says which.",
    top=1.0,
)
PANELS = (
    REWARD,
    Panel(
        name="evaluation",
        title="Evaluation during training",
        unit="share of problems",
        metrics={r"eval_avg@\d+": "avg@k", r"eval_pass@\d+": "pass@k", r"eval_maj@\d+": "maj@k"},
        caption="If the reward rises but this does not, the model memorizes the training prompts, or exploits a flaw "
        "of the reward.",
    ),
    ACCEPTANCE,
    OUTCOMES,
    Panel(
        name="tokens",
        title="Tokens generated and trained",
        unit="tokens per rollout batch",
        metrics={"dynamic_sampling/tokens_generated": "generated", "dynamic_sampling/tokens_trained": "trained"},
        caption="The gap between the lines is the cost of dynamic sampling.",
    ),
    ENTROPY,
    LENGTH,
    ACCURACY,
    ACCURACY_BY_TOKENS,
    REWARD_BY_TOKENS,
    ACCEPTED,
    Panel(
        name="evaluation_reward",
        title="Reward in evaluations during training",
        unit="mean reward",
        metrics={"eval_reward": "evaluation prompts"},
        caption="Mean reward on prompts that are not trained on, without dynamic sampling. It should rise with the "
        "reward in training.",
        bottom=None,
    ),
    Panel(
        name="rounds",
        title="Rounds of generation",
        unit="rounds per rollout batch",
        metrics={"dynamic_sampling/rounds": "rounds"},
        caption="Each round waits for its longest completion.",
    ),
    Panel(
        name="truncation",
        title="Completions cut off",
        unit="share of completions",
        metrics={"completions/clipped_ratio": "cut off by max_completion_length"},
        caption="Above a few percent, completions are lost that would have been correct. Raise max_completion_length, "
        "or set overlong_buffer_length.",
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
        caption="All shares are zero with one optimizer step per rollout and no carried groups. If a share rises, "
        "steps are too large.",
    ),
    Panel(
        name="gradient",
        title="Gradient norm",
        unit="norm before clipping",
        metrics={"grad_norm": "norm"},
        caption="If spikes are followed by a drop in reward, lower the learning rate.",
    ),
    Panel(
        name="passes",
        title="Micro-batches",
        unit="per optimizer step and process",
        metrics={"microbatches": "micro-batches"},
        caption="Under FSDP and ZeRO-3 every micro-batch gathers all weights. A larger max_tokens_per_microbatch "
        "gives fewer micro-batches.",
    ),
    Panel(
        name="peak_tokens",
        title="Largest micro-batch",
        unit="tokens, padding included",
        metrics={"peak_microbatch_tokens": "on any process"},
        caption="It decides the peak of GPU memory. It exceeds max_tokens_per_microbatch only if a single row is "
        "longer.",
    ),
    TIMELINE,
    IN_FLIGHT,
)
OF_SEVERAL_RUNS = (ACCURACY_BY_TOKENS, REWARD_BY_TOKENS)  # only drawn if at least two runs logged them
COMPARED = (ACCURACY_BY_TOKENS, ACCEPTED)  # shown first if there are several runs
# Areas and bars would cover one another, so there is a picture for each run.
ONE_RUN_EACH = (OUTCOMES, TIMELINE)
BY_NAME = (REWARDS, SOURCES)  # with a line for each reward function or source; see `plot_named`
# Those of Okabe and Ito's colours for colour-blind readers that are visible on white and on black.
RUN_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
# Tol's muted colours, which do not represent runs.
OUTCOME_COLOURS = {"accepted": "#44AA99", "all_correct": "#DDCC77", "all_wrong": "#882255", "constant": "#BBBBBB"}
OUTCOME_COLOURS |= {"outside_band": "#88CCEE", "unscored": "#AA4499", "masked": "#999933"}
# For reward functions, and for the sources of prompts, the largest first.
NAME_COLOURS = ("#44AA99", "#CC6677", "#DDCC77", "#999933", "#AA4499", "#88CCEE", "#7777CC", "#882255")
# For the reasons of a user's own group filter.
OTHER_COLOURS = ("#332288", "#CC6677", "#117733")
# Colours of the activities of the trainer and of a server.
TIMELINE_COLOURS = {"update": "#88CCEE", "other": "#999933", "sampling": "#44AA99", "wait": "#CC6677"}
TIMELINE_COLOURS |= {"rewards": "#DDCC77", "idle": "#BBBBBB"}
# Activities in their order: of a trainer that samples itself, and of a server and a trainer that run in parallel.
TRAINER_LANE = ("update", "other", "sampling", "rewards")
SERVER_LANES = (("sampling", "idle"), ("update", "other", "wait", "rewards"))
NUM_ROLLOUTS = 8  # in the timeline
LINE_STYLES: tuple[Any, ...] = ("solid", (0, (4, 1.5)), (0, (1, 1.5)))  # names or dash patterns of matplotlib
INK = {"light": "#1f2328", "dark": "#e6edf3"}
PAPER = {"light": "#ffffff", "dark": "#0d1117"}
GRID = {"light": "#e6e9ed", "dark": "#232a33"}
# For a legend that covers a part of the picture.
OPAQUE: dict[str, Any] = {"frameon": True, "framealpha": 0.85, "edgecolor": "none"}
MAX_POINTS = 600  # of a line
AXES = {"step": "optimizer step", "num_tokens": "tokens sampled so far, prompts included"}
SIZE = (4.8, 3.0)  # inches; at 100 pixels per inch two of them fit next to each other on a page of 1000 pixels


def plot_panel(
    panel: Panel, log_histories: Sequence[list[dict]], labels: Sequence[str], title: str = "", theme: str = "light"
) -> Figure:
    """Draw one of `PANELS` for one or several runs."""
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
    """Draw a line for each of the first 8 reward functions or sources, in a picture for each run that has any."""

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
    """Draw a picture with a panel for each of some runs, two next to each other."""
    figure, places = _places(len(shown), min(len(shown), 2), SIZE, sharey=True)
    for place, i in zip(places, shown, strict=True):
        draw(place, i)
        if len(labels) > 1:
            place.set_title(_shorten(labels[i]), color=RUN_COLOURS[i])
    return figure


def _places(number: int, num_columns: int, size: tuple[float, float], **options: Any) -> tuple[Figure, list[Axes]]:
    """Return a picture with `number` empty panels, each of a size in inches."""
    num_rows = -(-number // num_columns)
    figure = Figure(figsize=(size[0] * num_columns, size[1] * num_rows), layout="constrained")
    places = list(figure.subplots(num_rows, num_columns, squeeze=False, **options).flat)
    for place in places[number:]:
        place.remove()
    return figure, places[:number]


def plot_runs(
    log_histories: Sequence[list[dict]], labels: Sequence[str], panels: Sequence[Panel] = PANELS, title: str = ""
) -> Figure:
    """Draw several panels in one picture. A panel whose metrics were never logged says so."""
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
    """Draw a comparison of several runs, whose logs are given by their names, and write it to a PNG file."""
    panels = (ACCURACY, ACCURACY_BY_TOKENS, ACCEPTED, ENTROPY)
    figure = plot_runs(list(log_histories.values()), list(log_histories), panels, title)
    _write_png(figure, path)


def plot_run(log_history: list[dict], path: str | os.PathLike, title: str = "") -> None:
    """Draw reward, acceptance rate, entropy and completion length of a run, and write the picture to a PNG file."""
    figure = plot_runs([log_history], [""], (REWARD, ACCEPTANCE, ENTROPY, LENGTH), title)
    _write_png(figure, path)


def _write_png(figure: Figure, path: str | os.PathLike) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_bytes(render(figure, "png"))


def render(figure: Figure, file_format: str, theme: str = "light") -> bytes:
    """Return a picture as the content of a file. It contains no date, so that the same log gives the same file."""
    buffer = io.BytesIO()
    with _style(theme):  # ticks are created, and get their colours, only now
        figure.savefig(buffer, format=file_format, dpi=140, metadata={"Date": None} if file_format == "svg" else None)
    return buffer.getvalue()


def smooth(values: list[float], window: int | None = None) -> list[float]:
    """
    Return the running mean over the last `window` values.

    The window is a twentieth of the values by default. At the beginning the mean is over the values so far.
    """
    window = window or max(1, len(values) // 20)
    sums = np.convolve(values, np.ones(window))[: len(values)]
    return (sums / np.minimum(np.arange(1, len(values) + 1), window)).tolist()


def thin(values: list) -> list:
    """Return at most `MAX_POINTS` of the values, at equal distances and with the last one. More are not visible."""
    return values[::-1][:: max(-(-len(values) // MAX_POINTS), 1)][::-1]


def _draw(axes: Axes, panel: Panel, log_histories: Sequence[list[dict]]) -> None:
    if panel in ONE_RUN_EACH:
        return (_draw_outcomes if panel is OUTCOMES else _draw_timeline)(axes, log_histories[0])
    drawn, num_points = {}, 0
    seen: set[int] = set()
    for colour, log_history in zip(RUN_COLOURS, log_histories, strict=False):
        for label, (steps, values) in panel.find(log_history).items():
            style = LINE_STYLES[list(panel.metrics.values()).index(label)]
            if len(values) >= 40:  # fewer values are not smoothed
                raster = len(values) > MAX_POINTS  # as pixels, because a line of many points takes megabytes
                axes.plot(steps, values, color=colour, alpha=0.22, linewidth=0.7, rasterized=raster)
            _draw_mean(axes, steps, values, color=colour, linestyle=style)
            drawn[label] = style
            num_points += len(values)
            seen.update(steps)
    if not drawn:
        _say_not_logged(axes)
    elif len(panel.metrics) > 1:
        # With several runs the legend has a neutral colour, because every run has its own.
        colour = RUN_COLOURS[0] if len(log_histories) == 1 else matplotlib.rcParams["text.color"]
        handles = [Line2D([], [], color=colour, linestyle=style) for style in drawn.values()]
        # With many points matplotlib takes seconds to find the best place.
        axes.legend(handles, list(drawn), loc="best" if num_points <= 10 * MAX_POINTS else "upper right")
    _label(axes, panel)
    if len(seen) == 1:
        axes.set_xticks([*seen])  # without this, there would be ticks at fractions of a step


def _draw_key(figure: Figure, labels: Sequence[str], num_columns: int) -> None:
    """Add the names of the runs below the picture if there are several."""
    if len(labels) > 1:
        handles = [Line2D([], [], color=colour, linewidth=3) for colour in RUN_COLOURS[: len(labels)]]
        figure.legend(handles, list(map(_shorten, labels)), loc="outside lower center", ncols=num_columns)


def _draw_mean(axes: Axes, steps: list[int], values: list[float], **style: Any) -> None:
    """Draw the running mean of values. If there are few, each point is marked."""
    axes.plot(thin(steps), thin(smooth(values)), marker="o" if len(values) < 15 else None, markersize=3, **style)


def _draw_timeline(axes: Axes, log_history: list[dict]) -> None:
    """
    Draw a bar for each of the last rollouts.

    With a server there are two bars: the activities of the server, and below them those of the trainer.
    """
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
    axes.set(xlabel="seconds since the previous rollout was complete", ylabel="optimizer step")
    phases = [name for name in TIMELINE_COLOURS if name in drawn]
    handles = [Line2D([], [], color=TIMELINE_COLOURS[name], linewidth=5) for name in phases]
    # The legend is above the bars, because they may fill the whole width.
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
    # matplotlib ignores labels that begin with an underscore. The space before it is not visible.
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


def _accepted_shares(log_history: list[dict]) -> dict[str, Points]:
    """
    Return the share of accepted groups in a batch.

    `DAPOTrainer` logs it as the number of trained groups. For `GRPOTrainer` it is 1 minus `frac_reward_zero_std`.
    """
    points = []
    for entry in log_history:
        trained, missing = (entry.get(f"dynamic_sampling/{name}") for name in ("groups_trained", "shortfall"))
        equal = entry.get("frac_reward_zero_std")
        if is_number(trained) and is_number(missing):
            if trained + missing > 0:
                points.append((entry["step"], trained / (trained + missing)))
        elif is_number(equal):
            points.append((entry["step"], 1.0 - equal))
    return {"accepted": ([step for step, _ in points], [share for _, share in points])} if points else {}


def _shares(log_history: list[dict]) -> dict[str, Points]:
    """Return the shares of sampled groups that were accepted, and that were dropped for each reason that occurred."""
    sampled = zip(*series(log_history, "dynamic_sampling/groups_generated"), strict=True)
    total = {step: count for step, count in sampled if count > 0}  # without those that carried groups have filled
    shares = {"accepted": np.ones(len(total))}
    prefix = "dynamic_sampling/dropped/"
    logged = (name.removeprefix(prefix) for entry in log_history for name in entry if name.startswith(prefix))
    for reason in dict.fromkeys([*REASONS, *logged]):
        counts = dict(zip(*series(log_history, prefix + reason), strict=True))
        if any(counts.values()):
            shares[reason] = np.array([counts.get(step, 0) / total[step] for step in total])
            shares["accepted"] -= shares[reason]
    return {outcome: ([*total], share.tolist()) for outcome, share in shares.items()} if total else {}

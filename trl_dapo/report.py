# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""A picture of a run, drawn from the log history that its checkpoints carry."""

import json
import math
import os
from pathlib import Path

from matplotlib.figure import Figure


# Panels: title, y axis, and the metrics drawn in it with their labels.
PANELS = (
    ("Reward", "mean reward", {"reward": "all sampled", "filtered_reward": "after the filter"}),
    ("Acceptance rate", "share of groups", {"dynamic_sampling/acceptance_rate": "accepted"}),
    ("Entropy", "nats a token", {"entropy": "policy"}),
    ("Completion length", "tokens", {"completions/mean_length": "mean", "completions/max_length": "longest"}),
)


def load_log_history(run_dir: str | os.PathLike) -> list[dict]:
    """
    Log history of a run, from the newest readable `trainer_state.json` of its output folder and checkpoints.

    Args:
        run_dir (`str` or `os.PathLike`):
            The run's `output_dir`, or one of its checkpoints.

    Returns:
        `list[dict]`: One dictionary of metrics for each time the trainer logged, oldest first.

    Raises:
        `FileNotFoundError`: If there is no such folder, or no complete `trainer_state.json` in it.
    """
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise FileNotFoundError(f"There is no folder `{run_dir}`.")
    states = []
    for path in [run_dir / "trainer_state.json", *run_dir.glob("checkpoint-*/trainer_state.json")]:
        # A run that is being written, or was killed while it wrote, leaves an absent or half a file.
        try:
            states.append(json.loads(path.read_text(encoding="utf-8")))
        except (FileNotFoundError, json.JSONDecodeError):
            continue
    if not states:
        raise FileNotFoundError(
            f"`{run_dir}` holds no complete `trainer_state.json`, and neither do checkpoints in it: it is not the "
            "`output_dir` of a run, or the run has not saved a checkpoint yet."
        )
    return max(states, key=lambda state: state["global_step"])["log_history"]


def series(log_history: list[dict], metric: str) -> tuple[list[int], list[float]]:
    """
    Steps and values of one metric, without the entries that lack it or hold no finite number.

    Args:
        log_history (`list[dict]`):
            From [`load_log_history`], or a trainer's `state.log_history`.
        metric (`str`):
            Name of the metric.

    Returns:
        `tuple[list[int], list[float]]`: Optimizer steps, and the metric at each of them.
    """
    points = [
        (entry["step"], entry[metric])
        for entry in log_history
        if isinstance(entry.get(metric), (int, float)) and math.isfinite(entry[metric])
    ]
    return [step for step, _ in points], [value for _, value in points]


def smooth(values: list[float], window: int) -> list[float]:
    """
    Running mean over the last `window` values, or over as many as there are at the start.

    Args:
        values (`list[float]`):
            Values in order.
        window (`int`):
            Number of values, at least 1.

    Returns:
        `list[float]`: One mean for each value.
    """
    means = []
    for end in range(1, len(values) + 1):
        recent = values[max(0, end - window) : end]
        means.append(sum(recent) / len(recent))
    return means


def plot_run(log_history: list[dict], path: str | os.PathLike, title: str = "") -> None:
    """
    Draw reward before and after the filter, acceptance rate, entropy and completion length of a run, as a PNG.

    Lines are running means over a twentieth of the run; the values themselves are drawn faintly behind them. A panel
    whose metrics were never logged says so.

    Args:
        log_history (`list[dict]`):
            From [`load_log_history`], or a trainer's `state.log_history`.
        path (`str` or `os.PathLike`):
            File to write. Its folder is made if need be.
        title (`str`, *optional*, defaults to `""`):
            Heading.

    Example:

    ```python
    plot_run(trainer.state.log_history, "run.png")
    ```
    """
    figure = Figure(figsize=(10, 6.5), layout="constrained")
    figure.suptitle(title)
    for axes, (name, unit, metrics) in zip(figure.subplots(2, 2).flat, PANELS, strict=True):
        axes.set(title=name, xlabel="optimizer step", ylabel=unit)
        axes.grid(alpha=0.3)
        drawn = False
        for metric, label in metrics.items():
            steps, values = series(log_history, metric)
            if not values:
                continue
            window = max(1, len(values) // 20)
            (line,) = axes.plot(steps, smooth(values, window), label=label, marker="o" if len(values) == 1 else None)
            axes.plot(steps, values, color=line.get_color(), alpha=0.25, linewidth=0.8)
            drawn = True
        if not drawn:
            axes.text(0.5, 0.5, "not logged", ha="center", va="center", transform=axes.transAxes)
        elif len(metrics) > 1:
            axes.legend()
        if metrics.keys() == {"dynamic_sampling/acceptance_rate"}:
            axes.set_ylim(0, 1)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=120)

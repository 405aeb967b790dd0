# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Reading the files of a run, which may be incomplete if the run was killed, and computing figures from its ledger."""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache, partial
from itertools import groupby
from pathlib import Path
from typing import Any, TypeGuard

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from ..evaluation import compare
from ..evaluation.jobs import SUMMARY_FILE, has_fields
from ..run.checkpoint import last_complete_checkpoint
from ..run.ledger import PARTIAL, REWARDS, TEXT, as_text, choose, read_ledger
from ..run.log import LOG_HISTORY_NAME, SETTINGS_NAME
from ..sampling.example_names import shown_names


STATE_NAME = "trainer_state.json"
NUM_SAMPLED_PROMPTS = 2  # of each table of completions
SETTING = {"value": object, "default": object}
FACTS = ("step", "round", "prompt_id", "source", "correct", "scored", "prompt")  # shown of a group
NUM_PROMPTS = 5  # hardest prompts to show, and as many easiest
NUM_OPENED = 3  # accepted groups to show, and groups dropped for each reason
OUTCOMES_IN_WORDS = {
    "carried": "carried to the next rollout, not trained yet",
    "surplus": "surplus: accepted, but the batch was full",
    PARTIAL: "partial: only the first completions were sampled",
}
NUM_COMPLETIONS = 3  # completions to show of each of these groups
NUM_SPANS = 30  # spans of a run, over each of which an acceptance rate is computed
MAX_SOURCES = 8


@dataclass(frozen=True, kw_only=True)
class GroupFigures:
    """Figures of a run's ledger."""

    num_groups: int
    outcomes: list[dict[str, Any]]  # with their shares of the groups and of the tokens, the most frequent first
    sources: list[dict[str, Any]]  # with acceptance rates in the first and last fifth and in the whole run
    by_source: dict[str, tuple[list[int], list[float]]]  # steps and acceptance rates
    hardest: list[dict[str, Any]]  # prompts, with the step at which each was last sampled
    easiest: list[dict[str, Any]]
    opened: list[dict[str, Any]]  # groups whose text is shown, dropped ones first


@dataclass(frozen=True, kw_only=True)
class Run:
    """The files of one run."""

    label: str
    log_history: list[dict]  # log entries, oldest first
    max_steps: int | None = None  # planned number of optimizer steps
    written: datetime | None = None  # when the log was last written to
    checkpoint: str | None = None  # name of the last complete checkpoint
    notes: list[str] = field(default_factory=list)  # sentences about what could not be read
    samples: list[dict] = field(default_factory=list)  # prompts with their best and their worst completion
    evaluations: dict[str, dict] = field(default_factory=dict)  # summaries by name, oldest first
    changes: list[dict] = field(default_factory=list)  # each evaluation compared with the first on the same problems
    settings: dict[str, dict] | None = None  # `value` and `default` of settings that differ from their defaults
    groups: GroupFigures | None = None  # figures of the ledger

    @property
    def last_step(self) -> int:
        """Number of optimizer steps when the run last logged."""
        return self.log_history[-1]["step"]

    @property
    def finished(self) -> bool:
        """Whether training ended, by itself or by a callback that stopped it."""
        # The trainer logs its running time at the end. If a run was extended, there are also entries of earlier ends.
        ended = any("train_runtime" in entry for entry in self.log_history if entry["step"] == self.last_step)
        return ended or (self.max_steps is not None and self.last_step >= self.max_steps)


def load_runs(run_dirs: Sequence[str | os.PathLike]) -> list[Run]:
    """
    Return the runs in some output folders.

    The label of a run is the name of its folder, with as many parent folders as are needed to make it unique.
    """
    folders = list(dict.fromkeys(Path(run_dir).resolve() for run_dir in run_dirs))
    depth = 1
    while len({folder.parts[-depth:] for folder in folders}) < len(folders):
        depth += 1
    return [load_run(folder, label="/".join(folder.parts[-depth:])) for folder in folders]


def load_run(run_dir: str | os.PathLike, label: str | None = None) -> Run:
    """
    Return a run that has ended, is running or was killed.

    The log is `log_history.jsonl`. For a run of `GRPOTrainer` or another trainer it is the newest
    `trainer_state.json`. Files that cannot be read completely are listed in the notes of the run.

    Args:
        run_dir (`str` or `os.PathLike`):
            The `output_dir` of a run, or one of its checkpoints.
        label (`str`, *optional*):
            Name of the run. Defaults to the name of the folder.

    Raises:
        FileNotFoundError: If there is no such folder, or no log in it.
    """
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise FileNotFoundError(f"There is no folder `{run_dir}`. Name the `output_dir` of a run.")
    notes: list[str] = []
    # The growing log is preferred, because the checkpoints may be from an earlier run in the same folder.
    log = _read_lines(run_dir / LOG_HISTORY_NAME, notes) or _read_states(run_dir, notes)
    if log is None:
        raise FileNotFoundError(
            f"`{run_dir}` contains no log: neither a `{LOG_HISTORY_NAME}` with an entry, nor a complete "
            f"`{STATE_NAME}` in the folder or in a checkpoint. {_advise_on_folder(run_dir)}"
        )
    path, log_history, max_steps = log
    found = ((path, _parse(path.read_bytes())) for path in run_dir.glob(f"*/{SUMMARY_FILE}"))
    dated = [(_finished(path, summary), path.parent.name, summary) for path, summary in found if _is_summary(summary)]
    evaluations = {name: summary for _, name, summary in sorted(dated, key=lambda entry: entry[:2])}
    rows = read_ledger(run_dir, notes)
    checkpoint = last_complete_checkpoint(run_dir)
    return Run(
        label=label or run_dir.resolve().name,
        log_history=log_history,
        max_steps=max_steps,
        written=datetime.fromtimestamp(path.stat().st_mtime).astimezone(),
        checkpoint=None if checkpoint is None else checkpoint.name,
        notes=notes,
        samples=_read_samples(run_dir / "completions", notes),
        evaluations=evaluations,
        changes=_changes(run_dir, list(evaluations)),
        settings=_read_settings(run_dir / SETTINGS_NAME),
        groups=None if rows is None else summarize_groups(rows),
    )


def _advise_on_folder(folder: Path) -> str:
    """Return what to name instead of a folder without a log."""
    runs = sorted({path.parent for name in (LOG_HISTORY_NAME, STATE_NAME) for path in folder.glob(f"*/{name}")})
    if runs:
        return f"It contains the folders of {len(runs)} runs. Name one of them: `trl-dapo report {runs[0]}`."
    return (
        "It is not the `output_dir` of a run, or the run has not logged yet. Name the `output_dir` of `trl-dapo "
        "train`, as in `trl-dapo report outputs/my_run`."
    )


def load_log_history(run_dir: str | os.PathLike) -> list[dict]:
    """Return the log entries of a run. See [`load_run`]."""
    return load_run(run_dir).log_history


def series(log_history: list[dict], metric: str, over: str = "step") -> tuple[list[int], list[float]]:
    """
    Return the values of `over` and of a metric in the same log entries. `over` is the step by default.

    Entries without a finite number for both are left out.
    """
    points = [(int(entry[over]), entry[metric]) for entry in log_history if _has_numbers(entry, over, metric)]
    return [place for place, _ in points], [value for _, value in points]


def _has_numbers(entry: dict, *metrics: str) -> bool:
    return all(is_number(entry.get(metric)) for metric in metrics)


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether a value can be drawn: it is a number, and neither infinite nor NaN."""
    return isinstance(value, (int, float)) and abs(value) <= sys.float_info.max


# ---- Logs ----


def _read_lines(path: Path, notes: list[str]) -> tuple[Path, list[dict], int | None] | None:
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return None
    entries = [entry for entry in map(_parse, lines) if _is_entry(entry)]
    if len(entries) < len(lines):
        notes.append(f"{path.name}: {len(lines) - len(entries)} of {len(lines)} lines are incomplete and left out.")
    if not entries:
        notes.append(f"{path.name} contains no entry yet, so the log of the newest checkpoint is shown.")
        return None
    return path, entries, _steps_or_none([entry.pop("max_steps", None) for entry in entries][-1])


def _read_states(run_dir: Path, notes: list[str]) -> tuple[Path, list[dict], int | None] | None:
    states = []
    for path in (run_dir / STATE_NAME, *sorted(folder / STATE_NAME for folder in run_dir.glob("checkpoint-*"))):
        if path.parent == run_dir and not path.exists():
            continue  # this file is only written at the end of a run
        parsed = _parse(path.read_bytes()) if path.exists() else None
        state = parsed if isinstance(parsed, dict) else {}
        entries = state.get("log_history")
        if not isinstance(entries, list) or not all(map(_is_entry, entries)):
            what = "is incomplete" if path.exists() else "is missing"
            notes.append(f"{path.relative_to(run_dir)} {what}. The checkpoint is left out.")
        elif entries:
            states.append((entries[-1]["step"], path, entries, _steps_or_none(state.get("max_steps"))))
    return max(states, key=lambda state: state[0])[1:] if states else None


def _parse(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # text that is not JSON or not UTF-8; nested too deeply
        return None


def _is_entry(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("step"), int)


def _steps_or_none(max_steps: Any) -> int | None:
    return max_steps if isinstance(max_steps, int) and max_steps > 0 else None


# ---- Completions and evaluations ----


def _read_samples(folder: Path, notes: list[str]) -> list[dict]:
    """Return the first prompts of the first and of the last readable table that `log_completions=True` has written."""
    paths = sorted(folder.glob("completions_*.parquet"), key=lambda path: (len(path.name), path.name))
    read = cache(partial(_read_table, notes=notes))
    ends = dict.fromkeys(next(filter(read, ordered), None) for ordered in (paths, paths[::-1]))
    return [sample for path in ends if path for sample in read(path)]


def _read_table(path: Path, notes: list[str]) -> list[dict]:
    try:
        with path.open("rb") as file:  # pyarrow itself cannot open a path that is not UTF-8
            rows = pq.read_table(file).to_pylist()
        # Rows that only filled the batch have no reward.
        scored = [row for row in rows if any(map(is_number, _rewards(row).values()))]
        groups = [list(group) for _, group in groupby(scored, key=lambda row: row["prompt"])]
        return [_sample(group) for group in groups[:NUM_SAMPLED_PROMPTS]]
    except (OSError, ValueError, KeyError, TypeError):  # errors of pyarrow, or for a table with other columns
        notes.append(f"completions/{path.name} cannot be read and is left out.")
        return []


def _rewards(row: dict) -> dict[str, Any]:
    """Return the values that the reward functions returned and logged for a completion."""
    return {name: value for name, value in row.items() if name not in ("step", "prompt", "completion", "advantage")}


def _sample(group: list[dict]) -> dict:
    """Return a prompt with its best and its worst completion, or with one if all have the same advantage."""
    ranked = sorted(group, key=lambda row: row["advantage"] if is_number(row["advantage"]) else 0.0, reverse=True)
    chosen = [ranked[0], ranked[-1]] if ranked[0]["advantage"] != ranked[-1]["advantage"] else ranked[:1]
    return {
        "step": group[0]["step"],
        "prompt": as_text(group[0]["prompt"]),
        "num_completions": len(group),
        "completions": [
            {"text": as_text(row["completion"]), "advantage": row["advantage"], "rewards": _rewards(row)}
            for row in chosen
        ],
    }


def _finished(path: Path, summary: dict) -> float:
    """Return the time at which an evaluation ended, in seconds. If it is not known, that of its file is used."""
    try:
        return datetime.fromisoformat(summary["finished"]).timestamp()
    except (KeyError, TypeError, ValueError):
        return path.stat().st_mtime


def _changes(run_dir: Path, names: list[str]) -> list[dict]:
    """Return the comparison of each evaluation in the run's folder with the first one on the same problems."""
    changes: list[dict] = []
    firsts: list[str] = []
    for name in names:
        for first in firsts:
            try:
                changes.append({"before": first, "after": name, **compare(run_dir / first, run_dir / name)})
                break
            except (ValueError, TypeError):  # other problems, another number of completions, or missing figures
                continue
        else:
            firsts.append(name)
    return changes


def _read_settings(path: Path) -> dict[str, dict] | None:
    settings = _parse(path.read_bytes()) if path.exists() else None
    if not isinstance(settings, dict):
        return None
    return {name: setting for name, setting in settings.items() if has_fields(setting, SETTING)}


def _is_summary(summary: Any) -> bool:
    """Return whether a `summary.json` is from `trl-dapo eval`. Other programs may write files of the same name."""
    return has_fields(summary, {"metrics": dict}) and all(
        isinstance(estimate, dict) and all(is_number(estimate.get(end)) for end in ("mean", "low", "high"))
        for estimate in summary["metrics"].values()
    )


# ---- The ledger ----


def summarize_groups(rows: pa.Table) -> GroupFigures:
    """Return the figures of a ledger with at least one row."""
    scalars = [name for name in rows.column_names if not pa.types.is_nested(rows.schema.field(name).type)]
    groups = rows.select([name for name in scalars if name not in TEXT]).to_pandas()
    # A partial group is neither accepted nor dropped. As a missing value it does not count in any share.
    accepted = (groups["outcome"] != "dropped").astype(float)
    groups["accepted"] = accepted.mask(groups["outcome"] == PARTIAL)
    with_text = rows.filter(rows["completions"].is_valid())
    sources = _sources(groups)
    shown = shown_names(groups["prompt_id"].unique())
    hardest, easiest = (
        [prompt | {"prompt_id": shown[prompt["prompt_id"]]} for prompt in prompts]
        for prompts in _prompts(groups, with_text)
    )
    return GroupFigures(
        num_groups=len(groups),
        outcomes=_outcomes(groups),
        sources=sources,
        by_source=_by_source(groups, [source["source"] for source in sources[:MAX_SOURCES]]),
        hardest=hardest,
        easiest=easiest,
        opened=[group | {"prompt_id": shown[group["prompt_id"]]} for group in _opened(with_text)],
    )


def _outcomes(groups: pd.DataFrame) -> list[dict[str, Any]]:
    """
    Return what became of the groups. A carried group trains in the next rollout, so it counts as trained, as in the
    summary of the run, unless no later rollout is known.
    """
    has_trained = (groups["outcome"] == "carried") & (groups["rollout"] < groups["rollout"].max())
    named = groups["outcome"].mask(has_trained, "trained").replace(OUTCOMES_IN_WORDS)
    named = named.mask(groups["outcome"] == "dropped", "dropped: " + groups["drop_reason"].fillna("no reason"))
    tokens = groups["tokens"].groupby(named).sum()
    return [
        {
            "outcome": outcome,
            "num_groups": int(count),
            "share": count / len(groups),
            "tokens": tokens[outcome] / max(tokens.sum(), 1),
        }
        for outcome, count in named.value_counts().items()
    ]


def _sources(groups: pd.DataFrame) -> list[dict[str, Any]]:
    first, last = groups["rollout"].quantile([0.2, 0.8])
    figures = []
    parts = iter(groups.groupby("source", dropna=False))  # pandas 2.2 fails on `len` if a source is missing
    for source, of_source in sorted(parts, key=lambda part: -part[1]["accepted"].count()):
        accepted = of_source["accepted"].dropna()
        rollouts = of_source["rollout"][accepted.index]
        spans = {"first": accepted[rollouts <= first], "last": accepted[rollouts >= last], "all": accepted}
        correct, scored = of_source["correct"].sum(min_count=1), of_source["scored"].sum()
        figures.append(
            {
                "source": None if pd.isna(source) else source,
                "num_groups": len(accepted),
                **{name: float(span.mean()) if len(span) else None for name, span in spans.items()},
                "correct": None if pd.isna(correct) or not scored else float(correct / scored),
            }
        )
    return figures


def _by_source(groups: pd.DataFrame, sources: list[str | None]) -> dict[str, tuple[list[int], list[float]]]:
    """Return the acceptance rate of each source over spans of equally many rollouts, at the last step of each span."""
    first, count = groups["rollout"].min(), groups["rollout"].max() - groups["rollout"].min() + 1
    span = (groups["rollout"] - first) * min(NUM_SPANS, count) // count
    steps = groups["step"].groupby(span).max()
    points = {}
    for source in sources:
        chosen = groups["source"].isna() if source is None else groups["source"] == source
        rates = groups.loc[chosen, "accepted"].groupby(span[chosen]).mean().dropna()
        points["no source" if source is None else source] = [int(steps[i]) for i in rates.index], rates.tolist()
    return points


def _prompts(groups: pd.DataFrame, with_text: pa.Table) -> tuple[list[dict], list[dict]]:
    """
    Return the prompts with the smallest and with the largest share of correct completions.

    If several prompts have the same share, those with more completions come first.
    """
    totals = groups.groupby("prompt_id").agg(
        source=("source", "first"),
        num_groups=("rollout", "size"),
        correct=("correct", "sum"),
        scored=("scored", "sum"),
        step=("step", "max"),
        known=("correct", "count"),
    )
    totals = totals[(totals["known"] > 0) & (totals["scored"] > 0)]
    texts = dict(zip(with_text["prompt_id"].to_pylist(), with_text["prompt"].to_pylist(), strict=True))
    # One correct and one incorrect completion are added to each, so that 0 of 16 is harder than 0 of 8.
    ends = ((totals["correct"] + 1) / (totals["scored"] + 2)).sort_values(kind="stable").index
    hardest = ends[totals.loc[ends, "correct"] < totals.loc[ends, "scored"]][:NUM_PROMPTS]
    easiest = ends[totals.loc[ends, "correct"] > 0][::-1][:NUM_PROMPTS]

    def described(name: str) -> dict[str, Any]:
        return {
            "prompt_id": name,
            "source": None if pd.isna(totals.at[name, "source"]) else totals.at[name, "source"],
            **{column: int(totals.at[name, column]) for column in ("num_groups", "correct", "scored", "step")},
            "prompt": texts.get(name),
        }

    return [described(name) for name in hardest], [described(name) for name in easiest]


def _opened(with_text: pa.Table) -> list[dict[str, Any]]:
    """Return the last groups whose text was stored: those dropped for each reason, and then the accepted ones."""
    places: dict[str, list[int]] = {}
    outcomes, reasons = (with_text[name].to_pylist() for name in ("outcome", "drop_reason"))
    for place, (outcome, reason) in enumerate(zip(outcomes, reasons, strict=True)):
        verdict = {"dropped": f"dropped: {reason}", PARTIAL: PARTIAL}.get(outcome, "accepted")
        places.setdefault(verdict, []).append(place)
    return [
        {
            **{name: row[name] for name in FACTS},
            "verdict": verdict,
            "num_completions": len(row["completions"]),
            "completions": _completions(row),
        }
        for verdict in sorted(places, key=lambda verdict: verdict == "accepted")
        for row in with_text.take(pa.array(places[verdict][-NUM_OPENED:], pa.int64())).to_pylist()
    ]


def _completions(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return some completions of a group, with as many different rewards as possible."""
    named = {name.removeprefix(REWARDS): values for name, values in row.items() if name.startswith(REWARDS) and values}
    rewards = list(zip(*named.values(), strict=True))
    return [
        {
            "number": i + 1,
            "text": row["completions"][i],
            "length": row["lengths"][i],
            "truncated": row["truncated"][i],
            "rewards": dict(zip(named, rewards[i], strict=True)),
        }
        for i in choose(dict(enumerate(rewards)), NUM_COMPLETIONS)
    ]

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""A run's ledger to what the page shows of it: totals, sources over time, hard and easy prompts, groups to read."""

from dataclasses import dataclass
from typing import Any

import pandas as pd
import pyarrow as pa

from ..run.ledger import REWARDS, TEXT, choose


FACTS = ("step", "round", "prompt_id", "source", "correct", "scored", "prompt")  # of a group to read
NUM_PROMPTS = 5  # hardest, and easiest
NUM_OPENED = 3  # groups of each verdict
NUM_COMPLETIONS = 3  # of each of them
NUM_SPANS = 30  # of a run, over which acceptance is drawn
MAX_SOURCES = 8


@dataclass(frozen=True, kw_only=True)
class GroupFigures:
    """What a ledger says."""

    num_groups: int
    outcomes: list[dict[str, Any]]  # with their share of the groups and of the tokens, the largest first
    sources: list[dict[str, Any]]  # with acceptance in the first fifth of the run, the last and all; the largest first
    by_source: dict[str, tuple[list[int], list[float]]]  # steps and acceptance rates
    hardest: list[dict[str, Any]]  # prompts, with the step they were last sampled at
    easiest: list[dict[str, Any]]
    opened: list[dict[str, Any]]  # groups to read, dropped ones first


def summarize_groups(rows: pa.Table) -> GroupFigures:
    """A ledger's rows, of which there is one at least, in figures."""
    scalars = [name for name in rows.column_names if not pa.types.is_nested(rows.schema.field(name).type)]
    groups = rows.select([name for name in scalars if name not in TEXT]).to_pandas()
    groups["accepted"] = groups["outcome"] != "dropped"
    with_text = rows.filter(rows["completions"].is_valid())
    sources = _sources(groups)
    hardest, easiest = _prompts(groups, with_text)
    return GroupFigures(
        num_groups=len(groups),
        outcomes=_outcomes(groups),
        sources=sources,
        by_source=_by_source(groups, [source["source"] for source in sources[:MAX_SOURCES]]),
        hardest=hardest,
        easiest=easiest,
        opened=_opened(with_text),
    )


def _outcomes(groups: pd.DataFrame) -> list[dict[str, Any]]:
    named = groups["drop_reason"].where(groups["outcome"] == "dropped").fillna(groups["outcome"])
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
    parts = iter(groups.groupby("source", dropna=False))  # pandas 2.2 cannot count parts of which one has no name
    for source, of_source in sorted(parts, key=lambda part: -len(part[1])):
        rollouts, accepted = of_source["rollout"], of_source["accepted"]
        spans = {"first": accepted[rollouts <= first], "last": accepted[rollouts >= last], "all": accepted}
        correct, scored = of_source["correct"].sum(min_count=1), of_source["scored"].sum()
        figures.append(
            {
                "source": None if pd.isna(source) else source,
                "num_groups": len(of_source),
                **{name: float(span.mean()) if len(span) else None for name, span in spans.items()},
                "correct": None if pd.isna(correct) or not scored else float(correct / scored),
            }
        )
    return figures


def _by_source(groups: pd.DataFrame, sources: list[str | None]) -> dict[str, tuple[list[int], list[float]]]:
    """Over spans of the run with as many rollouts each, by the last step of each span."""
    first, count = groups["rollout"].min(), groups["rollout"].max() - groups["rollout"].min() + 1
    span = (groups["rollout"] - first) * min(NUM_SPANS, count) // count
    steps = groups["step"].groupby(span).max()
    points = {}
    for source in sources:
        chosen = groups["source"].isna() if source is None else groups["source"] == source
        rates = groups.loc[chosen, "accepted"].groupby(span[chosen]).mean()
        points["no source" if source is None else source] = [int(steps[i]) for i in rates.index], rates.tolist()
    return points


def _prompts(groups: pd.DataFrame, with_text: pa.Table) -> tuple[list[dict], list[dict]]:
    """The prompts with the least share of right completions and with the largest, the surest first."""
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
    # As if one completion more were right and one wrong: 0 of 16 is harder than 0 of 8.
    estimate = (totals["correct"] + 1) / (totals["scored"] + 2)
    ends = estimate.sort_values(kind="stable").index
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
    """The last of each verdict, those that were dropped first."""
    places: dict[str, list[int]] = {}
    outcomes, reasons = (with_text[name].to_pylist() for name in ("outcome", "drop_reason"))
    for place, (outcome, reason) in enumerate(zip(outcomes, reasons, strict=True)):
        places.setdefault("accepted" if outcome != "dropped" else reason, []).append(place)
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
    """Some completions of a group: one of each reward first."""
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

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Two evaluations of the same problems: what changed, and how sure that is."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from .journal import JOURNAL_FILE, SUMMARY_FILE, has_fields
from .statistics import estimate_mean, problem_figures


_EXPECTED_TO_DIFFER = {"model", "weights"}
# What is compared of a summary, of its settings and of its problems.
_SUMMARY = {"settings": dict, "scorer": object, "problems": list}
_SETTINGS = {"model": object, "k": int}
_PROBLEM: dict[str, Any] = {"id": str, "source": str, "num_correct": int, "num_completions": int, "maj": (int, float)}
_NAMED_IDS = 3


def compare(base: str | os.PathLike, trained: str | os.PathLike) -> dict[str, Any]:
    """
    Paired differences between two evaluations, as in `compare("outputs/base/aime", "outputs/trained/aime")`.

    Either is a `summary.json` or the folder that holds it, of the same problems. Each metric's difference is the mean
    over problems of trained minus base, with a 95 % interval over the problems. It is much tighter than the intervals
    of the two evaluations, which come mostly from how the problems differ. Where no problem differs, it says how much
    unseen ones may: up to one in eight after 30 problems.

    Returns:
        `dict`:
            `base` and `trained` (their models), `k`, `differing_settings` (other than the model: each with its two
            values); `num_problems` and `metrics` (each with `base`, `trained`, `num_differing` problems, and the
            `difference`'s `mean`, `low` and `high`), the same for each source in `sources`; `gained` and `lost`, the
            problems with a higher and with a lower avg@k, each with `id`, `source`, `base`, `trained` and
            `difference`, the largest change first.

    Raises:
        FileNotFoundError: If there is no summary.
        ValueError: If the problems or the numbers of completions differ.
    """
    summaries = [_load_summary(Path(path)) for path in (base, trained)]
    settings = [{**summary["settings"], "scorer": summary["scorer"]} for summary in summaries]
    k, trained_k = (setting["k"] for setting in settings)
    if k != trained_k:
        raise ValueError(
            f"`{base}` has {k} completions a problem and `{trained}` has {trained_k}: evaluate both with the same `k`."
        )
    found = [{(problem["source"], problem["id"]): problem for problem in summary["problems"]} for summary in summaries]
    _refuse_other_problems((base, trained), found)
    keys = list(found[0])
    names = ("num_correct", "num_completions", "maj")
    columns = [[[problems[key][name] for key in keys] for name in names] for problems in found]
    figures = [problem_figures(num_correct, num_completions, maj, k) for num_correct, num_completions, maj in columns]

    def differences(source: str | None) -> dict[str, Any]:
        chosen = np.array([source in (None, key[0]) for key in keys])
        metrics = {}
        for name in figures[0]:
            before, after = (values[name][chosen] for values in figures)
            metrics[name] = {
                "base": float(before.mean()),
                "trained": float(after.mean()),
                "num_differing": int((before != after).sum()),
                "difference": estimate_mean(after - before, (-1.0, 1.0))._asdict(),
            }
        return {"num_problems": int(chosen.sum()), "metrics": metrics}

    changes = []
    for (source, id_), before, after in zip(keys, *(values[f"avg@{k}"].tolist() for values in figures), strict=True):
        changes.append({"id": id_, "source": source, "base": before, "trained": after, "difference": after - before})
    changes.sort(key=lambda change: -abs(change["difference"]))
    return {
        "base": settings[0]["model"],
        "trained": settings[1]["model"],
        "k": k,
        "differing_settings": {
            name: [setting.get(name) for setting in settings]
            for name in {**settings[0], **settings[1]}
            if name not in _EXPECTED_TO_DIFFER and settings[0].get(name) != settings[1].get(name)
        },
        **differences(None),
        "sources": {source: differences(source) for source in dict.fromkeys(source for source, _ in keys)},
        "gained": [change for change in changes if change["difference"] > 0],
        "lost": [change for change in changes if change["difference"] < 0],
    }


def _load_summary(path: Path) -> dict[str, Any]:
    file = path / SUMMARY_FILE if path.is_dir() else path
    try:
        summary = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        hint = ""
        if (path / JOURNAL_FILE).is_file():
            hint = " The evaluation has not ended: run it again, it continues."
        elif path.is_dir():
            hint = " The folder is not the `output_dir` of an evaluation: `trl-dapo eval` makes one."
        raise FileNotFoundError(f"There is no `{file}`.{hint}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"`{file}` is not JSON: {error}") from error
    if (
        not has_fields(summary, _SUMMARY)
        or not has_fields(summary["settings"], _SETTINGS)
        or not summary["problems"]
        or not all(has_fields(problem, _PROBLEM) for problem in summary["problems"])
    ):
        raise ValueError(f"`{file}` is not the summary of an evaluation.")
    return summary


def _refuse_other_problems(paths: tuple[str | os.PathLike, ...], found: list[dict[tuple[str, str], Any]]) -> None:
    parts = []
    for path, problems, others in zip(paths, found, found[::-1], strict=True):
        if only := sorted(problems.keys() - others.keys()):
            ids = [id_ for _, id_ in only]
            named = ", ".join(ids[:_NAMED_IDS]) + (", ..." if len(ids) > _NAMED_IDS else "")
            parts.append(f"{len(only)} only in `{path}` (ids {named})")
    if parts:
        raise ValueError(
            f"The evaluations are not of the same problems: {' and '.join(parts)}. Evaluate both on the same dataset, "
            "with the same `offset` and `limit`."
        )

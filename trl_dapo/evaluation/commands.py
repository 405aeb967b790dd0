# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""`trl-dapo eval` and `trl-dapo compare`: what an evaluation found, and what changed between two."""

import argparse
import inspect
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ..settings.arguments import check_output_dir
from ..settings.help import read_fields
from .jobs import JOURNAL_FILE, SUMMARY_FILE, has_fields
from .run import evaluate
from .statistics import estimate_mean, problem_figures


_LISTED_PROBLEMS = 10
_EXPECTED_TO_DIFFER = {"model", "weights", "config", "base_model", "base_weights", "base_config"}
# What is compared of a summary, of its settings and of its problems.
_SUMMARY = {"settings": dict, "scorer": object, "problems": list}
_SETTINGS = {"model": object, "k": int}
_PROBLEM: dict[str, Any] = {"id": str, "source": str, "num_correct": int, "num_completions": int, "maj": (int, float)}
_NAMED_IDS = 3


def add_eval_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `trl-dapo eval`, the arguments of [`evaluate`], to a parser."""
    parser.description = (
        "Measure avg@k, pass@k and maj@k of a model on math problems, each with a 95 % interval over problems. The "
        "defaults are the AIME protocol of the DAPO paper. The same command continues an evaluation that was "
        "interrupted."
    )
    described = read_fields(evaluate.__doc__ or "")  # none with Python's -OO
    for name, parameter in inspect.signature(evaluate).parameters.items():
        if name in ("processing_class", "progress"):  # in Python alone
            continue
        settings: dict[str, Any] = {"help": described[name].text.replace("%", "%%") if described else ""}
        if parameter.default in (None, inspect.Parameter.empty):
            settings |= {"default": argparse.SUPPRESS, "required": parameter.default is not None}
            settings["type"] = {"limit": int, "accuracy_threshold": float}.get(name, str)
        else:
            settings |= {"default": parameter.default, "type": type(parameter.default)}
            settings["help"] += " (default: %(default)s)"
        parser.add_argument(*dict.fromkeys([f"--{name}", f"--{name.replace('_', '-')}"]), **settings)


def run_eval(args: argparse.Namespace) -> int:
    """Runs `trl-dapo eval` and prints its figures; the exit status."""
    check_output_dir(args.output_dir)
    settings = {name: value for name, value in vars(args).items() if name in inspect.signature(evaluate).parameters}
    _print_summary(evaluate(**settings), args.output_dir)
    return 0


def add_compare_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Paired differences between two evaluations of the same problems, with 95 % intervals."
    parser.add_argument("base", help="summary.json of an evaluation, or the folder that holds it")
    parser.add_argument("trained", help="summary.json or folder of the other evaluation")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run_compare(args: argparse.Namespace) -> int:
    """Runs `trl-dapo compare` and prints what changed; the exit status."""
    change = compare(args.base, args.trained)
    if args.json:
        print(json.dumps(change, indent=1))
    else:
        print_comparison(change)
    return 0


def _print_summary(summary: dict[str, Any], output_dir: str) -> None:
    k = summary["settings"]["k"]
    metrics = [name for name in (f"avg@{k}", f"pass@{k}", f"maj@{k}") if name in summary["metrics"]]
    table = _table("source", "problems", *metrics, "length", "cut off")
    rows = [("all", summary)]
    if len(summary["sources"]) > 1:
        rows = [*summary["sources"].items(), *rows]
    for source, figures in rows:
        if source == "all":
            table.add_section()
        length = "-" if figures["mean_length"] is None else f"{figures['mean_length']:,.0f}"
        # The interval is printed under its figure, so that three of each fit next to one another.
        shares = []
        for metric in metrics:
            mean, low, high = (figures["metrics"][metric][bound] for bound in ("mean", "low", "high"))
            shares.append(f"{mean:.1%}\n\\[{100 * low:.1f}, {100 * high:.1f}]")
        table.add_row(escape(source), str(figures["num_problems"]), *shares, length, f"{figures['truncated']:.1%}")
    console = Console()
    title = f"{summary['settings']['model']}: {k} completions a problem, 95 % intervals"
    console.print(escape(title), highlight=False)
    console.print(table)
    if unscored := summary["num_unscored_problems"]:
        console.print(f"Left out: {unscored} problems whose gold answer the scorer cannot read.")
    console.print(f"Summary and completions: {escape(str(output_dir))}", highlight=False, soft_wrap=True)


def print_comparison(change: dict[str, Any], console: Console | None = None, in_brief: bool = False) -> None:
    """Prints what [`compare`] returns; `in_brief` avg@k alone."""
    console = console or Console()
    k = change["k"]
    table = _table("source", "metric", "base", "trained", "difference", "", left=("source", "metric", ""))
    is_equal_somewhere = False
    metrics = [f"avg@{k}"] if in_brief else [f"avg@{k}", f"pass@{k}", f"maj@{k}"]
    rows = [("all", change)]
    if len(change["sources"]) > 1:
        rows = [*change["sources"].items(), *rows]
    for source, figures in rows:
        if source == "all" or not in_brief:
            table.add_section()
        for metric in metrics:
            if (values := figures["metrics"].get(metric)) is None:  # where nothing states answers, there is no maj@k
                continue
            mean, low, high = (values["difference"][bound] for bound in ("mean", "low", "high"))
            is_equal_somewhere |= not values["num_differing"]
            if low > 0:
                verdict = "up"
            elif high < 0:
                verdict = "down"
            else:
                verdict = "unclear" if values["num_differing"] else "all equal"
            table.add_row(
                escape(source),
                metric,
                f"{values['base']:.1%}",
                f"{values['trained']:.1%}",
                f"{_in_points(mean)} \\[{_in_points(low)}, {_in_points(high)}]",
                verdict,
            )
    if not in_brief:
        console.print(f"base:    {escape(change['base'])}\ntrained: {escape(change['trained'])}", highlight=False)
    for name, (base, trained) in change["differing_settings"].items():
        console.print(f"[yellow]Not the same:[/yellow] {name} is {base!r} for base, {trained!r} for trained.")
    title = f"{change['num_problems']} problems, {k} completions each: difference with 95 % interval"
    console.print(title, highlight=False)
    console.print(table)
    if is_equal_somewhere:
        may = "The interval says how much problems that were not evaluated may."
        console.print(f"all equal: no problem differs. {may}")
    if change["num_problems"] < 30:
        console.print("With fewer than 30 problems an interval is only a hint: it may not contain the true value.")
    if in_brief:
        return
    is_cut = console.is_terminal  # one line, cut off at its end; in a file the whole of it
    for verb in ("gained", "lost"):
        problems = change[verb]
        share = sum(problem["difference"] for problem in problems) / change["num_problems"]
        console.print(f"{len(problems)} problems {verb}: {_in_points(share)} points of avg@{k}.", highlight=False)
        for problem in problems[:_LISTED_PROBLEMS]:
            line = Text(f"  {problem['base']:6.1%} -> {problem['trained']:6.1%}  {problem['id']}")
            console.print(line, no_wrap=True, overflow="ellipsis", crop=is_cut, soft_wrap=not is_cut)
        if len(problems) > _LISTED_PROBLEMS:
            console.print(f"  ... and {len(problems) - _LISTED_PROBLEMS} more (--json lists all)", highlight=False)


def _in_points(share: float) -> str:
    """A difference of shares in points. What is exactly between two tenths is rounded alike, whatever was added up."""
    return f"{round(round(100 * share, 9), 1) + 0.0:+.1f}"


def _table(*columns: str, left: Sequence[str] = ("source",)) -> Table:
    """A table that fits 80 columns: a long source is broken, a number never."""
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False, show_edge=False)
    for column in columns:
        is_left = column in left
        table.add_column(column, justify="left" if is_left else "right", no_wrap=column != "source", overflow="fold")
    return table


# ---- What changed ----


def compare(base: str | os.PathLike, trained: str | os.PathLike) -> dict[str, Any]:
    """
    Paired differences between two evaluations, as in `compare("outputs/base/aime", "outputs/trained/aime")`.

    Either is a `summary.json` or the folder that holds it. Each metric's difference is the mean over problems of
    trained minus base, with a 95 % interval over the problems: much tighter than the two evaluations' own, which come
    mostly from how the problems differ. If no problem differs, it says how much unseen ones may.

    Returns `base` and `trained` (their models), `k`, `differing_settings` (other than the model: each with its two
    values); `num_problems` and `metrics` (each with `base`, `trained`, `num_differing` problems, and the
    `difference`'s `mean`, `low` and `high`), the same for each source in `sources`; `gained` and `lost`, the problems
    with a higher and with a lower avg@k, each with `id`, `source`, `base`, `trained` and `difference`, the largest
    change first. Raises `FileNotFoundError` without a summary, `ValueError` if the problems or `k` differ.
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
    figures = [problem_figures([problems[key] for key in keys], k) for problems in found]
    known = [set(summary.get("metrics", figures[0])) for summary in summaries]
    names = [name for name in figures[0] if all(name in of_summary for of_summary in known)]

    def differences(source: str | None) -> dict[str, Any]:
        chosen = np.array([source in (None, key[0]) for key in keys])
        metrics = {}
        for name in names:
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

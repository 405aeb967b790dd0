# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The commands `trl-dapo eval` and `trl-dapo compare`, and the comparison of two evaluations."""

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

from ..settings.arguments import OneLineParser, any_number, check_output_dir, whole_number
from ..settings.help import read_fields
from .jobs import JOURNAL_FILE, SUMMARY_FILE, has_fields
from .run import evaluate
from .statistics import estimate_mean, problem_figures


EVAL_EXAMPLE = "trl-dapo eval --model MODEL --dataset DATA --output_dir FOLDER"
COMPARE_EXAMPLE = "trl-dapo compare BASE_FOLDER TRAINED_FOLDER"
_HOW_TO_NAME = f"Name the `output_dir` of an evaluation, which `{EVAL_EXAMPLE}` writes."
_LISTED_PROBLEMS = 10
_EXPECTED_TO_DIFFER = {"model", "weights", "config", "base_model", "base_weights", "base_config"}
# The fields of a summary, of its settings and of its problems that a comparison needs.
_SUMMARY = {"settings": dict, "scorer": object, "problems": list}
_SETTINGS = {"model": object, "k": int}
_PROBLEM: dict[str, Any] = {"id": str, "source": str, "num_correct": int, "num_completions": int, "maj": (int, float)}
_NAMED_IDS = 3


def add_eval_arguments(parser: OneLineParser) -> None:
    """Add the options of `trl-dapo eval` to a parser. They are the arguments of [`evaluate`]."""
    parser.example = EVAL_EXAMPLE
    parser.description = (
        "Measure avg@k, pass@k and maj@k of a model on math problems, each with a 95% interval over problems. The "
        "defaults are the AIME protocol of the DAPO paper. The same command continues an evaluation that was "
        "interrupted."
    )
    described = read_fields(evaluate.__doc__ or "")  # `python -OO` removes docstrings
    for name, parameter in inspect.signature(evaluate).parameters.items():
        if name in ("processing_class", "progress"):  # only for calls from Python
            continue
        settings: dict[str, Any] = {"help": described[name].text.replace("%", "%%") if described else ""}
        if parameter.default in (None, inspect.Parameter.empty):
            settings |= {"default": argparse.SUPPRESS, "required": parameter.default is not None}
            settings["type"] = {"limit": whole_number, "accuracy_threshold": any_number}.get(name, str)
        else:
            read = {int: whole_number, float: any_number, str: str}[type(parameter.default)]
            settings |= {"default": parameter.default, "type": read}
            settings["help"] += " (default: %(default)s)"
        parser.add_argument(*dict.fromkeys([f"--{name}", f"--{name.replace('_', '-')}"]), **settings)


def run_eval(args: argparse.Namespace) -> int:
    """Run `trl-dapo eval`, print its figures, and return the exit status."""
    check_output_dir(args.output_dir)
    settings = {name: value for name, value in vars(args).items() if name in inspect.signature(evaluate).parameters}
    _print_summary(evaluate(**settings), args.output_dir)
    return 0


def add_compare_arguments(parser: OneLineParser) -> None:
    parser.example = COMPARE_EXAMPLE
    parser.description = "Compare two evaluations problem by problem, with 95% intervals of the differences."
    parser.add_argument("base", help="summary.json of an evaluation, or its folder")
    parser.add_argument("trained", help="summary.json of the other evaluation, or its folder")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run_compare(args: argparse.Namespace) -> int:
    """Run `trl-dapo compare`, print the differences, and return the exit status."""
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
        # The interval is printed below its mean, so that three metrics fit next to one another.
        shares = []
        for metric in metrics:
            mean, low, high = (figures["metrics"][metric][bound] for bound in ("mean", "low", "high"))
            shares.append(f"{mean:.1%}\n\\[{100 * low:.1f}, {100 * high:.1f}]")
        table.add_row(escape(source), str(figures["num_problems"]), *shares, length, f"{figures['truncated']:.1%}")
    console = Console()
    title = f"{summary['settings']['model']}: {k} completions per problem, 95% intervals"
    console.print(escape(title), highlight=False)
    console.print(table)
    if unscored := summary["num_unscored_problems"]:
        console.print(f"Left out: {unscored} problems with a gold answer that the scorer cannot read.")
    console.print(f"Summary and completions: {escape(str(output_dir))}", highlight=False, soft_wrap=True)


def print_comparison(change: dict[str, Any], console: Console | None = None, only_avg: bool = False) -> None:
    """Print the result of [`compare`], or with `only_avg` a short form with only avg@k."""
    console = console or Console()
    k = change["k"]
    table = _table("source", "metric", "base", "trained", "difference", "", left=("source", "metric", ""))
    is_equal_somewhere = False
    metrics = [f"avg@{k}"] if only_avg else [f"avg@{k}", f"pass@{k}", f"maj@{k}"]
    rows = [("all", change)]
    if len(change["sources"]) > 1:
        rows = [*change["sources"].items(), *rows]
    for source, figures in rows:
        if source == "all" or not only_avg:
            table.add_section()
        for metric in metrics:
            values = figures["metrics"].get(metric)
            if values is None:  # there is no maj@k if the answers are not known
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
    if not only_avg:
        console.print(f"base:    {escape(change['base'])}\ntrained: {escape(change['trained'])}", highlight=False)
    differing = change["differing_settings"]
    for name, (base, trained) in differing.items():
        if name == "problems":  # a hash of what is asked, whose ids are equal
            if "prompt_style" in differing:
                continue  # this is why the prompts differ
            what = "problems with the same id have another prompt, order or number of rows."
        else:
            what = f"{name} is {base!r} for base, {trained!r} for trained."
        console.print(f"[yellow]Settings differ:[/yellow] {what}")
    title = f"{change['num_problems']} problems, {k} completions per problem: difference with 95% interval"
    console.print(title, highlight=False)
    console.print(table)
    if is_equal_somewhere:
        console.print(
            "all equal: no evaluated problem differs. The interval says how much other problems may differ on average."
        )
    if change["num_problems"] < 30:
        console.print(
            "With fewer than 30 problems an interval is only approximate: it may miss the true value more often."
        )
    if only_avg:
        return
    is_cut = console.is_terminal  # on a terminal a long line is cut off at its end, in a file it is not
    for key, verdict in (("gained", "better"), ("lost", "worse")):
        problems = change[key]
        share = sum(problem["difference"] for problem in problems) / change["num_problems"]
        console.print(f"{len(problems)} problems {verdict}: {_in_points(share)} points of avg@{k}.", highlight=False)
        for problem in problems[:_LISTED_PROBLEMS]:
            line = Text(f"  {problem['base']:6.1%} -> {problem['trained']:6.1%}  {problem['id']}")
            console.print(line, no_wrap=True, overflow="ellipsis", crop=is_cut, soft_wrap=not is_cut)
        if len(problems) > _LISTED_PROBLEMS:
            console.print(f"  ... and {len(problems) - _LISTED_PROBLEMS} more (--json lists all)", highlight=False)


def _in_points(share: float) -> str:
    """
    Return a difference of shares in percentage points.

    It is rounded twice, so that a value between two tenths is rounded in the same way despite errors of addition.
    """
    return f"{round(round(100 * share, 9), 1) + 0.0:+.1f}"


def _table(*columns: str, left: Sequence[str] = ("source",)) -> Table:
    """Return an empty table that fits into 80 characters. Only the names of sources are wrapped."""
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False, show_edge=False)
    for column in columns:
        is_left = column in left
        table.add_column(column, justify="left" if is_left else "right", no_wrap=column != "source", overflow="fold")
    return table


# ---- Comparison ----


def compare(base: str | os.PathLike, trained: str | os.PathLike) -> dict[str, Any]:
    """
    Return the paired differences between two evaluations of the same problems.

    The difference of a metric is the mean over problems of trained minus base, with a 95% interval over the problems.
    This interval is much narrower than those of the two evaluations, which mostly reflect how different the problems
    are. If no problem differs, the interval says how much other problems may differ.

    Args:
        base (`str` or `os.PathLike`):
            The `summary.json` of an evaluation, or its folder.
        trained (`str` or `os.PathLike`):
            The `summary.json` of the other evaluation, or its folder.

    Returns:
        `dict[str, Any]` with the keys:
        - `base` and `trained`: the models.
        - `k`: completions per problem.
        - `differing_settings`: the two values of each setting that differs, other than the model.
        - `num_problems`.
        - `metrics`: for each metric `base`, `trained`, `num_differing` (problems), and `difference` with `mean`, `low`
          and `high`.
        - `sources`: `num_problems` and `metrics` of each source.
        - `gained` and `lost`: the problems with a higher and with a lower avg@k, the largest change first, each with
          `id`, `source`, `base`, `trained` and `difference`.

    Raises:
        FileNotFoundError: If there is no summary.
        ValueError: If the problems or `k` differ.

    Example:

    ```python
    >>> compare("outputs/base/aime", "outputs/trained/aime")
    ```
    """
    for path in (base, trained):
        if not os.fspath(path):  # for example a shell variable that is not set
            raise FileNotFoundError(f"The name of an evaluation is empty. {_HOW_TO_NAME}")
    summaries = [_load_summary(Path(path)) for path in (base, trained)]
    settings = [{**summary["settings"], "scorer": summary["scorer"]} for summary in summaries]
    k, trained_k = (setting["k"] for setting in settings)
    if k != trained_k:
        raise ValueError(
            f"`{base}` has {k} completions per problem, but `{trained}` has {trained_k}. Evaluate both with the same "
            "`k`."
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
        hint = _HOW_TO_NAME
        if (path / JOURNAL_FILE).is_file():
            hint = "The evaluation has not ended. Run the same command again to continue it."
        raise FileNotFoundError(f"There is no `{file}`. {hint}") from error
    except (ValueError, RecursionError) as error:
        if file.name == JOURNAL_FILE:
            raise ValueError(
                f"`{file}` has the completions of an evaluation, not its summary. Name its folder, `{file.parent}`."
            ) from error
        raise ValueError(
            f"`{file}` is not JSON: {error}. If it is a damaged summary, run the command of this evaluation again, "
            f"which writes it from the stored completions. Otherwise: {_HOW_TO_NAME}"
        ) from error
    if (
        not has_fields(summary, _SUMMARY)
        or not has_fields(summary["settings"], _SETTINGS)
        or not summary["problems"]
        or not all(has_fields(problem, _PROBLEM) for problem in summary["problems"])
    ):
        raise ValueError(f"`{file}` is not the summary of an evaluation. {_HOW_TO_NAME}")
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

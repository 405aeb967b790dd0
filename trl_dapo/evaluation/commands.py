# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""`trl-dapo eval` and `trl-dapo compare`."""

import argparse
import inspect
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ..settings.arguments import one_line
from ..settings.help import read_fields
from .comparison import compare
from .run import evaluate


_LISTED_PROBLEMS = 10
_MISTAKE, _INTERRUPTED = 2, 130  # exit statuses, as shells have them


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
            settings["type"] = int if name == "limit" else str
        else:
            settings |= {"default": parameter.default, "type": type(parameter.default)}
            settings["help"] += " (default: %(default)s)"
        parser.add_argument(*dict.fromkeys([f"--{name}", f"--{name.replace('_', '-')}"]), **settings)


def run_eval(args: argparse.Namespace) -> int:
    """Runs `trl-dapo eval` and prints its figures; the exit status."""
    settings = {name: value for name, value in vars(args).items() if name in inspect.signature(evaluate).parameters}
    return _reporting("eval", lambda: _print_summary(evaluate(**settings), args.output_dir))


def add_compare_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `trl-dapo compare` to a parser."""
    parser.description = "Paired differences between two evaluations of the same problems, with 95 % intervals."
    parser.add_argument("base", help="summary.json of an evaluation, or the folder that holds it")
    parser.add_argument("trained", help="summary.json or folder of the other evaluation")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run_compare(args: argparse.Namespace) -> int:
    """Runs `trl-dapo compare` and prints what changed; the exit status."""
    show = (lambda change: print(json.dumps(change, indent=1))) if args.json else print_comparison
    return _reporting("compare", lambda: show(compare(args.base, args.trained)))


def _reporting(name: str, command: Callable[[], None]) -> int:
    """Exit status of a command; what the user can mend is one line on stderr."""
    try:
        command()
    except KeyboardInterrupt:
        print(f"trl-dapo {name}: stopped. The same command continues from here.", file=sys.stderr)
        return _INTERRUPTED
    except (ValueError, OSError, ImportError, MemoryError) as error:
        print(f"trl-dapo {name}: {one_line(error)}", file=sys.stderr)
        return _MISTAKE
    return 0


def _print_summary(summary: dict[str, Any], output_dir: str) -> None:
    k = summary["settings"]["k"]
    metrics, bounds = [f"avg@{k}", f"pass@{k}", f"maj@{k}"], ("mean", "low", "high")
    table = _table("source", "problems", *metrics, "length", "cut off")
    sources = summary["sources"]
    for source, figures in [*(sources.items() if len(sources) > 1 else ()), ("all", summary)]:
        if source == "all":
            table.add_section()
        length = "-" if figures["mean_length"] is None else f"{figures['mean_length']:,.0f}"
        # The interval stands under its figure, so that three of each fit beside one another.
        shares = [
            f"{mean:.1%}\n\\[{100 * low:.1f}, {100 * high:.1f}]"
            for mean, low, high in ([figures["metrics"][metric][bound] for bound in bounds] for metric in metrics)
        ]
        table.add_row(escape(source), str(figures["num_problems"]), *shares, length, f"{figures['truncated']:.1%}")
    console = Console()
    title = f"{summary['settings']['model']}: {k} completions a problem, 95 % intervals"
    console.print(escape(title), highlight=False)
    console.print(table)
    if summary["num_unscored_problems"]:
        console.print(
            f"Left out: {summary['num_unscored_problems']} problems whose gold answer the scorer cannot read."
        )
    console.print(f"Summary and completions: {escape(str(output_dir))}", highlight=False, soft_wrap=True)


def print_comparison(change: dict[str, Any], console: Console | None = None, in_brief: bool = False) -> None:
    """Prints what [`compare`] returns; `in_brief` avg@k alone."""
    console = console or Console()
    k = change["k"]
    table = _table("source", "metric", "base", "trained", "difference", "", left=("source", "metric", ""))
    is_equal_somewhere = False
    sources = change["sources"]
    for source, figures in [*(sources.items() if len(sources) > 1 else ()), ("all", change)]:
        if source == "all" or not in_brief:
            table.add_section()
        for metric in [f"avg@{k}"] if in_brief else [f"avg@{k}", f"pass@{k}", f"maj@{k}"]:
            values = figures["metrics"][metric]
            mean, low, high = (100 * values["difference"][bound] for bound in ("mean", "low", "high"))
            is_equal_somewhere |= not values["num_differing"]
            table.add_row(
                escape(source),
                metric,
                f"{values['base']:.1%}",
                f"{values['trained']:.1%}",
                f"{mean:+.1f} \\[{low:+.1f}, {high:+.1f}]",
                "up" if low > 0 else "down" if high < 0 else "unclear" if values["num_differing"] else "all equal",
            )
    if not in_brief:
        console.print(f"base:    {escape(change['base'])}\ntrained: {escape(change['trained'])}", highlight=False)
    for name, (base, trained) in change["differing_settings"].items():
        console.print(f"[yellow]Not the same:[/yellow] {name} is {base!r} for base, {trained!r} for trained.")
    title = f"{change['num_problems']} problems, {k} completions each: difference with 95 % interval"
    console.print(title, highlight=False)
    console.print(table)
    if is_equal_somewhere:
        console.print(
            "all equal: no problem differs. The interval says how much problems that were not evaluated may."
        )
    if change["num_problems"] < 30:
        console.print("Of fewer than 30 problems an interval is a hint: it may leave out what is true.")
    if in_brief:
        return
    for verb in ("gained", "lost"):
        problems = change[verb]
        points = 100 * sum(problem["difference"] for problem in problems) / change["num_problems"]
        console.print(f"{len(problems)} problems {verb}: {points:+.1f} points of avg@{k}.", highlight=False)
        for problem in problems[:_LISTED_PROBLEMS]:
            line = Text(f"  {problem['base']:6.1%} -> {problem['trained']:6.1%}  {problem['id']}")
            # One line of a terminal, cut off at its end; in a file the whole of it.
            is_cut = console.is_terminal
            console.print(line, no_wrap=True, overflow="ellipsis", crop=is_cut, soft_wrap=not is_cut)
        if len(problems) > _LISTED_PROBLEMS:
            console.print(f"  ... and {len(problems) - _LISTED_PROBLEMS} more (--json lists all)", highlight=False)


def _table(*columns: str, left: Sequence[str] = ("source",)) -> Table:
    """A table that fits 80 columns: a long source is broken, a number never."""
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False, show_edge=False)
    for column in columns:
        is_left = column in left
        table.add_column(column, justify="left" if is_left else "right", no_wrap=column != "source", overflow="fold")
    return table

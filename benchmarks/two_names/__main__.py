# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
GRPOTrainer, and DAPOTrainer with two names changed, each at its own best learning rate.

    python -m benchmarks.two_names                 # both parts, hours of one core, in pieces that resume
    python -m benchmarks.two_names --part best     # each arm's best of four rates, then five seeds at it
    python -m benchmarks.two_names --part range    # five seeds at each rate of GRPO and of what two names give
    python -m benchmarks.two_names --from-csv      # tables and predictions from the runs that are kept

Tasks, checkpoint, targets and limits are those of time_to_accuracy.py. The rates are 0.5, 1, 2 and 3 times the one at
which GRPO got furthest there; the best has the fewest tokens to the target with seed 100, which does not count. Writes
runs.csv, a line a run, curves.csv, a line every fourth rollout, and EVIDENCE.md's outcomes.
"""

import argparse
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ..mechanisms.report import RUNS, fill_in, print_outcomes, read_csv, write_csv
from .parts import FACTORS, METHODS, PREDICTIONS, RANGED, SEEDS, SIZES, TRIAL, make_job, run


from runs import run_all  # isort: skip (mechanisms/tasks.py has said where these are)
from time_to_accuracy import TASKS, cost, make_checkpoint, spread  # isort: skip


HERE = Path(__file__).parent
KEY = ("task", "arm", "rate", "seed")
HEADING = "## Two names changed\n"
BEST, RANGE = PARTS = "best", "range"


def describe(job, result):
    return f"{job.name}: {result['accuracy']:.1%} after {result['tokens']:,.0f} tokens, {result['seconds']:.0f} s"


def tokens_to_target(result, task):
    return cost(result, result["curve"][0]["accuracy"] + TASKS[task].gain, "tokens")


def best_factor(results, task, arm):
    """The fewest tokens to the target with the seed that does not count; where none reached it, the most right."""
    tried = {factor: results[task, arm, f"{factor:g}", TRIAL] for factor in FACTORS}
    return min(FACTORS, key=lambda factor: (tokens_to_target(tried[factor], task), -tried[factor]["accuracy"]))


def at_best(results):
    """The runs that count, by task, arm and seed: those at each arm's best rate."""
    tried = {(task, arm) for task, arm, _, seed in results if seed == TRIAL}
    best = {(task, arm): f"{best_factor(results, task, arm):g}" for task, arm in tried}
    return {
        (task, arm, seed): result
        for (task, arm, rate, seed), result in results.items()
        if seed != TRIAL and best[task, arm] == rate
    }


def print_report(results, console):
    """Tokens to the target at each rate, then what became of the predictions."""
    counted = at_best(results)
    for task in TASKS:
        table = Table("arm", *(f"{factor:g} x" for factor in FACTORS), title=f"{task}: tokens to the target")
        for arm in METHODS:
            table.add_row(arm, *(describe_seeds(results, task, arm, f"{factor:g}", counted) for factor in FACTORS))
        console.print(table)
    console.print("* the best rate with seed 100")
    print_outcomes(counted, console, PREDICTIONS)


def describe_seeds(results, task, arm, rate, counted):
    """Median (lowest to highest), of how many seeds; a star at the best rate, `-` for never."""
    runs = [results[task, arm, rate, seed] for seed in SEEDS if (task, arm, rate, seed) in results]
    if not runs:
        return ""
    star = "*" if any(run is counted.get((task, arm, seed)) for seed in SEEDS for run in runs) else ""
    return f"{spread([tokens_to_target(run, task) for run in runs])}{star}, {len(runs)} seeds"


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, action="append", help="may be given again")
    parser.add_argument("--task", choices=TASKS, action="append", help="may be given again")
    parser.add_argument("--from-csv", action="store_true", help="train nothing")
    parser.add_argument("--num-processes", type=int, default=2, help="runs at a time (default: %(default)s)")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/two_names"), help="a file a run")
    args = parser.parse_args(argv)
    console = Console(width=150)
    results = read_csv(HERE, KEY) if (HERE / RUNS).exists() else {}
    if not args.from_csv:
        args.output_dir.mkdir(parents=True, exist_ok=True)
        checkpoint, start = make_checkpoint(args.output_dir, SIZES.num_warm_up_steps)

        def run_those(keys):
            jobs = [make_job(*key, start) for key in keys]
            results.update(run_all(run, jobs, checkpoint, args.output_dir, args.num_processes, console, describe))
            write_csv(results, HERE, KEY)

        tasks, parts = args.task or TASKS, args.part or PARTS
        for task in tasks if BEST in parts else ():
            run_those([(task, arm, factor, TRIAL) for arm in METHODS for factor in FACTORS])
            run_those([(task, arm, best_factor(results, task, arm), seed) for seed in SEEDS for arm in METHODS])
        for task in tasks if RANGE in parts else ():
            run_those([(task, arm, factor, seed) for seed in SEEDS for factor in FACTORS for arm in RANGED])
    print_report(results, console)
    page = HERE.parent / "EVIDENCE.md"
    page.write_text(fill_in(page.read_text(), at_best(results), HEADING, PREDICTIONS))


if __name__ == "__main__":
    main()

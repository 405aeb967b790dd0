# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
Countdown with a model of five million parameters: time to accuracy and the ladder once more, where answers are long.

    python -m benchmarks.larger --part costs      # what sampling and training cost here, by batch and threads
    python -m benchmarks.larger --part warm-up    # the checkpoint that all runs start from
    python -m benchmarks.larger --part rates      # GRPO at three learning rates, with a seed that does not count
    python -m benchmarks.larger --part time       # GRPO, full batch again, ours, ours with carry and memory
    python -m benchmarks.larger --part ladder     # the ladder of recipes/ablation
    python -m benchmarks.larger --from-csv        # tables, predictions and picture from the runs that are kept

The task is described in task.py; parts.py has the runs, and the predictions as they were written before the first run
that counts. A run is probed and saved every 4 rollouts and leaves a file when it ends, so a call that was interrupted
goes on where it stopped, whole seeds first, as long as neither this folder nor trl_dapo has changed: keep a checkout
for it. Writes runs.csv, a line a run, curves.csv, a line a probe, the picture, and the outcomes into EVIDENCE.md's
table.
"""

import argparse
from pathlib import Path

from rich.console import Console

from ..mechanisms.report import CURVES, RUNS, fill_in, read_csv, write_csv
from .costs import print_costs
from .parts import PREDICTIONS, control_jobs, ladder_jobs, rate_jobs, time_jobs
from .report import HEADING, KEY, WARM_UP, of_whole_seeds, print_report
from .training import WARM_UP_SEED, make_checkpoint, run


from runs import quiet, refuse_below_one, run_all  # isort: skip (mechanisms/tasks.py has said where it is)

HERE = Path(__file__).parent
PARTS = ("costs", "warm-up", "rates", "time", "ladder")
BY_DEFAULT = ("time", "ladder")


def describe(job, result):
    return (
        f"{job.part}, {job.arm}, seed {job.seed}: {result['accuracy']:.1%} right after "
        f"{result['curve'][-1]['rollouts']} rollouts, {result['tokens']:,.0f} tokens and {result['cpu_seconds']:.0f} s"
    )


def train(part, args, console):
    """Runs what no earlier call has finished; results by part, arm and seed."""
    checkpoint, start = make_checkpoint(args.output_dir, args.num_warm_up_steps, console)
    how = checkpoint, args.output_dir, args.num_processes, console, describe
    seeds, results = range(args.num_seeds), {(WARM_UP, checkpoint.name, WARM_UP_SEED): start}
    if part == "rates":
        run_all(run, rate_jobs(), *how)
    if part == "time":
        results |= run_all(run, time_jobs(seeds, start["curve"][0]["accuracy"]), *how)
    if part == "ladder":
        results |= run_all(run, ladder_jobs(seeds), *how)
        results |= run_all(run, control_jobs(seeds, results), *how)
    return results


def keep(results, folder):
    """Writes the runs, beside those of other parts that are kept and came from the same checkpoint."""
    kept = read_csv(folder, KEY) if (folder / RUNS).exists() else {}
    parts = {part for part, *_ in results}
    if any(key in kept for key in results if key[0] == WARM_UP):
        results = {key: run for key, run in kept.items() if key[0] not in parts} | results
    write_csv(results, folder, KEY)


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, action="append", help="may be given again (default: time, ladder)")
    parser.add_argument("--from-csv", action="store_true", help="train nothing")
    parser.add_argument("--num-seeds", type=int, default=3, help="seeds 0, 1, ... (default: %(default)s)")
    parser.add_argument(
        "--num-warm-up-steps",
        type=int,
        default=1000,
        help="with the patient teacher; an eighth as many follow (default: %(default)s)",
    )
    parser.add_argument("--num-processes", type=int, default=2, help="runs at a time (default: %(default)s)")
    parser.add_argument(
        "--output-dir", type=Path, default=Path("outputs/larger"), help="a file a run (default: %(default)s)"
    )
    args = parser.parse_args(argv)
    refuse_below_one(parser, args, "num_seeds", "num_warm_up_steps", "num_processes")
    if args.from_csv and args.part:
        parser.error("--from-csv trains nothing: leave --part out")
    if args.from_csv and not (HERE / RUNS).exists():
        parser.error(f"--from-csv needs {RUNS} and {CURVES}, which no run has written yet")
    return args


def main(argv=None):
    args = parse_args(argv)
    console = Console(width=140)
    if not args.from_csv:
        args.output_dir.mkdir(parents=True, exist_ok=True)
        quiet()
        for part in args.part or BY_DEFAULT:
            if part == "costs":
                print_costs(console)
            else:
                keep(train(part, args, console), HERE)
    if (HERE / RUNS).exists():
        results, page = read_csv(HERE, KEY), HERE.parent / "EVIDENCE.md"
        print_report(results, console, HERE.parent / "images" / "larger.png")
        page.write_text(fill_in(page.read_text(), of_whole_seeds(results), HEADING, PREDICTIONS))


if __name__ == "__main__":
    main()

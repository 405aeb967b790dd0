# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
Accuracy of GRPOTrainer and DAPOTrainer after the same number of optimizer steps and after the same CPU time.

    python -m benchmarks same_budget                # all runs, half an hour on one core; an interrupted call resumes
    python -m benchmarks same_budget --from-kept    # the table and the predictions from the kept runs

The arms and tasks are those of two_names/, each at the learning rate that was best there with seed 100. A run of
two_names/ ends at its target. A run of this study continues until both the steps and the seconds of `BUDGETS` are
spent, which were chosen before the runs. With two rewards the runs of two_names/ continue as long, and are read from
there. Seconds are CPU seconds of one thread, without the time for measuring the accuracy.

In two of the tasks a rollout of 16 prompts is trained on in four optimizer steps, so every arm has trained on the same
number of rollouts after the same number of steps. `GRPOTrainer` with one step per rollout consumes four times as many
completions per step, so it is compared by time alone. The task with two rewards has one step per rollout.

Writes runs.csv, curves.csv with a line per fourth rollout, and the outcomes in EVIDENCE.md. Runs in runs.csv are not
run again.
"""

import math
import statistics
from pathlib import Path
from typing import NamedTuple

from ..frame.kept import Study
from ..frame.measures import describe_shares, read_at
from ..frame.predictions import Prediction, Quantity
from ..frame.runs import run_all
from ..frame.tables import print_table
from ..two_names import study as two_names
from ..two_names.study import ALONE, DEFAULT, FEWER, FOUR, NAMED, ONE, PAPER, SEEDS


OUTPUT = Path("outputs/same_budget")


class Budget(NamedTuple):
    steps: int  # of the optimizer
    seconds: float  # of the CPU


# On the quickstart GRPO's kept runs reached their target after some 200 steps and 15 seconds, on one in ten after 800
# steps and 50 seconds or not at all. With two rewards a sketch (seed 99) took 24 seconds for 80 steps of GRPO.
BUDGETS = {
    "quickstart": Budget(steps=300, seconds=20.0),
    "one in ten": Budget(steps=300, seconds=40.0),
    "two rewards": Budget(steps=80, seconds=20.0),
}
TWO_REWARDS = "two rewards"
AT_SAME_RATE = "GRPO, the former default's rate"  # not its own best
ARMS = {
    "quickstart": (FOUR, AT_SAME_RATE, ONE, PAPER, DEFAULT),
    "one in ten": (FOUR, AT_SAME_RATE, ONE, PAPER, DEFAULT),
    "two rewards": (FOUR, AT_SAME_RATE, ALONE, PAPER, DEFAULT, NAMED, FEWER),
}
RUN_HERE = tuple(task for task in BUDGETS if task != TWO_REWARDS)
STEPS, SECONDS, TOKENS = "steps", "seconds", "tokens"


def rollouts_in_budget(task):
    return BUDGETS[task].steps // two_names.TASKS[task].num_steps


def accuracy_after(task, what):
    """Return a measure: the accuracy of each run when the task's steps or seconds are spent."""
    if what == SECONDS:
        column, spent = "seconds", BUDGETS[task].seconds
    else:
        column, spent = "rollouts", rollouts_in_budget(task)
    return lambda *runs: [read_at(run["curve"], column, spent, "accuracy") for run in runs]


def quantity(task, what):
    if what == TOKENS:
        return two_names.AT_EQUAL
    amount = {STEPS: f"{BUDGETS[task].steps} steps", SECONDS: f"{BUDGETS[task].seconds:g} CPU seconds"}[what]
    return Quantity(f"accuracy after {amount}", accuracy_after(task, what), "%")


PREDICTIONS = (
    *(
        Prediction(task, arm, other, quantity(task, what), 1, "this package's own")
        for task in RUN_HERE
        for arm, other, what in (
            (DEFAULT, FOUR, STEPS),
            (DEFAULT, AT_SAME_RATE, STEPS),
            (PAPER, FOUR, STEPS),
            (DEFAULT, FOUR, SECONDS),
            (DEFAULT, ONE, SECONDS),
            (DEFAULT, PAPER, SECONDS),
        )
    ),
    *(
        Prediction("two rewards", arm, other, quantity("two rewards", what), 1, "this package's own")
        for arm, other, what in (
            (DEFAULT, FOUR, STEPS),
            (DEFAULT, AT_SAME_RATE, STEPS),
            (NAMED, FOUR, STEPS),
            (PAPER, FOUR, STEPS),
            (NAMED, DEFAULT, STEPS),
            (FOUR, ALONE, STEPS),
            (DEFAULT, FOUR, SECONDS),
            (NAMED, FOUR, SECONDS),
            (DEFAULT, FOUR, TOKENS),
            (NAMED, FOUR, TOKENS),
        )
    ),
)


def run(job, checkpoint, folder):
    return two_names.run(job._replace(arm=arm_of(job.arm)), checkpoint, folder)


def arm_of(name):
    return FOUR if name == AT_SAME_RATE else name


def make_job(kept, task, arm, seed, start):
    """Return the job of two_names/ without its target, and with the budget as its limits."""
    factor = two_names.best_factor(kept, task, DEFAULT if arm == AT_SAME_RATE else arm)
    job = two_names.make_job(kept, task, arm_of(arm), factor, seed, start)._replace(arm=arm)
    least = 0 if arm == ONE else rollouts_in_budget(task)
    limits = {"max_seconds": BUDGETS[task].seconds, "min_rollouts": least, "probe_every": 4}
    return job._replace(target=math.inf, max_tokens=math.inf, **limits)


def counted(results):
    """Return the runs by task, arm and seed, with those of two_names/ that continued for long enough."""
    kept = two_names.STUDY.read()
    found = {key: run for key, run in two_names.at_best(kept).items() if key[0] == TWO_REWARDS}
    for task in ("one in ten", TWO_REWARDS):
        same = f"{two_names.best_factor(kept, task, DEFAULT):g}"
        found |= {
            (task, AT_SAME_RATE, seed): run
            for (of, arm, rate, seed), run in kept.items()
            if (of, arm) == (task, FOUR) and rate == same and seed != two_names.TRIAL
        }
    return found | {(task, arm, seed): run for (task, arm, _, seed), run in results.items()}


STUDY = Study(
    Path(__file__).parent,
    ("task", "arm", "rate", "seed"),
    "## The same number of steps, and the same time\n",
    PREDICTIONS,
    counted=counted,
)
fill_in = STUDY.fill_in


def rows_of(results, task):
    """Return a row per arm: its accuracy after the steps and after the seconds, and the tokens of the steps."""
    rows, by_arm = [], counted(results)
    for arm in ARMS[task]:
        runs = [run for (of, name, _), run in by_arm.items() if (of, name) == (task, arm)]
        after_steps, after_seconds = (
            describe_shares([accuracy_after(task, what)(run)[0] for run in runs], len(SEEDS))
            for what in (STEPS, SECONDS)
        )
        spent = [read_at(run["curve"], "rollouts", rollouts_in_budget(task), "tokens") for run in runs]
        tokens = f"{statistics.median(spent):,.0f}" if spent else ""
        if arm == ONE:
            after_steps = tokens = ""
        # The runs of two_names/ on one in ten are from another day, on which the machine was faster or slower.
        if (task, arm) == ("one in ten", AT_SAME_RATE):
            after_seconds = ""
        rows.append([arm, after_steps, tokens, after_seconds])
    return rows


def columns_of(task):
    budget = BUDGETS[task]
    return "arm", f"after {budget.steps} steps", "tokens of these steps", f"after {budget.seconds:g} CPU seconds"


def main(task=RUN_HERE, arm=ARMS["quickstart"], from_kept=False, num_processes=1, output_dir=OUTPUT):
    results, kept = STUDY.read(), two_names.STUDY.read()
    for name in () if from_kept else task:
        checkpoint, start = two_names.TASKS[name].make_checkpoint(output_dir)
        for seed in SEEDS:
            arms = [each for each in ARMS[name] if each in arm and (name, each) != ("one in ten", AT_SAME_RATE)]
            jobs = [make_job(kept, name, each, seed, start) for each in arms]
            jobs = [job for job in jobs if job.key not in results]
            results.update(run_all(run, jobs, checkpoint, output_dir, num_processes, runs_per_process=10))
            STUDY.write(results)
    for name in BUDGETS:
        print_table(f"{name}: accuracy on held-out problems, median (range)", columns_of(name), rows_of(results, name))
    STUDY.report()

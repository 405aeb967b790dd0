# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
GRPOTrainer compared with DAPOTrainer, each arm at its own best learning rate: tokens to a target.

    python -m benchmarks two_names                 # both parts, hours on one core; an interrupted call resumes
    python -m benchmarks two_names --part best     # each arm's best of four learning rates, then five seeds at it
    python -m benchmarks two_names --part range    # five seeds at each learning rate, of GRPO and of GRPO's budget
    python -m benchmarks two_names --from-kept     # tables and predictions from the kept runs

The tasks are those of time_to_accuracy.py, that of larger/, one with two reward functions (two_rewards.py), and two of
real_model/, which take a GPU or days and a model made by `trl-dapo fetch smollm2 --output_dir
outputs/two_names/smollm2`. Learning rates are 0.5, 1, 2 and 3 times the one that suits GRPO, with two rewards 0.5 and
1 times. The best is the one that needed the fewest tokens to the target with seed 100, which does not count otherwise.
With this seed, a run stops at the number of tokens with which an earlier learning rate reached the target.

Writes runs.csv with a line per run, curves.csv with a line per fourth rollout, and the outcomes in EVIDENCE.md. Runs
in runs.csv are not run again. A new arm is a line of `ARMS` and one of `PREDICTIONS`, which has a row in EVIDENCE.md
for each task, in this order; `--arm` runs it alone. A new task is a line of `TASKS` (of time_to_accuracy.py too, if it
is one of `small`), with a row for each prediction. same_budget/ compares the same arms after the same number of steps
and the same time.
"""

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from .. import time_to_accuracy
from ..frame.kept import Study
from ..frame.measures import at_equal, cost, spent_to, spread
from ..frame.predictions import Prediction, Quantity
from ..frame.runs import Job, run_all
from ..frame.tables import print_table, say
from ..frame.trainers import DAPO, GRPO, Arm, load, rollouts_of
from ..larger import training as larger
from ..real_model import training as real_model
from ..time_to_accuracy import NUM_GENERATIONS, NUM_PROMPTS, NUM_STEPS
from . import two_rewards


BEST, RANGE = PARTS = "best", "range"
FACTORS = (1.0, 0.5, 2.0, 3.0)  # of the rate that suits GRPO, in the order in which they are tried
TRIAL, SEEDS, OUTPUT = 100, range(10, 15), Path("outputs/two_names")  # seeds that are not used otherwise


class Task(NamedTuple):
    """A task: where its runs start, how a run trains, its target, learning rate, sizes and limits."""

    make_checkpoint: Callable  # takes a folder; returns the checkpoint and its accuracy
    train: Callable  # takes a job, the checkpoint, a folder and the arm; returns "curve" and "acceptance"
    gain: float  # the target, above the checkpoint's accuracy
    max_length: int  # of a completion
    rate: float  # the one that suits GRPO
    fewer_prompts: int  # of a rollout: as many as are informative in one of GRPO's
    limits: dict
    num_steps: int = NUM_STEPS  # of the optimizer per rollout
    factors: tuple = FACTORS  # of the rate, in the order in which they are tried
    at_least: dict = {}  # noqa: RUF012 (minimum that a run that counts spends)


def small(name, fewer_prompts):
    """Return a task of time_to_accuracy.py."""
    study, task = time_to_accuracy, time_to_accuracy.TASKS[name]
    sizes = study.MAX_LENGTH, task.learning_rate, fewer_prompts, {"max_seconds": study.MAX_SECONDS}
    return Task(study.make_checkpoint, study.train, task.gain, *sizes)


def countdown(folder):
    """Return the checkpoint of larger/, and its accuracy on the problems of the probes."""
    path, start = larger.make_checkpoint(folder, num_steps=1000)
    return path, start["curve"][0]["accuracy"]


def language_model(name, fewer_prompts):
    """Return a task with the problems of real_model/, and one reward."""

    def make_checkpoint(folder):
        path = folder / "smollm2"
        if not path.is_dir():
            raise SystemExit(
                f"{path} is not a folder, but runs need a model: run `trl-dapo fetch smollm2 --output_dir {path}`"
            )
        *_, probe_model = real_model.prepare(name, path, folder)
        return path, probe_model(load(path).to(real_model.DEVICE))["accuracy"]

    limits = {"max_tokens": 50_000}
    return Task(make_checkpoint, real_model.train, 0.25, real_model.MAX_LENGTH, 4e-4, fewer_prompts, limits)


TASKS = {
    "quickstart": small("quickstart", fewer_prompts=12),  # three in four groups are informative
    "one in ten": small("one in ten", fewer_prompts=2),  # one in eight
    "Countdown": Task(
        countdown,
        larger.train,
        gain=0.10,
        max_length=larger.MAX_LENGTH,
        rate=larger.LEARNING_RATE,
        fewer_prompts=10,  # six in ten groups are informative
        limits={"max_tokens": 250_000, "probe_every": 2},
    ),
    "products": language_model("products", fewer_prompts=8),
    "sums": language_model("sums", fewer_prompts=4),
    "two rewards": Task(
        two_rewards.make_checkpoint,
        two_rewards.train,
        gain=0.05,
        max_length=time_to_accuracy.MAX_LENGTH,
        rate=1e-4,
        fewer_prompts=9,  # by both rewards five in nine groups are informative
        limits={"max_seconds": time_to_accuracy.MAX_SECONDS},
        num_steps=1,
        factors=(1.0, 0.5),
        at_least={"min_rollouts": 80, "min_seconds": 20.0},  # for same_budget/
    ),
}

ONE, FOUR, PAPER, DEFAULT, FEWER = "GRPO, one step", "GRPO", "paper", "former default", "former default, fewer prompts"
ONE_ROUND, ONE_BATCH, AGAIN = "one round", "GRPO's budget", "full batch again"
NAMED, ALONE = "former default, correctness named", "GRPO, correctness alone"
# The defaults of a while, and on two rewards those of today: there neither is supported without a name.
BOTH_ON = {"dynamic_sampling_memory": True, "dynamic_sampling_screen": "on"}
ARMS = {
    ONE: Arm(GRPO, {}, num_steps=1),
    FOUR: Arm(GRPO, {}),
    DEFAULT: Arm(DAPO, BOTH_ON),
    PAPER: Arm(DAPO, {"dynamic_sampling_mode": "paper"}),
    FEWER: Arm(DAPO, BOTH_ON),  # with the task's `fewer_prompts`
    ONE_BATCH: Arm(DAPO, {"dynamic_sampling_max_gen_batches": 1.0, **BOTH_ON}),  # no step costs more than GRPO's
    AGAIN: Arm(DAPO, {"dynamic_sampling_mode": "paper", "batch_multiplier": 1.0}),  # as other frameworks resample
}
# Only for the task with two reward functions.
ARMS_OF_TWO_REWARDS = {
    NAMED: Arm(DAPO, {"dynamic_sampling_rewards": ["correct"], **BOTH_ON}),
    ALONE: Arm(GRPO, {"reward_weights": [1.0, 0.0]}),
}
ARMS |= ARMS_OF_TWO_REWARDS
# Arms that were run with a setting that no longer exists, and what they did.
FORMER = {ONE_ROUND: "one round of prompts, none of which was screened; trained on the groups it brought"}


def arms_of(task):
    """Return the arms that a task runs; with two rewards GRPO's rollouts have one step anyway."""
    if task == "two rewards":
        return (FOUR, DEFAULT, PAPER, FEWER, *ARMS_OF_TWO_REWARDS)
    return tuple(arm for arm in ARMS if arm not in ARMS_OF_TWO_REWARDS)


POINT = "rollouts", "tokens", "seconds", "accuracy"  # the columns of a curve that are kept

TOKENS = {task: Quantity("tokens to the target", spent_to(TASKS[task].gain, "tokens")) for task in TASKS}
AT_EQUAL = Quantity("accuracy at equal tokens", at_equal("tokens", "accuracy"), "%")
PREDICTIONS = tuple(
    Prediction(task, mine, other, quantity, direction, "this package's own")
    for task in TASKS
    if task != "two rewards"
    for mine, other, quantity, direction in (
        *((DEFAULT, other, TOKENS[task], -1) for other in (FOUR, ONE, PAPER)),
        (FEWER, DEFAULT, TOKENS[task], -1),
        (DEFAULT, FOUR, AT_EQUAL, 1),
        *((arm, other, TOKENS[task], -1) for arm in (ONE_ROUND, ONE_BATCH) for other in (FOUR, ONE)),
        (ONE_BATCH, FOUR, AT_EQUAL, 1),
        (ONE_BATCH, AGAIN, TOKENS[task], -1),
    )
) + tuple(
    Prediction("two rewards", mine, other, TOKENS["two rewards"], -1, "this package's own")
    for mine, other in (
        (DEFAULT, FOUR),
        (DEFAULT, PAPER),
        (NAMED, FOUR),
        (NAMED, DEFAULT),
        (FEWER, FOUR),
        (FOUR, ALONE),
    )
)


# ---- Runs ----


def make_job(results, name, arm, factor, seed, start):
    task = TASKS[name]
    num_prompts = task.fewer_prompts if arm == FEWER else NUM_PROMPTS
    sizes = num_prompts, NUM_GENERATIONS, ARMS[arm].num_steps or task.num_steps
    settings = rollouts_of(*sizes, max_completion_length=task.max_length, learning_rate=factor * task.rate)
    earlier = task.factors[: task.factors.index(factor)] if seed == TRIAL else ()
    tokens = (tokens_to_target(results[name, arm, f"{rate:g}", TRIAL], name) for rate in earlier)
    limits = task.limits | {"max_tokens": min(task.limits.get("max_tokens", math.inf), *tokens, math.inf)}
    limits |= {} if seed == TRIAL else task.at_least
    return Job(name, arm, seed, settings, rate=factor, target=start + task.gain, **limits)


def run(job, checkpoint, folder):
    """Train to the target or the limit; keep every fourth rollout of the curve, the first at the target, the last."""
    arm = ARMS[job.arm]
    if job.task == "two rewards" and job.arm in (DEFAULT, FEWER):  # nothing says which completions are correct
        arm = arm._replace(settings={})
    found = TASKS[job.task].train(job, checkpoint, folder, arm)
    curve = [{name: point[name] for name in POINT} for point in found["curve"]]
    at_target = next((point for point in curve if point["accuracy"] >= job.target), None)
    last = curve[-1]
    figures = {"accuracy": last["accuracy"], "tokens": float(last["tokens"]), "seconds": last["seconds"]}
    curve = [point for point in curve if point["rollouts"] % 4 == 0 or point is at_target or point is last]
    return figures | {"acceptance": found["acceptance"], "curve": curve}


def tokens_to_target(result, task):
    return cost(result, result["curve"][0]["accuracy"] + TASKS[task].gain, "tokens")


def best_factor(results, task, arm):
    """
    Return the factor with the fewest tokens to the target with the seed that does not count; if none reached it, the
    one with the highest accuracy.
    """
    factors = TASKS[task].factors
    tried = {factor: results[task, arm, f"{factor:g}", TRIAL] for factor in factors}
    return min(factors, key=lambda factor: (tokens_to_target(tried[factor], task), -tried[factor]["accuracy"]))


def at_best(results):
    """
    Return the runs that count by task, arm and seed: those at each arm's best learning rate, if all rates of the task
    were tried.
    """
    tried = Counter((task, arm) for task, arm, _, seed in results if seed == TRIAL)
    best = {key: f"{best_factor(results, *key):g}" for key, num in tried.items() if num == len(TASKS[key[0]].factors)}
    return {
        (task, arm, seed): result
        for (task, arm, rate, seed), result in results.items()
        if seed != TRIAL and best.get((task, arm)) == rate
    }


STUDY = Study(
    Path(__file__).parent, ("task", "arm", "rate", "seed"), "## Two names changed\n", PREDICTIONS, counted=at_best
)
fill_in = STUDY.fill_in


def tokens_by_rate(results, counted, task, arm):
    """
    Return the tokens to the target at each learning rate, the lowest first, as text: median (lowest to highest), with
    a star at the rate that counts.
    """
    cells = []
    for rate in (f"{factor:g}" for factor in sorted(FACTORS)):
        runs = {seed: results[task, arm, rate, seed] for seed in SEEDS if (task, arm, rate, seed) in results}
        star = "*" if any(run is counted.get((task, arm, seed)) for seed, run in runs.items()) else ""
        few = f" of {len(runs)}" if len(runs) < len(SEEDS) else ""
        cells.append(f"{spread([tokens_to_target(run, task) for run in runs.values()])}{star}{few}" if runs else "")
    return cells


def print_tokens(results, task):
    counted = at_best(results)
    rows = [[arm, *tokens_by_rate(results, counted, task, arm)] for arm in (*ARMS, *FORMER)]
    print_table(f"{task}: tokens to the target", ("arm", *(f"{rate:g} x" for rate in sorted(FACTORS))), rows, left=5)


def main(part=PARTS, task=tuple(TASKS), arm=tuple(ARMS), from_kept=False, num_processes=2, output_dir=OUTPUT):
    results = STUDY.read()
    for name in () if from_kept else task:
        checkpoint, start = TASKS[name].make_checkpoint(output_dir)
        arms = [each for each in arms_of(name) if each in arm]

        def run_those(*keys, name=name, checkpoint=checkpoint, start=start):
            jobs = [make_job(results, name, *key, start) for key in keys]
            jobs = [job for job in jobs if job.key not in results]
            results.update(run_all(run, jobs, checkpoint, output_dir, num_processes, runs_per_process=10))
            STUDY.write(results)

        if BEST in part:
            for factor in TASKS[name].factors:
                run_those(*((each, factor, TRIAL) for each in arms))
            run_those(*((each, best_factor(results, name, each), seed) for seed in SEEDS for each in arms))
        if RANGE in part:
            compared = [each for each in (FOUR, ONE_BATCH) if each in arms]
            run_those(*((each, factor, seed) for seed in SEEDS for factor in TASKS[name].factors for each in compared))
    for name in TASKS:
        print_tokens(results, name)
    say("medians of five seeds; * marks the best learning rate with seed 100; - means never")
    STUDY.report()

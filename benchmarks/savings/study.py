# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
Cost and savings of carried surplus, the screen and the pass-rate memory, after the same steps, tokens and CPU time.

    python -m benchmarks savings                          # all runs, hours on one core; an interrupted call resumes
    python -m benchmarks savings --task "hard tail"       # one task; `--arm` runs one arm
    python -m benchmarks savings --from-kept              # the tables and the predictions from the kept runs

Every arm except `GRPOTrainer` fills its batches. The tasks are described in tasks.py. A run continues until the steps,
the tokens and the CPU seconds of the task's budget are all spent. Its accuracy is compared after each of them, on all
held-out problems and on the hardest quarter. Seconds are CPU seconds of one thread, without the time for measuring the
accuracy. Budgets were chosen before the runs.

Each arm runs with five seeds, at the best of three learning rates: 1, 0.5 and 2 times the one that suits GRPO, on
Countdown only 1 times. The best is the one with the highest accuracy after the task's steps with seed 100, which does
not count otherwise.

Writes runs.csv and curves.csv, with a line every few rollouts, after every seed, and the outcomes in EVIDENCE.md at
the end. Runs in runs.csv are not run again. A new arm is a line of `ARMS` and its lines of `PREDICTIONS`, which have a
row each in EVIDENCE.md.
"""

import math
import statistics
from pathlib import Path

from ..frame import trainers
from ..frame.kept import Study
from ..frame.measures import describe_shares, mean_of, read_at
from ..frame.pictures import draw_panels
from ..frame.predictions import Prediction, Quantity
from ..frame.runs import Job, run_all
from ..frame.tables import print_table, say
from ..frame.trainers import Arm, load, rollouts_of
from ..time_to_accuracy import NUM_GENERATIONS, NUM_PROMPTS
from .tasks import TASKS
from .trainers import CountedDAPO, CountedGRPO, CountedScreenWeighted, Counts


TRIAL, SEEDS, OUTPUT = 100, range(10, 15), Path("outputs/savings")

GRPO, PAPER, CARRY, SCREEN, BOTH = "GRPO", "paper", "carry", "carry, screen", "carry, screen, memory"
AUTO = "carry, auto"
SCREEN_WEIGHTED, BOTH_WEIGHTED = f"{SCREEN}, weighted", f"{BOTH}, screen weighted"
SCREEN_AT_EQUAL_RATE = f"{SCREEN}, the weighted arm's rate"  # not its own best; only on the quickstart


def savings(memory, screen):
    return {
        "dynamic_sampling_surplus": "carry",
        "dynamic_sampling_memory": memory,
        "dynamic_sampling_screen": screen,
    }


ARMS = {
    GRPO: Arm(CountedGRPO, {}),
    PAPER: Arm(CountedDAPO, {"dynamic_sampling_mode": "paper"}),
    CARRY: Arm(CountedDAPO, savings(memory=False, screen="off")),
    SCREEN: Arm(CountedDAPO, savings(memory=False, screen="on")),
    BOTH: Arm(CountedDAPO, savings(memory=True, screen="on")),
    AUTO: Arm(CountedDAPO, savings(memory="auto", screen="auto")),
    SCREEN_WEIGHTED: Arm(CountedScreenWeighted, savings(memory=False, screen="on")),
    BOTH_WEIGHTED: Arm(CountedScreenWeighted, savings(memory=True, screen="on")),
    SCREEN_AT_EQUAL_RATE: Arm(CountedDAPO, savings(memory=False, screen="on")),
}
COLUMNS = tuple(arm for arm in ARMS if arm != SCREEN_AT_EQUAL_RATE)  # of the tables


# ---- The picture ----


PICTURE = Path(__file__).parents[1] / "images" / "grpo_and_dapo.png"
DRAWN = {GRPO: "GRPOTrainer", PAPER: "DAPOTrainer, as in the paper", AUTO: "DAPOTrainer"}
PANELS = ("hard tail", "one in ten", "quickstart")


def draw(results):
    """
    Draw README's picture: accuracy by optimizer steps, means of the seeds and their range. The further
    steps of runs that continued until they had spent the tokens and the seconds, too, are not drawn.
    """
    curves = {}
    for (task, arm, seed), result in counted_runs(results).items():
        if arm in DRAWN:
            curves[task, DRAWN[arm], seed] = {
                "curve": [
                    {"optimizer steps": point["rollouts"] * TASKS[task].num_steps, "accuracy": 100 * point["accuracy"]}
                    for point in result["curve"]
                    if point["rollouts"] <= TASKS[task].num_rollouts
                ]
            }
    panels = [(task, "accuracy", "optimizer steps", f"accuracy, %: {task}") for task in PANELS]
    draw_panels(curves, panels, dict.fromkeys(PANELS, tuple(DRAWN.values())), 3, (12, 3.6), PICTURE)


# ---- Measures ----


STEPS, TOKENS, SECONDS = SPENT = "steps", "tokens", "seconds"


def place(task, what):
    """Return the column of the curve and its value at which the task's steps, tokens or seconds are spent."""
    of = TASKS[task]
    return {
        STEPS: ("rollouts", of.num_rollouts),
        TOKENS: ("tokens", of.budget.tokens),
        SECONDS: ("seconds", of.budget.seconds),
    }[what]


def after(task, what, name):
    """Return a measure: a figure of each run's curve when the task's steps, tokens or seconds are spent."""
    return lambda *runs: [read_at(run["curve"], *place(task, what), name) for run in runs]


def hard_share(task):
    """Return a measure: the share of hard groups in the gradient of the task's steps."""
    trained, hard = after(task, STEPS, "trained"), after(task, STEPS, "hard")
    return lambda *runs: [part / max(total, 1.0) for part, total in zip(hard(*runs), trained(*runs), strict=True)]


def describe_budget(task, what):
    budget = TASKS[task].budget
    return {
        STEPS: f"{budget.steps} steps",
        TOKENS: f"{budget.tokens:,} tokens",
        SECONDS: f"{budget.seconds:g} CPU seconds",
    }[what]


def accuracy(task, what):
    return Quantity(f"accuracy after {describe_budget(task, what)}", after(task, what, "accuracy"), "%")


def hardest(task):
    title = f"accuracy on the hardest quarter after {describe_budget(task, STEPS)}"
    return Quantity(title, after(task, STEPS, "hardest"), "%")


def fraction_of_tokens(task, fraction):
    """Return a quantity: the tokens of the task's steps, compared with a fraction of those of the other arm."""
    tokens = after(task, STEPS, "tokens")

    def measure(mine, other):
        return [tokens(mine)[0], fraction * tokens(other)[0]]

    return Quantity(f"tokens of {describe_budget(task, STEPS)}, compared with {fraction} times the other's", measure)


SCREENED = Quantity("share of prompts that are screened", lambda run: [run["screened"]], "%")


# ---- Predictions ----


HIGHER, LOWER = 1, -1
NOT_LOWER, NOT_HIGHER = (HIGHER, True), (LOWER, True)  # refuted if the interval excludes it, and not refuted otherwise


def predict(task, arm, against, quantity, direction):
    direction, or_equal = direction if isinstance(direction, tuple) else (direction, False)
    return Prediction(task, arm, against, quantity, direction, "this package's own", or_equal=or_equal)


def predictions_of(task):
    """Return what is predicted of a task, in the order of its rows in EVIDENCE.md."""
    hard_tail, one_in_ten = task == "hard tail", task == "one in ten"
    steps, tokens, seconds = (accuracy(task, what) for what in SPENT)
    share = Quantity("share of hard groups in the gradient", hard_share(task), "%")
    predicted = [
        (CARRY, GRPO, steps, HIGHER),
        (CARRY, PAPER, steps, NOT_LOWER),
        (CARRY, PAPER, tokens, HIGHER),
        (SCREEN, CARRY, steps, LOWER if hard_tail else NOT_HIGHER),
        (BOTH, CARRY, steps, LOWER if hard_tail else NOT_HIGHER),
        (BOTH, CARRY, hardest(task), LOWER if hard_tail else NOT_HIGHER),
        (BOTH, CARRY, tokens, HIGHER if one_in_ten else NOT_HIGHER),
        (BOTH, CARRY, seconds, HIGHER if one_in_ten else NOT_HIGHER),
        (SCREEN, CARRY, share, LOWER),
        (BOTH, CARRY, share, LOWER),
        (AUTO, CARRY, steps, NOT_LOWER),
        *(
            (weighted, plain, quantity, NOT_HIGHER)
            for weighted, plain in ((SCREEN_WEIGHTED, SCREEN), (BOTH_WEIGHTED, BOTH))
            for quantity in (steps, tokens)
        ),
    ]
    if one_in_ten:
        predicted.append((AUTO, CARRY, fraction_of_tokens(task, 0.4), LOWER))
    if task == "quickstart":
        predicted += [(SCREEN_WEIGHTED, SCREEN_AT_EQUAL_RATE, quantity, NOT_HIGHER) for quantity in (steps, tokens)]
    if task in ("quickstart", "two rewards"):
        predicted.append((AUTO, 0.01, SCREENED, LOWER))  # stands for never: less than one prompt in a hundred
    return [predict(task, *each) for each in predicted]


PREDICTIONS = tuple(each for task in TASKS for each in predictions_of(task))


# ---- Runs ----


def make_job(task, arm, factor, seed):
    """
    Return a job that continues until the budget is spent. With the seed of the trial it only takes the task's steps.
    """
    of = TASKS[task]
    sizes = NUM_PROMPTS, NUM_GENERATIONS, of.num_steps
    settings = rollouts_of(*sizes, max_completion_length=of.max_length, learning_rate=factor * of.rate)
    if seed == TRIAL:
        limits = {"num_rollouts": of.num_rollouts}
    else:
        limits = {
            "min_rollouts": of.num_rollouts,
            "min_tokens": float(of.budget.tokens),
            "max_seconds": of.budget.seconds,
        }
    return Job(task, arm, seed, settings | of.settings, rate=factor, probe_every=of.probe_every, **limits)


def run(job, checkpoint, folder):
    """Train until the budget is spent; return the curve and the figures of the whole run."""
    task, arm, model = TASKS[job.task], ARMS[job.arm], load(checkpoint)
    if job.arm != GRPO:
        arm = arm._replace(settings=arm.settings | task.dapo)
    tokenizer, dataset = task.make_tokenizer(), task.prompts(job.seed)
    counts = Counts(task.find_hard(model, tokenizer, dataset))
    probe_model = task.make_probe(model, tokenizer)
    _, curve, log = trainers.train(
        *(job, arm, model, folder, task.rewards, dataset, tokenizer),
        probe_model=lambda model: probe_model(model) | counts.figures(),
        counts=counts,
    )
    last = curve[-1]
    return {
        "accuracy": last["accuracy"],
        "tokens": float(last["tokens"]),
        "seconds": last["seconds"],
        "acceptance": acceptance_rate(log),
        "screened": counts.share_screened(),
        "curve": curve,
    }


def acceptance_rate(log):
    """Return the mean share of groups that were accepted; of `GRPOTrainer`, of groups whose rewards differ."""
    accepted = mean_of(log, "dynamic_sampling/acceptance_rate")
    return 1 - mean_of(log, "frac_reward_zero_std") if math.isnan(accepted) else accepted


def best_factor(results, task, arm):
    """Return the factor with the highest accuracy after the task's steps, with the seed that does not count."""
    if arm == SCREEN_AT_EQUAL_RATE:
        arm = SCREEN_WEIGHTED
    factors, reached = TASKS[task].factors, after(task, STEPS, "accuracy")
    if len(factors) == 1:
        return factors[0]
    return max(factors, key=lambda factor: reached(results[task, arm, f"{factor:g}", TRIAL])[0])


def counted_runs(results):
    """Return the runs that count, by task, arm and seed."""
    return {(task, arm, seed): result for (task, arm, _, seed), result in results.items() if seed != TRIAL}


STUDY = Study(
    Path(__file__).parent,
    ("task", "arm", "rate", "seed"),
    "## What the savings cost\n",
    PREDICTIONS,
    counted=counted_runs,
)
fill_in = STUDY.fill_in


# ---- Tables ----


def describe(shares):
    return describe_shares(shares, len(SEEDS))


def describe_median(values):
    """Return the median of tokens."""
    return f"{statistics.median(values):,.0f}" if values else "not run"


# Tables with a row per task and a column per arm: how a cell is written, and its measure of the runs.
TABLES = {
    "accuracy after the same optimizer steps": (describe, lambda task: after(task, STEPS, "accuracy")),
    "accuracy after the same generated tokens": (describe, lambda task: after(task, TOKENS, "accuracy")),
    "accuracy after the same CPU seconds": (describe, lambda task: after(task, SECONDS, "accuracy")),
    "accuracy on the hardest quarter, same steps": (describe, lambda task: after(task, STEPS, "hardest")),
    "hard groups in the gradient, same steps": (describe, hard_share),
    "generated tokens, same steps": (describe_median, lambda task: after(task, STEPS, "tokens")),
    "acceptance rate": (describe, lambda task: lambda *runs: [run["acceptance"] for run in runs]),
}


def table(results, title):
    """Return the columns and the rows of one of `TABLES`."""
    describe_cell, measure_of = TABLES[title]
    counted, rows = counted_runs(results), []
    for task in TASKS:
        cells = []
        for arm in COLUMNS:
            runs = [result for (of, name, _), result in counted.items() if (of, name) == (task, arm)]
            cells.append(describe_cell(measure_of(task)(*runs)))
        rows.append([task, *cells])
    return [title, *COLUMNS], rows


def budgets():
    """Return the columns and the rows of what each task spends."""
    return ["task", *SPENT], [[task, *(describe_budget(task, what) for what in SPENT)] for task in TASKS]


def print_tables(results):
    for title in TABLES:
        columns, rows = table(results, title)
        print_table(title, ["task", *columns[1:]], rows)
    say("medians of five seeds (lowest to highest)")
    print_table("what is spent", *budgets())


def main(task=tuple(TASKS), arm=tuple(ARMS), from_kept=False, num_processes=1, output_dir=OUTPUT):
    results = STUDY.read()
    for name in () if from_kept else task:
        checkpoint, _ = TASKS[name].make_checkpoint(output_dir)
        arms_here = [each for each in arm if each != SCREEN_AT_EQUAL_RATE or name == "quickstart"]

        def run_those(*keys, name=name, checkpoint=checkpoint):
            jobs = [make_job(name, *key) for key in keys]
            jobs = [job for job in jobs if job.key not in results]
            if jobs:
                results.update(run_all(run, jobs, checkpoint, output_dir, num_processes, runs_per_process=10))
                STUDY.write(results)

        if len(TASKS[name].factors) > 1:
            for factor in TASKS[name].factors:
                run_those(*((each, factor, TRIAL) for each in arms_here if each != SCREEN_AT_EQUAL_RATE))
        for seed in SEEDS:
            # The first run of a process is a little slower, so every seed begins with another arm.
            first = seed % len(arms_here)
            arms = [*arms_here[first:], *arms_here[:first]]
            run_those(*((each, best_factor(results, name, each), seed) for each in arms))
    print_tables(results)
    draw(results)
    STUDY.report()

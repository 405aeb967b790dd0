# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
Generated tokens and seconds until a small model reaches an accuracy on held-out problems.

    python -m benchmarks time_to_accuracy    # about 25 minutes on two cores

All methods start from one checkpoint, the quickstart's model after its warm-up on faulty sums, and differ in what
`ARMS` says. A run ends at the target, which is the checkpoint's accuracy plus the task's gain, or after
`--max-seconds`. A run that never reaches the target counts as slower than every other. The learning rate of a task is
the one of 3e-5, 1e-4 and 3e-4 at which GRPO reached most with seed 0 (`--learning-rate` sets another).

"Full batch again" samples as many prompts in each round as the batch holds and discards surplus, as SkyRL and ms-swift
do. "Server" is a stand-in for vLLM's server, whose CPU seconds count too. Accuracy is the probability that a
completion is correct, computed from the logits on every third held-out problem after every rollout. It has no sampling
noise, and measuring it costs neither time nor tokens. Seconds are CPU seconds of one thread. With n seeds, the lowest
and the highest value enclose the median with a confidence of 1 - 2^(1 - n): 94% with 5 seeds.
"""

import json
import math
import random
import statistics
from pathlib import Path
from typing import NamedTuple

from datasets import Dataset

from trl_dapo.cli.quickstart import FAMILIES, Problems, build_model, build_tokenizer, exact_answer_reward, warm_up
from trl_dapo.settings.sampling_defaults import PAPER

from .frame import trainers
from .frame.curves import accuracy
from .frame.measures import cost, mean_of, spread
from .frame.runs import Job, fingerprint, quiet, run_all
from .frame.stand_in import Model, server
from .frame.tables import print_table, say
from .frame.trainers import DAPO, GRPO, Arm, load, rollouts_of


CHECKPOINT_SEED = 42
DATASET_SIZE = 1024
NUM_PROMPTS, NUM_GENERATIONS, NUM_STEPS = 16, 8, 4  # of a rollout: prompts, completions per prompt, optimizer steps
NUM_WARM_UP_STEPS, MAX_SECONDS, MAX_LENGTH = 250, 75.0, 8


class Task(NamedTuple):
    shares: list[float]  # of each family among the prompts, in the order of the quickstart's FAMILIES
    gain: float  # the target, above the checkpoint's accuracy
    learning_rate: float


TASKS = {
    "quickstart": Task([family.share for family in FAMILIES], gain=0.10, learning_rate=1e-4),
    # The others are products, which the model never solves, and sums of digits, which it solves nearly always.
    "one in ten": Task([0.05, 0.03, 0.07, 0.85], gain=0.05, learning_rate=3e-5),
}

RESAMPLE = {"dynamic_sampling_max_gen_batches": 30.0, **PAPER}  # SkyRL's limit, for every resampler
CARRY = {**RESAMPLE, "dynamic_sampling_surplus": "carry"}
MEMORY = {**CARRY, "dynamic_sampling_memory": True}
SERVER = {**CARRY, "use_vllm": True, "vllm_mode": "server"}
ARMS = {
    "GRPO, one step": Arm(GRPO, {}, num_steps=1),
    "GRPO": Arm(GRPO, {}),
    "GRPO, Clip-Higher": Arm(GRPO, {"loss_type": "dapo", "epsilon_high": 0.28}),
    "full batch again": Arm(DAPO, {**RESAMPLE, "batch_multiplier": 1.0}),
    "paper": Arm(DAPO, RESAMPLE),
    "carry": Arm(DAPO, CARRY),
    "carry, memory": Arm(DAPO, MEMORY),
    "screen 3": Arm(DAPO, {**RESAMPLE, "dynamic_sampling_screen": "3"}),
    "screen": Arm(DAPO, {**RESAMPLE, "dynamic_sampling_screen": "on"}),
    "carry, memory, screen 3": Arm(DAPO, {**MEMORY, "dynamic_sampling_screen": "3"}),
    "carry, memory, screen": Arm(DAPO, {**MEMORY, "dynamic_sampling_screen": "on"}),
    "carry, server": Arm(DAPO, SERVER),
    "carry, ahead": Arm(DAPO, {**SERVER, "rollouts_ahead": 1}),
}


# ---- One run ----


def settings_of(arm, learning_rate):
    sizes = NUM_PROMPTS, NUM_GENERATIONS, ARMS[arm].num_steps or NUM_STEPS
    return rollouts_of(*sizes, max_completion_length=MAX_LENGTH, learning_rate=learning_rate)


def held_out(problems):
    """Return the held-out problems for probes: few enough for every rollout, with the share of every family."""
    return [f"{problem.text}={problem.answer}" for problem in problems.held_out[::3]]


def prompts(problems, shares, seed):
    shares = dict(zip(problems.train, shares, strict=True))
    return draw_prompts(problems.train, shares, seed, DATASET_SIZE, lambda problem: problem.answer)


def draw_prompts(problems, shares, seed, num, solution):
    """Return training prompts without repetition, in random order, with the share of every family."""
    draw = random.Random(seed)
    chosen = []
    for name, share in shares.items():
        chosen += draw.sample(problems[name], min(len(problems[name]), round(share * num)))
    draw.shuffle(chosen)
    return Dataset.from_list(
        [
            {
                "prompt": [{"role": "user", "content": problem.text}],
                "solution": solution(problem),
                "source": problem.family,
            }
            for problem in chosen
        ]
    )


def train_on(job, checkpoint, folder, arm, **options):
    """Train until the target or a limit; return the curve, and the log entries of the rollouts."""
    problems, tokenizer = Problems(CHECKPOINT_SEED), build_tokenizer()
    asked, dataset = held_out(problems), prompts(problems, TASKS[job.task].shares, job.seed)
    with server(Model, path=str(checkpoint), seed=job.seed) as engines:  # for arms that use a server
        _, curve, log = trainers.train(
            *(job, arm, load(checkpoint), folder, exact_answer_reward, dataset, tokenizer),
            probe_model=lambda model: {"accuracy": accuracy(model, tokenizer, asked)},
            server_seconds=lambda: sum(engine.cpu_seconds() for engine in engines),
            **options,
        )
    return curve, log


def train(job, checkpoint, folder, arm):
    """Return the curve and the mean acceptance rate of [`train_on`]."""
    curve, log = train_on(job, checkpoint, folder, arm)
    return {"curve": curve, "acceptance": 1 - mean_of(log, "frac_reward_zero_std")}


def run(job, checkpoint, folder):
    return train(job, checkpoint, folder, ARMS[job.arm])


def make_checkpoint(folder, num_steps=NUM_WARM_UP_STEPS):
    """Return the quickstart's model after its warm-up, and its accuracy. The model is kept for the next call."""
    path = folder / f"checkpoint-{num_steps}-{fingerprint(make_checkpoint)[:8]}"
    if not path.exists():
        quiet()
        problems, tokenizer = Problems(CHECKPOINT_SEED), build_tokenizer()
        model = build_model(tokenizer, CHECKPOINT_SEED)
        warm_up(model, tokenizer, problems, num_steps)
        partial = folder / "checkpoint.partial"
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        (partial / "accuracy.json").write_text(json.dumps(accuracy(model, tokenizer, held_out(problems))))
        partial.rename(path)
    return path, json.loads((path / "accuracy.json").read_text())


# ---- All runs ----


def report(results, seeds, targets, arms):
    """Print a table per task."""
    columns = "method", "reached", "generated tokens", "CPU seconds", "acceptance"
    for task, target in targets.items():
        rows = []
        for arm in arms:
            runs = [results[task, arm, seed] for seed in seeds]
            tokens, seconds = ([cost(run, target, what) for run in runs] for what in ("tokens", "seconds"))
            reached = f"{sum(map(math.isfinite, tokens))} of {len(seeds)}"
            acceptance = f"{statistics.mean(run['acceptance'] for run in runs):.0%}"
            rows.append([arm, reached, spread(tokens), spread(seconds, 1), acceptance])
        title = f"{task}: until an accuracy of {target:.1%}, {len(seeds)} seeds, median (lowest to highest)"
        print_table(title, columns, rows)


def main(
    task=tuple(TASKS),
    method=tuple(ARMS),
    num_seeds=5,
    max_seconds=MAX_SECONDS,
    learning_rate: float | None = None,
    num_warm_up_steps=NUM_WARM_UP_STEPS,
    num_processes=2,
    output_dir=Path("outputs/time_to_accuracy"),
):
    checkpoint, start = make_checkpoint(output_dir, num_warm_up_steps)
    targets = {name: start + TASKS[name].gain for name in task}
    rates = {name: learning_rate or TASKS[name].learning_rate for name in task}
    say(
        f"{NUM_PROMPTS} prompts x {NUM_GENERATIONS} completions and {NUM_STEPS} optimizer steps per rollout. "
        f"The checkpoint has an accuracy of {start:.1%}. A run is stopped after {max_seconds:g} CPU seconds."
    )
    for name in task:
        shares = zip((family.name for family in FAMILIES), TASKS[name].shares, strict=True)
        mix = ", ".join(f"{share:.0%} {family}" for family, share in shares)
        say(f"{name}, {DATASET_SIZE:,} prompts: {mix}; learning rate {rates[name]:g}; target {targets[name]:.1%}")
    seeds = range(num_seeds)
    limits = {name: {"target": targets[name], "max_seconds": max_seconds} for name in task}
    jobs = [
        Job(name, arm, seed, settings_of(arm, rates[name]), **limits[name])
        for name in task
        for seed in seeds
        for arm in method
    ]
    results = run_all(run, jobs, checkpoint, output_dir, num_processes)
    report(results, seeds, targets, method)

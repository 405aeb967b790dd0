# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""What is run, and what was predicted of it before the first run that counts."""

import tempfile
from typing import NamedTuple

from trl import GRPOConfig

from trl_dapo import DAPOConfig

from ..larger.parts import spent_to
from ..mechanisms.mechanisms import Prediction, Quantity
from ..mechanisms.quantities import at_equal


from runs import file_name  # isort: skip (mechanisms/tasks.py has said where these are)
from time_to_accuracy import DAPO, GRPO, TASKS, Method, parse_args, sized, train  # isort: skip


FACTORS = (0.5, 1.0, 2.0, 3.0)  # of the rate that suits GRPO
TRIAL, SEEDS = 100, range(10, 15)  # used for nothing else
SIZES = parse_args([])  # prompts, steps, warm-up and limit, as time_to_accuracy.py is run

ONE, FOUR, AS_IS, AS_PAPER, SMALLER = "GRPO, one step", "GRPO", "as it is", "as the paper", "as it is, smaller"
METHODS = {
    ONE: Method(GRPO, GRPOConfig, {}, num_steps=1),
    FOUR: Method(GRPO, GRPOConfig, {}),
    AS_IS: Method(DAPO, DAPOConfig, {}),
    AS_PAPER: Method(DAPO, DAPOConfig, {"dynamic_sampling_mode": "paper"}),
    SMALLER: Method(DAPO, DAPOConfig, {}),
}
RANGED = FOUR, AS_IS
# As many prompts a rollout as teach in one of GRPO's: three in four, and one in eight.
FEWER_PROMPTS = {"quickstart": 12, "one in ten": 2}

TOKENS = {task: Quantity("tokens to the target", spent_to(TASKS[task].gain, "tokens")) for task in TASKS}
AT_EQUAL = Quantity("accuracy at equal tokens", at_equal("tokens", "accuracy"), "%")
PREDICTIONS = tuple(
    Prediction(task, mine, other, quantity, direction, "this package's own")
    for task in TASKS
    for mine, other, quantity, direction in (
        (AS_IS, FOUR, TOKENS[task], -1),
        (AS_IS, ONE, TOKENS[task], -1),
        (AS_IS, AS_PAPER, TOKENS[task], -1),
        (SMALLER, AS_IS, TOKENS[task], -1),
        (AS_IS, FOUR, AT_EQUAL, 1),
    )
)


class Job(NamedTuple):
    """One run, and everything that decides its outcome."""

    task: str
    arm: str
    factor: float
    seed: int
    target: float
    max_seconds: float
    settings: dict

    @property
    def key(self):
        return self.task, self.arm, f"{self.factor:g}", self.seed

    @property
    def name(self):
        return file_name(*self.key)


def make_job(task, arm, factor, seed, start):
    num_prompts = FEWER_PROMPTS[task] if arm == SMALLER else SIZES.num_prompts
    rate = factor * TASKS[task].learning_rate
    settings = sized(num_prompts, METHODS[arm].num_steps or SIZES.num_steps, rate)
    return Job(task, arm, factor, seed, start + TASKS[task].gain, SIZES.max_seconds, settings)


def run(job, checkpoint):
    """Trains to the target or the limit; of the curve every fourth rollout is kept, and the last."""
    with tempfile.TemporaryDirectory() as folder:
        found = train(job, checkpoint, folder, method=METHODS[job.arm])
    *curve, last = found["curve"]
    figures = {"accuracy": last["accuracy"], "tokens": float(last["tokens"]), "seconds": last["seconds"]}
    return figures | {"acceptance": found["acceptance"], "curve": [*curve[::4], last]}

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""What is run in each part, and what was predicted of it before the first run that counts."""

import statistics

from ..mechanisms.mechanisms import Prediction, Quantity
from ..mechanisms.quantities import late, of_run
from .training import Job


from run import CONTROL, ROWS, RUNGS, settings_of  # isort: skip (mechanisms/tasks.py has said where these are)
from time_to_accuracy import METHODS, cost  # isort: skip


TIME, LADDER = "Countdown", "ladder"

ARMS = ("GRPO", "full batch again", "ours", "ours, carry, memory")
GAIN = 0.10  # the target, above the checkpoint's accuracy
MOST_TOKENS = 600_000  # generated; a run that has not reached the target by then never does

NUM_ROLLOUTS = 28
RATES = (2e-5, 5e-5, 1e-4)
BUFFER = 32  # tokens before the limit that the soft punishment covers, as the paper's 4,096 of 20,480

ROWS_OF = {TIME: ARMS, LADDER: ROWS}
OURS = {"dynamic_sampling_stop_after": 0}  # of every DAPOTrainer


# ---- Runs ----


def time_jobs(seeds, start):
    """Whole seeds first; `start` is the checkpoint's accuracy on the problems that are asked on the way."""
    how = {"num_rollouts": 10_000, "target": start + GAIN, "max_tokens": MOST_TOKENS}
    return [Job(TIME, arm, seed, *_method(arm), **how) for seed in seeds for arm in ARMS]


def rate_jobs():
    """GRPO at each rate that `LEARNING_RATE` may be; with a seed that does not count."""
    return [Job("rates", f"{rate:g}", 100, "GRPO", {"learning_rate": rate}, NUM_ROLLOUTS) for rate in RATES]


def _method(arm):
    method = METHODS[arm]
    trainer = method.trainer.__name__
    return trainer, method.settings | (OURS if trainer == "DAPO" else {})


def ladder_jobs(seeds):
    """Whole seeds first; without the control, whose length is the last rung's."""
    return [Job(LADDER, rung, seed, "DAPO", rung_settings(rung), NUM_ROLLOUTS) for seed in seeds for rung in RUNGS]


def control_jobs(seeds, results):
    """GRPO until it has generated as much as the last rung with the same seed."""
    *_, last = RUNGS
    tokens = {seed: results[LADDER, last, seed]["tokens"] for seed in seeds}
    how = "DAPO", rung_settings(CONTROL)
    return [Job(LADDER, CONTROL, seed, *how, num_rollouts=10_000, max_tokens=tokens[seed]) for seed in seeds]


def rung_settings(rung):
    """The ladder's, but for the punishment's length."""
    settings = OURS | settings_of(rung)
    return settings | ({"overlong_buffer_length": BUFFER} if "overlong_buffer_length" in settings else {})


# ---- Predictions ----


def spent_to(gain, what):
    """
    Tokens or seconds until accuracy is higher by `gain`, of both runs. Where it never was, what the run spent: less
    than it would have needed.
    """

    def measure(*runs):
        target = statistics.mean(run["curve"][0]["accuracy"] for run in runs) + gain
        return [min(cost(run, target, what), run["curve"][-1][what]) for run in runs]

    return measure


TOKENS, SECONDS = (Quantity(f"{what} to the target", spent_to(GAIN, what)) for what in ("tokens", "seconds"))
ACCURACY = Quantity("accuracy", of_run("accuracy"), "%")
TRUNCATED = Quantity("cut off", of_run("truncated"), "%")
MEMORY = "ours, carry, memory"
FILTERING, CLIP, SOFT, TOKEN, DYNAMIC = list(RUNGS)[1:]

PREDICTIONS = (
    Prediction(TIME, "ours", "full batch again", TOKENS, -1, "this package's own"),
    Prediction(TIME, MEMORY, "full batch again", TOKENS, -1, "this package's own"),
    Prediction(TIME, MEMORY, "GRPO", TOKENS, -1, "this package's own"),
    Prediction(TIME, "ours", "GRPO", SECONDS, -1, "section 3.2"),
    Prediction(LADDER, FILTERING, "GRPO", TRUNCATED, 1, "no claim"),
    Prediction(LADDER, FILTERING, "GRPO", ACCURACY, 1, "table 1"),
    Prediction(LADDER, CLIP, FILTERING, Quantity("entropy", late("entropy")), 1, "figure 2"),
    Prediction(LADDER, CLIP, FILTERING, ACCURACY, 1, "table 1"),
    Prediction(LADDER, SOFT, CLIP, TRUNCATED, -1, "equation 13"),
    Prediction(LADDER, SOFT, CLIP, ACCURACY, 1, "table 1"),
    Prediction(LADDER, TOKEN, SOFT, ACCURACY, 1, "table 1"),
    Prediction(LADDER, DYNAMIC, TOKEN, ACCURACY, 1, "table 1"),
    Prediction(LADDER, DYNAMIC, CONTROL, ACCURACY, 1, "no claim"),
)

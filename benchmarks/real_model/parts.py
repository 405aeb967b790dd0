# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""What is run, and what was predicted of it before the first run that counts."""

from typing import NamedTuple

from trl_dapo.settings.sampling_defaults import PAPER

from ..larger.parts import spent_to
from ..mechanisms.mechanisms import Prediction, Quantity
from ..mechanisms.quantities import at_equal, of_run, read_at


from runs import file_name  # isort: skip (mechanisms/tasks.py has said where it is)

PRODUCTS, SUMS, CLIP, LENGTH = "products", "sums", "clip", "length"
GAIN = 0.25  # the target, above the model's accuracy before
NUM_ROLLOUTS = 16  # as the recipe has it
COMPARED = 12  # after so many, as it was predicted
NUM_STEPS = 16  # of the optimizer a rollout, where the clip is looked at

ARMS = {  # beside the recipe, which carries and remembers
    "GRPO": {},
    "full batch again": {**PAPER, "batch_multiplier": 1.0},
    "ours": PAPER,
    "ours, carry, memory": {},
    "ours, carry, memory, auto": {"dynamic_sampling_screen": "auto"},
    "all weights": {"use_peft": False, "learning_rate": 1e-5},
    "0.2": {"epsilon_high": 0.2},
    "0.28": {},
    "sequence mean": {"loss_type": "grpo"},
    "token mean": {},
    "no punishment": {"overlong_buffer_length": None},
}
GRPO, FULL, OURS, MEMORY, AUTO, ALL_WEIGHTS, LOW, HIGH, SEQUENCE, TOKEN, UNPUNISHED = ARMS
PARTS = {
    PRODUCTS: [GRPO, FULL, OURS, MEMORY, AUTO, ALL_WEIGHTS],
    SUMS: [GRPO, MEMORY, AUTO],
    CLIP: [LOW, HIGH],
    LENGTH: [SEQUENCE, TOKEN, UNPUNISHED],
}
COMMON = {  # of a part's arms
    CLIP: {  # a prompt a step, each rollout four times; pass@8 before, in the middle and at the end
        "prompts_per_step": 1,
        "num_iterations": 4,
        "learning_rate": 1e-4,
        "num_generations_eval": 8,
        "logging_steps": NUM_STEPS,
        "eval_steps": 4 * NUM_STEPS,
        "save_strategy": "no",  # what the clip stopped is counted in one go
        "max_steps": 8 * NUM_STEPS,
    },
    LENGTH: {  # room to think; what the sequence mean knows nothing of, a carried surplus and a token budget, is off
        **PAPER,
        "max_tokens_per_microbatch": None,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 4,
        "max_completion_length": 64,
        "overlong_buffer_length": 16,
        "reward_weights": [1.0],
        "eval_steps": 8,
        "max_steps": 8,
    },
}


class Job(NamedTuple):
    """One run, and everything that decides its outcome."""

    part: str
    arm: str
    seed: int
    settings: dict

    @property
    def key(self):
        return self.part, self.arm, self.seed

    @property
    def name(self):
        return file_name(*self.key)


def jobs(seeds, arms, parts):
    """Whole seeds first."""
    return [
        Job(part, arm, seed, COMMON.get(part, {}) | ARMS[arm])
        for part in parts
        for seed in seeds
        for arm in PARTS[part]
        if arm in arms
    ]


TOKENS, SECONDS = (Quantity(f"{what} to the target", spent_to(GAIN, what)) for what in ("tokens", "seconds"))
ACCURACY = Quantity(
    f"accuracy after {COMPARED} rollouts",
    lambda *runs: [read_at(run["curve"], "rollouts", COMPARED, "accuracy") for run in runs],
    "%",
)
AT_EQUAL = Quantity("accuracy at equal tokens", at_equal("tokens", "accuracy"), "%")
AT_END = Quantity("accuracy at the end", of_run("accuracy"), "%")
ENTROPY = Quantity("entropy in the last four rollouts", of_run("late entropy"))
PASS_AT_8 = Quantity("pass@8 at the end", of_run("pass at 8"), "%")
CUT_OFF = Quantity("cut off at the end", of_run("cut off"), "%")
NUM_TOKENS = Quantity("tokens of an answer at the end", of_run("length"))
STOPPED = Quantity("probability of what the upper clip stops", of_run("probability of the up-clipped"))

PREDICTIONS = (
    Prediction(PRODUCTS, MEMORY, GRPO, ACCURACY, 1, "section 3.2"),
    Prediction(PRODUCTS, MEMORY, GRPO, AT_EQUAL, 1, "this package's own"),
    Prediction(PRODUCTS, MEMORY, GRPO, TOKENS, -1, "this package's own"),
    Prediction(PRODUCTS, OURS, FULL, TOKENS, -1, "this package's own"),
    Prediction(PRODUCTS, MEMORY, FULL, TOKENS, -1, "this package's own"),
    Prediction(PRODUCTS, MEMORY, OURS, TOKENS, -1, "this package's own"),
    Prediction(PRODUCTS, AUTO, MEMORY, TOKENS, -1, "this package's own"),
    Prediction(PRODUCTS, MEMORY, GRPO, SECONDS, -1, "section 3.2"),
    Prediction(PRODUCTS, ALL_WEIGHTS, MEMORY, AT_END, -1, "this package's own"),
    Prediction(SUMS, MEMORY, GRPO, AT_END, 1, "section 3.2"),
    Prediction(SUMS, AUTO, GRPO, AT_EQUAL, 1, "this package's own"),
    Prediction(SUMS, AUTO, MEMORY, TOKENS, -1, "this package's own"),
    Prediction(CLIP, HIGH, LOW, ENTROPY, 1, "figure 2"),
    Prediction(CLIP, HIGH, LOW, PASS_AT_8, 1, "section 3.1"),
    Prediction(CLIP, LOW, 0.2, STOPPED, -1, "figure 3a"),
    Prediction(LENGTH, TOKEN, SEQUENCE, NUM_TOKENS, -1, "figure 4b"),
    Prediction(LENGTH, TOKEN, UNPUNISHED, CUT_OFF, -1, "equation 13"),
    Prediction(LENGTH, TOKEN, UNPUNISHED, AT_END, 1, "table 1"),
)

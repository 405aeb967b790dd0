# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
`GRPOTrainer` and `DAPOTrainer` with dynamic sampling off: the same losses, and no slower.

    python -m benchmarks drop_in    # one to two minutes

Both trainers train the same small model on the same prompts from the same seed. A rollout has one optimizer step of
several micro-batches. The trainers take turns, each with a fresh model. Times are medians over steps, without the
first step of a turn. Everything runs for real, on the GPU if there is one.
"""

import tempfile
import time
from statistics import median

from datasets import Dataset
from transformers import TrainerCallback

from trl_dapo.cli.quickstart import build_model, build_tokenizer

from .frame.runs import silent
from .frame.tables import print_table, say
from .frame.trainers import DAPO, GRPO, Arm, make_trainer, train_quietly
from .update_phase import step_of, synchronize


ARMS = {
    "GRPOTrainer": Arm(GRPO, {"loss_type": "dapo", "epsilon_high": 0.28}),
    "DAPOTrainer": Arm(DAPO, {"use_dynamic_sampling": False}),
}
SPENT = "seconds", "cpu_seconds"


class Clock(TrainerCallback):
    """Wall and CPU seconds of every step but the first."""

    def __init__(self):
        self.seconds, self.cpu_seconds = [], []

    def on_step_end(self, args, state, control, **kwargs):
        synchronize()
        now = time.perf_counter(), time.process_time()
        if state.global_step > 1:
            self.seconds.append(now[0] - self._last[0])
            self.cpu_seconds.append(now[1] - self._last[1])
        self._last = now


def share_of_ones(completions, **kwargs):
    """Reward function: the share of ones in a completion, which differs between completions of a random model."""
    return [completion.count("1") / max(1, len(completion)) for completion in completions]


def turn(arm, num_steps, num_rows, num_microbatches, max_length, output_dir):
    """Run one trainer from a fresh model; return its clock, with the loss of every step."""
    tokenizer, clock = build_tokenizer(), Clock()
    settings = {
        **step_of(num_rows // num_microbatches, num_microbatches),
        "max_completion_length": max_length,
        "max_steps": num_steps,
        "learning_rate": 1e-4,
        "logging_steps": 1,
    }
    model = build_model(tokenizer, seed=0, max_position_embeddings=2 * max_length)
    dataset = Dataset.from_dict({"prompt": [f"{i:02d}+{j:02d}=" for i in range(20) for j in range(20)]})
    trainer = make_trainer(arm, model, output_dir, share_of_ones, dataset, tokenizer, settings)
    clock.losses = [entry["loss"] for entry in train_quietly(trainer, clock)]
    return clock


def measure(num_turns, **sizes):
    """Return the clocks of all turns of each trainer."""
    clocks = {name: [] for name in ARMS}
    with tempfile.TemporaryDirectory() as folder:
        for i in range(num_turns):
            # The trainer that is first in one turn is second in the next.
            for name in list(ARMS)[:: 1 if i % 2 == 0 else -1]:
                clocks[name].append(turn(ARMS[name], **sizes, output_dir=folder))
    return clocks


def loss_difference(clocks):
    """Return the largest difference between the losses of the two trainers in any step of any turn."""
    return max(
        abs(theirs - mine)
        for trls, ours in zip(clocks["GRPOTrainer"], clocks["DAPOTrainer"], strict=True)
        for theirs, mine in zip(trls.losses, ours.losses, strict=True)
    )


def main(num_turns=5, num_steps=6, num_rows=64, num_microbatches=4, max_length=128):
    silent()
    sizes = {"num_rows": num_rows, "num_microbatches": num_microbatches, "max_length": max_length}
    clocks = measure(num_turns, num_steps=num_steps, **sizes)
    title = f"{num_rows} completions of up to {max_length} tokens per step, {num_microbatches} micro-batches, "
    title += f"{num_turns} turns of {num_steps} steps"
    medians = {
        name: [median(value for clock in turns for value in getattr(clock, what)) for what in SPENT]
        for name, turns in clocks.items()
    }
    rows = [[name, *(f"{value:.3f}" for value in values)] for name, values in medians.items()]
    print_table(title, ("trainer", "seconds per step", "CPU seconds per step"), rows)
    wall, cpu = (mine / theirs for mine, theirs in zip(medians["DAPOTrainer"], medians["GRPOTrainer"], strict=True))
    say(f"DAPOTrainer / GRPOTrainer: {wall:.3f} of the seconds per step, {cpu:.3f} of the CPU seconds")
    difference, losses = loss_difference(clocks), [abs(loss) for c in clocks["GRPOTrainer"] for loss in c.losses]
    say(f"largest difference of a step's loss: {difference:.1e}; the losses' median size: {median(losses):.1e}")

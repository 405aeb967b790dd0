# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
`GRPOTrainer` and `DAPOTrainer` with dynamic sampling off: the same losses, and no slower.

    python benchmarks/drop_in.py           # one to two minutes
    python benchmarks/drop_in.py --full    # longer completions, more turns

Both train the same small model on the same prompts from the same seed, with TRL's `loss_type="dapo"` and
`epsilon_high=0.28`, one optimizer step of several micro-batches a rollout. They take turns, a fresh model and trainer
each; a turn's first step is left out of the times, which are medians over steps. Everything runs for real: generation,
reward, log-probabilities and update. Runs on the GPU if there is one.
"""

import argparse
import tempfile
import time
import warnings
from statistics import median

import torch
import transformers
from datasets import Dataset
from rich.console import Console
from rich.table import Table
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from update_phase import synchronize

from trl_dapo import DAPOConfig, DAPOTrainer
from trl_dapo.cli.quickstart import build_model, build_tokenizer


TRAINERS = {
    "GRPOTrainer": (GRPOTrainer, GRPOConfig, {"loss_type": "dapo", "epsilon_high": 0.28}),
    "DAPOTrainer": (DAPOTrainer, DAPOConfig, {"use_dynamic_sampling": False}),
}


class Clock(TrainerCallback):
    """Wall and CPU seconds of every step but the first, and every step's loss."""

    def __init__(self):
        self.seconds, self.cpu_seconds, self.losses = [], [], []

    def on_step_end(self, args, state, control, **kwargs):
        synchronize()
        now = time.perf_counter(), time.process_time()
        if state.global_step > 1:
            self.seconds.append(now[0] - self._last[0])
            self.cpu_seconds.append(now[1] - self._last[1])
        self._last = now

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.losses.append(logs["loss"])


def share_of_ones(completions, **kwargs):
    """Reward function: a random model's completions differ in it."""
    return [completion.count("1") / max(1, len(completion)) for completion in completions]


def turn(name, args, output_dir):
    """One run of one trainer, from a fresh model."""
    trainer_class, config_class, settings = TRAINERS[name]
    tokenizer = build_tokenizer()
    config = config_class(
        output_dir=output_dir,
        per_device_train_batch_size=args.num_rows // args.num_microbatches,
        gradient_accumulation_steps=args.num_microbatches,
        num_generations=8,
        max_completion_length=args.max_length,
        max_steps=args.num_steps,
        learning_rate=1e-4,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        **settings,
    )
    clock = Clock()
    trainer = trainer_class(
        model=build_model(tokenizer, seed=0, max_position_embeddings=2 * args.max_length),
        reward_funcs=share_of_ones,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": [f"{i:02d}+{j:02d}=" for i in range(20) for j in range(20)]}),
        processing_class=tokenizer,
        callbacks=[clock],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return clock


def measure(args):
    """Clocks of all turns of each trainer."""
    clocks = {name: [] for name in TRAINERS}
    with tempfile.TemporaryDirectory() as folder:
        for i in range(args.num_turns):
            # Whoever goes first in one turn goes second in the next.
            for name in list(TRAINERS)[:: 1 if i % 2 == 0 else -1]:
                clocks[name].append(turn(name, args, folder))
    return clocks


def loss_difference(clocks):
    """Largest difference of any step's loss between the two trainers in any turn."""
    return max(
        abs(theirs - mine)
        for trls, ours in zip(clocks["GRPOTrainer"], clocks["DAPOTrainer"], strict=True)
        for theirs, mine in zip(trls.losses, ours.losses, strict=True)
    )


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="completions of up to 512 tokens, 9 turns")
    parser.add_argument("--num-turns", type=int, help="turns of each trainer (default: 5)")
    parser.add_argument("--num-steps", type=int, default=6, help="optimizer steps a turn (default: %(default)s)")
    parser.add_argument("--num-rows", type=int, default=64, help="completions a step (default: %(default)s)")
    parser.add_argument("--num-microbatches", type=int, default=4, help="micro-batches a step (default: %(default)s)")
    parser.add_argument("--max-length", type=int, help="longest completion, in tokens (default: 128)")
    args = parser.parse_args(argv)
    args.num_turns = args.num_turns or (9 if args.full else 5)
    args.max_length = args.max_length or (512 if args.full else 128)
    return args


def main(argv=None):
    args = parse_args(argv)
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    console = Console(width=110)
    clocks = measure(args)
    table = Table(
        "trainer",
        title=f"{args.num_rows} completions of up to {args.max_length} tokens a step, {args.num_microbatches} "
        f"micro-batches, {args.num_turns} turns of {args.num_steps} steps",
    )
    for column in ("seconds a step", "CPU seconds a step"):
        table.add_column(column, justify="right")
    medians = {}
    for name, turns in clocks.items():
        medians[name] = [
            median(value for clock in turns for value in getattr(clock, what)) for what in ("seconds", "cpu_seconds")
        ]
        table.add_row(name, *(f"{value:.3f}" for value in medians[name]))
    console.print(table)
    wall, cpu = (mine / theirs for mine, theirs in zip(medians["DAPOTrainer"], medians["GRPOTrainer"], strict=True))
    console.print(f"DAPOTrainer / GRPOTrainer: {wall:.3f} of the seconds a step, {cpu:.3f} of the CPU seconds")
    difference, losses = loss_difference(clocks), [abs(loss) for c in clocks["GRPOTrainer"] for loss in c.losses]
    console.print(
        f"largest difference of a step's loss: {difference:.1e}; the losses' median size: {median(losses):.1e}"
    )


if __name__ == "__main__":
    main()

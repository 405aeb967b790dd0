# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
A training step of `DAPOTrainer` beside one of `GRPOTrainer` on one GPU: seconds and peak memory.

    python benchmarks/gpu.py           # minutes
    python benchmarks/gpu.py --full    # more turns

A model of Qwen2.5-1.5B's shape with random weights, bfloat16, gradient checkpointing. Completions are scripted: 64 of
them, their lengths the quantiles of a lognormal of mean 1,100, cut off at 4,096. Everything behind generation is real:
rewards, advantages, dynamic sampling (which accepts every group here, in one round), losses, gradients. Prompts have 3
to 24 tokens, so that there is padding on both sides. Both trainers share one model and take turns; the learning rate
is 0, so that each turn does the same work. A gradient that is not finite shows in the weights and ends the benchmark.
Without CUDA nothing is measured.
"""

import argparse
import random
import tempfile
import time
import warnings
from statistics import median

import torch
import transformers
from datasets import Dataset
from rich.console import Console
from rich.table import Table
from transformers import PrinterCallback, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer
from update_phase import NUM_ROWS, long_tailed_lengths, peak_memory, reset_peak_memory, synchronize

from trl_dapo import DAPOConfig, DAPOTrainer
from trl_dapo.cli.tiny import build_tokenizer


QWEN_1_5B = {
    "vocab_size": 151_936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}


class Scripted:
    """Completions of given lengths, in an order of their own every turn; adds up the seconds of training steps."""

    def __init__(self, lengths, **kwargs):
        self.lengths = lengths
        super().__init__(**kwargs)
        self.remove_callback(PrinterCallback)

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        lengths = random.Random(0).sample(self.lengths, len(self.lengths))
        end = self.processing_class.eos_token_id
        return [[2 + i % 256 for i in range(length - 1)] + [end] for length in lengths], None

    def training_step(self, *args):
        synchronize()
        start = time.perf_counter()
        loss = super().training_step(*args)
        synchronize()
        self.seconds += time.perf_counter() - start
        return loss

    def turn(self):
        """One step: its seconds and its peak memory."""
        self.seconds = 0.0
        torch.manual_seed(0)  # the same draw assigns the rows to micro-batches
        reset_peak_memory()
        self.train()
        if not all(weight.isfinite().all() for weight in self.model.parameters()):
            raise SystemExit(f"{type(self).__name__}: a gradient is not finite.")
        return self.seconds, peak_memory()


class Ours(Scripted, DAPOTrainer):
    pass


class TRLs(Scripted, GRPOTrainer):
    pass


def every_other(completions, **kwargs):
    """Reward function: every other completion is right, so every group trains."""
    return [float(i % 2) for i in range(len(completions))]


def make_model(sizes, device):
    torch.manual_seed(0)
    config = Qwen2Config(**sizes, pad_token_id=0, eos_token_id=1, bos_token_id=None, max_position_embeddings=32_768)
    with torch.device(device):
        return Qwen2ForCausalLM(config).to(torch.bfloat16)


def measure(model, lengths, rows_per_microbatch, repeats):
    """Medians of both trainers' seconds and bytes a step; the first turn of each warms up."""
    trainers = {}
    with tempfile.TemporaryDirectory() as folder:
        for cls, config_class, settings in (
            (TRLs, GRPOConfig, {"loss_type": "dapo", "epsilon_high": 0.28}),
            (Ours, DAPOConfig, {}),
        ):
            args = config_class(
                output_dir=folder,
                per_device_train_batch_size=rows_per_microbatch,
                gradient_accumulation_steps=len(lengths) // rows_per_microbatch,
                max_steps=1,
                num_generations=8,
                max_completion_length=max(lengths),
                learning_rate=0.0,
                optim="sgd",
                bf16=False,  # the weights are; autocast would add copies
                use_cpu=model.device.type == "cpu",
                report_to="none",
                logging_strategy="no",
                save_strategy="no",
                disable_tqdm=True,
                **settings,
            )
            trainers[cls] = cls(
                lengths,
                model=model,
                args=args,
                processing_class=build_tokenizer(),
                reward_funcs=every_other,
                train_dataset=Dataset.from_dict(
                    {"prompt": ["abc" * (1 + i % 8) for i in range(len(lengths) // 8)]}
                ),  # all in every turn
            )
        turns = [{cls: trainer.turn() for cls, trainer in trainers.items()} for _ in range(repeats + 1)][1:]
    return {cls.__bases__[1].__name__: [median(turn[cls][i] for turn in turns) for i in range(2)] for cls in trainers}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="10 turns")
    parser.add_argument("--repeats", type=int, help="turns that count, each trainer (default: 3)")
    parser.add_argument("--rows-per-microbatch", type=int, default=4, help="on average (default: %(default)s)")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("Skipped: no CUDA device.")
        return
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    lengths = long_tailed_lengths(average=1100, longest=4096)
    repeats = args.repeats or (10 if args.full else 3)
    results = measure(make_model(QWEN_1_5B, "cuda"), lengths, args.rows_per_microbatch, repeats)
    name = torch.cuda.get_device_name()
    table = Table("trainer", title=f"{name}, {NUM_ROWS} completions, micro-batches of {args.rows_per_microbatch}")
    for column in ("seconds a step", "peak memory"):
        table.add_column(column, justify="right")
    for trainer, (seconds, num_bytes) in results.items():
        table.add_row(trainer, f"{seconds:.2f}", f"{num_bytes / 2**30:.1f} GiB")
    console = Console(width=110)
    console.print(table)
    time_ratio, memory_ratio = (
        mine / theirs for mine, theirs in zip(results["DAPOTrainer"], results["GRPOTrainer"], strict=True)
    )
    console.print(f"DAPOTrainer / GRPOTrainer: {time_ratio:.2f} of the seconds, {memory_ratio:.2f} of the peak memory")


if __name__ == "__main__":
    main()

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
Seconds of a training step of `DAPOTrainer` and of `GRPOTrainer` on one GPU, and of a sampling round there.

    python -m benchmarks gpu    # minutes; measures nothing without CUDA

The model has the shape of Qwen2.5-1.5B and random weights, in bfloat16 with gradient checkpointing. The 64 completions
are scripted: their lengths are quantiles of a lognormal distribution with mean 1,100 that is cut off at 4,096.
Everything after generation is real. Both trainers share one model and take turns, at a learning rate of 0. A gradient
that is not finite ends the benchmark. A round is sampled by transformers alone, with prompts of 64 tokens and
completions of 64 tokens, none of which ends earlier.
"""

import random
import tempfile
import time

import torch
from datasets import Dataset
from transformers import GenerationConfig

from trl_dapo.cli.tiny import build_tiny_tokenizer

from .frame.runs import silent
from .frame.tables import print_table, say
from .frame.trainers import DAPO, GRPO, Arm, make_trainer
from .lora_sync import SHAPES, make_model
from .update_phase import ALIKE, NUM_ROWS, Turns, long_tailed_lengths, step_of, synchronize, take_turns


NUM_COMPLETIONS = 8, 32, 128, 512  # of a round
NUM_TOKENS = 64  # of a prompt, and of a completion


class Scripted(Turns):
    """A trainer with completions of given lengths, in a fixed shuffled order."""

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        lengths = random.Random(0).sample(self.scripted, len(self.scripted))
        end = self.processing_class.eos_token_id
        return [[2 + i % 256 for i in range(length - 1)] + [end] for length in lengths], None

    def turn(self):
        cost = super().turn()
        if not all(weight.isfinite().all() for weight in self.model.parameters()):
            raise SystemExit(f"{type(self).__name__}: a gradient is not finite.")
        return cost


class Ours(Scripted, DAPO):
    pass


class TRLs(Scripted, GRPO):
    pass


ARMS = {"GRPOTrainer": Arm(TRLs, {"loss_type": "dapo", "epsilon_high": 0.28}), "DAPOTrainer": Arm(Ours, {})}


def every_other(completions, **kwargs):
    """Reward function: every other completion is correct, so every group trains."""
    return [float(i % 2) for i in range(len(completions))]


def measure(model, lengths, rows_per_microbatch, repeats):
    """Return medians of what a step of both trainers costs."""
    # Without `bf16`: the weights are in bfloat16, and autocast would add copies.
    settings = ALIKE | step_of(rows_per_microbatch, len(lengths) // rows_per_microbatch)
    settings["max_completion_length"] = max(lengths)
    prompts = ["abc" * (1 + i % 8) for i in range(len(lengths) // 8)]  # every turn uses all of them
    dataset = Dataset.from_dict({"prompt": prompts})
    with tempfile.TemporaryDirectory() as folder:
        what = model, folder, every_other, dataset, build_tiny_tokenizer(), settings
        trainers = [make_trainer(arm, *what, scripted=lengths) for arm in ARMS.values()]
        return dict(zip(ARMS, take_turns(trainers, repeats), strict=True))


def seconds_of_round(model, sample, num_completions):
    """Return the seconds of the faster of two rounds, because the first may compile."""
    prompts = torch.randint(2, 256, (num_completions, NUM_TOKENS), device=model.device)
    config, seconds = GenerationConfig(do_sample=True, max_new_tokens=NUM_TOKENS, pad_token_id=0, eos_token_id=-1), []
    for _ in range(2):
        synchronize()
        started = time.perf_counter()
        sample(model, prompts, config)
        synchronize()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


SAMPLE = {
    "generate": lambda model, prompts, config: model.generate(prompts, config),
    "continuous batching": lambda model, prompts, config: model.generate_batch(prompts.tolist(), config),
}


def main(repeats=3, rows_per_microbatch=4):
    if not torch.cuda.is_available():
        print("Skipped: no CUDA device.")
        return
    silent()
    lengths = long_tailed_lengths(average=1100, longest=4096)
    tokens = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None, "max_position_embeddings": 32_768}
    with torch.device("cuda"):
        model = make_model(SHAPES[-1], **tokens)
    results = measure(model, lengths, rows_per_microbatch, repeats)
    title = f"{torch.cuda.get_device_name()}, {NUM_ROWS} completions, micro-batches of {rows_per_microbatch}"
    rows = [[name, f"{of['seconds']:.2f}", f"{of['peak_memory'] / 2**30:.1f} GiB"] for name, of in results.items()]
    print_table(title, ("trainer", "seconds per step", "peak memory"), rows)
    seconds, memory = (
        results["DAPOTrainer"][what] / results["GRPOTrainer"][what] for what in ("seconds", "peak_memory")
    )
    say(f"DAPOTrainer / GRPOTrainer: {seconds:.2f} of the seconds, {memory:.2f} of the peak memory")
    columns = ("completions per round", *(f"{name}, s" for name in SAMPLE))
    rows = [
        [f"{num}", *(f"{seconds_of_round(model.eval(), sample, num):.2f}" for sample in SAMPLE.values())]
        for num in NUM_COMPLETIONS
    ]
    print_table(f"a round of {NUM_TOKENS} tokens per completion", columns, rows)

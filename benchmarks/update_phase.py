# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
The update phase of `DAPOTrainer` compared with that of `GRPOTrainer`, on the same scripted rollouts.

    python -m benchmarks update_phase    # a few minutes on two cores
    CUDA_VISIBLE_DEVICES="" accelerate launch --config_file recipes/accelerate/fsdp2.yaml --mixed_precision no \
        --num_processes 2 -m benchmarks update_phase

In one process, micro-batches have 8 rows, one row, or a token budget of twice the longest row. In two processes with
FSDP2 on the CPU, only `DAPOTrainer` runs. The trainers take turns, each with a rollout of one optimizer step at a
learning rate of 0. Times are medians. The benchmark runs on the GPU if there is one. The lengths of the long-tailed
rollout are 64 quantiles of a lognormal distribution (sigma 0.8) with mean 275, cut off at 1,024. Prompts have 16 to 32
tokens.
"""

import ctypes
import gc
import math
import os
import random
import tempfile
import time
from pathlib import Path
from statistics import NormalDist, mean, median

import torch
import transformers
import trl
from accelerate import PartialState
from accelerate.utils import DistributedType
from datasets import Dataset
from transformers import PrinterCallback
from trl import GRPOTrainer

from trl_dapo import DAPOConfig, DAPOTrainer
from trl_dapo.cli.tiny import build_tiny_model, build_tiny_tokenizer

from .frame.runs import silent
from .frame.tables import markdown
from .frame.trainers import Arm, make_trainer


NUM_ROWS = 64
VOCAB_SIZE = 512
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))
# One optimizer step at a learning rate of 0, so that all turns are alike.
ALIKE = {
    "max_steps": 1,
    "learning_rate": 0.0,
    "optim": "sgd",
    "logging_strategy": "no",
    "gradient_checkpointing": True,
}


def step_of(num_rows, num_microbatches):
    """
    Return the settings of a rollout with one optimizer step of `num_microbatches` micro-batches, on the GPU if there
    is one.
    """
    return {
        "per_device_train_batch_size": num_rows,
        "gradient_accumulation_steps": num_microbatches,
        "num_generations": 8,
        "use_cpu": not torch.cuda.is_available(),
    }


def long_tailed_lengths(average=275, longest=1024, sigma=0.8):
    """
    Return quantiles of a lognormal distribution, scaled so that their mean is `average` after the cut at `longest`.
    """

    def lengths(scale):
        quantiles = (NormalDist().inv_cdf((i + 0.5) / NUM_ROWS) for i in range(NUM_ROWS))
        return [max(1, min(longest, round(scale * math.exp(sigma * quantile)))) for quantile in quantiles]

    low, high = 1.0, float(longest)
    while high - low > 1e-3:
        scale = (low + high) / 2
        low, high = (scale, high) if mean(lengths(scale)) < average else (low, scale)
    return lengths(low)


def make_rollout(completion_lengths, prompt_lengths, device):
    """Return a rollout as `GRPOTrainer` builds it, with rows in random order."""
    rows = list(zip(prompt_lengths, completion_lengths, strict=True))
    random.Random(0).shuffle(rows)
    longest_prompt, longest_completion = map(max, zip(*rows, strict=True))
    columns = torch.arange(max(longest_prompt, longest_completion))
    prompts, completions = torch.tensor(rows).T.unsqueeze(2)
    generator = torch.Generator().manual_seed(0)
    prompt_mask = (columns[:longest_prompt].flip(0) < prompts).long()
    completion_mask = (columns[:longest_completion] < completions).long()
    rollout = {
        "prompt_ids": torch.randint(2, VOCAB_SIZE, prompt_mask.shape, generator=generator) * prompt_mask,
        "prompt_mask": prompt_mask,
        "completion_ids": torch.randint(2, VOCAB_SIZE, completion_mask.shape, generator=generator) * completion_mask,
        "completion_mask": completion_mask,
        "advantages": torch.randn(len(rows), generator=generator),
        "num_items_in_batch": completion_mask.sum(),
    }
    return {key: value.to(device) for key, value in rollout.items()}


# ---- Seconds and memory ----


def synchronize():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def reset_peak_memory():
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return
    ctypes.CDLL(None).malloc_trim(0)  # otherwise memory that the last turn freed would count as the start of this turn
    Path("/proc/self/clear_refs").write_text("5")
    reset_peak_memory.start = resident_memory("VmRSS")


def peak_memory():
    """Return the bytes above those at the start of the turn."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resident_memory("VmHWM") - reset_peak_memory.start


def resident_memory(field):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}: on the CPU, this benchmark needs Linux.")


class Turns:
    """A trainer whose turns are all alike. It adds up the seconds of training steps."""

    def __init__(self, scripted, **kwargs):
        self.scripted = scripted
        super().__init__(**kwargs)
        self.remove_callback(PrinterCallback)

    def training_step(self, *args):
        synchronize()
        start, cpu_start = time.perf_counter(), time.process_time()
        output = super().training_step(*args)
        synchronize()
        self.seconds += time.perf_counter() - start
        self.cpu_seconds += time.process_time() - cpu_start
        return output

    def turn(self):
        """Train on one rollout; return what it cost."""
        self.seconds = self.cpu_seconds = 0.0
        torch.manual_seed(0)  # so that the same random numbers assign the rows to optimizer steps
        reset_peak_memory()
        self.train()
        return {"seconds": self.seconds, "cpu_seconds": self.cpu_seconds, "peak_memory": peak_memory()}


def take_turns(trainers, repeats):
    """Return medians of what a turn of each trainer costs. The first turn warms up."""
    turns = [[trainer.turn() for trainer in trainers] for _ in range(repeats + 1)][1:]
    return [{name: median(turn[name] for turn in each) for name in each[0]} for each in zip(*turns, strict=True)]


# ---- Trainers ----


class Scripted(Turns):
    """A trainer on a given rollout that counts passes and padded tokens."""

    config_class = DAPOConfig

    def _generate_and_score_completions(self, inputs):
        return dict(self.scripted)

    def _compute_loss(self, model, inputs):
        padded_tokens = inputs["prompt_ids"].numel() + inputs["completion_ids"].numel()
        self.passes, self.padded_tokens = self.passes + 1, self.padded_tokens + padded_tokens
        self.peak_tokens = max(self.peak_tokens, padded_tokens)
        return super()._compute_loss(model, inputs)

    def turn(self):
        self.passes = self.padded_tokens = self.peak_tokens = 0
        return super().turn()


class Ours(Scripted, DAPOTrainer):
    label = "DAPOTrainer"


class TRLs(Scripted, GRPOTrainer):
    label = "GRPOTrainer"


def trainer_of(way, lengths, hidden_size, output_dir):
    """
    Return a trainer. `way` is a class, rows per micro-batch, and a token budget or `None`; `lengths` are those of
    completions and prompts.
    """
    cls, num_rows, budget = way
    settings = ALIKE | step_of(num_rows, NUM_ROWS // (num_rows * WORLD_SIZE))
    settings |= {"max_tokens_per_microbatch": budget, "use_dynamic_sampling": False, "max_grad_norm": 0.0}
    rollout = make_rollout(*lengths, "cuda" if torch.cuda.is_available() else "cpu")
    if WORLD_SIZE > 1:
        # accelerate shards over accelerators only, although FSDP2 can also shard over CPUs.
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        rank = PartialState().process_index
        rollout = {name: it[rank::WORLD_SIZE].contiguous() if it.dim() else it for name, it in rollout.items()}
    sizes = {"hidden_size": hidden_size, "intermediate_size": 2 * hidden_size, "head_dim": hidden_size // 4}
    tokenizer, dataset = build_tiny_tokenizer(), Dataset.from_dict({"prompt": ["a"] * NUM_ROWS})
    model = build_tiny_model(tokenizer, seed=0, vocab_size=VOCAB_SIZE, num_hidden_layers=4, **sizes)
    what = model, output_dir, lambda completions, **kwargs: [0.0] * len(completions), dataset, tokenizer
    return make_trainer(Arm(cls, {}), *what, settings, scripted=rollout)


def rows_of(name, lengths, ways, repeats, hidden_size, output_dir):
    """Train on one rollout in several ways; return the table cells of each."""
    trainers = [trainer_of(way, lengths, hidden_size, output_dir) for way in ways]
    costs, first = take_turns(trainers, repeats), trainers[0]
    for (cls, num_rows, budget), trainer, cost in zip(ways, trainers, costs, strict=True):
        how = f"{num_rows} row{'s' * (num_rows > 1)}" if budget is None else f"{budget:,} tokens"

        def with_ratio(text, mine, theirs):
            return f"{text} ({mine / theirs:.2f}x)"

        yield (
            name,
            f"{cls.label}, {how}",
            with_ratio(trainer.passes, trainer.passes, first.passes),
            with_ratio(f"{trainer.padded_tokens:,}", trainer.padded_tokens, first.padded_tokens),
            f"{trainer.peak_tokens:,}",
            *(with_ratio(f"{cost[what]:.2f}", cost[what], costs[0][what]) for what in ("seconds", "cpu_seconds")),
            with_ratio(f"{cost['peak_memory'] / 2**20:.0f} MiB", cost["peak_memory"], costs[0]["peak_memory"]),
        )


COLUMNS = (
    *("rollout", "trainer, micro-batches of", "passes", "padded tokens", "peak tokens", "seconds", "CPU seconds"),
    "peak memory",
)


def main(repeats=5, hidden_size=64):
    silent()
    draw, long_tailed = random.Random(0), long_tailed_lengths()
    prompts = [draw.randint(16, 32) for _ in range(NUM_ROWS)]
    trls, ours, budget = (TRLs, 8, None), (Ours, 8, None), (Ours, 1, 2 * (max(long_tailed) + max(prompts)))
    row_by_row = (Ours, 1, None)
    lengths = long_tailed, prompts
    settings = [
        ("long-tailed", lengths, [trls, (TRLs, 1, None), ours, row_by_row, budget]),
        ("equal lengths", ([275] * NUM_ROWS, [24] * NUM_ROWS), [trls, ours, row_by_row, budget]),
    ]
    if WORLD_SIZE > 1:
        settings = [("long-tailed", lengths, [row_by_row, ours, budget])]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    with tempfile.TemporaryDirectory() as folder:
        rows = [row for setting in settings for row in rows_of(*setting, repeats, hidden_size, folder)]
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"trl {trl.__version__}, transformers {transformers.__version__}, torch {torch.__version__}, {device}")
        processes = "process" if WORLD_SIZE == 1 else "processes with FSDP2"
        print(f"{WORLD_SIZE} {processes}, median of {repeats}, hidden size {hidden_size}, float32\n")
        print("\n".join(markdown(COLUMNS, rows)))

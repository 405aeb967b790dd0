# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
How the sampler's and the batcher's own time and memory grow, up to the paper's 512 prompts x 16 completions x 20,480.

    python benchmarks/memory_and_scale.py           # one minute
    python benchmarks/memory_and_scale.py --full    # five repetitions, up to twice the paper's size

From each size to the next one of prompts, completions and length doubles. Generation is scripted, as in
`sampling_bookkeeping.py`, which the sampler's part runs. The batcher's part is what happens to the rows of one
optimizer step, a sixteenth of the rollout as in the paper: they are joined, measured, cut into micro-batches of equal
padded cost, and trimmed. One process handles all rows; in training each handles its share. A slope of 1 on the log-log
scale means cost in proportion to size.
"""

import argparse
import copy
import time
import tracemalloc
from pathlib import Path

import numpy as np
import sampling_bookkeeping
import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from update_phase import peak_memory, reset_peak_memory

from trl_dapo.update.microbatches import cut
from trl_dapo.update.rows import index_rows, join_rows, resize, row_lengths, widths


NUM_STEPS = 16
ROWS_PER_MICROBATCH = 8
COSTS = ("sampler's seconds", "sampler's MB", "batcher's seconds", "batcher's MB")


def sizes(args):
    """Sizes as `sampling_bookkeeping` takes them, each half the next in one dimension."""
    size = sampling_bookkeeping.parse_args([])
    names = ("num_prompts", "max_length", "num_generations")
    if args.full:
        size.num_prompts *= 2
    for name in ("num_prompts", "num_generations", "max_length", "median_length"):
        setattr(size, name, max(2, int(getattr(size, name) * args.scale)))
    ladder = [size]
    for i in range(args.num_doublings):
        size = copy.copy(size)
        name = names[i % len(names)]
        setattr(size, name, getattr(size, name) // 2)
        if name == "max_length":
            size.median_length //= 2
        ladder.append(size)
    return ladder[::-1]


def num_tokens(size):
    return size.num_prompts * size.num_generations * size.max_length


def sampler_cost(size):
    """Seconds and megabytes of the sampler, for one rollout."""
    seconds, *_ = sampling_bookkeeping.rollout(sampling_bookkeeping.Script(size), size)

    # What is generated first is not the sampler's; later rounds are.
    def trace():
        if not tracemalloc.is_tracing():
            tracemalloc.start()

    sampling_bookkeeping.rollout(sampling_bookkeeping.Script(size), size, after_generation=trace)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return seconds, peak / 1e6


def make_parts(size):
    """One optimizer step's rows as TRL leaves them: parts of a rollout padded to its longest completion."""
    generator = np.random.default_rng(size.seed)
    num_rows = max(ROWS_PER_MICROBATCH, size.num_prompts * size.num_generations // NUM_STEPS)
    lengths = np.clip(generator.lognormal(np.log(size.median_length), 0.8, num_rows), 16, size.max_length)
    lengths[0] = size.max_length
    parts = []
    for start in range(0, num_rows, ROWS_PER_MICROBATCH):
        lengths_B = torch.from_numpy(lengths[start : start + ROWS_PER_MICROBATCH]).long()
        completion_mask = (torch.arange(size.max_length) < lengths_B[:, None]).long()
        parts.append(
            {
                "prompt_ids": torch.ones(len(lengths_B), 200, dtype=torch.long),
                "prompt_mask": torch.ones(len(lengths_B), 200, dtype=torch.long),
                "completion_ids": completion_mask.clone(),
                "completion_mask": completion_mask,
                "old_per_token_logps": torch.zeros(len(lengths_B), size.max_length),
                "advantages": torch.zeros(len(lengths_B)),
            }
        )
    return parts


def make_microbatches(parts):
    """What the update phase does with the rows of one optimizer step on one process."""
    rows = join_rows(parts, pad_token_id=0)
    lengths = [tuple(pair) for pair in row_lengths(rows["prompt_mask"], rows["completion_mask"]).tolist()]
    return [
        resize(index_rows(rows, torch.tensor(indices)), *widths([lengths[row] for row in indices]), pad_token_id=0)
        for indices in cut(lengths, len(parts))
    ]


def batcher_cost(size):
    """Seconds of the batcher, and the megabytes by which the process grew, for one optimizer step."""
    parts = make_parts(size)
    reset_peak_memory()
    started = time.process_time()
    microbatches = make_microbatches(parts)
    seconds = time.process_time() - started
    assert sum(len(batch["advantages"]) for batch in microbatches) == sum(len(part["advantages"]) for part in parts)
    return seconds, peak_memory() / 1e6


def slope(tokens, costs):
    """Least-squares slope on the log-log scale."""
    positive = [(x, y) for x, y in zip(tokens, costs, strict=True) if y > 0]
    return np.polyfit(*np.log(np.array(positive)).T, deg=1)[0]


def plot(tokens, costs, path):
    """Both costs over the size, on the log-log scale."""
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    for axes, unit in zip(figure.subplots(1, 2), ("seconds", "MB"), strict=True):
        for name in COSTS:
            if name.endswith(unit):
                label = f"{name.split(chr(39))[0]}, slope {slope(tokens, costs[name]):.2f}"
                axes.loglog(tokens, costs[name], marker="o", label=label)
        axes.set(xlabel="prompts x completions x longest completion", ylabel=unit)
        axes.grid(alpha=0.3)
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="five repetitions, up to twice the paper's size")
    parser.add_argument("--repeats", type=int, help="repetitions, of which the median counts (default: 1)")
    parser.add_argument("--num-doublings", type=int, default=9, help="sizes but one (default: %(default)s)")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="factor on each of prompts, completions and length (default: 1)"
    )
    parser.add_argument("--plot", type=Path, help="draw the costs here, as a PNG")
    args = parser.parse_args(argv)
    args.repeats = args.repeats or (5 if args.full else 1)
    return args


def main(argv=None):
    args = parse_args(argv)
    torch.set_num_threads(1)
    ladder = sizes(args)
    table = Table("prompts x completions x longest", title="Own cost: sampler a rollout, batcher an optimizer step")
    for name in COSTS:
        table.add_column(name, justify="right")
    batcher_cost(ladder[0])  # the first call pays for what is loaded late
    costs = {name: [] for name in COSTS}
    for size in ladder:
        measured = [(*sampler_cost(size), *batcher_cost(size)) for _ in range(args.repeats)]
        medians = np.median(measured, axis=0)
        for name, value in zip(COSTS, medians, strict=True):
            costs[name].append(value)
        cells = [
            f"{value:,.3f}" if "seconds" in name else f"{value:,.1f}"
            for name, value in zip(COSTS, medians, strict=True)
        ]
        table.add_row(f"{size.num_prompts} x {size.num_generations} x {size.max_length:,}", *cells)
    tokens = [num_tokens(size) for size in ladder]
    table.add_section()
    table.add_row("slope on the log-log scale", *(f"{slope(tokens, costs[name]):.2f}" for name in COSTS))
    Console(width=110).print(table)
    if args.plot:
        plot(tokens, costs, args.plot)


if __name__ == "__main__":
    main()

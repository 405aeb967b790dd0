# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""What sampling and training cost on this machine: tokens per CPU second and per second of the wall clock."""

import time
from contextlib import nullcontext

import torch
from rich.table import Table
from transformers import ContinuousBatchingConfig

from .task import MAX_LENGTH, Problems, make_model, make_tokenizer
from .training import NUM_GENERATIONS, NUM_PROMPTS, autocast


ROWS = NUM_PROMPTS * NUM_GENERATIONS
TRAIN_ROWS = 32  # of an optimizer step
NUM_TRIES = 2  # the first one pays for what is set up once, and does not count


def print_costs(console, num_new_tokens=MAX_LENGTH):
    """Sampling, every completion up to the limit, and a step's gradient, for one thread and for two."""
    tokenizer, model = make_tokenizer(), make_model(0)
    prompts = [f"{problem}=" for problem in Problems(0).draw(ROWS)]

    def sample(num_rows, mixed, **settings):
        batch = tokenizer(prompts[:num_rows], return_tensors="pt", padding=True, return_token_type_ids=False)
        with torch.no_grad(), autocast() if mixed else nullcontext():
            model.generate(**batch, **how_long, disable_compile=True, **settings)
        return num_rows * num_new_tokens

    def sample_continuously(num_rows):
        config = model.generation_config.__class__(**how_long)
        ids = tokenizer(prompts[:num_rows], return_token_type_ids=False)["input_ids"]
        blocks = ContinuousBatchingConfig(num_blocks=num_rows * 4, max_batch_tokens=4 * num_rows)
        with torch.no_grad():
            found = model.generate_batch(ids, config, continuous_batching_config=blocks, progress_bar=False)
        return sum(len(output.generated_tokens) for output in found.values())

    def train(mixed):
        ids = torch.randint(3, len(tokenizer), (TRAIN_ROWS, num_new_tokens + 8))
        with autocast() if mixed else nullcontext():
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return ids.numel()

    # Without an end, so that all completions are equally long.
    how_long = {"do_sample": True, "top_k": 0, "max_new_tokens": num_new_tokens, "eos_token_id": -1}
    ways = {
        f"sample {TRAIN_ROWS} rows": lambda: sample(TRAIN_ROWS, False),
        f"sample {ROWS} rows": lambda: sample(ROWS, False),
        f"sample {ROWS} rows, bfloat16": lambda: sample(ROWS, True),
        # Under autocast its keys and values would have two types.
        f"sample {ROWS} rows, static cache": lambda: sample(ROWS, False, cache_implementation="static"),
        f"sample {ROWS} rows, continuous batching": lambda: sample_continuously(ROWS),
        f"train on {TRAIN_ROWS} rows": lambda: train(False),
        f"train on {TRAIN_ROWS} rows, bfloat16": lambda: train(True),
    }
    table = Table("", title=f"{model.num_parameters():,} parameters: tokens a CPU second, and a second")
    for threads in ("1 thread", "2 threads"):
        for column in ("CPU", "wall"):
            table.add_column(f"{threads}, {column}", justify="right")
    for way, spend in ways.items():
        table.add_row(way, *(f"{rate:,.0f}" for threads in (1, 2) for rate in rates(spend, threads)))
    console.print(table)


def rates(spend, num_threads):
    """Tokens per CPU second and per second, of the last try."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        for _ in range(NUM_TRIES):
            cpu, wall = time.process_time(), time.perf_counter()
            num_tokens = spend()
            spent = time.process_time() - cpu, time.perf_counter() - wall
    finally:
        torch.set_num_threads(before)
    return [num_tokens / seconds for seconds in spent]

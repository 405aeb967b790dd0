# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
How the sampler's own time and memory grow, up to the paper's 512 prompts x 16 completions x 20,480.

    python -m benchmarks memory_and_scale    # one minute

From each size to the next one of prompts, completions and length doubles. Generation is scripted: completions are
slices of one list of tokens, made before the clock starts. The sampler's part is what the `Sampler` and the trainer
around it do: prompts are drawn, rows kept as arrays, groups accepted or dropped, the batch made, handed out, and its
rows read back once as TRL reads them. One process handles all rows; in training each handles its share. Seconds are
the CPU's, so that other work on the machine does not count.
"""

import random
import time
import tracemalloc
from typing import NamedTuple

import numpy as np
import torch
from datasets import Dataset

from trl_dapo.sampling.drop_reasons import Criterion, count_correct, drop_reasons
from trl_dapo.sampling.prompts import PromptStream
from trl_dapo.sampling.rounds import Rows, assign_to_ranks, select_groups
from trl_dapo.sampling.sampler import Sampler

from .frame.tables import print_table, say
from .sampling_policies import blank_round


ACCEPTANCE = 0.55
ROLLOUT_SECONDS = 300.0


class Size(NamedTuple):
    num_prompts: int
    num_generations: int
    max_length: int
    median_length: int

    @property
    def num_tokens(self):
        return self.num_prompts * self.num_generations * self.max_length

    def draw_lengths(self, rng, num_rows):
        return np.clip(rng.lognormal(np.log(self.median_length), 0.8, num_rows), 16, self.max_length).astype(int)


PAPER = Size(512, 16, 20_480, 2_500)


def sizes(num_doublings=9, scale=1.0):
    """Each half the next in one dimension, up to the paper's or some share of it in each."""
    ladder = [Size(*(max(2, int(value * scale)) for value in PAPER))]
    for i in range(num_doublings):
        names = (("num_prompts",), ("max_length", "median_length"), ("num_generations",))[i % 3]
        ladder.append(ladder[-1]._replace(**{name: getattr(ladder[-1], name) // 2 for name in names}))
    return ladder[::-1]


class Script:
    """Rounds as TRL's `_generate` would return them: lists of Python integers and floats."""

    def __init__(self, size):
        self._rng, self._size = np.random.default_rng(0), size
        # Shared by all rows: what a list costs TRL is not what is measured here.
        pool = random.Random(0)
        self._tokens = [pool.randrange(150_000) for _ in range(size.max_length)]
        self._logprobs = [-pool.random() for _ in range(size.max_length)]

    def round(self, num_prompts):
        num_rows = num_prompts * self._size.num_generations
        lengths = self._size.draw_lengths(self._rng, num_rows).tolist()
        completion_ids, logprobs = ([some[:n] for n in lengths] for some in (self._tokens, self._logprobs))
        mixed_N = self._rng.random(num_prompts) < ACCEPTANCE
        rewards_NG = np.ones((num_prompts, self._size.num_generations))
        rewards_NG[mixed_N, 0] = -1
        prompt_ids, texts = [self._tokens[:200]] * num_rows, ["text"] * num_rows
        generated = prompt_ids, completion_ids, None, texts, logprobs, {}, None, []
        return generated, torch.tensor(rewards_NG).view(-1, 1)


class Clock:
    """CPU seconds spent inside it."""

    seconds = 0.0

    def __enter__(self):
        self._started = time.process_time()

    def __exit__(self, *error):
        self.seconds += time.process_time() - self._started


def rollout(size, after_generation=lambda: None):
    """One rollout batch; returns the sampler's seconds, the bytes of all rows' arrays, and the tokens generated."""
    G, num_bytes, num_tokens, clock, script = size.num_generations, 0, 0, Clock(), Script(size)
    dataset = Dataset.from_dict({"id": range(10 * size.num_prompts)})
    sampler = Sampler(PromptStream(dataset, seed=0), target=size.num_prompts, num_generations=G)
    sampler.acceptance.update(round(100 * ACCEPTANCE), 100)  # a run under way knows its rate
    with clock:
        sampler.begin()
        prompts = sampler.next_prompts()
    while prompts:
        generated, rewards = script.round(len(prompts))
        num_tokens += sum(map(len, generated[1]))
        after_generation()
        with clock:
            rows = Rows.from_generated(generated, generated[3])
            del generated
            rewards_NG, masked_NG = rewards.view(-1, G), torch.zeros(len(prompts), G, dtype=torch.bool)
            reasons = drop_reasons(rewards_NG, masked_NG, Criterion())
            counts = count_correct(rewards_NG, masked_NG, reasons, Criterion())
            sampler.add_round(blank_round([ask.name for ask in prompts], rewards, rows), reasons, counts)
        columns = rows.prompt_ids, rows.completion_ids, rows.logprobs
        num_bytes += sum(array.nbytes for column in columns for array in column if array is not None)
        with clock:
            prompts = sampler.next_prompts()
    with clock:
        batch, rounds = sampler.batch(), sampler.rollout.rounds
        rows = assign_to_ranks(rounds, batch.train, batch.fill, G, torch.device("cpu"))
        select_groups(rounds, [round_.rewards_BF for round_ in rounds], [*batch.train, *batch.fill], G)
        for column in rows.as_generated()[:5]:
            for _ in column or ():
                pass
    return clock.seconds, num_bytes, num_tokens


def sampler_cost(size):
    """Seconds and megabytes of the sampler, for one rollout, with the megabytes of its arrays and the tokens."""
    seconds, *_ = rollout(size)

    # What is generated first is not the sampler's; later rounds are.
    def trace():
        if not tracemalloc.is_tracing():
            tracemalloc.start()

    _, num_bytes, num_tokens = rollout(size, after_generation=trace)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return seconds, peak / 1e6, num_bytes / 1e6, num_tokens


def main(num_doublings=9, scale=1.0):
    torch.set_num_threads(1)
    rows = []
    for size in sizes(num_doublings, scale):
        seconds, megabytes, of_arrays, num_tokens = sampler_cost(size)
        name = f"{size.num_prompts} x {size.num_generations} x {size.max_length:,}"
        rows.append([name, f"{seconds:,.3f}", f"{megabytes:,.1f}"])
    columns = "prompts x completions x longest", "sampler's seconds", "sampler's MB"
    print_table("Own cost: sampler a rollout", columns, rows)
    say(
        f"The largest, {num_tokens / 1e6:.0f} M tokens generated: {seconds / ROLLOUT_SECONDS:.2%} of a rollout of 5 "
        f"minutes; peak memory {megabytes / 1e3:.2f} GB, {megabytes / of_arrays:.2f} of the rollouts' own arrays"
    )

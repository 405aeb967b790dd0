# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
The sampler's own time and memory, at the paper's 512 prompts x 16 completions x 20,480.

    python -m benchmarks memory_and_scale    # half a minute

Generation is scripted: completions are slices of one list of tokens. What is measured is the `Sampler` and the trainer
around it: prompts drawn, rows kept, groups accepted, the batch made and read back once, in one process. Seconds are
the CPU's.
"""

import random
import tracemalloc

import numpy as np
import torch
from datasets import Dataset

from trl_dapo.sampling.drop_reasons import Criterion, count_correct, drop_reasons
from trl_dapo.sampling.prompts import PromptStream
from trl_dapo.sampling.rounds import Rows, assign_to_ranks, select_groups
from trl_dapo.sampling.sampler import Sampler

from .frame.runs import clock
from .frame.tables import print_table
from .sampling_policies import blank_round


ACCEPTANCE = 0.55
MEDIAN = 2_500 / 20_480  # of a completion's length, over the longest


class Script:
    """Rounds as TRL's `_generate` would return them: lists of Python integers and floats."""

    def __init__(self, num_generations, longest):
        self._rng, self._num_generations, self._longest = np.random.default_rng(0), num_generations, longest
        # Shared by all rows: what a list costs TRL is not what is measured here.
        pool = random.Random(0)
        self._tokens = [pool.randrange(150_000) for _ in range(longest)]
        self._logprobs = [-pool.random() for _ in range(longest)]

    def round(self, num_prompts):
        num_rows = num_prompts * self._num_generations
        lengths = self._rng.lognormal(np.log(MEDIAN * self._longest), 0.8, num_rows)
        lengths = np.clip(lengths, 16, self._longest).astype(int).tolist()
        completion_ids, logprobs = ([some[:n] for n in lengths] for some in (self._tokens, self._logprobs))
        mixed_N = self._rng.random(num_prompts) < ACCEPTANCE
        rewards_NG = np.ones((num_prompts, self._num_generations))
        rewards_NG[mixed_N, 0] = -1
        prompt_ids, texts = [self._tokens[:200]] * num_rows, ["text"] * num_rows
        generated = prompt_ids, completion_ids, None, texts, logprobs, {}, None, []
        return generated, torch.tensor(rewards_NG).view(-1, 1)


def rollout(num_prompts, G, longest, after_generation=lambda: None):
    """One rollout batch; returns the sampler's seconds."""
    script, spent = Script(G, longest), []
    dataset = Dataset.from_dict({"id": range(10 * num_prompts)})
    sampler = Sampler(PromptStream(dataset, seed=0), target=num_prompts, num_generations=G)
    sampler.acceptance.update(round(100 * ACCEPTANCE), 100)  # a run under way knows its rate
    with clock(spent):
        sampler.begin()
        prompts = sampler.next_prompts()
    while prompts:
        generated, rewards = script.round(len(prompts))
        after_generation()
        with clock(spent):
            rows = Rows.from_generated(generated, generated[3])
            del generated
            rewards_NG, masked_NG = rewards.view(-1, G), torch.zeros(len(prompts), G, dtype=torch.bool)
            reasons = drop_reasons(rewards_NG, masked_NG, Criterion())
            counts = count_correct(rewards_NG, masked_NG, reasons, Criterion())
            sampler.add_round(blank_round([ask.name for ask in prompts], rewards, rows), reasons, counts)
            prompts = sampler.next_prompts()
    with clock(spent):
        batch, rounds = sampler.batch(), sampler.rollout.rounds
        rows = assign_to_ranks(rounds, batch.train, batch.fill, G, torch.device("cpu"))
        select_groups(rounds, [round_.rewards_BF for round_ in rounds], [*batch.train, *batch.fill], G)
        for column in rows.as_generated()[:5]:
            for _ in column or ():
                pass
    return sum(spent)


def peak_of(*size):
    """Megabytes of the sampler, for one rollout."""

    # What is generated first is not the sampler's; later rounds are.
    def trace():
        if not tracemalloc.is_tracing():
            tracemalloc.start()

    rollout(*size, after_generation=trace)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak / 1e6


def main(num_prompts=512, num_generations=16, longest=20_480):
    torch.set_num_threads(1)
    size = num_prompts, num_generations, longest
    row = f"{num_prompts} x {num_generations} x {longest:,}", f"{rollout(*size):,.3f}", f"{peak_of(*size):,.1f}"
    columns = "prompts x completions x longest", "sampler's seconds", "sampler's MB"
    print_table("Own cost: sampler a rollout", columns, [row])

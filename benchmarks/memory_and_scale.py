# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
The sampler's own time and memory, at the paper's 512 prompts x 16 completions x 20,480 tokens.

    python -m benchmarks memory_and_scale    # half a minute

Generation is scripted: completions are slices of one list of tokens. The benchmark measures the `Sampler` and the
trainer around it, in one process: prompts are drawn, rows kept, groups accepted, and the batch built and read back
once. Seconds are CPU seconds.
"""

import random
import tracemalloc

import numpy as np
import torch
from accelerate import Accelerator
from datasets import Dataset

from trl_dapo.sampling.prompts import PromptStream
from trl_dapo.sampling.rounds import (
    Round,
    RoundRecording,
    in_batch,
    note_scores,
    plan_scoring,
    receive_rows,
    rows_of_batch,
)
from trl_dapo.sampling.rows import as_generated, rows_from_generated
from trl_dapo.sampling.sampler import Sampler

from .frame.runs import clock
from .frame.tables import print_table
from .sampling_policies import decide


ACCEPTANCE = 0.55
MEDIAN = 2_500 / 20_480  # of a completion's length, over the longest


class Script:
    """Return rounds as TRL's `_generate` would: lists of Python integers and floats."""

    def __init__(self, num_generations, longest):
        self._rng, self._num_generations, self._longest = np.random.default_rng(0), num_generations, longest
        # Shared by all rows, because what lists cost TRL is not measured here.
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
        return generated, lengths, torch.tensor(rewards_NG).view(-1, 1)


def rollout(num_prompts, G, longest, after_generation=lambda: None):
    """Sample one rollout batch; return the sampler's seconds."""
    script, spent = Script(G, longest), []
    dataset = Dataset.from_dict({"id": range(10 * num_prompts)})
    sampler = Sampler(PromptStream(dataset, seed=0), target=num_prompts, num_generations=G)
    sampler.selection.acceptance_record.acceptance.update(
        round(100 * ACCEPTANCE), 100
    )  # like a run that knows its acceptance rate
    accelerator = Accelerator(cpu=True)
    with clock(spent):
        sampler.start_rollout()
        requests = sampler.next_requests()
    while requests:
        generated, lengths, rewards_BF = script.round(len(requests))
        truncated = [length == longest for length in lengths]
        after_generation()
        with clock(spent):
            recording = RoundRecording(
                rows=rows_from_generated(generated, generated[3]), lengths=lengths, truncated=truncated
            )
            del generated
            completions = receive_rows(requests, recording, accelerator)
            note_scores(plan_scoring(requests, completions, num_ranks=1), rewards_BF, {})
            round_ = Round(requests, completions)
            sampler.add(round_)
            for decisions in decide(round_):
                sampler.record_decisions(decisions)
            requests = sampler.next_requests()
    with clock(spent):
        batch = sampler.finish_rollout()
        rows = rows_of_batch(batch.train, batch.fillers, G, torch.device("cpu"))
        in_batch(lambda group: group.rewards, [*batch.train, *batch.fillers], G)
        for column in as_generated(rows)[:5]:
            for _ in column or ():
                pass
    return sum(spent)


def peak_of(*size):
    """Return the megabytes that the sampler takes for one rollout."""

    # Completions of the first round are not the sampler's memory; those of later rounds are.
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
    columns = "prompts x completions x longest completion", "seconds", "MB"
    print_table("What the sampler itself takes per rollout", columns, [row])

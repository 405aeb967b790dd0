# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
What the sampler itself costs at the paper's size: 512 prompts x 16 completions of up to 20,480 tokens.

Generation is scripted: completions are slices of one list of tokens, made before the clock starts. Timed is what the
`Sampler` and the trainer around it do: prompts are drawn, rows kept as arrays, groups accepted or dropped, the batch
made, handed out, and its rows read back once as TRL reads them. All rows are handled by one process; in training each
process handles its share. Seconds are CPU seconds, so that other work on the machine does not count.

    python benchmarks/sampling_bookkeeping.py
"""

import argparse
import random
import time
import tracemalloc

import numpy as np
import torch
from datasets import Dataset
from rich.console import Console

from trl_dapo.sampling.drop_reasons import Criterion, count_correct, drop_reasons
from trl_dapo.sampling.prompts import PromptStream
from trl_dapo.sampling.rounds import Round, Rows, assign_to_ranks, select_groups
from trl_dapo.sampling.sampler import Sampler


ROLLOUT_SECONDS = 300.0


class Script:
    """Rounds as TRL's `_generate` would return them: lists of Python integers and floats."""

    def __init__(self, args):
        self._rng = np.random.default_rng(args.seed)
        self._args = args
        # Shared by all rows: what a list costs TRL is not what is measured here.
        pool = random.Random(args.seed)
        self._tokens = [pool.randrange(150_000) for _ in range(args.max_length)]
        self._logprobs = [-pool.random() for _ in range(args.max_length)]

    def round(self, num_prompts):
        args = self._args
        num_rows = num_prompts * args.num_generations
        lengths = np.clip(self._rng.lognormal(np.log(args.median_length), 0.8, num_rows), 16, args.max_length)
        completion_ids = [self._tokens[: int(length)] for length in lengths]
        logprobs = [self._logprobs[: int(length)] for length in lengths]
        mixed_N = self._rng.random(num_prompts) < args.acceptance
        rewards_NG = np.ones((num_prompts, args.num_generations))
        rewards_NG[mixed_N, 0] = -1
        texts = ["text"] * num_rows
        prompt_ids = [self._tokens[:200]] * num_rows
        generated = prompt_ids, completion_ids, None, texts, logprobs, {}, None, []
        return generated, torch.tensor(rewards_NG).view(-1, 1)


def rollout(script, args, after_generation=lambda: None):
    """One rollout batch; returns the sampler's seconds, the bytes of all rows' arrays, and the tokens generated."""
    G, num_bytes, num_tokens, clock = args.num_generations, 0, 0, Clock()
    dataset = Dataset.from_dict({"id": range(10 * args.num_prompts)})
    sampler = Sampler(PromptStream(dataset, seed=args.seed), target=args.num_prompts, num_generations=G)
    sampler.acceptance.update(round(100 * args.acceptance), 100)  # a run under way knows its rate
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
            blank = torch.zeros(len(rewards))
            names = [ask.name for ask in prompts]
            sampler.add_round(Round(names, rows, rewards, blank, blank.bool(), {}, {}), reasons, counts)
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


class Clock:
    """CPU seconds spent inside it."""

    seconds = 0.0

    def __enter__(self):
        self._started = time.process_time()

    def __exit__(self, *error):
        self.seconds += time.process_time() - self._started


def measure(console, args):
    """Prints the sampler's share of a five-minute rollout and its memory over that of the rollouts' own arrays."""
    torch.manual_seed(args.seed)
    seconds, _, num_tokens = rollout(Script(args), args)

    # Lists are made while tracing is off, so that only the sampler's own memory counts.
    def trace():
        if not tracemalloc.is_tracing():
            tracemalloc.start()

    _, num_bytes, _ = rollout(Script(args), args, after_generation=trace)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    share, ratio = seconds / ROLLOUT_SECONDS, peak / num_bytes
    console.print(
        f"bookkeeping, {args.num_prompts} x {args.num_generations} rows of up to {args.max_length:,} tokens, "
        f"{num_tokens / 1e6:.0f} M tokens generated: {seconds:.2f} CPU s, {share:.2%} of a rollout of 5 minutes; "
        f"peak memory {peak / 1e9:.2f} GB, {ratio:.2f} of the rollouts' own arrays"
    )
    return share, ratio


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0].strip())
    parser.add_argument("--num-prompts", type=int, default=512, help="prompts a rollout batch")
    parser.add_argument("--num-generations", type=int, default=16, help="completions a prompt")
    parser.add_argument("--max-length", type=int, default=20_480, help="longest completion, in tokens")
    parser.add_argument("--median-length", type=int, default=2_500, help="median completion, in tokens")
    parser.add_argument("--acceptance", type=float, default=0.55, help="share of groups that are accepted")
    parser.add_argument("--seed", type=int, default=0, help="seed of the script")
    return parser.parse_args(argv)


if __name__ == "__main__":
    measure(Console(), parse_args())

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
Cost of dynamic-sampling policies: generated groups per trained group, rounds, and missing groups.

    python -m benchmarks sampling_policies    # minutes

Every policy runs on the same seeded traces: datasets of prompts whose pass rates are spread so widely on the log-odds
scale that groups are accepted at a given rate. This package's policy is the `Sampler` that the trainer uses, on groups
without rows. The other policies are modelled on what their code does. No model runs: it is arithmetic on one core.
"""

import itertools
import math
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from datasets import Dataset
from trl.trainer.utils import RepeatSampler

from trl_dapo.sampling.drop_reasons import Criterion, count_correct, drop_reasons
from trl_dapo.sampling.policies import Decisions
from trl_dapo.sampling.prompt_memory import PromptMemory
from trl_dapo.sampling.prompts import PromptStream
from trl_dapo.sampling.rounds import Completion, Round
from trl_dapo.sampling.sampler import Sampler
from trl_dapo.sampling.screen import Screen

from .frame.tables import print_table, say


NUM_PROMPTS, NUM_GENERATIONS = 17_000, 16


# ---- Traces ----


class Trace:
    """The pass rates of prompts, and how many groups must be generated per trained group: 1 / acceptance."""

    def __init__(self, acceptance, num_prompts=NUM_PROMPTS, num_generations=NUM_GENERATIONS, seed=0):
        self.num_prompts, self.num_generations, self.seed = num_prompts, num_generations, seed
        normal_N = np.random.default_rng(seed).standard_normal(num_prompts)
        # The wider the pass rates are spread on the log-odds scale, the more prompts are never or always solved.
        low, high = 0.0, 1000.0
        while high - low > 1e-6:
            width = (low + high) / 2
            self.rate_N = 0.5 + 0.5 * np.tanh((width * normal_N - 0.5) / 2)
            self.least = 1 / np.mean(1 - self.rate_N**num_generations - (1 - self.rate_N) ** num_generations)
            low, high = (width, high) if 1 / self.least > acceptance else (low, width)


class World:
    """The answers of a policy to the prompts of a trace."""

    def __init__(self, trace):
        self.trace, self.step = trace, 0
        self._rng = np.random.default_rng([trace.seed, 1])

    def correct(self, prompts, nums=None):
        """Return the number of correct completions of each prompt's group, or of `nums` completions of each prompt."""
        nums = self.trace.num_generations if nums is None else nums
        return self._rng.binomial(nums, self.trace.rate_N[prompts])

    def accepted(self, prompts):
        """Return whether the rewards of each prompt's group differ."""
        correct = self.correct(prompts)
        return (correct > 0) & (correct < self.trace.num_generations)


class Step(NamedTuple):
    """The cost of one optimizer step."""

    num_generated: int
    num_trained: int
    num_rounds: int
    num_distinct: int | None = None  # different prompts of a full batch, if prompts may come again


# ---- Policies: each yields steps that fill a batch of `target` groups in a world ----


class Shuffled:
    """The order of prompts in the other frameworks: one permutation after another."""

    def __init__(self, trace):
        self._rng = np.random.default_rng([trace.seed, 2])
        self._num_prompts = trace.num_prompts
        self._left = np.empty(0, dtype=int)
        self.num_passes = 0

    def take(self, n):
        while len(self._left) < n:
            self._left = np.concatenate([self._left, self._rng.permutation(self._num_prompts)])
            self.num_passes += 1
        taken, self._left = self._left[:n], self._left[n:]
        return taken


def fixed_rounds(world, target, multiplier, max_rounds=10, forgets_at_pass_end=False):
    """
    verl's recipe and NeMo RL: rounds of a fixed size until the batch is full, which is then cut to its size. Both end
    the run if the rounds are used up (NeMo RL one later than its setting says). Here the step is counted with what it
    has.
    """
    prompts, size = Shuffled(world.trace), int(multiplier * target)
    while True:
        num_accepted = num_rounds = 0
        while num_accepted < target and num_rounds < max_rounds:
            num_passes, asked = prompts.num_passes, prompts.take(size)
            if forgets_at_pass_end and prompts.num_passes > num_passes:
                num_accepted = 0
            num_accepted += world.accepted(asked).sum()
            num_rounds += 1
        yield Step(num_rounds * size, min(num_accepted, target), num_rounds)


def swift(world, target, num_resamples=3, steps_per_generation=16):
    """
    ms-swift 4.6.0, `_dynamic_sampling` of its GRPO trainer with its default of `max_resample_times=3`: a batch, and
    then batches from a second data loader until enough groups have rewards that differ. The last batch is generated
    but never used. If there are still too few groups, the first batch trains unfiltered, and the groups that were
    found are thrown away.

    Both loaders use TRL's `RepeatSampler`, which gives every batch as often as its completions are trained on. The
    training loop takes one batch per step, so each rollout has new prompts. But resampling takes one batch per round,
    so it gets the same prompts again, in this rollout and in the next ones, and a full batch may hold several groups
    of one prompt. 16 is the paper's number of optimizer steps per rollout.

    peers/ms_swift/study.py compares this model with ms-swift itself.
    """

    def loader(**options):
        """Yield the batches of a data loader, pass after pass. What is left over at the end of a pass is dropped."""
        sampler = RepeatSampler(range(world.trace.num_prompts), 1, batch_size=target, **options)
        prompts = itertools.chain.from_iterable(itertools.repeat(sampler))
        while True:
            yield np.array(list(itertools.islice(prompts, target)))

    batches = loader(seed=world.trace.seed)
    more_batches = loader(seed=world.trace.seed + 1, repeat_count=steps_per_generation)
    while True:
        prompts = next(batches)
        accepted = world.accepted(prompts)
        first, found, num_rounds = accepted.sum(), list(prompts[accepted]), 1
        while len(found) < target and num_rounds <= num_resamples:
            prompts, num_rounds = next(more_batches), num_rounds + 1
            accepted = world.accepted(prompts)
            if num_rounds <= num_resamples:
                found.extend(prompts[accepted])
        full = len(found) >= target
        num_distinct = len(set(found[:target])) if full else None
        yield Step(num_rounds * target, target if full else first, num_rounds, num_distinct)


def replace(world, target, min_ratio=0.3, max_rounds=30):
    """
    SkyRL's replace: copies of the accepted groups fill the batch if enough groups were accepted. Otherwise everything
    is sampled again.
    """
    prompts = Shuffled(world.trace)
    while True:
        num_accepted = num_rounds = 0
        while num_accepted <= min_ratio * target and num_rounds < max_rounds:
            num_accepted = world.accepted(prompts.take(target)).sum()
            num_rounds += 1
        yield Step(num_rounds * target, num_accepted, num_rounds)


def waves(world, target):
    """
    slime: groups are checked as they finish, and a further wave starts whenever accepted and running groups are too
    few.
    """
    prompts = Shuffled(world.trace)
    while True:
        num_started = num_finished = num_accepted = 0
        accepted = []
        while num_accepted < target:
            if num_started - (num_finished - num_accepted) < target:
                accepted.extend(world.accepted(prompts.take(target)))
                num_started += target
            num_accepted += accepted[num_finished]
            num_finished += 1
        yield Step(num_started, target, num_started // target)


def greso(world, target, target_zero_variance=0.25, delta=0.01, safety=1.25):
    """
    GRESO (arXiv 2506.02177): skips prompts by their number of zero-variance groups in a row, and sizes rounds by the
    recent share of such groups.
    """
    trace, prompts, rng = world.trace, Shuffled(world.trace), np.random.default_rng([world.trace.seed, 3])
    targets = {"easy": target_zero_variance / 3, "hard": target_zero_variance * 2 / 3}
    explore, zero_share = {"easy": 0.5, "hard": 0.5}, 0.0
    runs, kinds = np.zeros(trace.num_prompts, dtype=int), np.full(trace.num_prompts, "hard")

    def take(n):
        taken = []
        while len(taken) < n:
            (prompt,) = prompts.take(1)
            if rng.random() < explore[kinds[prompt]] ** runs[prompt]:
                taken.append(prompt)
        return np.array(taken)

    while True:
        num_accepted = num_generated = num_rounds = 0
        counts = {"easy": 0, "hard": 0}
        while num_accepted < target:
            deficit = target - num_accepted
            size = deficit if num_rounds == 0 else safety * deficit / max(1 - zero_share, 0.05)
            asked = take(min(math.ceil(size), target))
            correct = world.correct(asked)
            is_zero = {"hard": correct == 0, "easy": correct == trace.num_generations}
            zero = is_zero["hard"] | is_zero["easy"]
            runs[asked] = np.where(zero, runs[asked] + 1, 0)
            for kind, which in is_zero.items():
                kinds[asked[which]] = kind
                counts[kind] += which.sum()
            num_accepted += (~zero).sum()
            num_generated += len(asked)
            num_rounds += 1
            zero_share = sum(counts.values()) / num_generated
        for kind, count in counts.items():
            more = count / num_generated < targets[kind]
            explore[kind] = np.clip(explore[kind] + (delta if more else -delta), 0.05, 1.0)
        yield Step(num_generated, target, num_rounds)


class Ours:
    """The package's `Sampler` with groups that have rewards but no rows."""

    def __init__(self, world, target, carries=False, memory=None, screen=None, **settings):
        trace, self._world = world.trace, world
        known, policies = None, []
        if memory is not None:
            known = memory(seed=trace.seed, num_generations=trace.num_generations)
            policies.append(known)
        if screen is not None:
            policies.append(Screen(screen, known))
        self.sampler = Sampler(
            PromptStream(Dataset.from_dict({"id": range(trace.num_prompts)}), seed=trace.seed),
            target=target,
            num_generations=trace.num_generations,
            carries=carries,
            policies=policies,
            # No limit, so that every batch is full, as in the published figures.
            **{"max_gen_batches": 0.0, **settings},
        )

    def _sample(self, requests):
        nums = [request.num_completions for request in requests]
        num_correct = self._world.correct(np.array([request.group.example["id"] for request in requests]), nums)
        rewards = [float(i < correct) for num, correct in zip(nums, num_correct, strict=True) for i in range(num)]
        return receive(requests, torch.tensor(rewards)[:, None])

    def __next__(self):
        sampler, num_completions = self.sampler, 0
        sampler.start_rollout()
        while requests := sampler.next_requests():
            round_ = self._sample(requests)
            num_completions += len(round_.completions)
            sampler.add(round_)
            for decisions in decide(round_, self._world.step):
                sampler.record_decisions(decisions)
        batch = self.batch = sampler.finish_rollout()
        return Step(num_completions / sampler.num_generations, len(batch.train), sampler.rollout.num_rounds)


def receive(requests, rewards_BF, lengths_B=None, truncated_B=None):
    """Return the round of these requests. Their completions have joined their groups, without rows."""
    blank_B = torch.zeros(len(rewards_BF), dtype=torch.long)
    lengths = (blank_B if lengths_B is None else lengths_B).tolist()
    truncated = (blank_B.bool() if truncated_B is None else truncated_B).tolist()
    completions, start = [], 0
    for request in requests:
        group, num_known = request.group, request.group.num_received
        completions += [Completion(group, num_known + i) for i in range(request.num_completions)]
        group.receive(request, [0] * request.num_completions)
        new = slice(start, start + request.num_completions)
        group.lengths += lengths[new]
        group.truncated += truncated[new]
        group.rewards = torch.cat([group.rewards, rewards_BF[new]]) if num_known else rewards_BF[new]
        start = new.stop
    return Round(requests, completions)


def decide(round_, step=0):
    """Return the groups of a round by their size, with the reason to drop each, as the trainer decides."""
    by_size = {}
    for request in round_.requests:
        num_known = request.group.num_received - request.num_completions
        by_size.setdefault((num_known, request.group.num_received), []).append(request.group)
    for num_known, size in sorted(by_size, key=lambda sizes: (-sizes[0], sizes[1])):
        groups = by_size[num_known, size]
        rewards_NG = torch.cat([group.rewards for group in groups]).view(len(groups), -1)
        reasons = drop_reasons(rewards_NG, None, Criterion())
        counts = count_correct(rewards_NG, None, reasons, Criterion(), num_known)
        yield Decisions(groups, reasons, num_known, counts, step)


OURS, CARRY, MEMORY = "paper", "carry", "carry, memory"
POLICIES = {
    "verl recipe, 3x": partial(fixed_rounds, multiplier=3),
    "NeMo RL, 1x": partial(fixed_rounds, multiplier=1, max_rounds=11, forgets_at_pass_end=True),
    "NeMo RL, 3x": partial(fixed_rounds, multiplier=3, max_rounds=11, forgets_at_pass_end=True),
    "ms-swift": swift,
    "SkyRL replace": replace,
    "slime waves": waves,
    "GRESO": greso,
    OURS: Ours,
    CARRY: partial(Ours, carries=True),
    MEMORY: partial(Ours, carries=True, memory=PromptMemory),
}


# ---- What they cost ----


class Run(NamedTuple):
    """The cost of a run of a policy."""

    per_trained: float
    over_least: float
    rounds_per_step: float
    shortfall: float
    num_distinct: list[int]


def run(policy, trace, target, num_steps):
    """Run a policy on a trace."""
    world, steps = World(trace), []
    play = policy(world, target)
    for world.step in range(num_steps):
        steps.append(next(play))
    num_generated, num_trained, num_rounds = (sum(column) for column in list(zip(*steps, strict=True))[:3])
    per_trained, shortfall = num_generated / num_trained, 1 - num_trained / (target * num_steps)
    distinct = [step.num_distinct for step in steps if step.num_distinct is not None]
    return Run(per_trained, per_trained / trace.least, num_rounds / num_steps, shortfall, distinct)


def compare(target, num_steps):
    """Print one table per trace, with a row per policy; return the results by policy and acceptance."""
    results = {}
    columns = ("policy", "generated / trained", "compared with 1 / acceptance rate", "rounds / step", "shortfall")
    for acceptance in (0.55, 0.33, 0.1):
        trace, rows = Trace(acceptance), []
        for name, policy in POLICIES.items():
            cost = results[name, acceptance] = run(policy, trace, target, num_steps)
            cells = f"{cost.per_trained:.2f}", f"{cost.over_least:.3f}", f"{cost.rounds_per_step:.2f}"
            rows.append([name, *cells, f"{cost.shortfall:.1%}"])
        title = f"{target} prompts, acceptance {acceptance}, {num_steps} steps"
        print_table(title, columns, rows)
    return results


def tell_repetitions(sizes):
    """Print how many prompts ms-swift's full batches hold, which the tables do not show."""
    for (target, results), acceptance in itertools.product(sizes.items(), (0.55, 0.33)):
        num_distinct = results["ms-swift", acceptance].num_distinct
        say(
            f"ms-swift, acceptance {acceptance}: {len(num_distinct)} batches were filled up, with "
            f"{np.mean(num_distinct):.1f} different prompts of {target} on average, {min(num_distinct)} at least"
        )


def main(num_steps=400):
    sizes = {target: compare(target, num_steps) for target in (512, 16)}
    tell_repetitions(sizes)

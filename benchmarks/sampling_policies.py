# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
What a dynamic-sampling policy costs: generated groups per trained group, rounds, shortfalls.

Every policy runs on the same seeded traces: a dataset of prompts whose pass rates are spread so widely on the log-odds
scale that groups are accepted at a given rate, and which in the drifting traces rise as the policy learns (by one unit
of log-odds on average over a run). Ours is the `Sampler` that the trainer drives, on rounds without rows; the others
are modelled after what their code does, without their machinery. No model runs: it is arithmetic on one core.

    python benchmarks/sampling_policies.py           # thirteen minutes
    python benchmarks/sampling_policies.py --full    # longer runs, less noise
"""

import argparse
import itertools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import sampling_bookkeeping
import torch
from datasets import Dataset
from rich.console import Console
from rich.table import Table
from trl.trainer.utils import RepeatSampler

from trl_dapo.sampling.drop_reasons import Criterion, count_correct, drop_reasons
from trl_dapo.sampling.prompt_memory import PromptMemory
from trl_dapo.sampling.prompts import PromptStream
from trl_dapo.sampling.round_size import AcceptanceRate
from trl_dapo.sampling.rounds import Round, Rows, select_ages, select_rewards
from trl_dapo.sampling.sampler import Sampler
from trl_dapo.sampling.screening import to_carry


class Trace:
    """The pass rate of every prompt at every step. `drift` is the mean rise per step, in log-odds."""

    def __init__(self, *, acceptance, drift, num_prompts, num_generations, seed, mean_logit=-0.5):
        self.num_prompts = num_prompts
        self.num_generations = num_generations
        self.seed = seed
        rng = np.random.default_rng(seed)
        normal_N = rng.standard_normal(num_prompts)
        # The wider the pass rates are spread on the log-odds scale, the more prompts are hopeless or solved.
        low, high = 0.0, 1000.0
        while high - low > 1e-6:
            width = (low + high) / 2
            self._logit_N = mean_logit + width * normal_N
            self._speed_N = np.zeros(num_prompts)
            low, high = (width, high) if 1 / self.least(0) > acceptance else (low, width)
        # Most prompts hardly move while some are learnt quickly.
        self._speed_N = drift * rng.exponential(1.0, num_prompts)

    def rates(self, step):
        """Pass rate of every prompt at a step."""
        return 0.5 + 0.5 * np.tanh((self._logit_N + step * self._speed_N) / 2)

    def least(self, step):
        """Groups that must be generated per trained group at a step: one over the acceptance rate of the dataset."""
        rate_N = self.rates(step)
        return 1 / np.mean(1 - rate_N**self.num_generations - (1 - rate_N) ** self.num_generations)


class World:
    """Answers prompts as the policy of a trace would, and counts what was asked."""

    def __init__(self, trace):
        self.trace = trace
        self.step = 0
        self._rng = np.random.default_rng([trace.seed, 1])

    def correct(self, prompts, nums=None):
        """Correct completions of each prompt's group, or of so many of each."""
        nums = self.trace.num_generations if nums is None else nums
        return self._rng.binomial(nums, self.trace.rates(self.step)[prompts])

    def accepted(self, prompts):
        """Whether each prompt's group has spread."""
        correct = self.correct(prompts)
        return (correct > 0) & (correct < self.trace.num_generations)


class Shuffled:
    """The peers' prompt order: one permutation after another."""

    def __init__(self, num_prompts, seed):
        self._rng = np.random.default_rng([seed, 2])
        self._num_prompts = num_prompts
        self._left = np.empty(0, dtype=int)
        self.num_passes = 0

    def take(self, n):
        while len(self._left) < n:
            self._left = np.concatenate([self._left, self._rng.permutation(self._num_prompts)])
            self.num_passes += 1
        taken, self._left = self._left[:n], self._left[n:]
        return taken


@dataclass
class Step:
    """What one optimizer step cost."""

    num_generated: int
    num_trained: int
    num_rounds: int


class FixedRounds:
    """
    verl's recipe and NeMo RL: rounds of a fixed size until the batch is full, then cut to it. Both end the run where
    the rounds are used up (NeMo RL one later than its setting says); here the step is counted with what it has.
    """

    def __init__(self, world, target, multiplier, max_rounds=10, forgets_at_pass_end=False):
        self._world = world
        self._target = target
        self._size = int(multiplier * target)
        self._max_rounds = max_rounds
        self._forgets = forgets_at_pass_end
        self._prompts = Shuffled(world.trace.num_prompts, world.trace.seed)

    def __call__(self):
        num_accepted = num_rounds = 0
        while num_accepted < self._target and num_rounds < self._max_rounds:
            num_passes = self._prompts.num_passes
            prompts = self._prompts.take(self._size)
            if self._forgets and self._prompts.num_passes > num_passes:
                num_accepted = 0
            num_accepted += self._world.accepted(prompts).sum()
            num_rounds += 1
        return Step(num_rounds * self._size, min(num_accepted, self._target), num_rounds)


class Swift:
    """
    ms-swift 4.6.0, `_dynamic_sampling` of its GRPO trainer with its default of `max_resample_times=3`: a batch, then
    batches from a second data loader until enough of their groups have spread. The last one is generated but never
    looked at; where there are still too few, the first batch trains unfiltered and what was found is thrown away.

    Both loaders are over TRL's `RepeatSampler`, which gives every batch as often as its completions are trained on,
    `steps_per_generation * num_iterations` times. The training loop takes one batch a step, so each rollout has new
    prompts; but the resampling takes one a round, so it is given the same prompts again, in this rollout and in the
    next ones, and a full batch may hold several groups of one prompt. 16 is the paper's number of optimizer steps a
    rollout, and the fewest times that a batch can come there: each step is one micro-batch.

    peers/ms_swift/side_by_side.py holds this model to ms-swift itself: told which groups had spread, it asks the same
    prompts in the same rounds and fills, or does not fill, the same batches.
    """

    def __init__(self, world, target, num_resamples=3, steps_per_generation=16):
        self._world = world
        self._target = target
        self._num_resamples = num_resamples
        self._batches = self._loader(seed=world.trace.seed)
        self._more_batches = self._loader(seed=world.trace.seed + 1, repeat_count=steps_per_generation)
        self.num_distinct = []  # prompts, in each full batch

    def _loader(self, **options):
        """The batches of a data loader, pass after pass; what is left over at the end of a pass is dropped."""
        sampler = RepeatSampler(range(self._world.trace.num_prompts), 1, batch_size=self._target, **options)
        prompts = itertools.chain.from_iterable(itertools.repeat(sampler))
        while True:
            yield np.array(list(itertools.islice(prompts, self._target)))

    def __call__(self):
        prompts = next(self._batches)
        accepted = self._world.accepted(prompts)
        first, found = accepted.sum(), []
        for resample in range(self._num_resamples):
            found.extend(prompts[accepted])
            if len(found) >= self._target:
                self.num_distinct.append(len(set(found[: self._target])))
                return Step((resample + 1) * self._target, self._target, resample + 1)
            prompts = next(self._more_batches)
            accepted = self._world.accepted(prompts)
        return Step((self._num_resamples + 1) * self._target, first, self._num_resamples + 1)


class Replace:
    """SkyRL's replace: copies of the accepted groups fill the batch if enough were, else all over again."""

    def __init__(self, world, target, min_ratio=0.3, max_rounds=30):
        self._world = world
        self._target = target
        self._min_ratio = min_ratio
        self._max_rounds = max_rounds
        self._prompts = Shuffled(world.trace.num_prompts, world.trace.seed)

    def __call__(self):
        num_accepted = num_rounds = 0
        while num_accepted <= self._min_ratio * self._target and num_rounds < self._max_rounds:
            num_accepted = self._world.accepted(self._prompts.take(self._target)).sum()
            num_rounds += 1
        return Step(num_rounds * self._target, num_accepted, num_rounds)


class Waves:
    """slime: groups are looked at as they finish; a wave more whenever accepted and running ones are too few."""

    def __init__(self, world, target):
        self._world = world
        self._target = target
        self._prompts = Shuffled(world.trace.num_prompts, world.trace.seed)

    def __call__(self):
        num_started = num_finished = num_accepted = num_dropped = 0
        accepted = []
        while num_accepted < self._target:
            if num_started - num_dropped < self._target:
                accepted.extend(self._world.accepted(self._prompts.take(self._target)))
                num_started += self._target
            num_accepted += accepted[num_finished]
            num_dropped += not accepted[num_finished]
            num_finished += 1
        return Step(num_started, self._target, num_started // self._target)


class Greso:
    """GRESO (arXiv 2506.02177): skips by zero-variance groups in a row, sizes rounds by the recent share of them."""

    def __init__(self, world, target, target_zero_variance=0.25, delta=0.01, safety=1.25):
        self._world = world
        self._target = target
        self._safety = safety
        self._delta = delta
        self._targets = {"easy": target_zero_variance / 3, "hard": target_zero_variance * 2 / 3}
        self._explore = {"easy": 0.5, "hard": 0.5}
        self._runs = np.zeros(world.trace.num_prompts, dtype=int)
        self._kind = np.full(world.trace.num_prompts, "hard")
        self._zero_share = 0.0
        self._prompts = Shuffled(world.trace.num_prompts, world.trace.seed)
        self._rng = np.random.default_rng([world.trace.seed, 3])
        self.looks = np.zeros(world.trace.num_prompts, dtype=int)

    def _take(self, n):
        taken = []
        while len(taken) < n:
            (prompt,) = self._prompts.take(1)
            if self._rng.random() < self._explore[self._kind[prompt]] ** self._runs[prompt]:
                taken.append(prompt)
        return np.array(taken)

    def __call__(self):
        num_accepted = num_generated = num_rounds = 0
        counts = {"easy": 0, "hard": 0}
        while num_accepted < self._target:
            deficit = self._target - num_accepted
            size = deficit if num_rounds == 0 else self._safety * deficit / max(1 - self._zero_share, 0.05)
            prompts = self._take(min(math.ceil(size), self._target))
            np.add.at(self.looks, prompts, 1)
            correct = self._world.correct(prompts)
            zero = (correct == 0) | (correct == self._world.trace.num_generations)
            self._runs[prompts] = np.where(zero, self._runs[prompts] + 1, 0)
            self._kind[prompts[zero]] = np.where(correct[zero] == 0, "hard", "easy")
            counts["hard"] += (correct == 0).sum()
            counts["easy"] += (correct == self._world.trace.num_generations).sum()
            num_accepted += (~zero).sum()
            num_generated += len(prompts)
            num_rounds += 1
            self._zero_share = sum(counts.values()) / num_generated
        for kind, count in counts.items():
            more = count / num_generated < self._targets[kind]
            self._explore[kind] = np.clip(self._explore[kind] + (self._delta if more else -self._delta), 0.05, 1.0)
        return Step(num_generated, self._target, num_rounds)


class Ours:
    """The package's `Sampler`, fed with rounds that have rewards but no rows."""

    def __init__(self, world, target, carries=False, memory=None, screen=None, acceptance=AcceptanceRate):
        trace = world.trace
        dataset = Dataset.from_dict({"id": range(trace.num_prompts)})
        self._world = world
        self.sampler = Sampler(
            PromptStream(dataset, seed=trace.seed),
            target=target,
            num_generations=trace.num_generations,
            carries=carries,
            memory=memory and memory(seed=trace.seed),
            screen=screen,
        )
        self.sampler.acceptance = acceptance()

    def _round(self, asks):
        nums = [ask.num for ask in asks]
        num_correct = self._world.correct(np.array([ask.example["id"] for ask in asks]), nums)
        rewards = [float(i < correct) for num, correct in zip(nums, num_correct, strict=True) for i in range(num)]
        return blank_round(asks, torch.tensor(rewards))

    def __call__(self):
        sampler, num_completions = self.sampler, 0
        sampler.begin()
        while asks := sampler.next_prompts():
            num_completions += sum(ask.num for ask in asks)
            for part in self._round(asks).by_size(sampler.rollout.rounds):
                rewards_NG = part.rewards_BF.view(len(part.prompts), -1)
                reasons = drop_reasons(rewards_NG, None, Criterion())
                counts = count_correct(rewards_NG, None, reasons, Criterion(), part.num_known)
                sampler.add_round(part, reasons, counts, self._world.step)
        batch = self.batch = sampler.batch()
        self._carry(batch)
        return Step(num_completions / sampler.num_generations, len(batch.train), sampler.rollout.num_rounds)

    def _carry(self, batch):
        """What the trainer does, of groups of which no row is held."""
        rounds, carried = self.sampler.rollout.rounds, []
        groups_by_size, half = to_carry(self.sampler.rollout, batch, self.sampler.num_generations, 1)
        for groups, size in groups_by_size:
            ages = [age + 1 for age in select_ages(rounds, groups)]
            carried.append(Round.of_groups(Rows.empty(), select_rewards(rounds, groups, size), ages))
        self.sampler.carry(carried, half)


def blank_round(asks, rewards_B):
    """A round of which no row is held."""
    blank_B = torch.zeros(len(rewards_B))
    names = [ask.name for ask in asks]
    return Round(names, Rows.empty(), rewards_B[:, None], blank_B, blank_B.bool(), {}, {}, asks=asks)


class WatchedMemory(PromptMemory):
    """Notes how often in a row a prompt is skipped."""

    def __init__(self, **options):
        super().__init__(**options)
        self._skips = Counter()
        self.most_skips = 0

    def draw_skip(self, prompt_id, *where):
        skip = super().draw_skip(prompt_id, *where)
        self._skips[prompt_id] = self._skips[prompt_id] + 1 if skip else 0
        self.most_skips = max(self.most_skips, self._skips[prompt_id])
        return skip


OURS = "ours"
MEMORY = "ours, carry, memory"
CARRY = "ours, carry"
ROUNDS = "rounds_per_step"

POLICIES: dict[str, Callable] = {
    "verl recipe, 3x": lambda world, target: FixedRounds(world, target, 3),
    "NeMo RL, 1x": lambda world, target: FixedRounds(world, target, 1, max_rounds=11, forgets_at_pass_end=True),
    "NeMo RL, 3x": lambda world, target: FixedRounds(world, target, 3, max_rounds=11, forgets_at_pass_end=True),
    "ms-swift": Swift,
    "SkyRL replace": Replace,
    "slime waves": Waves,
    "GRESO": Greso,
    OURS: Ours,
    CARRY: lambda world, target: Ours(world, target, carries=True),
    MEMORY: lambda world, target: Ours(world, target, carries=True, memory=PromptMemory),
}


# The constants of ours that rest on nothing but what they cost here, with what simpler or other ones would cost.
ROUND_VARIANTS = {
    "no margin: ceil(deficit / rate)": {"ROUND_COST": 1e-9, "MIN_ROUND_COST": 1e-9},
    "ROUND_COST alone": {"MIN_ROUND_COST": 0},
    "half of both": {"ROUND_COST": AcceptanceRate.ROUND_COST / 2, "MIN_ROUND_COST": AcceptanceRate.MIN_ROUND_COST / 2},
    "twice both": {"ROUND_COST": AcceptanceRate.ROUND_COST * 2, "MIN_ROUND_COST": AcceptanceRate.MIN_ROUND_COST * 2},
}
CARRY_VARIANTS = {
    "CARRY_ROUND_COST as ROUND_COST": {"CARRY_ROUND_COST": AcceptanceRate.ROUND_COST},
    "four times, and the least": {
        "CARRY_ROUND_COST": AcceptanceRate.RARE_ROUND_COST,
        "MIN_ROUND_COST": AcceptanceRate.MIN_RARE_ROUND_COST,
    },
}
MEMORY_VARIANTS = {
    "MOST_SURPRISE 5": {"MOST_SURPRISE": 5.0},
    "MOST_SURPRISE 20": {"MOST_SURPRISE": 20.0},
    "KEPT 0.75": {"KEPT": 0.75},
    "LOOKS_POWER 3": {"LOOKS_POWER": 3},
    "LOOKS_POWER 4": {"LOOKS_POWER": 4},
}


@dataclass
class Run:
    """What a run of a policy cost."""

    per_trained: float
    over_least: float
    rounds_per_step: float
    shortfall: float
    policy: Callable


def run(policy, trace, target, num_steps):
    """Plays a policy on a trace."""
    world = World(trace)
    play = policy(world, target)
    steps = []
    for world.step in range(num_steps):
        steps.append(play())
    num_generated = sum(step.num_generated for step in steps)
    num_trained = sum(step.num_trained for step in steps)
    least = np.mean([trace.least(step) for step in range(num_steps)])
    return Run(
        per_trained=num_generated / num_trained,
        over_least=num_generated / num_trained / least,
        rounds_per_step=sum(step.num_rounds for step in steps) / num_steps,
        shortfall=1 - num_trained / (target * num_steps),
        policy=play,
    )


def compare(console, args, target, num_steps):
    """One table per trace, every policy a row; returns the results by policy, acceptance and drift."""
    results = {}
    for drifting in (False, True):
        for acceptance in (0.55, 0.33, 0.1):
            trace = make_trace(args, acceptance, drifting, num_steps)
            title = f"{target} prompts, acceptance {acceptance}, {'drifting' if drifting else 'stationary'}"
            table = Table("policy", title=f"{title}, {num_steps} steps")
            for column in ("generated / trained", "over the least", "rounds / step", "shortfall"):
                table.add_column(column, justify="right")
            for name, policy in POLICIES.items():
                result = run(policy, trace, target, num_steps)
                table.add_row(
                    name,
                    f"{result.per_trained:.2f}",
                    f"{result.over_least:.3f}",
                    f"{result.rounds_per_step:.2f}",
                    f"{result.shortfall:.1%}",
                )
                results[name, acceptance, drifting] = result
            console.print(table)
    return results


def make_trace(args, acceptance, drifting, num_steps, num_prompts=None):
    """A trace on which the log-odds rise by one over the run, or not at all."""
    return Trace(
        acceptance=acceptance,
        drift=1 / num_steps if drifting else 0.0,
        num_prompts=num_prompts or args.num_prompts,
        num_generations=args.num_generations,
        seed=args.seed,
    )


def variant(base, constants):
    """A class that differs in some of its constants."""
    return type(base.__name__, (base,), constants)


def compare_constants(console, args, sizes, num_steps, acceptance=0.33):
    """What other constants would cost, over those that ship; `sizes` are the results of `compare` by batch size."""
    for name, base, variants, make in (
        (OURS, AcceptanceRate, ROUND_VARIANTS, lambda changed: partial(Ours, acceptance=changed)),
        (CARRY, AcceptanceRate, CARRY_VARIANTS, lambda changed: partial(Ours, carries=True, acceptance=changed)),
        (MEMORY, PromptMemory, MEMORY_VARIANTS, lambda changed: partial(Ours, carries=True, memory=changed)),
    ):
        table = Table("constants", title=f"{name}: other constants, acceptance {acceptance}")
        for target, trace in itertools.product(sizes, ("stationary", "drifting")):
            table.add_column(f"{target}, {trace}", justify="right")
        for label, constants in {"as they are": None, **variants}.items():
            cells = []
            for (target, results), drifting in itertools.product(sizes.items(), (False, True)):
                result = kept = results[name, acceptance, drifting]
                if constants is not None:
                    trace = make_trace(args, acceptance, drifting, num_steps)
                    result = run(make(variant(base, constants)), trace, target, num_steps)
                more = f" ({result.per_trained / kept.per_trained - 1:+.1%})" if constants is not None else ""
                cells.append(f"{result.per_trained:.2f}{more}, {result.rounds_per_step:.2f}")
            table.add_row(label, *cells)
        console.print(table)
    console.print("Each cell: generated / trained (over the first row's), rounds / step.")


def tell_repetitions(console, sizes):
    """How many prompts ms-swift's full batches hold, which the tables do not show."""
    for target, results in sizes.items():
        for acceptance in (0.55, 0.33):
            num_distinct = results["ms-swift", acceptance, False].policy.num_distinct
            console.print(
                f"ms-swift, acceptance {acceptance}, stationary: {len(num_distinct)} batches were filled up, with "
                f"{np.mean(num_distinct):.1f} different prompts of {target} on average, {min(num_distinct)} at least"
            )


def compare_memory(console, args, target=512, acceptance=0.33, num_passes=10):
    """Memory against plain dynamic sampling for as many steps as the latter gets out of `num_passes` passes."""
    num_steps = round(num_passes * args.num_prompts * acceptance / target)
    savings = []
    for drifting in (False, True):
        trace = make_trace(args, acceptance, drifting, num_steps)
        with_memory = lambda world, target: Ours(world, target, memory=PromptMemory)  # noqa: E731
        policies = {"plain": Ours, "GRESO": Greso, "memory": with_memory}
        results = {name: run(policy, trace, target, num_steps) for name, policy in policies.items()}
        savings.append(results["plain"].per_trained / results["memory"].per_trained)
        console.print(
            f"acceptance {acceptance}, {'drifting' if drifting else 'stationary'}, {num_steps} steps without carry: "
            + ", ".join(f"{name} {result.per_trained:.2f}" for name, result in results.items())
            + f" generated per trained; {savings[-1]:.2f} times fewer with memory than without"
        )
    return savings


def most_skips(console, args, target=512, acceptance=0.33, num_passes=40, num_prompts=2000):
    """How many passes in a row the memory leaves a prompt without a look, over more passes than it may."""
    num_steps = round(num_passes * num_prompts * acceptance / target)
    trace = make_trace(args, acceptance, False, num_steps, num_prompts)
    policy = lambda world, target: Ours(world, target, carries=True, memory=WatchedMemory)  # noqa: E731
    sampler = run(policy, trace, target, num_steps).policy.sampler
    console.print(
        f"memory, {sampler.stream.passes:.1f} passes over {num_prompts} prompts: no prompt was skipped more than "
        f"{sampler.memory.most_skips} times in a row"
    )
    return sampler.memory.most_skips


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0].strip())
    parser.add_argument("--full", action="store_true", help="four times as many steps")
    parser.add_argument(
        "--num-prompts", type=int, default=17_000, help="prompts in the dataset (default: %(default)s)"
    )
    parser.add_argument("--num-generations", type=int, default=16, help="completions per group (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the traces and of every policy")
    args = parser.parse_args()
    console = Console(width=110)
    num_steps = 1600 if args.full else 400
    large = compare(console, args, target=512, num_steps=num_steps)
    small = compare(console, args, target=16, num_steps=num_steps)
    tell_repetitions(console, {512: large, 16: small})
    compare_constants(console, args, {512: large, 16: small}, num_steps)
    savings = compare_memory(console, args)
    skips = most_skips(console, args)

    def each(results, name, attribute):
        return [getattr(result, attribute) for (policy, *_), result in results.items() if policy == name]

    table = Table("promise", "measured", "kept", title="Promises")
    for promise, measured, bound in (
        ("512 prompts: over the least, worst trace, at most 1.05", max(each(large, OURS, "over_least")), 1.05),
        ("512 prompts: rounds per step, worst trace, at most 1.2", max(each(large, OURS, ROUNDS)), 1.2),
        ("512 prompts, carry: over the least, worst trace, 1.00", max(each(large, CARRY, "over_least")), 1.005),
        ("16 prompts, carry: over the least, worst trace, at most 1.10", max(each(small, CARRY, "over_least")), 1.1),
        ("memory: share generated of what is without, worst trace, at most 0.50", 1 / min(savings), 0.5),
        ("memory: times a prompt is skipped in a row, at most 31", skips, 31),
    ):
        table.add_row(promise, f"{measured:.3f}", "yes" if measured <= bound else "NO")
    console.print(table)
    sampling_bookkeeping.measure(console, sampling_bookkeeping.parse_args([]))


if __name__ == "__main__":
    main()

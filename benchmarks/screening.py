# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
What asking for a few completions first saves, and what its second request costs.

The `Sampler` that the trainer drives plays on prompts of fixed pass rates, on rounds without rows; and on policies
that learn in a jump or prompt by prompt, which says whether prompts that were given up are found again. Their figures
are means over draws of the prompts and of their answers.

    python -m benchmarks screening    # seven minutes
"""

import heapq
import itertools
from collections import Counter
from functools import partial
from types import SimpleNamespace

import numpy as np

from trl_dapo.sampling.prompt_memory import PromptMemory

from .frame.tables import print_table, say
from .sampling_policies import Ours, World


NUM_GENERATIONS, RARE, SIGMA = 16, 0.1, 1.0
TRACES = {
    "Beta(.5, .5)": lambda rng, n: rng.beta(0.5, 0.5, n),
    "Beta(.2, .2)": lambda rng, n: rng.beta(0.2, 0.2, n),
    "half hopeless, rest uniform": lambda rng, n: np.where(rng.random(n) < 0.5, 0, rng.random(n)),
    "nine in ten hopeless": lambda rng, n: np.where(rng.random(n) < 0.9, 0, rng.beta(1, 2, n)),
    "Beta(.3, 1.5)": lambda rng, n: rng.beta(0.3, 1.5, n),
    "Beta(2, .3)": lambda rng, n: rng.beta(2, 0.3, n),
    "Beta(4, 4)": lambda rng, n: rng.beta(4, 4, n),
}
SCREENS = {"whole": None, "2": 2, "3": 3, "4": 4, "8": 8, "auto": "auto"}
MODES = {
    "without carry": {"carries": False, "memory": None},
    "carry": {"carries": True, "memory": None},
    "carry and memory": {"carries": True, "memory": PromptMemory},
}
LEARNERS = {  # the pass from which on a prompt can be learnt
    "in the second pass": lambda rng, n: np.where(rng.random(n) < 0.5, 1.0, 0.0),
    "over ten passes": lambda rng, n: np.where(rng.random(n) < 0.5, 1 + 10 * rng.random(n), 0.0),
}
NUM_PROMPTS = 1500
NUM_DRAWS, NUM_JUDGED = 3, 10  # of a table, and of what the memory is judged by
AT_ONCE = (256, 1024, 8192)  # completions that the engine holds


def drawn(make, num_draws, seed):
    """Some draws of the prompts, each with its own seed."""
    return [(make(np.random.default_rng([seed, draw]), NUM_PROMPTS), draw) for draw in range(num_draws)]


def play(rate_N, screen, target, num_rollouts, num_first=0, seed=0, num_generations=NUM_GENERATIONS, **mode):
    """Plays rollouts, of which the first few do not count; yields each with what it cost."""
    trace = SimpleNamespace(
        num_prompts=len(rate_N), num_generations=num_generations, seed=seed, rates=lambda step: rate_N
    )
    world = World(trace)
    policy = Ours(world, target, screen=screen, **mode)
    for world.step in range(num_first + num_rollouts):
        step = next(policy)
        if world.step >= num_first:
            yield step, policy


def price_of(steps):
    """Groups generated for one that trains."""
    return sum(step.num_generated for step in steps) / sum(step.num_trained for step in steps)


def cost(rate_N, screen, target=32, num_groups=3000, **mode):
    """Generated over trained completions, the share of trained groups whose prompts are rarely solved, and rounds."""
    steps, rates, num_rare = [], {}, 0
    for step, policy in play(rate_N, screen, target, num_groups // target, **mode):
        steps.append(step)
        rollout = policy.sampler.rollout
        rates |= {ask.name: rate_N[ask.example["id"]] for round_ in rollout.sampled for ask in round_.asks}
        names = [rollout.round_of(group).prompts[group.index] for group in policy.batch.train]
        num_rare += sum(rates.get(name, 1.0) < RARE for name in names)  # of a carried one the name is not kept
    trained = sum(step.num_trained for step in steps)
    return price_of(steps), num_rare / trained, sum(step.num_rounds for step in steps) / len(steps)


def compare_rare(num_draws=2, num_rollouts=250, target=32):
    """Prints what trains of prompts that are hardly ever solved, or hardly ever missed, among those of one half."""
    rate_N = np.repeat([0.0, 0.03, 0.97, 0.5], [300, 100, 100, 500])
    title = f"300 hopeless prompts, 100 of 3 in 100, 100 of 97 in 100, 500 of one half; {num_rollouts} rollouts"
    columns = "", "trained: 3 in 100", "97 in 100", "of 200 never trained", "generated / trained"
    rows = []
    for (name, mode), (label, screen) in itertools.product(MODES.items(), SCREENS.items()):
        if label not in ("whole", "8", "3", "auto"):
            continue
        found = []
        for seed in range(num_draws):
            names, trained, steps = {}, Counter(), []
            for step, policy in play(rate_N, screen, target, num_rollouts, seed=seed, **mode):
                steps.append(step)
                rollout = policy.sampler.rollout
                names |= {ask.name: ask.example["id"] for round_ in rollout.sampled for ask in round_.asks}
                trained.update(rollout.round_of(group).prompts[group.index] for group in rollout.accepted)
            of_N = np.zeros(len(rate_N))
            for key, num in trained.items():
                of_N[names[key]] = num
            shares = [of_N[rate_N == rate].sum() / of_N.sum() for rate in (0.03, 0.97)]
            is_rare_N = np.isin(rate_N, (0.03, 0.97))
            found.append([*shares, (of_N[is_rare_N] == 0).sum(), price_of(steps)])
        low, high, never, price = np.mean(found, axis=0)
        rows.append([f"{name}, {label}", f"{low:.1%}", f"{high:.1%}", f"{never:.0f}", f"{price:.2f}"])
    print_table(title, columns, rows, left=5)


class Learner(SimpleNamespace):
    """Prompts that are hopeless up to a pass of their own, and passed half of the time from then on."""

    num_generations, passes = NUM_GENERATIONS, 0.0

    def rates(self, step):
        return np.where(self.passes < self.pass_N, 0.0, 0.5)


def found_again(pass_N, screen, memory, seed, after=(5, 10), target=32):
    """Share of the prompts learnable after the first pass that had a group accepted by then, and the cost."""
    trace = Learner(pass_N=pass_N, num_prompts=len(pass_N), seed=seed)
    policy = Ours(World(trace), target, carries=True, memory=memory, screen=screen)
    ids, found, steps, told = {}, set(), [], []
    for num_passes in after:
        while trace.passes < num_passes:
            steps.append(next(policy))
            rollout, trace.passes = policy.sampler.rollout, policy.sampler.passes
            ids |= {ask.name: ask.example["id"] for round_ in rollout.sampled for ask in round_.asks}
            names = [rollout.round_of(group).prompts[group.index] for group in rollout.accepted]
            found |= {ids[name] for name in names if name in ids}  # a carried one was found when it was asked
        is_late_N = (pass_N >= 1) & (pass_N < num_passes)
        told.append((np.mean([i in found for i in np.flatnonzero(is_late_N)]), price_of(steps)))
    return told


def compare_learners(seed):
    """Prints a table of a memory and none on policies that learn; returns the least share found after a jump."""
    title = f"learnable later: share found after 5 and 10 passes (least of {NUM_JUDGED} draws), generated / trained"
    rows, shares = [], {}
    for (name, make), memory in itertools.product(LEARNERS.items(), (None, PromptMemory)):
        cells = []
        for screen in (None, "auto"):
            told = [found_again(pass_N, screen, memory, draw) for pass_N, draw in drawn(make, NUM_JUDGED, seed)]
            shares[name, memory, screen], prices = np.moveaxis(told, 2, 0)
            means, least = shares[name, memory, screen].mean(0), shares[name, memory, screen].min(0)
            cells.append(", ".join(f"{x:.2f} ({y:.2f})" for x, y in zip(means, least, strict=True)))
            cells[-1] += f", {prices.mean(0)[-1]:.2f}"
        rows.append([name, "yes" if memory else "none", *cells])
    print_table(title, ("become learnable", "memory", "whole", "auto"), rows, left=4)
    return min(shares["in the second pass", PromptMemory, screen][:, 0].min() for screen in (None, "auto"))


def compare_sizes(seed):
    """Prints what auto with carry and memory costs by group size; returns the dearest trace of 16."""
    sizes = (NUM_GENERATIONS, NUM_GENERATIONS // 2)
    title = f"carry, memory, auto: generated / trained by completions a group, mean and most of {NUM_JUDGED} draws"
    rows, dearest = [], 0.0
    mode = MODES["carry and memory"]
    for name, make in TRACES.items():
        draws = drawn(make, NUM_JUDGED, seed)
        found = [[cost(rate_N, "auto", seed=i, num_generations=G, **mode)[0] for rate_N, i in draws] for G in sizes]
        rows.append([name, *(f"{np.mean(prices):.2f} ({max(prices):.2f})" for prices in found)])
        dearest = max(dearest, np.mean(found[0]))
    print_table(title, ("pass rates", *map(str, sizes)), rows, left=3)
    return dearest


def evaluated(rate_N, k, seed):
    """A memory that begins with an evaluation of k completions of each prompt; none of it for 0."""
    memory = PromptMemory(seed=seed)
    for i, num_correct in enumerate(np.random.default_rng([seed, 3]).binomial(k, rate_N)):
        memory.update(str(i), num_correct.item(), k, step=0)
    memory.halve()
    return memory


def compare_first_pass(seed, target=32):
    """Prints what the first pass costs with and without an evaluation before it."""
    title = "first pass, carry, memory, auto: generated / trained, by completions of each prompt evaluated before"
    rows = []
    for name, make in TRACES.items():
        rows.append([name])
        for k in (0, 4, 8, 16):
            steps = []
            for rate_N, draw in drawn(make, NUM_DRAWS, seed):
                memory = partial(evaluated, rate_N, k) if k else PromptMemory
                for step, policy in play(rate_N, "auto", target, 1000, seed=draw, carries=True, memory=memory):
                    steps.append(step)
                    if policy.sampler.passes >= 1:
                        break
            rows[-1].append(f"{price_of(steps):.2f}")
    print_table(title, ("pass rates", "no evaluation", "4", "8", "16"), rows, left=5)


def seconds(num_completions, at_once, rng):
    """Until the last of some completions is there, whose times are lognormal with a mean of one."""
    times = rng.lognormal(-(SIGMA**2) / 2, SIGMA, num_completions)
    ends = list(times[:at_once])
    heapq.heapify(ends)
    for time in times[at_once:]:
        heapq.heapreplace(ends, ends[0] + time)
    return max(ends)


def seconds_of_rollouts(rate_N, screen, target=512, num_rollouts=12, **mode):
    """The same of a rollout in the mean, by how many completions the engine holds."""
    rng, total = np.random.default_rng(2), dict.fromkeys(AT_ONCE, 0.0)
    for _, policy in play(rate_N, screen, target, num_rollouts, num_first=4, **mode):
        for round_ in policy.sampler.rollout.sampled:
            for at_once in AT_ONCE:
                total[at_once] += seconds(len(round_.rewards_BF), at_once, rng)
    return [time / num_rollouts for time in total.values()]


def compare_seconds(seed):
    """Prints how long a rollout takes, by how many completions the engine holds."""
    rows, held = [], ", ".join(map(str, AT_ONCE))
    for name, make in TRACES.items():
        rate_N = make(np.random.default_rng(seed), 17_000)
        found = [seconds_of_rollouts(rate_N, screen, carries=True) for screen in (None, 3, "auto")]
        rows.append([name, *(", ".join(f"{time:.0f}" for time in times) for times in found)])
    title = f"512 prompts, carry: seconds of a rollout where the engine holds {held} completions"
    print_table(title, ("pass rates", "whole", "3", "auto"), rows, left=4)


def compare_screens(title, mode, seed):
    """Prints what each way to ask costs; returns auto's cost over the best of the others, on the worst trace."""
    rows, worst = [], 0.0
    for name, make in TRACES.items():
        draws = drawn(make, NUM_DRAWS, seed)
        costs = {
            label: np.mean([cost(rate_N, screen, seed=i, **mode) for rate_N, i in draws], axis=0)
            for label, screen in SCREENS.items()
        }
        rows.append([name, *(f"{price:.2f}, {rare:.2f}, {rounds:.1f}" for price, rare, rounds in costs.values())])
        best = min(price for label, (price, *_) in costs.items() if label != "auto")
        worst = max(worst, costs["auto"][0] / best)
    title = f"{title}: generated / trained, share that is rare, rounds; mean of {NUM_DRAWS} draws"
    print_table(title, ("pass rates", *SCREENS), rows, left=7)
    return worst


def main(seed=1):
    worst = max(compare_screens(title, mode, seed) for title, mode in MODES.items())
    say(f"auto over the best of the others, worst trace: {worst:.3f}")
    dearest = compare_sizes(seed)
    say(f"auto with carry and memory, generated / trained, worst trace: {dearest:.2f}")
    compare_first_pass(seed)
    compare_rare()
    share_found = compare_learners(seed)
    say(f"found after five passes of what became learnable in the second, at least: {share_found:.2f}")
    compare_seconds(seed)
    return 0 if worst <= 1.03 and dearest <= 1.3 and share_found >= 0.9 else 1

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
Cost of carry, memory and the screen together, also in the first pass, and how often hard prompts train.

The `Sampler` that the trainer uses samples prompts with constant pass rates, on groups without rows, and requests a
few completions of a prompt first. Figures are means over draws of the prompts and of their completions.

    python -m benchmarks screening    # minutes
"""

import itertools
from collections import Counter
from functools import partial
from types import SimpleNamespace

import numpy as np

from trl_dapo.sampling.example_names import prompt_name
from trl_dapo.sampling.prompt_memory import PromptMemory

from .frame.tables import print_table, say
from .sampling_policies import Ours, World


NUM_GENERATIONS = 16
TRACES = {
    "Beta(.5, .5)": lambda rng, n: rng.beta(0.5, 0.5, n),
    "Beta(.2, .2)": lambda rng, n: rng.beta(0.2, 0.2, n),
    "half hopeless, rest uniform": lambda rng, n: np.where(rng.random(n) < 0.5, 0, rng.random(n)),
    "nine in ten hopeless": lambda rng, n: np.where(rng.random(n) < 0.9, 0, rng.beta(1, 2, n)),
    "Beta(.3, 1.5)": lambda rng, n: rng.beta(0.3, 1.5, n),
    "Beta(2, .3)": lambda rng, n: rng.beta(2, 0.3, n),
    "Beta(4, 4)": lambda rng, n: rng.beta(4, 4, n),
}
SCREENS = {"whole": None, "8": 8, "3": 3, "on": "on"}
MODES = {
    "without carry": {"carries": False, "memory": None},
    "carry": {"carries": True, "memory": None},
    "carry and memory": {"carries": True, "memory": PromptMemory},
}
NUM_PROMPTS = 1500
NUM_DRAWS, NUM_JUDGED = 3, 10  # of a table, and of what is promised


def play(rate_N, screen, target, num_rollouts, seed=0, num_generations=NUM_GENERATIONS, **mode):
    """Simulate rollouts; yield the cost of each, and the policy."""
    world = World(SimpleNamespace(num_prompts=len(rate_N), num_generations=num_generations, seed=seed, rate_N=rate_N))
    policy = Ours(world, target, screen=screen, **mode)
    for world.step in range(num_rollouts):
        yield next(policy), policy


def price_of(steps):
    """Return the number of generated groups per trained group."""
    return sum(step.num_generated for step in steps) / sum(step.num_trained for step in steps)


def compare_sizes(seed, target=32, num_rollouts=93):
    """
    Print what the screen with carry and memory costs by group size; return the most expensive trace with groups of 16.
    """
    rows, dearest = [], 0.0
    for name, make in TRACES.items():
        found = {NUM_GENERATIONS: [], NUM_GENERATIONS // 2: []}
        for size, draw in itertools.product(found, range(NUM_JUDGED)):
            rate_N = make(np.random.default_rng([seed, draw]), NUM_PROMPTS)
            how = MODES["carry and memory"] | {"num_generations": size}
            found[size].append(price_of([step for step, _ in play(rate_N, "on", target, num_rollouts, draw, **how)]))
        rows.append([name, *(f"{np.mean(prices):.2f} ({max(prices):.2f})" for prices in found.values())])
        dearest = max(dearest, np.mean(found[NUM_GENERATIONS]).item())
    title = (
        f"carry, memory, screen: generated / trained by completions per group, mean and highest of {NUM_JUDGED} draws"
    )
    print_table(title, ("pass rates", *map(str, found)), rows, left=3)
    return dearest


def compare_rare(num_draws=2, num_rollouts=250, target=32):
    """
    Print how often prompts train that are hardly ever or nearly always solved, among prompts that are solved half of
    the time.
    """
    rate_N = np.repeat([0.0, 0.03, 0.97, 0.5], [300, 100, 100, 500])
    title = (
        "300 hopeless prompts, 100 solved 3 times in 100, 100 solved 97 times in 100, 500 solved half of the time; "
        f"{num_rollouts} rollouts"
    )
    columns = "", "trained groups: 3 in 100", "97 in 100", "of 200 never trained", "generated / trained"
    rows = []
    for (name, mode), (label, screen) in itertools.product(MODES.items(), SCREENS.items()):
        found = []
        for seed in range(num_draws):
            trained, steps = Counter(), []
            for step, policy in play(rate_N, screen, target, num_rollouts, seed=seed, **mode):
                steps.append(step)
                trained.update(group.example["id"] for group in policy.sampler.rollout.accepted)
            of_N = np.zeros(len(rate_N))
            for prompt, num in trained.items():
                of_N[prompt] = num
            shares = [of_N[rate_N == rate].sum() / of_N.sum() for rate in (0.03, 0.97)]
            found.append([*shares, (of_N[np.isin(rate_N, (0.03, 0.97))] == 0).sum(), price_of(steps)])
        low, high, never, price = np.mean(found, axis=0)
        rows.append([f"{name}, {label}", f"{low:.1%}", f"{high:.1%}", f"{never:.0f}", f"{price:.2f}"])
    print_table(title, columns, rows, left=5)


def evaluated(rate_N, k, seed, num_generations):
    """Return a memory that begins with an evaluation of k completions of each prompt; with k = 0, an empty one."""
    memory = PromptMemory(seed=seed, num_generations=num_generations)
    for i, num_correct in enumerate(np.random.default_rng([seed, 3]).binomial(k, rate_N)):
        memory.update(prompt_name({"id": i}), num_correct.item(), k, step=0)
    memory.halve()
    return memory


def compare_first_pass(seed, target=32):
    """Print what the first pass costs with and without an evaluation before it."""
    title = (
        "first pass with carry, memory and screen: generated / trained, by completions per prompt of an evaluation "
        "before it"
    )
    rows = []
    for name, make in TRACES.items():
        rows.append([name])
        for k in (0, 4, 8, 16):
            steps = []
            for draw in range(NUM_DRAWS):
                rate_N = make(np.random.default_rng([seed, draw]), NUM_PROMPTS)
                memory = partial(evaluated, rate_N, k) if k else PromptMemory
                for step, policy in play(rate_N, "on", target, 1000, seed=draw, carries=True, memory=memory):
                    steps.append(step)
                    if policy.sampler.passes >= 1:
                        break
            rows[-1].append(f"{price_of(steps):.2f}")
    print_table(title, ("pass rates", "no evaluation", "4", "8", "16"), rows, left=5)


def main(seed=1):
    dearest = compare_sizes(seed)
    most = "generated / trained with the most expensive pass rates"
    say(f"screen with carry and memory, groups of 16: {most}: {dearest:.2f}")
    compare_first_pass(seed)
    compare_rare()
    return dearest > 1.3

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Time that an engine takes for the completions of a round. All functions are pure."""

import heapq
import math
from typing import NamedTuple

import numpy as np


class Engine(NamedTuple):
    """An engine: how many completions it decodes at once, and how long a decoding step takes."""

    slots: float  # completions that it decodes at once
    rows: float  # number of completions that add as much time to a decoding step as a step without completions takes
    schedules: bool  # whether a completion that has ended frees its slot; if not, all are padded to the longest

    def step_seconds(self, num_active):
        """Return the seconds of a decoding step, relative to a step with a single completion."""
        return (1 + num_active / self.rows) / (1 + 1 / self.rows)


# the CPU is measured with 0.108 B parameters and one thread; for the GPU see "A training step on a GPU" in RESULTS.md
ENGINES = {
    "transformers, CPU": Engine(math.inf, 4, schedules=False),
    "transformers, GPU": Engine(math.inf, 800, schedules=False),
    "continuous batching": Engine(512, 600, schedules=True),
    "vLLM, 64 slots": Engine(64, math.inf, schedules=True),
    "vLLM, 256 slots": Engine(256, math.inf, schedules=True),
    "vLLM, 512 slots": Engine(512, math.inf, schedules=True),
}


def assign(lengths, free, now=0.0):
    """
    Return when each completion begins and ends. `free` is a heap of the times at which each slot is free, and is
    changed.
    """
    begins, ends = [], []
    for length in lengths:
        begin = max(free[0], now)
        heapq.heapreplace(free, begin + length)
        begins.append(begin)
        ends.append(begin + length)
    return begins, ends


def round_seconds(engine, lengths):
    """Return how long a round of completions of these lengths takes."""
    num = len(lengths)
    if not engine.schedules:
        return max(lengths) * engine.step_seconds(num)
    if num <= engine.slots:
        begins, ends = [0.0] * num, sorted(lengths)
    else:
        begins, ends = assign(lengths, [0.0] * int(engine.slots))
    if math.isinf(engine.rows):
        return max(ends)
    # Every step advances each active completion by a token. How long it takes depends on how many are active.
    changes = sorted([*((begin, 1) for begin in begins), *((end, -1) for end in ends)])
    seconds, last, num_active = 0.0, 0.0, 0
    for time, change in changes:
        seconds += (time - last) * engine.step_seconds(num_active) if num_active else 0.0
        last, num_active = time, num_active + change
    return seconds


LONGEST, SIGMA = 8.0, 1.0


def draw_lengths(rng, num):
    """Return lengths relative to their mean, as in groups_ahead.py. The longest end at the limit."""
    return np.minimum(rng.lognormal(-(SIGMA**2) / 2, SIGMA, num), LONGEST).tolist()

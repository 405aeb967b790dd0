# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
Completions that the screen saves at an acceptance rate, for Beta-distributed pass rates. All functions are pure.
"""

import math

from trl_dapo.sampling.prompt_memory import expected_acceptance
from trl_dapo.sampling.screen import SCREEN_SIZES, expected_cost


def beta_with_acceptance(acceptance, num_generations, mean=0.5):
    """
    Return the Beta distribution with this mean and this acceptance rate.

    Raises:
        `ValueError`: If there is none.
    """
    # The more similar the prompts are, the more groups are accepted.
    low, high = 1e-6, 1e6
    for _ in range(200):
        concentration = math.sqrt(low * high)
        found = expected_acceptance(mean * concentration, (1 - mean) * concentration, num_generations)
        low, high = (concentration, high) if found < acceptance else (low, concentration)
    if abs(found - acceptance) > 1e-3:
        raise ValueError(f"With a mean pass rate of {mean:g} at most {found:.1%} of the groups are accepted.")
    return mean * concentration, (1 - mean) * concentration


def saving_of_screen(acceptance, num_generations, screen_size=None, mean=0.5):
    """
    Return the completions per accepted group with whole groups, divided by those with the screen.

    Whole groups cost G / a at acceptance a. The screen costs k / b + G - k: the first k completions differ for a share
    b of the prompts, and only their rest is requested. `None` uses the cheapest k.
    """
    correct, incorrect = beta_with_acceptance(acceptance, num_generations, mean)
    sizes = [size for size in SCREEN_SIZES if size < num_generations] if screen_size is None else [screen_size]
    return num_generations / acceptance / min(expected_cost(correct, incorrect, one, num_generations) for one in sizes)


def acceptance_at_saving(saving, num_generations):
    """
    Return the acceptance rate below which the cheapest screen saves at least `saving`, or `None` if it never does.
    """
    low, high = 1e-3, 0.95
    if saving_of_screen(low, num_generations) < saving:
        return None
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if saving_of_screen(middle, num_generations) > saving else (low, middle)
    return low

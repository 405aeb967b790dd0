# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
Weights that give a screened batch the gradient of whole groups in expectation.

The screen samples the first k of G completions and drops the prompt if their rewards are all equal. Completions are
exchangeable. So a group with given rewards passes the screen with a known probability, and dividing the weight of each
accepted group by it removes the bias (Horvitz and Thompson 1952). Pure functions of numbers.
"""

import math
from collections.abc import Sequence

from trl_dapo.sampling.equal_rewards import margin


def counts_of_values(rewards: Sequence[float]) -> list[int]:
    """Return how many rewards have each value, the lowest first. Neighbors within the margin are one value."""
    counts: list[int] = []
    last = -math.inf
    for reward in sorted(rewards):
        if reward - last > margin(abs(reward)):
            counts.append(0)
        counts[-1] += 1
        last = reward
    return counts


def probability_to_pass(rewards: Sequence[float], screen_size: int) -> float:
    """
    Return the probability that `screen_size` of a group's rewards, drawn without replacement, are not all equal.

    NaN is the reward of a completion that was not scored. It is neither equal to the others nor different from them.
    """
    scored = [reward for reward in rewards if not math.isnan(reward)]
    num_unscored = len(rewards) - len(scored)
    # Draws without a scored completion, then for each value the draws that have it and no other value.
    without_score = math.comb(num_unscored, screen_size)
    num_equal = without_score
    for count in counts_of_values(scored):
        num_equal += math.comb(count + num_unscored, screen_size) - without_score
    return 1.0 - num_equal / math.comb(len(rewards), screen_size)


def screen_weight(rewards: Sequence[float], screen_size: int) -> float:
    """Return the weight of an accepted group of which `screen_size` completions were requested first."""
    return 1.0 / probability_to_pass(rewards, screen_size)


def normalized(weights: Sequence[float], sizes: Sequence[float]) -> list[float]:
    """
    Return the weights times a factor that makes their mean 1.

    The mean counts each group by its size, its number of tokens. So the token mean of a weighted batch estimates the
    token mean of a batch of whole groups, and the length of a step stays what it is without weights.
    """
    total = sum(weight * size for weight, size in zip(weights, sizes, strict=True))
    return [weight * sum(sizes) / total for weight in weights]


def share_effective(weights: Sequence[float]) -> float:
    """Return the number of equally weighted groups with the same variance, as a share of the groups (Kish 1965)."""
    return sum(weights) ** 2 / (len(weights) * sum(weight**2 for weight in weights))

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The outcome of a rollout: which groups train, which only fill the batch, which stay in the queue. Pure functions."""

from collections.abc import Sequence
from itertools import cycle, islice
from typing import NamedTuple

from .groups import PromptGroup


class Batch(NamedTuple):
    """A rollout batch, and what became of the other groups."""

    train: list[PromptGroup]  # oldest first; with `"replace"` some several times
    fill: list[PromptGroup]  # after them, without weight
    carried: list[PromptGroup]  # accepted, and train in the next rollout
    surplus: Sequence[PromptGroup] = ()  # accepted, and lost
    partial: Sequence[PromptGroup] = ()  # whose rest the next rollout may request
    given_up: Sequence[PromptGroup] = ()  # partial, and lost


def num_missing(mode: str, num_accepted: int, target: int, min_replace_ratio: float) -> int:
    """Return how many groups must still be accepted before the batch of `target` groups is full."""
    # As a quotient: 0.55 is stored a little too large, so that 0.55 x 100 is above 55.
    if mode == "replace" and num_accepted / target >= min_replace_ratio:
        return 0
    return max(target - num_accepted, 0)


def fill_batch(
    mode: str, accepted: Sequence[PromptGroup], fillers: Sequence[PromptGroup], target: int, min_replace_ratio: float
) -> tuple[list[PromptGroup], list[PromptGroup]]:
    """Return the groups of a batch that train, and those that fill it up to `target` groups."""
    train = list(accepted[:target])
    if mode == "replace" and train and num_missing(mode, len(accepted), target, min_replace_ratio) == 0:
        train = list(islice(cycle(train), target))
    return train, list(islice(cycle(fillers or train), target - len(train)))

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The batch of a rollout: which groups train, which only fill it up, and what happens to the rest. Pure functions."""

from collections.abc import Sequence
from itertools import cycle, islice
from typing import NamedTuple

from .groups import PromptGroup


class Batch(NamedTuple):
    """A rollout batch, and what happens to the other groups that the rollout did not drop."""

    train: list[PromptGroup]  # oldest first; in mode "replace" they may be repeated
    # Fill up the batch, with no weight in the loss: dropped groups. If there are none, partial groups, or else copies
    # of groups that train.
    fillers: list[PromptGroup]
    carried_to_next: list[PromptGroup]  # accepted groups that may train in the next rollout
    discarded: Sequence[PromptGroup] = ()  # accepted groups that do not train, now or later
    partial: Sequence[PromptGroup] = ()  # partial groups whose rest the next rollout may request
    dropped_partial: Sequence[PromptGroup] = ()  # partial groups that are not continued


def num_missing(mode: str, num_accepted: int, target: int, min_replace_ratio: float) -> int:
    """Return how many groups are still to be accepted. In mode "replace", 0 once copies can fill the rest."""
    # A quotient is compared because the product is inexact: 0.55 * 100 is slightly above 55 in floating point.
    if mode == "replace" and num_accepted / target >= min_replace_ratio:
        return 0
    return max(target - num_accepted, 0)


def fill_batch(
    mode: str,
    accepted: Sequence[PromptGroup],
    candidates: Sequence[PromptGroup],
    target: int,
    min_replace_ratio: float,
) -> tuple[list[PromptGroup], list[PromptGroup]]:
    """
    Return the groups of a batch that train, and the groups that fill it up to `target` groups: the `candidates`, or
    copies of those that train if there are none.
    """
    train = list(accepted[:target])
    if mode == "replace" and train and num_missing(mode, len(accepted), target, min_replace_ratio) == 0:
        train = list(islice(cycle(train), target))
    return train, list(islice(cycle(candidates or train), target - len(train)))

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Which groups of a rollout train, which only fill the batch, and which are carried. Pure: groups are references."""

from collections.abc import Sequence
from itertools import cycle, islice
from typing import NamedTuple


class Group(NamedTuple):
    """Where a group is: its round among the rollout's rounds, and its place in that round."""

    round: int
    index: int  # type: ignore[assignment]  # in place of a method of tuples, which nobody calls


Groups = Sequence[Group]


class Batch(NamedTuple):
    train: list[Group]  # in order
    fill: list[Group]  # behind them; they weigh nothing
    carry: list[Group]  # accepted, and the batch has no room
    half: Groups = ()  # half asked, for the next rollout to complete


def missing(mode: str, num_accepted: int, target: int, min_replace_ratio: float) -> int:
    """Groups that must still be accepted before the batch of `target` groups is full."""
    # The share that is typed, 0.55, is the nearest to 55 / 100, but 0.55 x 100 is above 55.
    if mode == "replace" and num_accepted / target >= min_replace_ratio:
        return 0
    return max(target - num_accepted, 0)


def refill(
    mode: str, carried: Groups, accepted: Groups, dropped: Groups, target: int, min_replace_ratio: float
) -> Batch:
    """Makes a batch of `target` groups of what a rollout has found."""
    # Carried groups first, then accepted ones in prompt order, so that neither age nor length decides.
    found = [*carried, *accepted]
    train, carry = found[:target], found[target:]
    if mode == "replace" and train and missing(mode, len(found), target, min_replace_ratio) == 0:
        train = list(islice(cycle(train), target))
    return Batch(train, list(islice(cycle(dropped or train), target - len(train))), carry)

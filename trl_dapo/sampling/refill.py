# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Which groups of a rollout train, which only fill the batch, and which are carried. Pure: groups are references."""

from collections.abc import Sequence
from itertools import cycle, islice
from typing import NamedTuple


class Group(NamedTuple):
    """
    Where a group is.

    Args:
        round (`int`):
            Its round among the rollout's rounds.
        index (`int`):
            Its place in that round.
    """

    round: int
    index: int  # type: ignore[assignment]  # in place of a method of tuples, which nobody calls


class Batch(NamedTuple):
    """
    What becomes of a rollout's groups.

    Args:
        train (`list[Group]`):
            Groups that train, in order.
        fill (`list[Group]`):
            Groups behind them that fill the batch and weigh nothing.
        carry (`list[Group]`):
            Accepted groups for which the batch has no room.
    """

    train: list[Group]
    fill: list[Group]
    carry: list[Group]


def missing(mode: str, num_accepted: int, target: int, min_replace_ratio: float) -> int:
    """
    Groups that must still be accepted before the batch is full.

    Args:
        mode (`str`):
            `"filter"`; `"replace"`, where copies of accepted groups fill the batch once there are enough of them; or
            `"mask"`, where every prompt is sampled once.
        num_accepted (`int`):
            Groups accepted so far, carried ones included.
        target (`int`):
            Groups of the batch.
        min_replace_ratio (`float`):
            With `"replace"`: share of the batch that is enough.

    Returns:
        `int`: 0 where the batch is full.

    Example:

    ```python
    >>> missing("filter", 3, 8, 0.3), missing("replace", 3, 8, 0.3)
    (5, 0)
    ```
    """
    # The share that is typed, 0.55, is the nearest to 55 / 100, but 0.55 x 100 is above 55.
    if mode == "replace" and num_accepted / target >= min_replace_ratio:
        return 0
    return max(target - num_accepted, 0)


def refill(
    mode: str,
    carried: Sequence[Group],
    accepted: Sequence[Group],
    dropped: Sequence[Group],
    target: int,
    min_replace_ratio: float,
) -> Batch:
    """
    Makes a batch of `target` groups of what a rollout has found.

    Carried groups train first, then accepted ones in prompt order, so that neither age nor length decides. Where they
    are too few, dropped groups fill the batch, and copies of groups that train where even those are too few.

    Args:
        mode, target, min_replace_ratio:
            As in [`missing`].
        carried (`Sequence[Group]`):
            Groups that an earlier rollout accepted.
        accepted (`Sequence[Group]`):
            Groups that this rollout accepted, in prompt order.
        dropped (`Sequence[Group]`):
            Groups that it did not.

    Returns:
        [`Batch`]

    Example:

    ```python
    >>> a, b, c = Group(0, 0), Group(0, 1), Group(0, 2)
    >>> refill("filter", [], [b], [a, c], target=2, min_replace_ratio=0.3).fill
    [Group(round=0, index=0)]
    ```
    """
    found = [*carried, *accepted]
    train, carry = found[:target], found[target:]
    if mode == "replace" and train and missing(mode, len(found), target, min_replace_ratio) == 0:
        train = list(islice(cycle(train), target))
    fill = list(islice(cycle(dropped or train), target - len(train)))
    return Batch(train, fill, carry)

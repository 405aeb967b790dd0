# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""A user's own rule for which groups train."""

from collections.abc import Callable, Sequence

import torch


GroupFilter = Callable[[dict[str, list[float]], list[dict]], str | None]


def apply_group_filter(
    group_filter: GroupFilter,
    rewards_BF: torch.Tensor,
    reward_names: Sequence[str],
    rows: Sequence[dict],
    num_generations: int,
) -> list[str | None]:
    """
    Asks a user's rule about each group.

    Args:
        group_filter (`Callable`):
            Called with a group's rewards, a list for each reward function's name (NaN where it gave none), and its
            rows. Returns `None` to train on the group, or the reason to drop it.
        rewards_BF (`torch.Tensor` of shape `(B, F)`):
            Rewards of all completions; those of a group follow each other.
        reward_names (`Sequence[str]` of length F):
            Names of the reward functions.
        rows (`Sequence[dict]` of length B):
            The completions, each with its example's columns.
        num_generations (`int`):
            Completions of a group.

    Returns:
        `list[str | None]`: one for each group.

    Raises:
        TypeError: If it returns anything but `None` or a reason.

    Example:

    ```python
    >>> def too_long(rewards, rows):
    ...     return "long" if any(len(row["completion"]) > 4 for row in rows) else None
    >>> rows = [{"completion": "right"}, {"completion": "no"}]
    >>> apply_group_filter(too_long, torch.zeros(2, 1), ["right"], rows, num_generations=2)
    ['long']
    ```
    """
    reasons = []
    for start in range(0, len(rows), num_generations):
        group = slice(start, start + num_generations)
        columns = rewards_BF[group].T.tolist()
        reason = group_filter(dict(zip(reward_names, columns, strict=True)), [dict(row) for row in rows[group]])
        if not (reason is None or (isinstance(reason, str) and reason)):
            raise TypeError(
                f"`group_filter` returned {reason!r}: it must return `None` for a group that trains, or the reason to "
                "drop it as text."
            )
        reasons.append(reason)
    return reasons

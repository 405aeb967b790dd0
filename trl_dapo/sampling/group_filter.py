# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Application of a user's own rule for which groups to train on."""

import copy
from collections.abc import Callable, Sequence

import torch
from accelerate.utils import gather_object

from ..ranks import on_main_process
from .groups import PromptGroup


GroupFilter = Callable[[dict[str, list[float]], list[dict]], str | None]


def apply_group_filter(
    group_filter: GroupFilter,
    rewards_BF: torch.Tensor,
    reward_names: Sequence[str],
    rows: Sequence[dict],
    num_generations: int,
) -> list[str | None]:
    """Apply the user's rule to each group. Return `None` for a group to train on, or the reason to drop it."""
    reasons = []
    for start in range(0, len(rows), num_generations):
        group = slice(start, start + num_generations)
        columns = rewards_BF[group].T.tolist()
        reason = group_filter(dict(zip(reward_names, columns, strict=True)), copy.deepcopy(list(rows[group])))
        if not (reason is None or (isinstance(reason, str) and reason)):
            raise TypeError(
                f"`group_filter` returned {reason!r}: it must return `None` to train on the group, or the reason to "
                "drop it as a non-empty string."
            )
        reasons.append(reason)
    return reasons


def ask_group_filter(
    group_filter: GroupFilter, groups: Sequence[PromptGroup], reward_names: Sequence[str]
) -> list[str | None]:
    """Apply the user's rule to groups of equal size, on the main process only. Return its results. Collective."""
    own = {(group.number, index): row.completion for group in groups for index, row in group.rows.items()}
    texts = {key: text for part in gather_object([own]) for key, text in part.items()}
    rows = [
        {
            **group.example,
            "completion": texts[group.number, index],
            "length": group.lengths[index],
            "truncated": group.truncated[index],
        }
        for group in groups
        for index in range(group.num_received)
    ]
    rewards_BF = torch.cat([group.rewards for group in groups])
    return on_main_process(
        apply_group_filter,
        group_filter,
        rewards_BF,
        reward_names,
        rows,
        groups[0].num_received,
        failed="`group_filter` failed on the main process",
    )

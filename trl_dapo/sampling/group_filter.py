# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""A user's own rule for which groups train."""

import copy
from collections.abc import Callable, Sequence

import torch
from accelerate.utils import gather_object

from ..ranks import on_main_process
from .rounds import Round


GroupFilter = Callable[[dict[str, list[float]], list[dict]], str | None]


def apply_group_filter(
    group_filter: GroupFilter,
    rewards_BF: torch.Tensor,
    reward_names: Sequence[str],
    rows: Sequence[dict],
    num_generations: int,
) -> list[str | None]:
    """For each group what a user's rule says of it: `None` to train on it, or the reason to drop it."""
    reasons = []
    for start in range(0, len(rows), num_generations):
        group = slice(start, start + num_generations)
        columns = rewards_BF[group].T.tolist()
        reason = group_filter(dict(zip(reward_names, columns, strict=True)), copy.deepcopy(list(rows[group])))
        if not (reason is None or (isinstance(reason, str) and reason)):
            raise TypeError(
                f"`group_filter` returned {reason!r}: it must return `None` for a group that trains, or the reason to "
                "drop it as text."
            )
        reasons.append(reason)
    return reasons


def ask_group_filter(group_filter: GroupFilter, round_: Round, reward_names: Sequence[str]) -> list[str | None]:
    """Asks a user's rule about a round's groups, once, on the main process. Collective."""
    completions, num_generations = gather_object(round_.rows.completions), round_.num_generations
    examples = [ask.example for ask in round_.asks for _ in range(num_generations)]
    columns = zip(examples, completions, round_.lengths_B.tolist(), round_.truncated_B.tolist(), strict=True)
    rows = [{**example, "completion": text, "length": n, "truncated": cut} for example, text, n, cut in columns]
    asked = group_filter, round_.rewards_BF, reward_names, rows, num_generations
    return on_main_process(apply_group_filter, *asked, failed="`group_filter` failed on the main process")

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""A round: one call of the generation engine, and the assignment of its completions to processes for scoring."""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor

from ..ranks import local_slice, rank_and_world_size
from .groups import GenerationRequest, PromptGroup
from .rows import Row, exchange_rows


@dataclass
class RoundRecording:
    """Recorded in one round, while TRL's `_generate_and_score_completions` runs."""

    score: Callable[..., Tensor] | None = None  # replaces the reward functions; called like `_calculate_rewards`
    rows: list[Row] = field(default_factory=list)
    lengths: Sequence[int] = ()  # for each completion, the number of tokens that the model generated
    truncated: list[bool] = field(default_factory=list)  # whether each completion was cut off at the length limit
    metrics: dict[str, list[float]] = field(
        default_factory=dict
    )  # over all processes; the fields above are of this one


@dataclass(eq=False)
class Round:
    """One round, after its completions were added to their groups and scored."""

    requests: Sequence[GenerationRequest]
    completions: list["Completion"]  # the sampled completions, in the order of the rows of all processes
    metrics: dict[str, list[float]] = field(default_factory=dict)  # TRL's metrics
    has_earlier_weights: bool = False  # whether some of it was sampled with the weights of an earlier rollout
    number: int = 0  # counted within its rollout, from 1
    seconds: float = 0.0  # time to sample and score it

    @property
    def groups(self) -> list[PromptGroup]:
        """The groups of which completions were sampled."""
        return [request.group for request in self.requests]


class Completion(NamedTuple):
    """One completion: its group, and its index in the group."""

    group: PromptGroup
    index: int  # type: ignore[assignment]  # hides the method `index` of tuples, which is not used


def receive_rows(
    requests: Sequence[GenerationRequest], recording: RoundRecording, accelerator: Accelerator
) -> list[Completion]:
    """Add the completions that were just sampled to their groups, and return them in order. Collective."""
    rank, num_ranks = rank_and_world_size()
    columns = torch.tensor(
        [recording.lengths, recording.truncated, [_checksum(requests)] * len(recording.rows)],
        device=accelerator.device,
    )
    lengths, truncated, drawn = accelerator.gather(columns.T.contiguous()).cpu().T.tolist()
    if set(drawn) != {drawn[0]}:
        raise RuntimeError(
            "The processes drew different prompts, because their training datasets differ. Load, shuffle and filter "
            "the dataset in the same way and with the same seed on every process."
        )
    completions: list[Completion] = []
    for request in requests:
        first = request.group.num_received
        completions += [Completion(request.group, first + i) for i in range(request.num_completions)]
    per_rank = len(completions) // num_ranks
    mine = local_slice(len(completions), rank, num_ranks)
    start = 0
    for request in requests:
        places = range(start, start + request.num_completions)
        request.group.receive(request, [place // per_rank for place in places])
        request.group.lengths += lengths[places.start : places.stop]
        request.group.truncated += map(bool, truncated[places.start : places.stop])
        start = places.stop
    for (group, index), row in zip(completions[mine], recording.rows, strict=True):
        group.rows[index] = row
    return completions


def _checksum(requests: Sequence[GenerationRequest]) -> int:
    return zlib.crc32(repr([request.group.name for request in requests]).encode())


class ScoringPlan(NamedTuple):
    """
    The completions whose rewards each process returns.

    TRL gathers equally many rewards from each process. So a short share is filled up with copies of its own
    completions, on which reward functions are not called. An empty share gets a group that another process scores too.
    """

    per_rank: list[list[Completion]]
    is_in_place: bool  # whether each process scores exactly the completions that it sampled, in the same order


def plan_scoring(
    requests: Sequence[GenerationRequest], completions: Sequence[Completion], num_ranks: int, *, may_move: bool = True
) -> ScoringPlan:
    """
    Plan which process scores which completions of a round.

    If a group is whole now, one process scores all its completions in one call, including those that were already
    scored in an earlier round. The completions of other groups are scored by the processes that sampled them, since
    their rewards only decide whether the rest is requested.

    Args:
        requests (`Sequence[GenerationRequest]`):
            Requests of the round, whose completions were added to their groups.
        completions (`Sequence[Completion]`):
            Completions of the round, in the order of the rows of all processes.
        num_ranks (`int`):
            Number of processes.
        may_move (`bool`, *optional*, defaults to `True`):
            Whether a process may score completions that another process sampled. If not, each process scores what it
            sampled in this round.
    """
    per_rank = len(completions) // num_ranks
    own = [list(completions[rank * per_rank : (rank + 1) * per_rank]) for rank in range(num_ranks)]
    to_move = [
        request.group
        for request in requests
        if request.group.is_whole
        and (request.num_completions < request.group.num_generations or request.group.is_on_several_ranks)
    ]
    if not to_move or not may_move:
        return ScoringPlan(own, True)
    moved = {group.number for group in to_move}
    shares = [[completion for completion in share if completion.group.number not in moved] for share in own]
    for group in to_move:
        share = min(shares, key=len)  # the first one if several are shortest
        share += [Completion(group, index) for index in range(group.num_generations)]
    # An empty share gets a group too, since a reward function may have to be called on all processes.
    longest = max(map(len, shares))
    for share in shares:
        copied = list(share) or [Completion(to_move[0], index) for index in range(to_move[0].num_generations)]
        while len(share) < longest:
            share += copied[: longest - len(share)]
    return ScoringPlan(shares, False)


def bring_together(plan: ScoringPlan, device: torch.device) -> list[Row]:
    """
    Move rows to the processes that score them, and return those of this process, in order. Collective.

    Afterwards each whole group is held by the process that scores it.
    """
    rank, _ = rank_and_world_size()
    arrived = _exchange(plan, device)
    mine = []
    for group, index in plan.per_rank[rank]:
        key = group.number, index
        mine.append(arrived[key] if key in arrived else group.rows[index])
    holders = _holders_of_whole_groups(plan)
    for group, holder in holders.items():
        group.ranks = [holder] * group.num_received
        if holder != rank:
            group.rows = {}
    for (group, index), row in zip(plan.per_rank[rank], mine, strict=True):
        if holders.get(group) == rank:
            group.rows[index] = row
    return mine


def _exchange(plan: ScoringPlan, device: torch.device) -> dict[tuple[int, int], Row]:
    """
    Send rows to the processes that score them. Return the received ones, by their group's number and their index in
    it. Collective.
    """
    rank, num_ranks = rank_and_world_size()
    outgoing: list[list[tuple[Any, Row]]] = [[] for _ in range(num_ranks)]
    for destination, share in enumerate(plan.per_rank):
        if destination == rank:
            continue
        for group, index in dict.fromkeys(share):
            if group.ranks[index] == rank:
                outgoing[destination].append(((group.number, index), group.rows[index]))
    return dict(exchange_rows(outgoing, device))


def _holders_of_whole_groups(plan: ScoringPlan) -> dict[PromptGroup, int]:
    """Return the process that holds each whole group from now on: the first one, if several score it."""
    holders: dict[PromptGroup, int] = {}
    for rank, share in enumerate(plan.per_rank):
        for group, _ in share:
            if group.is_whole and group not in holders:
                holders[group] = rank
    return holders


def note_scores(plan: ScoringPlan, rewards_BF: Tensor, logs: dict[str, list]) -> None:
    """Store the rewards of the completions of all processes in their groups, and the columns that were logged."""
    # The first row of each completion in `rewards_BF`, by the group's number and the index of the completion.
    first_rows: dict[int, dict[int, int]] = {}
    groups: dict[int, PromptGroup] = {}
    for row, (group, index) in enumerate(completion for share in plan.per_rank for completion in share):
        groups[group.number] = group
        first_rows.setdefault(group.number, {}).setdefault(index, row)
    for number, group in groups.items():
        # First completions that could not be moved are not scored again: they keep their earlier rewards.
        num_known = min(first_rows[number])
        order = [first_rows[number][index] for index in range(num_known, group.num_received)]
        new_rewards, known_logs = rewards_BF[order].cpu(), group.extra_logs
        group.rewards = torch.cat([group.rewards[:num_known], new_rewards]) if num_known else new_rewards
        group.extra_logs = {}
        for name, values in logs.items():
            known = known_logs.get(name, [None] * num_known)[:num_known]
            group.extra_logs[name] = known + [values[row] for row in order]


def rows_of_batch(
    train: Sequence[PromptGroup], fill: Sequence[PromptGroup], num_generations: int, device: torch.device
) -> list[Row]:
    """
    Return this process's equal share of the rows of a batch. The groups that train come first, then those that fill
    the batch. Collective.
    """
    _, num_ranks = rank_and_world_size()
    per_rank = (len(train) + len(fill)) * num_generations // num_ranks
    outgoing: list[list[tuple[Any, Row]]] = [[] for _ in range(num_ranks)]
    for number, group in enumerate([*train, *fill]):
        for i in range(num_generations):
            # The completions of a partial group are repeated.
            index = i % group.num_received
            if index in group.rows:
                row = group.rows[index]
                place = number * num_generations + i
                outgoing[place // per_rank].append((place, row if number < len(train) else row.shortened()))
    return [row for _, row in sorted(exchange_rows(outgoing, device), key=lambda arrived: arrived[0])]


def in_batch(column: Callable[[PromptGroup], Any], groups: Sequence[PromptGroup], num_generations: int) -> list:
    """Return the values that `column` has for the completions of the groups, in the order of the rows of a batch."""
    entries = []
    for group in groups:
        values = column(group)
        entries += [values[i % group.num_received] for i in range(num_generations)]
    return entries

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""A group: one prompt with its completions, from the dataset to the gradient.

    DRAWN -> IN_FLIGHT -> PARTIAL -> IN_FLIGHT -> ACCEPTED -> TRAINED
                 |           |           |           |
                 +-----------+-----+-----+-----------+
                                   v
                                DROPPED

A group that is requested whole goes from IN_FLIGHT to ACCEPTED or DROPPED at once. One of which only the first
completions were requested becomes PARTIAL if these differ, and its rest is requested. If a request is cancelled, its
group goes back to DRAWN or PARTIAL. PARTIAL and ACCEPTED groups are dropped if no later rollout may train on them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from .example_names import content_digest, problem_source
from .rows import Row


class GroupState(StrEnum):
    """The states of a group."""

    DRAWN = "drawn"  # from the stream, nothing requested
    IN_FLIGHT = "in flight"  # completions are requested
    PARTIAL = "partial"  # its first completions differ, the rest is not requested yet
    ACCEPTED = "accepted"  # whole, and waits for a batch
    DROPPED = "dropped"  # for a reason
    TRAINED = "trained"  # in a batch


_NEXT_STATES = {
    GroupState.DRAWN: {GroupState.IN_FLIGHT},
    # Back to DRAWN or PARTIAL if the request was cancelled.
    GroupState.IN_FLIGHT: {
        GroupState.PARTIAL,
        GroupState.ACCEPTED,
        GroupState.DROPPED,
        GroupState.DRAWN,
    },
    GroupState.PARTIAL: {GroupState.IN_FLIGHT, GroupState.DROPPED},
    GroupState.ACCEPTED: {GroupState.TRAINED, GroupState.DROPPED},
    GroupState.DROPPED: set(),
    GroupState.TRAINED: set(),
}


@dataclass(frozen=True)
class GenerationRequest:
    """A request to the generation engine: completions of one group, from its first one or after those that it has."""

    group: "PromptGroup"
    num_completions: int
    policy_rollout: int = 0  # the rollout whose policy samples, by its number in the run
    policy_step: int = 0  # optimizer steps behind that policy
    expires_at: int = 0  # the last rollout that may take the answer in

    @property
    def is_first(self) -> bool:
        """Whether the group has no completion yet."""
        return self.group.num_received == 0

    @property
    def may_wait(self) -> bool:
        """Whether a later rollout than the next one may take the answer in."""
        return self.expires_at > self.policy_rollout + 1

    @property
    def is_whole(self) -> bool:
        """Whether all of the group is requested at once."""
        return self.is_first and self.num_completions == self.group.num_generations


def num_completions_of(requests: Iterable[GenerationRequest]) -> int:
    """Return how many completions are requested."""
    return sum(request.num_completions for request in requests)


@dataclass(eq=False)
class PromptGroup:
    """
    One prompt and its completions. Every process has the same groups in the same states; only `rows` differ.

    The columns of completions have one entry for each completion received, in the order in which they were requested.
    """

    number: int  # in the run, in the order of the draw
    name: str  # of the prompt
    example: dict[str, Any]
    num_generations: int  # completions when it is whole
    stream_position: tuple[int, int]  # passes before it, and its position in the pass
    source: str | None = None
    state: GroupState = GroupState.DRAWN
    drop_reason: str | None = None
    request: GenerationRequest | None = None  # while it is in flight
    round: Any = None  # the [`Round`] in which it was last decided on
    rewards: Tensor = field(default_factory=lambda: torch.zeros(0, 0))  # (completions, reward functions)
    lengths: list[int] = field(default_factory=list)  # the model's own tokens of each completion
    truncated: list[bool] = field(default_factory=list)  # whether the length limit ended it
    extra_logs: dict[str, list] = field(default_factory=dict)  # what reward functions logged of each completion
    policy_rollouts: list[int] = field(default_factory=list)  # the rollout whose policy sampled it
    policy_steps: list[int] = field(default_factory=list)  # optimizer steps behind that policy
    ranks: list[int] = field(default_factory=list)  # the process that holds its row
    rows: dict[int, Row] = field(default_factory=dict)  # those that this process holds, by their index in the group
    num_settled: int = 0  # completions that a finished round decided on; the others are of a round that is under way

    @property
    def num_received(self) -> int:
        """Number of completions that it has."""
        return len(self.ranks)

    @property
    def num_missing(self) -> int:
        """Number of completions that it still needs."""
        return self.num_generations - self.num_received

    @property
    def is_whole(self) -> bool:
        """Whether it has all its completions."""
        return self.num_received >= self.num_generations

    @property
    def is_split(self) -> bool:
        """Whether several processes hold its rows."""
        return len(set(self.ranks)) > 1

    def staleness(self, rollout: int) -> int:
        """Return how many rollouts before this one the policy of its oldest completion was the present one."""
        return rollout - min(self.policy_rollouts, default=rollout)

    def move_to(self, state: GroupState, reason: str | None = None) -> None:
        """Change the state; raise for a change that is not described at the top of this file."""
        if state not in _NEXT_STATES[self.state]:
            raise RuntimeError(f"Group {self.number} of prompt {self.name!r} cannot go from {self.state} to {state}.")
        self.state, self.drop_reason = state, reason

    def receive(self, request: GenerationRequest, ranks: Sequence[int]) -> None:
        """Add the completions of a request, which these processes hold."""
        self.ranks += ranks
        self.policy_rollouts += [request.policy_rollout] * len(ranks)
        self.policy_steps += [request.policy_step] * len(ranks)

    def forget_unsettled(self) -> None:
        """Forget completions on which it was not decided, because their round was interrupted."""
        num = self.num_settled
        for column in (self.lengths, self.truncated, self.policy_rollouts, self.policy_steps, self.ranks):
            del column[num:]
        self.rewards = self.rewards[:num]
        self.extra_logs = {name: values[:num] for name, values in self.extra_logs.items()}
        self.rows = {index: row for index, row in self.rows.items() if index < num}

    def shorten_rows(self) -> None:
        """Keep one token of each completion: of a dropped group no more is needed than fills a batch."""
        self.rows = {index: row.shortened() for index, row in self.rows.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, with the rows of this process; loadable with `weights_only=True`."""
        request, is_accepted = self.request, self.state is GroupState.ACCEPTED
        return {
            "number": self.number,
            "name": self.name,
            "stream_position": self.stream_position,
            # An accepted group is not sampled again, so its example is not looked for.
            "example": None if is_accepted else content_digest({**self.example, "id": None}),
            "source": self.source,
            "state": self.state.value,
            "request": None
            if request is None
            else [request.num_completions, request.policy_rollout, request.policy_step, request.expires_at],
            "rewards": self.rewards,
            "lengths": self.lengths,
            "truncated": self.truncated,
            "policy_rollouts": self.policy_rollouts,
            "policy_steps": self.policy_steps,
            "ranks": self.ranks,
            "rows": {index: row.state_dict() for index, row in self.rows.items()},
        }

    @classmethod
    def from_state_dict(cls, state: dict[str, Any], example: dict[str, Any], num_generations: int) -> "PromptGroup":
        """Return the group that [`PromptGroup.state_dict`] described, with its example, which is read again."""
        position = tuple(state["stream_position"])
        group = cls(state["number"], state["name"], example, num_generations, position)
        for name in _PLAIN_COLUMNS:
            setattr(group, name, state[name])
        group.state, group.num_settled = GroupState(state["state"]), len(group.ranks)
        group.rows = {index: Row.from_state_dict(row) for index, row in state["rows"].items()}
        if state["request"] is not None:
            group.request = GenerationRequest(group, *state["request"])
        return group


_PLAIN_COLUMNS = (
    "source",
    "rewards",
    "lengths",
    "truncated",
    "policy_rollouts",
    "policy_steps",
    "ranks",
)


def is_example_of(example: dict[str, Any], state: dict[str, Any]) -> bool:
    """Return whether an example holds what that of a saved group held."""
    return content_digest({**example, "id": None}) == state["example"]


def new_group(
    number: int, name: str, example: dict[str, Any], num_generations: int, stream_position: tuple[int, int]
) -> PromptGroup:
    """Return a group that was just drawn."""
    return PromptGroup(number, name, example, num_generations, stream_position, problem_source(example))

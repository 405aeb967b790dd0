# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""A group: one prompt with its completions, from the draw of the prompt to training. Its states are:

    DRAWN -> IN_FLIGHT -> PARTIAL -> IN_FLIGHT -> ACCEPTED -> TRAINED
                 |           |           |           |
                 +-----------+-----+-----+-----------+
                                   v
                                DROPPED

A group that is requested whole goes from IN_FLIGHT directly to ACCEPTED or DROPPED. If only its first completions were
requested and their rewards differ, it becomes PARTIAL, and its rest is requested later. If a request is cancelled, the
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
    """State of a group."""

    DRAWN = "drawn"  # its prompt was drawn, but nothing is requested
    IN_FLIGHT = "in flight"  # completions are requested
    PARTIAL = "partial"  # the rewards of its first completions differ, and its rest is not requested yet
    ACCEPTED = "accepted"  # it is whole and waits for a batch
    DROPPED = "dropped"  # it does not train, but may fill up a batch
    TRAINED = "trained"  # it was put into a batch to train


_NEXT_STATES = {
    GroupState.DRAWN: {GroupState.IN_FLIGHT},
    # It goes back to DRAWN or PARTIAL if the request is cancelled.
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
    """
    A request to the engine for completions of one group: all of them, its first ones, or the rest.

    Which of these it is follows from how many completions the group has. So `is_first` and `is_whole` are only right
    until the completions are received.
    """

    group: "PromptGroup"
    num_completions: int
    weights_rollout: int = 0  # the rollout with whose weights the completions are sampled
    weights_step: int = 0  # optimizer steps that these weights have had
    # Number of the last rollout that may receive the completions. Only set if they are requested ahead.
    expires_at: int = 0

    @property
    def is_first(self) -> bool:
        """Whether the group has no completion yet."""
        return self.group.num_received == 0

    @property
    def may_wait_two_rollouts(self) -> bool:
        """Whether the completions may be received up to two rollouts after the one whose weights sample them."""
        return self.expires_at > self.weights_rollout + 1

    @property
    def is_whole(self) -> bool:
        """Whether the whole group is requested at once."""
        return self.is_first and self.num_completions == self.group.num_generations


def num_completions_of(requests: Iterable[GenerationRequest]) -> int:
    """Return the total number of completions that are requested."""
    return sum(request.num_completions for request in requests)


@dataclass(eq=False)
class PromptGroup:
    """
    One prompt and its completions. Every process has the same groups in the same states, and only `rows` differ.

    The lists have one entry per received completion, in the order in which the completions were requested.
    """

    number: int  # counted over the run, in the order in which prompts were drawn
    name: str  # name of the prompt
    example: dict[str, Any]
    num_generations: int  # number of completions when it is whole
    stream_position: tuple[int, int]  # number of passes before its pass, and its position in that pass
    source: str | None = None
    state: GroupState = GroupState.DRAWN
    drop_reason: str | None = None
    request: GenerationRequest | None = None  # set while it is in flight
    round: Any = None  # the [`Round`] in which the latest decision on it was made
    rewards: Tensor = field(default_factory=lambda: torch.zeros(0, 0))  # (completions, reward functions)
    lengths: list[int] = field(default_factory=list)  # number of tokens that the model generated
    truncated: list[bool] = field(default_factory=list)  # whether the completion was cut off at the length limit
    extra_logs: dict[str, list] = field(default_factory=dict)  # columns that reward functions logged with `log_extra`
    weights_rollouts: list[int] = field(
        default_factory=list
    )  # the rollout with whose weights the completion was sampled
    weights_steps: list[int] = field(default_factory=list)  # optimizer steps that these weights have had
    ranks: list[int] = field(default_factory=list)  # the process that holds the completion's row
    rows: dict[int, Row] = field(default_factory=dict)  # rows that this process holds, by their index in the group
    num_decided: int = 0  # completions that a decision was made on; further ones belong to an unfinished round

    @property
    def num_received(self) -> int:
        """Number of completions received."""
        return len(self.ranks)

    @property
    def num_completions_missing(self) -> int:
        """Number of completions that it lacks to be whole."""
        return self.num_generations - self.num_received

    @property
    def is_whole(self) -> bool:
        """Whether it has all its completions."""
        return self.num_received >= self.num_generations

    @property
    def is_on_several_ranks(self) -> bool:
        """Whether several processes hold its rows."""
        return len(set(self.ranks)) > 1

    def staleness(self, rollout: int) -> int:
        """Return how many rollouts before `rollout` the model had the oldest weights that sampled its completions."""
        return rollout - min(self.weights_rollouts, default=rollout)

    def move_to(self, state: GroupState, reason: str | None = None) -> None:
        """Change the state. Raise if the change is not one of those described at the top of this file."""
        if state not in _NEXT_STATES[self.state]:
            raise RuntimeError(
                f"Group {self.number} of prompt {self.name!r} cannot go from {self.state} to {state}. This is a bug "
                "in trl-dapo: please report it."
            )
        self.state, self.drop_reason = state, reason

    def receive(self, request: GenerationRequest, ranks: Sequence[int]) -> None:
        """Add the completions of a request. `ranks` are the processes that hold their rows."""
        self.ranks += ranks
        self.weights_rollouts += [request.weights_rollout] * len(ranks)
        self.weights_steps += [request.weights_step] * len(ranks)

    def forget_undecided(self) -> None:
        """Remove completions that no decision was made on, because their round was interrupted."""
        num = self.num_decided
        for column in (self.lengths, self.truncated, self.weights_rollouts, self.weights_steps, self.ranks):
            del column[num:]
        self.rewards = self.rewards[:num]
        self.extra_logs = {name: values[:num] for name, values in self.extra_logs.items()}
        self.rows = {index: row for index, row in self.rows.items() if index < num}

    def forget_extras(self) -> None:
        """
        Remove what reward functions logged, and the columns that a `rollout_func` added for them. Both may be of any
        type, and a checkpoint could not store them. The columns are not needed any more: a `rollout_func` samples
        whole groups, which have been scored by now. What was logged of first completions is usually logged again,
        since they are scored again with the rest.
        """
        self.extra_logs = {}
        for row in self.rows.values():
            row.extra_columns = None

    def shorten_rows(self) -> None:
        """Keep only one token of each completion, which is enough for a dropped group to fill up a batch."""
        self.rows = {index: row.shortened() for index, row in self.rows.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, with the rows of this process. It can be loaded with `weights_only=True`."""
        request, is_accepted = self.request, self.state is GroupState.ACCEPTED
        return {
            "number": self.number,
            "name": self.name,
            "stream_position": self.stream_position,
            # An accepted group requests no more completions, so its example is not needed again.
            "example_digest": None if is_accepted else content_digest({**self.example, "id": None}),
            "source": self.source,
            "state": self.state.value,
            "request": None
            if request is None
            else [request.num_completions, request.weights_rollout, request.weights_step, request.expires_at],
            "rewards": self.rewards,
            "lengths": self.lengths,
            "truncated": self.truncated,
            "weights_rollouts": self.weights_rollouts,
            "weights_steps": self.weights_steps,
            "ranks": self.ranks,
            "rows": {index: row.state_dict() for index, row in self.rows.items()},
        }

    @classmethod
    def from_state_dict(cls, state: dict[str, Any], example: dict[str, Any], num_generations: int) -> "PromptGroup":
        """Return the group saved by [`PromptGroup.state_dict`]. `example` is read from the dataset again."""
        position = tuple(state["stream_position"])
        group = cls(state["number"], state["name"], example, num_generations, position)
        for name in _PLAIN_COLUMNS:
            setattr(group, name, state[name])
        group.state, group.num_decided = GroupState(state["state"]), len(group.ranks)
        group.rows = {index: Row.from_state_dict(row) for index, row in state["rows"].items()}
        if state["request"] is not None:
            group.request = GenerationRequest(group, *state["request"])
        return group


_PLAIN_COLUMNS = (
    "source",
    "rewards",
    "lengths",
    "truncated",
    "weights_rollouts",
    "weights_steps",
    "ranks",
)


def is_example_of(example: dict[str, Any], state: dict[str, Any]) -> bool:
    """Return whether an example has the same content as that of a saved group."""
    return content_digest({**example, "id": None}) == state["example_digest"]


def new_group(
    number: int, name: str, example: dict[str, Any], num_generations: int, stream_position: tuple[int, int]
) -> PromptGroup:
    """Return a new group, for a prompt that was just drawn."""
    return PromptGroup(number, name, example, num_generations, stream_position, problem_source(example))

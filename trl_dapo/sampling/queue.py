# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The queue: every group that was requested and has neither trained nor been dropped, in the order of the draw.

It is the one owner of what is in flight, partly sampled, or accepted and waiting for a batch. Surplus is carried by
leaving it here at the end of a rollout.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

from .groups import GenerationRequest, GroupState, PromptGroup, is_example_of, new_group
from .prompts import PromptStream


class GroupQueue:
    """The groups that wait for completions or for a batch. Every process holds the same; only their rows differ."""

    def __init__(self, num_generations: int) -> None:
        self.num_generations = num_generations
        self.num_drawn = 0  # groups of the run, each of which has its number
        self._groups: dict[int, PromptGroup] = {}

    def __len__(self) -> int:
        return len(self._groups)

    # ---- What is in it, in the order of the draw ----

    def in_state(self, state: GroupState) -> list[PromptGroup]:
        """Return the groups in one state."""
        return [group for group in self._groups.values() if group.state is state]

    @property
    def drawn(self) -> list[PromptGroup]:
        """Groups of which nothing is requested: their request was cancelled."""
        return self.in_state(GroupState.DRAWN)

    @property
    def partial(self) -> list[PromptGroup]:
        """Groups of which the first completions differ, and the rest is not requested yet."""
        return self.in_state(GroupState.PARTIAL)

    @property
    def accepted(self) -> list[PromptGroup]:
        """Groups that wait for a batch."""
        return self.in_state(GroupState.ACCEPTED)

    @property
    def in_flight(self) -> list[GenerationRequest]:
        """The requests whose completions have not arrived."""
        return [group.request for group in self.in_state(GroupState.IN_FLIGHT) if group.request is not None]

    @property
    def held(self) -> list[PromptGroup]:
        """Groups with completions."""
        return [group for group in self._groups.values() if group.num_received]

    # ---- In ----

    def draw(self, name: str, example: dict[str, Any], stream_position: tuple[int, int]) -> PromptGroup:
        """Return a new group of a prompt. It is in the queue from its first request on."""
        group = new_group(self.num_drawn, name, example, self.num_generations, stream_position)
        self.num_drawn += 1
        return group

    def send(self, requests: Sequence[GenerationRequest]) -> None:
        """Note that these requests are in flight."""
        for request in requests:
            request.group.move_to(GroupState.IN_FLIGHT)
            request.group.request = request
            self._groups[request.group.number] = request.group
        self._groups = dict(sorted(self._groups.items()))

    # ---- Out ----

    def settle(self, group: PromptGroup, state: GroupState, reason: str | None = None) -> None:
        """Note what was decided on a group whose completions have come."""
        group.move_to(state, reason)
        group.request, group.num_settled = None, group.num_received
        if state is GroupState.DROPPED:
            del self._groups[group.number]

    def take_batch(self, num: int) -> list[PromptGroup]:
        """Take out up to `num` accepted groups, the oldest first."""
        batch = self.accepted[:num]
        for group in batch:
            group.move_to(GroupState.TRAINED)
            del self._groups[group.number]
        return batch

    def drop(self, groups: Iterable[PromptGroup], reason: str) -> None:
        """Take out groups that will not train."""
        for group in list(groups):
            self.settle(group, GroupState.DROPPED, reason)

    def cancel_requests(self) -> None:
        """Note that nothing of what is in flight will come."""
        for request in self.in_flight:
            group = request.group
            group.move_to(GroupState.PARTIAL if group.num_received else GroupState.DRAWN)
            group.request = None

    def forget_requests(self) -> None:
        """Take out the groups that have no completion yet: their prompts are drawn again, or never."""
        self.cancel_requests()
        for group in self.drawn:
            del self._groups[group.number]

    def forget_unsettled(self) -> None:
        """Forget the completions of a round that was interrupted before it was decided on them."""
        for request in self.in_flight:
            request.group.forget_unsettled()

    def clear(self) -> None:
        """Take out all groups."""
        self._groups = {}

    def renew(self, numbers: Collection[int], rollout: int, step: int, *, keeps_together: bool = False) -> None:
        """
        Note that these groups in flight are requested again, of the policy of this rollout. With `keeps_together`,
        those that expire with answered ones still expire with them, since processes share only all of them equally.
        """
        expires_with_answered: set[int] = set()
        if keeps_together:
            expires_with_answered = {
                request.expires_at for request in self.in_flight if request.group.number not in numbers
            }
        for request in self.in_flight:
            if request.group.number not in numbers:
                continue
            expires_at = request.expires_at
            if request.may_wait and expires_at not in expires_with_answered:
                expires_at += rollout - request.policy_rollout  # it may wait as long again
            request.group.request = replace(request, policy_rollout=rollout, policy_step=step, expires_at=expires_at)

    @property
    def oldest_in_flight(self) -> tuple[int, int] | None:
        """The stream position of the oldest group without completions."""
        waiting = [request.group for request in self.in_flight if request.is_first] + self.drawn
        return min((group.stream_position for group in waiting), default=None)

    # ---- Checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, rows of this process included; loadable with `weights_only=True`."""
        return {"num_drawn": self.num_drawn, "groups": [group.state_dict() for group in self._groups.values()]}

    def load_state_dict(self, state: dict[str, Any], stream: PromptStream) -> tuple[int, bool]:
        """
        Continue from a state, with examples that are read from the stream again.

        Return how many partial groups were left behind because their examples are not found, and whether the examples
        of all groups in flight were found. If not, none of those without completions is kept: they are drawn again.
        """
        saved = state["groups"]
        self.num_drawn, self._groups = state["num_drawn"], {}
        # Nothing more is requested of an accepted group, so its example is not needed.
        positions = {tuple(entry["stream_position"]) for entry in saved if entry["state"] != GroupState.ACCEPTED.value}
        examples = stream.again(positions)
        num_lost, has_all = 0, True
        for entry in saved:
            position = tuple(entry["stream_position"])
            example = examples.get(position, {})
            is_needed = entry["state"] != GroupState.ACCEPTED.value
            if is_needed and not (position in examples and is_example_of(example, entry)):
                if entry["ranks"]:
                    num_lost += 1
                has_all = has_all and entry["request"] is None
                continue
            group = PromptGroup.from_state_dict(entry, example, self.num_generations)
            self._groups[group.number] = group
        if not has_all:
            self.forget_requests()
        return num_lost, has_all

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The queue of groups: every group that was requested and has neither trained nor been dropped.

Groups are in the order in which their prompts were drawn. Those in flight, those whose request was cancelled, partial
groups and accepted groups that wait for a batch are all kept here, and nowhere else. Surplus groups are carried over
by leaving them in the queue at the end of a rollout.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

from .groups import GenerationRequest, GroupState, PromptGroup, is_example_of, new_group
from .prompts import PromptStream


class GroupQueue:
    """
    Groups that wait for completions or for a batch. Every process has the same groups, but different rows of them.
    """

    def __init__(self, num_generations: int) -> None:
        self.num_generations = num_generations
        self.num_drawn = 0  # groups drawn in the run so far, and the number of the next one
        self._groups: dict[int, PromptGroup] = {}

    def __len__(self) -> int:
        return len(self._groups)

    # ---- Contents, in the order in which prompts were drawn ----

    def in_state(self, state: GroupState) -> list[PromptGroup]:
        """Return the groups in a state."""
        return [group for group in self._groups.values() if group.state is state]

    @property
    def cancelled(self) -> list[PromptGroup]:
        """Groups without completions whose request was cancelled."""
        return self.in_state(GroupState.DRAWN)

    @property
    def partial(self) -> list[PromptGroup]:
        """Groups whose first completions have different rewards and whose rest is not requested yet."""
        return self.in_state(GroupState.PARTIAL)

    @property
    def accepted(self) -> list[PromptGroup]:
        """Accepted groups that wait for a batch."""
        return self.in_state(GroupState.ACCEPTED)

    @property
    def requests_in_flight(self) -> list[GenerationRequest]:
        """Requests whose completions have not been received."""
        return [group.request for group in self.in_state(GroupState.IN_FLIGHT) if group.request is not None]

    @property
    def held(self) -> list[PromptGroup]:
        """Groups that have completions."""
        return [group for group in self._groups.values() if group.num_received]

    # ---- Adding groups ----

    def draw(self, name: str, example: dict[str, Any], stream_position: tuple[int, int]) -> PromptGroup:
        """Return a new group for a prompt. It enters the queue with its first request."""
        group = new_group(self.num_drawn, name, example, self.num_generations, stream_position)
        self.num_drawn += 1
        return group

    def send(self, requests: Sequence[GenerationRequest]) -> None:
        """Mark these requests as in flight, and add their groups to the queue."""
        for request in requests:
            request.group.move_to(GroupState.IN_FLIGHT)
            request.group.request = request
            self._groups[request.group.number] = request.group
        self._groups = dict(sorted(self._groups.items()))

    # ---- Removing groups ----

    def record_decision(self, group: PromptGroup, state: GroupState, reason: str | None = None) -> None:
        """Record the decision on a group whose completions were received. A dropped group leaves the queue."""
        group.move_to(state, reason)
        group.request, group.num_decided = None, group.num_received
        if state is GroupState.DROPPED:
            del self._groups[group.number]

    def take_batch(self, num: int) -> list[PromptGroup]:
        """Remove and return up to `num` accepted groups, oldest first."""
        batch = self.accepted[:num]
        for group in batch:
            group.move_to(GroupState.TRAINED)
            del self._groups[group.number]
        return batch

    def drop(self, groups: Iterable[PromptGroup], reason: str) -> None:
        """Drop groups that will not train."""
        for group in list(groups):
            self.record_decision(group, GroupState.DROPPED, reason)

    def cancel_requests(self) -> None:
        """Cancel all requests in flight: their completions will not be received."""
        for request in self.requests_in_flight:
            group = request.group
            group.move_to(GroupState.PARTIAL if group.num_received else GroupState.DRAWN)
            group.request = None

    def forget_requests(self) -> None:
        """Cancel all requests, and remove the groups without completions. Their prompts may be drawn again."""
        self.cancel_requests()
        for group in self.cancelled:
            del self._groups[group.number]

    def forget_undecided(self) -> None:
        """Remove completions that no decision was made on, because their round was interrupted."""
        for request in self.requests_in_flight:
            request.group.forget_undecided()

    def clear(self) -> None:
        """Remove all groups, and number new ones from 0."""
        self.num_drawn, self._groups = 0, {}

    def reissue_requests(
        self, numbers: Collection[int], rollout: int, step: int, *, keeps_together: bool = False
    ) -> None:
        """
        Mark the requests of these groups as requested again, with the weights of the present rollout. If they may wait
        for two rollouts, their time to wait starts again.

        Args:
            numbers (`Collection[int]`):
                Numbers of the groups whose completions were lost.
            rollout (`int`):
                Number of the present rollout.
            step (`int`):
                Optimizer steps before this rollout.
            keeps_together (`bool`, *optional*, defaults to `False`):
                Whether requests that expire in the same rollout must be received together, because the processes can
                share all of them equally, but perhaps not a part of them. Then the time of a lost request does not
                start again if another request that expires in the same rollout was not lost.
        """
        expiries_of_others: set[int] = set()
        if keeps_together:
            expiries_of_others = {
                request.expires_at for request in self.requests_in_flight if request.group.number not in numbers
            }
        for request in self.requests_in_flight:
            if request.group.number not in numbers:
                continue
            expires_at = request.expires_at
            if request.may_wait_two_rollouts and expires_at not in expiries_of_others:
                expires_at += rollout - request.weights_rollout  # its full time to wait starts again
            request.group.request = replace(request, weights_rollout=rollout, weights_step=step, expires_at=expires_at)

    @property
    def first_unsampled_position(self) -> tuple[int, int] | None:
        """The stream position of the oldest group without completions."""
        unsampled = [request.group for request in self.requests_in_flight if request.is_first] + self.cancelled
        return min((group.stream_position for group in unsampled), default=None)

    # ---- Checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, with the rows of this process. It can be loaded with `weights_only=True`."""
        return {"num_drawn": self.num_drawn, "groups": [group.state_dict() for group in self._groups.values()]}

    def load_state_dict(self, state: dict[str, Any], stream: PromptStream) -> tuple[int, bool]:
        """
        Continue from a saved state. The examples of its groups are read from the stream again.

        Return how many groups with completions were left behind because their examples were not found, and whether
        the examples of all groups in flight were found. If one of these examples is missing, all requests are
        cancelled, and the groups without completions are removed, so that their prompts can be drawn again.
        """
        saved = state["groups"]
        self.num_drawn, self._groups = state["num_drawn"], {}
        # An accepted group requests no more completions, so its example is not needed.
        positions = {tuple(entry["stream_position"]) for entry in saved if entry["state"] != GroupState.ACCEPTED.value}
        examples = stream.reread_examples(positions)
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

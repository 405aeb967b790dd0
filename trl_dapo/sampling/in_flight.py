# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""What is asked for beside the training loop. Knows nothing of requests; every process holds the same."""

from collections.abc import Collection
from typing import Any

from .prompts import PromptStream
from .refill import Group
from .rounds import Ask
from .screening import asks_of, state_of


class InFlight(list[Ask]):
    """What is asked for and no rollout has taken in, in the order in which it was asked for."""

    lost: Collection[tuple[int, int] | None] = ()  # the places of those whose answers a checkpoint did not hold

    def begin(self, number: int, step: int) -> None:
        """A rollout begins, and what is lost is asked for again, of its policy."""
        for i, ask in enumerate(self):
            if ask.place in self.lost:  # what might take two rollouts has two again
                more = number - ask.rollout if ask.due > ask.rollout + 1 else 0
                self[i] = ask._replace(rollout=number, step=step, due=ask.due + more)
        self.lost = ()

    def send(self, whole: list[Ask], parts: list[Ask], number: int, step: int, num_rollouts: int) -> None:
        """Adds what a rollout asks for: whole groups, which may take so many rollouts, and parts, which take one."""
        for asks, due in ((parts, number + 1), (whole, number + num_rollouts)):
            self += [ask._replace(rollout=number, step=step, due=due) for ask in asks]

    def take_due(self, number: int) -> list[Ask]:
        """Takes out what would be too old in the rollout after this one."""
        return self._take([ask for ask in self if ask.due <= number])

    def take_whole(self, num: float, multiple_of: int) -> list[Ask]:
        """Takes out up to `num` groups that were asked for as a whole, in a multiple."""
        found = [ask for ask in self if ask.rollout + 1 < ask.due]
        return self._take(found[: int(min(num, len(found))) // multiple_of * multiple_of])

    def _take(self, asks: list[Ask]) -> list[Ask]:
        places = {ask.place for ask in asks}
        self[:] = [ask for ask in self if ask.place not in places]
        return asks

    @property
    def oldest_place(self) -> tuple[int, int] | None:
        """In the stream."""
        return min((ask.place for ask in self if ask.place and not ask.first), default=None)

    def state_dict(self, stream: PromptStream) -> dict[str, Any]:
        """What a checkpoint keeps, and of the stream where it is drawn again if it does not fit, JSON-able."""
        now = stream.state_dict()
        num_passes, position = self.oldest_place or (now["num_passes"], now["position"])
        asks = {"asks": state_of({ask.place: ask for ask in self if ask.place}), "stream": now}
        return {"stream": now | {"num_passes": num_passes, "position": position}, "ahead": asks if self else None}

    def load_state_dict(self, state: dict[str, Any], half: list, stream: PromptStream) -> dict[Group, Ask]:
        """Goes on from it, as far as it fits; returns what is half asked, which goes on too."""
        ahead = state["ahead"] or {}
        asked = ahead.get("asks", [])  # an earlier version's are drawn again
        if asked:
            stream.load_state_dict(ahead["stream"])
        kept, asks = asks_of([half, asked], stream)
        self[:] = [ask for ask in asks.values() if ask.first is None or ask.first in kept]
        if len(self) < len(asked):  # some are of other examples now: all are drawn again
            self.clear()
            stream.load_state_dict(state["stream"])
        return kept

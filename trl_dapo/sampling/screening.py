# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""What a round draws, and asks for first: all of a group, or a few completions that say whether the rest pays."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .example_names import prompt_name
from .prompt_memory import Population, PromptMemory, expected_acceptance
from .prompts import PromptStream
from .refill import Batch, Group
from .rollout import Rollout
from .rounds import Ask


FIRST_FEW = (2, 3, 4, 6, 8)


def expected_cost(correct: float, wrong: float, first: int, num_generations: int) -> float:
    """Completions for one accepted group of prompts like this one, whose pass rate is Beta-distributed."""
    # The rest is asked for only where the first few do not agree, and then the group is accepted for certain.
    return first / max(expected_acceptance(correct, wrong, first), 1e-9) + num_generations - first


def cheapest_first(correct: float, wrong: float, num_generations: int) -> int:
    """The number to ask for first that costs least; `num_generations` is the whole group."""
    choices = [num_generations, *(first for first in FIRST_FEW if first < num_generations)]
    return min(choices, key=lambda first: expected_cost(correct, wrong, first, num_generations))


def num_first(screen: int | str | None, pass_rate: tuple[float, float], num_generations: int) -> int:
    """How many completions of a prompt of this Beta-distributed pass rate are asked for first."""
    if screen == "auto":
        return cheapest_first(*pass_rate, num_generations)
    return num_generations if screen is None else int(screen)


def rest_of(
    half: Mapping[Group, Ask], num_missing: int, most: int | None, num_generations: int, left: float = math.inf
) -> list[Ask]:
    """The rest of as many groups that are half asked as are missing, the oldest first, and no more than `most`."""
    rests = [
        Ask(ask.name, ask.example, num_generations - ask.num, first=group, place=ask.place)
        for group, ask in itertools.islice(half.items(), min(num_missing, most or num_missing))
    ]
    return [ask for ask, num in zip(rests, itertools.accumulate(ask.num for ask in rests), strict=True) if num <= left]


def most_first(screen: int | str | None, num_generations: int) -> int:
    """How many completions are asked for first where there is no room for a whole group."""
    few = max((first for first in FIRST_FEW if first < num_generations), default=num_generations)
    return few if screen in (None, "auto") else int(screen)


@dataclass
class Draw:
    """One round's draws."""

    stream: PromptStream
    memory: PromptMemory | None
    population: Population
    screen: int | str | None
    num_generations: int
    multiple_of: int  # prompts
    left: float = math.inf  # completions that may yet be asked for
    rate: float = 0.0  # share of groups that pass, of which all are asked for

    def take(
        self, num: int, least: float = 0, enough: float = math.inf, room: float = math.inf, ahead: float = 0.0
    ) -> list[Ask]:
        """The next `num` prompts, or fewer; the share `ahead` is for the rollout after this one."""
        # Fewer where the completions have no `room`, or where the memory expects `enough` groups of `least`.
        memory, known, G = self.memory, self.memory or self.population, self.num_generations
        nums, expected, of_few, few = list[int](), 0.0, 0.0, most_first(self.screen, G)

        def skip(name: str, may_skip: bool) -> bool:
            return memory is not None and memory.draw_skip(name, G, may_skip)

        def is_enough(name: str) -> bool:
            nonlocal expected, of_few, room
            nums.append(num_first(self.screen, known.pass_rate(name), G))
            if memory is not None:
                expected += (new := memory.expected_acceptance(name, nums[-1]))
                of_few += new * (nums[-1] < G)
            room -= min(nums[-1], few)
            self.left -= nums[-1] + self.rate * (G - nums[-1])
            # Of what is asked ahead only first few can wait: whole groups would be surplus of this rollout.
            share = 1.0 - ahead * (1.0 - of_few / expected) if expected else 1.0
            is_found = expected >= share * enough and len(nums) >= share * least
            is_found = is_found or self.left < self.multiple_of * G
            return (is_found and len(nums) % self.multiple_of == 0) or room < few

        prompts = self.stream.take(num if room >= few else 0, skip if memory else None, is_enough)
        return [Ask(*p, n, place=at) for p, n, at in zip(prompts, nums, self.stream.taken_at, strict=True)]


def within_rows(asks: list[Ask], most: int, num_generations: int) -> list[Ask]:
    """Asks first for a few where whole groups would be more completions than the engine takes at once."""
    few = most_first(None, num_generations)
    asks, excess = list(asks), sum(ask.num for ask in asks) - most
    for i, ask in reversed(list(enumerate(asks))):
        if excess > 0 and ask.num == num_generations:
            asks[i] = ask._replace(num=few)
            excess -= num_generations - few
    return asks


def apart(asks: Sequence[Ask], num_generations: int, multiple_of: int) -> tuple[list[Ask], list[Ask]]:
    """Groups that are asked for as a whole, in a multiple; the others."""
    whole = [ask for ask in asks if ask.num == num_generations]
    whole = whole[: len(whole) // multiple_of * multiple_of]
    places = {ask.place for ask in whole}
    return whole, [ask for ask in asks if ask.place not in places]


def in_equal_shares(
    asks: list[Ask], num_generations: int, num_ranks: int, take: Callable[[int], list[Ask]]
) -> list[Ask]:
    """The same with one more of some first few, and some of further prompts, so that the ranks have equal shares."""
    num_more, asks = -sum(ask.num for ask in asks) % num_ranks, list(asks)
    for i, ask in reversed(list(enumerate(asks))):
        more = min(num_more, num_generations - ask.num) if ask.first is None else 0
        asks[i], num_more = ask._replace(num=ask.num + more), num_more - more
    if num_more:
        num_more += num_ranks * (num_more == 1)  # a single completion has nothing to be compared with
        num = math.ceil(num_more / num_generations)
        asks += [ask._replace(num=(num_more + i) // num) for i, ask in enumerate(take(num))]
    return asks


def num_for_equal_shares(asks: list[Ask], num_generations: int, num_ranks: int) -> int:
    """Return how many completions [`in_equal_shares`] adds."""
    num_more = -sum(ask.num for ask in asks) % num_ranks
    num_left = num_more - sum(num_generations - ask.num for ask in asks if ask.first is None)
    return num_more + num_ranks if num_left == 1 else num_more


def state_of(asks: Mapping[Group, Ask] | Mapping[tuple[int, int], Ask]) -> list[list]:
    """What a checkpoint keeps of what is asked: where examples stand, which JSON may not hold, each behind its key."""
    return [
        [*key, ask.name, ask.num, ask.place, _content(ask.example), ask.first, ask.rollout, ask.step, ask.due]
        for key, ask in asks.items()
    ]


def asks_of(states: Sequence[list[list]], stream: PromptStream) -> list[dict[Group, Ask]]:
    """The same again, of each, without those whose examples are not there any more, or hold something else."""
    placed = [[entry for entry in state if len(entry) >= 6] for state in states]  # an earlier version kept no place
    examples, found = stream.again({tuple(entry[4]) for entries in placed for entry in entries}), []
    for entries in placed:
        asks = {}
        for number, i, name, num, at, content, *more in entries:
            first, *when = more or [None]
            example = examples.get(tuple(at))
            if example is not None and _content(example) == content:
                asks[Group(number, i)] = Ask(name, example, num, first and Group(*first), tuple(at), *when)
        found.append(asks)
    return found


def _content(example: dict) -> str:
    return prompt_name({**example, "id": None})  # a hash of all that it holds


def to_carry(
    rollout: Rollout, batch: Batch, num_generations: int, num_ranks: int
) -> tuple[list[tuple[list[Group], int]], dict[Group, Ask]]:
    """What goes to the next rollout: groups by size, whole ones first, and where each that is half asked will be."""
    carried = [(batch.carry, num_generations)] if batch.carry else []
    moved: dict[Group, Group] = {}
    for size in sorted({rollout.half[group].num for group in batch.half}):
        groups = [group for group in batch.half if rollout.half[group].num == size]
        moved |= {group: Group(len(carried), i) for i, group in enumerate(groups)}
        # Some several times, for equal shares of the ranks.
        num_more = -len(groups) % (num_ranks // math.gcd(size, num_ranks))
        carried.append(([*groups, *itertools.islice(itertools.cycle(groups), num_more)], size))
    return carried, {moved[group]: rollout.half[group] for group in batch.half}  # the oldest first, as they were

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Rows of a rollout, on their way from the rank that sampled them to the rank that trains on them.

A row is one completion with everything that belongs to it. Rows are kept as columns, with token ids and
log-probabilities as arrays: a rollout of 8,192 rows x 10k tokens is 0.3 GB of int32, but gigabytes of Python integers.
"""

import itertools
import pickle
import zlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from ..ranks import exchange_bytes, rank_and_world_size
from .example_names import problem_source
from .refill import Group, Groups


@dataclass
class Rows:
    """Rows that one rank holds. Every column has one entry a row, `None` where a row has none."""

    prompts: list  # text or messages
    environments: list  # names
    prompt_ids: list  # arrays, as in the next two
    completion_ids: list
    tool_masks: list  # 1 for a completion's tokens that the model made, 0 for those of tools and environments
    completions: list  # text or messages
    logprobs: list  # arrays; of the completion's tokens, by the engine
    images: list  # a list a row
    tool_images: list  # those among them that its tools returned
    old_logps: list  # arrays; of a carried row's tokens, under the policy that sampled them
    ages: list  # rollouts ago that this policy was the present one

    @classmethod
    def empty(cls) -> "Rows":
        return cls(*([] for _ in fields(cls)))

    @classmethod
    def from_generated(cls, generated: tuple, prompts: list, environments: list | None = None) -> "Rows":
        """The rows of what TRL's `_generate` returned for these prompts: a column each, `None`, or empty."""
        prompt_ids, completion_ids, tool_masks, completions, logprobs, _, images, tool_images = generated
        blank = [None] * len(prompts)
        return cls(
            prompts=_copied(prompts),  # TRL's own lists go to reward functions, which may change them
            environments=list(environments or blank),
            prompt_ids=_arrays(prompt_ids, np.int32),
            completion_ids=_arrays(completion_ids, np.int32),
            tool_masks=_arrays(tool_masks or blank, np.int32),
            completions=_copied(completions),
            # vLLM's client says None for a token it could not score; here it becomes NaN.
            logprobs=_arrays(logprobs or blank, np.float32),
            images=list(images or _images_in(prompts)),
            tool_images=list(tool_images or blank),
            old_logps=list(blank),
            ages=[0] * len(prompts),
        )

    def as_generated(self) -> tuple:
        """What TRL's `_generate` would return of these rows."""
        images, tool_images = (column if any(column) else None for column in (self.images, self.tool_images))
        tool_masks, logprobs = (None if column[0] is None else column for column in (self.tool_masks, self.logprobs))
        return (
            _Converted(self.prompt_ids, _as_long),
            _Converted(self.completion_ids, _as_long),
            tool_masks and _Converted(tool_masks, _as_long),
            self.completions,
            logprobs and _Converted(logprobs, np.ndarray.tolist),
            {},
            images,
            tool_images or [],
        )

    def __len__(self) -> int:
        return len(self.prompts)

    def take(self, indices: Sequence[int]) -> "Rows":
        return self._each_column(lambda column: [column[i] for i in indices])

    def shorten(self, indices: Iterable[int]) -> None:
        """Cuts rows to one token, in place, so that they cost next to nothing where they only fill a batch."""
        for i in indices:
            if self.tool_images[i]:  # the images' placeholder tokens lie in the completion
                continue
            for column in (self.completion_ids, self.tool_masks, self.logprobs, self.old_logps):
                if column[i] is not None:
                    column[i] = column[i][:1]

    def release(self, indices: Iterable[int]) -> None:
        """Lets go, in place, of all that rows hold which no batch will ask for."""
        for i in indices:
            for column in fields(self):
                getattr(self, column.name)[i] = None

    def exchange(self, places: Sequence[int], total: int, device: torch.device) -> "Rows":
        """Hands every row to the rank that has its place among the `total` of the global batch. Collective."""
        rank, world_size = rank_and_world_size()
        if world_size == 1:
            return self.take(sorted(range(total), key=places.__getitem__))
        per_rank = total // world_size
        outgoing: list[list[int]] = [[] for _ in range(world_size)]
        for i, place in enumerate(places):
            outgoing[place // per_rank].append(i)
        shares = [([places[i] for i in indices], self.take(indices)) for indices in outgoing]
        payloads = [
            pickle.dumps(share, protocol=5) if share[0] and destination != rank else b""
            for destination, share in enumerate(shares)
        ]
        parts = [shares[rank], *(pickle.loads(payload) for payload in exchange_bytes(payloads, device) if payload)]
        arrived = [place for part_places, _ in parts for place in part_places]
        together = Rows.empty()
        for _, part in parts:
            together.extend(part)
        return together.take(sorted(range(len(arrived)), key=arrived.__getitem__))

    def extend(self, other: "Rows") -> None:
        for column in fields(self):
            getattr(self, column.name).extend(getattr(other, column.name))

    def state_dict(self) -> dict[str, list]:
        """What a checkpoint keeps: tensors for arrays, so that `weights_only=True` loads it."""
        return vars(self._each_column(lambda column: [_swap(x, np.ndarray, torch.from_numpy) for x in column]))

    @classmethod
    def from_state_dict(cls, state: dict[str, list]) -> "Rows":
        return cls(**state)._each_column(lambda column: [_swap(x, Tensor, torch.Tensor.numpy) for x in column])

    def _each_column(self, change: Callable[[list], list]) -> "Rows":
        return Rows(*(change(getattr(self, column.name)) for column in fields(self)))


@dataclass
class Recorded:
    """What TRL made of one round: rows, lengths and what was cut off are this rank's, rewards and logs all ranks'."""

    rows: Rows | None = None
    lengths: Sequence[int] = ()  # completion tokens that the model made
    truncated: list[bool] = field(default_factory=list)  # whether the length limit cut each of them off
    rewards: Tensor | None = None  # `(B, F)`
    metrics: dict[str, list[float]] = field(default_factory=dict)
    logs: dict = field(default_factory=dict)  # for the table of completions


class Ask(NamedTuple):
    """What a round asks for of one prompt: a whole group, its first few completions, or the rest of one half asked."""

    name: str
    example: dict[str, Any]
    num: int  # completions
    first: Group | None = None  # where the first few are, if these are the rest
    place: tuple[int, int] | None = None  # in the stream
    rollout: int = 0  # of whose policy it is asked, by its place in the run
    step: int = 0  # optimizer steps behind that policy
    due: int = 0  # the last rollout that may take it in


@dataclass
class Round:
    """One round, whose groups have one size: of one that asked for several [`Round.by_size`] makes several."""

    prompts: list[str]  # names, in order
    rows: Rows  # those that this rank holds
    rewards_BF: Tensor  # of all ranks' rows, as the next three
    lengths_B: Tensor  # completion tokens that the model made
    truncated_B: Tensor  # cut off by the length limit
    extra_logs: dict[str, list]  # by reward functions
    metrics: dict[str, list[float]]  # TRL's
    ages: list[int] = field(default_factory=list)  # rollouts ago that each group's policy was the present one
    sources: list[str | None] = field(default_factory=list)  # of the prompts
    seconds: float = 0.0  # to sample and score
    asks: Sequence[Ask] = ()  # what each group was asked for, where that may not be all of it
    num_known: int = 0  # completions of each group that an earlier round had brought
    places: Sequence[int] = ()  # of this rank's rows among all ranks'; by default the ranks' shares follow each other
    asked: "Round | None" = None  # of which this is a part

    def __post_init__(self) -> None:
        if not self.places:
            rank, _ = rank_and_world_size()
            self.places = range(rank * len(self.rows), (rank + 1) * len(self.rows))
        if not self.ages:
            self.ages = [0] * len(self.prompts)
        if not self.sources:
            self.sources = [None] * len(self.prompts)

    @classmethod
    def sampled(cls, asks: Sequence[Ask], recorded: Recorded, number: int, accelerator: Accelerator) -> "Round":
        """A round just sampled for the rollout of this number. Collective."""
        names, rows, rewards_BF = [ask.name for ask in asks], recorded.rows, recorded.rewards
        assert rows is not None
        assert rewards_BF is not None
        ages, rank = [number - ask.rollout for ask in asks], rank_and_world_size()[0]
        of_rows = [age for ask, age in zip(asks, ages, strict=True) for _ in range(ask.num)]
        rows.ages = of_rows[rank * len(rows) : (rank + 1) * len(rows)]
        # Of what an earlier policy sampled nobody else can tell any more.
        rows.old_logps = [row if age else None for row, age in zip(rows.logprobs, rows.ages, strict=True)]
        drawn = [zlib.crc32(repr(names).encode())] * len(rows)
        columns = torch.tensor([recorded.lengths, recorded.truncated, drawn], device=accelerator.device)
        lengths_B, truncated_B, drawn_B = accelerator.gather(columns.T.contiguous()).cpu().T
        if (drawn_B != drawn_B[0]).any():
            raise RuntimeError(
                "The processes drew different prompts: their training datasets differ. Shuffle and filter the dataset "
                "with a seed that is the same in every process."
            )
        logs = recorded.logs["extra"].items()
        return cls(
            prompts=names,
            rows=rows,
            rewards_BF=rewards_BF.cpu(),
            lengths_B=lengths_B,
            truncated_B=truncated_B.bool(),
            extra_logs={name: list(values) for name, values in logs if len(values) == len(rewards_BF)},
            metrics=recorded.metrics,
            ages=ages,
            sources=[problem_source(ask.example) for ask in asks],
            asks=asks,
        )

    def by_size(self, rounds: Sequence["Round"]) -> list["Round"]:
        """Its groups, in a round for each size; those of which `rounds` hold the first few are made whole."""
        kinds: dict[tuple[int, int], list[tuple[Ask, int, int]]] = {}
        ends = itertools.accumulate(ask.num for ask in self.asks)
        for ask, end, age in zip(self.asks, ends, self.ages, strict=True):
            num_known = rounds[ask.first.round].num_generations if ask.first else 0
            kinds.setdefault((-num_known, ask.num), []).append((ask, end - ask.num, age))
        if len(kinds) == 1 and not any(ask.first for ask in self.asks):
            return [self]
        parts = []
        for (num_known, num), asked in sorted(kinds.items(), key=lambda kind: kind[0]):  # the oldest first
            pieces = [
                [*([rounds[ask.first.round].piece(ask.first.index)] if ask.first else []), (self, range(i, i + num))]
                for ask, i, _ in asked
            ]
            firsts = [rounds[ask.first.round].ages[ask.first.index] if ask.first else 0 for ask, *_ in asked]
            ages = [max(first, age) for first, (*_, age) in zip(firsts, asked, strict=True)]
            parts.append(self._of_pieces(pieces, [ask for ask, *_ in asked], ages, -num_known))
        return parts

    def piece(self, index: int) -> "Piece":
        """Where the rows of a group are."""
        n = self.num_generations
        return self, range(index * n, (index + 1) * n)

    def _of_pieces(self, groups: list[list["Piece"]], asks: list[Ask], ages: list[int], num_known: int) -> "Round":
        """Groups of rows of several rounds, of which this is the last; each rank keeps the rows that it holds."""
        rows, places = Rows.empty(), list[int]()
        rows_of = [(round_, i) for group in groups for round_, wanted in group for i in wanted]
        pieces = {id(round_): round_ for group in groups for round_, _ in group}
        held = {key: {place: i for i, place in enumerate(round_.places)} for key, round_ in pieces.items()}
        for place, (round_, i) in enumerate(rows_of):
            if i in held[id(round_)]:
                rows.extend(round_.rows.take([held[id(round_)][i]]))
                places.append(place)

        def of_rows(column: str) -> Tensor:
            return torch.stack([getattr(round_, column)[i] for round_, i in rows_of])

        names = dict.fromkeys(name for round_ in pieces.values() for name in round_.extra_logs)
        logs = {
            name: [round_.extra_logs[name][i] if name in round_.extra_logs else None for round_, i in rows_of]
            for name in names
        }
        sources = dict(zip(self.prompts, self.sources, strict=True))
        return Round(
            [ask.name for ask in asks],
            rows,
            of_rows("rewards_BF"),
            of_rows("lengths_B"),
            of_rows("truncated_B"),
            logs,
            metrics={},
            ages=ages,
            sources=[sources[ask.name] for ask in asks],
            asks=asks,
            num_known=num_known,
            places=places,
            asked=self,
        )

    @classmethod
    def of_groups(cls, rows: Rows, rewards_BF: Tensor, ages: list[int], *facts: Tensor) -> "Round":
        """Groups that were sampled and scored before; `facts` are their rows' other two."""
        lengths_B, truncated_B = facts or (torch.zeros(len(rewards_BF)), torch.zeros(len(rewards_BF)).bool())
        return cls([""] * len(ages), rows, rewards_BF, lengths_B, truncated_B, extra_logs={}, metrics={}, ages=ages)

    @property
    def is_stale(self) -> bool:
        """Whether an earlier policy sampled any of its groups."""
        return any(self.ages)

    @property
    def num_generations(self) -> int:
        return len(self.rewards_BF) // len(self.prompts)

    def local_rows(self, index: int) -> tuple[list[int], range]:
        """Of the rows of one group, those that this rank holds: by their place in the group, and in `rows`."""
        start = index * self.num_generations
        first, last = (bisect_left(self.places, place) for place in (start, start + self.num_generations))
        return [place - start for place in self.places[first:last]], range(first, last)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of carried groups, loadable with `weights_only=True`."""
        facts = [self.lengths_B, self.truncated_B]
        return {"rows": self.rows.state_dict(), "rewards": self.rewards_BF, "ages": self.ages, "facts": facts}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> "Round":
        return cls.of_groups(Rows.from_state_dict(state["rows"]), state["rewards"], state["ages"], *state["facts"])


Rounds = Sequence[Round]


def assign_to_ranks(rounds: Rounds, train: Groups, fill: Groups, num_generations: int, device: torch.device) -> Rows:
    """Hands every rank its equal share of a batch of groups. Collective."""
    # Those that only fill it are cut, and have some of their rows several times where they were not asked for all.
    rows = Rows.empty()
    places: list[int] = []
    for place, (number, index) in enumerate([*train, *fill]):
        of_group, of_rank = rounds[number].local_rows(index)
        for first in range(0, num_generations, rounds[number].num_generations):
            copies = [(i, row) for i, row in zip(of_group, of_rank, strict=True) if first + i < num_generations]
            part = rounds[number].rows.take([row for _, row in copies])
            if place >= len(train):
                part.shorten(range(len(part)))
            rows.extend(part)
            places.extend(place * num_generations + first + i for i, _ in copies)
    return rows.exchange(places, (len(train) + len(fill)) * num_generations, device)


def select_groups(rounds: Rounds, columns: Sequence[Sequence | Tensor], groups: Groups, num_generations: int) -> list:
    """The entries of `groups`, as [`assign_to_ranks`] hands out their rows, of a column for each round."""
    sizes = [round_.num_generations for round_ in rounds]
    return [
        columns[number][index * sizes[number] + i % sizes[number]]
        for number, index in groups
        for i in range(num_generations)
    ]


def select_rewards(rounds: Rounds, groups: Groups, num_generations: int, column: str = "rewards_BF") -> Tensor:
    """Rewards, or another column, of the rows of `groups`, in that order: BF."""
    return torch.stack(select_groups(rounds, [getattr(round_, column) for round_ in rounds], groups, num_generations))


def select_extra_logs(rounds: Rounds, groups: Groups, num_generations: int) -> dict[str, list]:
    """What reward functions logged of the rows of `groups`, in that order; `None` where a round has no such column."""
    columns = dict.fromkeys(column for round_ in rounds for column in round_.extra_logs)
    logged = {
        column: [round_.extra_logs.get(column, [None] * len(round_.rewards_BF)) for round_ in rounds]
        for column in columns
    }
    return {column: select_groups(rounds, values, groups, num_generations) for column, values in logged.items()}


def select_ages(rounds: Rounds, groups: Groups) -> list[int]:
    return [rounds[number].ages[index] for number, index in groups]


def carried_groups(
    rounds: Rounds, groups: Groups, num_generations: int, device: torch.device, policy_logps: Callable[[Rows], list]
) -> Round:
    """Groups for the next rollout, with their log-probabilities under the policy that sampled them. Collective."""
    rows, ages = assign_to_ranks(rounds, groups, [], num_generations, device), select_ages(rounds, groups)
    is_new = [old is None for old in rows.old_logps]  # a fresh rest is, whose group is as old as its first few
    if any(gather_object([any(is_new)])):  # all rows: ranks that share weights must make the same passes
        present = policy_logps(rows)
        rows.old_logps = [new if old is None else old for old, new in zip(rows.old_logps, present, strict=True)]
    rows.ages = [age + 1 for age in rows.ages]
    rewards, *facts = (select_rewards(rounds, groups, num_generations, column) for column in _FACTS)
    return Round.of_groups(rows, rewards, [age + 1 for age in ages], *facts)


_FACTS = ("rewards_BF", "lengths_B", "truncated_B")  # of a row that is carried
Piece = tuple[Round, range]  # a round and which of all ranks' rows


class _Converted(Sequence):
    """Rows converted as they are read, one at a time: no second copy of all of them is ever held."""

    def __init__(self, rows: list[np.ndarray], convert: Callable) -> None:
        self._rows, self._convert = rows, convert

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: Any) -> Any:
        return self._convert(self._rows[i])


def _arrays(rows: Iterable, dtype: type) -> list[np.ndarray | None]:
    return [row if row is None else np.array(row, dtype) for row in rows]


def _copied(value: Any) -> Any:
    """Lists and dicts anew, all the way down, and what they hold: of an image there is one."""
    if isinstance(value, list):
        return [_copied(x) for x in value]
    if isinstance(value, str):
        return str(value)  # numpy's own kind cannot be loaded with `weights_only=True`
    return {key: _copied(x) for key, x in value.items()} if isinstance(value, dict) else value


def _as_long(ids: np.ndarray) -> np.ndarray:
    return ids.astype(np.int64)


def _swap(value: Any, kind: type, convert: Callable) -> Any:
    return convert(value) if isinstance(value, kind) else value


def _images_in(prompts: list) -> list[list | None]:
    """The images of each prompt, which TRL has moved into the messages."""
    return [
        [part["image"] for message in prompt for part in message["content"] if part["type"] == "image"] or None
        if isinstance(prompt, list) and any(isinstance(message["content"], list) for message in prompt)
        else None
        for prompt in prompts
    ]

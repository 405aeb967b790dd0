# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The sampler: which prompts a round asks for, when a rollout is complete, and what stays for the next one."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, replace
from typing import Any

from .in_flight import InFlight
from .prompt_memory import Population, PromptMemory, expected_acceptance
from .prompts import PromptStream
from .refill import Batch, Group, missing, refill
from .rollout import Rollout, Totals
from .round_size import AcceptanceRate
from .rounds import Ask, Round, select_ages
from .screening import (
    Draw,
    apart,
    in_equal_shares,
    num_first,
    num_for_equal_shares,
    rest_of,
    state_of,
    within_rows,
)


# What of the header says in which order prompts come.
ORDER = {"seed", "shuffle_dataset", "dataset", "first_rows"}
# In rollouts: sampled two ahead, or one ahead and carried once.
MAX_AGE = 2
# Sources with metrics of their own: those that the run met first.
MAX_SOURCES = 8


@dataclass(eq=False)
class Sampler:
    """Owns what is kept from one rollout to the next. Knows nothing of models; every process decides the same."""

    stream: PromptStream
    _: KW_ONLY
    target: int  # groups of a rollout batch
    num_generations: int  # completions of a group
    mode: str = "filter"  # of `refill.missing`, as the next
    min_replace_ratio: float = 0.3
    carries: bool = False  # whether accepted groups beyond the batch train in the next rollout
    max_gen_batches: float = 10.0  # completions that a rollout may sample, in rollout batches; 0: no limit
    max_empty_batches: float = 0.0  # without a limit, a rollout ends after these without an accepted group; 0: never
    max_round_size: int | None = None  # prompts, rounded down to `multiple_of`, but never below it
    batch_multiplier: float | None = None  # rollout batches of a round; else the acceptance rate sizes it
    memory: PromptMemory | None = None  # of prompts to skip for a while
    screen: int | str | None = None  # completions of a group to ask for first, or "auto"; none: all of it
    num_ranks: int = 1  # that share the rows of a round equally
    has_whole_groups: bool = False  # whether each needs these, since a reward may compare them
    ahead: int = 0  # rollouts that are asked for beside the one that trains

    def __post_init__(self) -> None:
        if self.mode == "mask":
            self.max_gen_batches, self.batch_multiplier = 1.0, 1.0
        self.acceptance, self.promise = AcceptanceRate(), AcceptanceRate()  # and what the memory expected of it
        self._completed = [1.0, 1.0]  # groups made whole, fading: accepted, all; an accuracy band drops some
        self.population = Population() if self.memory is None else self.memory.population
        self.rollout = Rollout(self.target)
        self.totals = Totals()
        self.num_rollouts, self.num_short_rollouts = 0, 0  # the latter in a row
        self.sources: list[str] = []
        self._carried: list[Round] = []  # that of whole groups first
        self._half: dict[Group, Ask] = {}  # those of them that are half asked
        self.in_flight = InFlight()
        self._shared = self.num_ranks // math.gcd(self.num_generations, self.num_ranks)  # groups, of equal shares
        self._is_open, self._step = False, 0  # whether a rollout is under way; optimizer steps behind its policy
        self._passes_at_last_group = self.stream.passes_taken  # where in the stream a group was last accepted
        self._num_passes_warned_of = 0

    # One rollout

    @property
    def multiple_of(self) -> int:  # groups of a round
        least = min(self.max_round_size or math.inf, self.target * min(self.batch_multiplier or 1.0, 1.0))
        has_whole = self.has_whole_groups and self.target % self.num_ranks == 0 and least >= self.num_ranks
        return self.num_ranks if has_whole else self._shared

    @property
    def _smallest_round(self) -> float:
        """Completions for which a round is worth its price: a quarter of a batch, in equal shares for the ranks."""
        return max(self.target / 4, self.multiple_of) * self.num_generations

    @property
    def num_left(self) -> float:
        """Completions that the rollout may yet sample."""
        return self._cap - self.rollout.num_completions

    @property
    def _cap(self) -> float:
        """Completions that a rollout may sample."""
        # What is typed, 1.15, is the nearest to 115 / 100, but 1.15 x 100 is below 115.
        batch = self.target * self.num_generations
        return int(self.max_gen_batches * batch + 1e-6) if self.max_gen_batches else math.inf

    @property
    def _most_for_equal_shares(self) -> int:
        """Completions that are added, at most, so that the ranks have equal shares of groups that are not whole."""
        return 2 * self.num_ranks if self.num_ranks > 1 else 0

    @property
    def counts_correct(self) -> bool:
        """Whether the number of correct completions of each group is needed."""
        return self.memory is not None or self.screen == "auto"

    @property
    def _looks_ahead(self) -> bool:
        """Whether the first few completions of the next batch are sampled with the rest of this one."""
        return self.carries and self.screen is not None and self.max_round_size is None and self.ahead < 2

    @property
    def _new(self) -> Draw:  # with today's screen: a run that begins may leave it out
        return Draw(self.stream, self.memory, self.population, self.screen, self.num_generations, self.multiple_of)

    @property
    def share_completed(self) -> float:
        """Of groups that are half asked, the share that is accepted in the end."""
        return self._completed[0] / self._completed[1]

    def begin(self, step: int = 0) -> None:
        self.rollout, self.num_rollouts = self.next_rollout(), self.num_rollouts + 1
        self._is_open, self._step = True, step
        self.skipped.clear()
        self.in_flight.begin(self.rollout.number, step)

    def next_rollout(self) -> Rollout:
        """The rollout that begins next, with the groups carried into it."""
        whole, half = [Group(0, i) for i in range(self._num_carried)], dict(self._half)
        return Rollout(self.target, self.num_rollouts, [*self._carried], whole, half=half)

    @property
    def _num_carried(self) -> int:
        """Whole groups that were carried."""
        return sum(len(first.prompts) for first in self._carried[:1] if first.num_generations == self.num_generations)

    @property
    def num_missing(self) -> int:
        """Groups that must still be accepted before the batch is full."""
        return missing(self.mode, self.rollout.num_found, self.rollout.target, self.min_replace_ratio)

    @property
    def has_given_up(self) -> bool:
        """Whether a rollout without a limit accepted no group in its last `max_empty_batches` of completions."""
        num_empty = self.rollout.num_completions_without_group / (self.target * self.num_generations)
        return not self.max_gen_batches and 0 < self.max_empty_batches <= num_empty

    def next_prompts(self) -> list[Ask]:
        """What the next round takes in; nothing where the rollout has ended."""
        # First what would be too old for the next rollout, then no more of what is in flight than is missing, in turn.
        rollout, num_missing, num_left = self.rollout, self.num_missing, self.num_left
        if due := self.in_flight.take_due(rollout.number):
            return due
        if num_missing == 0 or self.has_given_up:
            return []
        num = self._in_groups(max(num_missing, self.acceptance.at_most(num_missing)))
        if whole := self.in_flight.take_whole(min(num, num_left // self.num_generations), self.multiple_of):
            return whole
        asks = self._draw(rollout.half, rollout.shortfall, num_left)
        return [ask._replace(rollout=rollout.number, step=self._step) for ask in asks]

    def _in_groups(self, num: int) -> int:
        """As many groups, or a few more, whose rows the ranks can share equally."""
        return -(-num // self.multiple_of) * self.multiple_of

    def draw_ahead(self, num_left: float = math.inf) -> None:
        """Draws what is asked for now, of the policy that is present; `num_left` rollouts are to come."""
        # For the next rollout, once this one is complete, or for as many as fill two, while this one is sampled too.
        num_rollouts, G = min(self.ahead, num_left), self.num_generations
        if num_rollouts <= 0 or (self.ahead == 1 and (self._is_open or self.in_flight)):
            return
        if self.ahead == 1:
            new = self.target - self._num_carried
            asks = self._draw(self._half, new, self._cap) if new > 0 else []
        else:
            share, num_whole = self.share_completed, sum(ask.first is None for ask in self.in_flight)
            if self._is_open:  # what is half asked by then is completed in the next one
                wanted, half = self.rollout.shortfall - share * len(self.rollout.half), {}
            else:
                wanted, half = -self._num_carried, self._half
            wanted += num_rollouts * self.target
            # All of what is in flight may have to be taken in by one rollout: it is no more than one may sample.
            left = self._cap - sum(ask.num for ask in self.in_flight) - self._most_for_equal_shares
            asks = rest_of(half, max(math.ceil(wanted / share), 0), None, G, left)
            left -= sum(ask.num for ask in asks)
            num = self.acceptance.at_most(wanted - share * len(asks)) - num_whole
            if num > 0 and left >= self.multiple_of * G:
                enough = num * self.promise.rate if self.memory else math.inf
                asks += replace(self._new, left=left).take(self._in_groups(num), enough=enough)
        # Groups that are asked for as a whole may take two rollouts; the rest of others must come before that.
        whole, parts = apart(asks, G, self.multiple_of) if self.ahead > 1 else ([], asks)
        parts = in_equal_shares(parts, G, self.num_ranks, self._new.take)
        self.in_flight.send(whole, parts, self.num_rollouts - 1, self._step, self.ahead)

    def _draw(self, half: Mapping[Group, Ask], shortfall: int, left: float) -> list[Ask]:
        """What a round asks for, at most `left` completions."""
        G = self.num_generations
        most = self.max_round_size and max(self.max_round_size // self.multiple_of, 1) * self.multiple_of
        asks = rest_of(half, math.ceil(shortfall / self.share_completed), most, G, left)
        while asks and sum(ask.num for ask in asks) + num_for_equal_shares(asks, G, self.num_ranks) > left:
            asks.pop()
        left -= (num_rest := sum(ask.num for ask in asks))
        num_missing = max(math.ceil(shortfall - len(asks) * self.share_completed), 0)
        is_split, room, num_ahead = self.screen is not None or bool(half), math.inf, 0
        if is_split and most:  # what makes the shares equal has room beside it
            room = most * G - num_rest - self.num_ranks * (self.num_ranks > 1 and len(asks) > 0)
        if self._looks_ahead and num_first(self.screen, self.population.pass_rate(), G) < G:
            # The first few of the next batch too, whose rest then takes one round: a round waits for its longest.
            num_ahead = max(self.target - (len(half) - len(asks)), 0)
        new, reserve = self._new, self._most_for_equal_shares if is_split else 0
        if left - reserve < self._smallest_round and not asks:
            # Near the limit, whole groups: these need nothing more for equal shares.
            new, reserve, num_ahead = replace(new, screen=None), 0, 0
        left -= reserve
        if left >= self._smallest_round and (num := num_missing + num_ahead):
            size = self.acceptance.round_size(num, self.target, carries=self.carries, is_rare=self.ahead == 1)
            if self.batch_multiplier is not None:
                size = int(self.batch_multiplier * self.target)
            size = self._in_groups(size)
            # The size rests on past rounds; where the memory expects more than it did of theirs, fewer are enough.
            enough = size * self.promise.rate if self.memory and self.batch_multiplier is None else math.inf
            new = replace(new, left=left, rate=self.acceptance.rate)
            asks += new.take(min(size, most or size), num, enough, room, num_ahead / num)
        if is_split:
            return in_equal_shares(within_rows(asks, (most or len(asks)) * G, G), G, self.num_ranks, self._new.take)
        return asks

    @property
    def passes(self) -> float:
        """Passes over the dataset, without the prompts in flight."""
        return self.stream.passes_at(*place) if (place := self.in_flight.oldest_place) else self.stream.passes

    @property
    def skipped(self) -> list[float]:
        """Of each prompt passed over since the rollout began, the pass rate that was expected."""
        return [] if self.memory is None else self.memory.skipped

    def add_round(
        self,
        round_: Round,
        reasons: Sequence[str | None],
        counts: Sequence[tuple[int, int]] | None = None,
        step: int = 0,
    ) -> None:
        """Takes in a round, or its groups of one size; `counts` are the correct and scored of its new completions."""
        rollout, number = self.rollout, len(self.rollout.rounds)
        is_half = round_.num_generations < self.num_generations
        if is_half:  # a band judges whole groups
            reasons = [None if reason == "outside_band" else reason for reason in reasons]
        rollout.add(round_, reasons, is_half)
        sources = [name for name in dict.fromkeys(round_.sources) if name is not None and name not in self.sources]
        self.sources += sources[: MAX_SOURCES - len(self.sources)]
        num_accepted = reasons.count(None)
        if round_.num_known:  # it was counted when the first few passed
            fade, new = AcceptanceRate.DECAY, (num_accepted, len(reasons))
            self._completed = [fade * before + num for before, num in zip(self._completed, new, strict=True)]
        else:
            self.acceptance.update(num_accepted * (self.share_completed if is_half else 1.0), len(reasons))
        if num_accepted:
            self._passes_at_last_group = self.stream.passes_taken
        if self.memory is not None and not round_.num_known:
            promises = [self.memory.expected_acceptance(name, round_.num_generations) for name in round_.prompts]
            self.promise.update(sum(promises), len(reasons))
        if self.memory is not None and counts is not None:
            for name, (num_correct, num_scored) in zip(round_.prompts, counts, strict=True):
                self.memory.update(name, num_correct, num_scored, step, is_rest=round_.num_known > 0)
        elif counts is not None and not round_.num_known:
            self.population.fade(AcceptanceRate.DECAY)
            for num_correct, num_scored in counts:
                self.population.update(num_correct, num_scored)
        # What is not accepted can only fill a batch.
        accepted = [reason is None for reason in reasons for _ in range(round_.num_generations)]
        round_.rows.shorten(i for i, place in enumerate(round_.places) if not accepted[place])
        for group in rollout.dropped[rollout.target :]:  # no more can be asked to fill the batch
            if group.round == number:
                round_.rows.release(round_.local_rows(group.index)[1])

    def batch(self) -> Batch:
        """What becomes of the groups of a rollout whose rounds have ended."""
        rollout = self.rollout
        batch = refill(
            self.mode, rollout.carried, rollout.accepted, rollout.dropped, rollout.target, self.min_replace_ratio
        )
        # As many as one rollout can train on, in equal shares for the ranks, and young enough.
        young = [group for group in batch.carry if select_ages(rollout.rounds, [group])[0] < MAX_AGE]
        num_carried = min(len(young), self.target) // self._shared * self._shared
        half = [group for group in rollout.half if select_ages(rollout.rounds, [group])[0] < MAX_AGE]
        if (oldest := max(select_ages(rollout.rounds, batch.train), default=0)) > MAX_AGE:
            raise RuntimeError(f"A group is {oldest} rollouts old, but none may train beyond {MAX_AGE}.")
        # With "mask" a rollout takes what one round brings.
        fell_short = not batch.train if self.mode == "mask" else self.num_missing > 0
        self.num_short_rollouts = self.num_short_rollouts + 1 if fell_short else 0
        self.totals.add(rollout, batch, fell_short)
        if not self.carries:
            return batch._replace(carry=[])
        return batch._replace(carry=young[:num_carried], half=half[: self.target * (1 if self.ahead == 1 else 2)])

    def carry(self, rounds: Sequence[Round], half: dict[Group, Ask] | None = None) -> None:
        """Ends the rollout; `rounds` are the groups of `batch().carry`, then of `batch().half`, which `half` finds."""
        self._carried, self._half, self._is_open = list(rounds), half or {}, False

    def new_passes_without_group(self) -> int:
        """Whole passes since a group was last accepted, if there is something new to say of them, else 0."""
        before, num_passes = self._num_passes_warned_of, int(self.stream.passes_taken - self._passes_at_last_group)
        self._num_passes_warned_of = num_passes
        # At the first, second, fourth, eighth: a line for each pass over few prompts would hide all others.
        return num_passes if num_passes.bit_length() > before.bit_length() else 0

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs and is the same on every rank, JSON-able; the memory has a file beside it."""
        return {
            "header": self.stream.order(),
            **self.in_flight.state_dict(self.stream),
            "acceptance": self.acceptance.state_dict()
            | {"promise": self.promise.state_dict(), "completed": self._completed},
            "memory": None if self.memory is None else self.memory.state_dict(),
            "population": self.population.state_dict(),
            "num_rollouts": self.num_rollouts,
            "sources": self.sources,
            "num_short_rollouts": self.num_short_rollouts,
            "totals": asdict(self.totals),
            "barren_since": self._passes_at_last_group,
        }

    def carried_state_dict(self) -> dict[str, Any] | None:
        """This rank's rows of the carried groups; `None` where none are carried."""
        rounds = [round_.state_dict() for round_ in self._carried]
        return {"rounds": rounds, "half": state_of(self._half)} if rounds else None

    def load_state_dict(self, state: dict, carried: dict | None, ignore_data_skip: bool = False) -> dict[str, tuple]:
        """Goes on from what was kept, as far as it fits; returns what differs, there and here."""
        differs = {}
        if not ignore_data_skip:
            self.stream.begin()
            theirs, own = state["header"], self.stream.order()
            differs = {name: (theirs[name], own[name]) for name in own if theirs.get(name, own[name]) != own[name]}
        if ignore_data_skip or differs:
            self.stream.begin_after(state["stream"])
            self._passes_at_last_group = self.stream.passes_taken
        else:
            self.stream.load_state_dict(state["stream"])
            self._passes_at_last_group = state["barren_since"]
        self._num_passes_warned_of = int(self.stream.passes_taken - self._passes_at_last_group)
        self.acceptance.load_state_dict(state["acceptance"])
        self.promise.load_state_dict(state["acceptance"].get("promise", state["acceptance"]))  # of an earlier version
        self._completed = state["acceptance"].get("completed", [1.0, 1.0])
        self.num_rollouts, self.num_short_rollouts = state["num_rollouts"], state["num_short_rollouts"]
        self.sources, self.totals = list(state["sources"]), Totals(**state["totals"])
        if self.memory is None:
            self.population.load_state_dict(state["population"])
        elif state["memory"] is not None:
            self.memory.load_state_dict(state["memory"])
        else:  # what a new one would have expected so far
            num_groups, unseen = self.acceptance.num_groups, self.memory.population.pass_rate()
            self.promise.update(expected_acceptance(*unseen, self.num_generations) * num_groups, num_groups)
        self._carried, half = [], []
        if carried is not None and not differs:  # other settings would train carried groups wrongly
            self._carried, half = [Round.from_state_dict(round_) for round_ in carried["rounds"]], carried["half"]
        ahead = {} if differs or ignore_data_skip else {"ahead": state["ahead"]}
        self._half = self.in_flight.load_state_dict(state | {"ahead": None} | ahead, half, self.stream)
        return differs

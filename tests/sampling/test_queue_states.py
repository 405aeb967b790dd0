# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Random runs on one to eight simulated processes: what must be true of groups and their rows, whatever happens.

A run is a list of events: rollouts, rollouts that fail in the middle, checkpoints, and resumes that may find other
data or settings. Each process has a sampler of its own, and the functions that exchange rows are the real ones. Only
what carries the bytes is simulated.

`QUEUE_SEQUENCES=10000` runs as many sequences instead of 100 (with `--timeout 0`), `QUEUE_SEED=1` other ones, and
`QUEUE_SHRINK=0` does not look for the shortest sequence that fails.
"""

import copy
import hashlib
import io
import json
import math
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from datasets import Dataset, Features, IterableDataset, Value


pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from trl_dapo.ranks import local_slice
from trl_dapo.sampling import prompts as prompts_module
from trl_dapo.sampling import rounds as rounds_module
from trl_dapo.sampling import rows as rows_module
from trl_dapo.sampling.batch import Batch
from trl_dapo.sampling.groups import GenerationRequest, GroupState, PromptGroup
from trl_dapo.sampling.policies import Decisions
from trl_dapo.sampling.prompt_memory import PromptMemory
from trl_dapo.sampling.prompts import PromptStream
from trl_dapo.sampling.rounds import (
    Completion,
    Round,
    RoundRecording,
    ScoringPlan,
    bring_together,
    note_scores,
    plan_scoring,
    receive_rows,
    rows_of_batch,
)
from trl_dapo.sampling.rows import Row
from trl_dapo.sampling.sampler import MAX_STALENESS, Sampler
from trl_dapo.sampling.screen import Screen


pytestmark = pytest.mark.fast

NUM_SEQUENCES = int(os.environ.get("QUEUE_SEQUENCES", "100"))
SEED = int(os.environ.get("QUEUE_SEED", "0"))
PHASES = tuple(Phase) if os.environ.get("QUEUE_SHRINK", "1") == "1" else (Phase.explicit, Phase.generate)
CPU = torch.device("cpu")
FIRST_ROWS = 2  # rows by which a stream is recognized: fewer than in a run, so that later rows can differ
LONGEST = 5  # tokens of a completion; the longest count as truncated


# ---- The parts of a run ----


@dataclass(frozen=True)
class Config:
    """The settings of a run, its data, and how its prompts are answered."""

    target: int
    num_generations: int
    num_ranks: int
    mode: str = "filter"
    min_replace_ratio: float = 0.3
    carries: bool = False
    rollouts_ahead: int = 0
    max_gen_batches: float = 10.0
    max_empty_batches: float = 0.0
    max_round_size: int | None = None
    batch_multiplier: float | None = None
    screen: int | str | None = None
    has_memory: bool = False
    num_prompts: int = 30
    is_iterable: bool = False
    shuffles: bool = True
    pass_rates: tuple[float, ...] = (0.0, 0.5, 1.0)  # of the prompts, in turn
    share_unscored: float = 0.0
    share_truncated: float = 0.0
    has_band: bool = False  # whether a whole group with too many correct completions is dropped
    drifts: bool = False  # whether all prompts have the same pass rate, which changes from step to step
    compares: bool = False  # whether a reward depends on how many completions of the group were scored with it
    moves: bool = True  # whether completions may be scored by another process, which is not possible with environments


@dataclass(frozen=True)
class RolloutEvent:
    """A rollout. `fails_in` is the round in which it fails, and `fails_at` how far the round has come by then."""

    fails_in: int | None = None
    fails_at: str = "requested"
    num_rollouts_left: float = math.inf  # rollouts of the run after this one


@dataclass(frozen=True)
class SaveEvent:
    """A checkpoint."""


@dataclass(frozen=True)
class ResumeEvent:
    """A resume, from the last checkpoint or from one that is written now."""

    is_from_last: bool = False
    into_used: bool = False  # into the samplers of the run, as when `train` is called a second time
    data: str = "same"  # "other": other content; "tail": only rows after the first ones differ
    ignores_data_skip: bool = False
    # whether the rows fit, each process finds its own answers, and how many answers the checkpoint has
    has_queue: bool = True
    num_answered: int = 99  # of what was requested ahead, how many answers the checkpoint holds


FAILURES = ("requested", "received", "scored", "added", "decided")


@st.composite
def configs(draw: st.DrawFn) -> Config:
    """Settings that `DAPOConfig` accepts."""
    target, num_generations = draw(st.integers(1, 6)), draw(st.integers(2, 8))
    shares = [num for num in range(1, 9) if target * num_generations % num == 0]
    num_ranks = draw(st.sampled_from(shares))
    options: dict[str, Any] = {"mode": draw(st.sampled_from(["filter", "filter", "filter", "replace", "mask"]))}
    if options["mode"] == "filter":
        options["carries"] = draw(st.sampled_from([True, True, False]))
    if options["mode"] == "replace":
        options["min_replace_ratio"] = draw(st.sampled_from([0.3, 0.5, 1.0]))
    if options.get("carries"):
        options["rollouts_ahead"] = draw(st.sampled_from([0, 1, 2, 2]))
    if options["mode"] != "mask":
        options["max_gen_batches"] = draw(st.sampled_from([10.0, 0.0, 1.0, 1.15, 2.5]))
        if options["max_gen_batches"] == 0.0:
            options["max_empty_batches"] = draw(st.sampled_from([1.0, 2.0, 10.0]))
        if num_generations > 2:
            choices = [None, 2, *([3] if num_generations > 3 else []), "auto"]
            options["screen"] = draw(st.sampled_from(choices))
        if options.get("rollouts_ahead", 0) < 2:
            options["max_round_size"] = draw(st.none() | st.integers(1, 2 * target))
            multipliers = [None, None, 0.5, 1.0, 1.5, 3.0]
            most = options["max_gen_batches"] or math.inf
            fitting = [by for by in multipliers if by is None or (by <= most and int(by * target) >= 1)]
            options["batch_multiplier"] = draw(st.sampled_from(fitting))
    rates = st.sampled_from([0.5, 0.0, 1.0, 0.2, 0.9])
    return Config(
        target,
        num_generations,
        num_ranks,
        **options,
        has_memory=draw(st.booleans()),
        num_prompts=draw(st.sampled_from([30, 1, 3, 7, 60])),
        is_iterable=draw(st.booleans()),
        shuffles=draw(st.sampled_from([False, False, True])),
        pass_rates=tuple(draw(st.lists(rates, min_size=1, max_size=4))),
        share_unscored=draw(st.sampled_from([0.0, 0.0, 0.2])),
        share_truncated=draw(st.sampled_from([0.0, 0.0, 0.3])),
        has_band=draw(st.booleans()),
        drifts=draw(st.booleans()),
        compares=draw(st.booleans()),
        moves=draw(st.sampled_from([True, True, True, False])),
    )


_ROLLOUTS = st.builds(
    RolloutEvent,
    fails_in=st.none() | st.none() | st.integers(0, 2),
    fails_at=st.sampled_from(FAILURES),
    num_rollouts_left=st.sampled_from([math.inf, math.inf, 2, 1, 0]),
)
_RESUMES = st.builds(
    ResumeEvent,
    is_from_last=st.booleans(),
    into_used=st.booleans(),
    data=st.sampled_from(["same", "same", "same", "other", "tail"]),
    ignores_data_skip=st.sampled_from([False, False, False, True]),
    has_queue=st.sampled_from([True, True, True, False]),
    num_answered=st.sampled_from([99, 0, 1, 3]),
)
EVENTS_AHEAD = st.lists(
    st.one_of(*[st.just(RolloutEvent())] * 6, _ROLLOUTS, _RESUMES, st.just(ResumeEvent(data="tail"))),
    min_size=4,
    max_size=14,
)
EVENTS = st.lists(_ROLLOUTS | _ROLLOUTS | _RESUMES | st.just(SaveEvent()), min_size=1, max_size=9)


@st.composite
def configs_ahead(draw: st.DrawFn) -> Config:
    """Settings with rollouts ahead, on a stream whose later rows may have changed."""
    config = draw(configs())
    ahead = draw(st.sampled_from([1, 2, 2, 2]))
    # Groups that were sampled for a low acceptance rate wait for as long as they may when it rises.
    rates = draw(st.sampled_from([(0.1, 0.5, 1.0), (1.0,) * 3 + (0.5,) * 4, (1.0,) * 5 + (0.5,) * 5]))
    return replace(
        config,
        drifts=len(rates) > 3,
        **{
            "mode": "filter",
            "carries": True,
            "rollouts_ahead": ahead,
            "max_round_size": None,
            "batch_multiplier": None,
        },
        max_gen_batches=draw(st.sampled_from([10.0, 3.0, 1.0])),
        screen=draw(st.sampled_from([None, config.screen])),
        num_prompts=60,
        is_iterable=True,
        shuffles=False,
        pass_rates=rates,
    )


@cache
def _dataset(num_prompts: int, content: str) -> Dataset:
    """A dataset. `content` says which rows differ from the original ones."""
    first = {"same": num_prompts, "other": 0, "tail": min(FIRST_ROWS, num_prompts - 1)}[content]
    prompts = [f"{'prompt' if i < first else content} {i}" for i in range(num_prompts)]
    sources = [["x", "y", None][i % 3] for i in range(num_prompts)]
    return Dataset.from_dict(
        {"prompt": prompts, "source": sources}, Features({"prompt": Value("string"), "source": Value("string")})
    )


def new_sampler(config: Config, content: str) -> Sampler:
    """The sampler of one process, as `construction.make_sampler` creates it."""
    dataset: Dataset | IterableDataset = _dataset(config.num_prompts, content)
    if config.is_iterable:
        dataset = dataset.to_iterable_dataset()
    policies: list = []
    memory = PromptMemory(0, num_generations=config.num_generations) if config.has_memory else None
    if memory is not None:
        policies.append(memory)
    if config.screen is not None:
        policies.append(Screen(config.screen, memory))
    names = ("target", "num_generations", "num_ranks", "mode", "min_replace_ratio", "carries", "rollouts_ahead")
    names += ("max_gen_batches", "max_empty_batches", "max_round_size", "batch_multiplier")
    stream = PromptStream(dataset, seed=3, shuffle=config.shuffles)
    return Sampler(stream, policies=policies, **{name: getattr(config, name) for name in names})


# ---- Processes that exchange bytes ----


class _Posted(Exception):
    """Raised when one process takes part in a collective call before the others have. It is not an error."""


class Network:
    """
    Run the same function on every process, one after the other: first up to its collective call, then to its end.
    """

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.device = CPU  # like an accelerator
        self._rank = 0
        self._sent: list[Any] | None = None

    def on_every_rank(self, function: Callable[[int], Any], what: str) -> list[Any]:
        """Return what the function returns on each process."""
        results, sent = [], []
        self._sent = None
        for rank in range(self.num_ranks):
            self._rank = rank
            try:
                results.append(function(rank))
            except _Posted as posted:
                sent.append(posted.args[0])
        assert len(sent) in (0, self.num_ranks), f"{what}: some processes wait for others, which do not wait"
        if sent:
            self._sent = sent
            for rank in range(self.num_ranks):
                self._rank = rank
                results.append(function(rank))
        return results

    def rank_and_world_size(self) -> tuple[int, int]:
        return self._rank, self.num_ranks

    def exchange_bytes(self, payloads: Sequence[bytes], device: torch.device) -> list[bytes]:
        assert len(payloads) == self.num_ranks
        if self._sent is None:
            raise _Posted(list(payloads))
        return [theirs[self._rank] for theirs in self._sent]

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._sent is None:
            raise _Posted(tensor)
        assert len({len(theirs) for theirs in self._sent}) == 1, "gather: processes have different shares"
        return torch.cat(self._sent)

    def patched(self) -> ExitStack:
        stack = ExitStack()
        for module in (rounds_module, rows_module):
            stack.enter_context(patch.object(module, "rank_and_world_size", self.rank_and_world_size))
        stack.enter_context(patch.object(rows_module, "exchange_bytes", self.exchange_bytes))
        stack.enter_context(patch.object(prompts_module, "FIRST_ROWS", FIRST_ROWS))
        return stack


# ---- A run ----


class Interrupted(Exception):
    """The error that stops a rollout in the middle."""


@dataclass
class Book:
    """
    The history of the run, apart from its samplers. It consists of plain values, so that a checkpoint can restore it.
    """

    content: str = "same"  # in the dataset
    version: int = 0  # of the policy: the number of batches that have trained
    num_sampled: int = 0  # completions, each of which has its own id
    outcomes: dict[int, str] = field(default_factory=dict)  # by the number of each group that has left the queue
    ids: dict[tuple[int, int], int] = field(default_factory=dict)  # completions, by group and index
    versions: dict[int, int] = field(default_factory=dict)  # by completion, the policy that sampled it
    trained: set[int] = field(default_factory=set)  # completions
    rollout_versions: dict[int, int] = field(default_factory=dict)  # by the number of the rollout
    first_number: int = 0  # earlier groups were removed, when a resume did not find them
    next_number: int = 0  # number of the next group to be drawn
    last_position: tuple[int, int] | None = None  # in the stream, of the group that was drawn last
    submitted: dict[int, int] = field(default_factory=dict)  # by group in flight, the policy that samples it


@dataclass
class Checkpoint:
    """The checkpoint on disk."""

    shared: str
    memory: bytes | None
    local: list[bytes]
    book: Book
    passes: float


class Run:
    """The samplers of all processes, with checks of what must be true after each event."""

    def __init__(self, config: Config, network: Network, book: Book | None = None) -> None:
        self.config, self.network, self.book = config, network, book or Book()
        self.samplers = [new_sampler(config, self.book.content) for _ in range(config.num_ranks)]
        self.checkpoint: Checkpoint | None = None
        self.has_failed = False  # in the middle of a rollout
        self.trace: list[Any] = []

    @property
    def first(self) -> Sampler:
        return self.samplers[0]

    def handle(self, event: Any) -> None:
        if isinstance(event, RolloutEvent):
            self.roll_out(event)
        elif isinstance(event, SaveEvent):
            self.save()
        else:
            self.resume(event)
        self.check()

    # ---- A rollout, as in `DAPOTrainer._generate_and_score_completions` ----

    def roll_out(self, event: RolloutEvent) -> None:
        try:
            self._roll_out(event)
        except Interrupted:  # as at the end of `DAPOTrainer.train`
            self.book.submitted, self.has_failed = {}, True
            for sampler in self.samplers:
                sampler.unanswered = {request.group.number for request in sampler.queue.requests_in_flight}

    def _roll_out(self, event: RolloutEvent) -> None:
        for sampler in self.samplers:
            sampler.start_rollout(self.book.version)
        self.book.rollout_versions[self.first.rollout.number] = self.book.version
        self.has_failed = False
        self.submit_ahead(event)
        num_rounds = 0
        while requests := self.next_requests():
            self.sample_round(requests, event if event.fails_in == num_rounds else RolloutEvent())
            self.check_agreement()
            self.submit_ahead(event)
            num_rounds += 1
            assert num_rounds < 500, "A rollout does not end."
        self.finish(event)

    def next_requests(self) -> list[list[GenerationRequest]]:
        """Return each process's requests of the next round, or nothing."""
        sampler = self.first
        before = {request.group.number for request in sampler.queue.requests_in_flight}
        left = sampler.completions_left
        requests = [sampler.next_requests() for sampler in self.samplers]
        described = [[describe_request(request) for request in own] for own in requests]
        assert all(own == described[0] for own in described), "Processes request different completions."
        self.trace.append(described[0])
        self.note_drawn()
        if not requests[0]:
            return []
        num = sum(request.num_completions for request in requests[0])
        assert num % self.config.num_ranks == 0, "Processes have different shares of a round."
        is_due = all(request.group.number in before for request in requests[0])
        assert num <= left or (is_due and self.config.rollouts_ahead), "A round exceeds the budget."
        numbers = [request.group.number for request in requests[0]]
        assert len({*numbers}) == len(numbers), "A group is requested twice in a round."
        for request in requests[0]:
            group = request.group
            assert group.state is GroupState.IN_FLIGHT
            assert group.request is request
            assert 0 < request.num_completions <= group.num_completions_missing, (
                "A request is empty, or for more than is missing."
            )
            assert request.num_completions > 1 or not request.is_first, "One completion has nothing to differ from."
            assert request.is_first or request.num_completions == group.num_completions_missing, (
                "The rest of a group is whole."
            )
        return requests

    def sample_round(self, requests: list[list[GenerationRequest]], event: RolloutEvent) -> None:
        def fail_at(point: str) -> None:
            if event.fails_in is not None and event.fails_at == point:
                raise Interrupted

        book, num_ranks = self.book, self.config.num_ranks
        fail_at("requested")
        rows = self._answer(requests[0])

        def receive(rank: int) -> list[Completion]:
            mine = rows[local_slice(len(rows), rank, num_ranks)]
            lengths = [row.num_tokens for row in mine]
            recording = RoundRecording(rows=mine, lengths=lengths, truncated=[num == LONGEST for num in lengths])
            return receive_rows(requests[rank], recording, self.network)

        completions = self.network.on_every_rank(receive, "receive_rows")
        for (group, index), row in zip(completions[0], rows, strict=True):
            number = int(row.prompt_ids[0])
            book.ids[group.number, index] = number
            declared = book.rollout_versions[group.weights_rollouts[index]]
            assert book.versions[number] == declared, "A completion is said to be of another policy than it is of."
        fail_at("received")
        self._score(requests, completions)
        fail_at("scored")
        number = self.first.rollout.number
        for sampler, own, sampled in zip(self.samplers, requests, completions, strict=True):
            has_earlier_weights = any(request.weights_rollout < number for request in own)
            sampler.add(Round(own, sampled, {}, has_earlier_weights))
        self._check_budget(requests[0])
        fail_at("added")
        decisions = [list(self._decisions(own)) for own in requests]
        for i, of_one_size in enumerate(decisions[0]):
            for sampler, own in zip(self.samplers, decisions, strict=True):
                sampler.record_decisions(own[i])
            self.trace.append([(group.number, group.state, group.drop_reason) for group in of_one_size.groups])
            for group in of_one_size.groups:
                if group.state is GroupState.DROPPED:
                    self._note_left(group)
            fail_at("decided")

    def _answer(self, requests: list[GenerationRequest]) -> list[Row]:
        """Return the rows of all processes."""
        book, rows = self.book, []
        for request in requests:
            version = book.submitted.pop(request.group.number, book.version)
            for index in range(request.group.num_received, request.group.num_received + request.num_completions):
                id_ = book.num_sampled
                book.num_sampled += 1
                book.versions[id_] = version
                length = 2 + int(3 * self._chance("length", request.group, index))
                if self._chance("truncated", request.group, index) < self.config.share_truncated:
                    length = LONGEST
                ids = np.full(length, id_, np.int32)
                logps = np.full(length, -1.0, np.float32)
                name = request.group.name
                rows.append(Row(name, None, np.array([id_], np.int32), ids, None, str(id_), logps, None, None))
        return rows

    def _score(self, requests: list[list[GenerationRequest]], completions: list[list[Completion]]) -> None:
        num_ranks, moves = self.config.num_ranks, self.config.moves
        plans = [
            plan_scoring(own, sampled, num_ranks, may_move=moves)
            for own, sampled in zip(requests, completions, strict=True)
        ]
        as_numbers = [[[(group.number, index) for group, index in share] for share in plan.per_rank] for plan in plans]
        assert all(plan == as_numbers[0] for plan in as_numbers), "Processes plan differently."
        self._check_plan(requests[0], completions[0], plans[0])

        def rows_to_score(rank: int) -> list[Row]:
            if plans[rank].is_in_place:
                return [group.rows[index] for group, index in plans[rank].per_rank[rank]]
            return bring_together(plans[rank], CPU)

        scored = self.network.on_every_rank(rows_to_score, "bring_together")
        rewards, logged = [], []
        for rank, (plan, rows) in enumerate(zip(plans, scored, strict=True)):
            for (group, index), row in zip(plan.per_rank[rank], rows, strict=True):
                id_ = self.book.ids[group.number, index]
                assert int(row.prompt_ids[0]) == id_, "A process scores another completion than the plan says."
                rewards.append([self._reward(group, index), float(rank), float(id_)])
                logged.append(str(id_))
        for plan in plans:
            note_scores(plan, torch.tensor(rewards), {"said": list(logged)})
        for own in requests:
            for group in (request.group for request in own):
                ids = [self.book.ids[group.number, index] for index in range(group.num_received)]
                assert group.rewards[:, 2].tolist() == ids, "A completion has the reward of another one."
                for said, id_ in zip(group.extra_logs["said"], ids, strict=True):
                    is_forgotten = said is None and not moves  # the end of a rollout removes it
                    assert said == str(id_) or is_forgotten, "A log is of another completion."
                if group.is_whole and moves:
                    assert len({*group.rewards[:, 1].tolist()}) == 1, "A whole group was scored by several processes."

    def _check_plan(self, requests: list[GenerationRequest], completions: list[Completion], plan: ScoringPlan) -> None:
        sizes = {len(share) for share in plan.per_rank}
        assert len(sizes) == 1, "Processes score different numbers of completions."
        planned = [{(group.number, index) for group, index in share} for share in plan.per_rank]
        everything = set.union(*planned)
        assert everything >= {(group.number, index) for group, index in completions}, "A completion is not scored."
        if self.config.moves:
            for group in (request.group for request in requests if request.group.is_whole):
                whole = {(group.number, index) for index in range(group.num_generations)}
                assert any(whole <= share for share in planned), "No process scores a whole group in one call."
        if plan.is_in_place:
            assert [completion for share in plan.per_rank for completion in share] == completions

    def _check_budget(self, requests: list[GenerationRequest]) -> None:
        rollout = self.first.rollout
        num_due = sum(request.num_completions for request in requests if request.expires_at)
        most = max(self.first.max_completions, num_due)
        assert rollout.num_completions <= most, "A rollout samples more than its budget."

    def _decisions(self, requests: list[GenerationRequest]) -> list[Decisions]:
        """Return the groups of a round by their size, as `DAPOTrainer._decide_on_groups` does."""
        by_size: dict[tuple[int, int], list[PromptGroup]] = {}
        for request in requests:
            num_known = request.group.num_received - request.num_completions
            by_size.setdefault((-num_known, request.group.num_received), []).append(request.group)
        decisions = []
        for (minus_known, _), groups in sorted(by_size.items(), key=lambda item: item[0]):
            reasons = [self._reason(group) for group in groups]
            counts = None
            if self.first.selection.needs_counts:
                new = [group.rewards[-minus_known:, 0].tolist() for group in groups]
                counts = [(sum(r == 1 for r in own), sum(r == r for r in own)) for own in new]
            decisions.append(Decisions(groups, reasons, -minus_known, counts, self.book.version))
        return decisions

    def _reason(self, group: PromptGroup) -> str | None:
        rewards = group.rewards[:, 0].tolist()
        scored = [reward for reward in rewards if reward == reward]
        live = [r for r, is_cut in zip(rewards, group.truncated, strict=True) if r == r and not is_cut]
        if len(scored) < 2:
            return "unscored"
        if len(live) < 2:
            return "masked"
        if len({*live}) == 1:
            return "masked" if len({*scored}) > 1 else "all_correct" if live[0] else "all_wrong"
        is_outside = group.is_whole and self.config.has_band and sum(live) / len(live) > 0.7
        return "outside_band" if is_outside else None

    def _reward(self, group: PromptGroup, index: int) -> float:
        config = self.config
        size = group.num_received if config.compares else 0
        if self._chance("unscored", group, index) < config.share_unscored:
            return math.nan
        place = self.book.version if config.drifts else int(group.name[-4:], 16)
        rate = config.pass_rates[place % len(config.pass_rates)]
        return float(self._chance(f"reward {size}", group, index) < rate)

    def _chance(self, what: str, group: PromptGroup, index: int) -> float:
        text = f"{what} {group.number} {group.name} {index}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest()) / 2**32

    def submit_ahead(self, event: RolloutEvent) -> None:
        if not self.config.rollouts_ahead:
            return
        for sampler in self.samplers:
            sampler.request_ahead(event.num_rollouts_left)
        self.note_drawn()
        num_in_flight = sum(request.num_completions for request in self.first.queue.requests_in_flight)
        assert num_in_flight <= self.first.max_completions, "More is in flight than one rollout may take in."
        for request in self.first.queue.requests_in_flight:
            self.book.submitted.setdefault(request.group.number, self.book.version)
        self.trace.append([describe_request(request) for request in self.first.queue.requests_in_flight])

    def finish(self, event: RolloutEvent) -> None:
        config, book, sampler = self.config, self.book, self.first
        accepted = [group.number for group in sampler.queue.accepted]
        totals = replace(sampler.totals)
        num_missing, left, gave_up = sampler.num_missing, sampler.completions_left, sampler.has_given_up
        batches = [sampler.finish_rollout() for sampler in self.samplers]
        described = [[[group.number for group in part] for part in batch] for batch in batches]
        assert all(batch == described[0] for batch in described), "Processes have different batches."
        self.trace.append(described[0])
        batch = batches[0]
        trained = list(dict.fromkeys(batch.train))
        if config.mode == "replace":
            assert len(trained) == len(batch.train) or len(batch.train) == config.target
        else:
            assert len(trained) == len(batch.train), "A group is in a batch twice."
        assert [group.number for group in trained] == accepted[: config.target], "Not the oldest groups train."
        # A batch is full, or there was no budget left.
        assert len(batch.train) + len(batch.fillers) == config.target, "A batch has not as many groups as it must."
        if num_missing:
            assert gave_up or left < sampler.selection.min_completions_left, (
                "A batch is not full, and there is budget left."
            )
        elif config.mode != "mask":
            assert len(batch.train) == config.target, "A batch that is said to be full is not."
        for group in trained:
            self._note_left(group)
            assert group.state is GroupState.TRAINED
            assert group.is_whole, "A group trains that is not whole."
            assert group.drop_reason is None
            assert group.staleness(sampler.rollout.number) <= MAX_STALENESS, "A group is too stale to train."
            for index in range(group.num_received):
                id_ = book.ids[group.number, index]
                assert id_ not in book.trained, "A completion trains twice."
                book.trained.add(id_)
                assert book.version - book.versions[id_] <= MAX_STALENESS, "A completion is too stale to train."
        for group in (*batch.discarded, *batch.dropped_partial):
            self._note_left(group)
        assert all(group.state is GroupState.ACCEPTED for group in batch.carried_to_next)
        assert all(group.state is GroupState.PARTIAL for group in batch.partial)
        assert [group.number for group in sampler.queue.accepted] == described[0][2], "Carried groups are lost."
        assert [group.number for group in sampler.queue.partial] == described[0][4], "Partial groups are lost."
        if not config.carries:
            # Only a group that was never sampled may wait: its request was cancelled.
            assert sampler.queue.held == [], "Surplus stays, although it is to be discarded."
        assert sampler.totals.groups_trained == totals.groups_trained + len(batch.train)
        assert sampler.totals.groups_sampled == totals.groups_sampled + sampler.rollout.num_groups
        for own in self.samplers:
            for group in own.queue.held:
                for row in group.rows.values():
                    row.old_logps = np.zeros(len(row.completion_ids), np.float32)
        for request in sampler.queue.requests_in_flight:
            num_more = 1 if request.is_whole and config.rollouts_ahead == 2 else 0
            is_late = book.version - book.submitted[request.group.number] > num_more
            assert not is_late, "What was requested ahead is not taken in while it may train."
        self.submit_ahead(event)
        self._check_rows_of_batch(batches)
        book.version += 1

    def _check_rows_of_batch(self, batches: list[Batch]) -> None:
        G = self.config.num_generations
        groups, num_train = [*batches[0].train, *batches[0].fillers], len(batches[0].train) * G
        expected = [self.book.ids[group.number, i % group.num_received] for group in groups for i in range(G)]

        def rows_of(rank: int) -> list[Row]:
            return rows_of_batch(batches[rank].train, batches[rank].fillers, G, CPU)

        shares = self.network.on_every_rank(rows_of, "rows_of_batch")
        assert len({len(share) for share in shares}) == 1, "Processes train on different numbers of rows."
        rows = [row for share in shares for row in share]
        assert [int(row.prompt_ids[0]) for row in rows] == expected, "A batch has other rows, or in another order."
        for i, row in enumerate(rows):
            assert {*row.completion_ids.tolist()} == {expected[i]}
            assert (len(row.completion_ids) > 1) == (i < num_train), "Rows that train are whole, others short."

    # ---- Checkpoints ----

    def save(self) -> None:
        if self.has_failed:  # a rollout has failed: nothing is saved before the next one
            return
        states = [json.dumps(sampler.state_dict()) for sampler in self.samplers]
        assert all(state == states[0] for state in states), "Processes have different states."
        memory, file = self.first.selection.find(PromptMemory), io.BytesIO()
        if memory is not None:
            memory.save(file)
        local = []
        for sampler in self.samplers:
            written = io.BytesIO()
            torch.save(sampler.queue.state_dict(), written)
            local.append(written.getvalue())
        book = copy.deepcopy(self.book)
        self.checkpoint = Checkpoint(
            states[0], None if memory is None else file.getvalue(), local, book, self.first.passes
        )

    def resume(self, event: ResumeEvent) -> None:
        if self.checkpoint is None or not event.is_from_last:
            if self.has_failed:
                return
            self.save()
        checkpoint = self.checkpoint
        assert checkpoint is not None
        before = Run(self.config, self.network, copy.deepcopy(self.book))
        before.samplers = self.samplers
        self.book = copy.deepcopy(checkpoint.book)
        content = checkpoint.book.content if event.data == "same" else event.data
        into_used = event.into_used and content == before.book.content
        if not into_used:
            self.samplers = [new_sampler(self.config, content) for _ in range(self.config.num_ranks)]
        self.book.content = content
        found = [self._load(sampler, checkpoint, rank, event) for rank, sampler in enumerate(self.samplers)]
        assert all(x == found[0] for x in found), "Processes resume differently."
        differs, num_lost = found[0]
        self.has_failed = False
        self._check_resumed(event, checkpoint, bool(differs), num_lost)
        self.check()
        is_whole = event.has_queue and not event.ignores_data_skip and content == checkpoint.book.content
        requests = self.first.queue.requests_in_flight
        answered = [request.group.number for request in requests if request.group.number in self.book.submitted]
        # Some of them: those that the server happened to answer first.
        answered = sorted(answered, key=lambda number: (number * 7) % 5)[: event.num_answered]
        if not event.ignores_data_skip:
            for sampler in self.samplers:
                sampler.unanswered = {request.group.number for request in requests} - {*answered}
        self.book.submitted = {number: self.book.submitted[number] for number in answered}
        if is_whole and not into_used and not event.is_from_last and len(answered) == len(requests):
            for one in (before, self):
                one.trace = []
                one.roll_out(RolloutEvent())
            assert before.trace == self.trace, "A resumed run continues differently from the run that it continues."

    def _load(self, sampler: Sampler, checkpoint: Checkpoint, rank: int, event: ResumeEvent) -> tuple[dict, int]:
        shared = json.loads(checkpoint.shared)
        if checkpoint.memory is not None:
            shared["policies"]["PromptMemory"]["records"] = PromptMemory.read(io.BytesIO(checkpoint.memory))
        queue = torch.load(io.BytesIO(checkpoint.local[rank]), weights_only=True) if event.has_queue else None
        sampler.start_over()  # as the trainer does: the sampler may have been used
        return sampler.load_state_dict(shared, queue, event.ignores_data_skip)

    def _check_resumed(self, event: ResumeEvent, checkpoint: Checkpoint, differs: bool, num_lost: int) -> None:
        book, shared = self.book, json.loads(checkpoint.shared)
        saved = [torch.load(io.BytesIO(local), weights_only=True) for local in checkpoint.local]
        groups = {group["number"]: group for group in saved[0]["groups"]}
        is_same_data = book.content == checkpoint.book.content
        kept = {group.number for group in self.first.queue.held} | {
            request.group.number for request in self.first.queue.requests_in_flight
        }
        kept |= {group.number for group in self.first.queue.cancelled}
        if not event.has_queue or differs:
            assert not kept, "Groups stay, although they do not fit the run."
            book.outcomes = {}
            book.first_number = book.next_number = self.first.queue.num_drawn
        elif is_same_data and not event.ignores_data_skip:
            for sampler, one in zip(self.samplers, saved, strict=True):
                assert described(sampler.queue.state_dict()) == described(one), "load(save(queue)) is another queue."
            state = self.first.state_dict()
            # A run that began after the first rows of a stream does not know these, but the run that resumes it does.
            state["header"] = {name: state["header"][name] for name in shared["header"]}
            assert state == shared, "load(save(sampler)) is another sampler."
            assert num_lost == 0
            assert self.first.passes == checkpoint.passes
            return
        else:
            assert kept <= groups.keys()
            gone = [group for number, group in groups.items() if number not in kept]
            assert all(group["state"] != "accepted" for group in gone), "An accepted group is lost."
            assert num_lost == sum(bool(group["ranks"]) for group in gone), "Lost groups are not counted."
            is_gone = any(group["request"] is not None for group in gone)
            if is_gone or event.ignores_data_skip:  # then all prompts in flight are drawn again
                assert not self.first.queue.requests_in_flight
                assert not self.first.queue.cancelled
                assert is_same_data or event.ignores_data_skip or self.first.passes == checkpoint.passes
            book.outcomes |= {group["number"]: "lost" for group in gone}
        if is_same_data and not event.ignores_data_skip:  # the prompts that were in flight are drawn again
            assert self.first.passes == checkpoint.passes
            before = shared["stream_before_requests"]
            book.last_position = before["num_passes"], before["position"] - 1
        else:
            book.last_position = None

    # ---- Conditions that must hold ----

    def _note_left(self, group: PromptGroup) -> None:
        """Record that a group has left the queue."""
        if group.state is GroupState.DROPPED:
            assert group.drop_reason, "A group is dropped without a reason."
        else:
            assert group.state is GroupState.TRAINED
        assert group.number not in self.book.outcomes, "A group that has left the queue leaves it again."
        self.book.outcomes[group.number] = group.drop_reason or "trained"

    def note_drawn(self) -> None:
        """
        Record the groups that were drawn since the last call. Each is requested immediately, and no prompt is skipped.
        """
        queue, book = self.first.queue, self.book
        requested = {request.group.number: request.group for request in queue.requests_in_flight}
        for number in range(book.next_number, queue.num_drawn):
            assert number in requested or number in book.outcomes, "A group was drawn, and is lost."
            group = requested[number]
            passes, position = group.stream_position
            if book.last_position is not None:
                last_passes, last = book.last_position
                assert (passes, position) > book.last_position, "A prompt is drawn again."
                if not self.config.has_memory:
                    follows = (passes, position) in ((last_passes, last + 1), (last_passes + 1, 0))
                    assert follows, "A prompt is passed over."
            book.last_position = passes, position
        book.next_number = queue.num_drawn

    def check_agreement(self) -> None:
        states = [describe_sampler(sampler) for sampler in self.samplers]
        assert all(state == states[0] for state in states), "Processes have different states."

    def check(self) -> None:
        """Check what must be true between two rollouts."""
        self.check_agreement()
        queue, config = self.first.queue, self.config
        waiting = dict(queue._groups)
        assert list(waiting) == sorted(waiting), "The queue is not in the order of the draw."
        for number in range(self.book.first_number, queue.num_drawn):
            places = (number in waiting) + (number in self.book.outcomes)
            assert places == 1, "A group is lost, or is in the queue although it has left it."
        for number, group in waiting.items():
            num = group.num_received
            assert group.number == number
            expected = {
                GroupState.DRAWN: num == 0,
                GroupState.IN_FLIGHT: num < config.num_generations or self.has_failed,
                GroupState.PARTIAL: 0 < num < config.num_generations,
                GroupState.ACCEPTED: num == config.num_generations,
            }
            assert expected.get(group.state, False), f"A group with {num} completions is {group.state}."
            assert (group.request is not None) == (group.state is GroupState.IN_FLIGHT)
        if self.has_failed:
            return
        for number, group in waiting.items():
            columns = (group.rewards, group.lengths, group.truncated, group.weights_rollouts, group.weights_steps)
            assert all(len(column) == group.num_received for column in columns), "A group's columns are not as long."
            for rank, sampler in enumerate(self.samplers):
                rows = sampler.queue._groups[number].rows
                held = {index for index, holder in enumerate(group.ranks) if holder == rank}
                assert rows.keys() == held, "A process holds other rows than it is said to."
                for index, row in rows.items():
                    assert int(row.prompt_ids[0]) == self.book.ids[number, index], "A row is of another completion."


def describe_request(request: GenerationRequest) -> tuple:
    group = request.group
    sampled_by = request.weights_rollout, request.weights_step, request.expires_at
    return group.number, group.name, group.num_received, request.num_completions, *sampled_by


def describe_sampler(sampler: Sampler) -> str:
    """Everything that is the same on every process."""
    groups = [{**group.state_dict(), "rows": None, "round": None} for group in sampler.queue._groups.values()]
    return repr((described(groups), sampler.state_dict(), sampler.num_missing, sampler.queue.num_drawn))


def described(state: Any) -> Any:
    """Convert tensors to lists with their type, so that states can be compared, including NaN."""
    if isinstance(state, torch.Tensor):
        return f"{state.dtype} {tuple(state.shape)} {state.tolist()}"
    if isinstance(state, dict):
        return {key: described(value) for key, value in state.items()}
    return [described(value) for value in state] if isinstance(state, (list, tuple)) else state


def play(config: Config, events: Sequence[Any]) -> None:
    """Apply these events to a run."""
    network = Network(config.num_ranks)
    with network.patched():
        run = Run(config, network)
        for event in events:
            run.handle(event)


SEQUENCES = settings(
    max_examples=NUM_SEQUENCES,
    derandomize=True,
    deadline=None,
    database=None,
    phases=PHASES,
    suppress_health_check=list(HealthCheck),
    report_multiple_bugs=False,
)


@seed(SEED)
@SEQUENCES
@given(config=configs(), events=EVENTS)
def test_no_group_is_lost_or_trains_twice_whatever_happens(config, events):
    play(config, events)


@seed(SEED)
@settings(SEQUENCES, max_examples=NUM_SEQUENCES // 2)
@given(config=configs_ahead(), events=EVENTS_AHEAD)
def test_what_is_requested_ahead_trains_in_time_whatever_happens(config, events):
    play(config, events)


SCREENED = Config(target=1, num_generations=3, num_ranks=1, screen=2, pass_rates=(0.5,), shuffles=False)
AHEAD = Config(
    target=1, num_generations=2, num_ranks=1, carries=True, rollouts_ahead=1, pass_rates=(0.5,), shuffles=False
)
# The shortest sequences of events that once failed, and a long one in which groups wait as long as they may.
RUNS = {
    "acceptance_jumps": (
        replace(
            AHEAD,
            **{"target": 2, "num_generations": 6, "num_ranks": 2, "rollouts_ahead": 2, "num_prompts": 60},
            **{"pass_rates": (1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.5), "drifts": True, "max_gen_batches": 3.0},
        ),
        [RolloutEvent()] * 14,
    ),
    "rest_of_a_group_in_an_environment": (replace(SCREENED, moves=False), [RolloutEvent()]),
    "resume_without_its_queue": (AHEAD, [RolloutEvent(), ResumeEvent(into_used=True, has_queue=False)]),
    "rewards_that_raise": (
        replace(AHEAD, carries=False, rollouts_ahead=0),
        [RolloutEvent(0, "received"), RolloutEvent()],
    ),
    "rewards_that_raise_ahead": (AHEAD, [RolloutEvent(0, "received"), RolloutEvent()]),
    "second_save_of_a_carried_group": (
        replace(AHEAD, rollouts_ahead=0, num_generations=4, batch_multiplier=3.0),
        [RolloutEvent(), ResumeEvent()],
    ),
    "all_groups_are_partial_when_a_rollout_gives_up": (
        replace(
            SCREENED,
            **{"mode": "replace", "min_replace_ratio": 1.0, "max_gen_batches": 0.0, "max_empty_batches": 1.0},
            **{"has_memory": True, "num_prompts": 7, "pass_rates": (1.0, 0.2, 0.5), "has_band": True},
            compares=True,
        ),
        [
            RolloutEvent(1, "scored", num_rollouts_left=2),
            RolloutEvent(),
            ResumeEvent(into_used=True, data="other", num_answered=1),
            RolloutEvent(num_rollouts_left=0),
            RolloutEvent(),
            RolloutEvent(),
        ],
    ),
    "one_of_four_answers_is_lost": (
        Config(
            **{"target": 2, "num_generations": 7, "num_ranks": 2, "carries": True, "rollouts_ahead": 2},
            **{"max_gen_batches": 3.0, "is_iterable": True, "shuffles": False, "share_unscored": 0.2},
            pass_rates=(0.1, 0.5, 1.0),
        ),
        [
            ResumeEvent(data="tail"),
            ResumeEvent(data="tail"),
            ResumeEvent(into_used=True, num_answered=3),
            RolloutEvent(),
            RolloutEvent(),
        ],
    ),
    "stale_after_an_interruption": (
        replace(AHEAD, num_generations=3, screen=2),
        [RolloutEvent(), RolloutEvent(), RolloutEvent(0), RolloutEvent()],
    ),
    "some_answers_are_lost": (
        Config(
            **{"target": 2, "num_generations": 7, "num_ranks": 2, "carries": True, "rollouts_ahead": 2},
            **{"num_prompts": 60, "is_iterable": True, "shuffles": False, "pass_rates": (0.1, 0.5, 1.0)},
        ),
        [*[RolloutEvent()] * 3, ResumeEvent(num_answered=1), RolloutEvent()],
    ),
    "interrupted_between_two_decisions": (
        replace(AHEAD, target=4, num_generations=5, num_ranks=5, screen=2),
        [RolloutEvent(0, "decided"), RolloutEvent()],
    ),
}


@pytest.mark.parametrize(("config", "events"), RUNS.values(), ids=RUNS.keys())
def test_runs_that_are_worth_repeating(config, events):
    play(config, events)

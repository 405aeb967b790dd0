# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The sampler: the loop of a rollout, which ends when the batch is full or its budget is spent.

    sampler.start_rollout(step)
    while requests := sampler.next_requests():
        ...                                       # completions join their groups and are scored
        sampler.add(round_)
        for decided in ...:                       # groups with as many completions each
            sampler.decide(decided)
    batch = sampler.finish_rollout()

It knows nothing of models, and treats all selection policies alike. Every process decides the same.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from .batch import Batch, fill_batch, num_missing
from .groups import GenerationRequest, GroupState, PromptGroup, num_completions_of
from .policies import Decided, SelectionPolicy
from .prompts import PromptStream
from .queue import GroupQueue
from .rollout import Rollout, Totals
from .rounds import Round
from .selection import Selection, apart, rest_of


# What of the header says in which order prompts come.
ORDER = {"seed", "shuffle_dataset", "dataset", "first_rows"}
# In rollouts: sampled two ahead, or one ahead and carried once.
MAX_STALENESS = 2
# Sources with metrics of their own: those that the run met first.
MAX_SOURCES = 8


class Sampler:
    """
    Owns what is kept from one rollout to the next.

    Args:
        stream ([`PromptStream`]):
            Source of prompts.
        target (`int`):
            Groups of a rollout batch.
        num_generations (`int`):
            Completions of a group.
        policies (`Sequence[SelectionPolicy]`, *optional*):
            The selection policies besides the size of rounds.
        mode (`str`, *optional*, defaults to `"filter"`):
            How a batch is made, as `dynamic_sampling_mode` without `"paper"`.
        min_replace_ratio (`float`, *optional*, defaults to `0.3`):
            With `"replace"`, the share of the batch that must be accepted.
        carries (`bool`, *optional*, defaults to `False`):
            Whether accepted groups beyond the batch train in the next rollout.
        max_gen_batches (`float`, *optional*, defaults to `10.0`):
            Completions that a rollout may sample, in rollout batches; `0` for no limit.
        max_empty_batches (`float`, *optional*, defaults to `0.0`):
            Without a limit, a rollout ends after this number of batches without an accepted group; `0` for never.
        max_round_size (`int`, *optional*):
            The most prompts of a round.
        batch_multiplier (`float`, *optional*):
            Rollout batches of a round. By default the acceptance rate sizes it.
        num_ranks (`int`, *optional*, defaults to `1`):
            Processes that share the completions of a round equally.
        ahead (`int`, *optional*, defaults to `0`):
            Rollouts that are requested while another one trains.
    """

    def __init__(
        self,
        stream: PromptStream,
        *,
        target: int,
        num_generations: int,
        policies: Sequence[SelectionPolicy] = (),
        mode: str = "filter",
        min_replace_ratio: float = 0.3,
        carries: bool = False,
        max_gen_batches: float = 10.0,
        max_empty_batches: float = 0.0,
        max_round_size: int | None = None,
        batch_multiplier: float | None = None,
        num_ranks: int = 1,
        ahead: int = 0,
    ) -> None:
        self.stream, self.target, self.num_generations = stream, target, num_generations
        self.mode, self.min_replace_ratio, self.carries, self.ahead = mode, min_replace_ratio, carries, ahead
        self.max_gen_batches, self.max_empty_batches = max_gen_batches, max_empty_batches
        if mode == "mask":
            self.max_gen_batches, batch_multiplier = 1.0, 1.0
        self.queue = GroupQueue(num_generations)
        self.selection = Selection(
            stream,
            self.queue,
            policies,
            target=target,
            num_ranks=num_ranks,
            carries=carries,
            max_round_size=max_round_size,
            batch_multiplier=batch_multiplier,
            rounds_are_rare=ahead == 1,
            samples_next_batch=carries and max_round_size is None and ahead < 2,
        )
        self.rollout = Rollout(target)
        self.totals = Totals()
        self.num_rollouts = 0
        self.num_short_rollouts = 0  # in a row
        self.sources: list[str] = []
        self.unanswered: set[int] = set()  # groups in flight whose answers are lost, by their numbers
        self._is_open = False  # whether a rollout is under way
        self._passes_at_last_group = stream.passes_taken  # where in the stream a group was last accepted
        self._num_passes_warned_of = 0

    # ---- One rollout ----

    def start_rollout(self, step: int = 0) -> None:
        """Begin a rollout with the policy after `step` optimizer steps."""
        is_again = self._is_open  # after an interruption
        for round_ in self.rollout.rounds:
            for group in round_.groups:
                group.round = None  # or a group that waits would keep the rows of all that was sampled with it
        self.rollout = self.next_rollout(step)
        self.num_rollouts = self.rollout.number + 1
        self._is_open = True
        self.selection.start_rollout()
        self.queue.forget_unsettled()
        if is_again or not self.ahead:
            # Some groups of the round may have been decided on, and the others may not be equal shares.
            self.queue.cancel_requests()
        else:
            keeps_together = self.selection.multiple_of > 1
            self.queue.renew(self.unanswered, self.rollout.number, step, keeps_together=keeps_together)
        self.unanswered = set()

    def next_rollout(self, step: int = 0) -> Rollout:
        """Return the rollout that begins next."""
        # One that was interrupted begins again: no policy has come between, so that nothing is more stale.
        number = self.num_rollouts - 1 if self._is_open else self.num_rollouts
        return Rollout(self.target, number, step, num_carried=len(self.queue.accepted))

    @property
    def max_completions(self) -> float:
        """Number of completions that a rollout may sample."""
        # The float 1.15 is the nearest to 115 / 100, but 1.15 x 100 is below 115.
        batch = self.target * self.num_generations
        return int(self.max_gen_batches * batch + 1e-6) if self.max_gen_batches else math.inf

    @property
    def num_left(self) -> float:
        """Number of completions that the rollout may still sample."""
        return self.max_completions - self.rollout.num_completions

    @property
    def num_missing(self) -> int:
        """Number of groups that must still be accepted before the batch is full."""
        return num_missing(self.mode, self.rollout.num_found, self.target, self.min_replace_ratio)

    @property
    def has_given_up(self) -> bool:
        """Whether a rollout without a limit accepted no group in its last `max_empty_batches` of completions."""
        num_empty = self.rollout.num_completions_without_group / (self.target * self.num_generations)
        return not self.max_gen_batches and 0 < self.max_empty_batches <= num_empty

    def next_requests(self) -> list[GenerationRequest]:
        """
        Return what the next round takes in; nothing if the rollout has ended.

        First comes what was requested ahead and would be too stale for the next rollout, then as much of the rest that
        was requested ahead as is missing, then new requests.
        """
        requested_ahead = self.queue.in_flight if self.ahead else []
        due = [request for request in requested_ahead if request.expires_at <= self.rollout.number]
        if due:
            return self._with_equal_shares(due, requested_ahead)
        if self.num_missing == 0 or self.has_given_up:
            return []
        return self._needed_of(requested_ahead) or self._new_requests()

    def _with_equal_shares(
        self, due: list[GenerationRequest], requested_ahead: list[GenerationRequest]
    ) -> list[GenerationRequest]:
        """
        Return the due requests, and others if processes cannot share the due ones equally. They can always share all.
        """
        others = [request for request in requested_ahead if request.expires_at > self.rollout.number]
        requests = list(due)
        while others and num_completions_of(requests) % self.selection.num_ranks:
            requests.append(others.pop(0))
        return requests

    def _needed_of(self, requested_ahead: list[GenerationRequest]) -> list[GenerationRequest]:
        """Return as many of the requests that may wait as this batch needs."""
        may_wait = [request for request in requested_ahead if request.may_wait]
        most = self.selection.round_size.acceptance.most_prompts_for(self.num_missing)
        num_needed = self.selection.in_equal_groups(max(self.num_missing, most))
        num = int(min(num_needed, self.num_left // self.num_generations, len(may_wait)))
        return may_wait[: num - num % self.selection.multiple_of]

    def _new_requests(self) -> list[GenerationRequest]:
        """Request a round of the present policy."""
        rollout = self.rollout
        requests = [
            replace(request, policy_rollout=rollout.number, policy_step=rollout.step)
            for request in self.selection.next_round(rollout.shortfall, self.num_left)
        ]
        self.queue.send(requests)
        return requests

    def add(self, round_: Round) -> None:
        """Add a round whose completions have joined their groups and were scored."""
        self.rollout.add(round_)
        for group in round_.groups:
            group.round = round_
            if group.source is not None and group.source not in self.sources and len(self.sources) < MAX_SOURCES:
                self.sources.append(group.source)

    def decide(self, decided: Decided) -> None:
        """
        Accept or drop groups of the latest round, which all have the same number of completions, or keep them as
        partial.
        """
        rollout = self.rollout
        for group, reason in zip(decided.groups, decided.reasons, strict=True):
            if reason is not None:
                self.queue.settle(group, GroupState.DROPPED, reason)
                rollout.dropped.append(group)
                group.shorten_rows()
                if len(rollout.dropped) > rollout.target:  # no more can be asked to fill the batch
                    group.rows = {}
            elif decided.are_whole:
                self.queue.settle(group, GroupState.ACCEPTED)
                rollout.note_accepted(group)
            else:
                self.queue.settle(group, GroupState.PARTIAL)
        self.selection.observe(decided)
        if decided.are_whole and None in decided.reasons:
            self._passes_at_last_group = self.stream.passes_taken

    def finish_rollout(self) -> Batch:
        """End the rollout, and return its batch and the outcome of the other groups."""
        rollout, queue = self.rollout, self.queue
        accepted = queue.accepted
        # If all groups of a rollout that ended early are partial, these fill the batch.
        fillers = rollout.dropped or queue.partial
        train, fill = fill_batch(self.mode, accepted, fillers, self.target, self.min_replace_ratio)
        oldest = max((group.staleness(rollout.number) for group in train), default=0)
        if oldest > MAX_STALENESS:
            raise RuntimeError(f"A group is {oldest} rollouts old, but none may train beyond {MAX_STALENESS}.")
        # With "mask" a rollout takes what one round brings.
        fell_short = not train if self.mode == "mask" else self.num_missing > 0
        self.num_short_rollouts = self.num_short_rollouts + 1 if fell_short else 0
        queue.take_batch(self.target)

        def staying(groups: list[PromptGroup], most: int) -> list[PromptGroup]:
            """Return those that may stay: those that are fresh enough, as many as a rollout has room for."""
            fresh = [group for group in groups if group.staleness(rollout.number) < MAX_STALENESS]
            return fresh[:most] if self.carries else []

        untrained, partial = queue.accepted, queue.partial
        carried = staying(untrained, self.target)
        # As many as the next rollouts can make whole: of what is requested a rollout ahead, one rollout.
        most_partial = self.target if self.ahead == 1 else 2 * self.target
        kept = staying(partial, most_partial)
        staying_groups = {*carried, *kept}
        surplus = [group for group in untrained if group not in staying_groups]
        given_up = [group for group in partial if group not in staying_groups]
        queue.drop(surplus, "surplus")
        queue.drop(given_up, "stale")
        for group in queue.held:
            group.extra_logs = {}  # may be anything, which a checkpoint could not hold
        batch = Batch(train, fill, carried, surplus, kept, given_up)
        self.totals.add(rollout, batch, fell_short)
        self._is_open = False
        return batch

    # ---- Rollouts ahead ----

    def request_ahead(self, num_left: float = math.inf) -> None:
        """Request completions of the present policy for later rollouts, of which `num_left` are to come."""
        num_rollouts = min(self.ahead, num_left)
        if num_rollouts <= 0:
            return
        if self.ahead == 1:
            # Once this rollout is complete, and what was requested for it has come.
            if not self._is_open and not self.queue.in_flight:
                self._send_ahead([], self._requests_for_next_rollout())
            return
        # Groups that are requested whole may wait for two rollouts; the rest of others must come before that.
        self._send_ahead(*apart(self._requests_for_rollouts(num_rollouts), self.selection.multiple_of))

    def _requests_for_next_rollout(self) -> list[GenerationRequest]:
        """Return what the first round of the next rollout would request."""
        num_missing = self.target - len(self.queue.accepted)
        return self.selection.next_round(num_missing, self.max_completions) if num_missing > 0 else []

    def _requests_for_rollouts(self, num_rollouts: float) -> list[GenerationRequest]:
        """Return requests for what `num_rollouts` rollouts need beyond what is requested already."""
        selection, queue = self.selection, self.queue
        share_completed = selection.round_size.share_completed
        num_accepted = num_rollouts * self.target  # that are wanted and not there
        partial: list[PromptGroup] = []  # whose rest may be requested
        if self._is_open:  # what is partial now is completed in this rollout
            num_accepted += self.rollout.shortfall - share_completed * len(queue.partial)
        else:
            num_accepted -= len(queue.accepted)
            partial = queue.partial
        # All of what is in flight may have to be taken in by one rollout: it is no more than one may sample.
        completions_left = self.max_completions - num_completions_of(queue.in_flight)
        completions_left -= selection.most_for_equal_shares
        num_rests = max(math.ceil(num_accepted / share_completed), 0)
        requests = rest_of(partial, num_rests, completions_left)
        completions_left -= num_completions_of(requests)
        num_accepted -= share_completed * len(requests)
        num_first_in_flight = sum(1 for request in queue.in_flight if request.is_first)
        num_new = selection.round_size.acceptance.most_prompts_for(num_accepted) - num_first_in_flight
        if num_new > 0 and completions_left >= selection.multiple_of * self.num_generations:
            enough_accepted = num_new * selection.round_size.predicted.rate
            requests += selection.new_groups(selection.in_equal_groups(num_new), completions_left, enough_accepted)
        return requests

    def _send_ahead(self, whole: list[GenerationRequest], parts: list[GenerationRequest]) -> None:
        """Note that requests of the present policy are in flight, and until when they may be answered."""
        number, step = self.num_rollouts - 1, self.rollout.step
        parts = self.selection.equal_shares(parts)
        for requests, expires_at in ((parts, number + 1), (whole, number + self.ahead)):
            self.queue.send(
                [
                    replace(request, policy_rollout=number, policy_step=step, expires_at=expires_at)
                    for request in requests
                ]
            )

    # ---- What is said of the prompts ----

    @property
    def passes(self) -> float:
        """Passes over the dataset, without the prompts in flight."""
        oldest = self.queue.oldest_in_flight
        return self.stream.passes if oldest is None else self.stream.passes_at(*oldest)

    @property
    def skipped(self) -> list[float]:
        """The expected pass rate of each prompt that was skipped since the rollout began."""
        skipped = [pass_rate for policy in self.selection.policies for pass_rate in policy.skipped]
        return [correct / (correct + incorrect) for correct, incorrect in skipped]

    def new_passes_without_group(self) -> int:
        """
        Return the number of whole passes since a group was last accepted if the user should be told now, otherwise 0.
        """
        num_passes = int(self.stream.passes_taken - self._passes_at_last_group)
        # At the first, second, fourth, eighth: a line for each pass over few prompts would hide all others.
        has_doubled = num_passes.bit_length() > self._num_passes_warned_of.bit_length()
        self._num_passes_warned_of = num_passes
        return num_passes if has_doubled else 0

    # ---- Checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs and is the same in every process, JSON-able."""
        stream = self.stream.state_dict()
        oldest = self.queue.oldest_in_flight
        # If what is in flight cannot be restored, its prompts are drawn again.
        num_passes, position = oldest or (stream["num_passes"], stream["position"])
        return {
            "header": self.stream.order(),
            "stream": stream,
            "stream_before_requests": stream | {"num_passes": num_passes, "position": position},
            "round_size": self.selection.round_size.state_dict(),
            # What each policy knows, by its class.
            "policies": {type(policy).__name__: policy.state_dict() for policy in self.selection.policies},
            "num_rollouts": self.num_rollouts,
            "sources": self.sources,
            "num_short_rollouts": self.num_short_rollouts,
            "totals": asdict(self.totals),
            "passes_at_last_group": self._passes_at_last_group,
        }

    def load_state_dict(
        self, state: dict[str, Any], queue: dict[str, Any] | None, ignore_data_skip: bool = False
    ) -> tuple[dict[str, tuple], int]:
        """
        Continue from a state as far as it fits. `queue` is this process's [`GroupQueue.state_dict`].

        Return what differs, there and here, and how many partial groups were left behind.
        """
        differs = {}
        if not ignore_data_skip:
            self.stream.begin()
            theirs, own = state["header"], self.stream.order()
            differs = {name: (theirs[name], own[name]) for name in own if theirs.get(name, own[name]) != own[name]}
        keeps_groups = queue is not None and not differs  # other settings would train waiting groups wrongly
        if ignore_data_skip or differs:
            self.stream.begin_after(state["stream"])
            self._passes_at_last_group = self.stream.passes_taken
        else:
            self.stream.load_state_dict(state["stream" if keeps_groups else "stream_before_requests"])
            self._passes_at_last_group = state["passes_at_last_group"]
        self._num_passes_warned_of = int(self.stream.passes_taken - self._passes_at_last_group)
        self.selection.round_size.load_state_dict(state["round_size"])
        self.num_rollouts, self.num_short_rollouts = state["num_rollouts"], state["num_short_rollouts"]
        self.sources, self.totals = list(state["sources"]), Totals(**state["totals"])
        for policy in self.selection.policies:
            if type(policy).__name__ in state["policies"]:
                policy.load_state_dict(state["policies"][type(policy).__name__])
        self.selection.predict_the_past()
        num_lost = 0
        self.unanswered, self._is_open = set(), False
        self.queue.clear()  # left by an earlier run in this process
        if keeps_groups:
            assert queue is not None
            num_lost, has_all = self.queue.load_state_dict(queue, self.stream)
            if ignore_data_skip:  # a fresh pass has begun: what was in flight is not sampled again
                self.queue.forget_requests()
            elif not has_all:
                self.stream.load_state_dict(state["stream_before_requests"])
        return differs, num_lost

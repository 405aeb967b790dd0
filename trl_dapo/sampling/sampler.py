# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The sampler of a rollout: it requests rounds until the batch is full or the limit of completions is reached.

    sampler.start_rollout(step)
    while requests := sampler.next_requests():
        ...                                       # sample, add the completions to their groups, and score them
        sampler.add(round_)
        for decisions in ...:                     # the groups of the round, those of equal size together
            sampler.record_decisions(decisions)
    batch = sampler.finish_rollout()

The sampler does not depend on models, and it treats all selection policies alike. Every process runs it and comes to
the same decisions.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from .batch import Batch, fill_batch, num_missing
from .groups import GenerationRequest, GroupState, PromptGroup, num_completions_of
from .policies import Decisions, SelectionPolicy, SkippedPrompts
from .prompt_memory import expected_acceptance
from .prompts import PromptStream
from .queue import GroupQueue
from .rollout import Rollout, Totals
from .round_size import rounded_down
from .rounds import Round
from .selection import Selection, rest_of, separate_whole_requests


# The entries of a checkpoint's header that determine the order of the prompts.
ORDER = {"seed", "shuffle_dataset", "dataset", "first_rows"}
DATA = {"dataset", "first_rows"}  # those that are hashes of rows
# Maximum age of a group when it trains: the number of rollouts since the first one whose weights sampled it.
MAX_STALENESS = 2
# A rollout warns if it continues after this many rollout batches of completions without an accepted group. By default
# it ends then, because `dynamic_sampling_max_gen_batches` is 10, too.
BATCHES_BEFORE_WARNING = 10
# How many sources have metrics of their own: the ones that the run encounters first.
MAX_SOURCES = 8


class Sampler:
    """
    Runs rollouts, and holds everything that is kept from one rollout to the next.

    Args:
        stream ([`PromptStream`]):
            Stream from which prompts are drawn.
        target (`int`):
            Number of groups in a rollout batch.
        num_generations (`int`):
            Number of completions in a group.
        policies (`Sequence[SelectionPolicy]`, *optional*):
            Selection policies, apart from the record of acceptance rates.
        mode (`str`, *optional*, defaults to `"filter"`):
            How a batch is made: a value of `dynamic_sampling_mode` other than `"paper"`.
        min_replace_ratio (`float`, *optional*, defaults to `0.3`):
            Share of the batch that must be accepted in mode `"replace"`.
        carries (`bool`, *optional*, defaults to `False`):
            Whether accepted groups that do not fit into the batch, and partial groups, stay for the next rollout.
        max_gen_batches (`float`, *optional*, defaults to `10.0`):
            Maximum number of completions that a rollout samples, in rollout batches. `0` means no limit.
        max_empty_batches (`float`, *optional*, defaults to `0.0`):
            If there is no limit, a rollout ends after this many rollout batches of completions in a row without an
            accepted group. `0` means never.
        max_round_size (`int`, *optional*):
            Maximum number of new prompts in a round. A round also has at most as many completions as this number of
            whole groups.
        batch_multiplier (`float`, *optional*):
            Number of new prompts in a round, in rollout batches. By default it follows from the acceptance rate.
        num_ranks (`int`, *optional*, defaults to `1`):
            Number of processes, each of which samples an equal share of a round.
        rollouts_ahead (`int`, *optional*, defaults to `0`):
            Number of rollouts that are requested while another one trains.
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
        rollouts_ahead: int = 0,
    ) -> None:
        self.stream, self.target, self.num_generations = stream, target, num_generations
        self.mode, self.min_replace_ratio, self.carries = mode, min_replace_ratio, carries
        self.rollouts_ahead = rollouts_ahead
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
            extra_round_stalls=rollouts_ahead == 1,
            samples_next_batch=carries and max_round_size is None and rollouts_ahead < 2,
        )
        self.rollout = Rollout(target)
        self.totals = Totals()
        self.num_rollouts = 0
        self.short_rollouts_in_a_row = 0  # that fell short, see `finish_rollout`
        self.sources: list[str] = []
        self.unanswered: set[int] = set()  # numbers of the groups in flight whose completions were lost
        self._is_open = False  # whether a rollout is under way
        self._place_of_last_accepted = stream.place  # where the stream was when a group was last accepted
        self._passes_without_group = 0
        self._has_warned_of_batches = False
        self._skipped = SkippedPrompts(self.selection.policies)  # that are not in the totals yet

    # ---- One rollout ----

    def start_rollout(self, step: int = 0) -> None:
        """Begin a rollout with the weights after `step` optimizer steps."""
        was_interrupted = self._is_open
        for round_ in self.rollout.rounds:
            for group in round_.groups:
                group.round = None  # otherwise a waiting group would keep all rows of its round in memory
        self.rollout = self.next_rollout(step)
        self.num_rollouts = self.rollout.number + 1
        if self.rollout.number == 0:
            self.totals.first_step = step
        self._is_open = True
        self.selection.start_rollout()
        self._skipped.reset()
        self.queue.forget_undecided()
        if was_interrupted or not self.rollouts_ahead:
            # Some groups of the interrupted round may have been decided on, and the processes may not be able to
            # share the remaining ones equally.
            self.queue.cancel_requests()
        else:
            keeps_together = self.selection.group_multiple > 1
            self.queue.reissue_requests(self.unanswered, self.rollout.number, step, keeps_together=keeps_together)
        self.unanswered = set()

    def next_rollout(self, step: int = 0) -> Rollout:
        """Return the rollout that begins next."""
        # An interrupted rollout starts over under the same number, because the weights have not changed in between.
        number = self.num_rollouts - 1 if self._is_open else self.num_rollouts
        return Rollout(self.target, number, step, num_accepted_before=len(self.queue.accepted))

    @property
    def max_completions(self) -> float:
        """Maximum number of completions in one rollout."""
        batch = self.target * self.num_generations
        return rounded_down(self.max_gen_batches * batch) if self.max_gen_batches else math.inf

    @property
    def completions_left(self) -> float:
        """Number of completions that the rollout may still sample."""
        return self.max_completions - self.rollout.num_completions

    @property
    def num_missing(self) -> int:
        """Number of groups still to be accepted. In mode `"replace"`, 0 once copies can fill the rest of the batch."""
        return num_missing(self.mode, self.rollout.num_trainable, self.target, self.min_replace_ratio)

    @property
    def has_given_up(self) -> bool:
        """Whether the last `max_empty_batches` of completions brought no accepted group, if there is no limit."""
        num_empty = self.rollout.num_completions_since_accepted / (self.target * self.num_generations)
        return not self.max_gen_batches and 0 < self.max_empty_batches <= num_empty

    def next_requests(self) -> list[GenerationRequest]:
        """
        Return the requests whose completions the next round receives. There are none if the rollout has ended.

        Requests that were made ahead and expire with this rollout are returned first, in a round of their own. Later
        ones only join them if the processes cannot share the round equally otherwise. If none expire, the batch gets
        as many as it needs of the requests for whole groups that may wait for two rollouts. If there are none of these
        either, new requests are made.
        """
        requested_ahead = self.queue.requests_in_flight if self.rollouts_ahead else []
        due = [request for request in requested_ahead if request.expires_at <= self.rollout.number]
        if due:
            return self._with_equal_shares(due, requested_ahead)
        if self.num_missing == 0 or self.has_given_up:
            return []
        return self._needed_of(requested_ahead) or self._new_requests()

    def _with_equal_shares(
        self, due: list[GenerationRequest], requested_ahead: list[GenerationRequest]
    ) -> list[GenerationRequest]:
        """Return the due requests, with further ones if the processes cannot share them equally otherwise."""
        # At the latest, the shares are equal when all requests made ahead are taken.
        others = [request for request in requested_ahead if request.expires_at > self.rollout.number]
        requests = list(due)
        while others and num_completions_of(requests) % self.selection.num_ranks:
            requests.append(others.pop(0))
        return requests

    def _needed_of(self, requested_ahead: list[GenerationRequest]) -> list[GenerationRequest]:
        """Return as many requests as this batch needs, of those for whole groups that may wait for two rollouts."""
        whole = [request for request in requested_ahead if request.may_wait_two_rollouts]
        acceptance = self.selection.acceptance_record.acceptance
        without_surplus = acceptance.most_prompts_without_surplus(self.num_missing)
        # At least the missing number is needed, even if some of these groups may be surplus.
        num_needed = self.selection.round_up_groups(max(self.num_missing, without_surplus))
        num = max(0, int(min(num_needed, self.completions_left // self.num_generations, len(whole))))
        return whole[: num - num % self.selection.group_multiple]

    def _new_requests(self) -> list[GenerationRequest]:
        """Make and return the requests of a new round, with the present weights."""
        rollout = self.rollout
        requests = [
            replace(request, weights_rollout=rollout.number, weights_step=rollout.step)
            for request in self.selection.next_round(rollout.shortfall, self.completions_left)
        ]
        self.queue.send(requests)
        return requests

    def add(self, round_: Round) -> None:
        """Add a round whose completions have been added to their groups and scored."""
        self.rollout.add(round_)
        for group in round_.groups:
            group.round = round_
            if group.source is not None and group.source not in self.sources and len(self.sources) < MAX_SOURCES:
                self.sources.append(group.source)

    def record_decisions(self, decisions: Decisions) -> None:
        """Record which groups of the latest round are accepted, dropped, or have the rest of them requested."""
        rollout = self.rollout
        for group, reason in zip(decisions.groups, decisions.reasons, strict=True):
            if reason is not None:
                self.queue.record_decision(group, GroupState.DROPPED, reason)
                rollout.dropped.append(group)
                group.shorten_rows()
                if len(rollout.dropped) > rollout.target:  # a batch has room for no more fillers
                    group.rows = {}
            elif decisions.are_whole:
                self.queue.record_decision(group, GroupState.ACCEPTED)
                rollout.note_accepted(group)
            else:
                self.queue.record_decision(group, GroupState.PARTIAL)
        self.selection.observe(decisions)
        if decisions.are_whole and None in decisions.reasons:
            self._place_of_last_accepted = self.stream.place

    def finish_rollout(self) -> Batch:
        """End the rollout. Return its batch, and what became of the other groups."""
        rollout, queue = self.rollout, self.queue
        accepted = queue.accepted
        # A rollout that ended early may have only partial groups. Then these fill the batch.
        fillers = rollout.dropped or queue.partial
        train, fill = fill_batch(self.mode, accepted, fillers, self.target, self.min_replace_ratio)
        oldest = max((group.staleness(rollout.number) for group in train), default=0)
        if oldest > MAX_STALENESS:
            raise RuntimeError(
                f"A group was sampled {oldest} rollouts ago, but a group may train at most {MAX_STALENESS} rollouts "
                "after it was sampled. This is a bug in trl-dapo: please report it."
            )
        # A rollout falls short if its batch lacks groups. In mode "mask", in which it samples only one round, it falls
        # short if no group trains.
        fell_short = not train if self.mode == "mask" else self.num_missing > 0
        self.short_rollouts_in_a_row = self.short_rollouts_in_a_row + 1 if fell_short else 0
        queue.take_batch(self.target)

        def staying(groups: list[PromptGroup], most: int) -> list[PromptGroup]:
            """Return up to `most` groups that are fresh enough for the next rollout. Without carry, return none."""
            fresh = [group for group in groups if group.staleness(rollout.number) < MAX_STALENESS]
            return fresh[:most] if self.carries else []

        untrained, partial = queue.accepted, queue.partial
        carried = staying(untrained, self.target)
        # No more partial groups stay than can be completed before they are too old: two batches of them, or one batch
        # if rollouts are requested one ahead.
        most_partial = self.target if self.rollouts_ahead == 1 else 2 * self.target
        kept = staying(partial, most_partial)
        staying_groups = {*carried, *kept}
        discarded = [group for group in untrained if group not in staying_groups]
        dropped_partial = [group for group in partial if group not in staying_groups]
        queue.drop(discarded, "surplus")
        for group in dropped_partial:
            queue.drop([group], "stale" if group.staleness(rollout.number) >= MAX_STALENESS else "surplus")
        for group in queue.held:
            group.forget_extras()
        batch = Batch(train, fill, carried, discarded, kept, dropped_partial)
        self.totals.add(rollout, batch, fell_short)
        self._count_skipped()
        self.totals.gave_up = self.has_given_up
        self._is_open = False
        return batch

    # ---- Rollouts ahead ----

    def request_ahead(self, num_rollouts_left: float = math.inf) -> None:
        """
        Request completions with the present weights for the next rollouts, of which the run has `num_rollouts_left`.
        """
        num_rollouts = min(self.rollouts_ahead, num_rollouts_left)
        if num_rollouts <= 0:
            return
        if self.rollouts_ahead == 1:
            # Only after this rollout is complete and has received everything that was requested for it.
            if not self._is_open and not self.queue.requests_in_flight:
                self._send_ahead(self._requests_for_next_rollout(), [])
        else:
            # Requests for whole groups may wait for two rollouts, apart from a few if the processes could not share
            # all of them equally. All other requests are due in the next rollout, so that their groups do not get too
            # old: the rest of a group may only be requested after its first completions were received.
            requests = self._requests_for_rollouts(num_rollouts)
            for_any, for_next = separate_whole_requests(requests, self.selection.group_multiple)
            self._send_ahead(for_next, for_any)
        if not self._is_open:  # otherwise the end of the rollout counts these prompts
            self._count_skipped()

    def _requests_for_next_rollout(self) -> list[GenerationRequest]:
        """Return the requests of the first round of the next rollout."""
        shortfall = self.target - len(self.queue.accepted)
        return self.selection.next_round(shortfall, self.max_completions) if shortfall > 0 else []

    def _requests_for_rollouts(self, num_rollouts: float) -> list[GenerationRequest]:
        """Return the requests that the next `num_rollouts` rollouts need in addition to those in flight."""
        selection, queue = self.selection, self.queue
        partial_acceptance_rate = selection.acceptance_record.partial_acceptance_rate
        num_wanted = num_rollouts * self.target  # accepted groups that the rollouts lack
        partial: list[PromptGroup] = []  # groups whose rest may be requested
        if self._is_open:  # groups that are partial now are completed in this rollout
            num_wanted += self.rollout.shortfall - partial_acceptance_rate * len(queue.partial)
        else:
            num_wanted -= len(queue.accepted)
            partial = queue.partial
        num_rests_in_flight = sum(not request.is_first for request in queue.requests_in_flight)
        num_wanted -= partial_acceptance_rate * num_rests_in_flight
        # One rollout may have to receive all requests in flight, so all of them together stay within its limit.
        completions_left = self.max_completions - num_completions_of(queue.requests_in_flight)
        completions_left -= selection.most_for_equal_shares
        num_rests = max(math.ceil(num_wanted / partial_acceptance_rate), 0)
        requests = rest_of(partial, num_rests, completions_left)
        completions_left -= num_completions_of(requests)
        num_wanted -= partial_acceptance_rate * len(requests)
        num_first_in_flight = len(queue.requests_in_flight) - num_rests_in_flight
        num_new = selection.acceptance_record.acceptance.most_prompts_without_surplus(num_wanted) - num_first_in_flight
        if num_new > 0 and completions_left >= selection.group_multiple * self.num_generations:
            enough_accepted = num_new * selection.acceptance_record.predicted.rate
            requests += selection.new_groups(selection.round_up_groups(num_new), completions_left, enough_accepted)
        return requests

    def _send_ahead(self, for_next: list[GenerationRequest], for_any: list[GenerationRequest]) -> None:
        """
        Record requests with the present weights as in flight. Those `for_next` must be received in the next rollout,
        those `for_any` in any of the next `rollouts_ahead` rollouts.
        """
        number, step = self.num_rollouts - 1, self.rollout.step
        for_next = self.selection.extend_to_equal_shares(for_next)
        for requests, expires_at in ((for_next, number + 1), (for_any, number + self.rollouts_ahead)):
            self.queue.send(
                [
                    replace(request, weights_rollout=number, weights_step=step, expires_at=expires_at)
                    for request in requests
                ]
            )

    # ---- Statistics of the prompts ----

    @property
    def passes(self) -> float:
        """Passes over the dataset, not counting prompts in flight."""
        oldest = self.queue.first_unsampled_position
        return self.stream.passes if oldest is None else self.stream.passes_at(*oldest)

    @property
    def skipped_pass_rates(self) -> list[float]:
        """Expected pass rates of the prompts that were skipped since the rollout began."""
        distributions = [one for policy in self.selection.policies for one in policy.skipped_distributions]
        return [correct / (correct + incorrect) for correct, incorrect in distributions]

    def _count_skipped(self) -> None:
        """Add the prompts that were skipped since the last call to the totals."""
        for distribution in self._skipped.take():
            self.totals.add_skipped(expected_acceptance(*distribution, self.num_generations))

    def new_passes_without_group(self) -> int:
        """
        Return how many whole passes over the dataset brought no accepted group, if it is time to warn of them,
        otherwise 0.
        """
        num_passes = int(self.stream.passes_since(self._place_of_last_accepted))
        # Warn after 1, 2, 4, 8, ... passes: a warning for each pass over a small dataset would bury all other lines.
        has_doubled = num_passes.bit_length() > self._passes_without_group.bit_length()
        self._passes_without_group = num_passes
        return num_passes if has_doubled else 0

    def has_new_batches_without_group(self) -> bool:
        """
        Return whether to warn, once per run, that many batches of completions brought no accepted group, although the
        rollout continues.
        """
        rollout = self.rollout
        num_batches = rollout.num_completions / (self.target * self.num_generations)
        if self._has_warned_of_batches or rollout.accepted or num_batches < BATCHES_BEFORE_WARNING:
            return False
        has_room = self.completions_left >= self.selection.min_completions_left
        self._has_warned_of_batches = self.num_missing > 0 and not self.has_given_up and has_room
        return self._has_warned_of_batches

    # ---- Several runs in one process ----

    def reset_totals(self) -> None:
        """
        Start the totals of a new run at zero. Everything else stays: the position in the prompts, the number of
        rollouts, the groups in the queue, and what the policies have learned.
        """
        self.totals, self.short_rollouts_in_a_row, self._has_warned_of_batches = Totals(), 0, False

    def start_over(self) -> None:
        """
        Begin with the first prompt, without groups and with all counts at zero.

        What the policies have learned, such as pass rates, and the estimate of the acceptance rate stay. This is
        called before a checkpoint is loaded, which replaces them if it contains them.
        """
        self.stream.start_over()
        self.queue.clear()
        self.rollout = Rollout(self.target)
        self.reset_totals()
        self.num_rollouts, self.sources = 0, []
        self.unanswered, self._is_open = set(), False
        self._place_of_last_accepted, self._passes_without_group = self.stream.place, 0

    # ---- Checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs and what is the same on every process, as values that JSON can hold."""
        stream = self.stream.state_dict()
        oldest = self.queue.first_unsampled_position
        # If the groups in flight cannot be restored, their prompts are drawn again from this position.
        num_passes, position = oldest or (stream["num_passes"], stream["position"])
        return {
            "header": self.stream.order(),
            "stream": stream,
            "stream_before_requests": stream | {"num_passes": num_passes, "position": position},
            "acceptance_record": self.selection.acceptance_record.state_dict(),
            "policies": {type(policy).__name__: policy.state_dict() for policy in self.selection.policies},
            "num_rollouts": self.num_rollouts,
            "sources": self.sources,
            "short_rollouts_in_a_row": self.short_rollouts_in_a_row,
            "totals": asdict(self.totals),
            "place_of_last_accepted": list(self._place_of_last_accepted),
        }

    def load_state_dict(
        self, state: dict[str, Any], queue: dict[str, Any] | None, ignore_data_skip: bool = False
    ) -> tuple[dict[str, tuple], int]:
        """
        Continue from a state, as far as it fits this run. `queue` is this process's [`GroupQueue.state_dict`]. The
        sampler is new, or [`~Sampler.start_over`] was called.

        Return the entries of the header that differ, each with the saved and the present value, and how many partial
        groups were left behind. For [`DATA`] the values are numbers of rows, or `None` if the length is not known.
        """
        differs = {}
        if not ignore_data_skip:
            self.stream.begin()
            theirs, own = state["header"], self.stream.order()
            differs = {name: (theirs[name], own[name]) for name in own if theirs.get(name, own[name]) != own[name]}
            for name in DATA & differs.keys():
                differs[name] = state["stream"]["length"], self.stream.num_rows
        # Groups of another dataset, or of another order of the prompts, are not kept. `queue` is `None` if another
        # setting makes them unusable.
        keeps_groups = queue is not None and not differs
        if ignore_data_skip or differs:
            self.stream.begin_after(state["stream"])
            self._place_of_last_accepted = self.stream.place
        else:
            self.stream.load_state_dict(state["stream" if keeps_groups else "stream_before_requests"])
            self._place_of_last_accepted = tuple(state["place_of_last_accepted"])
        self._passes_without_group = int(self.stream.passes_since(self._place_of_last_accepted))
        self.selection.acceptance_record.load_state_dict(state["acceptance_record"])
        self.num_rollouts, self.short_rollouts_in_a_row = state["num_rollouts"], state["short_rollouts_in_a_row"]
        self.sources, self.totals = list(state["sources"]), Totals(**state["totals"])
        for policy in self.selection.policies:
            if type(policy).__name__ in state["policies"]:
                policy.load_state_dict(state["policies"][type(policy).__name__])
        self.selection.backfill_predictions()
        num_lost = 0
        if keeps_groups:
            assert queue is not None
            num_lost, has_all = self.queue.load_state_dict(queue, self.stream)
            if ignore_data_skip:  # a new pass has begun, so prompts that have no completions yet are not kept
                self.queue.forget_requests()
            elif not has_all:
                self.stream.load_state_dict(state["stream_before_requests"])
        return differs, num_lost

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Selection of the prompts that a round samples, and of how many completions of each.

A round first requests the rest of partial groups, starting with the oldest. Then it draws new prompts for the groups
that are still missing. How many prompts these are follows from the acceptance rate so far. The selection policies
decide which prompts are skipped, and how many completions of a prompt are requested first. If they predict that more
groups will be accepted than before, fewer prompts are drawn.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TypeVar

from .groups import GenerationRequest, PromptGroup, num_completions_of
from .policies import Decisions, SelectionPolicy, largest_screen_size
from .prompts import PromptStream
from .queue import GroupQueue
from .round_size import AcceptanceRate, AcceptanceRecord, rounded_down


Policy = TypeVar("Policy", bound=SelectionPolicy)


class Selection:
    """
    Chooses the requests of a round, following the selection policies.

    Args:
        stream ([`PromptStream`]):
            Stream from which prompts are drawn.
        queue ([`GroupQueue`]):
            Queue in which groups wait.
        policies (`Sequence[SelectionPolicy]`):
            Selection policies, apart from the record of acceptance rates.
        target (`int`):
            Number of groups in a rollout batch.
        num_ranks (`int`):
            Number of processes, each of which samples an equal share of a round.
        carries (`bool`):
            Whether surplus groups train in the next rollout.
        max_round_size (`int`, *optional*):
            Maximum number of new prompts in a round. A round also has at most as many completions as this number of
            whole groups. The maximum is rounded down to a number of groups that the processes can share equally. If it
            is below the smallest such number, that number is the maximum.
        batch_multiplier (`float`, *optional*):
            Number of new prompts in a round, in rollout batches. By default it follows from the acceptance rate.
        extra_round_stalls (`bool`):
            Whether rollouts are sampled one ahead. A further round is more expensive then: the training waits for it,
            and the next rollout is requested only after it.
        samples_next_batch (`bool`):
            Whether a round for this batch may also sample first completions for the next batch.
    """

    def __init__(
        self,
        stream: PromptStream,
        queue: GroupQueue,
        policies: Sequence[SelectionPolicy],
        *,
        target: int,
        num_ranks: int = 1,
        carries: bool = False,
        max_round_size: int | None = None,
        batch_multiplier: float | None = None,
        extra_round_stalls: bool = False,
        samples_next_batch: bool = False,
    ) -> None:
        self.stream, self.queue = stream, queue
        self.target, self.num_generations, self.num_ranks = target, queue.num_generations, num_ranks
        self.carries, self.max_round_size, self.batch_multiplier = carries, max_round_size, batch_multiplier
        self.extra_round_stalls, self.samples_next_batch = extra_round_stalls, samples_next_batch
        self.acceptance_record = AcceptanceRecord()
        self.policies = list(policies)
        if len({type(policy) for policy in policies}) < len(policies):
            raise ValueError(
                "Two selection policies are of the same class, by which a checkpoint tells their states apart. Derive "
                "a class of its own for each."
            )
        # The processes can share whole groups equally if their number is a multiple of this.
        self.group_multiple = num_ranks // math.gcd(self.num_generations, num_ranks)

    # ---- Decisions of the policies ----

    @property
    def active(self) -> list[SelectionPolicy]:
        """The policies that are switched on."""
        return [policy for policy in self.policies if policy.is_on]

    def start_rollout(self) -> None:
        """Tell the policies that a rollout begins. They may be switched on or off by this."""
        before = self.active
        for policy in self.policies:
            policy.start_rollout()
        if self.active != before:
            # The predictions so far were made while other policies were on, so their record starts anew.
            self.acceptance_record.predicted = AcceptanceRate()
            self.backfill_predictions()

    def remove(self, policy: SelectionPolicy) -> None:
        """Remove a policy from the run."""
        self.policies.remove(policy)
        for other in self.policies:
            other.leave_out(policy)

    def take_messages(self) -> list[str]:
        """Return messages of the policies to the user, each of them once."""
        return [message for policy in self.policies for message in policy.take_messages()]

    def find(self, kind: type[Policy]) -> Policy | None:
        """Return the policy of a kind, if the run has one."""
        return next((policy for policy in self.policies if isinstance(policy, kind)), None)

    @property
    def needs_counts(self) -> bool:
        """Whether a policy learns from how many completions of each group are correct."""
        return any(policy.needs_counts for policy in self.policies)

    @property
    def splits_groups(self) -> bool:
        """Whether a policy may request only the first completions of a group."""
        return any(policy.splits_groups for policy in self.active)

    def screen_size(self, name: str | None) -> int:
        """Return how many completions of a prompt to request first."""
        nums = [policy.screen_size(name, self.num_generations) for policy in self.active]
        return min(nums, default=self.num_generations)

    def predicted_acceptance(self, name: str, num_completions: int) -> float | None:
        """
        Return the probability that the rewards of `num_completions` completions of a prompt differ, or `None` if it is
        unknown.
        """
        for policy in self.active:
            probability = policy.predicted_acceptance(name, num_completions)
            if probability is not None:
                return probability
        return None

    def observe(self, decisions: Decisions) -> None:
        """Let all policies learn from groups that were decided on."""
        if not decisions.num_known:
            size = decisions.num_completions
            predicted = [self.predicted_acceptance(group.name, size) for group in decisions.groups]
            known = [probability for probability in predicted if probability is not None]
            if known:
                num_predicted = sum(known) * (len(predicted) / len(known))  # unknown ones count as the mean
                decisions = decisions._replace(num_predicted=num_predicted)
        for policy in (self.acceptance_record, *self.policies):
            policy.observe(decisions)

    def backfill_predictions(self) -> None:
        """
        If no prediction is recorded yet, fill in the past: assume that the selection policy would have predicted the
        same probability for every earlier group as it now does for an unknown prompt.
        """
        acceptance, predicted = self.acceptance_record.acceptance, self.acceptance_record.predicted
        probability = self.predicted_acceptance("", self.num_generations)
        if probability is not None and predicted.num_groups == 0:
            predicted.update(probability * acceptance.num_groups, acceptance.num_groups)

    # ---- What a round requests ----

    @property
    def min_completions_left(self) -> float:
        """
        New prompts are only drawn if the limit leaves at least this many completions: a quarter of a batch, or the
        smallest number of whole groups that the processes can share equally, whichever is more.
        """
        return max(self.target / 4, self.group_multiple) * self.num_generations

    @property
    def most_for_equal_shares(self) -> int:
        """Maximum number of completions added so that partly requested groups can be shared equally."""
        return 2 * self.num_ranks if self.num_ranks > 1 else 0

    @property
    def _most_groups(self) -> int | None:
        """Maximum number of whole groups in a round."""
        if self.max_round_size is None:
            return None
        return max(self.max_round_size // self.group_multiple, 1) * self.group_multiple

    def round_up_groups(self, num: int) -> int:
        """Return the number of groups, rounded up to a number that the processes can share equally."""
        return num + num_lacking(num, self.group_multiple)

    def next_round(self, shortfall: int, completions_left: float) -> list[GenerationRequest]:
        """
        Return the requests of a round for a batch that lacks `shortfall` groups: at most `completions_left`
        completions.
        """
        # A draw removes groups from this list, so that a later draw does not get them again.
        drawn_before = self.queue.cancelled
        may_request_parts = self.splits_groups or bool(self.queue.partial)
        rests = self._rests(shortfall, completions_left)
        completions_left -= num_completions_of(rests)
        requests = rests + self._first_requests(shortfall, rests, completions_left, may_request_parts, drawn_before)
        if not may_request_parts:
            return requests  # only whole groups, in a number that the processes can share equally
        if self._most_groups is not None:
            requests = shrink_to_fit(requests, self._most_groups * self.num_generations)
        return extend_to_equal_shares(requests, self.num_ranks, _Draw(self, drawn_before).take)

    def _rests(self, shortfall: int, completions_left: float) -> list[GenerationRequest]:
        """Return requests for the rest of as many partial groups as the batch needs."""
        num = math.ceil(shortfall / self.acceptance_record.partial_acceptance_rate)
        if self._most_groups is not None:
            num = min(num, self._most_groups)
        rests = rest_of(self.queue.partial, num, completions_left)
        while rests and num_completions_of(rests) + num_for_equal_shares(rests, self.num_ranks) > completions_left:
            rests.pop()
        return rests

    def _first_requests(
        self,
        shortfall: int,
        rests: list[GenerationRequest],
        completions_left: float,
        may_request_parts: bool,
        drawn_before: list[PromptGroup],
    ) -> list[GenerationRequest]:
        """Return the first requests for further groups, if the rests are not enough and the limit allows more."""
        num_new = max(math.ceil(shortfall - len(rests) * self.acceptance_record.partial_acceptance_rate), 0)
        num_for_next_batch = self._num_for_next_batch(len(self.queue.partial) - len(rests))
        reserve = self.most_for_equal_shares if may_request_parts else 0
        takes_whole_groups = not rests and completions_left - reserve < self.min_completions_left
        if takes_whole_groups:
            # Near the limit only whole groups are requested, which need no reserve for equal shares.
            reserve, num_for_next_batch = 0, 0
        num_wanted = num_new + num_for_next_batch
        completions_left -= reserve
        if num_wanted == 0 or completions_left < self.min_completions_left:
            return []
        num_groups = self._num_groups(num_wanted)
        enough_accepted = math.inf
        if self.batch_multiplier is None:
            # The size follows from past rounds. If the predictions for the drawn prompts are higher than those for the
            # prompts of past rounds, fewer prompts are enough.
            enough_accepted = num_groups * self.acceptance_record.predicted.rate
        if self._most_groups is not None:
            num_groups = min(num_groups, self._most_groups)
        draw = _Draw(
            self,
            drawn_before,
            completions_left=completions_left,
            engine_room=self._engine_room_after(rests) if may_request_parts else math.inf,
            min_groups=num_wanted,
            enough_accepted=enough_accepted,
            fraction_for_next_batch=num_for_next_batch / num_wanted,
            acceptance_rate=self.acceptance_record.acceptance.rate,
            takes_whole_groups=takes_whole_groups,
        )
        return draw.take(num_groups)

    def _num_for_next_batch(self, num_partial: int) -> int:
        """Return the number of groups of the next batch whose first completions are sampled in this round."""
        # The next rollout then needs one round, for the rest of these groups, instead of two. This saves time because
        # each round takes as long as its longest completion.
        if not self.samples_next_batch or not self.splits_groups or self.screen_size(None) >= self.num_generations:
            return 0
        return max(self.target - num_partial, 0)

    def _num_groups(self, num_wanted: int) -> int:
        """Return the number of groups that a round draws so that `num_wanted` are accepted."""
        if self.batch_multiplier is not None:
            return self.round_up_groups(rounded_down(self.batch_multiplier * self.target))
        acceptance = self.acceptance_record.acceptance
        size = acceptance.round_size(
            num_wanted, self.target, carries=self.carries, extra_round_stalls=self.extra_round_stalls
        )
        return self.round_up_groups(size)

    def _engine_room_after(self, rests: list[GenerationRequest]) -> float:
        """Return how many more completions the engine can take in the same round as these."""
        if self._most_groups is None:
            return math.inf
        for_equal_shares = self.num_ranks if self.num_ranks > 1 and rests else 0
        return self._most_groups * self.num_generations - num_completions_of(rests) - for_equal_shares

    def new_groups(self, num: int, completions_left: float, enough_accepted: float) -> list[GenerationRequest]:
        """Return requests for `num` new groups, or for fewer if these are predicted to bring enough accepted ones."""
        draw = _Draw(self, self.queue.cancelled, completions_left=completions_left, enough_accepted=enough_accepted)
        return draw.take(num)

    def extend_to_equal_shares(self, requests: list[GenerationRequest]) -> list[GenerationRequest]:
        """Return the requests with a few more completions, so that the processes have equal shares."""
        return extend_to_equal_shares(requests, self.num_ranks, _Draw(self, []).take)


class _Draw:
    """
    Draws prompts one by one, until there are enough or there is no room for more.

    Args:
        selection ([`Selection`]):
            Selection whose policies choose prompts and whose stream is drawn from.
        drawn_before (`list[PromptGroup]`):
            Groups that were drawn before and never sampled. They come first, and are removed from the list.
        completions_left (`float`):
            Number of completions that may still be requested.
        engine_room (`float`):
            Number of completions that the engine can take at once.
        min_groups (`int`):
            Number of groups to draw at least, if there is room.
        enough_accepted (`float`):
            Number of groups predicted to be accepted at which the draw may stop early. Infinity never stops early.
        fraction_for_next_batch (`float`):
            Fraction of the groups that is meant for the next batch.
        acceptance_rate (`float`):
            Expected acceptance rate. Enough of `completions_left` is kept to complete this share of the groups that
            are requested in part.
        takes_whole_groups (`bool`):
            Whether groups are always requested whole, whatever the policies decide.
    """

    def __init__(
        self,
        selection: Selection,
        drawn_before: list[PromptGroup],
        *,
        completions_left: float = math.inf,
        engine_room: float = math.inf,
        min_groups: int = 0,
        enough_accepted: float = math.inf,
        fraction_for_next_batch: float = 0.0,
        acceptance_rate: float = 0.0,
        takes_whole_groups: bool = False,
    ) -> None:
        self._selection, self._drawn_before = selection, drawn_before
        self._completions_left, self._engine_room = completions_left, engine_room
        self._min_groups, self._enough_accepted = min_groups, enough_accepted
        self._fraction_for_next_batch, self._acceptance_rate = fraction_for_next_batch, acceptance_rate
        self._takes_whole_groups = takes_whole_groups
        self._nums: list[int] = []  # number of completions requested of each drawn group
        self._predicted = 0.0  # number of drawn groups that are predicted to be accepted ...
        self._predicted_partial = 0.0  # ... and how many of these are requested in part
        self._max_screen_size = self._find_max_screen_size()

    def _find_max_screen_size(self) -> int:
        """Return the maximum number of first completions of a group that is requested in part."""
        num_generations = self._selection.num_generations
        nums = [policy.max_screen_size(num_generations) for policy in self._selection.active if policy.splits_groups]
        if self._takes_whole_groups or not nums:
            # No group is drawn in part, but `shrink_to_fit` may cut requests for whole groups down to this number.
            return largest_screen_size(num_generations)
        return min(nums)

    def take(self, num: int) -> list[GenerationRequest]:
        """Return requests for the next `num` prompts, or for fewer if these are enough."""
        if self._engine_room < self._max_screen_size:
            return []
        groups: list[PromptGroup] = []
        is_full = False
        while self._drawn_before and len(groups) < num and not is_full:
            groups.append(self._drawn_before.pop(0))
            self._note(groups[-1].name)
            is_full = self._is_full()
        if len(groups) < num and not is_full:
            groups += self._take_from_stream(num - len(groups))
        return [GenerationRequest(group, num) for group, num in zip(groups, self._nums, strict=True)]

    def _take_from_stream(self, num: int) -> list[PromptGroup]:
        policies, stream = self._selection.active, self._selection.stream

        def skips(name: str, may_skip: bool) -> bool:
            return any(policy.skips(name, may_skip) for policy in policies)

        def is_enough(name: str) -> bool:
            self._note(name)
            return self._is_full()

        prompts = stream.take(num, skips, is_enough)
        return [
            self._selection.queue.draw(name, example, position)
            for (name, example), position in zip(prompts, stream.taken_at, strict=True)
        ]

    def _note(self, name: str) -> None:
        """Count a prompt that was drawn."""
        selection, num_generations = self._selection, self._selection.num_generations
        size = num_generations if self._takes_whole_groups else selection.screen_size(name)
        self._nums.append(size)
        acceptance = selection.predicted_acceptance(name, size)
        if acceptance is not None:
            self._predicted += acceptance
            if size < num_generations:
                self._predicted_partial += acceptance
        # Only first completions are counted: `shrink_to_fit` reduces whole groups to these if there is no room.
        self._engine_room -= min(size, self._max_screen_size)
        self._completions_left -= size + self._acceptance_rate * (num_generations - size)

    def _is_full(self) -> bool:
        """Return whether to draw no further prompt."""
        if self._engine_room < self._max_screen_size:
            return True
        if len(self._nums) % self._selection.group_multiple != 0:
            return False  # the processes could not share these equally
        has_enough_accepted = self._predicted >= self._scaled_target(self._enough_accepted)
        has_drawn_enough = len(self._nums) >= self._scaled_target(self._min_groups)
        is_spent = self._completions_left < self._selection.group_multiple * self._selection.num_generations
        return (has_enough_accepted and has_drawn_enough) or is_spent

    def _scaled_target(self, num: float) -> float:
        """
        Scale a number of groups that is meant for this batch and the next.

        Only groups that are requested in part are drawn for the next batch, since groups that are requested whole
        would be surplus of this batch. So the number for the next batch is multiplied by the fraction that is
        requested in part: if all groups are requested whole, that number is 0.
        """
        if not self._predicted:
            return num
        fraction_partial = self._predicted_partial / self._predicted
        return (1.0 - self._fraction_for_next_batch * (1.0 - fraction_partial)) * num


# ---- Pure functions on requests ----


def rest_of(partial: Sequence[PromptGroup], num: int, completions_left: float) -> list[GenerationRequest]:
    """
    Return requests for the rest of up to `num` partial groups, oldest first: at most `completions_left` in total.
    """
    rests = [GenerationRequest(group, group.num_completions_missing) for group in partial[:num]]
    ends = accumulate(rest.num_completions for rest in rests)
    return [rest for rest, end in zip(rests, ends, strict=True) if end <= completions_left]


def num_lacking(num: int, multiple_of: int) -> int:
    """Return what must be added to `num` to make it a multiple of `multiple_of`."""
    return -num % multiple_of


def shrink_to_fit(requests: Sequence[GenerationRequest], most: int) -> list[GenerationRequest]:
    """Return the requests, cut down to first completions until there are no more than `most` completions."""
    requests, excess = list(requests), num_completions_of(requests) - most
    for i, request in reversed(list(enumerate(requests))):
        if excess > 0 and request.is_whole:
            size = largest_screen_size(request.num_completions)
            requests[i] = replace(request, num_completions=size)
            excess -= request.num_completions - size
    return requests


def extend_to_equal_shares(
    requests: Sequence[GenerationRequest], num_ranks: int, take: Callable[[int], list[GenerationRequest]]
) -> list[GenerationRequest]:
    """Return the requests with more first completions or further prompts, so that the processes have equal shares."""
    requests, num_more = list(requests), num_lacking(num_completions_of(requests), num_ranks)
    for i, request in reversed(list(enumerate(requests))):
        if num_more and request.is_first:
            more = min(num_more, request.group.num_generations - request.num_completions)
            requests[i] = replace(request, num_completions=request.num_completions + more)
            num_more -= more
    if num_more:
        if num_more == 1:  # a group needs at least two completions to compare
            num_more += num_ranks
        num_groups = math.ceil(num_more / requests[0].group.num_generations)
        for i, request in enumerate(take(num_groups)):
            part = (num_more + i) // num_groups  # the parts differ by at most one and add up to `num_more`
            requests.append(replace(request, num_completions=part))
    return requests


def num_for_equal_shares(requests: Sequence[GenerationRequest], num_ranks: int) -> int:
    """Return the number of completions that [`extend_to_equal_shares`] adds."""
    num_more = num_lacking(num_completions_of(requests), num_ranks)
    spare = sum(request.group.num_generations - request.num_completions for request in requests if request.is_first)
    return num_more + num_ranks if num_more - spare == 1 else num_more


def separate_whole_requests(
    requests: Sequence[GenerationRequest], multiple_of: int
) -> tuple[list[GenerationRequest], list[GenerationRequest]]:
    """Return as many requests for whole groups as make a multiple of `multiple_of`, and all other requests."""
    whole = [request for request in requests if request.is_whole]
    whole = whole[: len(whole) // multiple_of * multiple_of]
    numbers = {request.group.number for request in whole}
    return whole, [request for request in requests if request.group.number not in numbers]

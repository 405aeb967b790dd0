# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""What one rollout has sampled so far, and a run."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from .refill import Batch, Group
from .rounds import Ask, Round


@dataclass
class Rollout:
    """What one rollout has sampled so far. Groups are in prompt order; carried ones stand in the first round."""

    target: int  # groups of its batch
    number: int = 0  # its place in the run
    rounds: list[Round] = field(default_factory=list)
    carried: list[Group] = field(default_factory=list)
    accepted: list[Group] = field(default_factory=list)
    dropped: list[Group] = field(default_factory=list)
    drop_reasons: dict[Group, str] = field(default_factory=dict)
    half: dict[Group, Ask] = field(default_factory=dict)  # whose first few completions do not agree
    sampled: list[Round] = field(default_factory=list)  # the rounds that it sampled itself, as they were asked for
    _num_completions_at_last_group: int = 0  # sampled when a group was last accepted

    @property
    def num_rounds(self) -> int:
        """What was asked for in earlier rollouts is one."""
        num_own = sum(not round_.is_stale for round_ in self.sampled)
        return num_own + (num_own < len(self.sampled))

    def add(self, round_: Round, reasons: Sequence[str | None], is_half: bool) -> None:
        """Takes in a round that it sampled, or a part of one, and why groups are dropped; `is_half`: none is whole."""
        self.rounds.append(round_)
        asked = round_.asked or round_
        if not self.sampled or self.sampled[-1] is not asked:
            self.sampled.append(asked)
        for index, reason in enumerate(reasons):
            group = Group(len(self.rounds) - 1, index)
            if round_.num_known and (first := round_.asks[index].first):
                del self.half[first]
            if reason is not None:
                self.dropped.append(group)
                self.drop_reasons[group] = reason
            elif is_half:
                self.half[group] = round_.asks[index]
            else:
                self.accepted.append(group)
                self._num_completions_at_last_group = self.num_completions

    def round_of(self, group: Group) -> Round:
        return self.rounds[group.round]

    def rewards_of(self, group: Group) -> Tensor:
        round_, rows = self.round_of(group).piece(group.index)
        return round_.rewards_BF[rows.start : rows.stop]

    def number_of(self, group: Group) -> int:
        """In which of the rounds that were sampled it was, or was made whole, from 1; 0 in none."""
        round_ = self.round_of(group)
        return next((i for i, sampled in enumerate(self.sampled, start=1) if sampled is (round_.asked or round_)), 0)

    @property
    def sampled_groups(self) -> list[Group]:
        """The groups of these rounds that were decided on, in prompt order."""
        return sorted([*self.accepted, *self.dropped])

    @property
    def reasons(self) -> Counter[str]:
        return Counter(self.drop_reasons.values())

    @property
    def num_groups(self) -> int:
        """Groups that this rollout sampled."""
        return len(self.accepted) + len(self.dropped)

    @property
    def num_tokens(self) -> int:
        return sum(int(round_.lengths_B.sum()) for round_ in self.sampled)

    @property
    def num_completions(self) -> int:
        return sum(len(round_.rewards_BF) for round_ in self.sampled)

    @property
    def num_completions_without_group(self) -> int:
        """Completions that were sampled since a group was last accepted, or since the rollout began."""
        return self.num_completions - self._num_completions_at_last_group

    @property
    def num_found(self) -> int:
        """Groups that can train."""
        return len(self.carried) + len(self.accepted)

    @property
    def shortfall(self) -> int:
        return max(self.target - self.num_found, 0)

    @property
    def acceptance_rate(self) -> float:
        return len(self.accepted) / max(self.num_groups, 1)  # the first few alone decide on none


@dataclass
class Totals:
    """What a run has sampled so far, through every resume, over all rollouts that have ended."""

    groups_sampled: int = 0
    groups_trained: int = 0
    tokens_generated: int = 0
    short_rollouts: int = 0  # whose batch was not full
    barren_rollouts: int = 0  # in a row that found no group to train on

    def add(self, rollout: Rollout, batch: Batch, fell_short: bool) -> None:
        self.short_rollouts += fell_short
        self.groups_sampled += rollout.num_groups
        self.groups_trained += len(batch.train)
        self.tokens_generated += rollout.num_tokens
        self.barren_rollouts = 0 if batch.train else self.barren_rollouts + 1

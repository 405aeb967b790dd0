# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Everything that a rollout has sampled so far, and the totals of a run."""

from collections import Counter
from dataclasses import dataclass, field

from .batch import Batch
from .groups import PromptGroup
from .rounds import Round


@dataclass
class Rollout:
    """Everything that a rollout has sampled so far."""

    target: int  # groups of its batch
    number: int = 0  # its place in the run
    step: int = 0  # optimizer steps behind its policy
    num_carried: int = 0  # groups that an earlier rollout accepted and that train in this one
    rounds: list[Round] = field(default_factory=list)
    accepted: list[PromptGroup] = field(default_factory=list)  # in the order of the decisions, as the next
    dropped: list[PromptGroup] = field(default_factory=list)
    _num_completions_at_last_group: int = 0  # sampled when a group was last accepted

    def add(self, round_: Round) -> None:
        """Add a round that was just sampled."""
        self.rounds.append(round_)
        round_.number = len(self.rounds)

    def note_accepted(self, group: PromptGroup) -> None:
        """Note that a group was accepted in the latest round."""
        self.accepted.append(group)
        self._num_completions_at_last_group = self.num_completions

    @property
    def num_rounds(self) -> int:
        """Number of rounds. Everything that was requested in earlier rollouts counts as one."""
        num_own = sum(not round_.is_stale for round_ in self.rounds)
        has_stale = num_own < len(self.rounds)
        return num_own + 1 if has_stale else num_own

    @property
    def decided(self) -> list[PromptGroup]:
        """The groups that it accepted or dropped, in the order of the draw."""
        return sorted([*self.accepted, *self.dropped], key=lambda group: group.number)

    @property
    def drop_reasons(self) -> Counter[str]:
        """Number of groups dropped for each reason."""
        return Counter(group.drop_reason for group in self.dropped if group.drop_reason is not None)

    @property
    def num_groups(self) -> int:
        """Number of groups that it sampled and decided on."""
        return len(self.accepted) + len(self.dropped)

    @property
    def num_completions(self) -> int:
        """Number of completions that it sampled."""
        return sum(len(round_.completions) for round_ in self.rounds)

    @property
    def num_tokens(self) -> int:
        """Number of the model's own tokens that it sampled."""
        return sum(group.lengths[index] for round_ in self.rounds for group, index in round_.completions)

    @property
    def num_completions_without_group(self) -> int:
        """Number of completions sampled since a group was last accepted, or since the rollout began."""
        return self.num_completions - self._num_completions_at_last_group

    @property
    def num_found(self) -> int:
        """Number of groups that can train."""
        return self.num_carried + len(self.accepted)

    @property
    def shortfall(self) -> int:
        """Number of groups that the batch still needs."""
        return max(self.target - self.num_found, 0)

    @property
    def acceptance_rate(self) -> float:
        """The share of the decided groups that was accepted."""
        return len(self.accepted) / max(self.num_groups, 1)


@dataclass
class Totals:
    """Totals of a run over all rollouts that have ended, across resumes."""

    groups_sampled: int = 0
    groups_trained: int = 0
    tokens_generated: int = 0
    short_rollouts: int = 0  # whose batch was not full
    empty_rollouts: int = 0  # in a row that accepted no group

    def add(self, rollout: Rollout, batch: Batch, fell_short: bool) -> None:
        """Add a rollout that has ended."""
        if fell_short:
            self.short_rollouts += 1
        self.groups_sampled += rollout.num_groups
        self.groups_trained += len(batch.train)
        self.tokens_generated += rollout.num_tokens
        self.empty_rollouts = 0 if batch.train else self.empty_rollouts + 1

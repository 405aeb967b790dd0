# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Counts of what one rollout has sampled so far, and of what a whole run has."""

from collections import Counter
from dataclasses import dataclass, field

from .batch import Batch
from .groups import PromptGroup
from .rounds import Round


@dataclass
class Rollout:
    """The rounds and groups of one rollout so far."""

    target: int  # groups in its batch
    number: int = 0  # counted over the run, from 0
    step: int = 0  # optimizer steps before it
    num_accepted_before: int = 0  # groups that were accepted before it began, or before it was interrupted
    rounds: list[Round] = field(default_factory=list)
    accepted: list[PromptGroup] = field(default_factory=list)  # in the order in which they were accepted
    dropped: list[PromptGroup] = field(default_factory=list)  # in the order in which they were dropped
    _num_completions_at_last_accepted: int = 0  # completions sampled when a group was last accepted

    def add(self, round_: Round) -> None:
        """Add a round that was just sampled."""
        self.rounds.append(round_)
        round_.number = len(self.rounds)

    def note_accepted(self, group: PromptGroup) -> None:
        """Add a group that was accepted in the latest round."""
        self.accepted.append(group)
        self._num_completions_at_last_accepted = self.num_completions

    @property
    def refills(self) -> list[Round]:
        """The rounds after the first. All rounds with completions of earlier weights count as the first one."""
        own = [round_ for round_ in self.rounds if not round_.has_earlier_weights]
        return own if len(own) < len(self.rounds) else own[1:]

    @property
    def num_rounds(self) -> int:
        """Number of rounds. All rounds with completions of earlier weights count as one."""
        return 1 + len(self.refills) if self.rounds else 0

    @property
    def decided_groups(self) -> list[PromptGroup]:
        """The groups that were accepted or dropped, in the order in which their prompts were drawn."""
        return sorted([*self.accepted, *self.dropped], key=lambda group: group.number)

    @property
    def drop_reasons(self) -> Counter[str]:
        """Number of groups dropped for each reason."""
        return Counter(group.drop_reason for group in self.dropped if group.drop_reason is not None)

    @property
    def num_groups(self) -> int:
        """Number of groups that were accepted or dropped."""
        return len(self.accepted) + len(self.dropped)

    @property
    def num_completions(self) -> int:
        """Number of completions sampled."""
        return sum(len(round_.completions) for round_ in self.rounds)

    @property
    def num_tokens(self) -> int:
        """Number of sampled tokens, not counting those of tools and environments."""
        return sum(group.lengths[index] for round_ in self.rounds for group, index in round_.completions)

    @property
    def num_completions_since_accepted(self) -> int:
        """Number of completions sampled since a group was last accepted, or since the rollout began."""
        return self.num_completions - self._num_completions_at_last_accepted

    @property
    def num_trainable(self) -> int:
        """Number of groups that can train: the carried ones and the accepted ones."""
        return self.num_accepted_before + len(self.accepted)

    @property
    def shortfall(self) -> int:
        """Number of accepted groups that the batch lacks, even if copies fill it."""
        return max(self.target - self.num_trainable, 0)

    @property
    def acceptance_rate(self) -> float:
        """Share of the sampled groups that was accepted."""
        return len(self.accepted) / max(self.num_groups, 1)


@dataclass
class Totals:
    """
    Totals of a run over all its finished rollouts. They include those before it was resumed, unless `dapo_state.json`
    was missing in the checkpoint or could not be read.
    """

    groups_sampled: int = 0
    groups_trained: int = 0
    tokens_generated: int = 0
    short_rollouts: int = 0  # rollouts that fell short, see `Sampler.finish_rollout`
    empty_rollouts_in_a_row: int = 0  # that had no group to train on
    gave_up: bool = False  # whether the last rollout ended because no group was accepted for long
    first_step: int = 0  # optimizer steps before the first of these rollouts
    num_skipped: int = 0  # prompts that were skipped
    skipped_accepted: float = 0.0  # expected number of them that would have been accepted

    def add_skipped(self, acceptance: float) -> None:
        """Add a prompt that was skipped. `acceptance` is the probability that its group would have been accepted."""
        self.num_skipped += 1
        self.skipped_accepted += acceptance

    def add(self, rollout: Rollout, batch: Batch, fell_short: bool) -> None:
        """Add a finished rollout."""
        if fell_short:
            self.short_rollouts += 1
        self.groups_sampled += rollout.num_groups
        self.groups_trained += len(batch.train)
        self.tokens_generated += rollout.num_tokens
        self.empty_rollouts_in_a_row = 0 if batch.train else self.empty_rollouts_in_a_row + 1

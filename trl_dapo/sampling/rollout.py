# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""What one rollout has sampled so far, and a run."""

from collections import Counter
from dataclasses import dataclass, field

from .refill import Batch, Group
from .rounds import Round


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
    num_rounds: int = 0  # that were sampled
    num_skipped_before: int = 0  # prompts passed over before the first that was drawn for it
    ahead_step: int | None = None  # optimizer steps behind the policy of its first round, where that was asked ahead

    @property
    def sampled(self) -> list[Round]:
        """The rounds that this rollout sampled itself."""
        return self.rounds[len(self.rounds) - self.num_rounds :]

    @property
    def sampled_groups(self) -> list[Group]:
        """The groups of these rounds, in prompt order."""
        first = len(self.rounds) - self.num_rounds
        return [
            Group(first + i, index) for i, round_ in enumerate(self.sampled) for index in range(len(round_.prompts))
        ]

    @property
    def reasons(self) -> Counter[str]:
        """Dropped groups by reason."""
        return Counter(self.drop_reasons.values())

    @property
    def num_groups(self) -> int:
        """Groups that this rollout sampled."""
        return len(self.accepted) + len(self.dropped)

    @property
    def num_found(self) -> int:
        """Groups that can train."""
        return len(self.carried) + len(self.accepted)

    @property
    def shortfall(self) -> int:
        return max(self.target - self.num_found, 0)

    def describe_outcomes(self, batch: Batch) -> list[str]:
        """For each group that trains or fills the batch, in its order: what became of it, and why."""
        fill = [self.drop_reasons.get(group) for group in batch.fill]
        return ["trained"] * len(batch.train) + [f"dropped: {reason}" if reason else "copy" for reason in fill]

    @property
    def acceptance_rate(self) -> float:
        return len(self.accepted) / self.num_groups


@dataclass
class Totals:
    """What a run has sampled so far, through every resume, over all rollouts that have ended."""

    groups_sampled: int = 0
    groups_trained: int = 0
    tokens_generated: int = 0
    barren_rollouts: int = 0  # in a row that found no group to train on

    def add(self, rollout: Rollout, batch: Batch) -> None:
        self.groups_sampled += rollout.num_groups
        self.groups_trained += len(batch.train)
        self.tokens_generated += sum(int(round_.lengths_B.sum()) for round_ in rollout.sampled)
        self.barren_rollouts = 0 if batch.train else self.barren_rollouts + 1

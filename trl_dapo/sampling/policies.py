# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The interface of a selection policy, which learns from groups that were decided on and helps to choose prompts.

A new policy is a file with a subclass of [`SelectionPolicy`] and an entry in `construction.make_sampler`.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple


if TYPE_CHECKING:  # a plan knows policies, and imports no torch
    from .groups import PromptGroup


NUMS_FIRST = (2, 3, 4, 6, 8)  # numbers of first completions to choose from


def largest_first(num_generations: int) -> int:
    """Return the largest number of first completions that is less than a group."""
    return max((first for first in NUMS_FIRST if first < num_generations), default=num_generations)


class Decided(NamedTuple):
    """Groups of one round that were decided on, all with as many completions."""

    groups: Sequence["PromptGroup"]
    reasons: Sequence[str | None]  # why each is dropped, or `None` if it is accepted or partial
    num_known: int  # completions of each that an earlier round had brought
    # Correct and scored among the new completions of each group, if a policy needs them and a reward tells.
    counts: Sequence[tuple[int, int]] | None = None
    step: int = 0  # optimizer steps so far
    predicted_acceptance: float | None = None  # how many of these groups were predicted to be accepted

    @property
    def num_completions(self) -> int:
        """Completions of each group."""
        return self.groups[0].num_received

    @property
    def are_whole(self) -> bool:
        return self.groups[0].is_whole


class SelectionPolicy:
    """Influences which prompts are sampled, and how many completions of each first. The base class changes nothing."""

    name = ""  # in logs
    is_on = True  # if it is off, it only learns
    needs_counts = False  # whether it learns from how many completions are correct
    splits_groups = False  # whether it may request only the first completions of a group

    # The pass rates of the prompts that it skipped since the rollout began, each as a Beta distribution.
    skipped: Sequence[tuple[float, float]] = ()

    def start_rollout(self) -> None:
        """Note that a rollout begins."""

    def skips(self, name: str, may_skip: bool) -> bool:
        """Return whether to skip a prompt now. If `may_skip` is false, a full pass was skipped: return false."""
        return False

    def num_first(self, name: str | None, num_generations: int) -> int:
        """Return how many completions of a prompt to request first; `None` is a prompt that nothing is known of."""
        return num_generations

    def most_first(self, num_generations: int) -> int:
        """Return the most completions that it requests first of a group that it splits."""
        return num_generations

    def predicted_acceptance(self, name: str, num_completions: int) -> float | None:
        """
        Return the probability that the rewards of `num_completions` completions differ, or `None` if it is unknown.
        """
        return None

    def observe(self, decided: Decided) -> None:
        """Learn from groups that were decided on."""

    def pass_rate(self, name: str | None) -> tuple[float, float] | None:
        """
        Return the Beta distribution of a prompt's pass rate, or of any prompt's for `None`: its two parameters, or
        `None` if it cannot tell.
        """
        return None

    def expected_saving(self, num_generations: int) -> float:
        """Return how many times fewer completions it would take by what it knows, if it were on."""
        return 1.0

    def describe_on(self, num_generations: int) -> str:
        """Return what is done if it is on."""
        return ""

    def describe_off(self) -> str:
        """Return what is done if it is off."""
        return ""

    def leave_out(self, policy: "SelectionPolicy") -> None:
        """Note that the run continues without another policy."""

    def take_messages(self) -> list[str]:
        """Return what a user should be told, once."""
        return []

    def metrics(self) -> dict[str, float]:
        """Return what the log says of it, without the prefix `dynamic_sampling/`."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs, JSON-able."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state."""

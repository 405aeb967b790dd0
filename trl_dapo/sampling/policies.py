# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The interface of selection policies, which learn from decisions on groups and influence which prompts are sampled.

In this folder a policy is a selection policy. The policy that is trained is called the model, or its weights.

To add a policy, write a subclass of [`SelectionPolicy`] in a file of its own, and create it in
`construction.make_sampler`, which gets what it needs from `DAPOTrainer._new_sampler`. Every process asks the policy
about the same prompts in the same order, and the policy must decide the same on each. It knows only the name of a
prompt. [`PromptStream.rows_by_name`] returns the columns of each prompt under its name, or nothing for a streamed
dataset. A policy cannot exclude prompts: if a full pass was skipped, the next prompts are sampled anyway. To exclude
prompts, filter the dataset instead.

If a run has several policies, their order matters, and their decisions are combined as follows:

- A prompt is skipped if any policy skips it. The policies are asked in order, and only the first one that skips the
  prompt counts it.
- If policies request different numbers of first completions, the smallest number is requested.
- The predicted acceptance of a group is that of the first policy that knows one.
- Every policy learns from every decision, in order. Policies that are off learn too, but decide nothing.
"""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple


if TYPE_CHECKING:  # `trl-dapo plan` imports policies, and must not import torch
    from .groups import PromptGroup


SCREEN_SIZES = (2, 3, 4, 6, 8)  # numbers of first completions to choose from


def largest_screen_size(num_generations: int) -> int:
    """Return the largest of `SCREEN_SIZES` that is less than a whole group, or a whole group if there is none."""
    return max((size for size in SCREEN_SIZES if size < num_generations), default=num_generations)


class Decisions(NamedTuple):
    """Decisions on groups of one round, all with the same number of completions."""

    groups: Sequence["PromptGroup"]
    reasons: Sequence[str | None]  # why each is dropped; `None` if it is accepted or its rest is to be requested
    num_known: int  # number of completions that each group had before this round
    # The numbers of correct and of scored ones among the new completions of each group, without masked completions.
    # Set if a policy needs them and the rewards say which completions are correct.
    counts: Sequence[tuple[int, int]] | None = None
    step: int = 0  # optimizer steps so far
    num_predicted: float | None = None  # how many of these groups were predicted to be accepted

    @property
    def num_completions(self) -> int:
        """Number of completions in each group."""
        return self.groups[0].num_received

    @property
    def are_whole(self) -> bool:
        """Whether the groups have all their completions."""
        return self.groups[0].is_whole


class SelectionPolicy:
    """
    A policy that may skip prompts, and may request only the first completions of a prompt. By default it does neither.
    """

    name = ""  # its name in logs
    is_on = True  # a policy that is off learns, but does not influence what is sampled
    needs_counts = False  # whether it learns from the number of correct completions
    splits_groups = False  # whether it may request only the first completions of a group

    # The pass rates of the prompts that it skipped since the rollout began, each as the two parameters of a Beta
    # distribution.
    skipped_distributions: Sequence[tuple[float, float]] = ()

    def start_rollout(self) -> None:
        """Prepare for a new rollout, and empty `skipped_distributions`."""

    def skips(self, name: str, may_skip: bool) -> bool:
        """
        Return whether to skip a prompt. Called once each time the stream reaches the prompt, unless an earlier policy
        skips it. If it is skipped, also add its pass rate to `skipped_distributions`. If `may_skip` is `False`, a full
        pass was skipped, and the result must be `False`.
        """
        return False

    def screen_size(self, name: str | None, num_generations: int) -> int:
        """Return how many completions of a prompt to request first. `None` stands for a prompt not seen before."""
        return num_generations

    def max_screen_size(self, num_generations: int) -> int:
        """Return the largest number of first completions that it requests when it does not request whole groups."""
        return num_generations

    def predicted_acceptance(self, name: str, num_completions: int) -> float | None:
        """
        Return the probability that the rewards of `num_completions` completions of a prompt differ, or `None` if it is
        unknown.
        """
        return None

    def observe(self, decisions: Decisions) -> None:
        """Learn from decisions on groups."""

    def pass_rate_distribution(self, name: str | None) -> tuple[float, float] | None:
        """
        Return the two parameters of the Beta distribution of a prompt's pass rate, or of the pass rates of all prompts
        if `name` is `None`. Return `None` if it is unknown.
        """
        return None

    def expected_saving(self, num_generations: int) -> float:
        """Return the factor by which it is expected to reduce the number of completions, if it were on."""
        return 1.0

    def describe_on(self, num_generations: int) -> str:
        """Return a description of what happens while it is on."""
        return ""

    def describe_off(self) -> str:
        """Return a description of what happens while it is off."""
        return ""

    def leave_out(self, policy: "SelectionPolicy") -> None:
        """Forget another policy, which is removed from the run."""

    def take_messages(self) -> list[str]:
        """Return messages to the user, each of them once."""
        return []

    def metrics(self) -> dict[str, float]:
        """Return its metrics, without the prefix `dynamic_sampling/`."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs, as values that JSON can hold."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state returned by `state_dict`."""


class SkippedPrompts:
    """
    The prompts that policies have skipped in a rollout. `take` returns each of them once.

    Args:
        policies (`Sequence[SelectionPolicy]`):
            Policies that may skip prompts.
    """

    def __init__(self, policies: Sequence[SelectionPolicy]) -> None:
        self._policies = policies
        self._num_taken: Counter[SelectionPolicy] = Counter()

    def take(self) -> list[tuple[float, float]]:
        """Return the pass rates of the prompts that were skipped since the last call, as Beta parameters."""
        taken: list[tuple[float, float]] = []
        for policy in self._policies:
            taken += policy.skipped_distributions[self._num_taken[policy] :]
            self._num_taken[policy] = len(policy.skipped_distributions)
        return taken

    def reset(self) -> None:
        """Forget what was taken, because a new rollout begins or a checkpoint was loaded."""
        self._num_taken.clear()

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Automatic switching of selection policies: on if the run accepts few groups, and off again if it accepts many.

Screening and the pass-rate memory save completions, but with them the run trains less often on hard prompts. They pay
off if most prompts are never solved or always solved, so they stay off until the acceptance rate is certainly low.
"""

import math
from collections.abc import Sequence
from typing import Any

from .groups import PromptGroup
from .policies import Decisions, SelectionPolicy, SkippedPrompts
from .prompt_memory import expected_acceptance, log_likelihood
from .round_size import AcceptanceRate


class AutoSwitch(SelectionPolicy):
    """
    Decides at the start of each rollout which of the given policies are on.

    Args:
        policies (`Sequence[SelectionPolicy]`):
            Policies to switch. [`SelectionPolicy.expected_saving`] of each estimates what it would save.
        all_policies (`Sequence[SelectionPolicy]`):
            All policies of the run. They provide the skipped prompts and the pass rates of prompts.
        num_generations (`int`):
            Number of completions in a group.
    """

    needs_counts = True

    # Bounds on the acceptance rate that whole groups have if no prompt is skipped. A policy is switched on if the rate
    # is certainly below the first bound, and off if it is certainly above the second. In between nothing changes.
    # At 20%, screening reduces the completions by a factor of 1.3 for groups of 8 and 1.7 for groups of 16, and the
    # memory by a factor of about 4. Measured in time, both save a factor of at least 1.25 with every engine but
    # `generate` on a GPU (`python -m benchmarks rollout_seconds`). On the benchmark's task *hard tail*, a third of
    # the groups is accepted and the model learns less with the memory, so both bounds are below a third.
    ON_BELOW = 0.20
    OFF_ABOVE = 0.30
    # "Certainly" means by this number of standard deviations of the estimate.
    NUM_DEVIATIONS = 2.0
    # The factor by which a policy must be expected to reduce the completions to be switched on, and to stay on. If all
    # prompts are alike, neither policy saves anything, however few groups are accepted.
    MIN_SAVING = 1.25
    MIN_SAVING_TO_STAY = 1.1

    def __init__(
        self,
        policies: Sequence[SelectionPolicy],
        all_policies: Sequence[SelectionPolicy],
        num_generations: int,
    ) -> None:
        self._switchable = list(policies)
        self._all_policies = list(all_policies)
        self._num_generations = num_generations
        self.acceptance = AcceptanceRate()  # of whole groups of all prompts, including skipped ones
        # Counts of the present rollout. They are only used once it has ended: in a round, whole groups and first
        # completions are decided on one after the other, so before the end the counts may be of one kind alone.
        self._num_prompts = 0
        self._num_accepted = 0.0  # expected values for groups whose outcome is not known
        self._skipped = SkippedPrompts(self._all_policies)
        self._messages: list[str] = []
        for policy in self._switchable:
            policy.is_on = False

    # ---- Counts of the run ----

    def observe(self, decisions: Decisions) -> None:
        """Count groups that were sampled for the first time, and prompts that were skipped."""
        if decisions.counts is None or decisions.num_known:
            return
        # For each prompt, the probability that its whole group would be accepted. An accuracy band may
        # still drop a partial group once it is whole, which is neglected.
        expected = []
        for group, counts, reason in zip(decisions.groups, decisions.counts, decisions.reasons, strict=True):
            if reason is None:
                expected.append(1.0)
            elif decisions.are_whole:
                expected.append(0.0)
            else:
                expected.append(self._would_differ_later(group, *counts))
        self._num_prompts += len(expected)
        self._num_accepted += sum(expected)
        self._count_skipped()

    def _count_skipped(self) -> None:
        """Count the prompts that were skipped since the last call."""
        for correct, incorrect in self._skipped.take():
            self._num_prompts += 1
            self._num_accepted += expected_acceptance(correct, incorrect, self._num_generations)

    def _would_differ_later(self, group: PromptGroup, num_correct: int, num_scored: int) -> float:
        """Return the probability that a group's rewards will differ, if those of its first completions are equal."""
        known = (policy.pass_rate_distribution(group.name) for policy in self._all_policies)
        correct, incorrect = next(distribution for distribution in known if distribution is not None)
        num_rest = group.num_completions_missing
        num_rest_correct = num_rest if num_correct else 0
        stays_equal = log_likelihood(
            num_rest_correct, num_rest - num_rest_correct, correct + num_correct, incorrect + num_scored - num_correct
        )
        return 1.0 - math.exp(stays_equal) if num_scored else 0.0

    # ---- On or off ----

    def start_rollout(self) -> None:
        """Learn from the last rollout, and switch policies on or off accordingly."""
        self._count_skipped()  # prompts skipped while drawing ahead are not counted yet
        if self._num_prompts:
            self.acceptance.update(self._num_accepted, self._num_prompts)
        self._num_prompts, self._num_accepted = 0, 0.0
        self._skipped.reset()
        rate, deviation = self.acceptance.rate, self.acceptance.deviation
        # The messages give these bounds. The rate itself is an estimate that is above 0 even if no group was accepted.
        at_most, at_least = rate + self.NUM_DEVIATIONS * deviation, rate - self.NUM_DEVIATIONS * deviation
        for policy in self._switchable:
            saving = policy.expected_saving(self._num_generations)
            if policy.is_on and at_least > self.OFF_ABOVE:
                self._switch_off(policy, f"At least {at_least:.0%} of groups are accepted")
            elif policy.is_on and saving < self.MIN_SAVING_TO_STAY:
                self._switch_off(policy, f"The expected saving is small by now (a factor of {saving:.2f})")
            elif not policy.is_on and at_most < self.ON_BELOW and saving >= self.MIN_SAVING:
                policy.is_on = True
                change = policy.describe_on(self._num_generations)
                self._messages.append(
                    f"At most {at_most:.0%} of groups are accepted. From here on, {change}. This is expected to take "
                    f"{saving:.1f} times fewer completions for each accepted group."
                )

    def _switch_off(self, policy: SelectionPolicy, why: str) -> None:
        policy.is_on = False
        self._messages.append(f"{why}. From here on, {policy.describe_off()}.")

    def leave_out(self, policy: SelectionPolicy) -> None:
        """Forget a policy, which is removed from the run."""
        self._switchable = [one for one in self._switchable if one is not policy]
        self._all_policies = [one for one in self._all_policies if one is not policy]

    def take_messages(self) -> list[str]:
        messages, self._messages = self._messages, []
        return messages

    def metrics(self) -> dict[str, float]:
        return {f"{policy.name}_is_on": float(policy.is_on) for policy in self._switchable}

    def state_dict(self) -> dict[str, Any]:
        self._count_skipped()
        return {
            "acceptance": self.acceptance.state_dict(),
            "num_prompts": self._num_prompts,
            "num_accepted": self._num_accepted,
            "is_on": {policy.name: policy.is_on for policy in self._switchable},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.acceptance.load_state_dict(state["acceptance"])
        self._num_prompts, self._num_accepted = state["num_prompts"], state["num_accepted"]
        self._skipped.reset()
        for policy in self._switchable:
            policy.is_on = state["is_on"].get(policy.name, False)

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Switches selection policies on where few groups are accepted, and off again, by what the run itself has sampled.

Screen and memory sample fewer completions, but train less often on hard prompts. They pay where most prompts are
hopeless or solved, so they are off until the acceptance rate is surely low.
"""

import math
from collections.abc import Sequence
from typing import Any

from .groups import PromptGroup
from .policies import Decided, SelectionPolicy
from .prompt_memory import expected_acceptance, log_likelihood
from .round_size import AcceptanceRate


class AutoSwitch(SelectionPolicy):
    """
    Decides at the start of each rollout which of some policies are on.

    Args:
        policies (`Sequence[SelectionPolicy]`):
            The policies that it switches. Each says by [`SelectionPolicy.expected_saving`] what it would save.
        all_policies (`Sequence[SelectionPolicy]`):
            All policies of the run: which prompts they skipped, and what they know of a prompt's pass rate.
        num_generations (`int`):
            Completions of a group.
    """

    needs_counts = True

    # Acceptance rates of whole groups if no prompt is skipped. A policy is switched on if the rate is surely below the
    # first, and off if it is surely above the second; in between nothing changes. At 20% the screen saves 1.3 times
    # the completions of groups of 8 and 1.7 times those of groups of 16, and the memory about 4 times; by the clock
    # both save at least 1.25 times on every engine that schedules completions (`python -m benchmarks
    # rollout_seconds`). A model whose prompts are nearly all hard, and which learns less with the memory, accepts a
    # third of its groups.
    ON_BELOW = 0.20
    OFF_ABOVE = 0.30
    # "Surely" means by this many standard deviations of the estimate.
    NUM_DEVIATIONS = 2.0
    # How many times fewer completions it must be expected to take to be switched on, and to stay on: on prompts that
    # are all alike neither saves anything, however few groups are accepted.
    MIN_SAVING = 1.25
    MIN_SAVING_TO_STAY = 1.1

    def __init__(
        self,
        policies: Sequence[SelectionPolicy],
        all_policies: Sequence[SelectionPolicy],
        num_generations: int,
    ) -> None:
        self._switched = list(policies)
        self._all_policies = list(all_policies)
        self._num_generations = num_generations
        self.acceptance = AcceptanceRate()  # of whole groups of all prompts that came, the skipped ones included
        # Counts of the current rollout. Its groups are not a fair sample before it ends, because those of one size
        # come together.
        self._num_prompts = 0
        self._num_accepted = 0.0  # known, or otherwise expected
        self._num_skipped_counted = 0
        self._messages: list[str] = []
        for policy in self._switched:
            policy.is_on = False

    # ---- What the run has sampled ----

    def observe(self, decided: Decided) -> None:
        """Count groups that were sampled for the first time, and prompts that were skipped."""
        if decided.counts is None or decided.num_known:
            return
        expected = []  # of each prompt, the probability that its whole group would be accepted
        for group, counts, reason in zip(decided.groups, decided.counts, decided.reasons, strict=True):
            if reason is None:
                expected.append(1.0)
            elif decided.are_whole:
                expected.append(0.0)
            else:
                expected.append(self._would_differ_later(group, *counts))
        self._num_prompts += len(expected)
        self._num_accepted += sum(expected)
        self._count_skipped()

    def _count_skipped(self) -> None:
        """Count prompts that were skipped since they were last counted."""
        skipped = [pass_rate for policy in self._all_policies for pass_rate in policy.skipped]
        for correct, incorrect in skipped[self._num_skipped_counted :]:
            self._num_prompts += 1
            self._num_accepted += expected_acceptance(correct, incorrect, self._num_generations)
        self._num_skipped_counted = len(skipped)

    def _would_differ_later(self, group: PromptGroup, num_correct: int, num_scored: int) -> float:
        """Return the probability that the rest of a group differs from its first completions, which are all equal."""
        known = (policy.pass_rate(group.name) for policy in self._all_policies)
        correct, incorrect = next(pass_rate for pass_rate in known if pass_rate is not None)
        num_rest = group.num_missing
        num_rest_correct = num_rest if num_correct else 0
        stays_equal = log_likelihood(
            num_rest_correct, num_rest - num_rest_correct, correct + num_correct, incorrect + num_scored - num_correct
        )
        return 1.0 - math.exp(stays_equal) if num_scored else 0.0

    # ---- On or off ----

    def start_rollout(self) -> None:
        """Learn from the last rollout, and switch policies on or off by what is known now."""
        self._count_skipped()  # those of draws ahead
        if self._num_prompts:
            self.acceptance.update(self._num_accepted, self._num_prompts)
        self._num_prompts, self._num_accepted, self._num_skipped_counted = 0, 0.0, 0
        rate, deviation = self.acceptance.rate, self.acceptance.deviation
        is_surely_low = rate + self.NUM_DEVIATIONS * deviation < self.ON_BELOW
        is_surely_high = rate - self.NUM_DEVIATIONS * deviation > self.OFF_ABOVE
        for policy in self._switched:
            saving = policy.expected_saving(self._num_generations)
            if policy.is_on and (is_surely_high or saving < self.MIN_SAVING_TO_STAY):
                policy.is_on = False
                self._messages.append(f"{self._describe_acceptance()}: {policy.describe_off()} from here on.")
            elif not policy.is_on and is_surely_low and saving >= self.MIN_SAVING:
                policy.is_on = True
                does = policy.describe_on(self._num_generations)
                self._messages.append(
                    f"{self._describe_acceptance()}: {does} from here on, which is expected to take {saving:.1f} "
                    "times fewer completions."
                )

    def _describe_acceptance(self) -> str:
        return f"{self.acceptance.rate:.0%} of groups are accepted"

    def leave_out(self, policy: SelectionPolicy) -> None:
        """Note that the run continues without a policy."""
        self._switched = [one for one in self._switched if one is not policy]
        self._all_policies = [one for one in self._all_policies if one is not policy]

    def take_messages(self) -> list[str]:
        messages, self._messages = self._messages, []
        return messages

    def metrics(self) -> dict[str, float]:
        return {f"{policy.name}_is_on": float(policy.is_on) for policy in self._switched}

    def state_dict(self) -> dict[str, Any]:
        self._count_skipped()
        return {
            "acceptance": self.acceptance.state_dict(),
            "num_prompts": self._num_prompts,
            "num_accepted": self._num_accepted,
            "is_on": {policy.name: policy.is_on for policy in self._switched},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.acceptance.load_state_dict(state["acceptance"])
        self._num_prompts, self._num_accepted = state["num_prompts"], state["num_accepted"]
        self._num_skipped_counted = 0
        for policy in self._switched:
            policy.is_on = state["is_on"].get(policy.name, False)

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The acceptance rate of groups, and the number of prompts to draw in a round. Uses only integers and floats."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from .policies import Decisions, SelectionPolicy


# The lowest acceptance rate for which a round is sized. Below it, more rounds are sampled instead of larger ones.
MIN_RATE = 1 / 32


def rounded_down(product: float) -> int:
    """Return a product rounded down, as if it were exact: 1.15 * 100 is slightly below 115 in floating point."""
    return int(product + 1e-6)


@dataclass(eq=False)
class AcceptanceRate:
    """
    Running estimate of the share of groups that are accepted: a line fitted over the updates by least squares. The
    size of a round follows from it.
    """

    DECAY = 0.95  # factor on the weight of earlier groups at each update
    DRIFT = 0.01  # prior standard deviation of the change in the acceptance rate from one update to the next
    # The assumed cost of one more round, in accepted groups: this share of a batch, but at least the fixed number that
    # follows, since even a round of few prompts takes as long as its longest completion.
    # At an acceptance rate of 1/3 (`benchmarks/sampling_policies.py`), a batch of 512 takes 1.15 rounds and 1.045
    # times the minimal number of groups, and a batch of 16 takes 1.18 rounds. With half the cost they take 1.50 and
    # 1.47 rounds. With twice the cost they sample 2% and 10% more groups.
    ROUND_COST = 0.16
    MIN_ROUND_COST = 12
    # The share if surplus groups are carried over to the next rollout. It is larger then, because surplus is not lost
    # and only becomes staler. At acceptance rates from 0.1 to 0.55, batches of 32 and 512 take 1.11 and 1.03 rounds
    # (1.35 and 1.15 with ROUND_COST), and 19% and 8% of the groups that train are one rollout stale (12% and 4% with
    # ROUND_COST). For a batch of 16 the cost is MIN_ROUND_COST. With twice that cost its accuracy was the same, with
    # 26% of the groups stale. With four times that cost its accuracy was one point lower, with 31% stale.
    CARRY_ROUND_COST = 0.64
    # The share, and the fixed number, if rollouts are sampled one ahead. A further round is more expensive then: the
    # training waits for it, and the next rollout is requested only after it. At acceptance rates from 0.33 to 0.55, a
    # batch of 512 takes a second round in 0.3% of rollouts (in 2.4% if the rate itself changes by 0.01 from round to
    # round), and carries 10% of its groups. A batch of 16 takes one in 1.3% and carries 40%.
    STALLING_ROUND_COST = 2.56
    MIN_STALLING_ROUND_COST = 48
    # If groups beyond the batch would be too stale to train, the expected number of accepted groups stays below the
    # wanted number by this many standard deviations. With 1.5, a batch of 32 has no room for 0.2% to 2% of the
    # accepted groups, at acceptance rates from 0.6 to 0.1. With 1.0 there is no room for 1% to 4% of them, and with
    # 0.5 for 3% to 6%.
    SURPLUS_MARGIN = 1.5

    # Weighted sums over sampled groups. The age of a group counts in updates and is negative: -1 is the latest update.
    num_groups: float = 0.0
    num_accepted: float = 0.0
    _sum_age: float = 0.0
    _sum_age_squared: float = 0.0
    _sum_age_accepted: float = 0.0

    @property
    def rate(self) -> float:
        """Expected acceptance rate of the next groups, strictly between 0 and 1. It is 0.5 before the first update."""
        return self._fit()[0]

    @property
    def deviation(self) -> float:
        """Standard deviation of the estimated rate."""
        return math.sqrt(self._fit()[1])

    def _fit(self) -> tuple[float, float]:
        """Return the value of the fitted line at age 0, and its variance, without the noise of the next groups."""
        # Two further groups, one of them accepted, represent the uniform prior.
        num_groups, num_accepted = self.num_groups + 2, self.num_accepted + 1
        mean = num_accepted / num_groups
        sum_age_squared = self._sum_age_squared + mean * (1 - mean) / self.DRIFT**2
        determinant = num_groups * sum_age_squared - self._sum_age**2
        rate = (num_accepted * sum_age_squared - self._sum_age_accepted * self._sum_age) / determinant
        rate = min(max(rate, 0.5 / num_groups), 1 - 0.5 / num_groups)
        return rate, rate * (1 - rate) * sum_age_squared / determinant

    def update(self, num_accepted: float, num_groups: float) -> None:
        """
        Learn from groups that were decided on together. A round makes several updates if it decides on groups with
        different numbers of completions.
        """
        rate, variance = self._fit()
        surprise = (num_accepted - num_groups * rate) ** 2
        expected = num_groups * rate * (1 - rate) + num_groups**2 * variance
        # If they are more than three standard deviations off, all earlier groups lose weight at once.
        fade = self.DECAY
        if surprise > 9 * expected:
            fade *= 9 * expected / surprise
        # The age of all earlier groups changes by -1.
        self._sum_age_squared += self.num_groups - 2 * self._sum_age
        self._sum_age -= self.num_groups
        self._sum_age_accepted -= self.num_accepted
        self._sum_age_squared = fade * self._sum_age_squared + num_groups
        self._sum_age = fade * self._sum_age - num_groups
        self._sum_age_accepted = fade * self._sum_age_accepted - num_accepted
        self.num_groups = fade * self.num_groups + num_groups
        self.num_accepted = fade * self.num_accepted + num_accepted

    def state_dict(self) -> dict[str, float]:
        """Return what a resumed run needs, as values that JSON can hold."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, float]) -> None:
        for name in asdict(self):
            setattr(self, name, state[name])

    def most_prompts_without_surplus(self, num_wanted: float) -> int:
        """Return the maximum number of prompts such that more than `num_wanted` are hardly ever accepted."""
        if num_wanted <= 0:
            return 0
        rate, variance = self._fit()
        # The largest n with n r + z sqrt(n r (1 - r) + n^2 v) <= w, for the rate r, its variance v, the margin z and
        # the wanted number w. Squaring the equality gives a n^2 - 2 b n + w^2 = 0. This is its smaller root, in a form
        # without cancellation.
        a = rate**2 - self.SURPLUS_MARGIN**2 * variance
        b = num_wanted * rate + self.SURPLUS_MARGIN**2 * rate * (1 - rate) / 2
        smaller_root = num_wanted**2 / (b + math.sqrt(max(b**2 - a * num_wanted**2, 0.0)))
        return int(min(smaller_root, self._most_prompts(num_wanted)))

    def _most_prompts(self, num_wanted: float) -> float:
        """
        Return the maximum number of prompts to draw for `num_wanted` accepted groups, whatever the estimated rate is.

        It is low as long as few groups were accepted, since the rate is uncertain then, and equals `num_wanted` if
        none was: the rounds of a run that accepts nothing must not keep growing.
        """
        return num_wanted * min(1 / MIN_RATE, 1 + self.num_accepted)

    def round_size(self, deficit: int, target: int, *, carries: bool = False, extra_round_stalls: bool = False) -> int:
        """
        Return the number of prompts that the next round requests.

        Args:
            deficit (`int`):
                Number of groups to be accepted.
            target (`int`):
                Number of groups in a rollout batch.
            carries (`bool`, *optional*, defaults to `False`):
                Whether surplus groups train in the next rollout.
            extra_round_stalls (`bool`, *optional*, defaults to `False`):
                Whether rollouts are sampled one ahead, which makes a further round more expensive.
        """
        # The smallest n that covers the deficit d with a margin of z standard deviations. These contain the binomial
        # noise of the round and the variance v of the rate r: n r - z sqrt(n r (1 - r) + n^2 v) >= d. The margin is
        # such that one more accepted group costs as much as it saves (the newsvendor rule): c phi(z) = s, with the
        # normal density phi, the standard deviation s at the expected size, and the cost c of one more round. If the
        # rate is so uncertain that no margin is worth its cost, z is 0.
        rate, variance = self._fit()
        most = self._most_prompts(deficit)
        deviation = math.sqrt(deficit * (1 - rate) + (deficit / rate) ** 2 * variance)
        if extra_round_stalls:
            round_cost = max(self.STALLING_ROUND_COST * target, self.MIN_STALLING_ROUND_COST)
        else:
            round_cost = max((self.CARRY_ROUND_COST if carries else self.ROUND_COST) * target, self.MIN_ROUND_COST)
        z_squared = max(-2 * math.log(math.sqrt(2 * math.pi) * deviation / round_cost), 0.0)
        # Squaring the equality gives a n^2 - 2 b n + d^2 = 0, and n is its larger root.
        a = rate**2 - z_squared * variance
        b = deficit * rate + z_squared * rate * (1 - rate) / 2
        if a <= 0:
            return math.ceil(most)
        larger_root = (b + math.sqrt(max(b**2 - a * deficit**2, 0.0))) / a
        return math.ceil(min(most, larger_root))


class AcceptanceRecord(SelectionPolicy):
    """Records which shares of the groups were accepted, and were predicted to be."""

    def __init__(self) -> None:
        self.acceptance = AcceptanceRate()
        self.predicted = AcceptanceRate()  # the acceptance rate that was predicted for the same groups
        # Number of completed partial groups that were accepted, and number of all completed ones, both with decaying
        # weights. Not all are accepted, since an accuracy band may drop some.
        self._completed = [1.0, 1.0]

    @property
    def partial_acceptance_rate(self) -> float:
        """Share of the completed partial groups that is accepted."""
        return self._completed[0] / self._completed[1]

    def observe(self, decisions: Decisions) -> None:
        num_accepted, num_groups = float(decisions.reasons.count(None)), len(decisions.reasons)
        if decisions.num_known:  # these groups were already counted when their first completions were decided on
            fade = AcceptanceRate.DECAY
            self._completed = [fade * self._completed[0] + num_accepted, fade * self._completed[1] + num_groups]
            return
        if not decisions.are_whole:
            num_accepted *= self.partial_acceptance_rate
        self.acceptance.update(num_accepted, num_groups)
        if decisions.num_predicted is not None:
            self.predicted.update(decisions.num_predicted, num_groups)

    def state_dict(self) -> dict[str, Any]:
        return {
            "acceptance": self.acceptance.state_dict(),
            "predicted": self.predicted.state_dict(),
            "completed": self._completed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.acceptance.load_state_dict(state["acceptance"])
        self.predicted.load_state_dict(state["predicted"])
        self._completed = list(state["completed"])

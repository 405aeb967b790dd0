# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The acceptance rate, and the number of prompts in a round that follows from it. Only integers and floats."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from .policies import Decided, SelectionPolicy


# The lowest acceptance rate a round is sized for: below it, more rounds rather than ever larger ones.
MIN_RATE = 1 / 32


@dataclass(eq=False)
class AcceptanceRate:
    """Running estimate of the share of groups that are accepted, fitted with its trend by least squares."""

    DECAY = 0.95  # of the evidence, with every round
    DRIFT = 0.01  # prior standard deviation of the change of the rate a round
    # The assumed cost of one more round, in trained groups: a share of the batch, but never less than a small
    # batch, since a round of a few prompts waits for its longest completion too. If one group in three is accepted
    # (`benchmarks/sampling_policies.py`) a batch of 512 takes 1.15 rounds and 1.045 times the least possible, one of
    # 16 takes 1.18 rounds; with half the price 1.50 and 1.47, with twice of it 2 % and 10 % more groups.
    ROUND_COST = 0.16
    MIN_ROUND_COST = 12
    # The same share where surplus is not lost but carried: age is all it costs. At acceptance rates from 0.1 to 0.55
    # batches of 32 and 512 take 1.11 and 1.03 rounds (1.35 and 1.15 with ROUND_COST), and 0.19 and 0.08 of what trains
    # is one rollout old (0.12 and 0.04). Accuracy was a point lower only where 0.31 of a batch of 16 was.
    CARRY_ROUND_COST = 0.64
    # The same for a round that stops both the engine and the training. At acceptance rates from 0.33 to 0.55 a batch
    # of 512 takes a second round in 0.3 % of rollouts and carries a tenth of it (2.4 % where the rate itself strays by
    # 0.01 from round to round), a batch of 16 one in 1.3 %, and carries 0.4 of it.
    RARE_ROUND_COST = 2.56
    MIN_RARE_ROUND_COST = 48
    # Standard deviations to spare where what is too many would be too old to train. With these 0.2 to 2 % of the
    # groups that are accepted overflow, at acceptance rates from 0.6 to 0.1 and a batch of 32; with 0.5 of them 3 to
    # 6 %, with 1.0 of them 1 to 4 %.
    SPARE = 1.5

    # Faded sums over the groups sampled, each at its age in rounds, which is negative: -1 is the latest round.
    num_groups: float = 0.0
    num_accepted: float = 0.0
    _sum_age: float = 0.0
    _sum_age_squared: float = 0.0
    _sum_age_accepted: float = 0.0

    @property
    def rate(self) -> float:
        """The expected share of the next round, strictly between 0 and 1; 0.5 before any evidence."""
        return self._fit()[0]

    @property
    def deviation(self) -> float:
        """Standard deviation of the estimate."""
        return math.sqrt(self._fit()[1])

    def _fit(self) -> tuple[float, float]:
        """Return the fitted line at age 0, and its variance without the noise of the round to come."""
        # Two groups, one of them accepted, stand for the uniform prior.
        num_groups, num_accepted = self.num_groups + 2, self.num_accepted + 1
        mean = num_accepted / num_groups
        sum_age_squared = self._sum_age_squared + mean * (1 - mean) / self.DRIFT**2
        determinant = num_groups * sum_age_squared - self._sum_age**2
        rate = (num_accepted * sum_age_squared - self._sum_age_accepted * self._sum_age) / determinant
        rate = min(max(rate, 0.5 / num_groups), 1 - 0.5 / num_groups)
        return rate, rate * (1 - rate) * sum_age_squared / determinant

    def update(self, num_accepted: float, num_groups: float) -> None:
        rate, variance = self._fit()
        surprise = (num_accepted - num_groups * rate) ** 2
        expected = num_groups * rate * (1 - rate) + num_groups**2 * variance
        # A round more than three standard deviations away fades all that came before it at once.
        fade = self.DECAY
        if surprise > 9 * expected:
            fade *= 9 * expected / surprise
        # All earlier rounds grow one round older.
        self._sum_age_squared += self.num_groups - 2 * self._sum_age
        self._sum_age -= self.num_groups
        self._sum_age_accepted -= self.num_accepted
        self._sum_age_squared = fade * self._sum_age_squared + num_groups
        self._sum_age = fade * self._sum_age - num_groups
        self._sum_age_accepted = fade * self._sum_age_accepted - num_accepted
        self.num_groups = fade * self.num_groups + num_groups
        self.num_accepted = fade * self.num_accepted + num_accepted

    def state_dict(self) -> dict[str, float]:
        """Return what a resumed run needs, JSON-able."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, float]) -> None:
        for name in asdict(self):
            setattr(self, name, state[name])

    def most_prompts_for(self, num_wanted: float) -> int:
        """Return the most prompts to request so that more than `num_wanted` are hardly ever accepted."""
        if num_wanted <= 0:
            return 0
        rate, variance = self._fit()
        # The largest n with n r + z sqrt(n r (1 - r) + n^2 v) <= w. At equality, without the square root, it is the
        # smaller root of a n^2 - 2 b n + w^2 = 0, written so that nothing cancels.
        a = rate**2 - self.SPARE**2 * variance
        b = num_wanted * rate + self.SPARE**2 * rate * (1 - rate) / 2
        smaller_root = num_wanted**2 / (b + math.sqrt(max(b**2 - a * num_wanted**2, 0.0)))
        return int(min(smaller_root, self._most_prompts(num_wanted)))

    def _most_prompts(self, num_wanted: float) -> float:
        """
        Return the largest number of prompts of a round. An estimate from few accepted groups may not enlarge a round
        much, and none at all if no group was ever accepted: a run that accepts nothing must not generate more and
        more.
        """
        return num_wanted * min(1 / MIN_RATE, 1 + self.num_accepted)

    def round_size(self, deficit: int, target: int, *, carries: bool = False, is_rare: bool = False) -> int:
        """Prompts that the next round asks for; one more round `is_rare` where it stops engine and training."""
        # The smallest n that covers the deficit d with a margin of z standard deviations, the binomial noise of the
        # round and what is not known of the rate r: n r - z sqrt(n r (1 - r) + n^2 v) >= d. The margin ends where one
        # more prompt costs what it saves (the newsvendor's rule): c phi(z) = s, with the normal density phi, the
        # standard deviation s at the expected size, and the cost c of one more round. A rate so uncertain that no
        # margin is worth its price gets none.
        rate, variance = self._fit()
        most = self._most_prompts(deficit)
        deviation = math.sqrt(deficit * (1 - rate) + (deficit / rate) ** 2 * variance)
        if is_rare:
            round_cost = max(self.RARE_ROUND_COST * target, self.MIN_RARE_ROUND_COST)
        else:
            round_cost = max((self.CARRY_ROUND_COST if carries else self.ROUND_COST) * target, self.MIN_ROUND_COST)
        z_squared = max(-2 * math.log(math.sqrt(2 * math.pi) * deviation / round_cost), 0.0)
        # At equality, without the square root, it is the larger root of a n^2 - 2 b n + d^2 = 0.
        a = rate**2 - z_squared * variance
        b = deficit * rate + z_squared * rate * (1 - rate) / 2
        if a <= 0:
            return math.ceil(most)
        larger_root = (b + math.sqrt(max(b**2 - a * deficit**2, 0.0))) / a
        return math.ceil(min(most, larger_root))


class RoundSize(SelectionPolicy):
    """Chooses the number of groups to request in a round for those that are missing."""

    def __init__(self) -> None:
        self.acceptance = AcceptanceRate()
        self.predicted = AcceptanceRate()  # what was predicted of the same groups
        # Groups that were made whole after their first completions differed: accepted and all, fading. An accuracy
        # band drops some of them.
        self._completed = [1.0, 1.0]

    @property
    def share_completed(self) -> float:
        """The share of partial groups that is accepted in the end."""
        return self._completed[0] / self._completed[1]

    def observe(self, decided: Decided) -> None:
        num_accepted, num_groups = float(decided.reasons.count(None)), len(decided.reasons)
        if decided.num_known:  # these groups were counted when their first completions differed
            fade = AcceptanceRate.DECAY
            self._completed = [fade * self._completed[0] + num_accepted, fade * self._completed[1] + num_groups]
            return
        if not decided.are_whole:
            num_accepted *= self.share_completed
        self.acceptance.update(num_accepted, num_groups)
        if decided.predicted_acceptance is not None:
            self.predicted.update(decided.predicted_acceptance, num_groups)

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

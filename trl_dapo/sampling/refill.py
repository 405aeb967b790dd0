# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""How many prompts the next round asks for, when the rollout batch is full, and when to give up. Integers only."""

import math
from collections import Counter


# The lowest acceptance rate a round is sized for: below it, more rounds rather than ever larger ones.
MIN_RATE = 1 / 32

# What one more round is taken to cost, in groups that train: a share of the batch, but never less than a small batch,
# since a round of a few prompts waits for its longest completion too.
ROUND_COST = 0.16
MIN_ROUND_COST = 12


class AcceptanceRate:
    """
    Running estimate of the share of groups that are accepted, shared by all rollouts of a run.

    The rate and its trend are fitted by least squares to the rounds so far and read off at the next round, so that a
    rate that rises or falls as the policy learns is not met one step late. Evidence fades with every round; a round
    that contradicts the estimate by more than three standard deviations fades all that came before it at once.

    Args:
        decay (`float`, *optional*, defaults to `0.95`):
            Factor on the evidence of all earlier rounds with every new one.
        drift (`float`, *optional*, defaults to `0.01`):
            Prior standard deviation of the change of the rate per round.

    Example:

    ```python
    >>> acceptance = AcceptanceRate()
    >>> acceptance.rate
    0.5
    >>> acceptance.update(num_accepted=30, num_judged=98)
    >>> round(acceptance.rate, 2)
    0.31
    ```
    """

    _STATE = ("num_judged", "num_accepted", "_sum_age", "_sum_age_squared", "_sum_age_accepted")

    def __init__(self, decay: float = 0.95, drift: float = 0.01):
        if not 0.0 < decay <= 1.0:
            raise ValueError(f"`decay` must be above 0 and at most 1, got {decay}.")
        if not drift > 0.0:
            raise ValueError(f"`drift` must be above 0, got {drift}.")
        self.decay = decay
        self.drift = drift
        # Faded sums over the groups judged, each at its age in rounds, which is negative: -1 is the latest round.
        self.num_judged = 0.0
        self.num_accepted = 0.0
        self._sum_age = 0.0
        self._sum_age_squared = 0.0
        self._sum_age_accepted = 0.0

    @property
    def rate(self) -> float:
        """Expected acceptance rate of the next round, strictly between 0 and 1; 0.5 before any evidence."""
        return self._fit()[0]

    @property
    def variance(self) -> float:
        """Variance of [`~AcceptanceRate.rate`]: what is not known of it, not the noise of the round to come."""
        return self._fit()[1]

    def _fit(self):
        """Value at age 0 of the fitted line, and its variance."""
        # Two groups, one of them accepted, stand for the uniform prior.
        num_judged, num_accepted = self.num_judged + 2, self.num_accepted + 1
        mean = num_accepted / num_judged
        sum_age_squared = self._sum_age_squared + mean * (1 - mean) / self.drift**2
        determinant = num_judged * sum_age_squared - self._sum_age**2
        rate = (num_accepted * sum_age_squared - self._sum_age_accepted * self._sum_age) / determinant
        rate = min(max(rate, 0.5 / num_judged), 1 - 0.5 / num_judged)
        return rate, rate * (1 - rate) * sum_age_squared / determinant

    def update(self, num_accepted: int, num_judged: int):
        """
        Learns from one round.

        Args:
            num_accepted (`int`): Groups of the round that were accepted.
            num_judged (`int`): Groups of the round.
        """
        if not 0 <= num_accepted <= num_judged:
            raise ValueError(f"Cannot accept {num_accepted} of {num_judged} groups.")
        rate, variance = self._fit()
        surprise = (num_accepted - num_judged * rate) ** 2
        expected = num_judged * rate * (1 - rate) + num_judged**2 * variance
        fade = self.decay * (min(1.0, 9 * expected / surprise) if surprise > 0 else 1.0)
        # All earlier rounds grow one round older.
        self._sum_age_squared += self.num_judged - 2 * self._sum_age
        self._sum_age -= self.num_judged
        self._sum_age_accepted -= self.num_accepted
        self._sum_age_squared = fade * self._sum_age_squared + num_judged
        self._sum_age = fade * self._sum_age - num_judged
        self._sum_age_accepted = fade * self._sum_age_accepted - num_accepted
        self.num_judged = fade * self.num_judged + num_judged
        self.num_accepted = fade * self.num_accepted + num_accepted

    def state_dict(self) -> dict[str, float]:
        """What a resumed run needs, JSON-able."""
        return {name: getattr(self, name) for name in self._STATE}

    def load_state_dict(self, state: dict[str, float]):
        """Continues from what [`~AcceptanceRate.state_dict`] returned."""
        for name in self._STATE:
            setattr(self, name, state[name])


class Refill:
    """
    State machine of one rollout batch: rounds of groups are judged until `target` groups train. Knows nothing of
    models, processes or tensors; a group is its index among all generated groups, in prompt order.

    Args:
        target (`int`):
            Groups that train.
        acceptance ([`AcceptanceRate`]):
            Running estimate, updated by every round offered.
        max_rounds (`int`, *optional*, defaults to `10`):
            Rounds after which to give up; zero or less means never.
        max_round_size (`int`, *optional*):
            Prompts one round may ask for. `None` sets no cap. Rounded down to `multiple_of`, but never below it.
        multiple_of (`int`, *optional*, defaults to `1`):
            A round is a multiple of this many prompts.
        batch_multiplier (`float`, *optional*):
            Fixes every round to `int(batch_multiplier * target)` prompts. `None` sizes rounds by the acceptance rate.
        num_carried (`int`, *optional*, defaults to `0`):
            Surplus groups of the rollout before that train in this one and need not be generated.

    Example:

    ```python
    >>> refill = Refill(target=2, acceptance=AcceptanceRate())
    >>> refill.next_round_size()
    2
    >>> refill.offer([None, "all_wrong"])
    >>> refill.full, refill.taken, refill.dropped
    (False, [0], Counter({'all_wrong': 1}))
    ```
    """

    def __init__(
        self,
        *,
        target: int,
        acceptance: AcceptanceRate,
        max_rounds: int = 10,
        max_round_size: int | None = None,
        multiple_of: int = 1,
        batch_multiplier: float | None = None,
        num_carried: int = 0,
    ):
        if target < 1:
            raise ValueError(f"`target` must be at least 1 group, got {target}.")
        if multiple_of < 1:
            raise ValueError(f"`multiple_of` must be at least 1, got {multiple_of}.")
        if max_round_size is not None and max_round_size < 1:
            raise ValueError(
                f"`max_round_size` must be at least 1 prompt, or `None` for no cap; got {max_round_size}."
            )
        if batch_multiplier is not None and int(batch_multiplier * target) < 1:
            raise ValueError(
                f"`batch_multiplier` must ask for at least one prompt, got {batch_multiplier} x {target} prompts."
            )
        if num_carried < 0:
            raise ValueError(f"`num_carried` must be zero or more, got {num_carried}.")
        self.target = target
        self.acceptance = acceptance
        self.max_rounds = max_rounds
        self.max_round_size = max_round_size
        self.multiple_of = multiple_of
        self.batch_multiplier = batch_multiplier
        self.num_carried = num_carried
        self.num_rounds = 0
        self.num_generated = 0
        self.dropped = Counter()
        self._accepted = []

    @property
    def taken(self) -> list[int]:
        """Indices of the generated groups that train (`list[int]`): the first accepted ones in prompt order."""
        return self._accepted[: self._num_wanted]

    @property
    def surplus(self) -> list[int]:
        """Indices of the accepted groups that do not train in this rollout batch (`list[int]`)."""
        return self._accepted[self._num_wanted :]

    @property
    def shortfall(self) -> int:
        """Groups still missing (`int`)."""
        return max(self._num_wanted - len(self._accepted), 0)

    @property
    def full(self) -> bool:
        """Whether `target` groups train."""
        return self.shortfall == 0

    @property
    def exhausted(self) -> bool:
        """Whether the rounds ran out before the batch was full."""
        return not self.full and 0 < self.max_rounds <= self.num_rounds

    @property
    def done(self) -> bool:
        """Whether there is nothing left to generate: full or exhausted."""
        return self.full or self.exhausted

    @property
    def _num_wanted(self) -> int:
        """Groups that this rollout must generate itself."""
        return max(self.target - self.num_carried, 0)

    def next_round_size(self) -> int:
        """
        Prompts the next round asks for.

        The smallest n that covers the deficit d with a margin of z standard deviations,
        `n r - z sqrt(n r (1 - r) + n^2 v) >= d`, where r is the acceptance rate and v its variance: the two terms
        under the root are the binomial noise of the round and the uncertainty of the rate. The margin ends where one
        more prompt costs what it saves (the newsvendor's rule): `c phi(z) = s`, where phi is the normal density, s the
        standard deviation at the expected size, and c the cost of one more round. A rate so uncertain that no margin
        is worth its price gets none.

        Returns:
            `int`: a multiple of `multiple_of`, at least one of them.
        """
        self._refuse_if_done()
        if self.batch_multiplier is not None:
            size = int(self.batch_multiplier * self.target)
        else:
            size = self._size_by_rate()
        size = -(-size // self.multiple_of) * self.multiple_of
        if self.max_round_size is not None:
            size = min(size, self.max_round_size // self.multiple_of * self.multiple_of)
        return max(size, self.multiple_of)

    def _refuse_if_done(self):
        if self.done:
            state = "is full" if self.full else "is not full"
            raise RuntimeError(
                f"The rollout batch has had its {self.num_rounds} rounds and {state}: it takes no more."
            )

    def _size_by_rate(self):
        """The deficit over the acceptance rate, plus the margin."""
        deficit, rate, variance = self.shortfall, self.acceptance.rate, self.acceptance.variance
        # What rests on few accepted groups may not enlarge a round much, and where none was ever accepted not at all:
        # a run that accepts nothing must not generate ever more.
        most = deficit * min(1 / MIN_RATE, 1 + self.acceptance.num_accepted)
        expected = deficit / rate
        deviation = math.sqrt(deficit * (1 - rate) + expected**2 * variance)
        round_cost = max(ROUND_COST * self.target, MIN_ROUND_COST)
        z_squared = max(-2 * math.log(math.sqrt(2 * math.pi) * deviation / round_cost), 0.0)
        # The larger root of a n^2 - 2 b n + d^2 = 0.
        a = rate**2 - z_squared * variance
        b = deficit * rate + z_squared * rate * (1 - rate) / 2
        if a <= 0:
            return math.ceil(most)
        return math.ceil(min(most, (b + math.sqrt(max(b**2 - a * deficit**2, 0.0))) / a))

    def offer(self, verdicts: list[str | None]):
        """
        Takes in one complete round.

        Args:
            verdicts (`list[str | None]`):
                One verdict per generated group in prompt order: `None` accepts it, else the reason why not.
        """
        self._refuse_if_done()
        if not verdicts:
            raise ValueError("A round must hold at least one group, got none.")
        accepted = [self.num_generated + i for i, reason in enumerate(verdicts) if reason is None]
        self.dropped.update(reason for reason in verdicts if reason is not None)
        self.acceptance.update(len(accepted), len(verdicts))
        self._accepted += accepted
        self.num_generated += len(verdicts)
        self.num_rounds += 1

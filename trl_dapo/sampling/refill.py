# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""How many prompts the next round asks for, when the rollout batch is full, and when to give up. Integers only."""

import math
from collections import Counter


# The lowest acceptance rate a round is sized for: below it, more rounds rather than ever larger ones.
MIN_RATE = 1 / 32


class AcceptanceRate:
    """
    Running estimate of the share of groups that are accepted, shared by all rollouts of a run.

    A Beta posterior with a uniform prior whose evidence fades by `decay` with every round, because the policy moves.

    Args:
        decay (`float`, *optional*, defaults to `0.9`):
            Factor on the evidence of all earlier rounds when a new one is judged.
    """

    def __init__(self, decay=0.9):
        if not 0.0 < decay <= 1.0:
            raise ValueError(f"`decay` must be above 0 and at most 1, got {decay}.")
        self.decay = decay
        self.num_accepted = 0.0
        self.num_judged = 0.0

    @property
    def rate(self):
        """Posterior mean (`float`, strictly between 0 and 1); 0.5 before any evidence."""
        return (self.num_accepted + 1) / (self.num_judged + 2)

    @property
    def variance(self):
        """Posterior variance of the rate (`float`)."""
        return self.rate * (1 - self.rate) / (self.num_judged + 3)

    def update(self, num_accepted, num_judged):
        """
        Learns from one round.

        Args:
            num_accepted (`int`): Groups of the round that were accepted.
            num_judged (`int`): Groups of the round.
        """
        if not 0 <= num_accepted <= num_judged:
            raise ValueError(f"Cannot accept {num_accepted} of {num_judged} groups.")
        self.num_accepted = self.decay * self.num_accepted + num_accepted
        self.num_judged = self.decay * self.num_judged + num_judged

    def state_dict(self):
        """What a resumed run needs, JSON-able (`dict`)."""
        return {"num_accepted": self.num_accepted, "num_judged": self.num_judged}

    def load_state_dict(self, state):
        """Continues from what [`~AcceptanceRate.state_dict`] returned."""
        self.num_accepted = state["num_accepted"]
        self.num_judged = state["num_judged"]


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
        target,
        acceptance,
        max_rounds=10,
        max_round_size=None,
        multiple_of=1,
        batch_multiplier=None,
        num_carried=0,
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
    def taken(self):
        """Indices of the generated groups that train (`list[int]`): the first accepted ones in prompt order."""
        return self._accepted[: self._num_wanted]

    @property
    def surplus(self):
        """Indices of the accepted groups that do not train in this rollout batch (`list[int]`)."""
        return self._accepted[self._num_wanted :]

    @property
    def shortfall(self):
        """Groups still missing (`int`)."""
        return max(self._num_wanted - len(self._accepted), 0)

    @property
    def full(self):
        """Whether `target` groups train."""
        return self.shortfall == 0

    @property
    def exhausted(self):
        """Whether the rounds ran out before the batch was full."""
        return not self.full and 0 < self.max_rounds <= self.num_rounds

    @property
    def done(self):
        """Whether there is nothing left to generate: full or exhausted."""
        return self.full or self.exhausted

    @property
    def _num_wanted(self):
        """Groups that this rollout must generate itself."""
        return max(self.target - self.num_carried, 0)

    def next_round_size(self):
        """
        Prompts the next round asks for.

        The smallest n that covers the deficit d one standard deviation below its expectation, which fills the batch
        about five times in six: `n r - sqrt(n r (1 - r) + n^2 v) >= d`, with r the acceptance rate and v its variance
        (binomial noise of the round, uncertainty of the rate).

        Returns:
            `int`: a multiple of `multiple_of`, at least one of them.
        """
        if self.done:
            raise RuntimeError(f"The rollout batch takes no further round: {self.num_rounds} made, {self.shortfall=}.")
        if self.batch_multiplier is not None:
            size = int(self.batch_multiplier * self.target)
        else:
            size = self._size_by_rate()
        size = -(-size // self.multiple_of) * self.multiple_of
        if self.max_round_size is not None:
            size = min(size, self.max_round_size // self.multiple_of * self.multiple_of)
        return max(size, self.multiple_of)

    def _size_by_rate(self):
        """The deficit over the acceptance rate, plus the margin."""
        deficit, rate, variance = self.shortfall, self.acceptance.rate, self.acceptance.variance
        # An estimate that rests on few accepted groups may enlarge the round only so much: none at all, not at all.
        most = deficit * min(1 / MIN_RATE, 1 + self.acceptance.num_accepted)
        # The larger root of n^2 (r^2 - v) - n (2 d r + r (1 - r)) + d^2 = 0.
        square = rate**2 - variance
        if square <= 0:
            return math.ceil(most)
        half = deficit * rate + rate * (1 - rate) / 2
        return math.ceil(min(most, (half + math.sqrt(half**2 - square * deficit**2)) / square))

    def offer(self, verdicts):
        """
        Takes in one complete round.

        Args:
            verdicts (`list[str | None]`):
                One verdict per generated group in prompt order: `None` accepts it, a string is the reason it is dropped.
        """
        if self.done:
            raise RuntimeError(f"The rollout batch takes no further round: {self.num_rounds} made, {self.shortfall=}.")
        if not verdicts:
            raise ValueError("A round must hold at least one group, got none.")
        accepted = [self.num_generated + i for i, reason in enumerate(verdicts) if reason is None]
        self.dropped.update(reason for reason in verdicts if reason is not None)
        self.acceptance.update(len(accepted), len(verdicts))
        self._accepted += accepted
        self.num_generated += len(verdicts)
        self.num_rounds += 1

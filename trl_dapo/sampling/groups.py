# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Whether a group trains, and if not, why it is dropped.

Suffixes name the dimensions: B completions, F reward functions, N groups, G completions of one prompt (B = N * G).
"""

from dataclasses import dataclass

import torch


REASONS = ("all_correct", "all_wrong", "constant", "outside_band", "unscored", "masked")


def task_reward(rewards_BF: torch.Tensor, weights_F: torch.Tensor, is_task_F: torch.Tensor) -> torch.Tensor:
    """
    The task reward, which decides whether a group trains: the weighted sum over the task's reward functions only.

    Length penalties and format bonuses are left out, so an all-wrong group cannot pass on them. A function that gave
    no reward (NaN) adds nothing; a completion that none of the task's functions scored stays NaN.

    Args:
        rewards_BF (`torch.Tensor` of shape `(B, F)`):
            Reward of each completion under each reward function; NaN where the function returned `None`.
        weights_F (`torch.Tensor` of shape `(F,)`):
            Weight of each reward function.
        is_task_F (`torch.Tensor` of shape `(F,)`, boolean):
            Whether the reward function is one of the task's. At least one must be.

    Returns:
        `torch.Tensor` of shape `(B,)`, float64: the task reward, NaN where none of the task's functions gave one.

    Example:

    ```python
    >>> task_reward(torch.tensor([[1.0, -0.4]]), torch.tensor([2.0, 1.0]), torch.tensor([True, False]))
    tensor([2.], dtype=torch.float64)
    ```
    """
    is_task_F = is_task_F.to(rewards_BF.device)
    if not is_task_F.any():
        raise ValueError(f"No reward function decides which groups train, got is_task_F={is_task_F.tolist()}.")
    rewards_BF = rewards_BF[:, is_task_F].double()
    weighted_BF = rewards_BF * weights_F.to(rewards_BF)[is_task_F]
    return weighted_BF.nansum(dim=1).masked_fill(rewards_BF.isnan().all(dim=1), torch.nan)


@dataclass(frozen=True, kw_only=True)
class Criterion:
    """
    What a group must show to train.

    Args:
        min_accuracy (`float`, *optional*, defaults to `0.0`):
            A group trains only if its accuracy is above this. `0.0` asks for no accuracy at all, only for spread.
        max_accuracy (`float`, *optional*, defaults to `1.0`):
            A group trains only if its accuracy is below this. `1.0` sets no bound.
        accuracy_threshold (`float`, *optional*, defaults to `0.0`):
            A completion is correct if its task reward is above this, by more than `tolerance`.
        full_score (`float`, *optional*, defaults to `1.0`):
            Task reward of a completion that cannot do better. Only tells `all_correct` from `constant`.
        tolerance (`float`, *optional*, defaults to `1e-6`):
            Rewards that differ by no more than this are equal.
    """

    min_accuracy: float = 0.0
    max_accuracy: float = 1.0
    accuracy_threshold: float = 0.0
    full_score: float = 1.0
    tolerance: float = 1e-6

    def __post_init__(self) -> None:
        if not 0.0 <= self.min_accuracy < self.max_accuracy <= 1.0:
            raise ValueError(
                "The accuracy band must satisfy 0 <= `min_accuracy` < `max_accuracy` <= 1, got "
                f"({self.min_accuracy}, {self.max_accuracy})."
            )
        if not 0.0 <= self.tolerance < float("inf"):
            raise ValueError(f"`tolerance` must be zero or more and finite, got {self.tolerance}.")


def is_correct(rewards: torch.Tensor, criterion: Criterion) -> torch.Tensor:
    """
    Which completions are correct: those whose task reward lies above the threshold by more than the tolerance.

    Args:
        rewards (`torch.Tensor` of any shape):
            Task rewards; a NaN is not correct.
        criterion ([`Criterion`]):
            Holds the threshold and the tolerance.

    Returns:
        `torch.Tensor` of the same shape, boolean.
    """
    return rewards > criterion.accuracy_threshold + criterion.tolerance


def drop_reasons(rewards_NG: torch.Tensor, masked_NG: torch.Tensor | None, criterion: Criterion) -> list[str | None]:
    """
    For each group: `None` if it trains, else the reason (one of `REASONS`) why it teaches nothing.

    The spread is `max - min`, never a standard deviation: the mean of equal floats need not equal them, so that of a
    constant group can be above zero. A group is accepted or dropped whole.

    Args:
        rewards_NG (`torch.Tensor` of shape `(N, G)`):
            Task rewards, one row per group. A NaN counts for nothing.
        masked_NG (`torch.Tensor` of shape `(N, G)`, boolean, or `None`):
            Completions that the loss will mask (overlong filtering). They do not decide: a group whose only spread
            lies in them is dropped, since completions that are left out would push all others the same way.
        criterion ([`Criterion`]):
            What a group must show.

    Returns:
        `list[str | None]` of length N.

    Example:

    ```python
    >>> drop_reasons(torch.tensor([[1.0, 0.0], [0.0, 0.0]]), None, Criterion())
    [None, 'all_wrong']
    ```
    """
    if rewards_NG.dim() != 2 or rewards_NG.shape[1] < 2:
        raise ValueError(f"A group needs at least 2 completions to compare, got rewards of shape {rewards_NG.shape}.")
    rewards_NG = rewards_NG.double()
    scored_NG = ~rewards_NG.isnan()
    live_NG = scored_NG if masked_NG is None else scored_NG & ~masked_NG.to(rewards_NG.device)

    spread_N, accepted_N = _would_pass(rewards_NG, live_NG, criterion)
    _, accepted_unmasked_N = _would_pass(rewards_NG, scored_NG, criterion)
    top_N = rewards_NG.masked_fill(~live_NG, -torch.inf).amax(dim=1)

    # Later lines overrule earlier ones.
    code_N = torch.full_like(top_N, REASONS.index("constant"), dtype=torch.long)
    code_N[top_N >= criterion.full_score - criterion.tolerance] = REASONS.index("all_correct")
    code_N[top_N <= criterion.accuracy_threshold + criterion.tolerance] = REASONS.index("all_wrong")
    code_N[~spread_N & accepted_unmasked_N] = REASONS.index("masked")
    code_N[spread_N & ~accepted_N] = REASONS.index("outside_band")
    code_N[live_NG.sum(dim=1) < 2] = REASONS.index("masked")
    code_N[accepted_N] = -1
    # An infinite reward has no mean to compare with: its advantages would be NaN.
    code_N[(scored_NG.sum(dim=1) < 2) | rewards_NG.isinf().any(dim=1)] = REASONS.index("unscored")
    return [None if code < 0 else REASONS[code] for code in code_N.tolist()]


def _would_pass(
    rewards_NG: torch.Tensor, counts_NG: torch.Tensor, criterion: Criterion
) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether each group has spread over the rows that count, and whether it passes on them."""
    top_N = rewards_NG.masked_fill(~counts_NG, -torch.inf).amax(dim=1)
    bottom_N = rewards_NG.masked_fill(~counts_NG, torch.inf).amin(dim=1)
    spread_N = top_N - bottom_N > criterion.tolerance
    correct_NG = counts_NG & is_correct(rewards_NG, criterion)
    accuracy_N = correct_NG.sum(dim=1).double() / counts_NG.sum(dim=1)
    passes_N = spread_N.clone()
    # An end that was not tightened does not bind, or graded rewards that differ above the threshold would be lost.
    if criterion.min_accuracy > 0.0:
        passes_N &= accuracy_N > criterion.min_accuracy
    if criterion.max_accuracy < 1.0:
        passes_N &= accuracy_N < criterion.max_accuracy
    return spread_N, passes_N


def count_correct(
    rewards_NG: torch.Tensor, masked_NG: torch.Tensor | None, reasons: list[str | None], criterion: Criterion
) -> list[tuple[int, int]]:
    """
    Correct and scored completions of each group, as the decision on the group takes them.

    An accepted group has correct completions and wrong ones. Where graded rewards lie all on one side of the
    threshold, those in the upper half of the group's range are its correct ones.

    Args:
        rewards_NG, masked_NG, criterion:
            As in [`drop_reasons`].
        reasons (`list[str | None]` of length N):
            What [`drop_reasons`] returned for them.

    Returns:
        `list[tuple[int, int]]` of length N: correct and scored completions.

    Example:

    ```python
    >>> rewards = torch.tensor([[1.0, 0.0, 0.0], [0.9, 0.5, 0.6]])
    >>> count_correct(rewards, None, [None, None], Criterion())
    [(1, 3), (1, 3)]
    ```
    """
    rewards_NG = rewards_NG.double()
    live_NG = ~rewards_NG.isnan()
    if masked_NG is not None:
        live_NG &= ~masked_NG.to(rewards_NG.device)
    correct_NG = live_NG & is_correct(rewards_NG, criterion)
    scored_N, correct_N = live_NG.sum(dim=1), correct_NG.sum(dim=1)
    accepted_N = torch.tensor([reason is None for reason in reasons], dtype=torch.bool, device=rewards_NG.device)
    top_N = rewards_NG.masked_fill(~live_NG, -torch.inf).amax(dim=1)
    bottom_N = rewards_NG.masked_fill(~live_NG, torch.inf).amin(dim=1)
    upper_N = (live_NG & (rewards_NG > ((top_N + bottom_N) / 2)[:, None])).sum(dim=1)
    one_sided_N = accepted_N & ((correct_N == 0) | (correct_N == scored_N))
    return list(zip(torch.where(one_sided_N, upper_N, correct_N).tolist(), scored_N.tolist(), strict=True))

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Whether a group trains, and if not, why it is dropped."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .equal_rewards import TOLERANCE, margin


REASONS = ("all_correct", "all_wrong", "constant", "outside_band", "unscored", "masked")


def task_reward(rewards_BF: Tensor, weights_F: Tensor, is_task_F: Tensor) -> Tensor:
    """The weighted sum over the task's reward functions, in float64; NaN where none of them gave a reward."""
    is_task_F = is_task_F.to(rewards_BF.device)
    rewards_BF = rewards_BF[:, is_task_F].double()
    weighted_BF = rewards_BF * weights_F.to(rewards_BF)[is_task_F]
    return weighted_BF.nansum(dim=1).masked_fill(rewards_BF.isnan().all(dim=1), torch.nan)


def reward_sizes(rewards_BF: Tensor, weights_F: Tensor, is_task_F: Tensor) -> Tensor:
    """The size of each [`task_reward`]: the sum of the absolute values that it adds."""
    return task_reward(rewards_BF.abs(), weights_F.abs(), is_task_F).nan_to_num(nan=0.0)


@dataclass(frozen=True, kw_only=True)
class Criterion:
    """The condition under which a group trains."""

    min_accuracy: float = 0.0  # accuracy must be above this; 0.0 asks for no accuracy at all, only for spread
    max_accuracy: float = 1.0  # and below this; 1.0 sets no bound
    accuracy_threshold: float = 0.0  # a correct completion's task reward is above this, by more than the margin
    full_score: float = 1.0  # task reward of a completion that cannot do better: tells `all_correct` from `constant`
    tolerance: float = TOLERANCE  # of `equal_rewards.margin`


def is_correct(rewards: Tensor, criterion: Criterion, sizes: Tensor | None = None) -> Tensor:
    """Whether task rewards, of any shape, lie above the threshold by more than the margin; NaN does not."""
    sizes = rewards.abs() if sizes is None else sizes
    return rewards.double() > criterion.accuracy_threshold + margin(sizes.double(), criterion.tolerance)


def has_spread(rewards_NG: Tensor, counts_NG: Tensor, sizes_NG: Tensor, tolerance: float = TOLERANCE) -> Tensor:
    """Whether the rewards of each group that count differ by more than the margin."""
    # Never a standard deviation: the mean of equal floats need not equal them, so that of a constant group can be > 0.
    top_N = rewards_NG.masked_fill(~counts_NG, -torch.inf).amax(dim=1)
    bottom_N = rewards_NG.masked_fill(~counts_NG, torch.inf).amin(dim=1)
    return top_N - bottom_N > margin(sizes_NG.masked_fill(~counts_NG, 0.0).amax(dim=1), tolerance)


def drop_reasons(
    rewards_NG: Tensor,
    masked_NG: Tensor | None,
    criterion: Criterion,
    sizes_NG: Tensor | None = None,
    full_scores_NG: Tensor | None = None,
) -> list[str | None]:
    """
    Return for each group `None` if it is accepted, otherwise the one of `REASONS` why it is dropped. NaN rewards are
    ignored.

    `sizes_NG` are those of [`reward_sizes`]; by default each reward is one value. `full_scores_NG` are what each
    completion could get at best, by default the criterion's `full_score`.
    """
    rewards_NG = rewards_NG.double()
    sizes_NG = rewards_NG.abs() if sizes_NG is None else sizes_NG.double()
    full_NG = torch.full_like(rewards_NG, criterion.full_score) if full_scores_NG is None else full_scores_NG.double()
    scored_NG = ~rewards_NG.isnan()
    # What the loss masks does not decide: where the only spread lies there, all others would be pushed the same way.
    live_NG = scored_NG if masked_NG is None else scored_NG & ~masked_NG.to(rewards_NG.device)

    correct_NG = is_correct(rewards_NG, criterion, sizes_NG)
    spread_N, accepted_N = _would_pass(rewards_NG, correct_NG, live_NG, sizes_NG, criterion)
    _, accepted_unmasked_N = _would_pass(rewards_NG, correct_NG, scored_NG, sizes_NG, criterion)
    is_full_NG = rewards_NG >= full_NG - margin(sizes_NG, criterion.tolerance)

    # Later lines overrule earlier ones.
    code_N = torch.full_like(spread_N, REASONS.index("constant"), dtype=torch.long)
    code_N[(is_full_NG | ~live_NG).all(dim=1)] = REASONS.index("all_correct")
    code_N[~(correct_NG & live_NG).any(dim=1)] = REASONS.index("all_wrong")
    code_N[~spread_N & accepted_unmasked_N] = REASONS.index("masked")
    code_N[spread_N & ~accepted_N] = REASONS.index("outside_band")
    code_N[live_NG.sum(dim=1) < 2] = REASONS.index("masked")
    code_N[accepted_N] = -1
    # An infinite reward has no mean to compare with: its advantages would be NaN.
    code_N[(scored_NG.sum(dim=1) < 2) | rewards_NG.isinf().any(dim=1)] = REASONS.index("unscored")
    return [None if code < 0 else REASONS[code] for code in code_N.tolist()]


def _would_pass(
    rewards_NG: Tensor, correct_NG: Tensor, counts_NG: Tensor, sizes_NG: Tensor, criterion: Criterion
) -> tuple[Tensor, Tensor]:
    """Whether each group has spread over the rows that count, and whether it passes on them."""
    spread_N = has_spread(rewards_NG, counts_NG, sizes_NG, criterion.tolerance)
    accuracy_N = (counts_NG & correct_NG).sum(dim=1).double() / counts_NG.sum(dim=1)
    passes_N = spread_N.clone()
    # An end that was not tightened does not bind, or graded rewards that differ above the threshold would be lost.
    if criterion.min_accuracy > 0.0:
        passes_N &= accuracy_N > criterion.min_accuracy
    if criterion.max_accuracy < 1.0:
        passes_N &= accuracy_N < criterion.max_accuracy
    return spread_N, passes_N


def count_correct(
    rewards_NG: Tensor,
    masked_NG: Tensor | None,
    reasons: list[str | None],
    criterion: Criterion,
    num_known: int = 0,
    sizes_NG: Tensor | None = None,
) -> list[tuple[int, int]]:
    """Correct and scored completions of each group, as the decision on it takes them, without the first known."""
    rewards_NG = rewards_NG.double()
    live_NG = ~rewards_NG.isnan()
    if masked_NG is not None:
        live_NG &= ~masked_NG.to(rewards_NG.device)
    correct_NG = live_NG & is_correct(rewards_NG, criterion, sizes_NG)
    correct_N = correct_NG.sum(dim=1)
    accepted_N = torch.tensor([reason is None for reason in reasons], dtype=torch.bool, device=rewards_NG.device)
    top_N = rewards_NG.masked_fill(~live_NG, -torch.inf).amax(dim=1)
    bottom_N = rewards_NG.masked_fill(~live_NG, torch.inf).amin(dim=1)
    upper_NG = live_NG & (rewards_NG > ((top_N + bottom_N) / 2)[:, None])
    # If all graded rewards of an accepted group are on one side of the threshold, the upper half counts as correct.
    one_sided_N = accepted_N & ((correct_N == 0) | (correct_N == live_NG.sum(dim=1)))
    new_NG = torch.where(one_sided_N[:, None], upper_NG, correct_NG)[:, num_known:]
    return list(zip(new_NG.sum(dim=1).tolist(), live_NG[:, num_known:].sum(dim=1).tolist(), strict=True))

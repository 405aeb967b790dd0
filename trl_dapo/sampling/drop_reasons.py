# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The built-in rule for whether a group is accepted, and the reason for which it is dropped otherwise."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .equal_rewards import TOLERANCE, margin


REASONS = ("all_correct", "all_wrong", "constant", "outside_band", "unscored", "masked")


def task_reward(rewards_BF: Tensor, weights_F: Tensor, is_task_F: Tensor) -> Tensor:
    """Return the weighted sum of the task's reward functions, in float64. NaN for completions that none scored."""
    is_task_F = is_task_F.to(rewards_BF.device)
    rewards_BF = rewards_BF[:, is_task_F].double()
    weighted_BF = rewards_BF * weights_F.to(rewards_BF)[is_task_F]
    return weighted_BF.nansum(dim=1).masked_fill(rewards_BF.isnan().all(dim=1), torch.nan)


def reward_sizes(rewards_BF: Tensor, weights_F: Tensor, is_task_F: Tensor) -> Tensor:
    """Return the size of each [`task_reward`]: the sum of the absolute values of its terms."""
    return task_reward(rewards_BF.abs(), weights_F.abs(), is_task_F).nan_to_num(nan=0.0)


@dataclass(frozen=True, kw_only=True)
class Criterion:
    """Conditions for a group to be accepted."""

    min_accuracy: float = 0.0  # the group's accuracy must be above this; 0.0 sets no lower bound
    max_accuracy: float = 1.0  # and below this; 1.0 sets no upper bound
    accuracy_threshold: float = 0.0  # a completion is correct if its task reward is above this by more than the margin
    full_score: float = 1.0  # the best possible task reward; it distinguishes `all_correct` from `constant`
    tolerance: float = TOLERANCE  # see `equal_rewards.margin`


def is_correct(rewards: Tensor, criterion: Criterion, sizes: Tensor | None = None) -> Tensor:
    """Return whether each task reward is above the threshold by more than the margin. NaN is not. Any shape."""
    sizes = rewards.abs() if sizes is None else sizes
    return rewards.double() > criterion.accuracy_threshold + margin(sizes.double(), criterion.tolerance)


def has_spread(rewards_NG: Tensor, counted_NG: Tensor, sizes_NG: Tensor, tolerance: float = TOLERANCE) -> Tensor:
    """Return for each group whether those of its rewards that count differ by more than the margin."""
    # A standard deviation would not do: the mean of equal floats may differ from them by rounding, so that the
    # standard deviation of equal rewards can be above 0.
    top_N = rewards_NG.masked_fill(~counted_NG, -torch.inf).amax(dim=1)
    bottom_N = rewards_NG.masked_fill(~counted_NG, torch.inf).amin(dim=1)
    return top_N - bottom_N > margin(sizes_NG.masked_fill(~counted_NG, 0.0).amax(dim=1), tolerance)


def drop_reasons(
    rewards_NG: Tensor,
    masked_NG: Tensor | None,
    criterion: Criterion,
    sizes_NG: Tensor | None = None,
    full_scores_NG: Tensor | None = None,
) -> list[str | None]:
    """
    Return for each group `None` if it is accepted, otherwise the one of `REASONS` for which it is dropped.

    Args:
        rewards_NG (`torch.Tensor`):
            Task rewards of N groups with G completions each. NaN marks a completion without a score.
        masked_NG (`torch.Tensor`, *optional*):
            Completions that the loss masks.
        criterion ([`Criterion`]):
            Conditions for a group to be accepted.
        sizes_NG (`torch.Tensor`, *optional*):
            Sizes of the rewards from [`reward_sizes`]. By default each reward counts as a single term.
        full_scores_NG (`torch.Tensor`, *optional*):
            Best possible reward of each completion. By default the criterion's `full_score`.
    """
    rewards_NG = rewards_NG.double()
    sizes_NG = rewards_NG.abs() if sizes_NG is None else sizes_NG.double()
    full_NG = torch.full_like(rewards_NG, criterion.full_score) if full_scores_NG is None else full_scores_NG.double()
    scored_NG = ~rewards_NG.isnan()
    # Masked completions do not count. If only they differ from the rest, all completions in the loss have the same
    # reward, and the loss would push all of them in the same direction.
    counted_NG = scored_NG if masked_NG is None else scored_NG & ~masked_NG.to(rewards_NG.device)

    correct_NG = is_correct(rewards_NG, criterion, sizes_NG)
    spread_N, accepted_N = _would_be_accepted(rewards_NG, correct_NG, counted_NG, sizes_NG, criterion)
    _, accepted_with_masked_N = _would_be_accepted(rewards_NG, correct_NG, scored_NG, sizes_NG, criterion)
    is_full_NG = rewards_NG >= full_NG - margin(sizes_NG, criterion.tolerance)

    # If several reasons apply, the last assignment wins. The order of priority is, from the highest to the lowest:
    # unscored (also for a group that would be accepted), accepted, masked (fewer than two completions are left),
    # outside_band, masked (it would be accepted with the masked completions), all_wrong, all_correct, constant.
    code_N = torch.full_like(spread_N, REASONS.index("constant"), dtype=torch.long)
    code_N[(is_full_NG | ~counted_NG).all(dim=1)] = REASONS.index("all_correct")
    code_N[~(correct_NG & counted_NG).any(dim=1)] = REASONS.index("all_wrong")
    code_N[~spread_N & accepted_with_masked_N] = REASONS.index("masked")
    code_N[spread_N & ~accepted_N] = REASONS.index("outside_band")
    code_N[counted_NG.sum(dim=1) < 2] = REASONS.index("masked")
    code_N[accepted_N] = -1
    # A group with an infinite reward has no finite mean, so its advantages would be NaN.
    code_N[(scored_NG.sum(dim=1) < 2) | rewards_NG.isinf().any(dim=1)] = REASONS.index("unscored")
    return [None if code < 0 else REASONS[code] for code in code_N.tolist()]


def _would_be_accepted(
    rewards_NG: Tensor, correct_NG: Tensor, counted_NG: Tensor, sizes_NG: Tensor, criterion: Criterion
) -> tuple[Tensor, Tensor]:
    """Return for each group whether the rewards that count differ, and whether it would be accepted based on them."""
    spread_N = has_spread(rewards_NG, counted_NG, sizes_NG, criterion.tolerance)
    accuracy_N = (counted_NG & correct_NG).sum(dim=1).double() / counted_NG.sum(dim=1)
    accepted_N = spread_N.clone()
    # The default bounds of 0 and 1 are not applied. Otherwise a group of graded rewards that are all above the
    # threshold, and whose accuracy is therefore 1, would be dropped although its rewards differ.
    if criterion.min_accuracy > 0.0:
        accepted_N &= accuracy_N > criterion.min_accuracy
    if criterion.max_accuracy < 1.0:
        accepted_N &= accuracy_N < criterion.max_accuracy
    return spread_N, accepted_N


def count_correct(
    rewards_NG: Tensor,
    masked_NG: Tensor | None,
    reasons: list[str | None],
    criterion: Criterion,
    num_known: int = 0,
    sizes_NG: Tensor | None = None,
) -> list[tuple[int, int]]:
    """
    Return for each group how many completions are correct, and how many count: those that are scored and not masked.

    The first `num_known` completions of each group, which were counted before, are left out.
    """
    rewards_NG = rewards_NG.double()
    counted_NG = ~rewards_NG.isnan()
    if masked_NG is not None:
        counted_NG &= ~masked_NG.to(rewards_NG.device)
    correct_NG = counted_NG & is_correct(rewards_NG, criterion, sizes_NG)
    correct_N = correct_NG.sum(dim=1)
    accepted_N = torch.tensor([reason is None for reason in reasons], dtype=torch.bool, device=rewards_NG.device)
    top_N = rewards_NG.masked_fill(~counted_NG, -torch.inf).amax(dim=1)
    bottom_N = rewards_NG.masked_fill(~counted_NG, torch.inf).amin(dim=1)
    upper_NG = counted_NG & (rewards_NG > ((top_N + bottom_N) / 2)[:, None])
    # If all graded rewards of an accepted group are on the same side of the threshold, those above the middle between
    # the lowest and the highest count as correct.
    one_sided_N = accepted_N & ((correct_N == 0) | (correct_N == counted_NG.sum(dim=1)))
    new_NG = torch.where(one_sided_N[:, None], upper_NG, correct_NG)[:, num_known:]
    return list(zip(new_NG.sum(dim=1).tolist(), counted_NG[:, num_known:].sum(dim=1).tolist(), strict=True))

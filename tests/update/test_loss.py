# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The DAPO objective, by hand."""

import math

import pytest
import torch

from trl_dapo.update.loss import clipped_loss, clipped_tokens, kl_to_reference, probability_ratio, token_mean
from trl_dapo.update.old_logps import fill_old_logps


pytestmark = pytest.mark.fast


CLIP = {"epsilon_low": 0.2, "epsilon_high": 0.28}


def loss_and_slope(ratio, advantage, **options):
    ratio = torch.tensor([[ratio]], requires_grad=True)
    loss = clipped_loss(ratio, torch.tensor([[advantage]]), **CLIP, **options)
    (slope,) = torch.autograd.grad(loss.sum(), ratio)
    return loss.item(), slope.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.1, 2.0, -2.2, -2.0),  # inside: -r A
        (1.5, 2.0, -2.56, 0.0),  # likely enough: 1.28 x 2, no pull
        (0.5, 2.0, -1.0, -2.0),  # a good token become unlikely is pulled back
        (0.9, -2.0, 1.8, 2.0),  # inside
        (0.5, -2.0, 1.6, 0.0),  # unlikely enough: 0.8 x 2, no push
        (1.5, -2.0, 3.0, 2.0),  # a bad token become likely is pushed down
        (1.29, 0.0, 0.0, 0.0),  # nothing to learn
    ],
)
def test_the_clip_is_wider_above_than_below(ratio, advantage, loss, slope):
    assert loss_and_slope(ratio, advantage) == (pytest.approx(loss), pytest.approx(slope, abs=1e-7))


@pytest.mark.parametrize("c", [1.28, 1.5, 3.0, 10.0])
def test_delta_is_the_dual_clip_of_other_frameworks_to_the_last_bit(c):
    """Their `clip_ratio_c`: if the advantage is negative, the greater of the surrogate and `c` times it."""
    generator = torch.Generator().manual_seed(0)
    ratio = torch.exp(2 * torch.randn(50_000, 1, generator=generator)).requires_grad_()
    advantages = torch.randn(50_000, 1, generator=generator)
    surrogate = torch.min(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)
    expected = -torch.where(advantages < 0, torch.max(surrogate, c * advantages), surrogate)
    found = clipped_loss(ratio, advantages, **CLIP, delta=c)
    assert torch.equal(found, expected)
    assert torch.equal(*(torch.autograd.grad(loss.sum(), ratio)[0] for loss in (found, expected)))


def test_a_delta_below_the_upper_clip_takes_its_place_for_good_tokens_alone():
    # TRL's definition: r is clamped at 1.1, clip(r) is not. Good: min(1.1, 1.2) x 2. Bad: max(1.1, 1.2) x 2, then
    # max(1.1, 1.28) x 2.
    assert loss_and_slope(1.2, 2.0, delta=1.1) == (pytest.approx(-2.2), 0.0)
    assert loss_and_slope(1.2, -2.0, delta=1.1) == (pytest.approx(2.4), pytest.approx(2.0))
    assert loss_and_slope(50.0, -2.0, delta=1.1) == (pytest.approx(2.56), 0.0)


def test_a_ratio_beyond_the_range_of_floats_gives_no_nan():
    for advantage, delta in [(1.0, None), (-1.0, 10.0)]:
        log_ratio = torch.tensor([[200.0]], requires_grad=True)
        ratio = probability_ratio(log_ratio, torch.ones(1, 1))
        loss = clipped_loss(ratio, torch.tensor([[advantage]]), **CLIP, delta=delta)
        (slope,) = torch.autograd.grad(loss.sum(), log_ratio)
        assert math.isfinite(loss.item())
        assert slope.item() == 0.0


def test_clipped_tokens_are_those_without_a_slope():
    ratio = torch.tensor([[0.5, 0.5, 0.5, 1.5, 1.5, 20.0, 20.0, 10.0]])
    advantages = torch.tensor([[1.0, 0.0, -1.0, 1.0, -1.0, 1.0, -1.0, -1.0]])
    low, high, dual = clipped_tokens(ratio, advantages, **CLIP, delta=10.0)
    assert [where.nonzero()[:, 1].tolist() for where in (low, high, dual)] == [[2], [3, 5], [6]]
    assert not clipped_tokens(ratio, advantages, **CLIP)[2].any()
    # A bad token with a ratio of 1.2 still has a gradient, see above. One with 1.5 has none.
    low, high, dual = clipped_tokens(
        torch.tensor([[1.2, 1.5, 1.5]]), torch.tensor([[-1.0, -1.0, 1.0]]), **CLIP, delta=1.1
    )
    assert (low.tolist(), high.tolist()) == ([[False] * 3], [[False] * 3])
    assert dual.tolist() == [[False, True, False]]


def test_every_token_counts_the_same():
    values = torch.tensor([[1.0, 9.0, 9.0], [4.0, 4.0, 4.0]])
    mask = torch.tensor([[1, 0, 0], [1, 1, 1]])
    assert token_mean(values, mask, num_tokens=4) == 13 / 4  # not (1 + 4) / 2
    # One value for each of two completions of 3 and 1 tokens: (2 x 3 + 6 x 1) / 4.
    assert token_mean(torch.tensor([[2.0], [6.0]]), torch.tensor([[1, 1, 1], [1, 0, 0]]), 4) == 3.0


def test_micro_batches_and_ranks_add_up_to_the_mean_over_the_step():
    values, mask = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), torch.ones(3, 2)
    assert token_mean(values, mask, num_tokens=6) == 3.5
    by_row = [token_mean(values[i : i + 1], mask[i : i + 1], num_tokens=6) for i in range(3)]
    assert sum(by_row).item() == pytest.approx(3.5)
    # Two ranks, whose gradients will be averaged: rank 0 has one row, rank 1 has two.
    ranks = [token_mean(values[rows], mask[rows], 6, num_ranks=2) for rows in (slice(1), slice(1, 3))]
    assert (ranks[0] + ranks[1]).item() / 2 == pytest.approx(3.5)


def test_a_step_without_a_token_has_loss_zero_and_gradient_zero():
    values = torch.tensor([[1.0, 2.0]], requires_grad=True)
    loss = token_mean(values, torch.zeros(1, 2), torch.tensor(0))
    loss.backward()
    assert loss.item() == 0.0
    assert values.grad.tolist() == [[0.0, 0.0]]


def test_the_sequence_ratio_is_the_geometric_mean_over_the_tokens_that_count():
    log_ratio = torch.tensor([[math.log(4.0), math.log(1.0), 7.0]])
    ratio = probability_ratio(log_ratio, torch.tensor([[1, 1, 0]]), "sequence")
    assert ratio.tolist() == [[pytest.approx(2.0)]]  # sqrt(4 x 1)


def test_a_completion_without_a_token_has_sequence_ratio_one():
    assert probability_ratio(torch.tensor([[5.0]]), torch.zeros(1, 1), "sequence").tolist() == [[1.0]]


def test_an_unknown_ratio_level_is_refused():
    with pytest.raises(ValueError, match="got 'word'"):
        probability_ratio(torch.zeros(1, 1), torch.ones(1, 1), "word")


def test_the_kl_estimate_is_zero_at_equality_and_positive_on_both_sides():
    logps, ref = torch.tensor([[-1.0, -1.0, -1.0]]), torch.tensor([[-1.0, -2.0, 0.0]])
    assert kl_to_reference(logps, ref).tolist() == [
        [0.0, pytest.approx(math.exp(-1)), pytest.approx(math.e - 2)]  # e^d - d - 1 for d = 0, -1, 1
    ]


def test_the_kl_estimate_of_a_token_far_from_the_reference_is_finite():
    # A masked token may have any value, and 0 times infinity is not 0.
    logps = torch.tensor([[-200.0]], requires_grad=True)
    kl = kl_to_reference(logps, torch.tensor([[0.0]]))
    assert kl.item() == pytest.approx(math.exp(20) - 201)
    (slope,) = torch.autograd.grad((kl * 0).sum(), logps)
    assert slope.item() == 0


def test_unknown_old_logps_are_the_current_ones_without_gradient():
    logps = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    old = fill_old_logps(torch.tensor([[float("nan"), -3.0]]), logps)
    assert old.tolist() == [[-1.0, -3.0]]
    assert not old.requires_grad
    assert fill_old_logps(None, logps).tolist() == [[-1.0, -2.0]]
    (slope,) = torch.autograd.grad(probability_ratio(logps - old, torch.ones(1, 2)).sum(), logps)
    assert slope.tolist() == [[1.0, pytest.approx(math.e)]]

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""What becomes of a rollout's groups, by hand."""

import pytest

from trl_dapo.sampling.refill import Batch, Group, missing, refill


pytestmark = pytest.mark.fast


A, B, C, D, E = (Group(0, i) for i in range(5))
X, Y = Group(1, 0), Group(1, 1)


def test_the_first_accepted_groups_in_prompt_order_train_and_the_others_are_left():
    assert refill("filter", [], [B, C, X], [A, D], 2, 0.3) == Batch(train=[B, C], fill=[], carry=[X])


def test_carried_groups_train_first():
    assert refill("filter", [A, B], [X, Y], [], 3, 0.3) == Batch(train=[A, B, X], fill=[], carry=[Y])


def test_more_carried_groups_than_the_batch_holds_are_carried_on_in_their_order():
    assert refill("filter", [A, B, C], [], [], 2, 0.3) == Batch(train=[A, B], fill=[], carry=[C])


@pytest.mark.parametrize("mode", ["filter", "mask"])
def test_dropped_groups_fill_a_short_batch_in_their_order_and_again_where_they_are_too_few(mode):
    assert refill(mode, [], [B], [A, C], 4, 0.3) == Batch(train=[B], fill=[A, C, A], carry=[])


def test_copies_of_what_trains_fill_a_short_batch_where_nothing_was_dropped():
    assert refill("filter", [A], [], [], 3, 0.3) == Batch(train=[A], fill=[A, A], carry=[])


def test_replace_trains_on_copies_in_turn_once_enough_groups_are_accepted():
    assert refill("replace", [], [B, X], [A, C], 5, 0.4) == Batch(train=[B, X, B, X, B], fill=[], carry=[])


def test_replace_with_too_few_groups_is_a_short_batch():
    assert refill("replace", [], [B], [A, C], 4, 0.3) == Batch(train=[B], fill=[A, C, A], carry=[])


@pytest.mark.parametrize(
    ("mode", "num_accepted", "expected"),
    [
        ("filter", 0, 10),
        ("filter", 7, 3),
        ("filter", 12, 0),
        ("mask", 7, 3),
        ("replace", 2, 8),  # 0.3 x 10 = 3 would be enough
        ("replace", 3, 0),
    ],
)
def test_what_is_missing_of_ten(mode, num_accepted, expected):
    assert missing(mode, num_accepted, 10, 0.3) == expected


def test_55_groups_of_100_are_a_share_of_055():
    assert 0.55 * 100 > 55
    assert missing("replace", 55, 100, 0.55) == 0

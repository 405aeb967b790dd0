# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""What becomes of a rollout's groups, by hand."""

import pytest

from trl_dapo.sampling.refill import Batch, Group, missing, refill


pytestmark = pytest.mark.fast


A, B, C, D, E = (Group(0, i) for i in range(5))
X, Y = Group(1, 0), Group(1, 1)


@pytest.mark.parametrize(
    ("mode", "carried", "accepted", "dropped", "target", "expected"),
    [
        ("filter", [], [B, C, X], [A, D], 2, Batch(train=[B, C], fill=[], carry=[X])),  # the first, in prompt order
        ("filter", [A, B], [X, Y], [], 3, Batch(train=[A, B, X], fill=[], carry=[Y])),  # what was carried first
        ("filter", [A, B, C], [], [], 2, Batch(train=[A, B], fill=[], carry=[C])),
        # What was dropped fills a short batch in its order, and again where it is too few; or copies of what trains.
        ("filter", [], [B], [A, C], 4, Batch(train=[B], fill=[A, C, A], carry=[])),
        ("mask", [], [B], [A, C], 4, Batch(train=[B], fill=[A, C, A], carry=[])),
        ("replace", [], [B], [A, C], 4, Batch(train=[B], fill=[A, C, A], carry=[])),  # 0.3 x 4 would be 2
        ("filter", [A], [], [], 3, Batch(train=[A], fill=[A, A], carry=[])),
        # Copies in turn train once enough groups are accepted.
        ("replace", [], [B, X], [A, C], 5, Batch(train=[B, X, B, X, B], fill=[], carry=[])),
    ],
)
def test_what_becomes_of_groups(mode, carried, accepted, dropped, target, expected):
    assert refill(mode, carried, accepted, dropped, target, 0.3) == expected


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

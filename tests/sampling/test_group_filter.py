# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""A user's rule for which groups train."""

import math
import re

import pytest
import torch

from trl_dapo.sampling.group_filter import apply_group_filter


pytestmark = pytest.mark.fast


def test_a_users_rule_sees_each_groups_rewards_by_name_and_its_rows():
    seen = []

    def rule(rewards, rows):
        seen.append((rewards, [row["completion"] for row in rows]))
        return "easy" if sum(rewards["accuracy"]) > 1 else None

    rewards = torch.tensor([[1.0, 0.5], [1.0, math.nan], [0.0, 0.5], [1.0, 0.25]])
    rows = [{"completion": text} for text in "abcd"]
    assert apply_group_filter(rule, rewards, ["accuracy", "style"], rows, 2) == ["easy", None]
    assert seen[0][0]["accuracy"] == [1.0, 1.0]
    assert math.isnan(seen[0][0]["style"][1])
    assert seen[1] == ({"accuracy": [0.0, 1.0], "style": [0.5, 0.25]}, ["c", "d"])


def test_a_rule_may_change_the_rows_that_it_is_handed():
    rows = [{"prompt": [{"content": "2+2"}], "completion": [{"content": text}]} for text in ("4", "5")]

    def careless(rewards, rows):
        for row in rows:
            row["prompt"][0]["content"] = row["completion"][0]["content"] = "gone"

    assert apply_group_filter(careless, torch.zeros(2, 1), ["accuracy"], rows, 2) == [None]
    assert [(row["prompt"], row["completion"]) for row in rows] == [
        ([{"content": "2+2"}], [{"content": "4"}]),
        ([{"content": "2+2"}], [{"content": "5"}]),
    ]


@pytest.mark.parametrize("said", ["", False, 0, ["never right"]])
def test_what_is_no_reason_is_refused(said):
    message = f"`group_filter` returned {said!r}: it must return `None` for a group that trains, or the reason"
    with pytest.raises(TypeError, match=re.escape(message)):
        apply_group_filter(lambda rewards, rows: said, torch.zeros(2, 1), ["right"], [{}] * 2, 2)

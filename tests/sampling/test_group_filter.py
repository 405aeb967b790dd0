# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""A user's rule for which groups train."""

import pytest
import torch

from trl_dapo.sampling.group_filter import apply_group_filter


pytestmark = pytest.mark.fast


def test_a_rule_is_asked_group_by_group_and_what_it_changes_is_its_own_copy():
    asked, rows = [], [{"n": i} for i in range(4)]

    def rule(rewards, group):
        asked.append((rewards, [row.pop("n") for row in group]))
        return None if max(rewards["right"]) > 0 else "never right"

    rewards_BF = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 5.0], [0.0, 6.0]])
    assert apply_group_filter(rule, rewards_BF, ["right", "short"], rows, 2) == [None, "never right"]
    assert asked == [({"right": [1, 0], "short": [0, 0]}, [0, 1]), ({"right": [0, 0], "short": [5, 6]}, [2, 3])]
    assert rows[0] == {"n": 0}


@pytest.mark.parametrize("said", ["", False, 0, ["never right"]])
def test_what_is_no_reason_is_refused(said):
    with pytest.raises(TypeError, match="must return `None` for a group that trains, or the reason"):
        apply_group_filter(lambda rewards, rows: said, torch.zeros(2, 1), ["right"], [{}] * 2, 2)

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The log-probabilities of the policy that sampled a completion are stored before the policy changes."""

from types import SimpleNamespace

import numpy as np

from trl_dapo import DAPOTrainer
from trl_dapo.sampling.groups import GenerationRequest
from trl_dapo.sampling.queue import GroupQueue
from trl_dapo.sampling.rows import rows_from_generated


def two_rows():
    return rows_from_generated(([[1]] * 2, [[2, 3], [4]], None, ["", ""], None, {}, None, []), ["p", "p"])


def waiting(num_generations=2):
    """A queue with a group that has received two completions."""
    queue = GroupQueue(num_generations)
    group = queue.draw("p", {}, (0, 0))
    request = GenerationRequest(group, 2)
    queue.send([request])
    group.receive(request, [0, 0])
    group.rows = dict(enumerate(two_rows()))
    return queue, group


def keep_old_logps(queue, logps):
    """Compute the log-probabilities that the trainer requests. Return the number of rows."""
    asked = []

    def policy_logps(rows):
        asked.extend(rows)
        return [logps] * len(rows)

    trainer = SimpleNamespace(policy_logps=policy_logps, _tokenizer=SimpleNamespace(pad_token_id=0))
    DAPOTrainer._keep_old_logps(trainer, SimpleNamespace(queue=queue))
    return len(asked)


def test_groups_that_wait_know_what_their_own_policy_said_and_no_later_one():
    queue, group = waiting()
    assert keep_old_logps(queue, "logps") == 2
    assert [row.old_logps for row in group.rows.values()] == ["logps"] * 2
    assert keep_old_logps(queue, "another policy's") == 0
    assert [row.old_logps for row in group.rows.values()] == ["logps"] * 2


def test_a_fresh_rest_knows_what_its_policy_said_though_the_first_completions_of_its_group_are_older():
    queue, group = waiting(num_generations=4)
    keep_old_logps(queue, "an earlier policy's")
    group.receive(GenerationRequest(group, 2, weights_rollout=1), [0, 0])
    group.rows |= dict(zip([2, 3], two_rows(), strict=True))
    assert keep_old_logps(queue, "logps") == 2
    assert [group.rows[i].old_logps for i in range(4)] == ["an earlier policy's"] * 2 + ["logps"] * 2


def test_what_only_fills_a_batch_keeps_one_log_probability():
    row = two_rows()[0]
    row.old_logps = np.array([-1.0, -2.0])
    assert row.shortened().old_logps.tolist() == [-1.0]

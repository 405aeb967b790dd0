# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The batch of a rollout, and what happens to the other groups, with examples computed by hand."""

import gc
import weakref

import pytest
from datasets import Dataset

from trl_dapo.sampling.batch import fill_batch, num_missing
from trl_dapo.sampling.groups import GenerationRequest, GroupState
from trl_dapo.sampling.policies import Decisions
from trl_dapo.sampling.prompts import PromptStream
from trl_dapo.sampling.queue import GroupQueue
from trl_dapo.sampling.rounds import Completion, Round
from trl_dapo.sampling.rows import dummy_row
from trl_dapo.sampling.sampler import Sampler


pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("mode", "accepted", "dropped", "target", "train", "fill"),
    [
        ("filter", "BCX", "AD", 2, "BC", ""),  # the first, in the order in which prompts were drawn
        ("filter", "ABXY", "", 3, "ABX", ""),
        ("filter", "ABC", "", 2, "AB", ""),
        # Dropped groups fill a short batch in order, and repeatedly if there are too few; without any, copies of what
        # trains.
        ("filter", "B", "AC", 4, "B", "ACA"),
        ("mask", "B", "AC", 4, "B", "ACA"),
        ("replace", "B", "AC", 4, "B", "ACA"),  # 0.3 x 4 would be 2
        ("filter", "A", "", 3, "A", "AA"),
        # Once enough groups are accepted, copies of them train, in turn.
        ("replace", "BX", "AC", 5, "BXBXB", ""),
    ],
)
def test_which_groups_train_and_which_only_fill_the_batch(mode, accepted, dropped, target, train, fill):
    assert fill_batch(mode, list(accepted), list(dropped), target, 0.3) == (list(train), list(fill))


@pytest.mark.parametrize(
    ("carried", "accepted", "target", "train", "left"),
    [("AB", "XY", 3, "ABX", "Y"), ("ABC", "", 2, "AB", "C"), ("", "BCX", 2, "BC", "X")],
)
def test_what_was_accepted_earlier_trains_first_and_the_rest_waits(carried, accepted, target, train, left):
    queue = GroupQueue(num_generations=2)
    groups = [queue.draw(name, {}, (0, i)) for i, name in enumerate(carried + accepted)]
    queue.send([GenerationRequest(group, 2) for group in groups])
    # Decisions may be made in any order.
    for group in reversed(groups):
        queue.record_decision(group, GroupState.ACCEPTED)
    taken = queue.take_batch(target)
    assert [group.name for group in taken] == list(train)
    assert {group.state for group in taken} == {GroupState.TRAINED}
    assert [group.name for group in queue.accepted] == list(left)
    assert len(queue) == len(left)


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
    assert num_missing(mode, num_accepted, 10, 0.3) == expected


def test_55_groups_of_100_are_a_share_of_055():
    assert 0.55 * 100 > 55
    assert num_missing("replace", 55, 100, 0.55) == 0


def test_the_rows_of_what_trained_are_let_go_with_the_rollout_though_a_group_of_its_round_waits():
    """
    A rollout of the paper's size has gigabytes of rows, so nothing may be left for the garbage collector to find
    later.
    """
    stream = PromptStream(Dataset.from_dict({"prompt": list("abcd")}), seed=0)
    sampler = Sampler(stream, target=1, num_generations=2, carries=True)
    gc.disable()
    try:
        sampler.start_rollout()
        requests = [GenerationRequest(sampler.queue.draw(name, {}, (0, i)), 2) for i, name in enumerate("ab")]
        sampler.queue.send(requests)
        completions = []
        for request in requests:
            request.group.receive(request, [0, 0])
            request.group.rows = {index: dummy_row(0) for index in range(2)}
            request.group.lengths, request.group.truncated = [1, 1], [False, False]
            completions += [Completion(request.group, index) for index in range(2)]
        sampler.add(Round(requests, completions))
        sampler.record_decisions(Decisions([request.group for request in requests], [None, None], 0))
        batch = sampler.finish_rollout()
        rows = [weakref.ref(group.rows[0]) for group in (*batch.train, *batch.carried_to_next)]
        del requests, completions, request, batch
        sampler.start_rollout()
        assert [row() is None for row in rows] == [True, False]
    finally:
        gc.enable()

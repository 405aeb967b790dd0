# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
import math

import numpy as np
import pytest
import torch

from trl_dapo.ranks import local_slice
from trl_dapo.sampling.refill import Group
from trl_dapo.sampling.rounds import Round, Rows, assign_to_ranks, carried_groups, select_rewards


pytestmark = pytest.mark.fast


CPU = torch.device("cpu")


def generated(lengths, logprobs=None):
    """What TRL's `_generate` returns for completions of these lengths; row i holds the token ids i, i, ..."""
    completion_ids = [[i] * length for i, length in enumerate(lengths)]
    prompt_ids = [[100 + i] for i in range(len(lengths))]
    return prompt_ids, completion_ids, None, [f"completion {i}" for i in range(len(lengths))], logprobs, {}, None, []


def round_of(lengths, **kwargs):
    rows = Rows.from_generated(generated(lengths, **kwargs), [f"prompt {i}" for i in range(len(lengths))])
    rewards = torch.arange(float(len(lengths))).unsqueeze(1)
    return Round.of_groups(rows, rewards, ages=[1] * (len(rewards) // 2))


def test_what_was_recorded_is_replayed():
    rows = Rows.from_generated(generated([2, 3], logprobs=[[-0.5, None], [-1.0, -2.0, -3.0]]), ["a", "b"])
    prompt_ids, completion_ids, tool_mask, texts, logprobs, extra, images, tool_images = rows.as_generated()
    assert [ids.tolist() for ids in prompt_ids] == [[100], [101]]
    assert [ids.tolist() for ids in completion_ids] == [[0, 0], [1, 1, 1]]
    assert completion_ids[0].dtype == np.int64  # what TRL's padding and `gather` take
    assert texts == ["completion 0", "completion 1"]
    assert logprobs[1] == [-1.0, -2.0, -3.0]
    assert logprobs[0][0] == -0.5
    assert math.isnan(logprobs[0][1])  # a token the engine could not score
    assert (tool_mask, extra, images, tool_images) == (None, {}, None, [])


def test_images_are_found_in_the_messages_they_were_moved_into():
    messages = [{"role": "user", "content": [{"type": "image", "image": "cat.png"}, {"type": "text", "text": "?"}]}]
    assert Rows.from_generated(generated([1, 1]), [messages, "text only"]).images == [["cat.png"], None]


def test_messages_that_a_reward_function_changes_are_remembered_as_they_were():
    prompt, answer = [{"role": "user", "content": "2+2"}], [{"role": "assistant", "content": "right"}]
    rows = Rows.from_generated(([[1]], [[2]], None, [answer], None, {}, None, []), [prompt])
    prompt[0]["content"] = answer[0]["content"] = "changed"
    assert [rows.prompts[0][0]["content"], rows.completions[0][0]["content"]] == ["2+2", "right"]


def test_groups_of_several_rounds_come_in_the_order_asked_for():
    rounds, groups = [round_of([1, 1, 1, 1]), round_of([2, 2])], [Group(1, 0), Group(0, 0)]
    rows = assign_to_ranks(rounds, groups, [], 2, CPU)
    assert [len(ids) for ids in rows.completion_ids] == [2, 2, 1, 1]
    assert rows.completions == ["completion 0", "completion 1", "completion 0", "completion 1"]
    assert select_rewards(rounds, groups, 2).flatten().tolist() == [0, 1, 0, 1]


def test_rows_that_only_fill_the_batch_are_cut_to_one_token_and_the_round_keeps_its_own():
    rounds = [round_of([5, 5, 7, 7], logprobs=[[-1.0] * 5, [-1.0] * 5, [-1.0] * 7, [-1.0] * 7])]
    rows = assign_to_ranks(rounds, [Group(0, 0)], [Group(0, 1)], 2, CPU)
    assert [len(ids) for ids in rows.completion_ids] == [5, 5, 1, 1]
    assert [len(logprobs) for logprobs in rows.logprobs] == [5, 5, 1, 1]
    assert [len(ids) for ids in rounds[0].rows.completion_ids] == [5, 5, 7, 7]


def test_three_first_of_eight_fill_the_place_of_a_whole_group_and_no_more(monkeypatch):
    rows = Rows.from_generated(generated([5, 6, 7]), ["p"] * 3)
    first = Round.of_groups(rows, torch.zeros(3, 1), ages=[0])
    # Several ranks would look for the owner of a place beyond the last.
    monkeypatch.setattr(Rows, "exchange", lambda rows, places, total, device: (rows.completions, places, total))
    texts, places, total = assign_to_ranks([first], [], [Group(0, 0)], 8, CPU)
    assert [text[-1] for text in texts] == ["0", "1", "2", "0", "1", "2", "0", "1"]
    assert (places, total) == (list(range(8)), 8)


def test_a_row_whose_tools_returned_images_is_not_cut():
    round_ = round_of([5, 5])
    round_.rows.tool_images = [["plot.png"], None]
    assert [len(ids) for ids in assign_to_ranks([round_], [], [Group(0, 0)], 2, CPU).completion_ids] == [5, 1]


def test_rows_are_put_in_the_order_of_their_places():
    assert [len(ids) for ids in round_of([3, 1, 2]).rows.exchange([2, 0, 1], 3, CPU).completion_ids] == [1, 2, 3]


def test_carried_groups_survive_a_checkpoint_that_loads_only_weights(tmp_path):
    torch.save(round_of([2, 3], logprobs=[[-0.5, -0.25], [-1.0] * 3]).state_dict(), tmp_path / "state.pt")
    again = Round.from_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert [ids.tolist() for ids in again.rows.completion_ids] == [[0, 0], [1, 1, 1]]
    assert again.rows.completion_ids[0].dtype == np.int32
    assert again.rows.logprobs[0].tolist() == [-0.5, -0.25]
    assert again.rewards_BF.tolist() == [[0.0], [1.0]]
    assert again.prompts == [""]


def test_rows_that_the_ranks_cannot_share_equally_are_refused():
    assert local_slice(6, 1, 3) == slice(2, 4)
    with pytest.raises(ValueError, match="7 rows cannot be split into equal parts for 2 processes"):
        local_slice(7, 0, 2)


def test_carried_groups_are_one_rollout_older_and_know_what_the_policy_said_of_them():
    fresh = round_of([2, 2])
    fresh.ages = [0]
    carried = carried_groups([fresh], [Group(0, 0)], 2, CPU, lambda rows: ["logps"] * len(rows))
    assert (carried.ages, carried.rows.ages, carried.rows.old_logps) == ([1], [1, 1], ["logps"] * 2)
    again = carried_groups([carried], [Group(0, 0)], 2, CPU, lambda rows: ["another policy's"] * len(rows))
    assert (again.ages, again.rows.ages, again.rows.old_logps) == ([2], [2, 2], ["logps"] * 2)


def test_a_fresh_rest_knows_what_its_policy_said_though_the_first_few_of_its_group_are_older():
    completed = round_of([2, 2])
    completed.rows.old_logps, completed.rows.ages = ["an earlier policy's", None], [1, 0]
    assert completed.ages == [1]  # its oldest row's
    carried = carried_groups([completed], [Group(0, 0)], 2, CPU, lambda rows: ["logps"] * len(rows))
    assert (carried.rows.old_logps, carried.rows.ages) == (["an earlier policy's", "logps"], [2, 1])

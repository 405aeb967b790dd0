# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
import math

import numpy as np
import pytest
import torch

from trl_dapo.sampling.rollouts import (
    Round,
    deal_groups,
    deal_rows,
    local_slice,
    pack_rows,
    record_rows,
    replay_rows,
    select_groups,
)


CPU = torch.device("cpu")


def generated(lengths, logprobs=None):
    """What TRL's `_generate` returns for completions of these lengths; row i holds the token ids i, i, ..."""
    completion_ids = [[i] * length for i, length in enumerate(lengths)]
    prompt_ids = [[100 + i] for i in range(len(lengths))]
    texts = [f"completion {i}" for i in range(len(lengths))]
    return prompt_ids, completion_ids, None, texts, logprobs, {}, None, []


def round_of(lengths, **kwargs):
    rows = record_rows(generated(lengths, **kwargs), [f"prompt {i}" for i in range(len(lengths))], None)
    pack_rows(rows, [True] * len(lengths))
    rewards = torch.arange(float(len(lengths))).unsqueeze(1)
    return Round.carried(rows, rewards, num_prompts=len(lengths) // 2)


def test_what_was_recorded_is_replayed():
    made = generated([2, 3], logprobs=[[-0.5, None], [-1.0, -2.0, -3.0]])
    rows = record_rows(made, ["a", "b"], None)
    pack_rows(rows, [True, True])
    prompt_ids, completion_ids, tool_mask, texts, logprobs, extra, images, tool_images = replay_rows(rows)
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
    rows = record_rows(generated([1, 1]), [messages, "text only"], None)
    assert rows["images"] == [["cat.png"], None]


def test_groups_are_numbered_through_all_rounds_and_dealt_in_the_order_asked_for():
    rounds = [round_of([1, 1, 1, 1]), round_of([2, 2])]  # groups 0 and 1, then group 2
    rows = deal_groups(rounds, [2, 0], [], 2, CPU)
    assert [len(ids) for ids in rows["completion_ids"]] == [2, 2, 1, 1]
    assert rows["completion"] == ["completion 0", "completion 1", "completion 0", "completion 1"]
    rewards = select_groups([round_.rewards_BF for round_ in rounds], [2, 0], 2)
    assert rewards.flatten().tolist() == [0.0, 1.0, 0.0, 1.0]


def test_rows_that_only_fill_the_batch_are_cut_to_one_token_and_the_round_keeps_its_own():
    rounds = [round_of([5, 5, 7, 7], logprobs=[[-1.0] * 5, [-1.0] * 5, [-1.0] * 7, [-1.0] * 7])]
    rows = deal_groups(rounds, [0], [1], 2, CPU)
    assert [len(ids) for ids in rows["completion_ids"]] == [5, 5, 1, 1]
    assert [len(logprobs) for logprobs in rows["logprobs"]] == [5, 5, 1, 1]
    assert [len(ids) for ids in rounds[0].rows["completion_ids"]] == [5, 5, 7, 7]


def test_what_was_dropped_is_let_go_of_at_once():
    rows = record_rows(generated([5, 6], logprobs=[[-1.0] * 5, [-1.0] * 6]), ["a", "b"], None)
    pack_rows(rows, [False, True])
    assert [len(ids) for ids in rows["completion_ids"]] == [1, 6]
    assert [len(logprobs) for logprobs in rows["logprobs"]] == [1, 6]
    assert rows["completion_ids"][1].dtype == np.int32


def test_a_row_whose_tools_returned_images_is_not_cut():
    round_ = round_of([5, 5])
    round_.rows["tool_images"] = [["plot.png"], None]
    rows = deal_groups([round_], [], [0], 2, CPU)
    assert [len(ids) for ids in rows["completion_ids"]] == [5, 1]


def test_rows_are_put_in_the_order_of_their_places():
    assert deal_rows({"name": ["c", "a", "b"]}, [2, 0, 1], 3, CPU) == {"name": ["a", "b", "c"]}


def test_a_carried_round_survives_a_checkpoint_that_loads_only_weights(tmp_path):
    round_ = round_of([2, 3])
    torch.save(round_.state_dict(), tmp_path / "state.pt")
    again = Round.from_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert [ids.tolist() for ids in again.rows["completion_ids"]] == [[0, 0], [1, 1, 1]]
    assert again.rows["completion_ids"][0].dtype == np.int32
    assert again.rewards_BF.tolist() == [[0.0], [1.0]]
    assert len(again.prompts) == 1


def test_rows_that_the_ranks_cannot_share_equally_are_refused():
    assert local_slice(6, 1, 3) == slice(2, 4)
    with pytest.raises(ValueError, match="7 rows cannot be split into equal parts for 2 processes"):
        local_slice(7, 0, 2)

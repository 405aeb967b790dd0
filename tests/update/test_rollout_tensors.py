# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Rows of a rollout: padding, trimming, joining, and exchange between processes."""

import pytest
import torch

from trl_dapo.update.rollout_tensors import (
    avoid_nan_width,
    index_rows,
    is_cut_by_row,
    join_rows,
    mark_filler,
    resize,
    row_lengths,
    rows_from_bytes,
    rows_to_bytes,
    schema,
    unknown_keys,
    widths,
    without_padding,
)


pytestmark = pytest.mark.fast


PAD = 9


def rows(*texts, **columns):
    """A rollout from (prompt, completion) pairs of token lists, padded as GRPOTrainer pads."""
    prompt_width = max(len(prompt) for prompt, _ in texts)
    completion_width = max(len(completion) for _, completion in texts)

    def left(values, fill):
        return [fill] * (prompt_width - len(values)) + values

    def right(values, fill):
        return values + [fill] * (completion_width - len(values))

    return {
        "prompt_ids": torch.tensor([left(prompt, PAD) for prompt, _ in texts]),
        "prompt_mask": torch.tensor([left([1] * len(prompt), 0) for prompt, _ in texts]),
        "completion_ids": torch.tensor([right(completion, PAD) for _, completion in texts]),
        "completion_mask": torch.tensor([right([1] * len(completion), 0) for _, completion in texts]),
        **columns,
    }


def test_columns_are_rounded_up_and_never_zero():
    assert widths([(3, 0), (1, 0)]) == (3, 1)
    assert widths([(3, 0), (1, 17)], multiple_of=8) == (8, 24)


def test_no_width_is_64_over_a_multiple_of_128():
    assert avoid_nan_width((4, 60)) == (4, 61)
    assert avoid_nan_width((92, 100)) == (92, 101)  # 192 = 128 + 64
    assert avoid_nan_width((64, 128), multiple_of=64) == (64, 192)
    for columns in ((4, 59), (64, 64), (100, 100)):  # 63, 128, 200
        assert avoid_nan_width(columns) == columns


# Rows


def test_masked_completions_need_no_column():
    batch = rows(([5, 6], [1, 2, 3]), ([7], [4]), ([8], [1, 2]))
    batch["completion_mask"][2] = 0
    assert row_lengths(batch["prompt_mask"], batch["completion_mask"]).tolist() == [[2, 3], [1, 1], [1, 0]]


def test_trimming_takes_padding_only_and_from_the_right_side():
    batch = rows(
        ([5, 6, 7], [1, 2, 3]),
        ([8], [4]),
        advantages=torch.tensor([0.5, -0.5]),
        importance_sampling_ratio=torch.tensor([[1.1], [1.2]]),
        token_type_ids=torch.tensor([[1, 2, 3, 4, 5, 6], [0, 0, 7, 8, 0, 0]]),
        num_items_in_batch=torch.tensor(4),
    )
    second = index_rows({key: value for key, value in batch.items() if value.dim()}, torch.tensor([1]))
    trimmed = resize(second, 1, 1, PAD)
    assert {key: value.tolist() for key, value in trimmed.items()} == {
        "prompt_ids": [[8]],
        "prompt_mask": [[1]],
        "completion_ids": [[4]],
        "completion_mask": [[1]],
        "advantages": [-0.5],
        "importance_sampling_ratio": [[pytest.approx(1.2)]],
        "token_type_ids": [[7, 8]],
    }


def test_rows_of_two_rollouts_are_padded_to_the_wider():
    joined = join_rows(
        [
            rows(([5], [1, 2]), tool_mask=torch.tensor([[1, 0]]), num_items_in_batch=torch.tensor(2)),
            rows(([6, 7], [3]), tool_mask=torch.tensor([[1]]), num_items_in_batch=torch.tensor(1)),
        ],
        PAD,
    )
    assert {key: value.tolist() for key, value in joined.items()} == {
        "prompt_ids": [[PAD, 5], [6, 7]],
        "prompt_mask": [[0, 1], [1, 1]],
        "completion_ids": [[1, 2], [3, PAD]],
        "completion_mask": [[1, 1], [1, 0]],
        "tool_mask": [[1, 0], [1, 1]],
    }


def test_one_ratio_per_completion_stays_one_even_beside_completions_of_one_token():
    short = rows(([5], [1]), importance_sampling_ratio=torch.tensor([[0.5]]))
    long = rows(([5], [1, 2, 3]), importance_sampling_ratio=torch.tensor([[0.7]]))
    assert join_rows([short, long], PAD)["importance_sampling_ratio"].tolist() == [[0.5], [pytest.approx(0.7)]]


def test_a_rollout_without_old_logps_joins_one_with_them_as_unknown():
    carried = rows(([5], [1, 2]), old_per_token_logps=torch.tensor([[-1.0, -2.0]]))
    joined = join_rows([carried, rows(([5], [1]))], PAD)["old_per_token_logps"]
    assert joined[0].tolist() == [-1.0, -2.0]
    assert joined[1, 0].isnan()


def test_tensors_whose_layout_is_not_known_are_named():
    assert unknown_keys(rows(([5], [1]), tool_mask=torch.tensor([[1]]))) == []
    assert unknown_keys(rows(([5], [1]), tone=torch.zeros(1), hue=[1], audio=None)) == ["hue", "tone"]


def test_a_key_that_only_one_rollout_has_is_refused_by_name():
    with pytest.raises(ValueError, match="do not all have the keys tool_mask"):
        join_rows([rows(([5], [1]), tool_mask=torch.tensor([[1]])), rows(([5], [1]))], PAD)


def test_images_are_not_cut_by_row_but_a_dropped_image_is_no_obstacle():
    assert not is_cut_by_row(rows(([5], [1]), num_images=[1]))
    assert is_cut_by_row(rows(([5], [1]), num_images=None))


def test_filler_has_no_loss_token_no_advantage_and_a_ratio_of_one():
    told = {"advantages": torch.tensor([0.5, -0.5]), "old_per_token_logps": torch.tensor([[-1.0] * 2] * 2)}
    batch = rows(([5], [1, 2]), ([6], [3]), **told)
    mark_filler(batch, num_live=1)
    for key, expected in {
        "is_filler": [False, True],
        "completion_mask": [[1, 1], [0, 0]],
        "completion_ids": [[1, 2], [3, PAD]],
        "advantages": [0.5, 0.0],
        "old_per_token_logps": [[-1.0, -1.0], [0.0, 0.0]],
    }.items():
        assert batch[key].tolist() == expected, key
    full = rows(([5], [1]), advantages=torch.tensor([0.5]))
    mark_filler(full, num_live=1)
    assert full["is_filler"].tolist() == [False]  # rollouts of one optimizer step have the same keys


# The exchange


@pytest.mark.parametrize("order", [[1, 0], [1], [0]], ids=str)
def test_packed_rows_come_back_as_they_were(order):
    batch = rows(
        ([5, 6], [1, 2, 3]),
        ([7], [4]),
        advantages=torch.tensor([0.5, -0.5], dtype=torch.bfloat16),
        old_per_token_logps=torch.tensor([[-0.1, -0.2, float("nan")], [-0.3, 0.0, 0.0]]),
        importance_sampling_ratio=torch.tensor([[1.1], [1.2]]),
        tool_mask=torch.tensor([[1, 0, 1], [1, 1, 1]], dtype=torch.int32),
    )
    back = rows_from_bytes(rows_to_bytes(batch)[order], batch)
    assert list(back) == list(batch)
    for key, value in batch.items():
        assert back[key].dtype == value.dtype
        torch.testing.assert_close(back[key], value[order], rtol=0, atol=0, equal_nan=True)


def test_ranks_agree_on_a_schema_only_if_their_rows_can_be_exchanged():
    text = rows(([5, 6], [1, 2, 3]))
    assert schema(text) == schema(rows(([5], [1, 2])))  # other widths are padded before the exchange
    assert schema(text) != schema({**text, "tool_mask": text["completion_mask"]})
    assert schema(text) != schema({**text, "prompt_mask": text["prompt_mask"].int()})
    per_token = {**text, "importance_sampling_ratio": torch.ones(1, 3)}
    assert schema(per_token) != schema({**text, "importance_sampling_ratio": torch.ones(1, 1)})


def test_rows_without_padding_keep_their_tokens_and_all_of_them_count():
    rollout = {
        "prompt_ids": torch.tensor([[0, 5], [6, 7]]),
        "prompt_mask": torch.tensor([[0, 1], [1, 1]]),
        "completion_ids": torch.tensor([[8, 9], [3, 0]]),
        "completion_mask": torch.tensor([[1, 1], [1, 0]]),
        "advantages": torch.tensor([0.0, -1.0]),
        "is_filler": torch.tensor([True, False]),
        "old_per_token_logps": torch.tensor([[-1.0, -2.0], [-3.0, 0.0]]),
        "num_items_in_batch": torch.tensor(3),
    }
    filled = without_padding(rollout, 3, 3, pad_token_id=0)
    # The tokens of the completions, 8, 9 and 3, replace the padding one after the other, by position.
    assert filled["prompt_ids"].tolist() == [[8, 9, 5], [8, 6, 7]]
    assert filled["completion_ids"].tolist() == [[8, 9, 3], [3, 9, 3]]
    assert filled["prompt_mask"].tolist() == filled["completion_mask"].tolist() == [[1, 1, 1]] * 2
    assert filled["advantages"].tolist() == [1.0, 1.0]
    assert filled["is_filler"].tolist() == [False, False]
    assert filled["old_per_token_logps"].tolist() == [[-1.0, -2.0, 0.0], [-3.0, 0.0, 0.0]]
    assert rollout["completion_mask"].tolist() == [[1, 1], [1, 0]]  # the rollout itself is unchanged

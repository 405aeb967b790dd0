# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Micro-batches of equal padded cost: the cut, the assignment to ranks, the trimming, the exchange."""

import random

import pytest
import torch

from trl_dapo.batching import (
    ROLLOUT_KEYS,
    assign_to_ranks,
    check_keys,
    cut_equal_cost,
    index_rows,
    is_cut_by_row,
    join_rows,
    mark_filler,
    padded_cost,
    resize,
    row_lengths,
    rows_from_bytes,
    rows_to_bytes,
    schema,
    widths,
)


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


def costs(lengths, microbatches, multiple_of=None):
    return [padded_cost([lengths[row] for row in microbatch], multiple_of) for microbatch in microbatches]


# The cut


def test_one_long_row_gets_its_own_micro_batch():
    lengths = [(2, 98), (2, 18), (2, 23), (2, 23), (2, 28)]
    # 100 alone against 4 rows x 30 = 120; any other cut has 200 or more.
    assert cut_equal_cost(lengths, 2) == [[4, 2, 3, 1], [0]]
    assert costs(lengths, [[4, 2, 3, 1], [0]]) == [120, 100]


def test_a_row_longer_than_all_others_together_does_not_drag_them_along():
    lengths = [(1, 9), (1, 999), (1, 9), (1, 9)]
    # The long row is 1,000 whatever happens; the rest is split as evenly as three rows of 10 can be.
    assert sorted(costs(lengths, cut_equal_cost(lengths, 3))) == [10, 20, 1000]


def test_equal_rows_are_cut_into_equal_micro_batches():
    assert sorted(map(len, cut_equal_cost([(4, 4)] * 12, 4))) == [3, 3, 3, 3]


def test_every_row_lands_in_exactly_one_micro_batch_and_none_is_empty():
    microbatches = cut_equal_cost([(1, 50), *[(1, 1)] * 9], 5)
    assert sorted(row for microbatch in microbatches for row in microbatch) == list(range(10))
    assert all(microbatches)
    assert len(microbatches) == 5


def test_the_costliest_micro_batch_comes_first():
    lengths = [(3, n) for n in (1, 5, 9, 2, 7, 30, 4)]
    found = costs(lengths, cut_equal_cost(lengths, 3))
    assert found == sorted(found, reverse=True)


def test_long_prompts_are_kept_apart_from_long_completions():
    # By completion alone the prompts of 90 and 10 alternate; by total length they part.
    lengths = [(90, 11), (10, 12), (90, 13), (10, 14)]
    assert sorted(map(sorted, cut_equal_cost(lengths, 2))) == [[0, 2], [1, 3]]


def test_a_cheaper_costliest_micro_batch_is_worth_a_dearer_total():
    # By completion, then prompt: 1 x 11, then 90 and 90 together 2 x 91 = 182, then 2 x 11 = 22: 215 in all.
    # By total: 91, 91 and 3 x (10 + 10) = 60, 242 in all, but half the memory.
    lengths = [(1, 1), (90, 1), (10, 1), (90, 1), (1, 10)]
    assert costs(lengths, cut_equal_cost(lengths, 3)) == [91, 91, 60]


@pytest.mark.parametrize("seed", range(20))
def test_no_micro_batch_costs_more_than_an_equal_share_padded_to_the_longest(seed):
    draw = random.Random(seed)
    num_microbatches, share = draw.randint(1, 9), draw.randint(1, 9)
    lengths = [(draw.randint(1, 40), int(draw.lognormvariate(3, 1.2))) for _ in range(num_microbatches * share)]
    multiple_of = draw.choice([None, 8])
    microbatches = cut_equal_cost(lengths, num_microbatches, multiple_of)
    assert max(costs(lengths, microbatches, multiple_of)) <= share * sum(widths(lengths, multiple_of))


@pytest.mark.parametrize("seed", range(20))
def test_the_cut_is_the_best_of_all_contiguous_ones(seed):
    draw = random.Random(seed)
    lengths = [(1, draw.randint(1, 30)) for _ in range(9)]
    ordered = sorted(lengths, reverse=True)
    best = min(
        max(padded_cost(ordered[:i]), padded_cost(ordered[i:j]), padded_cost(ordered[j:]))
        for i in range(1, 8)
        for j in range(i + 1, 9)
    )
    assert max(costs(lengths, cut_equal_cost(lengths, 3))) == best


def test_fewer_rows_than_micro_batches_is_an_error():
    with pytest.raises(ValueError, match="3 rows cannot fill 4"):
        cut_equal_cost([(1, 1)] * 3, 4)


def test_columns_are_rounded_up_and_never_zero():
    assert widths([(3, 0), (1, 0)]) == (3, 1)
    assert widths([(3, 0), (1, 17)], multiple_of=8) == (8, 24)


# The assignment to ranks


def test_at_each_micro_step_every_rank_has_a_micro_batch_of_like_cost():
    microbatches = [[row] for row in range(6)]  # by falling cost
    # Micro-step 0 gets the first two; micro-step 1 the next two, turned; micro-step 2 the last two.
    assert assign_to_ranks(microbatches, 2) == [[[0], [3], [4]], [[1], [2], [5]]]


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
    assert join_rows([short, long], PAD)["importance_sampling_ratio"].tolist() == [
        [0.5],
        [pytest.approx(0.7)],
    ]


def test_a_rollout_without_old_logps_joins_one_with_them_as_unknown():
    carried = rows(([5], [1, 2]), old_per_token_logps=torch.tensor([[-1.0, -2.0]]))
    joined = join_rows([carried, rows(([5], [1]))], PAD)["old_per_token_logps"]
    assert joined[0].tolist() == [-1.0, -2.0]
    assert joined[1, 0].isnan()


def test_rollouts_with_different_keys_are_refused_by_name():
    with pytest.raises(ValueError, match="differ in their keys: tool_mask"):
        join_rows([rows(([5], [1]), tool_mask=torch.tensor([[1]])), rows(([5], [1]))], PAD)


def test_an_unknown_key_is_refused_by_name():
    with pytest.raises(ValueError, match="padding is unknown: audio_values"):
        check_keys(rows(([5], [1]), audio_values=torch.zeros(1)))


def test_images_are_not_cut_by_row_but_a_dropped_image_is_no_obstacle():
    assert not is_cut_by_row(rows(([5], [1]), num_images=[1]))
    assert is_cut_by_row(rows(([5], [1]), num_images=None))


def test_filler_has_no_loss_token_no_advantage_and_a_ratio_of_one():
    batch = rows(
        ([5], [1, 2]),
        ([6], [3]),
        advantages=torch.tensor([0.5, -0.5]),
        old_per_token_logps=torch.tensor([[-1.0] * 2] * 2),
    )
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


def test_every_layout_in_the_table_is_known():
    assert {layout for layout, _ in ROLLOUT_KEYS.values()} == {"prompt", "completion", "sequence", "step", "image"}

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Micro-batches: how many a budget of tokens needs, and which row is in which one."""

import random

import pytest

from trl_dapo.update.microbatches import Rows, largest_microbatch, plan_window, plan_window_within_budget
from trl_dapo.update.rollout_tensors import widths


pytestmark = pytest.mark.fast


def cut(lengths, num_microbatches, budget=None, **options):
    return Rows(lengths, budget, **options).cut(range(len(lengths)), num_microbatches)


def padded_cost(lengths, multiple_of=None):
    """Return the tokens, including padding, of a micro-batch with rows of these lengths."""
    return len(lengths) * sum(widths(lengths, multiple_of))


def sizes(plan):
    return [[len(microbatch) for microbatch in rank] for rank in plan]


def rows_of(plan):
    return sorted(row for rank in plan for microbatch in rank for row in microbatch)


def costs(lengths, microbatches, multiple_of=None):
    return [padded_cost([lengths[row] for row in microbatch], multiple_of) for microbatch in microbatches]


# How many


EQUAL = [(2, 8)]
WINDOWS = {
    # Rows of 10 tokens, 30 in a micro-batch: three rows each.
    **{f"{num} rows of 10": (EQUAL * num, {"budget": 30}, -(-num // 3)) for num in (1, 3, 4, 9, 10)},
    # (3, 9) is padded to 4 + 12 = 16 columns: two rows are 32 tokens, not 24.
    "columns with padding": ([(3, 9)] * 2, {"budget": 31, "multiple_of": 4}, 2),
    "columns that fit": ([(3, 9)] * 2, {"budget": 32, "multiple_of": 4}, 1),
    # Rows of 10 tokens each, but together 2 x (9 + 9) = 36.
    "the longest prompt with the longest completion": ([(1, 9), (9, 1)], {"budget": 35}, 2),
    # By completion length, the first two would share one: 2 x (90 + 14) = 208. By total length: 2 x (90 + 13) and 2 x
    # (10 + 14).
    "the order that needs fewer": ([(90, 11), (10, 12), (90, 13), (10, 14)], {"budget": 207}, 2),
    # A large budget does not justify padding: together 10 x 100 = 1,000 tokens, of which 810 are padding; separately
    # none.
    "much padding": ([(10, 90), *EQUAL * 9], {"budget": 10**9}, 2),
    # 10 x 11 = 110 tokens, of which 9 are padding: few enough.
    "little padding": ([(2, 9), *EQUAL * 9], {"budget": 10**9}, 1),
    # A row takes 64 + 64 columns whatever its length, even on its own.
    "rounded columns": (EQUAL * 8, {"budget": 10**9, "multiple_of": 64}, 1),
    "no rows are one pass": ([], {"budget": 10}, 1),
    "a row beyond the budget": ([(2, 98), *EQUAL * 3], {"budget": 30}, 2),
}


@pytest.mark.parametrize("window", WINDOWS)
def test_a_window_gets_as_many_micro_batches_as_the_budget_needs_and_no_padding_is_bought(window):
    lengths, options, num = WINDOWS[window]
    assert Rows(lengths, **options).fewest() == num


# The cut


CUTS = {
    # As on a process that learned from another one that there are two passes, or three.
    "no rows": ([], 2, {"budget": 10}, [[], []]),
    "fewer rows than micro-batches": ([(2, 8), (2, 18)], 3, {"budget": 100}, [[1], [0], []]),
    "a row beyond the budget goes alone": ([(2, 98), *EQUAL * 3], 2, {"budget": 30}, [[0], [1, 2, 3]]),
    # Longest first, 50 30 30: micro-batches of 50 and 2 x 30, not 2 x 50 and 30.
    "the costliest first": ([(2, 28), (2, 48), (2, 28)], 2, {"budget": 1000}, [[0, 2], [1]]),
}


@pytest.mark.parametrize("window", CUTS)
def test_a_cut_by_hand(window):
    lengths, num_microbatches, options, expected = CUTS[window]
    assert cut(lengths, num_microbatches, **options) == expected


# Longest first, 60, 30 30, 20 20 20: all micro-batches have 60 tokens.
LIKE = [(2, 18), (2, 28), (2, 58), (2, 18), (2, 28), (2, 18)]
# By completion length the prompts of 90 and 10 alternate; by total length they are separate.
PARTED = [(90, 11), (10, 12), (90, 13), (10, 14)]
# With attention 100 + 100 * 100 = 10,100 compared with 4 x (50 + 50 * 50) = 10,200: a row costs as much as four of
# half its length. In tokens, 100 + 50 padded is no more than 4 x 50.
HALVES = [(10, 90), *[(10, 40)] * 4]
ALIKE = {
    "like costs": (LIKE, 3, {"budget": 1000}, [[0, 3, 5], [1, 4], [2]]),
    "long prompts apart from long completions": (PARTED, 2, {"budget": 1000}, [[0, 2], [1, 3]]),
    "attention": (HALVES, 2, {"budget": 1000, "attention": 1.0}, [[0], [1, 2, 3, 4]]),
    "no attention": (HALVES, 2, {"budget": 1000}, [[0, 1], [2, 3, 4]]),
}


@pytest.mark.parametrize("window", ALIKE)
def test_micro_batches_cost_about_the_same(window):
    lengths, num_microbatches, options, expected = ALIKE[window]
    assert sorted(map(sorted, cut(lengths, num_microbatches, **options))) == expected


@pytest.mark.parametrize(
    ("lengths", "num_microbatches", "budget", "expected"),
    [
        # A cap of one row needs six micro-batches, one of two rows needs three. Two of these are halved.
        ([(2, 8)] * 6, 5, 100, [1, 1, 1, 1, 2]),
        ([(4, 4)] * 12, 4, None, [3, 3, 3, 3]),
    ],
    ids=["left over", "equal"],
)
def test_equal_rows_are_cut_into_micro_batches_as_equal_as_can_be(lengths, num_microbatches, budget, expected):
    assert sorted(map(len, cut(lengths, num_microbatches, budget))) == expected


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        # The long row is 1,000 in any case. The rest is divided as evenly as three rows of 10 can be.
        ([(1, 9), (1, 999), (1, 9), (1, 9)], [1000, 20, 10]),
        # By completion length, then prompt length: 1 x 11, then 90 and 90 together 2 x 91 = 182, then 2 x 11 = 22: 215
        # in total. By total length: 91, 91 and 3 x (10 + 10) = 60, 242 in total, but half the memory.
        ([(1, 1), (90, 1), (10, 1), (90, 1), (1, 10)], [91, 91, 60]),
    ],
    ids=["a long row", "a costlier total"],
)
def test_the_costliest_micro_batch_is_as_cheap_as_can_be(lengths, expected):
    assert costs(lengths, cut(lengths, 3)) == expected


def test_a_window_with_little_padding_is_not_cut_finer():
    """10 x 11 = 110 tokens of which 9 are padding; 5 x 11 and 5 x 10 would be 5 fewer."""
    assert sizes(plan_window_within_budget([[(2, 9), *EQUAL * 9]], 10**9, in_step=False)) == [[10]]
    # 2 x 6 + 3 x 3 = 21 tokens, of which 19 belong to the rows: a tenth is padding. All in one would be 5 x 6.
    rows = [(1, 1), (1, 5), (1, 2), (1, 2), (1, 4)]
    assert plan_window_within_budget([rows], 32, in_step=False) == [[[1, 4], [2, 3, 0]]]


def test_rows_of_equal_completions_are_ordered_by_their_prompts():
    assert Rows([(1, 10), (90, 10), (5, 3)]).orders(range(3)) == [[1, 0, 2]]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("budget", [None, 10**6])
def test_the_cut_is_the_best_of_all_contiguous_ones(budget, seed):
    draw = random.Random(seed)
    lengths = [(1, draw.randint(1, 30)) for _ in range(9)]
    ordered = sorted(lengths, reverse=True)
    best = min(max(costs(ordered, [range(i), range(i, j), range(j, 9)])) for i in range(1, 8) for j in range(i + 1, 9))
    assert max(costs(lengths, cut(lengths, 3, budget))) == best


def test_fewer_microbatches_than_the_budget_needs_is_an_error():
    with pytest.raises(ValueError, match=r"4 rows do not fit into 1 micro-batches.*at least 2"):
        cut([(2, 8)] * 4, 1, budget=30)


# The plan


def test_without_a_budget_every_rank_has_a_micro_batch_of_like_cost_at_each_micro_step():
    # Rows of 60, 50, 40, 30, 20 and 10 tokens, one per micro-batch: similar rows train together, and the costliest of
    # a micro-step goes to one process and then to the other.
    lengths = [[(5, 55), (5, 45), (5, 35)], [(5, 25), (5, 15), (5, 5)]]
    assert plan_window(lengths, 3) == [[[0], [3], [4]], [[1], [2], [5]]]
    # Rows that cannot move stay.
    assert plan_window(lengths, 3, can_exchange=False) == [[[0], [1], [2]], [[3], [4], [5]]]


def test_ranks_in_step_get_like_rows_at_each_micro_batch():
    # Two rows of 60 tokens and four of 30: in each micro-batch both processes have a long row, or both have two short
    # ones.
    lengths = [(2, 58), (2, 58), (2, 28), (2, 28), (2, 28), (2, 28)]
    plan = plan_window_within_budget([lengths[:3], lengths[3:]], budget=60, in_step=True)
    assert plan == [[[0], [4, 5]], [[1], [2, 3]]]


def test_ranks_that_wait_once_get_equal_sums():
    # Micro-batches of 60, 50, 50 and 40 tokens: 60 + 40 and 50 + 50.
    lengths = [(10, 50), (10, 40), (10, 40), (10, 30)]
    plan = plan_window_within_budget([lengths[:2], lengths[2:]], budget=60, in_step=False)
    assert plan == [[[0], [3]], [[1], [2]]]
    assert Rows(lengths).waited_cost(plan, in_step=False) == 200
    # In step, a process with 50 waits for one with 60, and one with 40 waits for one with 50: 2 x (60 + 50).
    assert Rows(lengths).waited_cost(plan, in_step=True) == 220


def test_more_micro_batches_spare_ranks_from_waiting():
    # 64 equal rows, 3 per micro-batch: 22 micro-batches, 3 for each of 8 processes. They would wait for 3 + 3 + 3 rows
    # and have 8. With 4 micro-batches of 2 no process waits, which saves each the time of a row of 1,200 tokens.
    assert sizes(plan_window_within_budget([[(200, 1000)] * 8] * 8, budget=3600, in_step=True)) == [[2, 2, 2, 2]] * 8


def test_a_pass_more_must_spare_more_than_gathering_the_weights_takes():
    # As above, but the saved row has 900 tokens, and gathering all weights takes the time of 1,000.
    plan = plan_window_within_budget([[(100, 800)] * 8] * 8, budget=2700, in_step=True)
    assert [len(rank) for rank in plan] == [3] * 8
    # Processes that wait once per step do not gather anything.
    plan = plan_window_within_budget([[(100, 800)] * 8] * 8, budget=2700, in_step=False)
    assert sizes(plan) == [[2, 2, 2, 2]] * 8


def test_waiting_that_cannot_be_spared_costs_no_micro_batch():
    # The row of 1,000 takes longer than all rows of the other process, however these are divided.
    plan = plan_window_within_budget([[(10, 990)], [(2, 8)] * 8], budget=1000, in_step=True)
    assert plan == [[[0]], [[1, 2, 3, 4, 5, 6, 7, 8]]]


def test_a_micro_batch_more_must_spare_a_hundredth():
    # The first process's 2 x 1,000 would become 1,000 + 990, which saves 10 of 2,000 tokens.
    lengths = [[(10, 990), (10, 980)], [(2, 8)] * 3]
    assert sizes(plan_window_within_budget(lengths, 10_000, in_step=False, can_exchange=False)) == [[2], [3]]
    # 1,000 + 900 is worth it.
    lengths[0][1] = (10, 890)
    assert sizes(plan_window_within_budget(lengths, 10_000, in_step=False, can_exchange=False)) == [[1, 1], [2, 1]]


def test_ranks_without_a_row_get_an_empty_micro_batch():
    assert plan_window_within_budget([[(2, 8)], [], []], budget=100, in_step=True) == [[[0]], [[]], [[]]]
    assert plan_window_within_budget([[], []], budget=100, in_step=False) == [[[]], [[]]]


@pytest.mark.parametrize("in_step", [True, False])
def test_rows_that_cannot_move_stay_and_all_ranks_make_as_many_passes(in_step):
    # The first process needs three micro-batches of two rows, the second would need one.
    plan = plan_window_within_budget([[(2, 8)] * 6, [(2, 8)] * 2], budget=20, in_step=in_step, can_exchange=False)
    assert sizes(plan) == [[2, 2, 2], [1, 1, 0]]
    assert rows_of(plan[:1]) == [0, 1, 2, 3, 4, 5]
    assert rows_of(plan[1:]) == [6, 7]


def test_four_thousand_windows_keep_the_budget():
    draw = random.Random(0)
    for _ in range(4_000):
        num_ranks, num_rows = draw.choice([1, 1, 2, 3, 8]), draw.randint(0, 24)
        multiple_of, attention = draw.choice([None, None, 8]), draw.choice([0.0, 1e-4, 0.1])
        scale = draw.choice([3, 100, 8000])
        lengths = [(draw.randint(1, 9), draw.randint(0, scale)) for _ in range(num_rows)]
        budget = draw.randint(1, 3 * scale)
        cuts = sorted(draw.randint(0, num_rows) for _ in range(num_ranks - 1))
        shares = [lengths[i:j] for i, j in zip([0, *cuts], [*cuts, num_rows], strict=True)]
        options = {"in_step": draw.random() < 0.5, "can_exchange": draw.random() < 0.8}
        plan = plan_window_within_budget(shares, budget, **options, multiple_of=multiple_of, attention=attention)
        assert rows_of(plan) == list(range(num_rows))
        assert len(plan) == num_ranks
        assert len({len(rank) for rank in plan}) == 1
        microbatches = [microbatch for rank in plan for microbatch in rank]
        assert all(
            len(s) <= 1 or padded_cost([lengths[row] for row in s], multiple_of) <= budget for s in microbatches
        )
        if options["can_exchange"]:
            assert all(microbatches) == (num_rows >= len(microbatches))


@pytest.mark.parametrize(
    ("longest", "budget", "max_rows", "multiple_of", "rows", "columns"),
    [
        # 3 rows of 18 would leave 10 of the 64 tokens; 4 rows of 16 fill them.
        ((10, 8), 64, 100, None, 4, (8, 8)),
        ((10, 8), 54, 100, None, 3, (10, 8)),
        # A row that is longer than the budget is a micro-batch of its own, and so is one that fills it.
        ((10, 8), 5, 100, None, 1, (10, 8)),
        ((10, 8), 18, 100, None, 1, (10, 8)),
        # There are two rows.
        ((10, 8), 64, 2, None, 2, (10, 8)),
        # 2 rows of 11 tokens: the completion of 12 is shorter, too.
        ((10, 12), 23, 100, None, 2, (1, 10)),
        # Columns are multiples of eight: 16 + 8. There are 5 rows, each with 24 of 120 tokens.
        ((10, 8), 120, 100, 8, 5, (16, 8)),
        ((10, 8), 100, 100, 8, 5, (8, 8)),
    ],
)
def test_the_largest_micro_batch_fills_its_budget_with_the_longest_rows(
    longest, budget, max_rows, multiple_of, rows, columns
):
    assert largest_microbatch(longest, budget, max_rows, multiple_of) == (rows, columns)

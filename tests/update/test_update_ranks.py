# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The update phase on two processes, held against one row at a time and against one process."""

import pytest
from update_helpers import (
    CASES,
    OTHER_LOSSES,
    ROWS,
    SAMPLED,
    Row,
    ScriptedGRPO,
    ScriptedUpdate,
    apart,
    reference_gradient,
    run,
    two_processes,
)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return two_processes(tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("case", CASES)
def test_two_processes_give_the_gradient_of_one_row_at_a_time(ranks, case):
    rows, _ = CASES[case]
    expected = reference_gradient(rows)
    for rank in ranks:
        assert apart(rank[case]["gradient"], expected) < 1e-6


@pytest.mark.parametrize("name", SAMPLED)
def test_two_processes_train_on_the_one_row_that_each_has_sampled(ranks, name):
    found = [rank[f"sampled, {name}"] for rank in ranks]
    rows = [Row(**row) for rank in found for row in rank["rows"]]
    assert len(rows) == 2
    assert rows[0].advantage == -rows[1].advantage != 0
    for rank in found:
        assert apart(rank["gradient"], reference_gradient(rows)) < 1e-6


@pytest.mark.parametrize("name", OTHER_LOSSES)
def test_two_processes_leave_filler_rows_out_of_any_loss(ranks, name):
    rows, _, settings = OTHER_LOSSES[name]
    expected = run(ScriptedGRPO, [row for row in rows if not row.is_filler], 1, **settings).gradients[0]
    for rank in ranks:
        assert apart(rank[name]["gradient"], expected) < 2e-6


def test_at_each_micro_batch_both_ranks_have_about_the_same_cost(ranks):
    case = "long rows on one rank"
    lengths = [len(row.prompt) + len(row.completion) for row in CASES[case][0]]
    assert sum(lengths[:8]) > 2 * sum(lengths[8:])  # as they were sampled
    costs = [rank[case]["costs"] for rank in ranks]
    for ours, theirs in zip(*costs, strict=True):
        assert abs(ours - theirs) < max(lengths) / 2
    assert sum(costs[0]) == pytest.approx(sum(costs[1]), rel=0.1)


def test_both_ranks_log_what_one_process_logs(ranks):
    (alone, *_) = run(ScriptedUpdate, ROWS, 4).state.log_history
    for name in ("loss", "entropy", "num_loss_tokens", "clip_ratio/high_mean", "grad_norm"):
        assert ranks[0]["split (4, 4)"]["logs"][name] == pytest.approx(alone[name], rel=1e-5, abs=1e-7), name

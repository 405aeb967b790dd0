# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The update phase with a budget of tokens, compared with one row at a time and with itself without a budget."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from update_helpers import (
    BUDGETED,
    EXPERTS,
    ROWS,
    Row,
    ScriptedUpdate,
    apart,
    collate,
    fill,
    logs_of,
    make_rows,
    mask,
    padded_tokens,
    passes_without_gradient,
    reference_gradient,
    rows_of,
    run,
    tiny_experts,
    two_processes,
)

from trl_dapo.models import attention_cost_of
from trl_dapo.update.rollout_tensors import placeholder_row


def lone(length):
    """A row of `num_tokens` tokens, including its prompt."""
    return Row([5], [6] * (length - 1), 1.0)


# ---- The gradient, and the size of micro-batches ----


@pytest.mark.parametrize("split", [(1, 1), (2, 2), (16, 16), (4, 1), (8, 4)], ids=str)
@pytest.mark.parametrize("budget", [30, 100, 5000])
def test_a_budget_keeps_every_micro_batch_and_changes_no_gradient(split, budget):
    trainer = run(ScriptedUpdate, ROWS, *split, max_tokens_per_microbatch=budget)
    assert apart(trainer.gradients[0], reference_gradient(ROWS)) < 1e-6
    for microbatch in trainer.microbatches:
        assert padded_tokens(microbatch) <= budget or len(microbatch["advantages"]) == 1
    assert sum(len(microbatch["advantages"]) for microbatch in trainer.microbatches) == 16


def test_the_metrics_count_passes_and_the_largest_of_them():
    # 6 rows of 10 tokens: 3 in a micro-batch of at most 30. Two optimizer steps of 6 rows; the second also has a row
    # of 40.
    script = [lone(10)] * 6 + [lone(10)] * 5 + [lone(40)]
    trainer = run(ScriptedUpdate, script, 6, max_steps=2, max_tokens_per_microbatch=30)
    found = [(log["microbatches"], log["peak_microbatch_tokens"], log["padding_share"]) for log in logs_of(trainer)]
    assert found == [(2, 30, 0), (3, 40, 0)]
    assert trainer._packer.attention == attention_cost_of(trainer.model.config) > 0
    (log,) = logs_of(run(ScriptedUpdate, [lone(10), lone(10), lone(20), lone(20)], 2))  # the loop's, without a budget
    assert (log["microbatches"], log["peak_microbatch_tokens"]) == (2, 40)


def test_a_row_longer_than_the_budget_goes_alone_and_is_spoken_of_once(caplog):
    script = [lone(50), lone(10), lone(10), lone(60)] * 2
    trainer = run(ScriptedUpdate, script, 4, max_steps=2, max_tokens_per_microbatch=20)
    assert sorted(map(padded_tokens, trainer.microbatches[:3])) == [20, 50, 60]
    assert caplog.text.count("longer than `max_tokens_per_microbatch=20`") == 1
    assert "A row of 60 tokens" in caplog.text


def test_rows_without_a_loss_token_go_through_no_forward_pass():
    rows = mask(fill(ROWS, range(3)), range(8, 12))
    trainer = run(ScriptedUpdate, rows, 4, max_tokens_per_microbatch=100)
    trained = [row.completion for microbatch in trainer.microbatches for row in rows_of(microbatch)]
    assert sorted(trained) == sorted(row.completion for row in rows if sum(row.loss_mask))
    assert apart(trainer.gradients[0], reference_gradient(rows)) < 1e-6


@pytest.mark.parametrize("num_iterations", [1, 2])
def test_every_step_of_a_long_rollout_has_the_gradient_it_has_without_a_budget(num_iterations):
    settings = {"num_microbatches": 4, "steps_per_generation": 8, "num_iterations": num_iterations}
    settings |= {"max_steps": 4, "learning_rate": 0.1, "max_grad_norm": 1.0, "beta": 0.0}
    script = make_rows(64)
    found = run(ScriptedUpdate, script, **settings, per_device_train_batch_size=4, max_tokens_per_microbatch=80)
    expected = run(ScriptedUpdate, script, **settings, per_device_train_batch_size=4)
    assert len(found.gradients) == 4
    for one, other in zip(found.gradients, expected.gradients, strict=True):
        assert apart(one, other) < 2e-6
    for one, other in zip(logs_of(found), logs_of(expected), strict=True):
        for name in ("loss", "grad_norm", "entropy", "num_loss_tokens", "clip_ratio/region_mean", "learning_rate"):
            assert one[name] == pytest.approx(other[name], rel=1e-5, abs=1e-7), name
        assert "step_time" in one


def test_the_load_balancing_loss_is_a_mean_over_the_micro_batches_that_there_are():
    # Four rows of 10 tokens in two micro-batches, whatever the training loop counts. Without advantages, only this
    # term has a gradient.
    rows = [Row([5 + i], [6 + i] * 9, 0.0) for i in range(4)]
    budgeted = run(ScriptedUpdate, rows, 4, model=tiny_experts(), max_tokens_per_microbatch=20)
    assert len(budgeted.microbatches) == 2
    expected = 0
    for microbatch in budgeted.microbatches:
        alone = run(ScriptedUpdate, [row for row in rows_of(microbatch) for _ in (0,)], 1, model=tiny_experts())
        expected = expected + alone.gradients[0] / 2
    assert expected.norm() > 1e-4
    assert apart(budgeted.gradients[0], expected) < 1e-6


@pytest.mark.parametrize("settings", [{"entropy_coef": 0.1}, {"importance_sampling_level": "sequence"}], ids=str)
def test_other_terms_are_what_they_are_without_a_budget(settings):
    found, expected = (
        run(ScriptedUpdate, ROWS, 8, **settings, **budget) for budget in ({"max_tokens_per_microbatch": 60}, {})
    )
    assert apart(found.gradients[0], expected.gradients[0]) < 1e-6


def test_a_stand_in_for_no_rows_is_finite_and_in_no_loss():
    rollout = collate([Row([5, 6, 7], [8, 9], 1.0, old=[-500.0, -1.0], ref=[-3.0, -2.0])] * 2)
    rollout = {key: value for key, value in rollout.items() if key != "num_items_in_batch"}
    row = placeholder_row(rollout, pad_token_id=0)
    assert (row["prompt_ids"].tolist(), row["prompt_mask"].tolist()) == ([[7]], [[1]])
    assert (row["completion_ids"].tolist(), row["completion_mask"].tolist()) == ([[8]], [[0]])
    assert (row["advantages"].tolist(), row["ref_per_token_logps"].tolist()) == ([0.0], [[0.0]])
    assert row["old_per_token_logps"].isnan().all()  # sampled by the current policy: the ratio is 1


# ---- Log-probabilities without gradient ----


@pytest.mark.parametrize("budget", [50, 400, 5000])
def test_a_pass_without_gradient_keeps_the_budget_and_finds_the_same(budget):
    rollout = collate(make_rows(30, longest=200))
    expected = passes_without_gradient(ScriptedUpdate(), rollout)
    found = passes_without_gradient(ScriptedUpdate(max_tokens_per_microbatch=budget), rollout)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=1e-5)
    assert all(rows == 1 or rows * width <= budget for rows, width in found[2])
    assert sum(rows for rows, _ in found[2]) == 30


@pytest.mark.parametrize("in_step", [True, False])
def test_ranks_in_step_make_as_many_passes_as_the_rank_that_needs_most(in_step, monkeypatch):
    # Two rows of 10 tokens make one pass here. Another process needs four.
    trainer = ScriptedUpdate(max_tokens_per_microbatch=20)
    trainer._packer.in_step = in_step
    monkeypatch.setattr(trainer.accelerator, "gather", lambda num: torch.cat([num, torch.tensor([4])]))
    rollout = collate([lone(10), lone(10)])
    logps, entropies, seen = passes_without_gradient(trainer, rollout)
    # One row each, then one prompt and one completion token for each pass without rows.
    assert seen == ([(1, 10), (1, 10), (1, 2), (1, 2)] if in_step else [(2, 10)])
    expected = passes_without_gradient(ScriptedUpdate(), rollout)
    torch.testing.assert_close(logps, expected[0])
    torch.testing.assert_close(entropies, expected[1])


# ---- Two processes ----


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return two_processes(tmp_path_factory.mktemp("ranks"), "budgeted")


@pytest.mark.parametrize("case", BUDGETED)
def test_two_processes_give_the_gradient_of_one_row_at_a_time(ranks, case):
    rows, _, settings = BUDGETED[case]
    expected = reference_gradient(rows) if case != "no token" else 0 * reference_gradient(ROWS)
    for rank in ranks:
        assert torch.equal(rank[case]["gradient"], ranks[0][case]["gradient"])
        assert (rank[case]["gradient"] - expected).norm() <= 1e-6 * expected.norm()
        for num_rows, tokens in rank[case]["costs"]:
            assert num_rows == 1 or tokens <= settings["max_tokens_per_microbatch"]
    assert len({len(rank[case]["costs"]) for rank in ranks}) == 1


@pytest.mark.parametrize("case", BUDGETED)
def test_two_processes_log_the_passes_of_each_and_the_largest_of_both(ranks, case):
    costs = [rank[case]["costs"] for rank in ranks]
    for rank in ranks:
        assert rank[case]["logs"]["microbatches"] == len(costs[0])
        # A placeholder has one row, of one prompt and one completion token.
        peak = max(tokens if tokens > 2 else 0 for rank_costs in costs for _, tokens in rank_costs)
        assert rank[case]["logs"]["peak_microbatch_tokens"] == peak


@pytest.mark.parametrize(
    "case", sorted(BUDGETED.keys() & {"gradients synchronized at each micro-batch", "sharded at load"})
)
def test_ranks_that_meet_at_each_micro_batch_have_like_costs_at_each(ranks, case):
    assert all(rank[case]["in_step"] for rank in ranks)
    for (_, first), (_, second) in zip(*(rank[case]["costs"] for rank in ranks), strict=True):
        assert first == pytest.approx(second, rel=0.35)


def test_ranks_that_meet_once_a_step_have_about_as_much_to_do(ranks):
    # All rows in the loss were sampled on one process.
    first, second = (sum(tokens for _, tokens in rank["all rows on one rank"]["costs"]) for rank in ranks)
    assert first == pytest.approx(second, rel=0.35)


def test_a_stand_in_moves_no_router(ranks):
    # Only one row is in the loss, so one of the processes has none. The gradient is that of one process with one
    # micro-batch.
    alone = run(ScriptedUpdate, EXPERTS, 2, model=tiny_experts(), max_tokens_per_microbatch=60)
    for rank in ranks:
        assert apart(rank["experts"]["gradient"], alone.gradients[0]) < 1e-6
        assert rank["experts"]["logs"]["aux_loss"] == pytest.approx(logs_of(alone)[0]["aux_loss"], rel=1e-6)


# ---- Settings that are refused ----


def test_a_budget_is_refused_for_a_model_with_absolute_positions():
    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=103))
    with pytest.raises(
        ValueError, match=r"max_tokens_per_microbatch=60.*change by .*padded.*per_device_train_batch_s"
    ):
        ScriptedUpdate(model=model, max_tokens_per_microbatch=60)


def test_a_budget_is_refused_where_ranks_share_a_row(monkeypatch):
    monkeypatch.setattr(ScriptedUpdate, "get_tp_size", lambda self: 2)
    with pytest.raises(ValueError, match=r"2 processes share a row.*data parallelism"):
        ScriptedUpdate(max_tokens_per_microbatch=60)

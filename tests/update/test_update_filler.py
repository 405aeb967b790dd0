# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Rows that only fill a rollout, and steps without a loss token."""

from dataclasses import replace

import pytest
import torch
from update_helpers import (
    LOSSES,
    ROWS,
    ScriptedGRPO,
    ScriptedUpdate,
    apart,
    fill,
    logs_of,
    mask,
    policy_with_reference,
    reference_gradient,
    rows_of,
    run,
    tiny_experts,
)


@pytest.mark.parametrize("settings", [{}, {"beta": 0.1}, {"entropy_coef": 0.1}], ids=str)
@pytest.mark.parametrize("loss_type", LOSSES)
def test_filler_rows_leave_the_gradient_that_the_others_have_alone(loss_type, settings, tmp_path):
    # A mean over the tokens of a micro-batch depends on how rows are divided, unless all have the same length.
    has_one_length = loss_type == "bnpo" or "entropy_coef" in settings
    rows = [replace(row, ref=[-4.0] * 9 if has_one_length else [-4.0] * len(row.completion)) for row in ROWS]
    if has_one_length:
        rows = [replace(row, completion=(row.completion * 9)[:9]) for row in rows]
    filler = [0, 2, 3, 4, 5, 7, 8, 9, 11, 13, 14, 15]
    gradients = [
        run(cls, script, num, model=policy_with_reference(tmp_path), loss_type=loss_type, **settings).gradients[0]
        for cls, script, num in [
            (ScriptedUpdate, fill(rows, filler), 4),
            (ScriptedGRPO, [row for i, row in enumerate(rows) if i not in filler], 1),
        ]
    ]
    assert apart(*gradients) < 2e-6


@pytest.mark.parametrize("loss_type", LOSSES)
def test_completions_that_were_cut_off_count_as_rows_where_trl_counts_them(loss_type):
    # 3 rows are filler, and 13 are not: of these, 5 were cut off and 8 have loss tokens.
    rows = mask(fill(ROWS, range(13, 16)), range(8, 13))
    found = run(ScriptedUpdate, rows, 1, loss_type=loss_type).gradients[0]
    expected = run(ScriptedGRPO, [*rows[:13], rows[8]], 1, loss_type=loss_type).gradients[0]  # 14: groups of two
    assert apart(found, expected * (14 / 13 if loss_type in {"grpo", "sapo", "dr_grpo", "luspo"} else 1)) < 2e-6


def test_a_micro_batch_of_bnpo_weighs_as_many_rows_as_are_no_filler():
    trainer = run(ScriptedUpdate, fill(ROWS, range(4, 16)), 4, loss_type="bnpo")
    expected = 0
    for microbatch in trainer.microbatches:
        live = [row for row in rows_of(microbatch) if row.completion]
        if live:
            expected = expected + len(live) / 4 * reference_gradient(live)  # the mean over these rows' tokens
    assert apart(trainer.gradients[0], expected) < 2e-6
    num_live = [sum(bool(row.completion) for row in rows_of(microbatch)) for microbatch in trainer.microbatches]
    assert num_live != [1] * 4


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo"])
def test_an_empty_rollout_does_not_dilute_another_one_of_the_same_step(loss_type):
    found = run(ScriptedUpdate, [*ROWS[:8], *fill(ROWS[8:], range(8))], 4, 2, loss_type=loss_type).gradients[0]
    assert apart(found, run(ScriptedGRPO, ROWS[:8], 2, 2, loss_type=loss_type).gradients[0]) < 2e-6


@pytest.mark.parametrize(("loss_type", "budget"), [*((loss_type, None) for loss_type in LOSSES), ("dapo", 100)])
def test_a_step_without_a_token_moves_neither_weights_nor_optimizer_state(loss_type, budget):
    states = []

    class Spy(ScriptedUpdate):
        def training_step(self, *args):
            moments = [value.clone() for state in self.optimizer.state.values() for value in state.values()]
            states.append([*(parameter.detach().clone() for parameter in self.model.parameters()), *moments])
            return super().training_step(*args)

    script = [*ROWS, *fill(ROWS, range(16)), *ROWS]
    adamw = {"optim": "adamw_torch", "learning_rate": 0.1, "lr_scheduler_type": "constant", "weight_decay": 0.1}
    settings = {"max_steps": 3, "entropy_coef": 0.1, "loss_type": loss_type, "max_tokens_per_microbatch": budget}
    trainer = run(Spy, script, 2, **settings, **adamw)
    first, _, second, _, third, _ = states
    assert all(map(torch.equal, second, third))
    assert not all(map(torch.equal, first, second))
    assert not trainer.gradients[1].any()
    assert trainer.gradients[2].any()
    logs = logs_of(trainer)
    assert logs[1]["loss"] == 0.0
    assert [log["frac_empty_steps"] for log in logs] == [0.0, 1.0, 0.0]
    if loss_type == "dapo":
        assert [log["num_loss_tokens"] > 0 for log in logs] == [True, False, True]
    if budget:
        assert (logs[1]["microbatches"], logs[1]["peak_microbatch_tokens"]) == (1, 0)
        assert "padding_share" not in logs[1]


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_a_step_without_a_token_moves_no_router_either(loss_type):
    script, settings = fill(ROWS, range(16)), {"entropy_coef": 0.1, "loss_type": loss_type}
    trainer = run(ScriptedUpdate, script, 2, model=tiny_experts(), **settings)
    assert trainer.aux_loss_enabled
    assert not trainer.gradients[0].any()

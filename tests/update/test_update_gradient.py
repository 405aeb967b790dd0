# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The update phase's gradient, compared with that of one row at a time without padding."""

from dataclasses import replace
from itertools import chain

import pytest
import torch
from trl import GRPOTrainer
from update_helpers import (
    ROWS,
    SPLITS,
    ScriptedGRPO,
    ScriptedUpdate,
    apart,
    completions_of,
    logs_of,
    make_rows,
    mask,
    old,
    reference_gradient,
    rows_of,
    run,
    with_unknown,
)


@pytest.mark.parametrize("split", [*SPLITS, (16, 16)], ids=str)
def test_the_same_rows_give_the_same_gradient_for_every_split(split):
    trainer = run(ScriptedUpdate, ROWS, *split)
    assert apart(trainer.gradients[0], reference_gradient(ROWS)) < 1e-6
    assert len(trainer.microbatches) == split[0]


def test_each_optimizer_step_divides_by_its_own_tokens():
    trainer = run(ScriptedUpdate, make_rows(32), num_microbatches=2, steps_per_generation=4, max_steps=2)
    tokens = [log["num_loss_tokens"] for log in logs_of(trainer)]
    assert tokens[0] != tokens[1]
    assert sum(tokens) == sum(len(row.completion) for row in make_rows(32))
    # Weighted by their tokens, the two means give the mean over all tokens.
    mean = (tokens[0] * trainer.gradients[0] + tokens[1] * trainer.gradients[1]) / sum(tokens)
    assert apart(mean, reference_gradient(make_rows(32))) < 1e-6


def test_the_shorter_last_step_of_an_epoch_divides_by_its_own_tokens():
    # 64 prompts x 2 completions are 16 micro-batches of 8 rows. With 3 per optimizer step, the last step has one.
    script, settings = make_rows(128), {"per_device_train_batch_size": 8, "num_train_epochs": 1, "max_steps": -1}
    trainer, trl = (run(cls, script, 3, 2, **settings) for cls in (ScriptedUpdate, ScriptedGRPO))
    assert len(trainer.microbatches) == len(trl.microbatches) == 16
    last = trainer.microbatches[-1]
    rows = [row for row in script[112:] if tuple(row.completion) in completions_of([last])]
    assert len(rows) == 8
    num_tokens = sum(len(row.completion) for row in rows)
    assert last["num_items_in_batch"] == num_tokens
    assert apart(trainer.gradients[-1], reference_gradient(rows)) < 1e-6
    # An optimizer step takes one and a half rollouts of 16 rows, and the last one takes the second half of the eighth
    # rollout. TRL divides the same sum by half of the rollout's tokens, which may differ from the tokens of these
    # rows.
    half = sum(len(row.completion) for row in script[112:]) / 2
    assert (num_tokens, half) == (68, 119.5)
    assert apart(trl.gradients[-1], reference_gradient(rows) * num_tokens / half) < 1e-6


def test_rows_carried_from_an_older_policy_keep_its_logps_and_the_others_are_on_policy():
    rows = old(ROWS, range(0, 16, 3))
    assert apart(run(ScriptedUpdate, rows, 4).gradients[0], reference_gradient(rows)) < 1e-6
    assert apart(reference_gradient(rows), reference_gradient(ROWS)) > 1e-2


def test_a_micro_batch_without_a_token_gives_loss_zero_and_the_others_the_right_gradient():
    rows = mask(ROWS, range(12))
    trainer = run(ScriptedUpdate, rows, 8)
    assert any(not microbatch["completion_mask"].any() for microbatch in trainer.microbatches)
    assert apart(trainer.gradients[0], reference_gradient(rows)) < 1e-6


def test_images_stay_with_their_rows():
    rows = [replace(row, image=float(i)) for i, row in enumerate(ROWS)]
    trainer = run(ScriptedUpdate, rows, 4)
    assert sorted(trainer.images) == sorted([(row.prompt + row.completion, [row.image] * 2) for row in rows])
    assert apart(trainer.gradients[0], reference_gradient(ROWS)) < 1e-6
    assert [len(microbatch["prompt_ids"]) for microbatch in trainer.microbatches] == [4] * 4
    assert len({microbatch["completion_ids"].size(1) for microbatch in trainer.microbatches}) > 1


# ---- A tensor that a later TRL adds to its rollouts ----


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_with_an_unknown_tensor_micro_batches_are_trls_and_the_gradient_is_the_same(split, caplog):
    script = with_unknown(ROWS)
    trainer, trl = (run(cls, script, *split) for cls in (ScriptedUpdate, ScriptedGRPO))
    assert apart(trainer.gradients[0], reference_gradient(ROWS)) < 1e-6
    for microbatch, theirs in zip(trainer.microbatches, trl.microbatches, strict=True):
        for key in ("prompt_ids", "completion_ids", "tone"):
            assert torch.equal(microbatch[key], theirs[key]), key
        for row, values in zip(rows_of(microbatch), microbatch["tone"].tolist(), strict=True):
            assert values == [float([each.completion for each in ROWS].index(row.completion))] * 3


def test_an_unknown_tensor_is_warned_of_once(caplog):
    run(ScriptedUpdate, with_unknown(make_rows(32)), 4, max_steps=2, max_tokens_per_microbatch=100)
    (said,) = [record.message for record in caplog.records if "`tone`" in record.message]
    assert said.startswith("TRL's rollouts have tensors that this version of trl-dapo does not know: `tone`. ")
    assert "no padding is removed" in said
    assert "`max_tokens_per_microbatch=100` has no effect" in said
    caplog.clear()
    run(ScriptedUpdate, make_rows(32), 4, max_steps=2)
    assert "does not know" not in caplog.text


def test_a_key_without_a_value_is_no_unknown_tensor(monkeypatch, caplog):
    generate = ScriptedUpdate._generate_and_score_completions
    monkeypatch.setattr(
        ScriptedUpdate, "_generate_and_score_completions", lambda *args: {**generate(*args), "tint": None}
    )
    trainer = run(ScriptedUpdate, ROWS, 4)
    assert apart(trainer.gradients[0], reference_gradient(ROWS)) < 1e-6
    assert len({microbatch["completion_ids"].size(1) for microbatch in trainer.microbatches}) > 1
    assert "does not know" not in caplog.text


def test_an_unknown_tensor_that_trls_log_probabilities_take_reaches_the_model(monkeypatch):
    compute, seen = GRPOTrainer._get_per_token_logps_and_entropies, []

    def of_a_later_trl(self, model, input_ids, attention_mask, logits_to_keep, tone=None, **kwargs):
        seen.append(None if tone is None else tone[:, 0].tolist())
        return compute(self, model, input_ids, attention_mask, logits_to_keep, **kwargs)

    monkeypatch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", of_a_later_trl)
    run(ScriptedUpdate, with_unknown(ROWS), 4)
    assert sorted(chain.from_iterable(seen)) == [float(i) for i in range(16)]

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The window: which rows an optimizer step takes, how they are cut, and what a checkpoint keeps of them."""

from dataclasses import replace

import pytest
from transformers import TrainerCallback
from update_helpers import (
    ROWS,
    TIMED,
    Row,
    ScriptedGRPO,
    ScriptedUpdate,
    apart,
    completions_of,
    make_rows,
    padded_tokens,
    policy_with_reference,
    run,
)


@pytest.mark.parametrize(
    "settings", [{}, {"num_iterations": 2}, {"beta": 0.1}, {"mask_truncated_completions": True}], ids=str
)
def test_sampling_included_the_run_is_trls_step_for_step(settings, tmp_path):
    settings = {"max_steps": 3, "learning_rate": 0.1, "max_completion_length": 16, **settings}
    runs = []
    for cls in (ScriptedUpdate, ScriptedGRPO):  # in turn: each sets the seed as it is made
        runs.append(cls(model=policy_with_reference(tmp_path), **settings))
        runs[-1].train()
    found, expected = runs
    for ours, trls in zip(found.state.log_history, expected.state.log_history, strict=True):
        # TRL averages metrics over micro-batches, however few tokens one has; all else is the same number.
        for name in trls.keys() - {*TIMED, "entropy", "kl"} - {key for key in trls if key.startswith("clip_ratio")}:
            assert ours[name] == pytest.approx(trls[name], rel=1e-4, abs=1e-6), name
    for step, (ours, trls) in enumerate(zip(found.gradients, expected.gradients, strict=True)):
        assert apart(ours, trls) < 1e-5, step


@pytest.mark.parametrize("num_iterations", [1, 2])
def test_each_optimizer_step_takes_the_rows_that_trl_would_take(num_iterations):
    settings = {"num_microbatches": 2, "steps_per_generation": 4, "num_iterations": num_iterations}
    steps = range(2 * num_iterations)
    script = make_rows(32)
    found, expected = (
        run(cls, script, per_device_train_batch_size=8, max_steps=len(steps), **settings)
        for cls in (ScriptedUpdate, ScriptedGRPO)
    )
    for step in steps:
        window = slice(2 * step, 2 * step + 2)
        assert completions_of(found.microbatches[window]) == completions_of(expected.microbatches[window])


def test_rollouts_made_ahead_of_time_are_of_the_prompts_that_trl_would_take():
    settings = {"num_microbatches": 3, "steps_per_generation": 2, "per_device_train_batch_size": 4, "max_steps": 4}
    found, expected = (run(cls, make_rows(48), **settings).asked for cls in (ScriptedUpdate, ScriptedGRPO))
    assert len(found) == 6
    assert found == expected


@pytest.mark.parametrize("seed", range(4))
def test_no_micro_batch_holds_more_padded_tokens_than_trls_largest(seed):
    script = make_rows(64, seed, longest=200)
    found, expected = (run(cls, script, 4, 8, max_steps=2) for cls in (ScriptedUpdate, ScriptedGRPO))
    assert max(map(padded_tokens, found.microbatches)) <= max(map(padded_tokens, expected.microbatches))
    assert sum(map(padded_tokens, found.microbatches)) < 0.6 * sum(map(padded_tokens, expected.microbatches))


def test_columns_honour_pad_to_multiple_of():
    trainer = run(ScriptedUpdate, [replace(row, completion=row.completion[:7]) for row in ROWS], 4)
    assert any(microbatch["completion_ids"].size(1) % 4 for microbatch in trainer.microbatches)
    rows = make_rows(16, longest=20)
    # The rollout itself is padded to a multiple by TRL.
    rows[0] = Row(list(range(3, 15)), list(range(3, 23)), 1.0)
    trainer = run(ScriptedUpdate, rows, 4, pad_to_multiple_of=4)
    for microbatch in trainer.microbatches:
        assert microbatch["prompt_ids"].size(1) % 4 == microbatch["completion_ids"].size(1) % 4 == 0


def test_what_a_callback_changes_holds_from_the_next_window():
    class FromStepOne(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            trainer.pad_to_multiple_of = 16

    rows = [Row(list(range(3, 8)), [9] * 6, 1.0) for _ in range(16)]
    trainer = ScriptedUpdate(rows, per_device_train_batch_size=8, gradient_accumulation_steps=1, max_steps=2)
    trainer.add_callback(FromStepOne())
    trainer.train()
    assert [batch["completion_ids"].size(1) for batch in trainer.microbatches] == [6, 16]


def test_a_quantile_over_the_micro_batch_keeps_trls_micro_batches():
    settings = {"num_microbatches": 4, "top_entropy_quantile": 0.3}
    found, expected = (run(cls, ROWS, **settings) for cls in (ScriptedUpdate, ScriptedGRPO))
    assert apart(found.gradients[0], expected.gradients[0]) < 1e-5
    for ours, trls in zip(found.microbatches, expected.microbatches, strict=True):
        assert completions_of([ours]) == completions_of([trls])
        assert padded_tokens(ours) <= padded_tokens(trls)

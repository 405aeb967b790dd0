# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The window: which rows a step takes in one process and in two, how they are divided, and what a checkpoint keeps."""

from dataclasses import replace

import pytest
from transformers import TrainerCallback
from update_helpers import (
    CASES,
    OTHER_LOSSES,
    ROWS,
    SAMPLED,
    TIMED,
    Row,
    ScriptedGRPO,
    ScriptedUpdate,
    apart,
    completions_of,
    make_rows,
    padded_tokens,
    policy_with_reference,
    reference_gradient,
    run,
    two_processes,
)


@pytest.mark.parametrize(
    "settings", [{}, {"num_iterations": 2}, {"beta": 0.1}, {"mask_truncated_completions": True}], ids=str
)
def test_sampling_included_the_run_is_trls_step_for_step(settings, tmp_path):
    settings = {"max_steps": 3, "learning_rate": 0.1, "max_completion_length": 16, **settings}
    runs = []
    for cls in (ScriptedUpdate, ScriptedGRPO):  # one after the other, since creating each sets the seed
        runs.append(cls(model=policy_with_reference(tmp_path), **settings))
        runs[-1].train()
    found, expected = runs
    for ours, trls in zip(found.state.log_history, expected.state.log_history, strict=True):
        # TRL averages metrics over micro-batches, however few tokens one has. All other metrics are the same.
        for name in trls.keys() - {*TIMED, "entropy", "kl"} - {key for key in trls if key.startswith("clip_ratio")}:
            assert ours[name] == pytest.approx(trls[name], rel=1e-4, abs=1e-6), name
    for step, (ours, trls) in enumerate(zip(found.gradients, expected.gradients, strict=True)):
        assert apart(ours, trls) < 1e-5, step


@pytest.mark.parametrize("num_iterations", [1, 2])
def test_each_optimizer_step_takes_the_rows_that_trl_would_take(num_iterations):
    settings = {"num_microbatches": 2, "steps_per_generation": 4, "num_iterations": num_iterations}
    steps, script = range(2 * num_iterations), make_rows(32)
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


# ---- Two processes, compared with one row at a time and with one process ----


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
    assert sum(lengths[:8]) > 2 * sum(lengths[8:])  # unchanged from when they were sampled
    costs = [rank[case]["costs"] for rank in ranks]
    for ours, theirs in zip(*costs, strict=True):
        assert abs(ours - theirs) < max(lengths) / 2
    assert sum(costs[0]) == pytest.approx(sum(costs[1]), rel=0.1)


def test_both_ranks_log_what_one_process_logs(ranks):
    (alone, *_) = run(ScriptedUpdate, ROWS, 4).state.log_history
    for name in ("loss", "entropy", "num_loss_tokens", "clip_ratio/high_mean", "grad_norm"):
        assert ranks[0]["split (4, 4)"]["logs"][name] == pytest.approx(alone[name], rel=1e-5, abs=1e-7), name

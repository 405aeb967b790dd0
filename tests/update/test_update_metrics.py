# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The metrics of an optimizer step and of an evaluation."""

from dataclasses import replace

import pytest
import torch
from accelerate import Accelerator
from transformers import TrainerCallback
from update_helpers import (
    ROWS,
    TIMED,
    Row,
    ScriptedGRPO,
    ScriptedUpdate,
    collate,
    logs_of,
    make_rows,
    mask,
    passes_without_gradient,
    run,
    training,
)

from trl_dapo.update.step_metrics import StepMetrics, metrics_of_tokens


def test_padding_share_is_logged():
    # Two rows per micro-batch, of 1 + 1 and of 1 + 4 prompt and completion tokens: 4 + 10 tokens, no padding.
    one, four = Row([5], [6], 1.0), Row([5], [6, 7, 8, 9], -1.0)
    assert run(ScriptedUpdate, [one, four, one, four], 2).state.log_history[0]["padding_share"] == 0.0
    # All in one micro-batch: 4 x 5 = 20 padded tokens, 6 of them padding.
    trainer = run(ScriptedUpdate, [one, four, one, four], 1)
    assert trainer.state.log_history[0]["padding_share"] == pytest.approx(6 / 20)
    assert trainer._cached_packer.has_own_rows


def test_metrics_leave_completions_without_a_token_out():
    rows = mask(ROWS, range(8, 16))
    found, expected = run(ScriptedUpdate, rows, 4), run(ScriptedUpdate, rows[:8], 4)
    for name in ("loss", "entropy", "num_loss_tokens", "clip_ratio/low_min", "clip_ratio/high_max"):
        assert found.state.log_history[0][name] == pytest.approx(expected.state.log_history[0][name], rel=1e-5), name


def with_ratios(rows, ratios):
    """Return `rows` with old log-probabilities for which the policy has these ratios."""
    trainer, rollout = training(), collate(rows)
    logps, *_ = passes_without_gradient(trainer, rollout)
    return [
        replace(row, old=(logps[i, : len(row.completion)] - torch.tensor(ratios[i]).log()).tolist())
        for i, row in enumerate(rows)
    ]


def test_clip_ratios_are_shares_of_the_optimizer_steps_tokens():
    rows = [Row([5, 6], [7] * n, advantage) for n, advantage in [(6, 1.0), (2, -1.0), (1, -1.0), (1, 1.0)]]
    rows = with_ratios(rows, [[2.0, 2.0, 2.0, 1.0, 1.0, 1.0], [0.5, 1.0], [20.0], [1.0]])
    log = run(ScriptedUpdate, rows, 2, delta=10.0).state.log_history[0]
    # 10 tokens: three good ones above 1.28, one bad one below 0.8, one bad one above 10.
    assert log["clip_ratio/high_mean"] == pytest.approx(0.3)
    assert log["clip_ratio/low_mean"] == pytest.approx(0.1)
    assert log["clip_ratio/region_mean"] == pytest.approx(0.4)
    assert log["clip_ratio/dual_mean"] == pytest.approx(0.1)
    assert log["clip_ratio/high_max"] == pytest.approx(3 / 6)  # of the first completion
    assert log["clip_ratio/low_min"] == 0.0


def test_the_least_clipped_completion_is_one_that_has_tokens():
    rows = with_ratios([Row([5], [7, 8], -1.0)] * 4, [[0.5, 1.0], [0.5, 0.5], [0.5, 1.0], [1.0, 1.0]])
    log = run(ScriptedUpdate, mask(rows, [3]), 2).state.log_history[0]
    assert log["clip_ratio/low_min"] == pytest.approx(1 / 2)
    assert log["clip_ratio/low_mean"] == pytest.approx(4 / 6)


def test_clipped_tokens_are_told_by_how_many_rollouts_old_their_rows_are():
    step_metrics, ones = StepMetrics(), torch.ones(3, 2)
    high = torch.tensor([[1.0, 0.0], [0.0, 0.0], [1.0, 1.0]])
    step_metrics.add_tokens(ones, ones, (0 * ones, high, 0 * ones), staleness=torch.tensor([0, 0, 2]))
    metrics = metrics_of_tokens(step_metrics.reduce(Accelerator(cpu=True)))
    assert {name[-1]: value for name, value in metrics.items() if "staleness" in name} == {"0": 1 / 4, "2": 2 / 2}


def test_evaluation_is_trls():
    found, expected = (
        cls(per_device_eval_batch_size=4, max_completion_length=16).evaluate()
        for cls in (ScriptedUpdate, ScriptedGRPO)
    )
    shared = {name for name in expected if not name.endswith(("time", "per_second"))}
    assert {"eval_loss", "eval_entropy", "eval_reward"} <= shared
    for name in shared:
        assert found[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-7), name


class EvaluatesAfterEachMicroBatch(TrainerCallback):
    def __init__(self):
        self.logged = []

    def on_substep_end(self, args, state, control, **kwargs):
        random_state = torch.get_rng_state()
        self.logged.append(self.trainer.evaluate())
        torch.set_rng_state(random_state)


@pytest.mark.parametrize("budget", [None, 60])
def test_an_evaluation_between_two_micro_batches_counts_its_own_tokens_and_none_of_the_steps(budget):
    evaluates, runs = EvaluatesAfterEachMicroBatch(), []
    settings = {"max_steps": 2, "max_completion_length": 16, "max_tokens_per_microbatch": budget}
    for callbacks in ([], [evaluates]):
        trainer = evaluates.trainer = ScriptedUpdate(make_rows(32), **settings)
        for callback in callbacks:
            trainer.add_callback(callback)
        trainer.train()
        runs.append([{k: value for k, value in log.items() if k not in TIMED} for log in logs_of(trainer)])
    assert runs[0] == runs[1]
    assert len(evaluates.logged) == 2 * 3  # four micro-batches have three gaps between them
    for log in evaluates.logged:
        # 4 prompts x 2 completions in one batch.
        assert log["eval_num_loss_tokens"] == 8 * log["eval_completions/mean_length"]

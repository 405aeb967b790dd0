# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The update phase, held against TRL's own loss, against one row at a time, and against itself on two processes."""

import ast
import inspect
import textwrap
from dataclasses import replace

import pytest
import torch
from _update_helpers import (
    CASES,
    ROWS,
    SPLITS,
    Row,
    ScriptedGRPO,
    ScriptedUpdate,
    apart,
    collate,
    gradient,
    make_rows,
    mask,
    old,
    padded_tokens,
    reference_gradient,
    run,
    tiny_policy,
    two_processes,
)
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from trl import GRPOTrainer

from trl_dapo import DAPOTrainer
from trl_dapo.update import UpdatePhase


# ---- The exact token mean ----


@pytest.mark.parametrize("split", [*SPLITS, (16, 16)], ids=str)
def test_the_same_rows_give_the_same_gradient_for_every_split(split):
    trainer = run(ScriptedUpdate, ROWS, *split)
    assert apart(trainer.gradients[0], reference_gradient(ROWS)) < 1e-6
    assert len(trainer.microbatches) == split[0]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return two_processes(tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("case", CASES)
def test_two_processes_give_the_gradient_of_one_row_at_a_time(ranks, case):
    rows, _ = CASES[case]
    expected = reference_gradient(rows)
    for rank in ranks:
        assert apart(rank[case]["gradient"], expected) < 1e-6


@pytest.mark.parametrize("case", ["a single token", "one long row"])
def test_one_process_gives_the_gradient_of_one_row_at_a_time(case):
    rows, split = CASES[case]
    assert apart(run(ScriptedUpdate, rows, *split).gradients[0], reference_gradient(rows)) < 1e-6


def test_each_optimizer_step_divides_by_its_own_tokens():
    trainer = run(ScriptedUpdate, make_rows(32), num_microbatches=2, steps_per_generation=4, max_steps=2)
    tokens = [log["num_loss_tokens"] for log in trainer.state.log_history if "loss" in log]
    assert tokens[0] != tokens[1]
    assert sum(tokens) == sum(len(row.completion) for row in make_rows(32))
    # Weighted with their tokens, the two means are the mean over all of them.
    mean = (tokens[0] * trainer.gradients[0] + tokens[1] * trainer.gradients[1]) / sum(tokens)
    assert apart(mean, reference_gradient(make_rows(32))) < 1e-6


def test_the_shorter_last_step_of_an_epoch_divides_by_its_own_tokens():
    # 64 prompts x 2 completions in rollouts of 2 micro-batches of 8 rows: 16 micro-batches, 3 to an optimizer step.
    script = make_rows(128)
    trainer = ScriptedUpdate(
        script,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=3,
        steps_per_generation=2,
        num_train_epochs=1,
        max_steps=-1,
    )
    trainer.train()
    windows = [trainer.microbatches[start : start + 3] for start in range(0, 24, 3)]
    assert len(windows[-1]) == 1 or len(trainer.microbatches) % 3 == 0
    last = trainer.microbatches[-1]
    assert last["num_items_in_batch"] == last["completion_mask"].sum()

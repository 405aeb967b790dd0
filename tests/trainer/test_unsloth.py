# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Unsloth puts a trainer of its own in the place of TRL's."""

import pytest
import trl
from helpers import prompts, tiny_config

from trl_dapo import DAPOTrainer


class _UnslothGRPOTrainer(trl.GRPOTrainer):
    """As unsloth/models/rl_replacements.py has it: `compute_loss` is another, and never asks for `_compute_loss`."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(inputs["prompt_ids"]).logits.float().mean()


class UnslothGRPOTrainer(_UnslothGRPOTrainer):
    def __init__(self, model, reward_funcs, args=None, train_dataset=None, **kwargs):
        super().__init__(model, reward_funcs, args, train_dataset, **kwargs)


class ImportedAfterwards(DAPOTrainer, UnslothGRPOTrainer):
    """What `DAPOTrainer` is where `unsloth` was imported first: its base is Unsloth's."""


def length(completions, **kwargs):
    return [float(len(completion)) for completion in completions]


def test_over_unsloths_trainer_nothing_of_the_loss_of_dapo_would_be_computed(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr("trl_dapo.construction.check_loss_is_ours", lambda trainer: None)
    asked = []
    args = tiny_config(tmp_path, max_steps=1, loss_type="grpo")
    trainer = ImportedAfterwards(tiny_model, length, args, train_dataset=prompts(8))
    monkeypatch.setattr(trainer, "_compute_loss", lambda *args: asked.append(args))
    trainer.train()
    assert (trainer.state.global_step, asked) == (1, [])


def test_unsloths_trainer_is_refused_as_a_base(tiny_model, tmp_path):
    with pytest.raises(ValueError, match="Unsloth has put `UnslothGRPOTrainer` in the place of TRL's") as error:
        ImportedAfterwards(tiny_model, length, tiny_config(tmp_path), train_dataset=prompts(8))
    assert "Train in a process that does not import `unsloth`" in str(error.value)
    assert "qwen3_4b_qlora_1gpu" in str(error.value)


def test_unsloth_imported_after_this_package_is_refused_too(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(trl, "GRPOTrainer", UnslothGRPOTrainer)  # as `patch_trl_rl_trainers` does
    with pytest.raises(ValueError, match="Unsloth has put `UnslothGRPOTrainer`"):
        DAPOTrainer(tiny_model, length, tiny_config(tmp_path), train_dataset=prompts(8))

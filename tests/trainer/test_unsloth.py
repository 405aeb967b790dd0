# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Unsloth replaces TRL's trainer with its own."""

import pytest
import trl
from helpers import prompts, tiny_config

from trl_dapo import DAPOTrainer


def length(completions, **kwargs):
    return [float(len(completion)) for completion in completions]


class UnslothGRPOTrainer(trl.GRPOTrainer):
    """In unsloth/models/rl_replacements.py `compute_loss` is replaced, and never calls `_compute_loss`."""


class ImportedAfterwards(DAPOTrainer, UnslothGRPOTrainer):
    """`DAPOTrainer` as it would be if `unsloth` was imported first: its base class is Unsloth's."""


def test_unsloths_trainer_is_refused_as_a_base_and_where_it_is_imported_later(tiny_model, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"Unsloth has replaced TRL's .* with `UnslothGRPOTrainer`") as error:
        ImportedAfterwards(tiny_model, length, tiny_config(tmp_path), train_dataset=prompts(8))
    assert "Train in a process that does not import `unsloth`" in str(error.value)
    assert "qwen3_4b_qlora_1gpu" in str(error.value)
    monkeypatch.setattr(trl, "GRPOTrainer", UnslothGRPOTrainer)  # like `patch_trl_rl_trainers`
    with pytest.raises(ValueError, match=r"Unsloth has replaced TRL's .* with `UnslothGRPOTrainer`"):
        DAPOTrainer(tiny_model, length, tiny_config(tmp_path), train_dataset=prompts(8))

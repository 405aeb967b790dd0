# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Warnings at the start of a run."""

import warnings

import pytest
import torch
from helpers import make_trainer, prompts, right, tiny_config
from tiny_models import make_tokenizer
from transformers import TrainerCallback
from transformers.utils import logging
from update_helpers import tiny_policy

from trl_dapo import DAPOTrainer
from trl_dapo.settings.warnings import hide_renaming_warnings, warnings_at_start


CONTEXT = 1024  # tokens, as GPT-2 has


@pytest.fixture
def heard(tmp_path):
    """Return the warnings for a run with some settings."""

    def warn(steps_in_bfloat16=False, **settings):
        return warnings_at_start(tiny_config(tmp_path, **settings), CONTEXT, steps_in_bfloat16)

    return warn


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"learning_rate": 1e-5, "steps_in_bfloat16": True},
        {"learning_rate": 9e-6},
        {"epsilon": 0.3, "epsilon_high": 0.3},
        {"epsilon": 0.3, "epsilon_high": None},
        {"max_completion_length": 1023},
        {"max_completion_length": None, "use_vllm": True},
        {"dynamic_sampling_max_gen_batches": 0},
        {"dynamic_sampling_stop_after": 0},
        {"dynamic_sampling_mode": "mask", "dynamic_sampling_stop_after": 0},
    ],
    ids=str,
)
def test_usual_settings_give_no_warning(heard, settings):
    assert heard(**settings) == []


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"learning_rate": 9e-6, "steps_in_bfloat16": True}, "`learning_rate` is 9e-06"),
        ({"epsilon": 0.3, "epsilon_high": 0.1}, "`epsilon_high` (0.1) is below `epsilon` (0.3): "),
        ({"gradient_accumulation_steps": 1}, "one prompt"),  # 4 rows, 4 completions per prompt
        (
            {"dynamic_sampling_max_gen_batches": 0, "dynamic_sampling_stop_after": 0},
            "together set no limit: if the rewards of no group ever differ, the first rollout never ends",
        ),
        ({"max_completion_length": 1024}, "(1024) leaves no room for a prompt in the model's context of 1024 tokens"),
    ],
)
def test_settings_that_are_probably_not_intended_give_a_warning(heard, settings, said):
    (message,) = heard(**settings)
    assert said in message


PENALTY = "generation_kwargs['presence_penalty']"


@pytest.mark.parametrize(
    ("settings", "said", "way_out"),
    [
        ({"top_k": 20}, "`top_k=20`", "`top_k=0`"),
        ({"top_p": 0.9, "min_p": 0.1}, "`top_p=0.9`, `min_p=0.1`", "`top_p=1.0`, `min_p=None`"),
        ({"repetition_penalty": 1.2}, "`repetition_penalty=1.2`", "`repetition_penalty=1.0`"),
        ({"generation_kwargs": {"presence_penalty": 1.0}}, f"`{PENALTY}=1.0`", f"no `{PENALTY}`"),
    ],
    ids=str,
)
def test_sampling_settings_that_change_the_distribution_give_a_warning_with_advice(heard, settings, said, way_out):
    (message,) = heard(use_vllm=True, **settings)
    assert f"With {said} " in message
    assert message.endswith(f"Set {way_out}.")
    assert heard(use_vllm=True, top_k=-1, top_p=1.0, min_p=0.0, generation_kwargs={"stop": ["\n"]}) == []
    assert heard(**settings) == []  # not with transformers, which has no importance sampling weights


@pytest.mark.parametrize(("mean", "is_warned"), [(0.9, False), (0.89, True)])
def test_importance_weights_with_a_mean_below_0_9_give_one_warning(tiny_model, tmp_path, caplog, mean, is_warned):
    class Weighs(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            trainer._metrics["train"]["sampling/importance_sampling_ratio/mean"] = [mean]

    trainer = make_trainer(tiny_model, tmp_path)
    trainer.add_callback(Weighs())
    type(logging.get_logger()).warning_once.cache_clear()  # another test may have been warned
    trainer.train()
    assert len(trainer.state.log_history) > 1
    said = [record for record in caplog.records if "importance_sampling_ratio/mean` is below 0.9" in record.message]
    assert len(said) == is_warned


@pytest.mark.parametrize(
    ("dtype", "is_frozen", "is_warned"),
    [("bfloat16", False, True), ("float32", False, False), ("bfloat16", True, False)],
)
def test_the_trainer_warns_if_it_updates_weights_in_bfloat16(dtype, is_frozen, is_warned, tmp_path, caplog):
    model = tiny_policy().to(getattr(torch, dtype))
    if is_frozen:
        model.requires_grad_(False)
        model.lm_head.requires_grad_(True)
    args = tiny_config(tmp_path, learning_rate=1e-6)
    DAPOTrainer(model, right, args, train_dataset=prompts(24), processing_class=make_tokenizer())
    assert ("stored in bfloat16" in caplog.text) is is_warned


def test_warnings_of_renamed_arguments_in_trl_are_hidden_and_others_are_not():
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        hide_renaming_warnings()
        for name in ("gradient_checkpointing", "gradient_checkpointing_kwargs", "is_gradient_checkpointing"):
            warnings.warn(f"`{name}` is deprecated and will be removed in v6.", FutureWarning, stacklevel=1)
        warnings.warn("`logging_dir` is deprecated", FutureWarning, stacklevel=1)
    assert [str(warning.message) for warning in heard] == ["`logging_dir` is deprecated"]

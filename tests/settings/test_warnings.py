# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""What a run hears before it begins."""

import warnings

import pytest
import torch
from helpers import make_trainer, prompts, right, tiny_config
from tiny_models import make_tokenizer
from transformers import TrainerCallback
from transformers.utils import logging
from update_helpers import tiny_policy

from trl_dapo import DAPOTrainer
from trl_dapo.settings.warnings import leave_out_renaming_warnings, warnings_at_start


CONTEXT = 1024  # tokens, as GPT-2 has


def test_a_usual_run_is_not_warned_of_anything(tmp_path):
    assert warnings_at_start(tiny_config(tmp_path), CONTEXT, steps_in_bfloat16=False) == []


def test_bfloat16_weights_at_a_small_learning_rate_are_warned_of(tmp_path):
    (message,) = warnings_at_start(tiny_config(tmp_path, learning_rate=9e-6), CONTEXT, steps_in_bfloat16=True)
    assert "`learning_rate` is 9e-06" in message
    for learning_rate, steps_in_bfloat16 in [(1e-5, True), (9e-6, False)]:
        args = tiny_config(tmp_path, learning_rate=learning_rate)
        assert warnings_at_start(args, CONTEXT, steps_in_bfloat16) == []


def test_a_step_of_1e_6_is_lost_in_bfloat16_and_one_of_1e_4_is_not():
    """What the warning says, on a weight of usual size."""
    weight = torch.tensor(0.02, dtype=torch.bfloat16)
    assert weight - 1e-6 == weight
    assert weight - 1e-4 != weight


def test_an_upper_clip_below_the_lower_is_warned_of(tmp_path):
    def said(epsilon_high):
        args = tiny_config(tmp_path, epsilon=0.3, epsilon_high=epsilon_high)
        return warnings_at_start(args, CONTEXT, steps_in_bfloat16=False)

    assert said(0.3) == said(None) == []
    (message,) = said(0.1)
    assert message.startswith("`epsilon_high` (0.1) is below `epsilon` (0.3): ")


def test_a_rollout_of_one_prompt_is_warned_of(tmp_path):
    args = tiny_config(tmp_path, gradient_accumulation_steps=1)  # 4 rows, 4 completions a prompt
    (message,) = warnings_at_start(args, CONTEXT, steps_in_bfloat16=False)
    assert "one prompt" in message


def test_completions_as_long_as_the_context_are_warned_of(tmp_path):
    def said(length):
        args = tiny_config(tmp_path, max_completion_length=length)
        return warnings_at_start(args, CONTEXT, steps_in_bfloat16=False)

    assert said(1023) == said(None) == []
    (message,) = said(1024)
    assert "(1024) leaves no room for a prompt in the model's context of 1024 tokens" in message


@pytest.mark.parametrize(
    ("settings", "said", "way_out"),
    [
        ({"top_k": 20}, "`top_k=20`", "`top_k=0`"),
        ({"top_p": 0.9, "min_p": 0.1}, "`top_p=0.9`, `min_p=0.1`", "`top_p=1.0`, `min_p=None`"),
        ({"repetition_penalty": 1.2}, "`repetition_penalty=1.2`", "`repetition_penalty=1.0`"),
        (
            {"generation_kwargs": {"presence_penalty": 1.0, "stop": ["\n"]}},
            "`generation_kwargs['presence_penalty']=1.0`",
            "no `generation_kwargs['presence_penalty']`",
        ),
        ({"top_k": -1, "top_p": 1.0, "min_p": 0.0}, None, None),
    ],
    ids=str,
)
def test_an_engine_that_samples_a_part_of_the_policy_is_warned_of_with_the_way_out(tmp_path, settings, said, way_out):
    args = tiny_config(tmp_path, use_vllm=True, **settings)
    messages = warnings_at_start(args, CONTEXT, steps_in_bfloat16=False)
    assert [(f"With {said} " in message, message.endswith(f"Set {way_out}.")) for message in messages] == [
        (True, True)
    ] * (said is not None)
    # transformers weighs nothing.
    assert warnings_at_start(tiny_config(tmp_path, **settings), CONTEXT, steps_in_bfloat16=False) == []


@pytest.mark.parametrize(("mean", "is_warned"), [(0.9, False), (0.89, True)])
def test_weights_whose_mean_is_below_0_9_are_warned_of_once(tiny_model, tmp_path, caplog, mean, is_warned):
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
    ("make_model", "is_warned"),
    [
        (lambda: tiny_policy().bfloat16(), True),
        (tiny_policy, False),
        (lambda: freeze_all_but_the_head(tiny_policy().bfloat16()), False),
    ],
    ids=["bfloat16", "float32", "bfloat16, mostly frozen"],
)
def test_the_trainer_warns_of_weights_that_it_steps_in_bfloat16(make_model, is_warned, tmp_path, caplog):
    args = tiny_config(tmp_path, learning_rate=1e-6)
    DAPOTrainer(make_model(), right, args, train_dataset=prompts(24), processing_class=make_tokenizer())
    assert ("held in bfloat16" in caplog.text) is is_warned


def freeze_all_but_the_head(model):
    model.requires_grad_(False)
    model.lm_head.requires_grad_(True)
    return model


def test_warnings_of_names_that_trl_uses_are_left_out_and_others_are_not():
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        leave_out_renaming_warnings()
        for name in ("gradient_checkpointing", "gradient_checkpointing_kwargs", "is_gradient_checkpointing"):
            warnings.warn(f"`{name}` is deprecated and will be removed in v6.", FutureWarning, stacklevel=1)
        warnings.warn("`logging_dir` is deprecated", FutureWarning, stacklevel=1)
    assert [str(warning.message) for warning in heard] == ["`logging_dir` is deprecated"]


def test_filters_that_a_callback_sets_outlive_training(tiny_model, tmp_path):
    class Quiet(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            warnings.filterwarnings("ignore", "what a callback leaves out")

    with warnings.catch_warnings(record=True) as heard:
        trainer = make_trainer(tiny_model, tmp_path, max_steps=1, skip_preflight=True)
        trainer.add_callback(Quiet())
        trainer.train()
        warnings.warn("what a callback leaves out", stacklevel=1)
    assert "what a callback leaves out" not in [str(warning.message) for warning in heard]

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""What the configs of well-known models say of positions and context, and what a run hears before it begins."""

import pytest
import torch
from helpers import prompts, tiny_config
from transformers import (
    Gemma3TextConfig,
    GPT2Config,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    Ministral3Config,
    Phi3Config,
    Qwen3Config,
)
from update_helpers import ScriptedUpdate, tiny_policy

from trl_dapo import DAPOTrainer
from trl_dapo.models import context_length, has_rotary_positions, why_positions_are_absolute
from trl_dapo.settings.model_checks import telling_a_missing_folder, warnings_at_start


NOT_REACHED = "We couldn't connect to 'https://huggingface.co' to load the files"


def test_a_model_that_is_not_found_is_said_to_be_no_folder():
    said = r"^`outputs/modle` is no folder here\. We couldn't connect to "
    with pytest.raises(OSError, match=said), telling_a_missing_folder("outputs/modle"):
        raise OSError(NOT_REACHED)
    said = "^`/nowhere/modle` is no folder here, and no name of a model"
    with pytest.raises(FileNotFoundError, match=said), telling_a_missing_folder("/nowhere/modle"):
        raise AssertionError("not even asked for")


def test_a_reward_model_that_is_not_found_is_told_beside_the_model_that_is(tmp_path):
    with (
        pytest.raises(OSError, match=r"^`accuracy_reward` is no folder here\. We couldn't connect"),
        telling_a_missing_folder(str(tmp_path), "accuracy_reward", len),
    ):
        raise OSError(NOT_REACHED)
    with (
        pytest.raises(OSError, match=r"^`a/modle` and `rewrad` are no folders here\. We couldn't connect"),
        telling_a_missing_folder("a/modle", "rewrad"),
    ):
        raise OSError(NOT_REACHED)


def test_other_errors_are_left_as_they_are(tmp_path):
    for model, error in ((str(tmp_path), NOT_REACHED), ("outputs/modle", "No space left on device"), (None, "x")):
        with pytest.raises(OSError, match=f"^{error}"), telling_a_missing_folder(model):
            raise OSError(error)


def test_the_trainer_says_so_of_its_model(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"^`/nowhere/rewrad` is no folder here"):
        DAPOTrainer("outputs/modle", "/nowhere/rewrad", tiny_config(tmp_path), train_dataset=prompts(4))
    with pytest.raises(OSError, match=r"^`outputs/modle` is no folder here\. "):
        DAPOTrainer("outputs/modle", lambda **kwargs: [], tiny_config(tmp_path), train_dataset=prompts(4))


def llama(**rope):
    return LlamaConfig(max_position_embeddings=4096, rope_parameters={"rope_theta": 10000.0, **rope})


YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}
FACTORS = {"short_factor": [1.0] * 48, "long_factor": [2.0] * 48, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("config", "is_rotary", "reason"),
    [
        (Qwen3Config(), True, None),
        (Qwen3Config(rope_parameters=YARN), True, None),
        (Gemma3TextConfig(), True, None),  # rope parameters for each type of layer
        (llama(rope_type="dynamic", factor=2.0), True, "'dynamic'"),
        (Phi3Config(rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, **FACTORS}), True, "'longrope'"),
        (Llama4TextConfig(), True, "attn_temperature_tuning"),
        (Llama4TextConfig(attn_temperature_tuning=False), True, None),
        (Ministral3Config(), True, "llama_4_scaling_beta"),
        (GPT2Config(), False, None),  # only a pass of the model tells
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_a_config_says_whether_its_rotary_positions_are_absolute(config, is_rotary, reason):
    assert has_rotary_positions(config) is is_rotary
    found = why_positions_are_absolute(config)
    assert found is None if reason is None else reason in found


@pytest.mark.parametrize(
    ("config", "length"),
    [
        (Qwen3Config(max_position_embeddings=40960), 40960),
        (Qwen3Config(max_position_embeddings=40960, rope_parameters=YARN), 4 * 32768),
        (llama(rope_type="linear", factor=2.0), 8192),
        (GPT2Config(), 1024),
        (MambaConfig(), None),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_the_context_is_what_the_config_names_with_its_rope_scaling(config, length):
    assert context_length(config) == length


def test_a_usual_run_is_not_warned_of_anything(tmp_path):
    assert warnings_at_start(tiny_config(tmp_path), GPT2Config(), steps_in_bfloat16=False) == []


def test_bfloat16_weights_at_a_small_learning_rate_are_warned_of(tmp_path):
    (message,) = warnings_at_start(tiny_config(tmp_path, learning_rate=9e-6), GPT2Config(), steps_in_bfloat16=True)
    assert "`learning_rate` is 9e-06" in message
    for learning_rate, steps_in_bfloat16 in [(1e-5, True), (9e-6, False)]:
        args = tiny_config(tmp_path, learning_rate=learning_rate)
        assert warnings_at_start(args, GPT2Config(), steps_in_bfloat16) == []


def test_a_step_of_1e_6_is_lost_in_bfloat16_and_one_of_1e_4_is_not():
    """What the warning says, on a weight of usual size."""
    weight = torch.tensor(0.02, dtype=torch.bfloat16)
    assert weight - 1e-6 == weight
    assert weight - 1e-4 != weight


def test_an_upper_clip_below_the_lower_is_warned_of(tmp_path):
    def said(epsilon_high):
        args = tiny_config(tmp_path, epsilon=0.3, epsilon_high=epsilon_high)
        return warnings_at_start(args, GPT2Config(), steps_in_bfloat16=False)

    assert said(0.3) == said(None) == []
    (message,) = said(0.1)
    assert message.startswith("`epsilon_high` (0.1) is below `epsilon` (0.3): ")


def test_a_rollout_of_one_prompt_is_warned_of(tmp_path):
    args = tiny_config(tmp_path, gradient_accumulation_steps=1)  # 4 rows, 4 completions a prompt
    (message,) = warnings_at_start(args, GPT2Config(), steps_in_bfloat16=False)
    assert "one prompt" in message


def test_completions_as_long_as_the_context_are_warned_of(tmp_path):
    def said(length):
        args = tiny_config(tmp_path, max_completion_length=length)
        return warnings_at_start(args, GPT2Config(), steps_in_bfloat16=False)

    assert said(1023) == said(None) == []
    (message,) = said(1024)
    assert "(1024) leaves no room for a prompt in the model's context of 1024 tokens" in message


@pytest.mark.parametrize(
    ("make_model", "is_warned"),
    [
        (lambda: tiny_policy().bfloat16(), True),
        (tiny_policy, False),
        (lambda: freeze_all_but_the_head(tiny_policy().bfloat16()), False),
    ],
    ids=["bfloat16", "float32", "bfloat16, mostly frozen"],
)
def test_the_trainer_warns_of_weights_that_it_steps_in_bfloat16(make_model, is_warned, caplog):
    ScriptedUpdate(model=make_model(), learning_rate=1e-6)
    assert ("held in bfloat16" in caplog.text) is is_warned


def freeze_all_but_the_head(model):
    model.requires_grad_(False)
    model.lm_head.requires_grad_(True)
    return model

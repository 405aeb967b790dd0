# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The source of a model's sizes, and whether they are those of the model itself."""

import json
import threading

import huggingface_hub
import pytest
import torch
from plan_helpers import SMALL
from transformers import AutoConfig, AutoModelForCausalLM

from trl_dapo.plan.memory import Adapter
from trl_dapo.plan.planning import PUBLISHED, find_shape, shape_of


def test_weights_are_counted_by_hand():
    # A layer: queries 4 x 6, keys and values 2 x 4 x 3, output 6 x 4, MLP 3 x 4 x 5 = 132.
    assert SMALL.num_linear == 2 * 132
    # Two norms a layer and one at the end, embedding and output layer.
    assert SMALL.num_parameters == 264 + 5 * 4 + 2 * 7 * 4
    assert SMALL.kv_bytes == 2 * 2 * 2 * 3
    # Rank 2 on queries, 2 x (4 + 6), and values, 2 x (4 + 3), in two layers.
    assert Adapter(2, ("q_proj", "v_proj")).num_lora(SMALL) == 2 * 2 * (10 + 7)


@pytest.mark.parametrize(
    "family",
    [
        {"model_type": "llama"},
        {"model_type": "qwen2"},
        {"model_type": "qwen3", "head_dim": 16},
        {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
        {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
        {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
        {"model_type": "gemma2", "head_dim": 16},  # none of the counted ones: built on the meta device
    ],
    ids=lambda family: "_".join(map(str, family.values())),
)
def test_weights_counted_from_a_config_are_those_of_the_model(family):
    config = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    config |= {"num_key_value_heads": 2, "vocab_size": 128, "tie_word_embeddings": False, **family}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    assert shape_of(config).num_parameters == sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize(
    ("model", "num_parameters"),  # as the hub's pages of their files say
    [
        ("HuggingFaceTB/SmolLM2-135M", 134_515_008),
        ("Qwen/Qwen2.5-32B", 32_763_876_352),
        ("Qwen/Qwen2.5-VL-7B", 8_292_166_656),
        ("Qwen/Qwen3-1.7B", 1_720_574_976),
    ],
)
def test_the_table_holds_the_sizes_that_were_published(model, num_parameters):
    assert shape_of(PUBLISHED[model]).num_parameters == num_parameters


def test_a_config_is_taken_from_a_folder_else_from_the_table(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**PUBLISHED["Qwen/Qwen3-4B"], "num_hidden_layers": 1}))
    shape, source = find_shape(str(tmp_path))
    assert (shape.num_layers, source) == (1, str(tmp_path / "config.json"))
    for name in ("Qwen/Qwen3-4B-Base", "models/Qwen3-4B-32k", "/nowhere/Qwen3-4B"):
        shape, source = find_shape(name)
        assert (shape.num_layers, source) == (36, "trl-dapo's table, as published for Qwen/Qwen3-4B")
    with pytest.raises(ValueError, match="The config of Qwen/Qwen3-40B was not found"):
        find_shape("Qwen/Qwen3-40B")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="has no 'hidden_size'"):
        find_shape(str(tmp_path))


LLAMA = {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 2, "head_dim": 4}
LLAMA |= {"vocab_size": 7, "intermediate_size": 5}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "does not contain a JSON object"),
        ("{", "is not JSON"),
        ('{"model_type": "llama", "hidden_size": 8}', "has no 'num_attention_heads'"),
        ('{"model_type": "deepseek_v3", "kv_lora_rank": 512}', "compresses its keys and values"),
        (json.dumps({**LLAMA, "hidden_size": "8"}), "sizes that are not positive numbers"),
    ],
)
def test_a_config_that_says_no_sizes_is_refused(tmp_path, text, message):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        find_shape(str(tmp_path))


def test_a_hub_that_answers_is_believed_over_the_table_and_one_that_does_not_is_not_waited_for(monkeypatch, tmp_path):
    asked, never = [], threading.Event()

    def hang(name, file, **kwargs):
        asked.append(name)
        never.wait()

    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr("trl_dapo.plan.planning.HUB_SECONDS", 0.01)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hang)
    assert find_shape("Qwen/Qwen3-4B")[1].startswith("trl-dapo's table")
    assert asked == ["Qwen/Qwen3-4B"]
    never.set()
    (tmp_path / "config.json").write_text(json.dumps({**PUBLISHED["Qwen/Qwen3-4B"], "num_hidden_layers": 1}))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *args, **kwargs: str(tmp_path / "config.json"))
    monkeypatch.setattr("trl_dapo.plan.planning.HUB_SECONDS", 60)
    shape, source = find_shape("Qwen/Qwen3-4B")
    assert (shape.num_layers, source) == (1, "the hub's config.json")

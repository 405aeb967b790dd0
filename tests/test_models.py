# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Positions and context lengths in the configs of well-known models, and the cost of their attention."""

from types import SimpleNamespace

import pytest
from transformers import (
    CONFIG_MAPPING,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GPT2Config,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    Ministral3Config,
    Phi3Config,
    Qwen3Config,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from trl_dapo.models import (
    ModelShape,
    attention_cost_of,
    context_length,
    has_plain_attention,
    why_positions_are_absolute,
)


def llama(**rope):
    return LlamaConfig(max_position_embeddings=4096, rope_parameters={"rope_theta": 10000.0, **rope})


YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}
FACTORS = {"short_factor": [1.0] * 48, "long_factor": [2.0] * 48, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("config", "is_plain", "reason"),
    [
        (Qwen3Config(), True, None),
        (Qwen3Config(rope_parameters=YARN), True, None),
        (Gemma3TextConfig(), True, None),  # rope parameters for each type of layer
        (llama(rope_type="dynamic", factor=2.0), True, "'dynamic'"),
        (Phi3Config(rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, **FACTORS}), True, "'longrope'"),
        (Llama4TextConfig(), True, "attn_temperature_tuning"),
        (Llama4TextConfig(attn_temperature_tuning=False), True, None),
        (Ministral3Config(), True, "llama_4_scaling_beta"),
        (GPT2Config(), False, None),  # only a pass through the model shows it
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_a_config_says_whether_its_rotary_positions_are_absolute(config, is_plain, reason):
    assert has_plain_attention(config) is is_plain
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


# The cost of attention


FULL, SLIDING = ["full_attention"], ["sliding_attention"]


def test_attention_beside_the_weights_of_qwen3_4b():
    # Weights by which a token is multiplied: 36 x (2560 x 128 x (32 + 8) x 2 + 3 x 2560 x 9728) + 2560 x 151936 =
    # 4,022,272,000. Pairs: 2 x 36 x 32 x 128 = 294,912.
    expected = 294_912 / 4_022_272_000
    assert ModelShape(2560, 36, 32, 8, 128, 151_936, 9728).attention_cost == pytest.approx(expected, rel=1e-12)
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    sizes = {"hidden_size": 2560, "num_hidden_layers": 36, "intermediate_size": 9728, "vocab_size": 151936}
    assert attention_cost_of(Qwen3Config(**heads, **sizes)) == pytest.approx(expected, rel=1e-12)


def test_experts_count_as_far_as_a_token_passes_them():
    # Per layer: attention 8 x 2 x 2 x (2 + 2) = 128; two experts of 3 x 8 x 5 = 120 and one shared of width 10: 240.
    # One layer and a vocabulary of 10: 128 + 480 + 80 = 688. Pairs: 2 x 1 x 2 x 2 = 8.
    numbers = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 2, "intermediate_size": 999}
    numbers |= {"hidden_size": 8, "num_hidden_layers": 1, "vocab_size": 10}
    numbers |= {"num_experts_per_tok": 2, "moe_intermediate_size": 5}
    assert attention_cost_of(SimpleNamespace(**numbers, shared_expert_intermediate_size=10)) == 8 / 688
    assert attention_cost_of(SimpleNamespace(**numbers, n_shared_experts=2)) == 8 / 688
    assert attention_cost_of(SimpleNamespace(**numbers)) == 8 / 448


def test_where_layers_differ_the_first_that_sees_its_whole_row_speaks_for_them():
    # 26 layers, of which every second has full attention: 2 x 13 x 8 heads x 4 = 832 pairs. Weights: 26 x (attention
    # 16 x 4 x 2 x (8 + 2) = 1,280 and 3 x 16 x 30 = 1,440) and 16 x 10: 70,880.
    numbers = {"hidden_size": 16, "num_hidden_layers": 26, "num_key_value_heads": 2, "head_dim": 4, "vocab_size": 10}
    layer_types, heads, widths = (SLIDING + FULL) * 13, [2, 8] * 13, [20, 30] * 13
    lists = {"layer_types": layer_types, "num_attention_heads": heads, "intermediate_size": widths}
    assert attention_cost_of(SimpleNamespace(**numbers, **lists)) == 832 / 70_880
    # Gemma 4 has one config per layer for what differs: 5 of 30 layers have full attention, with heads of 512, not
    # 256. Weights: 30 x (2304 x 512 x 2 x (8 + 4) + 3 x 2304 x 9216) + 2304 x 262144 = 3,364,356,096.
    assert attention_cost_of(Gemma4TextConfig()) == 2 * 5 * 8 * 512 / 3_364_356_096


def test_the_cost_of_no_causal_model_of_transformers_is_an_error():
    found, left_out = {}, []
    for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            config = CONFIG_MAPPING[name]()
        except Exception:
            left_out.append(name)
            continue
        found[name] = attention_cost_of(config.get_text_config(decoder=True))
    assert {*left_out} <= {"gemma4_assistant", "musicgen", "musicgen_melody"}  # these cannot be created with defaults
    assert len(found) > 170
    assert {name: cost for name, cost in found.items() if not 0 <= cost < 1e-3} == {}
    assert found["mamba"] == 0  # without attention
    assert min(found["gemma3n"], found["falcon_h1"]) > 0  # the layers of the latter combine attention with a state
    assert found.get("dots3_note", 0.0) == 0.0  # its layers attend to a window, or to tokens that an index selects

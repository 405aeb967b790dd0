# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Bytes, by hand."""

import dataclasses

import pytest
from plan_helpers import GIB, SMALL

from trl_dapo.plan import memory
from trl_dapo.plan.memory import Adapter, activation_bytes, backward_bytes, layer_bytes, quantized_bytes, state_bytes
from trl_dapo.plan.recipe import Sharding


pytestmark = pytest.mark.fast


def test_the_optimizer_takes_two_moments_as_precise_as_the_weight_or_of_eight_bits():
    taken = {"adamw_torch_fused": 8, "adamw_torch": 8, "paged_adamw_8bit": 2 + 8 / 256, "sgd": 0}
    assert {name: memory.optimizer_bytes(name, 4) for name in taken} == taken
    assert memory.optimizer_bytes("adamw_torch", 2) == 4
    with pytest.raises(ValueError, match="`optim: adafactor`"):
        memory.optimizer_bytes("adafactor", 4)


@pytest.mark.parametrize(
    ("kind", "trained", "weights", "gradients", "optimizer"),  # bytes a weight, on 4 GPUs
    [
        ("none", 4, 4, 4, 8),
        ("ddp", 4, 4, 8, 8),  # gradients a second time, in DDP's buckets
        ("fsdp2", 4, 1, 1, 2),
        ("zero1", 2, 2, 2, 3),  # a copy in float32 and two moments: 12
        ("zero2", 2, 2, 0.5, 3),
        ("zero3", 2, 0.5, 0.5, 3),
    ],
)
def test_sharding_cuts_what_zero_says_it_cuts(kind, trained, weights, gradients, optimizer):
    found = state_bytes(0.0, 1000, trained, "adamw_torch", Sharding(kind), num_gpus=4, accumulates=False)
    assert found == {"weights": 1000 * weights, "gradients": 1000 * gradients, "optimizer": 1000 * optimizer}


def test_frozen_weights_have_neither_gradient_nor_state_and_fsdp2_accumulates_whole_gradients():
    found = state_bytes(600.0, 10, 4, "adamw_torch", Sharding("none"), num_gpus=1, accumulates=True)
    assert found == {"weights": 640, "gradients": 40, "optimizer": 80}
    found = state_bytes(600.0, 10, 4, "adamw_torch", Sharding("fsdp2"), num_gpus=2, accumulates=True)
    assert found == {"weights": 320, "gradients": 20 + 2 * 10, "optimizer": 40}
    offloaded = Sharding("zero3", offloads_optimizer=True, offloads_weights=True)
    found = state_bytes(0.0, 100, 2, "adamw_torch", offloaded, num_gpus=2, accumulates=True)
    assert found == {"weights": 0, "gradients": 0, "optimizer": 0}


def test_a_quantized_model_has_its_scales():
    rest = 2 * (340 - 264)
    assert quantized_bytes(SMALL, 4, nested=False, held=2) == 264 / 2 + 4 * 264 / 64 + rest
    assert quantized_bytes(SMALL, 4, nested=True, held=2) == 264 / 2 + (1 + 4 / 256) * 264 / 64 + rest
    # 8 bits: 4 bytes for each row: 6 + 3 + 3 + 4 + 5 + 5 + 4 a layer.
    assert quantized_bytes(SMALL, 8, nested=False, held=2) == 264 + 4 * 2 * 30 + rest


def test_what_a_layer_keeps_of_a_token_by_hand():
    # Norms: 4 and 2 bytes of 4 numbers and a mean of 4, twice: 56. Read by five layers, once for three and once for
    # two: 2 x 2 x 4 = 16. Queries, output and, with a mask, keys and values for each query head: 2 x 4 x 6 = 48, and
    # 4 for each of 2 heads. The MLP: 4 x 2 x 5 = 40.
    assert layer_bytes(SMALL, held=2, computed=2) == 56 + 16 + 48 + 8 + 40
    # Flash attention has one key head for both: 2 x (2 x 6 + 2 x 3) = 36.
    assert layer_bytes(SMALL, held=2, computed=2, attention="flash_attention_2") == 56 + 16 + 36 + 8 + 40
    # Under autocast the norms pass on float32, and each of the five layers makes a copy.
    assert layer_bytes(SMALL, held=4, computed=2) == 2 * (16 + 16 + 4) + 5 * 2 * 4 + 48 + 8 + 40
    # Normalized queries and keys: 4 + 2 bytes of 6 + 3 numbers, and 4 for each of 3 heads.
    assert layer_bytes(dataclasses.replace(SMALL, has_qk_norm=True), held=2, computed=2) == 168 + 6 * 9 + 12
    # An adapter on the output projection: what it reads, 6 numbers, and the rank, 2. Frozen layers keep no input.
    adapted = layer_bytes(SMALL, held=2, computed=2, adapter=Adapter(2, ("o_proj",)))
    assert adapted == 2 * (16 + 4) + 48 + 8 + 3 * 2 * 5 + 2 * (6 + 2)
    scores = {"eager": 10 * 2 * 6, "sdpa": 10 * 3, "flash_attention_2": 0}
    assert {kind: memory.score_bytes(SMALL, row=10, computed=2, attention=kind) for kind in scores} == scores


def test_a_micro_batch_at_its_fullest_by_hand():
    wide = dataclasses.replace(SMALL, vocab_size=100_000)
    options = {"tokens": 50, "row": 10, "held": 4, "computed": 2, "attention": "flash_attention_2"}
    last = 50 * 4 * (4 + 4 + 4)
    kept = activation_bytes(wide, checkpointing=True, **options)
    assert kept["activations"] == 2 * 50 * 4 * 4 + last
    # A tile of 50 x 32,768 in bfloat16, and 32,768 x 4 of the weight; the gradients of 50 x 4 and 100,000 x 4.
    assert kept["work"] == 2 * 32_768 * (50 + 4) + 4 * 50 * 4 + 4 * 400_000
    # Without checkpointing both layers keep everything, and autocast's copies of 264 weights stay.
    kept = activation_bytes(wide, checkpointing=False, **options)
    assert kept["activations"] == 2 * 50 * layer_bytes(wide, 4, 2, "flash_attention_2") + 2 * 264 + last
    # Before TRL 1.16: all logits, four times.
    logits = activation_bytes(wide, checkpointing=True, fused_head=False, **options)["work"]
    assert logits == 2 * 100_000 * (4 * 50 + 4) + 4 * 50 * 4 + 4 * 400_000
    # With many layers autocast's copies count, which stay to the end of the forward pass.
    deep = dataclasses.replace(SMALL, num_layers=10_000)
    tile = 2 * (50 * 32_768 + 7 * 4)
    assert activation_bytes(deep, checkpointing=True, **options)["work"] == tile + 2 * 132 * 10_000
    # With a wide MLP its backward pass counts: the layer is computed again, and the gradient that waits for the
    # embedding's.
    broad = dataclasses.replace(SMALL, intermediate_size=10**6, is_tied=True)
    layer = 50 * layer_bytes(broad, 4, 2, "flash_attention_2") + backward_bytes(broad, 50, held=4, computed=2)
    assert activation_bytes(broad, checkpointing=True, **options)["work"] == layer + 4 * 28
    # 3 x 2 x 50 x 5 of the MLP; the largest weight, 4 x 6, as computed and as held.
    assert backward_bytes(wide, 50, held=4, computed=2) == 1500 + 6 * 24


EXPERTS = dataclasses.replace(SMALL, num_experts=8, num_active_experts=2)  # 8 x 3 x 4 x 5 weights in each of 2 layers


def test_experts_are_not_quantized():
    attention = 2 * (2 * 4 * 6 + 2 * 4 * 3)
    rest = 2 * (EXPERTS.num_parameters - attention)
    assert quantized_bytes(EXPERTS, 4, nested=False, held=2) == attention / 2 + 4 * attention / 64 + rest
    assert quantized_bytes(EXPERTS, 8, nested=False, held=2) == attention + 4 * 2 * (6 + 3 + 3 + 4) + rest


def test_dora_by_hand():
    # A magnitude for each output; a unit matrix of 5 in 2 bytes and four matrices of 5 x 4 in float32.
    dora = Adapter(2, ("down_proj",), is_dora=True)
    assert dora.num_lora(SMALL) == 2 * (2 * (5 + 4) + 4)
    assert dora.work_bytes(SMALL) == 2 * 5 * 5 + 4 * 4 * 5 * 4


def test_what_is_gathered_and_what_vllm_caches_by_hand():
    # Two layers of 132, embedding and output layer of 28 each in bfloat16, and the latter in float32.
    assert memory.gathered_bytes(SMALL, Sharding("fsdp2"), 4) == 2 * (2 * 132 + 2 * 28) + 4 * 28
    assert memory.gathered_bytes(SMALL, Sharding("fsdp2"), 4, num_copies=2) == 2 * (2 * 132 + 4 * 28) + 4 * 28
    assert memory.gathered_bytes(SMALL, Sharding("zero3"), 2) == 2 * 340 + 1e9
    assert memory.gathered_bytes(SMALL, Sharding("ddp"), 4) == 0
    # Half of 8 GiB, less 2 GiB and 680 bytes; a token's keys and values take 24 bytes; one key head cannot be cut.
    assert memory.vllm_cache_tokens(SMALL, 8 * GIB, 0.5, 1) == (2 * GIB - 680) // 24
    assert memory.vllm_cache_tokens(SMALL, 8 * GIB, 0.5, 2) == (2 * GIB - 340) // 24
    assert memory.vllm_cache_tokens(SMALL, 8 * GIB, 0.1, 1) == 0


def test_a_checkpoint_holds_weights_and_state_once_or_twice():
    def size(kind, frozen=0.0, num=1000, held=4, only_model=False, is_adapter=False):
        given = {"only_model": only_model, "is_adapter": is_adapter}
        return memory.checkpoint_bytes(frozen, num, held, "adamw_torch", Sharding(kind), **given)

    assert (size("none"), size("none", only_model=True), size("fsdp2")) == (12_000, 4_000, 16_000)
    assert size("zero3", held=2) == 2 * 2_000 + 12_000
    assert size("none", frozen=9_999.0, num=10, is_adapter=True) == 120

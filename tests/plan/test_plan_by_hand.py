# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Bytes and seconds, by hand."""

import dataclasses
import math

import pytest
from plan_helpers import GIB, SMALL

from trl_dapo.plan import memory, rollout_cost
from trl_dapo.plan.memory import Adapter, activation_bytes, backward_bytes, layer_bytes, quantized_bytes, state_bytes
from trl_dapo.plan.planning import find_shape
from trl_dapo.plan.recipe import GPU, GPUS, Sharding
from trl_dapo.plan.rollout_cost import Engine, Lengths, expected_rounds, sampling_seconds, training_flops
from trl_dapo.update.microbatches import MAX_PADDING_SHARE


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
    # Of many layers autocast's copies count, which stay to the end of the forward pass.
    deep = dataclasses.replace(SMALL, num_layers=10_000)
    tile = 2 * (50 * 32_768 + 7 * 4)
    assert activation_bytes(deep, checkpointing=True, **options)["work"] == tile + 2 * 132 * 10_000
    # Of a wide MLP its backward pass does, the layer computed again, and the gradient that waits for the embedding's.
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


# 8 bytes/s of which 5.6 are reached, 100 operations/s of which 50 and 31 are.
TOY = GPU("toy", memory=1e6, flops=100.0, bandwidth=8.0, link=10.0)


def toy_engine(**overrides) -> Engine:
    sizes = {"num_gpus": 1, "num_engines": 1, "cache_tokens": 1e9, "max_num_seqs": 1000, "step_seconds": 0.0}
    return Engine(TOY, **{**sizes, **overrides})


def test_lengths_are_flat_where_the_mean_is_half_of_the_longest_and_fall_where_it_is_less():
    flat = Lengths(50, 100)
    assert flat.survival(0.25) == pytest.approx(0.75)
    assert flat.mean_square == pytest.approx(100**2 / 3, rel=1e-3)
    # r = 2: the mean is 1 / 2 - 1 / (e^2 - 1) = 0.343482 of the longest.
    steep = Lengths(34.3482, 100)
    assert steep.rate == pytest.approx(2, abs=1e-4)
    assert steep.survival(0.5) == pytest.approx((math.exp(-1) - math.exp(-2)) / (1 - math.exp(-2)), abs=1e-5)
    # 2 / r^2 - (1 + 2 / r) / (e^r - 1) of the longest squared.
    assert steep.mean_square == pytest.approx(1e4 * (0.5 - 2 / math.expm1(2)), rel=1e-3)


def test_a_decoding_step_reads_weights_and_cache_or_computes_whichever_takes_longer():
    # 680 bytes of weights and 2 x 10 x 24 of cache; 2 x 2 x 292 operations.
    assert rollout_cost.decode_step_seconds(SMALL, toy_engine(), 2, 10) == pytest.approx((680 + 480) / 5.6)
    # 100 sequences without context: 2 x 292 x 100 operations at 50 a second.
    assert rollout_cost.decode_step_seconds(SMALL, toy_engine(), 100, 0) == pytest.approx(584 * 100 / 50)
    slower = toy_engine(step_seconds=3.0)
    assert rollout_cost.decode_step_seconds(SMALL, slower, 100, 0) == pytest.approx(584 * 100 / 50 + 3)
    # On two GPUs half of the weights each, and all of the one key head; twice 2 layers of 2 x 2 x 4 bytes at 7 a
    # second, and 15 microseconds.
    shared = rollout_cost.decode_step_seconds(SMALL, toy_engine(num_gpus=2), 2, 10)
    assert shared == pytest.approx((340 + 480) / 5.6 + 2 * 2 * (2 * 2 * 2 * 4 / 7 + 15e-6))


def test_completions_that_wait_keep_an_engine_full_and_the_longest_end_it():
    # Nothing but 1 s a step counts: 30 of 40 wait, 10 run, each of 8 tokens in the mean. Then 16 steps to the end.
    shape = dataclasses.replace(SMALL, num_layers=1, vocab_size=0, intermediate_size=0, head_dim=0)
    shape = dataclasses.replace(shape, hidden_size=1, is_tied=True)
    engine = toy_engine(max_num_seqs=10, step_seconds=1.0)
    quick = dataclasses.replace(TOY, flops=1e12, bandwidth=1e12)
    seconds, tail = sampling_seconds(shape, dataclasses.replace(engine, gpu=quick), 40, Lengths(8, 16), 5)
    assert seconds == pytest.approx(30 * 8 / 10 + 16)
    assert tail == pytest.approx(8)  # a flat distribution has half of them left after half of the steps
    # A cache of 50 tokens holds 50 / (5 + 16 / 3) of them: at a token drawn at random 16 / 3 are there.
    engine = toy_engine(cache_tokens=50, step_seconds=1.0, max_num_seqs=10)
    seconds, _ = sampling_seconds(shape, dataclasses.replace(engine, gpu=quick), 40, Lengths(8, 16), 5)
    running = 50 / (5 + 16 / 3)
    assert seconds == pytest.approx((40 - running) * 8 / running + 16, rel=1e-3)


def test_training_takes_operations_for_weights_and_pairs_or_waits_for_shards():
    # 3 rows of 10 and a flat 0 to 20, in the mean 20 tokens, squared 100 + 2 x 10 x 10 + 400 / 3.
    squares = 100 + 200 + 400 / 3
    whole = 3 * 2 * (2 * 292 * 20 + 4 * 2 * 6 * squares)
    assert training_flops(SMALL, 3, Lengths(10, 20), 10, 2, causal=False) == pytest.approx(whole, rel=1e-3)
    half = 3 * 2 * (2 * 292 * 20 + 4 * 2 * 6 * squares / 2)
    assert training_flops(SMALL, 3, Lengths(10, 20), 10, 2, causal=True) == pytest.approx(half, rel=1e-3)
    # 630 operations and a ninth of padding on 2 GPUs at 31 a second; 5 times 28 bytes at 7 a second.
    assert rollout_cost.training_seconds(630, TOY, 2, gathered=0, num_passes=5, link=10) == pytest.approx(
        630 / 0.9 / 62
    )
    assert rollout_cost.training_seconds(630, TOY, 2, gathered=28, num_passes=5, link=10) == pytest.approx(20)
    assert rollout_cost.PADDING == MAX_PADDING_SHARE


def test_the_step_that_was_measured_on_an_h100_is_foretold():
    # benchmarks/gpu.py with a token budget: 64 completions of Qwen2.5-1.5B, 1,100 tokens in the mean, took 3.55 s.
    shape, _ = find_shape("Qwen/Qwen2.5-1.5B", None)
    flops = training_flops(shape, 64, Lengths(1_100, 4_096), 14, passes=4, causal=False)
    seconds = rollout_cost.training_seconds(flops, GPUS["H100-80GB"], 1, gathered=0, num_passes=12, link=1)
    assert seconds == pytest.approx(3.55, rel=0.05)


def test_a_second_round_comes_as_often_as_the_first_falls_short():
    # 64 of 192 in the mean: half of the time too few, by 0.3989 standard deviations of 6.532 in the mean of all.
    (always, first), (often, second) = expected_rounds(192, 64, 1 / 3, carries=False)
    assert (always, first, often) == (1, 192, pytest.approx(0.5))
    assert often * second == pytest.approx(3 * 6.532 * 0.3989, rel=1e-3)
    assert sum(often * groups for often, groups in expected_rounds(192, 64, 1 / 3, carries=True)) == pytest.approx(192)
    # Two standard deviations above: 2.3 %.
    assert expected_rounds(200, 100 - 2 * 50**0.5, 0.5, carries=False)[1][0] == pytest.approx(0.0228, abs=1e-3)

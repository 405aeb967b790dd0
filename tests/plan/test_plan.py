# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""A plan's formulas by hand, beside what a real run allocates, and its page."""

import contextlib
import dataclasses
import gc
import json
import math
import re
import subprocess
import sys
import threading
from pathlib import Path

import huggingface_hub
import pytest
import torch
import yaml
from helpers import letters, prompts
from peft import LoraConfig, get_peft_model
from tiny_models import make_model, make_tokenizer, save_tiny_model
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback
from trl import ModelConfig, get_peft_config
from trl.trainer.utils import add_fused_lm_head

from trl_dapo import DAPOConfig, DAPOTrainer
from trl_dapo.cli import main
from trl_dapo.cli.launch import LaunchArguments, make_parser
from trl_dapo.models import ModelShape
from trl_dapo.plan import models, plan, suggest
from trl_dapo.plan.hardware import GPU, GPUS, parse_gpus, read_hardware
from trl_dapo.plan.memory import (
    activation_bytes,
    backward_bytes,
    checkpoint_bytes,
    gathered_bytes,
    layer_bytes,
    optimizer_bytes,
    quantized_bytes,
    score_bytes,
    state_bytes,
    vllm_cache_tokens,
)
from trl_dapo.plan.models import PUBLISHED, find_shape, shape_of
from trl_dapo.plan.page import describe
from trl_dapo.plan.recipe import Sharding, declared_fields, read_sharding
from trl_dapo.plan.speed import (
    PADDING,
    Engine,
    Lengths,
    decode_step_seconds,
    expected_rounds,
    sampling_seconds,
    training_flops,
    training_seconds,
)
from trl_dapo.update.microbatches import MAX_PADDING_SHARE


ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
each_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
GIB = 2**30


ONE_GPU = {
    "model_name_or_path": "Qwen/Qwen3-1.7B-Base",
    "prompts_per_rollout": 64,
    "prompts_per_step": 16,
    "num_generations": 16,
    "per_device_train_batch_size": 1,
    "max_tokens_per_microbatch": 16_384,
    "max_completion_length": 8_192,
    "use_vllm": True,
    "vllm_mode": "colocate",
    "vllm_enable_sleep_mode": True,
    "vllm_gpu_memory_utilization": 0.5,
    "vllm_max_model_length": 10_240,
    "bf16": True,
    "max_steps": 1_200,
}
NINE_MACHINES = {
    **ONE_GPU,
    "model_name_or_path": "Qwen/Qwen2.5-32B",
    "prompts_per_rollout": 512,
    "prompts_per_step": 32,
    "max_tokens_per_microbatch": 22_528,
    "max_completion_length": 20_480,
    "vllm_mode": "server",
    "vllm_max_model_length": 22_528,
}
TINY_RUN = {"tiny_model": True, "prompts_per_rollout": 4, "num_generations": 4, "max_completion_length": 32}


@pytest.fixture
def write(tmp_path):
    """Writes a recipe: its header's hardware and its fields."""

    def write_recipe(hardware, fields):
        path = tmp_path / "recipe.yaml"
        path.write_text(f"# Hardware: {hardware}.\n{json.dumps(fields)}\n")
        return str(path)

    return write_recipe


# 2 layers, 4 wide, 2 heads and 1 key head of 3, an MLP of 5, 7 tokens.
SMALL = ModelShape(
    hidden_size=4, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=3, vocab_size=7, intermediate_size=5
)


# A model's sizes


def test_weights_are_counted_by_hand():
    # A layer: queries 4 x 6, keys and values 2 x 4 x 3, output 6 x 4, MLP 3 x 4 x 5 = 132.
    assert SMALL.num_linear == 2 * 132
    # Two norms a layer and one at the end, embedding and output layer.
    assert SMALL.num_parameters == 264 + 5 * 4 + 2 * 7 * 4
    assert SMALL.num_multiplied == 264 + 7 * 4
    assert SMALL.kv_bytes == 2 * 2 * 2 * 3
    # Rank 2 on queries, 2 x (4 + 6), and values, 2 x (4 + 3), in two layers.
    assert SMALL.num_lora(2, None) == SMALL.num_lora(2, ["q_proj", "v_proj"]) == 2 * 2 * (10 + 7)


@pytest.mark.parametrize(
    "family",
    [
        {"model_type": "llama"},
        {"model_type": "mistral"},
        {"model_type": "qwen2"},
        {"model_type": "qwen3", "head_dim": 16},
        {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
        {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
        {"model_type": "gemma2", "head_dim": 16},  # none of the counted ones: built on the meta device
    ],
    ids=lambda family: "_".join(map(str, family.values())),
)
def test_weights_counted_from_a_config_are_those_of_the_model(family):
    config = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 128,
        "tie_word_embeddings": False,
        **family,
    }
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    assert shape_of(config).num_parameters == sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize(
    ("model", "num_parameters"),  # as the hub's pages of their files say
    [
        ("Qwen/Qwen2.5-Math-7B", 7_615_616_512),
        ("Qwen/Qwen2.5-32B", 32_763_876_352),
        ("Qwen/Qwen2.5-VL-7B", 8_292_166_656),
        ("Qwen/Qwen3-1.7B", 1_720_574_976),
        ("Qwen/Qwen3-4B", 4_022_468_096),
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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "holds no mapping"),
        ("{", "is not JSON"),
        ('{"model_type": "llama", "hidden_size": 8}', "has no 'num_attention_heads'"),
        (
            '{"model_type": "llama", "hidden_size": "8", "num_attention_heads": 2, "num_hidden_layers": 2}',
            "sizes that are no numbers",
        ),
        ('{"model_type": "deepseek_v3", "kv_lora_rank": 512}', "compresses its keys and values"),
    ],
)
def test_a_config_that_says_no_sizes_is_refused(tmp_path, text, message):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        find_shape(str(tmp_path))


def test_experts_are_found_by_each_familys_name_for_them(tmp_path):
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"intermediate_size": 96, "vocab_size": 100, "num_local_experts": 4, "num_experts_per_tok": 2}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mixtral", **sizes}))
    shape, _ = find_shape(str(tmp_path))
    assert (shape.num_experts, shape.num_active_experts, shape.num_other) == (4, 2, 0)


def test_a_hub_that_does_not_answer_is_not_waited_for(monkeypatch):
    asked, never = [], threading.Event()

    def hang(name, file, **kwargs):
        asked.append(name)
        never.wait()

    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(models, "HUB_SECONDS", 0.01)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hang)
    assert find_shape("Qwen/Qwen3-4B")[1].startswith("trl-dapo's table")
    assert asked == ["Qwen/Qwen3-4B"]
    never.set()


def test_a_hub_that_answers_is_believed_over_the_table(monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**PUBLISHED["Qwen/Qwen3-4B"], "num_hidden_layers": 1}))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *args, **kwargs: str(tmp_path / "config.json"))
    shape, source = find_shape("Qwen/Qwen3-4B")
    assert (shape.num_layers, source) == (1, "the hub's config.json")


# Memory, by hand


def test_the_optimizer_takes_two_moments_as_precise_as_the_weight_or_of_eight_bits():
    assert optimizer_bytes("adamw_torch_fused", 4) == 8
    assert optimizer_bytes("adamw_torch", 2) == 4
    assert optimizer_bytes("paged_adamw_8bit", 4) == 2 + 8 / 256
    assert optimizer_bytes("sgd", 4) == 0
    with pytest.raises(ValueError, match="`optim: adafactor`"):
        optimizer_bytes("adafactor", 4)


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
    normalized = dataclasses.replace(SMALL, has_qk_norm=True)
    assert layer_bytes(normalized, held=2, computed=2) == 168 + 6 * 9 + 12
    # An adapter on the output projection: what it reads, 6 numbers, and the rank, 2. Frozen layers keep no input.
    adapted = layer_bytes(SMALL, held=2, computed=2, lora=(2, ["o_proj"]))
    assert adapted == 2 * (16 + 4) + 48 + 8 + 3 * 2 * 5 + 2 * (6 + 2)
    assert score_bytes(SMALL, row=10, computed=2, attention="eager") == 10 * 2 * 6
    assert score_bytes(SMALL, row=10, computed=2, attention="sdpa") == 10 * 3
    assert score_bytes(SMALL, row=10, computed=2, attention="flash_attention_2") == 0


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
    layer = 50 * layer_bytes(broad, 4, 2, "flash_attention_2")
    assert activation_bytes(broad, checkpointing=True, **options)["work"] == (
        layer + backward_bytes(broad, 50, held=4, computed=2) + 4 * 28
    )
    # 3 x 2 x 50 x 5 of the MLP; the largest weight, 4 x 6, as computed and as held.
    assert backward_bytes(wide, 50, held=4, computed=2) == 1500 + 6 * 24


def test_what_is_gathered_and_what_vllm_caches_by_hand():
    # Two layers of 132, embedding and output layer of 28 each in bfloat16, and the latter in float32.
    assert gathered_bytes(SMALL, Sharding("fsdp2"), 4) == 2 * (2 * 132 + 2 * 28) + 4 * 28
    assert gathered_bytes(SMALL, Sharding("zero3"), 2) == 2 * 340 + 1e9
    assert gathered_bytes(SMALL, Sharding("ddp"), 4) == 0
    # Half of 8 GiB, less 2 GiB and 680 bytes; a token's keys and values take 24 bytes; one key head cannot be cut.
    assert vllm_cache_tokens(SMALL, 8 * GIB, 0.5, 1) == (2 * GIB - 680) // 24
    assert vllm_cache_tokens(SMALL, 8 * GIB, 0.5, 2) == (2 * GIB - 340) // 24
    assert vllm_cache_tokens(SMALL, 8 * GIB, 0.1, 1) == 0


def test_a_checkpoint_holds_weights_and_state_once_or_twice():
    one = (0.0, 1000, 4, "adamw_torch")
    assert checkpoint_bytes(*one, Sharding("none"), only_model=False, is_adapter=False) == 12_000
    assert checkpoint_bytes(*one, Sharding("none"), only_model=True, is_adapter=False) == 4_000
    assert checkpoint_bytes(*one, Sharding("fsdp2"), only_model=False, is_adapter=False) == 16_000
    zero = (0.0, 1000, 2, "adamw_torch")
    assert checkpoint_bytes(*zero, Sharding("zero3"), only_model=False, is_adapter=False) == 2 * 2_000 + 12_000
    adapter = (9_999.0, 10, 4, "adamw_torch")
    assert checkpoint_bytes(*adapter, Sharding("none"), only_model=False, is_adapter=True) == 120


# Memory, beside what is allocated


def small_model(dtype, lora):
    model = make_model(
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=64,
        tie_word_embeddings=True,
    ).to(dtype)
    shape = shape_of(model.config.to_dict())
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    if lora is not None:
        model = get_peft_model(model, LoraConfig(r=lora[0], target_modules=lora[1]))
        model.enable_input_require_grads()
    return model.train(), shape


def peak_bytes(step) -> int:
    """The most that a step has allocated at once."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    now = most = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


LORA = (8, ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])
PRECISIONS = {
    "mixed": (torch.float32, True),
    "bfloat16": (torch.bfloat16, True),
    "float32": (torch.float32, False),
}


with_and_without_checkpointing = pytest.mark.parametrize("checkpointing", [True, False], ids=["checkpointed", "whole"])


@with_and_without_checkpointing
@pytest.mark.parametrize(("precision", "lora"), [*((name, None) for name in PRECISIONS), ("bfloat16", LORA)])
def test_activations_are_what_autograd_keeps_and_a_step_allocates(precision, lora, checkpointing):
    dtype, autocast = PRECISIONS[precision]
    model, shape = small_model(dtype, lora)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.randint(0, 64, (8, 64))
    mask = torch.ones_like(ids)
    mask[0, :10] = 0

    def forward():
        with torch.autocast("cpu", dtype=torch.bfloat16) if autocast else contextlib.nullcontext():
            return model(input_ids=ids, attention_mask=mask, labels=ids, fused_lm_head=True)

    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    forward().log_probs.sum().backward()  # from here on gradients are there
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        forward()
    held = dtype.itemsize
    planned = activation_bytes(shape, 512, 64, held, 2 if autocast else held, checkpointing, "sdpa", lora)
    assert planned["activations"] == pytest.approx(sum(storage.nbytes() for storage in kept.values()), rel=0.1)
    kept.clear()
    gc.collect()
    peak = peak_bytes(lambda: forward().log_probs.sum().backward())
    assert sum(planned.values()) == pytest.approx(peak, rel=0.1)


@with_and_without_checkpointing
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_layers_backward_pass_is_what_a_step_allocates(precision, checkpointing):
    """Without the output layer, whose tile is larger than all layers of a small model."""
    dtype, autocast = PRECISIONS[precision]
    model, shape = small_model(dtype, None)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.randint(0, 64, (16, 128))
    mask = torch.ones_like(ids)
    mask[0, :10] = 0

    def step():
        with torch.autocast("cpu", dtype=torch.bfloat16) if autocast else contextlib.nullcontext():
            hidden = model.model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        hidden.sum().backward()

    step()
    held, tokens = dtype.itemsize, 16 * 128
    computed = 2 if autocast else held
    layer = tokens * layer_bytes(shape, held, computed)
    kept = 6 * (tokens * held * 128 if checkpointing else layer) + (layer if checkpointing else 0)
    casts = 0 if checkpointing or held == computed else computed * shape.num_linear
    last = 0 if checkpointing else tokens * 128 * (4 + held)
    planned = kept + casts + last + backward_bytes(shape, tokens, held, computed)
    assert planned == pytest.approx(peak_bytes(step), rel=0.1)


def tensor_bytes(tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class Gradients(TrainerCallback):
    """How large they are before a step takes them."""

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        self.num_bytes = tensor_bytes(weight.grad for weight in model.parameters() if weight.grad is not None)


@pytest.mark.parametrize("with_lora", [False, True], ids=["whole", "lora"])
def test_weights_gradients_state_and_checkpoint_are_those_of_a_run(tmp_path, with_lora):
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = save_tiny_model(tmp_path / "model", num_key_value_heads=2, head_dim=32, **sizes)
    settings = {
        "model_name_or_path": model,
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "prompts_per_rollout": 2,
        "num_generations": 4,
        "per_device_train_batch_size": 4,
        "max_completion_length": 8,
        "max_steps": 1,
        "save_steps": 1,
        "learning_rate": 1e-4,
        "output_dir": str(tmp_path / "out"),
    }
    if with_lora:
        settings |= {"use_peft": True, "lora_r": 64, "lora_target_modules": LORA[1]}
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(settings))
    planned = plan(str(path), gpus="CPU")

    _, args, model_args = make_parser().parse_args_and_config(["--config", str(path)])
    gradients = Gradients()
    trainer = DAPOTrainer(
        model,
        letters,
        args,
        train_dataset=prompts(8),
        processing_class=make_tokenizer(),
        callbacks=[gradients],
        peft_config=get_peft_config(model_args),
    )
    trainer.train()
    state = (tensor for state in trainer.optimizer.state.values() for tensor in state.values())
    measured = {
        "weights": tensor_bytes(trainer.model.parameters()),
        "gradients": gradients.num_bytes,
        "optimizer": tensor_bytes(state),
    }
    for part, num_bytes in measured.items():
        assert planned.training[part] == pytest.approx(num_bytes, rel=0.01), part
    files = (tmp_path / "out" / "checkpoint-1").rglob("*")
    assert planned.checkpoint == pytest.approx(sum(file.stat().st_size for file in files if file.is_file()), rel=0.1)


# Time, by hand

# 8 bytes/s of which 5.6 are reached, 100 operations/s of which 50 and 35 are.
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
    assert decode_step_seconds(SMALL, toy_engine(), 2, 10) == pytest.approx((680 + 480) / 5.6)
    # 100 sequences without context: 2 x 292 x 100 operations at 50 a second.
    assert decode_step_seconds(SMALL, toy_engine(), 100, 0) == pytest.approx(584 * 100 / 50)
    assert decode_step_seconds(SMALL, toy_engine(step_seconds=3.0), 100, 0) == pytest.approx(584 * 100 / 50 + 3)
    # On two GPUs half of the weights each, and all of the one key head; twice 2 layers of 2 x 2 x 4 bytes at 7 a
    # second, and 15 microseconds.
    shared = decode_step_seconds(SMALL, toy_engine(num_gpus=2), 2, 10)
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
    # 630 operations and a ninth of padding on 2 GPUs at 35 a second; 5 times 28 bytes at 7 a second.
    assert training_seconds(630, TOY, 2, gathered=0, num_passes=5, link=10) == pytest.approx(630 / 0.9 / 70)
    assert training_seconds(630, TOY, 2, gathered=28, num_passes=5, link=10) == pytest.approx(20)
    assert PADDING == MAX_PADDING_SHARE


def test_a_second_round_comes_as_often_as_the_first_falls_short():
    # 64 of 192 in the mean: half of the time too few, by 0.3989 standard deviations of 6.532 in the mean of all.
    (always, first), (often, second) = expected_rounds(192, 64, 1 / 3, carries=False)
    assert (always, first, often) == (1, 192, pytest.approx(0.5))
    assert often * second == pytest.approx(3 * 6.532 * 0.3989, rel=1e-3)
    carried = expected_rounds(192, 64, 1 / 3, carries=True)
    assert sum(often * groups for often, groups in carried) == pytest.approx(192)
    # Two standard deviations above: 2.3 %.
    assert expected_rounds(200, 100 - 2 * 50**0.5, 0.5, carries=False)[1][0] == pytest.approx(0.0228, abs=1e-3)


# Hardware


def test_gpus_are_read_from_words_and_from_a_header():
    cluster = parse_gpus("64+8xH100-80GB")
    assert (cluster.gpu, cluster.num_train, cluster.num_serve) == (GPUS["H100-80GB"], 64, 8)
    assert str(parse_gpus("8xh200")) == "8xH200-141GB"
    assert str(parse_gpus("L4-24GB")) == "1xL4-24GB"
    assert str(parse_gpus("8xL4")) == "8xL4-24GB"  # an L40S is another
    assert str(parse_gpus("CPU")) == "1xCPU"
    for text, message in (
        ("8xH1000", "names no GPU that is known: H100-80GB, "),
        ("8 GPUs", "cannot be read"),
        ("0xL4", "cannot be read"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_gpus(text)
    for text, expected in (
        ("one GPU of 24 GB, vLLM on the same GPU. Needs bitsandbytes.", "1xRTX4090-24GB"),
        ("8 GPUs of 80 GB, FSDP2, vLLM on the same GPUs.", "8xH100-80GB"),
        ("one GPU of 80 GB, all weights trained, vLLM on the same GPU.", "1xH100-80GB"),
        ("64 GPUs of 80 GB on 8 machines train with ZeRO-3, 8 more on a ninth serve vLLM.", "64+8xH100-80GB"),
        ("3 GPUs of 80 GB: two train, one serves vLLM.", "2+1xH100-80GB"),
        ("any CPU, about a minute on two cores. No download.", "1xCPU"),
    ):
        assert str(read_hardware(text)) == expected
    assert read_hardware("8 GPUs of 33 GB") is None
    assert read_hardware("0 GPUs of 80 GB") is None
    assert read_hardware("") is None


@pytest.mark.parametrize(
    ("file", "kind"),
    [("single_gpu", "none"), ("multi_gpu", "ddp"), ("fsdp2", "fsdp2"), ("zero2", "zero2"), ("zero3", "zero3")],
)
def test_sharding_is_read_from_accelerates_file(file, kind):
    found = read_sharding(ROOT / "recipes" / "accelerate" / f"{file}.yaml", num_processes=1 if kind == "none" else 8)
    assert (found.kind, found.offloads_optimizer, found.offloads_weights) == (kind, False, False)


def test_what_a_plan_does_not_know_of_accelerate_is_refused(tmp_path):
    path = tmp_path / "config.yaml"
    for text, message in (
        ("distributed_type: FSDP", "a plan knows FSDP2"),
        ("distributed_type: XLA", "does not know `distributed_type: XLA`"),
        ("{distributed_type: DEEPSPEED, deepspeed_config: {deepspeed_config_file: x}}", "`zero_stage` 1 to 3"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_sharding(path, 8)
    path.write_text("{distributed_type: DEEPSPEED, deepspeed_config: {zero_stage: 3, offload_optimizer_device: cpu}}")
    assert read_sharding(path, 8).offloads_optimizer


# Recipes


def test_fields_and_defaults_are_those_of_the_configs():
    configs = [field for config in (ModelConfig, DAPOConfig, LaunchArguments) for field in dataclasses.fields(config)]
    declared = declared_fields()
    assert {field.name for field in configs if field.init} == declared.keys()
    for field in configs:
        # What is no literal reads as `None`.
        assert declared[field.name] == field.default or declared[field.name] is None, field.name
    not_read = {field.name for field in configs if declared[field.name] is None and field.default is not None}
    used = set(
        re.findall(r"settings\.(\w+)", "".join(path.read_text() for path in (ROOT / "trl_dapo/plan").glob("*.py")))
    )
    assert not_read & used == {"optim"}


@each_recipe
def test_every_recipe_is_planned_on_the_hardware_of_its_header_and_fits_it(recipe, launched_on):
    planned = plan(str(recipe))
    assert planned.fits, planned.problems
    launched_on(planned.recipe.cluster.num_train)
    on_the_cpu = ["--use_cpu", "true", "--bf16", "false"]
    _, training_args, _ = make_parser().parse_args_and_config(["--config", str(recipe), *on_the_cpu])
    assert planned.batch_arithmetic == training_args.batch_arithmetic
    page = describe(planned)
    assert max(map(len, page.splitlines())) <= 80
    # What would help is compared with the time that has its share of the evaluations.
    assert ("with its share of the evaluations" in page) == (training_args.eval_strategy != "no")
    assert page.splitlines()[-1].startswith("Fits: peak ")


def test_a_plan_for_one_gpu_by_hand(write):
    planned = plan(write("one GPU of 80 GB", ONE_GPU), lengths=(2000, 8192), acceptance=0.4)
    num = 1_720_574_976
    assert {part: planned.training[part] / num for part in ("weights", "gradients", "optimizer")} == {
        "weights": 4,
        "gradients": 4,
        "optimizer": 8,
    }
    # 16,384 tokens x 2,048 wide in float32 for 28 layers; the last norm and the output layer's input, 12 bytes; the
    # mask of rows of 10,240, 3 bytes.
    assert planned.training["activations"] == 16_384 * (2_048 * (4 * 28 + 12) + 3 * 10_240)
    # vLLM has half of the GPU; weights, moments and 1.5 GiB are there too.
    assert planned.peak_sampling == 0.5 * 81_559 * 2**20 + 12 * num + 1.5 * GIB
    assert planned.peak_updating == sum(planned.training.values()) + GIB
    # 64 prompts at 0.4 are 160 groups in the mean, and some for where they are not enough.
    assert 160 <= planned.num_groups <= 1.1 * 160
    assert planned.checkpoint == 12 * num
    assert planned.num_rollouts == 300
    # 256 rows a step of 2,256 tokens, a tenth of what fits is padding.
    assert planned.num_microbatches == math.ceil(256 * 2_256 / 0.9 / 16_384)
    # Forward, backward (twice as much), and forward again; without checkpointing three of these.
    flops = training_flops(planned.shape, 1_024, planned.lengths, 256, 4, causal=False)
    assert planned.seconds["update"] == pytest.approx(flops / 0.9 / (0.35 * 989e12))
    assert planned.seconds["logps"] == pytest.approx(planned.seconds["update"] / 4)
    # Weights are copied beside themselves.
    assert planned.seconds["sync"] == pytest.approx(4 * num / (0.7 * 3.35e12))
    # Where vLLM does not sleep, its share stays.
    awake = plan(write("one GPU of 80 GB", {**ONE_GPU, "vllm_enable_sleep_mode": False}), lengths=(2000, 8192))
    assert awake.peak_updating == sum(planned.training.values()) + 0.5 * 81_559 * 2**20


def test_a_plan_for_fsdp2_by_hand(write):
    fields = {**ONE_GPU, "model_name_or_path": "Qwen/Qwen2.5-Math-7B", "vllm_tensor_parallel_size": 2}
    path = write("8 GPUs of 80 GB", fields)
    planned = plan(path, accelerate_config="fsdp2")
    num = 7_615_616_512
    # Shards in float32, and whole gradients in bfloat16 between micro-batches.
    assert planned.training["weights"] == 4 * num / 8
    assert planned.training["gradients"] == pytest.approx(4 * num / 8 + 2 * num)
    # Layers pass on bfloat16.
    assert planned.training["activations"] == 16_384 * (3_584 * (2 * 28 + 8) + 3 * 10_240)
    assert planned.checkpoint == 16 * num
    # Two GPUs an engine, which has half of the weights on each and as many sequences as both have rows.
    assert (planned.engine.num_engines, planned.engine.max_num_seqs) == (4, 2 * 128)
    assert planned.vllm["weights"] == num
    reduced = ["--accelerator_config", "{gradient_accumulation_kwargs: {sync_each_batch: true}}"]
    assert plan(path, accelerate_config="fsdp2", overrides=reduced).training["gradients"] == 4 * num / 8
    # On a slow link gathering shards takes longer than computing: twice for an update, and gradients once a step.
    rows = {"gpus": "8xL40S-48GB", "overrides": ["--max_tokens_per_microbatch", "null"], "lengths": (10, 8192)}
    slow = plan(path, accelerate_config="fsdp2", **rows)
    passes = 4 * 16 * 16 / 8  # of one row
    assert slow.seconds["update"] == pytest.approx((passes * 4 * num + 4 * 2 * num) / (0.7 * 32e9))


def test_what_a_plan_leaves_out_is_said(write):
    assert not any("unchecked" in text for text in plan(write("one GPU of 80 GB", ONE_GPU)).assumptions)
    fields = {"vllm_max_model_length": None, "tools": ["calculate"], "dynamic_sampling_memory": True}
    said = " ".join(plan(write("one GPU of 80 GB", {**ONE_GPU, **fields})).assumptions)
    for words in ("a cache of the model's whole context: unchecked", "tools take no time", "left out"):
        assert words in said
    seeing = {**ONE_GPU, "model_name_or_path": "Qwen/Qwen2.5-VL-3B-Instruct"}
    assert any("images take neither" in text for text in plan(write("one GPU of 80 GB", seeing)).assumptions)


def test_two_iterations_take_an_update_twice(write):
    once = plan(write("one GPU of 80 GB", ONE_GPU))
    twice = plan(write("one GPU of 80 GB", {**ONE_GPU, "num_iterations": 2}))
    assert twice.seconds["update"] == pytest.approx(2 * once.seconds["update"])
    assert twice.seconds["logps"] == pytest.approx(once.seconds["logps"])
    assert twice.num_rollouts == once.num_rollouts / 2


def test_an_adapter_travels_alone_and_vllms_base_sleeps_in_the_machines_memory(write):
    adapter = {"use_peft": True, "lora_r": 16, "dtype": "bfloat16"}
    planned = plan(write("one GPU of 80 GB", {**ONE_GPU, **adapter}))
    num = 1_720_574_976
    num_lora = 28 * 16 * (2_048 + 2_048 + 2_048 + 1_024)  # queries and values
    assert planned.training["weights"] == 2 * num + 4 * num_lora
    assert planned.training["optimizer"] == 8 * num_lora
    assert planned.checkpoint == 12 * num_lora
    assert planned.seconds["sync"] == pytest.approx(4 * num_lora / (0.7 * 450e9) + 2 * 2 * num / 25e9)
    assert plan(write("one GPU of 80 GB", {**ONE_GPU, **adapter, "beta": 0.1})).training["reference"] == 0


def test_the_kl_term_has_a_model_of_its_own(write):
    planned, without = (
        plan(write("one GPU of 80 GB", {**ONE_GPU, "beta": 0.1})),
        plan(write("one GPU of 80 GB", ONE_GPU)),
    )
    assert planned.training["reference"] == 4 * 1_720_574_976
    assert planned.peak_sampling - without.peak_sampling == pytest.approx(4 * 1_720_574_976)
    assert planned.seconds["logps"] == pytest.approx(2 * without.seconds["logps"])


def test_an_evaluation_is_sampled_and_its_loss_computed_on_padded_rows(write):
    evaluates = {"eval_strategy": "steps", "eval_steps": 8, "num_generations_eval": 2}
    evaluates |= {"eval_dataset_name": "me/AIME-2024", "per_device_eval_batch_size": 4}
    planned = plan(write("one GPU of 80 GB", {**ONE_GPU, **evaluates}))
    assert (planned.num_problems, planned.evaluation_every) == (30, 2)
    sampled, _ = sampling_seconds(planned.shape, planned.engine, 60, planned.lengths, 256, 2)
    padded = training_flops(planned.shape, 60, Lengths(8_110.08, 8_192), 256, 2, causal=False) / 0.9 / (0.35 * 989e12)
    assert planned.evaluation_seconds == pytest.approx(sampled + padded)
    assert planned.seconds_with_evaluation == planned.rollout_seconds + planned.evaluation_seconds / 2


def test_a_server_waits_and_is_waited_for_unless_a_rollout_is_ahead(write):
    turns = plan(write("64 GPUs of 80 GB train with ZeRO-3, 8 more serve vLLM", NINE_MACHINES))
    parts = turns.seconds
    assert turns.rollout_seconds == pytest.approx(sum(parts.values()))
    trains = parts["update"] + parts["logps"]
    idle = (64 * (turns.rollout_seconds - trains) + 8 * (turns.rollout_seconds - parts["sampling"])) / 72
    assert turns.idle_share == pytest.approx(idle / turns.rollout_seconds)
    # One machine samples for eight: hours, where the update takes minutes.
    assert 1.5 * 3600 < parts["sampling"] < 6 * 3600
    assert 5 * 60 < parts["update"] < 20 * 60
    # All bfloat16 weights through one port of 50 GB/s, after gathering them through a machine's eight.
    assert parts["sync"] == pytest.approx(2 * 32_763_876_352 / 0.7 * (1 / 50e9 + 1 / 400e9))

    ahead = {**NINE_MACHINES, "rollouts_ahead": 1, "dynamic_sampling_surplus": "carry"}
    ahead = plan(write("64 GPUs of 80 GB train with ZeRO-3, 8 more serve vLLM", ahead))
    longer = max(ahead.seconds["sampling"], ahead.seconds["update"] + ahead.seconds["logps"])
    assert ahead.rollout_seconds == pytest.approx(longer + ahead.seconds["sync"])


def test_rounds_of_one_size_and_of_no_refill_are_counted(write):
    def rounds(**fields):
        return plan(write("one GPU of 80 GB", {**ONE_GPU, **fields}), acceptance=0.25).rounds

    assert rounds(batch_multiplier=3) == [(2, 3 * 64)]  # 4 batches are needed
    assert rounds(batch_multiplier=1, dynamic_sampling_max_rounds=3) == [(3, 64)]
    assert rounds(batch_multiplier=3, dynamic_sampling_surplus="carry") == [(pytest.approx(4 / 3), 192)]
    assert rounds(use_dynamic_sampling=False) == [(1, 64)]
    assert rounds(dynamic_sampling_mode="mask") == [(1, 64)]
    assert rounds(use_vllm=False) == [(4, 64)]
    # 64 / 0.25 = 256 groups in rounds of 48, of which ten may be.
    assert rounds(dynamic_sampling_max_round_size=48) == [(6, 48)]
    assert rounds(dynamic_sampling_max_round_size=48, batch_multiplier=3) == [(6, 48)]


def test_where_little_is_accepted_rounds_end_before_the_rollout_is_full(write):
    planned = plan(write("one GPU of 80 GB", ONE_GPU), acceptance=0.001)
    # 64,000 groups are needed; a round is of 32 rollouts at most, 2,048 groups, and there are ten at most.
    ((often, size),) = planned.rounds
    assert often == 10
    assert 64 < size <= 2_048
    assert "`dynamic_sampling_max_rounds: 10` ends a rollout before it is full" in " ".join(describe(planned).split())
    enough = plan(write("one GPU of 80 GB", ONE_GPU), acceptance=0.01)  # 6,400 groups: four such rounds
    assert enough.rounds == [(4, 2_048)]
    assert "before it is full" not in describe(enough)


def test_an_engine_has_a_share_of_the_attention_heads(write):
    """vLLM refuses tensor parallelism that does not divide them."""
    of_7b = {**ONE_GPU, "model_name_or_path": "Qwen/Qwen2.5-7B"}  # 28 heads
    with pytest.raises(ValueError, match="does not divide the model's 28 attention heads"):
        plan(write("8 GPUs of 80 GB, FSDP2", {**of_7b, "vllm_tensor_parallel_size": 8}))
    on_a_server = plan(write("8 GPUs of 80 GB train, 8 more serve vLLM", {**of_7b, "vllm_mode": "server"}))
    assert (on_a_server.engine.num_gpus, on_a_server.engine.num_engines) == (4, 2)


def test_what_would_help_is_planned_anew_and_does_help(write):
    path = write("64 GPUs of 80 GB train with ZeRO-3, 8 more serve vLLM", NINE_MACHINES)
    planned = plan(path)
    found = suggest(planned)
    assert len(found) == 3
    gains = [other.seconds_with_evaluation for _, other in found]
    assert gains == sorted(gains)
    assert max(gains) < planned.seconds_with_evaluation
    for words, other in found:
        gpus = re.search(r"--gpus (\S+)", words)
        fields = [field.split(": ") for field in words.split(", ") if ": " in field]
        again = plan(
            path,
            gpus=gpus[1] if gpus else None,
            overrides=[word for name, value in fields for word in (f"--{name}", value)],
        )
        assert again.seconds_with_evaluation == pytest.approx(other.seconds_with_evaluation)
        assert again.fits


def test_a_larger_rollout_is_compared_for_as_many_prompts_and_more_gpus_come_last(write):
    planned = plan(write("one GPU of 80 GB", ONE_GPU))
    *others, (more_gpus, _) = suggest(planned, most=100)
    larger = dict(others)["prompts_per_rollout: 128"]
    assert all("--gpus" not in words for words, _ in others)
    assert larger.seconds["update"] == pytest.approx(2 * planned.seconds["update"])
    assert planned.seconds["sampling"] < larger.seconds["sampling"] < 2 * planned.seconds["sampling"]
    assert more_gpus == "--gpus 2xH100-80GB, --accelerate_config multi_gpu"
    few = plan(write("8 GPUs of 80 GB", ONE_GPU), lengths=(1_000, 2_000))
    page = " ".join(describe(few).split())
    assert "further off-policy: 8 optimizer steps a rollout, not 4" in page


@pytest.mark.parametrize(
    ("hardware", "fields"),
    [
        *((None, recipe) for recipe in RECIPES),
        ("one GPU of 24 GB", ONE_GPU),
        ("8 GPUs of 48 GB, FSDP2", {**ONE_GPU, "model_name_or_path": "Qwen/Qwen2.5-7B"}),
        ("8 GPUs of 48 GB", {**ONE_GPU, "use_vllm": False, "per_device_train_batch_size": 2, "batch_multiplier": 1}),
        ("8 GPUs of 80 GB", {**ONE_GPU, "loss_type": "grpo", "max_tokens_per_microbatch": None}),
        ("4 GPUs of 80 GB train, 4 serve", {**ONE_GPU, "vllm_mode": "server", "vllm_request_timeout": 60}),
        ("one GPU of 80 GB trains, one serves", {**ONE_GPU, "vllm_mode": "server", "use_dynamic_sampling": False}),
        ("2 GPUs of 80 GB", {**ONE_GPU, "prompts_per_rollout": None, "prompts_per_step": None}),
    ],
    ids=lambda value: getattr(value, "stem", value) if not isinstance(value, dict) else "",
)
def test_what_would_help_is_taken_by_the_configs(write, launched_on, hardware, fields):
    if isinstance(fields, dict) and fields["prompts_per_step"] is None:
        fields = {**fields, "per_device_train_batch_size": 16, "gradient_accumulation_steps": 2}
    path = str(fields) if hardware is None else write(hardware, fields)
    found, recipe = suggest(plan(path), most=100), yaml.safe_load(Path(path).read_text())
    assert found
    for words, other in found:
        settings, changed = other.recipe.settings, re.findall(r"(\w+): ", re.sub(r"\{.*\}", "", words))
        given = {**recipe, **{name: getattr(settings, name) for name in changed}}
        copy = Path(write("any CPU", given))
        launched_on(other.recipe.cluster.num_train)
        _, args, _ = make_parser().parse_args_and_config(["--config", str(copy), "--use_cpu", "true", "--bf16=false"])
        assert args.batch_arithmetic == other.batch_arithmetic, words


def test_what_does_not_fit_says_why_and_what_would_make_it_fit(write, capsys):
    command = ["plan", "--config", write("one GPU of 40 GB", ONE_GPU)]
    assert main(command) == 1
    page = " ".join(capsys.readouterr().out.split())
    assert "Does not fit: sampling takes 40.7 GiB of 40.0 GiB, of which 5% stay free." in page
    assert "- vllm_gpu_memory_utilization: 0.4: peak 40.7 GiB -> 36.7 GiB" in page
    assert main([*command, "--vllm_gpu_memory_utilization", "0.4"]) == 0
    # vLLM's share does not hold one completion.
    assert main([*command, "--vllm_gpu_memory_utilization", "0.15"]) == 1
    assert "less than the 10,240 of one prompt and completion" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpus", "8xH1000"], "names no GPU that is known: H100-80GB, H200-141GB"),
        (["--gpus", "8+8xH100-80GB"], "the recipe does not sample on a vLLM server"),
        (["--vllm_mode", "server", "--use_vllm"], "samples on a vLLM server, and 1xCPU has none"),
        (["--lengths", "5"], "Write MEAN,MAX"),
        (["--lengths", "5,64"], "`max_completion_length` (32)"),
        (["--acceptance", "0"], "`--acceptance` must be above 0"),
        (
            ["--learning_rat", "1"],
            "The command line has fields that no config has: `learning_rat` (nearest: `learning_rate`).",
        ),
        (["--gpu", "L4-24GB"], "`gpu` (nearest: `gpus`)."),
        (["--num_generations", "many"], "`num_generations` must be a number, got 'many'"),
        (["--max_steps", "nan"], "`max_steps` must be a number, got 'nan'"),
        (["--max_steps", "1e3"], "`max_steps` must be a number, got '1e3'"),
        (["--eval_steps", "often"], "`eval_steps` must be a number, got 'often'"),
        (["--dtype", "half"], "`dtype` must be one of 'auto', 'bfloat16', 'float16', 'float32', None, got 'half'"),
        (["--num_iterations", "0"], "`num_iterations` must be a whole number of at least 1, got 0"),
        (["--per_device_train_batch_size", "0"], "`per_device_train_batch_size` must be"),
        (["--vllm_tensor_parallel_size", "0"], "`vllm_tensor_parallel_size` must be"),
        (["--max_completion_length", "8k"], "`max_completion_length` must be"),
        (["--vllm_gpu_memory_utilization", "1.5"], "`vllm_gpu_memory_utilization` must be above 0 and at most 1"),
        (["--batch_multiplier", "-3"], "`batch_multiplier` must be above 0 and finite"),
        (
            ["--dynamic_sampling_mode", "keep"],
            "`dynamic_sampling_mode` must be one of 'filter', 'replace', 'mask', got 'keep'",
        ),
        (["--load_in_4bit"], "set `use_peft: true`"),
        (["--tiny_model", "false", "--model_name_or_path", "["], "The config of [ was not found"),
        (["--optim", "adafactor"], "`optim: adafactor`"),
        (["--prompts_per_step", "3"], "Nearest `prompts_per_rollout`: 3 or 6"),
        # 4 prompts of 4 completions, 8 rows at a time: 2 micro-batches a rollout.
        (["--steps_per_generation", "3"], "`steps_per_generation=3` contradicts 4 prompts a rollout and 4 an optimi"),
        (["--prompts_per_rollout", "null", "--num_generations", "3"], "Nearest `num_generations`: 2 or 4. Or `per_"),
        (
            ["--prompts_per_rollout", "null", "--generation_batch_size", "20"],
            "`generation_batch_size=20` rows do not divide by 1 process x `per_device_train_batch_size=8`",
        ),
        (
            ["--prompts_per_rollout", "null", "--generation_batch_size", "16", "--steps_per_generation", "3"],
            "`generation_batch_size=16` contradicts `steps_per_generation=3`: set one",
        ),
        (
            ["--use_vllm", "--vllm_mode", "colocate", "--vllm_max_model_length", "32"],
            "`vllm_max_model_length` must be a whole number of at least 33, got 32. It holds a prompt and a",
        ),
        (["--tiny_model", "false"], "`model_name_or_path` is not set"),
        (["--accelerate_config", "nowhere.yaml"], "`--accelerate_config nowhere.yaml` names no file"),
        (["--accelerate_config", "zero4"], "is none of cpu, fsdp2, multi_gpu"),
        (["more"], "`more` follows no `--field`"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_told_in_one_line_with_exit_status_2(write, capsys, options, message):
    assert main(["plan", "--config", write("any CPU", TINY_RUN), *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("trl-dapo plan: ")
    assert message in line


def test_numbers_that_are_text_to_yaml_are_read_as_the_command_line_reads_them(write):
    recipe = write("any CPU", {**TINY_RUN, "learning_rate": "1e-6", "num_train_epochs": "2e0"})
    assert main(["plan", "--config", recipe]) == 0


def test_the_environment_that_a_recipe_sets_changes_no_plan(write, capsys):
    assert main(["plan", "--config", write("any CPU", TINY_RUN)]) == 0
    page = capsys.readouterr().out
    assert main(["plan", "--config", write("any CPU", {"env": {"NCCL_DEBUG": "WARN"}, **TINY_RUN})]) == 0
    assert capsys.readouterr().out == page


def test_a_recipe_without_its_hardware_asks_for_it(tmp_path, capsys):
    path = tmp_path / "mine.yaml"
    path.write_text(json.dumps(TINY_RUN))
    assert main(["plan", "--config", str(path)]) == 2
    assert "Say them: `--gpus 8xH100-80GB`" in capsys.readouterr().err
    assert main(["plan", "--config", str(path), "--gpus", "2xL4-24GB"]) == 0
    assert "2xL4-24GB, DDP" in capsys.readouterr().out


def test_a_plan_for_a_cpu_speaks_of_no_gpu_and_helps_by_nothing_that_shows_no_effect(capsys):
    assert main(["plan", "--config", "smoke_cpu"]) == 0
    page = capsys.readouterr().out
    assert "Memory of this machine: " in page
    assert "35% of the CPU's operations" in page
    assert "- allowances: 5% of the memory for fragments" in page
    assert not any(word in page for word in ("GPU", "CUDA", "vLLM"))
    # A rollout takes half a second either way.
    assert "Would help most" not in page
    assert re.search(r"(\d+\.\d s) -> \1", page) is None


def test_a_plan_without_vllm_allows_nothing_for_it(write, capsys):
    assert main(["plan", "--config", write("one GPU of 80 GB", {**TINY_RUN, "use_cpu": False})]) == 0
    page = " ".join(capsys.readouterr().out.split())
    assert "- allowances: 1.5 GiB a process for CUDA and NCCL; 5% of a GPU for fragments" in page


def test_a_plan_imports_neither_torch_nor_transformers(write):
    """Which is why it takes no time."""
    path = write("one GPU of 80 GB", ONE_GPU)
    code = f"import sys, trl_dapo.cli as cli\nprint(cli.main(['plan', '--config', {path!r}]))"
    code += "\nprint({'torch', 'transformers', 'trl', 'datasets'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout.splitlines()[-2:] == ["0", "set()"], result.stderr

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Bytes, beside what is allocated."""

import contextlib
import gc
import json

import pytest
import torch
from helpers import letters, prompts
from peft import LoraConfig, get_peft_model
from tiny_models import make_model, make_tokenizer, save_tiny_model
from torch.profiler import ProfilerActivity, profile
from transformers import TrainerCallback
from trl import get_peft_config
from trl.trainer.utils import add_fused_lm_head

from trl_dapo import DAPOTrainer
from trl_dapo.cli.train import make_parser
from trl_dapo.plan import plan
from trl_dapo.plan.memory import activation_bytes, backward_bytes, layer_bytes
from trl_dapo.plan.model_shapes import shape_of


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
        assert planned.training.memory[part] == pytest.approx(num_bytes, rel=0.01), part
    files = (tmp_path / "out" / "checkpoint-1").rglob("*")
    assert planned.training.checkpoint == pytest.approx(
        sum(file.stat().st_size for file in files if file.is_file()), rel=0.1
    )

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Predicted bytes, compared with what is allocated."""

import contextlib
import gc
import json
from types import SimpleNamespace

import pytest
import torch
from helpers import letters, prompts
from peft import LoraConfig, get_peft_model
from tiny_models import make_model, make_tokenizer, save_tiny_model
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback
from trl import get_peft_config
from trl.trainer.utils import add_fused_lm_head

from trl_dapo import DAPOTrainer
from trl_dapo.cli.train import make_parser
from trl_dapo.plan import plan
from trl_dapo.plan.memory import activation_bytes, read_adapter
from trl_dapo.plan.planning import shape_of


SIZES = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 6, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 64, "tie_word_embeddings": True}
EXPERTS = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}


def small_model(dtype, lora, experts=False):
    if experts:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SIZES, **EXPERTS)).to(dtype)
    else:
        model = make_model(**SIZES).to(dtype)
    shape = shape_of(model.config.to_dict())
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    if lora is None:
        return model.train(), shape, None
    model = get_peft_model(model, LoraConfig(r=8, **lora))
    model.enable_input_require_grads()
    asked = {"use_peft": True, "lora_r": 8, "lora_target_modules": lora["target_modules"]}
    asked |= {"lora_modules_to_save": lora.get("modules_to_save"), "use_dora": lora.get("use_dora", False)}
    others = ("lora_target_parameters", "lora_dropout", "load_in_4bit", "load_in_8bit")
    return model.train(), shape, read_adapter(SimpleNamespace(**asked, **dict.fromkeys(others)), shape)


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


LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LORA = {"target_modules": LINEARS}
DORA = {"target_modules": LINEARS, "use_dora": True}
SAVED = {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["embed_tokens", "lm_head", "down_proj", "k_proj"]}
ON_EXPERTS = {"target_modules": "all-linear"}
PRECISIONS = {"mixed": (torch.float32, True), "bfloat16": (torch.bfloat16, True), "float32": (torch.float32, False)}
with_and_without_checkpointing = pytest.mark.parametrize("checkpointing", [True, False], ids=["checkpointed", "whole"])


@with_and_without_checkpointing
@pytest.mark.parametrize(
    ("precision", "lora", "experts"),
    [
        *((name, None, False) for name in PRECISIONS),
        *(("bfloat16", lora, False) for lora in (LORA, DORA, SAVED)),
        *(("bfloat16", lora, True) for lora in ({"target_modules": ["q_proj", "v_proj"]}, ON_EXPERTS)),
    ],
)
def test_activations_are_what_autograd_keeps_and_a_step_allocates(precision, lora, experts, checkpointing):
    dtype, autocast = PRECISIONS[precision]
    model, shape, adapter = small_model(dtype, lora, experts)
    if lora is not None:
        trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
        assert adapter.num_lora(shape) + adapter.num_saved(shape) == trained
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
    planned = activation_bytes(shape, 512, 64, held, 2 if autocast else held, checkpointing, "sdpa", adapter)
    assert planned["activations"] == pytest.approx(sum(storage.nbytes() for storage in kept.values()), rel=0.1)
    kept.clear()
    gc.collect()
    assert sum(planned.values()) == pytest.approx(peak_bytes(lambda: forward().log_probs.sum().backward()), rel=0.1)


def tensor_bytes(tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class Gradients(TrainerCallback):
    """Return their bytes before a step takes them."""

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        self.num_bytes = tensor_bytes(weight.grad for weight in model.parameters() if weight.grad is not None)


def save_experts(path):
    """A small model with experts, which are most of its weights."""
    config = AutoConfig.for_model(**{**SIZES, **EXPERTS, "vocab_size": len(make_tokenizer())})
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return str(path)


RUNS = {
    "whole": {},
    "lora": {"lora_r": 64, "lora_target_modules": LINEARS},
    "saved in bfloat16": {"lora_modules_to_save": ["embed_tokens", "lm_head", "up_proj"], "dtype": "bfloat16"},
    "dora": {"use_dora": True, "lora_r": 64, "lora_target_modules": "all-linear"},
    "experts": {"lora_r": 32, "lora_target_modules": "all-linear", "lora_dropout": 0.0, "dtype": "bfloat16"},
}


@pytest.mark.parametrize("kind", RUNS)
def test_weights_gradients_state_and_checkpoint_are_those_of_a_run(tmp_path, kind):
    if kind == "experts":
        model = save_experts(tmp_path / "model")
    else:
        sizes = {name: size for name, size in SIZES.items() if name not in ("vocab_size", "tie_word_embeddings")}
        model = save_tiny_model(tmp_path / "model", **{**sizes, "num_hidden_layers": 4})
    settings = {"model_name_or_path": model, "use_cpu": True, "bf16": False, "report_to": "none", "max_steps": 1}
    settings |= {"prompts_per_rollout": 2, "num_generations": 4, "per_device_train_batch_size": 4}
    settings |= {"max_completion_length": 8, "learning_rate": 1e-4}
    settings |= {"save_steps": 1, "output_dir": str(tmp_path / "out")}
    if kind != "whole":
        settings |= {"use_peft": True, **RUNS[kind]}
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(settings))
    planned = plan(str(path), gpus="CPU")
    _, args, model_args = make_parser().parse_args_and_config(["--config", str(path)])
    gradients = Gradients()
    trainer = DAPOTrainer(
        AutoModelForCausalLM.from_pretrained(model, dtype=model_args.dtype),
        letters,
        args,
        train_dataset=prompts(8),
        processing_class=make_tokenizer(),
        callbacks=[gradients],
        peft_config=get_peft_config(model_args),
    )
    trainer.train()
    state = (tensor for state in trainer.optimizer.state.values() for tensor in state.values())
    measured = {"weights": tensor_bytes(trainer.model.parameters()), "optimizer": tensor_bytes(state)}
    measured["gradients"] = gradients.num_bytes
    for part, num_bytes in measured.items():
        assert planned.training.memory[part] == pytest.approx(num_bytes, rel=0.01), part
    written = sum(file.stat().st_size for file in (tmp_path / "out" / "checkpoint-1").rglob("*") if file.is_file())
    assert planned.training.checkpoint == pytest.approx(written, rel=0.1)

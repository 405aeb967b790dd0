# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Adapters: LoRA, DoRA and QLoRA, new ones and trained ones, with and without a reference model."""

from importlib.util import find_spec

import pytest
import torch
from helpers import ScriptedTrainer, prompts, right, tiny_config
from jobs import script, vowels
from peft import LoraConfig, PeftModel, get_peft_model
from tiny_models import make_tokenizer, save_tiny_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from trl_dapo import DAPOTrainer


needs_bitsandbytes = pytest.mark.skipif(
    find_spec("bitsandbytes") is None,
    reason="bitsandbytes is not installed; for the CPU: pip install -r requirements/deepspeed-cpu.txt",
)
FRESH = ["lora", "dora", pytest.param("qlora", marks=needs_bitsandbytes)]
ADAPTERS = [*FRESH, "continued"]
TOKENS = torch.arange(3, 40).unsqueeze(0)


def adapter_config(**overrides):
    return LoraConfig(**{"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **overrides})


def trained_before(tiny_model):
    """A model with an adapter that was changed after its initialization."""
    torch.manual_seed(1)
    return get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model), adapter_config(init_lora_weights=False))


def make(tiny_model, tmp_path, adapter, cls=ScriptedTrainer, **overrides):
    """A trainer of an adapter. It starts from the same values in every call with the same arguments."""
    model, options = tiny_model, {}
    if adapter == "continued":
        model, options["processing_class"] = trained_before(tiny_model), make_tokenizer()
    else:
        options["peft_config"] = adapter_config(use_dora=adapter == "dora")
    if adapter == "qlora":
        options["quantization_config"] = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    if cls is ScriptedTrainer:
        options["script"] = overrides.pop("script", script)
    settings = {"shuffle_dataset": False, "learning_rate": 1e-2, "lr_scheduler_type": "constant", **overrides}
    torch.manual_seed(0)
    reward = right if cls is ScriptedTrainer else vowels
    return cls(model, reward, tiny_config(tmp_path, **settings), train_dataset=prompts(40), **options)


def parameters(model, trainable):
    return {
        name: parameter.detach().clone()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad is trainable
    }


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@torch.no_grad()
def logits(model):
    # There is no dropout. In evaluation mode, bitsandbytes packs weights for kernels that need wider layers.
    return model.train()(TOKENS).logits


def kl_of(trainer):
    return [log["kl"] for log in trainer.state.log_history if "kl" in log]


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_the_adapter_trains_from_where_it_is_and_the_model_under_it_stays(tiny_model, tmp_path, adapter):
    trainer = make(tiny_model, tmp_path, adapter)
    base, start = parameters(trainer.model, trainable=False), parameters(trainer.model, trainable=True)
    assert start
    assert all("lora_" in name for name in start)
    if adapter == "continued":
        assert same(start, parameters(trained_before(tiny_model), trainable=True))
    trainer.train()
    assert same(parameters(trainer.model, trainable=False), base)
    moved = {
        name: not torch.equal(value, start[name]) for name, value in trainer.model.named_parameters() if name in start
    }
    assert all(moved.values()), moved


@needs_bitsandbytes
def test_the_gradient_of_a_quantized_model_is_the_same_after_it_has_sampled(tmp_path):
    """
    On CPUs with AVX512_BF16, bitsandbytes packs the weights of a model that samples. Packed weights have no gradient.
    """
    path = save_tiny_model(tmp_path / "wide", hidden_size=256, intermediate_size=256, head_dim=64)
    in_4_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")

    def make(base):
        torch.manual_seed(0)
        config = tiny_config(tmp_path)
        return DAPOTrainer(base, vowels, config, train_dataset=prompts(40), peft_config=adapter_config()).model

    def gradient(model):
        model.zero_grad()
        model.train()(TOKENS, labels=TOKENS).loss.backward()
        return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.requires_grad}

    @torch.no_grad()
    def sample(model):
        model.eval()(TOKENS)

    base, sampled = (AutoModelForCausalLM.from_pretrained(path, quantization_config=in_4_bits) for _ in range(2))
    model = make(base)
    expected = gradient(model)
    sample(model)
    assert same(gradient(model), expected)
    sample(sampled)
    if any(getattr(module, "support_avx512bf16_for_cpu", False) for module in sampled.modules()):
        with pytest.raises(ValueError, match=r"sampled on a CPU.*Load the model again"):
            make(sampled)


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_the_reference_is_where_the_policy_started(tiny_model, tmp_path, adapter):
    # For a new adapter the reference is the model without it, for a trained one a copy of its first state.
    trainer = make(tiny_model, tmp_path, adapter, beta=0.1, max_steps=3)
    assert trainer.ref_model is None
    trainer.train()
    first, *others = kl_of(trainer)
    assert first == pytest.approx(0, abs=1e-6)
    assert min(others) > 1e-5
    if adapter == "continued":
        kept = {name: value for name, value in trainer.model.named_parameters() if ".ref." in name}
        start = parameters(trained_before(tiny_model), trainable=True)
        assert same(kept, {name.replace(".default.", ".ref."): value for name, value in start.items()})


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_a_resumed_adapter_ends_bit_for_bit_where_the_uninterrupted_one_does(tiny_model, tmp_path, adapter):
    settings = {"cls": DAPOTrainer, "beta": 0.1, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole = make(tiny_model, tmp_path, adapter, **settings)
    whole.train()
    resumed = make(tiny_model, tmp_path, adapter, **settings)
    start = parameters(resumed.model, trainable=True)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    end = parameters(resumed.model, trainable=True)
    assert not same(end, start)
    assert same(end, parameters(whole.model, trainable=True))
    assert kl_of(resumed) == kl_of(whole)


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_a_saved_adapter_is_the_trained_policy_again(tiny_model, tmp_path, adapter):
    trainer = make(tiny_model, tmp_path, adapter, beta=0.1)
    trainer.train()
    trainer.save_model(tmp_path / "saved")
    options = {}
    if adapter == "qlora":
        options["quantization_config"] = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    base = AutoModelForCausalLM.from_pretrained(tiny_model, **options)
    plain = logits(base)
    loaded = PeftModel.from_pretrained(base, tmp_path / "saved")
    # The adapter of a quantized model trains in bfloat16, but is loaded in float32.
    atol = 1e-3 if adapter == "qlora" else 1e-6
    torch.testing.assert_close(logits(loaded), logits(trainer.model), rtol=0, atol=atol)
    assert (logits(loaded) - plain).abs().max() > 1e-2

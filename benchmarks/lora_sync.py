# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
The bytes that vLLM is handed at a sync of a model with LoRA: the adapter, or all weights with the adapter merged in.

    python -m benchmarks lora_sync    # a minute

Models of Qwen2.5's shapes with random weights in bfloat16, LoRA of rank 16 on all linear layers. The adapter is
written to a folder, from which a server reads it; all weights are merged and walked over by TRL's own code.
"""

import tempfile
from pathlib import Path

import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from transformers import Qwen2Config, Qwen2ForCausalLM
from trl.generation.vllm_generation import VLLMGeneration

from trl_dapo.engines.lora_sync import AdapterGeneration

from .frame.runs import silent
from .frame.tables import print_table


SHAPES = (  # hidden and intermediate size, layers, heads, heads of keys and values
    (512, 2048, 8, 8, 2),
    (896, 4864, 24, 14, 2),
    (1536, 8960, 28, 12, 2),
)


class Merged(VLLMGeneration):
    """TRL's sync without the engine."""

    def _init_vllm(self):
        pass

    def hand_over(self):
        return sum(weight.nbytes for _, weight in self._iter_named_params())


class Adapted(AdapterGeneration):
    """Ours without the engine."""

    def _init_vllm(self):
        self._adapter_dtype = torch.bfloat16

    def hand_over(self):
        _, path = self._save_next(self._gather_adapter())
        return sum(file.stat().st_size for file in path.iterdir())


def make_model(shape, vocab_size=151_936):
    hidden, intermediate, layers, heads, kv_heads = shape
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM._from_config(config, dtype=torch.bfloat16)
    return get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))


def handed_over(model):
    """Bytes of a sync, by each way."""
    with tempfile.TemporaryDirectory() as folder:
        adapted = Adapted(model, Accelerator(cpu=True), None, mode="server", lora_sync=None, output_dir=Path(folder))
        adapter = adapted.hand_over()
    return {"merge": Merged(model, Accelerator(cpu=True), None, mode="server").hand_over(), "adapter": adapter}


def num_parameters(model):
    return sum(parameter.numel() for name, parameter in model.named_parameters() if "lora_" not in name)


def main():
    silent()
    rows = []
    for shape in SHAPES:
        model = make_model(shape)
        num_bytes = handed_over(model)
        name = f"{num_parameters(model) / 1e9:.3f} B"
        rows += [[name, way, f"{num:,} ({num_bytes['merge'] / num:.1f}x)"] for way, num in num_bytes.items()]
    print_table("rank 16 on all linear layers, bfloat16", ("parameters", "way", "bytes a sync"), rows, left=3)

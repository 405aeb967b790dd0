# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
The bytes that vLLM gets in a sync of a model with LoRA: the adapter, or all weights with the adapter merged in.

    python -m benchmarks lora_sync    # a minute

Models with the shapes of Qwen2.5 and random weights in bfloat16, with LoRA of rank 16 on all linear layers.
"""

import tempfile
from pathlib import Path

import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from transformers import Qwen2Config, Qwen2ForCausalLM

from trl_dapo.engines.lora_sync import AdapterGeneration

from .frame.runs import silent
from .frame.tables import print_table


SIZES = "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads".split()
SHAPES = (
    (512, 2048, 8, 8, 2),
    (896, 4864, 24, 14, 2),
    (1536, 8960, 28, 12, 2),
)


class Adapted(AdapterGeneration):
    """The package's generation without an engine."""

    def _init_vllm(self):
        self._adapter_dtype = torch.bfloat16

    def hand_over(self):
        _, path = self._save_next(self._gather_adapter())
        return sum(file.stat().st_size for file in path.iterdir())


def make_model(shape, vocab_size=151_936, **settings):
    sizes = dict(zip(SIZES, shape, strict=True))
    config = Qwen2Config(vocab_size=vocab_size, tie_word_embeddings=True, **sizes, **settings)
    torch.manual_seed(0)
    return Qwen2ForCausalLM._from_config(config, dtype=torch.bfloat16)


def handed_over(base):
    """Return the bytes of a sync: of the adapter, and of the base model's weights with the adapter merged in."""
    model = get_peft_model(base, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    with tempfile.TemporaryDirectory() as folder:
        adapted = Adapted(model, Accelerator(cpu=True), None, mode="server", lora_sync=None, output_dir=Path(folder))
        adapter = adapted.hand_over()
    merged = sum(weight.nbytes for name, weight in model.named_parameters() if "lora_" not in name)
    return {"merge": merged, "adapter": adapter}


def main():
    silent()
    rows = []
    for shape in SHAPES:
        num_bytes = handed_over(make_model(shape))
        name = f"{num_bytes['merge'] / 2e9:.3f} B"
        rows += [[name, way, f"{num:,}", f"{num_bytes['merge'] / num:.1f}"] for way, num in num_bytes.items()]
    columns = ("parameters", "way", "bytes per sync", "times fewer")
    print_table("rank 16 on all linear layers, bfloat16", columns, rows, left=2)

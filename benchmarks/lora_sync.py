# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
What vLLM is handed at a sync of a model with LoRA: the adapter, or all weights with the adapter merged in.

    python -m benchmarks lora_sync    # minutes

Models of Qwen2.5's shapes with random weights in bfloat16, LoRA of rank 16 on all linear layers. The adapter is
written to a folder and read from it, as a server does; all weights are merged, walked over by TRL's own code, copied
into buffers as an engine does, and unmerged. The way between two machines and vLLM's own loading come on top of both.
The drift is that of the base's weights after 50 syncs with the adapter moving in between: the share of weights that
are not what they were, and their distance from it over the adapter's own change of them.
"""

import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import Qwen2Config, Qwen2ForCausalLM
from trl.generation.vllm_generation import VLLMGeneration

from trl_dapo.engines.lora_sync import AdapterGeneration

from .frame.runs import silent
from .frame.tables import print_table


SHAPES = {  # name: hidden and intermediate size, layers, heads, heads of keys and values
    "0.1B": (512, 2048, 8, 8, 2),
    "0.5B": (896, 4864, 24, 14, 2),
    "1.5B": (1536, 8960, 28, 12, 2),
}
NUM_SYNCS = 50


class Merged(VLLMGeneration):
    """TRL's sync without the engine: what it would be handed is copied into buffers."""

    def _init_vllm(self):
        self.buffers = {}

    def hand_over(self):
        num_bytes = 0
        for name, weight in self._iter_named_params():
            if name not in self.buffers:
                self.buffers[name] = torch.empty_like(weight)
            self.buffers[name].copy_(weight)
            num_bytes += weight.nbytes
        return num_bytes


class Adapted(AdapterGeneration):
    """Ours without the engine: what it would be handed is written to a folder and read from it."""

    def _init_vllm(self):
        self._adapter_dtype = torch.bfloat16

    def hand_over(self):
        _, path = self._save_next(self._gather_adapter())
        load_file(path / "adapter_model.safetensors")
        num_bytes = sum(file.stat().st_size for file in path.iterdir())
        for file in path.iterdir():
            file.unlink()
        return num_bytes


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


def make_ways(model, folder):
    accelerator = Accelerator(cpu=True)
    return {
        "merge": Merged(model, accelerator, None, mode="server"),
        "adapter": Adapted(model, accelerator, None, mode="server", lora_sync=None, output_dir=folder),
    }


def move_adapter(model):
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.add_(torch.randn_like(parameter), alpha=1e-3)


def cost(model, way, repeats):
    """Bytes, seconds and CPU seconds of a sync; the first, which makes its buffers, is left out of the seconds."""
    seconds, cpu_seconds = [], []
    for _ in range(repeats + 1):
        move_adapter(model)
        started, cpu_started = time.perf_counter(), time.process_time()
        num_bytes = way.hand_over()
        seconds.append(time.perf_counter() - started)
        cpu_seconds.append(time.process_time() - cpu_started)
    return num_bytes, median(seconds[1:]), median(cpu_seconds[1:])


@torch.no_grad()
def drift(model, way, num_syncs=NUM_SYNCS):
    """Share of the adapted layers' weights that moved, and their distance over the adapter's own change of them."""
    layers = [module for module in model.modules() if hasattr(module, "base_layer")]
    before = [layer.base_layer.weight.detach().clone() for layer in layers]
    for _ in range(num_syncs):
        move_adapter(model)
        way.hand_over()
    num_moved = num_weights = moved = changed = 0
    for layer, weight in zip(layers, before, strict=True):
        difference = layer.base_layer.weight.float() - weight.float()
        num_moved += difference.count_nonzero().item()
        num_weights += weight.numel()
        moved += difference.square().sum().item()
        changed += layer.get_delta_weight("default").float().square().sum().item()
    return num_moved / num_weights, (moved / changed) ** 0.5


def num_parameters(model):
    return sum(parameter.numel() for name, parameter in model.named_parameters() if "lora_" not in name)


def main(repeats=5):
    silent()
    title = f"rank 16 on all linear layers, bfloat16, {torch.get_num_threads()} threads, median of {repeats}"
    columns = "parameters", "way", "bytes a sync", "seconds", "CPU seconds", "weights moved", "drift"
    rows, smallest = [], next(iter(SHAPES))
    for name, shape in SHAPES.items():
        model, costs = make_model(shape), {}
        with tempfile.TemporaryDirectory() as folder:
            for way, generation in make_ways(model, Path(folder)).items():
                num_bytes, *seconds = costs[way] = cost(model, generation, repeats)
                figures = f"{num_bytes:,}", *(f"{value:.3f}" for value in seconds)
                ratios = (merged / mine for merged, mine in zip(costs["merge"], costs[way], strict=True))
                cells = [f"{figure} ({ratio:.1f}x)" for figure, ratio in zip(figures, ratios, strict=True)]
                if name == smallest:
                    moved, distance = drift(model, generation)
                    cells += [f"{moved:.2%}", f"{distance:.2g}"]
                rows.append([f"{num_parameters(model) / 1e9:.3f} B", way, *cells])
        del model
    print_table(title, columns, rows, left=7)

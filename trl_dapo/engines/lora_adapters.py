# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks which LoRA adapters vLLM can serve separately from the base model, and gathering of their weights."""

import json
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import cast

import torch
from accelerate.utils import is_peft_model
from peft import LoraConfig, PeftModel, PeftType, get_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import safe_open
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.utils import cached_file
from trl.distributed import DistributedBackend


# The values that vLLM accepts for `max_lora_rank`. Adapters of lower rank can be served too.
MAX_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)

# Fields of a LoRA config that vLLM supports, and those that only affect training. If any other field is set, vLLM
# would silently ignore some weights or scale them differently.
_SERVED_FIELDS = {
    "r",
    "lora_alpha",
    "use_rslora",
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "lora_dropout",
    "init_lora_weights",
    "eva_config",
    "inference_mode",
    "runtime_config",
    "megatron_core",
    "task_type",
    "peft_type",
    "peft_version",
    "auto_mapping",
    "base_model_name_or_path",
    "revision",
}
# All other initializations change the weights of the base model, but vLLM loads the base model from the checkpoint.
_INITS_THAT_KEEP_THE_BASE = (True, False, "gaussian", "eva", "orthogonal", "mica")


def as_peft(model: PreTrainedModel | PeftModel) -> PeftModel | None:
    """Return the model if it has a PEFT adapter, otherwise `None`."""
    return cast(PeftModel, model) if is_peft_model(model) else None


def why_not_served(model: PreTrainedModel | PeftModel) -> str | None:
    """
    Return why vLLM cannot serve the adapter separately from the base model, as a clause to follow "because". `None` if
    it can.
    """
    adapted = as_peft(model)
    if adapted is None:
        return "the model has no adapter"
    if len(adapted.active_adapters) != 1:
        return f"{len(adapted.active_adapters)} adapters are active ({', '.join(adapted.active_adapters)})"
    name = adapted.active_adapters[0]
    config = adapted.peft_config[name]
    if config.peft_type != PeftType.LORA or not isinstance(config, LoraConfig):
        return f"the adapter is {PeftType(config.peft_type).value}, not LoRA"
    default = LoraConfig()
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name not in _SERVED_FIELDS and value != getattr(default, field.name):
            return f"vLLM does not support `{field.name}={value!r}`"
    if config.init_lora_weights not in _INITS_THAT_KEEP_THE_BASE:
        return (
            f"`init_lora_weights={config.init_lora_weights!r}` changes the base model, but vLLM loads it from the "
            "checkpoint"
        )
    if config.r > MAX_LORA_RANKS[-1]:
        return f"its rank of {config.r} is above {MAX_LORA_RANKS[-1]}, the largest that vLLM supports"
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    if any(isinstance(layer, BaseTunerLayer) for layer in ends):
        return "it adapts the embedding or the head, which vLLM only partly supports"
    if model.config.get_text_config() is not model.config:
        return "vLLM adapts only a part of a model with images"
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if others := [parameter for parameter in trained if f".{name}" not in parameter or "lora_" not in parameter]:
        return f"weights that are not part of the adapter are trained ({others[0]})"
    return None


def changed_weight(model: PeftModel) -> str | None:
    """
    Return the name of a base weight that differs from the checkpoint, from which vLLM loads the base model. `None` if
    there is none.
    """
    # Quantized and sharded weights, and those that transformers stores in another form, are not compared.
    weights = {
        name.removeprefix("base_model.model.").replace(".base_layer", ""): parameter.detach()
        for name, parameter in model.named_parameters()
        if "lora_" not in name and type(parameter) is torch.nn.Parameter and parameter.numel()
    }
    for path in _checkpoint_files(model.name_or_path):
        with safe_open(path, framework="pt") as file:
            for name in sorted(weights.keys() & file.keys()):
                stored, weight = file.get_slice(name), weights[name]
                if stored.get_dtype() not in ("F32", "F16", "BF16") or not weight.ndim:
                    continue
                # The first row is enough: merging or training changes all rows of a weight.
                if tuple(stored.get_shape()) != weight.shape or not torch.equal(
                    stored[:1].to(weight.dtype), weight[:1].cpu()
                ):
                    return name
    return None


def _checkpoint_files(name_or_path: str) -> list[str]:
    """
    Return the safetensors files of a checkpoint that transformers has loaded before. The list is empty if there is no
    checkpoint, or if it is in another format.
    """
    if not name_or_path:
        return []
    find = partial(cached_file, name_or_path, local_files_only=True, _raise_exceptions_for_missing_entries=False)
    if whole := find("model.safetensors"):
        return [whole]
    if (index := find("model.safetensors.index.json")) is None:
        return []
    names = sorted(set(json.loads(Path(index).read_text())["weight_map"].values()))
    return [path for path in map(find, names) if path is not None]


def max_lora_rank(rank: int) -> int:
    """Return the smallest `max_lora_rank` of vLLM that is enough for an adapter of this rank."""
    return next(size for size in MAX_LORA_RANKS if size >= rank)


def gather_adapter(
    model: PeftModel, adapter: str, dist: DistributedBackend, dtype: torch.dtype | None = None
) -> dict[str, torch.Tensor]:
    """
    Return the complete weights of an adapter on the CPU, under the names that PEFT uses. Collective. `dist` describes
    how the model is sharded.
    """
    parameters = {
        name.replace("_checkpoint_wrapped_module.", ""): parameter
        for name, parameter in model.named_parameters()
        if "lora_" in name and f".{adapter}." in name
    }
    with dist.gather_params(list(parameters.values())):
        whole = {
            name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().to("cpu", dtype, copy=True)
            for name, value in parameters.items()
        }
    return get_peft_model_state_dict(model, state_dict=whole, adapter_name=adapter, save_embedding_layers=False)

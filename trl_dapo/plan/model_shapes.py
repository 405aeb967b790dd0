# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Where a plan has a model's config from: a folder, the hub, or a table."""

import json
import logging
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..models import ModelShape


HUB_SECONDS = 2.0  # that the hub may take to answer

_QWEN = {"model_type": "qwen2", "attention_bias": True, "vocab_size": 151_936, "tie_word_embeddings": True}
_QWEN3 = {**_QWEN, "model_type": "qwen3", "attention_bias": False, "head_dim": 128, "num_key_value_heads": 8}
_SMOLLM2 = {"model_type": "llama", "vocab_size": 49_152, "tie_word_embeddings": True}


def _sizes(family: dict[str, Any], *sizes: int, **others: Any) -> dict[str, Any]:
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    return {**family, **dict(zip(names, sizes, strict=True)), **others}


_UNTIED = {"vocab_size": 152_064, "tie_word_embeddings": False}
# From the `config.json` of each on the hub, which does not change: so that a plan needs no network. Of models with
# images the text model's sizes, and how many weights the rest has.
PUBLISHED = {
    "HuggingFaceTB/SmolLM2-135M": _sizes(_SMOLLM2, 576, 1_536, 30, 9, num_key_value_heads=3),
    "Qwen/Qwen2.5-0.5B": _sizes(_QWEN, 896, 4_864, 24, 14, num_key_value_heads=2),
    "Qwen/Qwen2.5-1.5B": _sizes(_QWEN, 1_536, 8_960, 28, 12, num_key_value_heads=2),
    "Qwen/Qwen2.5-3B": _sizes(_QWEN, 2_048, 11_008, 36, 16, num_key_value_heads=2),
    "Qwen/Qwen2.5-7B": _sizes(_QWEN, 3_584, 18_944, 28, 28, num_key_value_heads=4, **_UNTIED),
    "Qwen/Qwen2.5-14B": _sizes(_QWEN, 5_120, 13_824, 48, 40, num_key_value_heads=8, **_UNTIED),
    "Qwen/Qwen2.5-32B": _sizes(_QWEN, 5_120, 27_648, 64, 40, num_key_value_heads=8, **_UNTIED),
    "Qwen/Qwen2.5-Math-1.5B": _sizes(_QWEN, 1_536, 8_960, 28, 12, num_key_value_heads=2),
    "Qwen/Qwen2.5-Math-7B": _sizes(_QWEN, 3_584, 18_944, 28, 28, num_key_value_heads=4, **_UNTIED),
    "Qwen/Qwen2.5-VL-3B": _sizes(_QWEN, 2_048, 11_008, 36, 16, num_key_value_heads=2, num_vision_weights=668_684_288),
    "Qwen/Qwen2.5-VL-7B": _sizes(
        _QWEN, 3_584, 18_944, 28, 28, num_key_value_heads=4, num_vision_weights=676_550_144, **_UNTIED
    ),
    "Qwen/Qwen3-0.6B": _sizes(_QWEN3, 1_024, 3_072, 28, 16),
    "Qwen/Qwen3-1.7B": _sizes(_QWEN3, 2_048, 6_144, 28, 16),
    "Qwen/Qwen3-4B": _sizes(_QWEN3, 2_560, 9_728, 36, 32),
    "Qwen/Qwen3-8B": _sizes(_QWEN3, 4_096, 12_288, 36, 32, tie_word_embeddings=False),
}
# What `tiny_model: true` makes.
TINY = _sizes(
    {**_QWEN3, "vocab_size": 258, "head_dim": 16, "num_key_value_heads": 2, "tie_word_embeddings": False},
    *(64, 128, 2, 4),
)
# Families whose weights `ModelShape` counts itself, which takes a moment; others are built on the meta device.
COUNTED = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")


def shape_of(config: dict) -> ModelShape:
    """The shape that a `config.json` describes, with all its weights."""
    shape = ModelShape.from_config(config)
    if config["model_type"] in COUNTED:
        return shape
    import torch
    import transformers

    family = transformers.AutoConfig.for_model(**config)
    is_causal = type(family) in transformers.AutoModelForCausalLM._model_mapping
    auto = transformers.AutoModelForCausalLM if is_causal else transformers.AutoModelForImageTextToText
    with torch.device("meta"):
        model = auto.from_config(family)
    num_weights = sum(weight.numel() for weight in model.parameters())
    return replace(shape, num_other=num_weights - shape.num_parameters)


def find_shape(name: str, revision: str | None = None) -> tuple[ModelShape, str]:
    """A model's shape, and in words where its config is from: a folder, the hub's cache, the hub, or `PUBLISHED`."""
    # A folder that is not there yet is taken for the known model that its name begins with.
    path = Path(name, "config.json")
    if path.is_file():
        return _read_shape(path), f"{path}"
    found = None if Path(name).is_absolute() or name.count("/") != 1 else _from_hub(name, revision)
    if found is not None:
        return _read_shape(found), "the hub's config.json"
    known = [model for model in PUBLISHED if f"{Path(name).name}-".startswith(f"{Path(model).name}-")]
    if not known:
        raise ValueError(
            f"The config of {name} was not found: no such folder, not in the hub's cache, and the hub did not answer. "
            f"Put its config.json in a folder and name that by `--model_name_or_path`."
        )
    best = max(known, key=len)
    return shape_of(PUBLISHED[best]), f"trl-dapo's table, as published for {best}"


def _read_shape(path: str | Path) -> ModelShape:
    try:
        config = json.loads(Path(path).read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}.") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} is no model's config: it holds no mapping.")
    return shape_of(config)


def _from_hub(name: str, revision: str | None) -> str | None:
    """The path of the model's `config.json` in the hub's cache, asked for where it is missing; `None` without one."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    cached = try_to_load_from_cache(name, "config.json", revision=revision)
    if isinstance(cached, str):
        return cached
    if os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "TRUE", "YES", "ON"):
        return None
    found = []
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its retries, of which nobody waits for the last

    def ask() -> None:
        try:
            found.append(hf_hub_download(name, "config.json", revision=revision, etag_timeout=HUB_SECONDS))
        except Exception:
            return  # offline, no such model, no right to see it: the table may know it

    # In a thread that nobody waits for longer: looking a name up without a network has no timeout.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(HUB_SECONDS)
    return found[0] if found else None

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""What a model's config says of its sizes, and where the config comes from."""

import json
import logging
import os
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any


HUB_SECONDS = 2.0  # that the hub may take to answer

_QWEN = {"model_type": "qwen2", "attention_bias": True, "vocab_size": 151_936, "tie_word_embeddings": True}
_QWEN3 = {**_QWEN, "model_type": "qwen3", "attention_bias": False, "head_dim": 128, "num_key_value_heads": 8}


def _sizes(
    family: dict[str, Any],
    hidden_size: int,
    intermediate_size: int,
    num_hidden_layers: int,
    num_attention_heads: int,
    **others: Any,
) -> dict[str, Any]:
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    sizes = (hidden_size, intermediate_size, num_hidden_layers, num_attention_heads)
    return {**family, **dict(zip(names, sizes, strict=True)), **others}


_UNTIED = {"vocab_size": 152_064, "tie_word_embeddings": False}
# From the `config.json` of each on the hub, which does not change: so that a plan needs no network. Of models with
# images the text model's sizes, and how many weights the rest has.
PUBLISHED = {
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
# What families call the number of experts.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
# Families whose weights `ModelShape` counts itself, which takes a moment; others are built on the meta device.
COUNTED = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")


@dataclass(frozen=True)
class ModelShape:
    """
    Sizes of a decoder: embedding, layers of attention and a gated MLP with RMSNorm, output layer.

    Attributes:
        hidden_size, num_layers, num_heads, num_kv_heads, head_dim, vocab_size (`int`):
            As in `config.json`.
        intermediate_size (`int`):
            Width of the MLP, or of an expert.
        num_experts, num_active_experts (`int`):
            1 and 1 without experts.
        is_tied (`bool`):
            Whether the output layer is the embedding.
        has_qkv_bias, has_qk_norm (`bool`):
            Whether queries, keys and values have a bias; whether queries and keys are normalized.
        num_other (`int`):
            Weights that are none of these, such as a vision tower's.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    intermediate_size: int
    num_experts: int = 1
    num_active_experts: int = 1
    is_tied: bool = False
    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    num_other: int = 0

    @classmethod
    def from_config(cls, config: dict) -> "ModelShape":
        """The shape that a `config.json` describes; of a model with images, its text model's and the rest."""
        text = {**config, **config.get("text_config", {})}
        if "kv_lora_rank" in text:
            raise ValueError("The model compresses its keys and values (`kv_lora_rank`), which a plan does not know.")
        try:
            hidden_size, num_heads = text["hidden_size"], text["num_attention_heads"]
            num_experts = next((text[name] for name in EXPERTS if text.get(name)), 1)
            width = "moe_intermediate_size" if num_experts > 1 and "moe_intermediate_size" in text else None
            shape = cls(
                hidden_size=hidden_size,
                num_layers=text["num_hidden_layers"],
                num_heads=num_heads,
                num_kv_heads=text.get("num_key_value_heads") or num_heads,
                head_dim=text.get("head_dim") or hidden_size // num_heads,
                vocab_size=text["vocab_size"],
                intermediate_size=text[width or "intermediate_size"],
                num_experts=num_experts,
                num_active_experts=text.get("num_experts_per_tok", 1) if num_experts > 1 else 1,
                is_tied=config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)),
                has_qkv_bias=text.get("attention_bias", config["model_type"] == "qwen2"),
                has_qk_norm="qwen3" in config["model_type"],
                num_other=config.get("num_vision_weights", 0),  # of `PUBLISHED` alone
            )
        except KeyError as error:
            raise ValueError(
                f"The model's config.json has no {error.args[0]!r}: its memory cannot be planned."
            ) from None
        except TypeError:
            raise ValueError("The model's config.json has sizes that are no numbers.") from None
        if config["model_type"] in COUNTED:
            return shape
        return replace(shape, num_other=_count_on_meta_device(config) - shape.num_parameters)

    @property
    def linears(self) -> dict[str, tuple[int, int, int]]:
        """Linear layers by name: inputs, outputs, and how many the model has."""
        hidden, queries = self.hidden_size, self.num_heads * self.head_dim
        keys, experts = self.num_kv_heads * self.head_dim, self.num_layers * self.num_experts
        return {
            "q_proj": (hidden, queries, self.num_layers),
            "k_proj": (hidden, keys, self.num_layers),
            "v_proj": (hidden, keys, self.num_layers),
            "o_proj": (queries, hidden, self.num_layers),
            "gate_proj": (hidden, self.intermediate_size, experts),
            "up_proj": (hidden, self.intermediate_size, experts),
            "down_proj": (self.intermediate_size, hidden, experts),
        }

    @property
    def num_linear(self) -> int:
        """Weights of the layers' linear maps."""
        return sum(inputs * outputs * count for inputs, outputs, count in self.linears.values())

    @property
    def largest_linear(self) -> int:
        """Weights of the largest of these."""
        return max(inputs * outputs for inputs, outputs, _ in self.linears.values())

    @property
    def num_embedding(self) -> int:
        """Weights of the embedding, and of the output layer."""
        return self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """All weights."""
        norms = self.hidden_size * (2 * self.num_layers + 1)
        norms += 2 * self.head_dim * self.num_layers * self.has_qk_norm
        biases = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim * self.num_layers * self.has_qkv_bias
        router = self.hidden_size * self.num_experts * self.num_layers * (self.num_experts > 1)
        embeddings = self.num_embedding * (1 if self.is_tied else 2)
        return self.num_linear + norms + biases + router + embeddings + self.num_other

    @property
    def num_multiplied(self) -> int:
        """Weights that a token is multiplied with: the input embedding is looked up, other experts pass."""
        mlp = 3 * self.hidden_size * self.intermediate_size * self.num_layers
        return self.num_linear - mlp * (self.num_experts - self.num_active_experts) + self.num_embedding

    @property
    def kv_bytes(self) -> int:
        """Bytes of a token's keys and values in bfloat16, in all layers."""
        return 2 * 2 * self.num_layers * self.num_kv_heads * self.head_dim

    def num_lora(self, rank: int, target_modules: list[str] | str | None) -> int:
        """
        Weights of an adapter: `rank * (inputs + outputs)` of each layer it is on (section 4.1 of
        [LoRA](https://huggingface.co/papers/2106.09685)).
        """
        linears = [self.linears[name] for name in lora_targets(target_modules)]
        return sum(rank * (inputs + outputs) * count for inputs, outputs, count in linears)


def lora_targets(target_modules: list[str] | str | None) -> list[str]:
    """Names in `ModelShape.linears` that an adapter is on; by default PEFT's: queries and values."""
    linears = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    if target_modules in ("all-linear", ["all-linear"]):
        return list(linears)
    named = ["q_proj", "v_proj"] if target_modules is None else target_modules
    named = [named] if isinstance(named, str) else named
    if unknown := sorted(set(named) - set(linears)):
        raise ValueError(f"`lora_target_modules` names {', '.join(unknown)}; a plan knows {', '.join(linears)}.")
    return list(named)


def _count_on_meta_device(config: dict) -> int:
    """Weights of a model of any family, built without memory."""
    import torch
    import transformers

    family = transformers.AutoConfig.for_model(**config)
    is_causal = type(family) in transformers.AutoModelForCausalLM._model_mapping
    auto = transformers.AutoModelForCausalLM if is_causal else transformers.AutoModelForImageTextToText
    with torch.device("meta"):
        model = auto.from_config(family)
    return sum(weight.numel() for weight in model.parameters())


def find_shape(name: str, revision: str | None = None) -> tuple[ModelShape, str]:
    """
    A model's shape: from a local folder, else the hub's cache, else the hub, else `PUBLISHED`.

    Args:
        name (`str`):
            Model on the hub, or folder with a `config.json`. A folder that is not there yet is taken for the known
            model that its name begins with.
        revision (`str`, *optional*):
            Of the model on the hub.

    Returns:
        `tuple[ModelShape, str]`: the shape, and in words where its config is from.

    Raises:
        ValueError: If no config is found.
    """
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
    return ModelShape.from_config(PUBLISHED[best]), f"trl-dapo's table, as published for {best}"


def _read_shape(path: str | Path) -> ModelShape:
    try:
        config = json.loads(Path(path).read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}.") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} is no model's config: it holds no mapping.")
    return ModelShape.from_config(config)


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

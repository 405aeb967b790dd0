# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""A plan: the memory and disk that a recipe needs, whether it fits, and the source of its model's sizes."""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from ..models import ModelShape
from ..number_format import format_bytes
from ..settings.arguments import call_within
from .batches import VLLM, Batches
from .memory import VLLM_ASLEEP
from .recipe import Recipe, read
from .training import Training


FRAGMENTS = 0.05  # share of a GPU's memory that fragmentation makes unusable


@dataclass(frozen=True)
class Plan:
    """
    The memory, batches and tokens of a run, as far as they can be known without its machine. Bytes are those of one
    GPU that trains, unless stated otherwise.
    """

    recipe: Recipe
    shape: ModelShape  # of its model
    source: str  # of the shape, in words

    @cached_property
    def batches(self) -> Batches:
        return Batches(self.recipe)

    @cached_property
    def training(self) -> Training:
        return Training(self.recipe, self.shape, self.batches)

    @cached_property
    def vllm(self) -> VLLM | None:
        """The engine of vLLM, if it samples."""
        return VLLM(self.recipe, self.shape) if self.recipe.settings.use_vllm else None

    # Memory

    @property
    def vllm_while_sampling(self) -> float:
        """Bytes that vLLM takes on a GPU that trains while it samples; 0 on a server or without vLLM."""
        return 0.0 if self.vllm is None or self.recipe.uses_a_server else self.vllm.share

    @property
    def vllm_while_updating(self) -> float:
        """Bytes that vLLM keeps on a GPU that trains while the policy is updated."""
        is_asleep = self.vllm_while_sampling > 0 and self.recipe.settings.vllm_enable_sleep_mode
        return VLLM_ASLEEP if is_asleep else self.vllm_while_sampling

    @property
    def peak_updating(self) -> float:
        """Peak bytes of an update, with what vLLM keeps meanwhile."""
        return sum(self.training.memory.values()) + self.vllm_while_updating

    @property
    def peak_sampling(self) -> float:
        """
        Peak bytes while completions are sampled, including vLLM if it shares the GPU, or the cache of `generate`.
        """
        kept = sum(self.training.memory[part] for part in ("weights", "optimizer", "reference", "context"))
        if self.vllm is not None:
            # Weights are sent to vLLM one by one, so at most the largest is gathered.
            gathered = 0
            if self.recipe.sharding.shards_weights:
                gathered = self.training.weights.trained * self.shape.num_embedding
            return kept + gathered + self.vllm_while_sampling
        rows = self.batches.num_rows / self.recipe.cluster.num_train
        row = self.recipe.longest_prompt + self.recipe.settings.max_completion_length
        return kept + rows * row * self.shape.kv_bytes / 2 * self.training.weights.computed

    @property
    def peak(self) -> float:
        return max(self.peak_updating, self.peak_sampling)

    # Verdict

    @cached_property
    def problems(self) -> list[str]:
        """Reasons why the run does not fit; empty if it does."""
        found = []
        if self.vllm is not None and self.cache_is_too_small:
            found.append(
                f"vLLM's share of {format_bytes(self.vllm.share)} leaves a cache of {self.vllm.cache_tokens:,} "
                f"tokens, less than the {self.batches.longest_row:,} of one prompt and completion"
            )
        for moment, peak in (("updating", self.peak_updating), ("sampling", self.peak_sampling)):
            if peak > self.usable:
                found.append(f"{moment} takes {format_bytes(peak)}, more than the usable {format_bytes(self.usable)}")
        return found

    @property
    def cache_is_too_small(self) -> bool:
        """Whether vLLM's cache does not hold one prompt with its completion."""
        return self.vllm is not None and self.vllm.cache_tokens < self.batches.longest_row

    @property
    def fits_into_memory(self) -> bool:
        """Whether the memory of a GPU that trains is large enough."""
        return self.peak <= self.usable

    @property
    def usable(self) -> float:
        """Bytes of a GPU that can be used in spite of fragmentation."""
        return (1 - FRAGMENTS) * self.recipe.cluster.gpu.memory

    @property
    def fits_with_smaller_batches(self) -> bool:
        """Whether there is memory left for batches of some size next to what a run holds whatever its batches are."""
        return self._has_room(self.vllm_while_updating, self.vllm_while_sampling)

    @property
    def fits_with_a_smaller_share(self) -> bool:
        """
        Whether there is memory left for batches of some size if vLLM's share of a GPU that trains is as small as
        possible, so that its cache just holds one prompt with its completion.
        """
        if self.vllm is None or self.recipe.uses_a_server or self.cache_is_too_small:
            return False
        spare = self.vllm.memory["cache"] * (1 - self.batches.longest_row / self.vllm.cache_tokens)
        while_sampling = self.vllm_while_sampling - spare
        is_asleep = self.recipe.settings.vllm_enable_sleep_mode
        return self._has_room(self.vllm_while_updating if is_asleep else while_sampling, while_sampling)

    def _has_room(self, vllm_while_updating: float, vllm_while_sampling: float) -> bool:
        parts = ("weights", "gradients", "optimizer", "reference", "context")
        fixed = sum(self.training.memory[part] for part in parts)
        while_sampling = fixed - self.training.memory["gradients"] + vllm_while_sampling
        return max(fixed + vllm_while_updating, while_sampling) < self.usable

    @property
    def fits(self) -> bool:
        return not self.problems


def plan(
    config: str, gpus: str | None = None, accelerate_config: str | None = None, overrides: Sequence[str] = ()
) -> Plan:
    """
    Plan a run without its machine: its memory, batches and tokens.

    Args:
        config (`str`):
            Recipe: a file, or the name of one that comes with the package.
        gpus (`str`, *optional*):
            GPUs such as `8xH100-80GB`, or `64+8xH100-80GB` if 64 train and 8 serve vLLM. By default those that the
            recipe's header names.
        accelerate_config (`str`, *optional*):
            File or name of accelerate's configuration. By default the one that the recipe's header names.
        overrides (`Sequence[str]`, *optional*):
            Changes to the recipe, `--field value ...` as `trl-dapo train` takes them.

    Returns:
        [`Plan`]: The plan.

    Raises:
        `ValueError` or `OSError`: If something is missing or invalid. The message is one line.
    """
    recipe = read(config, gpus, accelerate_config, overrides)
    settings = recipe.settings
    if settings.tiny_model:
        shape, source = shape_of(TINY), "of the random model that the run creates"
    elif settings.model_name_or_path is None:
        raise ValueError("`model_name_or_path` is not set. Name a model.")
    else:
        shape, source = find_shape(settings.model_name_or_path, settings.model_revision)
    recipe.settle(has_images=shape.num_other > 0)
    planned = Plan(recipe, shape, source)
    planned.training.check_sync()
    _ = planned.problems, planned.training.checkpoint  # raises here what would be raised while the page is written
    return planned


# ---- A model's config: from a folder, from the hub, or from a table ----


HUB_SECONDS = 2.0  # within which the hub has to respond

_QWEN = {"model_type": "qwen2", "attention_bias": True, "vocab_size": 151_936, "tie_word_embeddings": True}
_QWEN3 = {**_QWEN, "model_type": "qwen3", "attention_bias": False, "head_dim": 128, "num_key_value_heads": 8}
_SMOLLM2 = {"model_type": "llama", "vocab_size": 49_152, "tie_word_embeddings": True}


def _sizes(family: dict[str, Any], *sizes: int, **others: Any) -> dict[str, Any]:
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    return {**family, **dict(zip(names, sizes, strict=True)), **others}


_LARGE = {**_QWEN, "vocab_size": 152_064, "tie_word_embeddings": False}
# Copied from the `config.json` of each model on the hub, which does not change, so that a plan needs no network.
# Models with images have the sizes of their text model and the number of all other weights.
PUBLISHED = {
    "HuggingFaceTB/SmolLM2-135M": _sizes(_SMOLLM2, 576, 1_536, 30, 9, num_key_value_heads=3),
    "Qwen/Qwen2.5-0.5B": _sizes(_QWEN, 896, 4_864, 24, 14, num_key_value_heads=2),
    "Qwen/Qwen2.5-1.5B": _sizes(_QWEN, 1_536, 8_960, 28, 12, num_key_value_heads=2),
    "Qwen/Qwen2.5-3B": _sizes(_QWEN, 2_048, 11_008, 36, 16, num_key_value_heads=2),
    "Qwen/Qwen2.5-7B": _sizes(_LARGE, 3_584, 18_944, 28, 28, num_key_value_heads=4),
    "Qwen/Qwen2.5-14B": _sizes(_LARGE, 5_120, 13_824, 48, 40, num_key_value_heads=8),
    "Qwen/Qwen2.5-32B": _sizes(_LARGE, 5_120, 27_648, 64, 40, num_key_value_heads=8),
    "Qwen/Qwen2.5-Math-1.5B": _sizes(_QWEN, 1_536, 8_960, 28, 12, num_key_value_heads=2),
    "Qwen/Qwen2.5-Math-7B": _sizes(_LARGE, 3_584, 18_944, 28, 28, num_key_value_heads=4),
    "Qwen/Qwen2.5-VL-3B": _sizes(_QWEN, 2_048, 11_008, 36, 16, num_key_value_heads=2, num_vision_weights=668_684_288),
    "Qwen/Qwen2.5-VL-7B": _sizes(_LARGE, 3_584, 18_944, 28, 28, num_key_value_heads=4, num_vision_weights=676_550_144),
    "Qwen/Qwen3-0.6B": _sizes(_QWEN3, 1_024, 3_072, 28, 16),
    "Qwen/Qwen3-1.7B": _sizes(_QWEN3, 2_048, 6_144, 28, 16),
    "Qwen/Qwen3-4B": _sizes(_QWEN3, 2_560, 9_728, 36, 32),
    "Qwen/Qwen3-8B": _sizes(_QWEN3, 4_096, 12_288, 36, 32, tie_word_embeddings=False),
}
# The model that `tiny_model: true` makes.
TINY = _sizes(
    {**_QWEN3, "vocab_size": 258, "head_dim": 16, "num_key_value_heads": 2, "tie_word_embeddings": False},
    64,
    128,
    2,
    4,
)
# Families whose weights `ModelShape` counts by itself, which is fast. Other models are built on the meta device.
COUNTED = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")


def shape_of(config: dict) -> ModelShape:
    """Return the shape that a `config.json` describes, with all its weights."""
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
    return replace(shape, num_other=sum(weight.numel() for weight in model.parameters()) - shape.num_parameters)


def find_shape(name: str, revision: str | None = None) -> tuple[ModelShape, str]:
    """Return a model's shape and, in words, its source: a folder, the hub's cache, the hub, or `PUBLISHED`."""
    # A folder that does not exist yet is taken for the known model that its name begins with.
    path = Path(name, "config.json")
    if path.is_file():
        return _read_shape(path), f"{path}"
    found = None if Path(name).is_absolute() or name.count("/") != 1 else _from_hub(name, revision)
    if found is not None:
        return _read_shape(found), "the hub's config.json"
    known = [model for model in PUBLISHED if f"{Path(name).name}-".startswith(f"{Path(model).name}-")]
    if not known:
        raise ValueError(
            f"The config of {name} was not found: there is no such folder, the hub's cache does not have it, and the "
            f"hub did not respond. Put its config.json in a folder, and pass the folder as `--model_name_or_path`."
        )
    best = max(known, key=len)
    return shape_of(PUBLISHED[best]), f"trl-dapo's table, as published for {best}"


def _read_shape(path: str | Path) -> ModelShape:
    try:
        config = json.loads(Path(path).read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}.") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} is not a model's config: it does not contain a JSON object.")
    return shape_of(config)


def _from_hub(name: str, revision: str | None) -> str | None:
    """Return the path of the model's `config.json` in the hub's cache, downloaded if needed, or `None`."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    cached = try_to_load_from_cache(name, "config.json", revision=revision)
    if isinstance(cached, str):
        return cached
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # retries outlast the deadline below, and would warn
    download = partial(hf_hub_download, name, "config.json", revision=revision, etag_timeout=HUB_SECONDS)
    return call_within(HUB_SECONDS, download)  # if it fails for any reason, the table may know the model

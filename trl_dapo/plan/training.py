# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""An update: what it holds in memory, and what a checkpoint takes of the disk."""

from dataclasses import dataclass
from functools import cache, cached_property
from importlib.metadata import version
from typing import NamedTuple

from ..models import ModelShape
from . import memory
from .batches import Batches
from .memory import ENDS, Adapter
from .recipe import Recipe


class Weights(NamedTuple):
    """What of a model trains, and how precise it is, in bytes."""

    num_trained: int
    trained: int  # of a weight that trains
    frozen: float  # of all others
    held: int  # of a number that layers pass on
    computed: int  # of one that they compute in
    num_saved: int = 0  # of those that train, in copies of whole modules
    saved: int = 4  # of a weight of these

    @property
    def kinds(self) -> list[tuple[int, int]]:
        """How many train of one precision, and that."""
        return [(self.num_trained - self.num_saved, self.trained), (self.num_saved, self.saved)]


@cache
def makes_tiles() -> bool:
    """Whether TRL makes logits in tiles: before 1.16 it makes them all at once."""
    return tuple(map(int, version("trl").split(".")[:2])) >= (1, 16)


@dataclass(frozen=True)
class Training:
    recipe: Recipe
    shape: ModelShape
    batches: Batches

    @cached_property
    def adapter(self) -> Adapter | None:
        """What trains in place of all weights."""
        return memory.read_adapter(self.recipe.settings, self.shape)

    @cached_property
    def weights(self) -> Weights:
        """What trains, by the rules of the libraries."""
        # accelerate holds FSDP2's trained weights in float32, DeepSpeed all in bfloat16; PEFT an adapter in float32,
        # TRL one of a quantized model in bfloat16. Autocast leaves weights, and what layers pass on, as loaded.
        settings, sharding, shape = self.recipe.settings, self.recipe.sharding, self.shape
        mixed = settings.bf16 if settings.bf16 is not None else not settings.fp16
        loaded = 4 if settings.dtype in ("float32", None) else 2
        computed = 2 if mixed or settings.fp16 else loaded
        held = computed if mixed and (sharding.is_deepspeed or sharding.kind == "fsdp2") else loaded
        upcast = mixed and sharding.kind == "fsdp2"
        if self.adapter is None:
            return Weights(shape.num_parameters, 4 if upcast else held, 0.0, held, computed)
        base, bits = held if sharding.is_deepspeed else loaded, 4 if settings.load_in_4bit else 8
        frozen: float = base * shape.num_parameters
        if settings.load_in_4bit or settings.load_in_8bit:
            frozen = memory.quantized_bytes(shape, bits, settings.use_bnb_nested_quant, base)
        in_half = sharding.is_deepspeed or settings.load_in_4bit or settings.load_in_8bit
        # A copy of a module is as precise as what it is a copy of.
        if upcast:
            trained = saved = 4
        elif in_half:
            trained = saved = 2
        else:
            trained, saved = 4, loaded
        num_saved = self.adapter.num_saved(shape)
        return Weights(self.adapter.num_lora(shape) + num_saved, trained, frozen, held, computed, num_saved, saved)

    @cached_property
    def memory(self) -> dict[str, float]:
        """Bytes by part, where an update is at its fullest."""
        settings, weights, sharding = self.recipe.settings, self.weights, self.recipe.sharding
        options = settings.accelerator_config if isinstance(settings.accelerator_config, dict) else {}
        syncs_each = (options.get("gradient_accumulation_kwargs") or {}).get("sync_each_batch", False)
        accumulates = self.batches.num_microbatches > 1 and not syncs_each
        kept, copies = (
            memory.state_bytes(
                frozen, num_trained, trained, self._optim, sharding, self.recipe.cluster.num_train, accumulates
            )
            for frozen, (num_trained, trained) in zip((weights.frozen, 0.0), weights.kinds, strict=True)
        )
        state = {part: kept[part] + copies[part] for part in kept}
        activations = memory.activation_bytes(
            self.shape,
            self.batches.microbatch_tokens,
            self.batches.longest_row,
            weights.held,
            weights.computed,
            settings.gradient_checkpointing,
            self.attention,
            self.adapter,
            makes_tiles(),
        )
        if settings.load_in_4bit or settings.load_in_8bit:  # the layer at work is turned back
            activations["work"] += weights.computed * self.shape.largest_linear
        saved = () if self.adapter is None else self.adapter.saved
        if self.adapter is None:
            head = weights.trained
        else:
            head = weights.saved if "lm_head" in saved else weights.held
        gathered = memory.gathered_bytes(self.shape, sharding, head, num_copies=len(set(ENDS) & set(saved)))
        context = 0.0 if self.recipe.cluster.gpu.name == "CPU" else memory.CONTEXT
        shards = self.recipe.cluster.num_train if sharding.shards_weights else 1
        compares = settings.beta != 0 and self.adapter is None  # an adapter is switched off instead
        reference = weights.held * self.shape.num_parameters / shards if compares else 0.0
        return {**state, "reference": reference, **activations, "gathered": gathered, "context": context}

    @property
    def _optim(self) -> str:
        return self.recipe.settings.optim or "adamw_torch"  # its default hangs on torch's version, its memory does not

    @property
    def attention(self) -> str:
        return self.recipe.settings.attn_implementation or "sdpa"

    def check_sync(self) -> None:
        """Refuse an adapter that cannot travel to vLLM if nothing else may."""
        settings = self.recipe.settings
        travels = self.adapter is not None and settings.vllm_lora_sync != "merge" and self.adapter.travels(self.shape)
        must_travel = settings.vllm_lora_sync == "adapter" or settings.load_in_4bit or settings.load_in_8bit
        if settings.use_vllm and must_travel and not travels:
            raise ValueError(
                "`vllm_lora_sync='adapter'` and a quantized base need an adapter that vLLM serves beside its base: "
                "LoRA on linear layers, without copies, DoRA or experts. Change the adapter, or leave both out."
            )

    @property
    def checkpoint(self) -> float:
        """Bytes on disk of one checkpoint, of all processes."""
        settings, weights = self.recipe.settings, self.weights
        if settings.save_strategy in ("no", False):
            return 0.0
        optim, sharding, is_adapter = self._optim, self.recipe.sharding, self.adapter is not None
        return sum(
            memory.checkpoint_bytes(
                weights.frozen, num_trained, trained, optim, sharding, settings.save_only_model, is_adapter
            )
            for num_trained, trained in weights.kinds
            if num_trained
        )

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The memory that an update takes, and the disk space that a checkpoint takes."""

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
    """The number of weights that train, and the precision of all, in bytes."""

    num_trained: int
    trained: int  # bytes of a weight that trains
    frozen: float  # bytes of all weights that do not train, together
    held: int  # bytes of a number that layers pass on
    computed: int  # bytes of a number that layers compute with
    num_saved: int = 0  # trained weights that are in copies of whole modules (`modules_to_save`)
    saved: int = 4  # bytes of a weight in these copies

    @property
    def kinds(self) -> list[tuple[int, int]]:
        """Number of trained weights and their precision, without and with `modules_to_save`."""
        return [(self.num_trained - self.num_saved, self.trained), (self.num_saved, self.saved)]


@cache
def makes_tiles() -> bool:
    """Whether TRL computes logits in tiles. Versions before 1.16 compute them all at once."""
    return tuple(map(int, version("trl").split(".")[:2])) >= (1, 16)


@dataclass(frozen=True)
class Training:
    """The updates of a run."""

    recipe: Recipe
    shape: ModelShape
    batches: Batches

    @cached_property
    def adapter(self) -> Adapter | None:
        """The adapter that trains instead of all weights, if there is one."""
        return memory.read_adapter(self.recipe.settings, self.shape)

    @cached_property
    def weights(self) -> Weights:
        """The weights that train, and their precision."""
        # accelerate holds trained weights in float32 with FSDP2 and in bfloat16 with DeepSpeed. PEFT holds an adapter
        # in float32, and TRL in bfloat16 if the model is quantized. With autocast, weights and the numbers that layers
        # pass on keep the precision in which the model was loaded.
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
        # A copy of a module has the precision of the original.
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
        """Bytes by part, at the peak of an update."""
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
        if settings.load_in_4bit or settings.load_in_8bit:  # a layer is dequantized while it is computed
            activations["work"] += weights.computed * self.shape.largest_linear
        saved = () if self.adapter is None else self.adapter.saved
        if self.adapter is None:
            head = weights.trained
        else:
            head = weights.saved if "lm_head" in saved else weights.held
        gathered = memory.gathered_bytes(self.shape, sharding, head, num_copies=len(set(ENDS) & set(saved)))
        context = 0.0 if self.recipe.cluster.gpu.name == "CPU" else memory.CONTEXT
        shards = self.recipe.cluster.num_train if sharding.shards_weights else 1
        compares = settings.beta != 0 and self.adapter is None  # with an adapter, switching it off gives the reference
        reference = weights.held * self.shape.num_parameters / shards if compares else 0.0
        return {**state, "reference": reference, **activations, "gathered": gathered, "context": context}

    @property
    def _optim(self) -> str:
        # The default depends on torch's version, but all defaults take the same memory.
        return self.recipe.settings.optim or "adamw_torch"

    @property
    def attention(self) -> str:
        return self.recipe.settings.attn_implementation or "sdpa"

    def check_sync(self) -> None:
        """Refuse an adapter that vLLM cannot serve if the settings do not allow anything else to be sent."""
        settings = self.recipe.settings
        can_send = (
            self.adapter is not None and settings.vllm_lora_sync != "merge" and self.adapter.can_be_served(self.shape)
        )
        must_send = settings.vllm_lora_sync == "adapter" or settings.load_in_4bit or settings.load_in_8bit
        if settings.use_vllm and must_send and not can_send:
            raise ValueError(
                "`vllm_lora_sync='adapter'` and a quantized base need an adapter that vLLM serves without merging it: "
                "LoRA on linear layers, without `modules_to_save`, DoRA or experts. Change the adapter, or use "
                "neither."
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

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The batches of a recipe (rows, optimizer steps, micro-batches and tokens), and the memory of vLLM."""

import math
from dataclasses import dataclass
from functools import cached_property

from ..models import ModelShape
from ..settings.batch_sizes import count_microbatches, describe_batches, describe_split_group, size_batches
from .memory import VLLM_WORK, vllm_cache_tokens
from .recipe import GPUS_PER_MACHINE, Recipe, declared_fields


SERVER_UTILIZATION = 0.9  # the default of `vllm serve` on GPUs of 70 GiB and more


@dataclass(frozen=True)
class Batches:
    """Batch sizes of a recipe, and the largest number of tokens in them."""

    recipe: Recipe

    @cached_property
    def sizes(self) -> dict[str, int]:
        """TRL's batch sizes, as [`DAPOConfig`] computes them for this number of processes."""
        settings, processes = self.recipe.settings, self.recipe.cluster.num_train
        rows = settings.per_device_train_batch_size
        if settings.prompts_per_rollout is not None or settings.prompts_per_step is not None:
            return size_batches(settings, declared_fields(), processes)
        steps = count_microbatches(settings, processes)
        batch = rows * processes * steps
        if batch % settings.num_generations:
            raise ValueError(describe_split_group(settings, steps, processes, settings.generation_batch_size))
        accumulated = {"gradient_accumulation_steps": settings.gradient_accumulation_steps}
        return accumulated | {"steps_per_generation": steps, "generation_batch_size": batch}

    @property
    def arithmetic(self) -> str:
        """The batch sizes in words, as a run prints them at its start."""
        return describe_batches(self.recipe.settings, self.sizes, self.recipe.cluster.num_train)

    @property
    def num_rows(self) -> int:
        """Rows of a rollout over all processes."""
        return self.sizes["generation_batch_size"]

    @property
    def num_steps(self) -> float:
        """Optimizer steps per rollout."""
        steps = self.sizes["steps_per_generation"] * self.recipe.settings.num_iterations
        return steps / self.sizes["gradient_accumulation_steps"]

    @property
    def num_rollouts(self) -> float | None:
        """Rollouts of the run, or `None` if `max_steps` does not set its end."""
        max_steps = self.recipe.settings.max_steps
        return max_steps / self.num_steps if max_steps and max_steps > 0 else None

    @property
    def longest_row(self) -> int:
        """Largest number of tokens of a prompt and its completion."""
        settings = self.recipe.settings
        row = self.recipe.longest_prompt + settings.max_completion_length
        return min(row, settings.vllm_max_model_length or row) if settings.use_vllm else row

    @property
    def microbatch_tokens(self) -> int:
        """Largest number of tokens of a micro-batch. A row that exceeds the budget is a micro-batch of its own."""
        settings = self.recipe.settings
        if settings.max_tokens_per_microbatch:
            return max(settings.max_tokens_per_microbatch, self.longest_row)
        return settings.per_device_train_batch_size * self.longest_row

    @cached_property
    def num_microbatches(self) -> int:
        """Largest number of micro-batches per optimizer step and process, reached if every row has the full length."""
        steps = self.sizes["gradient_accumulation_steps"]
        if not self.recipe.settings.max_tokens_per_microbatch:
            return steps
        rows = steps * self.recipe.settings.per_device_train_batch_size
        return math.ceil(rows / (self.microbatch_tokens // self.longest_row))

    @property
    def tokens_trained(self) -> int:
        """Largest number of completion tokens that a rollout trains on."""
        return self.num_rows * self.recipe.settings.max_completion_length

    @property
    def tokens_sampled(self) -> float:
        """Largest number of completion tokens that a rollout samples; infinite if nothing limits it."""
        settings = self.recipe.settings
        if not settings.use_dynamic_sampling or settings.dynamic_sampling_mode == "mask":
            return self.tokens_trained
        return (settings.dynamic_sampling_max_gen_batches or math.inf) * self.tokens_trained


@dataclass(frozen=True)
class VLLM:
    """An engine of vLLM that samples for a recipe."""

    recipe: Recipe
    shape: ModelShape

    @cached_property
    def num_shards(self) -> int:
        """Number of GPUs over which an engine's weights are split (tensor parallelism)."""
        cluster, settings, num_heads = self.recipe.cluster, self.recipe.settings, self.shape.num_heads
        if self.recipe.uses_a_server:
            return math.gcd(min(cluster.num_serve, GPUS_PER_MACHINE), num_heads)
        shards = settings.vllm_tensor_parallel_size
        if cluster.num_train % shards:
            raise ValueError(
                f"`vllm_tensor_parallel_size={shards}` does not divide the {cluster.num_train} GPUs that train. "
                f"{self._advise_on_shards()}"
            )
        if num_heads % shards:
            raise ValueError(
                f"`vllm_tensor_parallel_size={shards}` does not divide the model's {num_heads} attention heads. "
                f"{self._advise_on_shards()}"
            )
        return shards

    def _advise_on_shards(self) -> str:
        """Return the numbers of shards that are possible."""
        most = math.gcd(self.recipe.cluster.num_train, self.shape.num_heads)
        possible = [str(number) for number in range(1, most + 1) if most % number == 0]
        divides = "divides" if most == 1 else "divide"
        return (
            f"Set {' or '.join(possible)}, which {divides} the number of GPUs that train "
            f"({self.recipe.cluster.num_train}) and of attention heads ({self.shape.num_heads})."
        )

    @property
    def _utilization(self) -> float:
        return SERVER_UTILIZATION if self.recipe.uses_a_server else self.recipe.settings.vllm_gpu_memory_utilization

    @property
    def share(self) -> float:
        """Bytes that vLLM takes on each of its GPUs."""
        return self._utilization * self.recipe.cluster.gpu.memory

    @property
    def memory(self) -> dict[str, float]:
        """Bytes by part, on one of its GPUs."""
        weights = 2 * self.shape.num_parameters / self.num_shards
        return {"weights": weights, "work": VLLM_WORK, "cache": max(0.0, self.share - weights - VLLM_WORK)}

    @property
    def cache_tokens(self) -> int:
        """Number of tokens whose keys and values fit into the cache of an engine."""
        return vllm_cache_tokens(self.shape, self.recipe.cluster.gpu.memory, self._utilization, self.num_shards)

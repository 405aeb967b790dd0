# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""A rollout: its rows, steps and micro-batches; who samples it, in how many rounds, and how long it takes."""

import math
from dataclasses import dataclass
from functools import cached_property

from ..models import ModelShape
from ..sampling.round_size import MIN_RATE, AcceptanceRate
from ..settings.batch_sizes import describe_batches, describe_launch, describe_torn_group, size_batches
from .hardware import GPUS_PER_MACHINE
from .memory import VLLM_WORK, vllm_cache_tokens
from .recipe import Recipe, declared_fields
from .speed import (
    PADDING,
    STEP_SECONDS,
    TRANSFORMERS_STEP_SECONDS,
    Engine,
    Lengths,
    expected_rounds,
    sampling_seconds,
)


SERVER_UTILIZATION, SERVER_SEQUENCES = 0.9, 1024  # `vllm serve`'s own, on GPUs of 70 GiB and more


@dataclass(frozen=True)
class Batches:
    """Batch sizes of a recipe, whose completions have `mean_length` tokens in the mean."""

    recipe: Recipe
    mean_length: float

    @cached_property
    def sizes(self) -> dict[str, int]:
        """TRL's batch sizes, as [`DAPOConfig`] works them out on this number of processes."""
        settings, processes = self.recipe.settings, self.recipe.cluster.num_train
        rows = settings.per_device_train_batch_size
        if settings.prompts_per_rollout is not None or settings.prompts_per_step is not None:
            return size_batches(settings, declared_fields(), processes)
        steps, asked = settings.steps_per_generation, settings.generation_batch_size
        if asked is None:
            steps = steps or settings.gradient_accumulation_steps
        elif steps is not None and asked != rows * processes * steps:
            raise ValueError(f"`generation_batch_size={asked}` contradicts `steps_per_generation={steps}`: set one.")
        elif asked % (rows * processes):
            micro_batch = describe_launch(processes, rows)
            raise ValueError(f"`generation_batch_size={asked}` rows do not divide by {micro_batch}, a micro-batch.")
        else:
            steps = asked // (rows * processes)
        batch = rows * processes * steps
        if batch % settings.num_generations:
            raise ValueError(describe_torn_group(settings, steps, processes, asked))
        return {
            "gradient_accumulation_steps": settings.gradient_accumulation_steps,
            "steps_per_generation": steps,
            "generation_batch_size": batch,
        }

    @property
    def arithmetic(self) -> str:
        """The line that a run begins with."""
        return describe_batches(self.recipe.settings, self.sizes, self.recipe.cluster.num_train)

    @property
    def num_rows(self) -> int:
        """Rows of a rollout, all processes together."""
        return self.sizes["generation_batch_size"]

    @property
    def num_steps(self) -> float:
        """Optimizer steps of a rollout."""
        steps = self.sizes["steps_per_generation"] * self.recipe.settings.num_iterations
        return steps / self.sizes["gradient_accumulation_steps"]

    @property
    def num_rollouts(self) -> float | None:
        """Rollouts of the run, where `max_steps` says its end."""
        max_steps = self.recipe.settings.max_steps
        return max_steps / self.num_steps if max_steps and max_steps > 0 else None

    @property
    def longest_row(self) -> int:
        """Tokens of a prompt and a completion at most."""
        settings = self.recipe.settings
        row = self.recipe.longest_prompt + settings.max_completion_length
        return min(row, settings.vllm_max_model_length or row) if settings.use_vllm else row

    @property
    def microbatch_tokens(self) -> int:
        """Tokens of a micro-batch at most; a row that is longer than the budget goes alone."""
        settings = self.recipe.settings
        if settings.max_tokens_per_microbatch:
            return max(settings.max_tokens_per_microbatch, self.longest_row)
        return settings.per_device_train_batch_size * self.longest_row

    @cached_property
    def num_microbatches(self) -> int:
        """Of an optimizer step on one process."""
        if not self.recipe.settings.max_tokens_per_microbatch:
            return self.sizes["gradient_accumulation_steps"]
        rows = self.sizes["gradient_accumulation_steps"] * self.recipe.settings.per_device_train_batch_size
        return math.ceil(rows * (self.recipe.prompt + self.mean_length) / (1 - PADDING) / self.microbatch_tokens)


@dataclass(frozen=True)
class Sampling:
    """What sampling takes: of groups the share `acceptance` is accepted; transformers' weights have `held` bytes."""

    recipe: Recipe
    shape: ModelShape
    batches: Batches
    lengths: Lengths
    acceptance: float
    held: int

    @cached_property
    def engine(self) -> Engine:
        """One of the engines that sample."""
        settings, cluster = self.recipe.settings, self.recipe.cluster
        rows = self.batches.num_rows // cluster.num_train
        if not settings.use_vllm:
            step = TRANSFORMERS_STEP_SECONDS if cluster.gpu.name != "CPU" else STEP_SECONDS
            return Engine(cluster.gpu, 1, cluster.num_train, math.inf, rows, step, self.held)
        if self.recipe.asks_a_server:
            shards = math.gcd(min(cluster.num_serve, GPUS_PER_MACHINE), self.shape.num_heads)
            num_engines, sequences = cluster.num_serve // shards, SERVER_SEQUENCES
        else:
            shards = settings.vllm_tensor_parallel_size
            num_engines, sequences = cluster.num_train // shards, rows * shards  # as TRL starts it
            if cluster.num_train % shards:
                raise ValueError(f"`vllm_tensor_parallel_size={shards}` does not divide {cluster.num_train} GPUs.")
        if self.shape.num_heads % shards:
            heads = f"{self.shape.num_heads} attention heads"
            raise ValueError(f"`vllm_tensor_parallel_size={shards}` does not divide the model's {heads}.")
        cache = vllm_cache_tokens(self.shape, cluster.gpu.memory, self._utilization, shards)
        return Engine(cluster.gpu, shards, num_engines, cache, sequences)

    @property
    def _utilization(self) -> float:
        served = self.recipe.asks_a_server
        return SERVER_UTILIZATION if served else self.recipe.settings.vllm_gpu_memory_utilization

    @property
    def vllm_share(self) -> float:
        """Bytes of a GPU that vLLM takes."""
        return self._utilization * self.recipe.cluster.gpu.memory

    @property
    def vllm_memory(self) -> dict[str, float]:
        """Bytes by part of vLLM, on one of its GPUs; empty without it."""
        if not self.recipe.settings.use_vllm:
            return {}
        weights = 2 * self.shape.num_parameters / self.engine.num_gpus
        return {"weights": weights, "work": VLLM_WORK, "cache": max(0.0, self.vllm_share - weights - VLLM_WORK)}

    @cached_property
    def rounds(self) -> list[tuple[float, float]]:
        """The rounds of a rollout: how often there is one, in the mean, and its groups."""
        settings, target = self.recipe.settings, self.batches.num_rows // self.recipe.settings.num_generations
        if not settings.use_dynamic_sampling or settings.dynamic_sampling_mode == "mask":
            return [(1.0, target)]
        replaces = settings.dynamic_sampling_mode == "replace"
        needed = max(1, math.ceil(settings.min_replace_ratio * target)) if replaces else target
        carries = settings.dynamic_sampling_surplus == "carry"
        largest = settings.dynamic_sampling_max_round_size or (math.inf if settings.use_vllm else target)
        if settings.batch_multiplier:
            return self._rounds_of(min(settings.batch_multiplier * target, largest), needed)
        rate = AcceptanceRate()
        for _ in range(20):  # as sure of the rate as a run is after some rollouts
            rate.update(round(1000 * self.acceptance), 1000)
        first = rate.round_size(needed, target, carries=carries, is_rare=bool(settings.rollouts_ahead))
        if first > largest or self.acceptance < MIN_RATE:  # where the sizes of rounds end
            return self._rounds_of(min(first, largest), needed)
        return expected_rounds(first, needed, self.acceptance, carries)

    def _rounds_of(self, size: float, needed: int) -> list[tuple[float, float]]:
        num, most = max(1.0, needed / self.acceptance / size), self.recipe.settings.dynamic_sampling_max_rounds
        num = num if self.recipe.settings.dynamic_sampling_surplus == "carry" else math.ceil(num - 1e-9)
        return [(min(num, most) if most > 0 else num, size)]

    @property
    def falls_short(self) -> bool:
        """Whether a rollout ends before it has found the groups that it needs."""
        settings = self.recipe.settings
        if not settings.use_dynamic_sampling or settings.dynamic_sampling_mode == "mask":
            return False
        needed = self.batches.num_rows // settings.num_generations
        needed *= settings.min_replace_ratio if settings.dynamic_sampling_mode == "replace" else 1
        return self.num_groups * self.acceptance < 0.99 * needed

    @property
    def num_groups(self) -> float:
        """Groups that a rollout samples."""
        return sum(often * groups for often, groups in self.rounds)

    def seconds_of(self, num_rows: float, num_generations: int) -> tuple[float, float]:
        """Seconds until some rows are sampled, and those of them in which less than half of an engine's are left."""
        each = max(1.0, num_rows / self.engine.num_engines)
        return sampling_seconds(self.shape, self.engine, each, self.lengths, self.recipe.prompt, num_generations)

    @cached_property
    def seconds(self) -> tuple[float, float]:
        """The same of a rollout, in the mean."""
        num = self.recipe.settings.num_generations
        found = [(often, self.seconds_of(groups * num, num)) for often, groups in self.rounds]
        seconds, tail = (sum(often * each[part] for often, each in found) for part in (0, 1))
        return seconds, tail

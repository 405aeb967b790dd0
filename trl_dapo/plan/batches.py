# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Rows, optimizer steps and micro-batches of a rollout."""

import math
from dataclasses import dataclass
from functools import cached_property

from ..settings.batch_sizes import describe_batches, describe_launch, describe_torn_group, size_batches
from .recipe import Recipe, declared_fields
from .speed import PADDING


PROMPT, LONGEST_PROMPT = 256, 2048  # tokens


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
        row = LONGEST_PROMPT + settings.max_completion_length
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
        return math.ceil(rows * (PROMPT + self.mean_length) / (1 - PADDING) / self.microbatch_tokens)

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Ending a run before `max_steps`: after empty rollouts, or at the limit of generated tokens."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy
from transformers.utils import logging

from ..config import DAPOConfig
from ..sampling.report import describe_stop
from ..sampling.sampler import Sampler
from ..settings.rules import DEFAULT_MAX_GEN_BATCHES
from .checkpoint import output_folder


logger = logging.get_logger(__name__)


class StopCallback(TrainerCallback):
    """
    Callback that ends a run.

    Every process has the same state of the sampler, so that all of them stop at the same step.
    """

    def __init__(self, sampler: Sampler | None, args: DAPOConfig, is_between_rollouts: Callable[[], bool]) -> None:
        self._sampler, self._args, self._is_between_rollouts = sampler, args, is_between_rollouts
        self.found_nothing = False  # whether the run was ended because too many rollouts in a row were empty

    @property
    def limits(self) -> list[tuple[float, float]]:
        """Pairs of how much of a limit is used, and the limit, for limits other than `max_steps`."""
        limit = self._args.max_tokens_generated
        if self._sampler is None or limit is None:
            return []
        return [(self._sampler.totals.tokens_generated, limit)]

    @property
    def is_past_a_limit(self) -> bool:
        """Whether the limit of generated tokens is reached, so that no further rollout is sampled."""
        return any(value >= limit for value, limit in self.limits)

    @property
    def is_used_up(self) -> bool:
        """Whether the limit of generated tokens is reached, and the last rollout has been trained on."""
        return self._is_between_rollouts() and self.is_past_a_limit

    def why_ended(self, state: TrainerState) -> str:
        """Return why a run has ended, as the end of a sentence that begins with "The run ended, because"."""
        args = self._args
        if self.found_nothing:
            limit = f"`dynamic_sampling_stop_after={args.dynamic_sampling_stop_after}`"
            if args.dynamic_sampling_max_gen_batches == 0:
                num_batches = DEFAULT_MAX_GEN_BATCHES * args.dynamic_sampling_stop_after
                return f"no group was accepted in {num_batches:g} batches of completions (10 times {limit})"
            return f"no group was accepted any more ({limit} is reached)"
        if state.global_step >= state.max_steps:
            if args.max_steps >= 0:
                return f"`max_steps={args.max_steps}` is reached"
            return f"`num_train_epochs={args.num_train_epochs:g}` is reached"
        if self.is_past_a_limit:
            return f"`max_tokens_generated={args.max_tokens_generated:.0f}` is reached"
        return "a callback stopped it"

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.found_nothing = False

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        sampler = self._sampler
        if sampler is None:
            return
        if self.is_used_up:
            control.should_training_stop = True
            if args.save_strategy != SaveStrategy.NO:
                control.should_save = True
        elif 0 < self._args.dynamic_sampling_stop_after <= sampler.totals.empty_rollouts_in_a_row or (
            sampler.totals.gave_up and self._is_between_rollouts()  # the groups accepted before were trained on
        ):
            self.found_nothing = True
            control.should_training_stop = control.should_save = True
            if state.is_world_process_zero:
                checkpoint = Path(output_folder(args)) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
                empty = sampler.max_empty_batches if sampler.totals.gave_up else None
                num_rollouts = sampler.totals.empty_rollouts_in_a_row
                logger.warning(describe_stop(sampler.rollout, num_rollouts, str(checkpoint), empty))
            # A run that resumes from here counts from the beginning.
            sampler.totals.empty_rollouts_in_a_row, sampler.totals.gave_up = 0, False

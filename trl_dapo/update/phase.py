# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The update phase: what transformers and TRL call between a rollout and the optimizer steps it pays for."""

import inspect
import math
import time
from collections import deque
from functools import cached_property, partial
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from transformers import Trainer
from transformers.utils import logging
from trl import GRPOTrainer
from trl.trainer.utils import (
    shuffle_sequence_dict,
    split_pixel_values_by_grid,
    split_tensor_dict,
    unsplit_pixel_values_by_grid,
)

from ..config import DAPOConfig
from ..construction import is_quantized, trains_float32
from ..models import attention_cost_of
from ..settings.rules import check_rules
from .compat import check_release, sharded_at_load
from .empty_steps import SkipEmptyStep
from .loss import engine_weight
from .objective import Objective, adapted_entropy_coef
from .padding import why_padding_is_felt
from .passes import accumulating, ranks_are_in_step, run_trimmed
from .patching import patched
from .rollout_tensors import MODEL_INPUTS, groups_with_loss, unknown_keys
from .step_metrics import StepMetrics, metrics_of_passes, metrics_of_tokens
from .typed_trainer import TypedGRPOTrainer
from .window import MicrobatchPacker, weight_without_filler


logger = logging.get_logger(__name__)


class UpdatePhaseMixin(TypedGRPOTrainer):
    """TRL's trainer with DAPO's update phase: an exact token mean, the dual clip, and equal micro-batches."""

    # Each optimizer step takes the rows that `GRPOTrainer` would take, from the same draw, and cuts them again. The
    # training loop, DDP, FSDP and DeepSpeed see nothing unusual. docs/design.md says what is cut where.

    _feels_padding: str | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._window_batches: list = []  # what the dataloader gave for the coming optimizer step
        self._window_microbatches: deque[dict] = deque()  # what is left of the optimizer step under way
        self._window_num_tokens: int | None = None  # loss tokens of the optimizer step, over all ranks
        self._num_rollouts_left = 0  # behind the one under way
        self._step_metrics = StepMetrics()  # of the optimizer step under way
        self._budget = self.args.max_tokens_per_microbatch
        check_release(self)
        self._attention_cost = 0.0  # of a pair of tokens, in tokens; only a budget asks
        if self._budget is not None:
            check_rules(self.args, **self._model_facts)
            self._attention_cost = attention_cost_of(self.model.config.get_text_config(decoder=True))
        if self.loss_type == "dapo":
            run = partial(GRPOTrainer._get_per_token_logps_and_entropies, self, self.model)
            self._feels_padding = why_padding_is_felt(
                self.model, run, self._tokenizer.pad_token_id, self._is_vlm, self.accelerator
            )
            check_rules(self.args, feels_padding=self._feels_padding)
        self.add_callback(
            SkipEmptyStep(
                is_empty=lambda: self._window_num_tokens == 0,
                deepspeed_optimizer=lambda: self.model_wrapped.basic_optimizer if self.is_deepspeed_enabled else None,
            )
        )
        self._initialized = True

    @property
    def _model_facts(self) -> dict[str, Any]:
        """Facts about the model that the rules need besides the settings."""
        return {
            "has_images": self._is_vlm,
            "num_ranks_sharing_a_row": self.num_ranks_sharing_a_row,
            "is_quantized": is_quantized(self.model),
            "trains_float32": trains_float32(self.model),
            "feels_padding": self._feels_padding,
        }

    # ---- The window ----

    def get_batch_samples(self, *args: Any) -> tuple[list, Tensor | int | None]:
        self._window_batches, num_items_in_batch = super().get_batch_samples(*args)
        self._window_microbatches.clear()
        return self._window_batches, num_items_in_batch

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        if not (self._initialized and self.model.training):
            return super()._prepare_inputs(generation_batch)
        return self._window_microbatches.popleft()

    def _open_window(self, batches: list) -> None:
        """Generates what the optimizer step needs and cuts its rows into micro-batches."""
        self._step_metrics = StepMetrics()
        parts = []  # what TRL would train on at each micro-step
        for step, batch in enumerate(batches, start=self._step):
            # The policy does not change inside a window, so a rollout that starts in its middle may be made now.
            if step % self._generate_every == 0 or self._buffered_inputs is None:
                # Micro-steps to the end of training, or a few more where an epoch's last window is short.
                num_left = self.args.gradient_accumulation_steps * (self.state.max_steps - self.state.global_step)
                num_left -= step - self._step
                self._num_rollouts_left = math.ceil(num_left / self._generate_every) - 1  # without this one
                self._buffered_inputs = self._roll_out(batch)
            parts.append(self._buffered_inputs[step % self._steps_per_generation])
        if self.loss_type == "dapo":
            microbatches, self._window_num_tokens = self._packer.pack(parts, self._step_metrics)
        else:
            microbatches, self._window_num_tokens = weight_without_filler(parts, self.loss_type, self.accelerator)
        self._window_microbatches = deque(microbatches)

    @property
    def _steps_per_generation(self) -> int:
        assert self.args.steps_per_generation is not None  # TRL works it out where nobody set it
        return self.args.steps_per_generation

    @property
    def _generate_every(self) -> int:
        return self._steps_per_generation * self.num_iterations

    def num_groups_left(self) -> int:
        """Groups of the rollout under way of which nothing has reached the loss yet. Collective."""
        phase = self._step % self._generate_every
        if not phase or not self._buffered_inputs or "group" not in self._buffered_inputs[0]:
            return 0
        done, left = groups_with_loss(self._buffered_inputs[:phase]), groups_with_loss(self._buffered_inputs[phase:])
        all_done: set = set()
        all_left: set = set()
        for done_on_rank, left_on_rank in gather_object([(done, left)]):
            all_done |= done_on_rank
            all_left |= left_on_rank
        return len(all_left - all_done)

    def _roll_out(self, batch: list[dict[str, Any]]) -> list[dict]:
        """Generates, and assigns the rows to micro-steps at random: exactly TRL's assignment, from the same draw."""
        rollout = self._generate_and_score_completions(batch)
        if self.loss_type == "dapo" and (unknown := unknown_keys(rollout)) and self.accelerator.is_main_process:
            logger.warning_once(_describe_unknown(unknown, self.args))
        by_row: dict[str, Any] = split_pixel_values_by_grid(rollout)
        shuffled: dict[str, Any] = shuffle_sequence_dict(by_row)
        parts: list[dict[str, Any]] = split_tensor_dict(shuffled, self._steps_per_generation)
        return [unsplit_pixel_values_by_grid(part) for part in parts]

    @property
    def _packer(self) -> MicrobatchPacker:
        """Return the one packer, with today's settings: a callback may have changed them."""
        packer = self._one_packer
        packer.multiple_of = self.pad_to_multiple_of
        packer.trims = self._trims_padding
        packer.recuts = packer.trims and self.top_entropy_quantile >= 1.0
        return packer

    @cached_property
    def _one_packer(self) -> MicrobatchPacker:
        return MicrobatchPacker(
            accelerator=self.accelerator,
            pad_token_id=self._tokenizer.pad_token_id,
            budget=self._budget,
            attention=self._attention_cost,
            has_own_rows=self.num_ranks_sharing_a_row == 1,
            on_cuda=self.accelerator.device.type == "cuda",
            in_step=ranks_are_in_step(self.accelerator, self.is_fsdp_enabled or sharded_at_load(self)[0]),
        )

    @property
    def num_ranks_sharing_a_row(self) -> int:
        """Ranks that hold the same row, by tensor, context or sequence parallelism."""
        return self.get_tp_size() * self.get_cp_size() * self.get_sp_size()

    @property
    def _trims_padding(self) -> bool:
        """Whether columns of padding may go, in passes with gradient and without."""
        return self.loss_type == "dapo" and self._feels_padding is None

    @property
    def _passes_once(self) -> bool:
        """Whether a rollout trains in one step by our loss: the pass with gradient tells what one before it would."""
        is_ours = self._initialized and self.loss_type == "dapo"
        return is_ours and self.args.gradient_accumulation_steps % self._generate_every == 0

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if not self._passes_once:
            return super()._generate_and_score_completions(inputs)
        # TRL would pass over all rows to weigh what vLLM sampled. The objective does that.
        with patched(self, vllm_importance_sampling_correction=False):
            return super()._generate_and_score_completions(inputs)

    # ---- The objective ----

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> Tensor:
        if self.loss_type != "dapo" or not self._initialized:
            if "weights" not in inputs:
                return super()._compute_loss(model, inputs)
            # Without the rows that only fill the rollout. The policy term is in proportion to the advantages, the KL
            # term to beta; the other terms keep their size.
            weight, factor = inputs["weights"]
            with patched(self, beta=self.beta * factor):
                return weight * super()._compute_loss(model, {**inputs, "advantages": inputs["advantages"] * factor})
        # TRL's own is not wrapped: it divides by the rollout's tokens, knows no rows of the present policy among older
        # ones, moves the router on a step without a loss token, and hangs where ranks hold unequal numbers of rows.
        mask = inputs["completion_mask"]
        attention_mask = torch.cat([inputs["prompt_mask"], mask], dim=1)
        if "tool_mask" in inputs:
            mask = mask * inputs["tool_mask"]
        logps, entropies, aux_loss = self._get_per_token_logps_and_entropies(
            model,
            torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
            attention_mask,
            inputs["completion_ids"].size(1),
            compute_entropy=True,
            compute_aux_loss=self.aux_loss_enabled,
            **{key: inputs.get(key) for key in MODEL_INPUTS},
            **_unknown_model_inputs(inputs),
        )
        assert entropies is not None  # asked for
        step_metrics = self._step_metrics if self.model.training else StepMetrics()
        loss = self._objective().loss(inputs, mask, logps, entropies, aux_loss, step_metrics)
        if not self.model.training:
            self._publish(step_metrics, "eval")
        return loss

    def _objective(self) -> Objective:
        """The objective with today's settings: a callback may have changed them."""
        select_tokens = off_policy_mask = weight = None
        if self.top_entropy_quantile < 1.0:
            select_tokens = partial(self.get_high_entropy_mask, threshold=1 - self.top_entropy_quantile)
        if self.off_policy_mask_threshold is not None:
            off_policy_mask = partial(self.get_off_policy_mask, off_policy_threshold=self.off_policy_mask_threshold)
        if self.use_vllm and self.vllm_importance_sampling_correction:
            low, high = self.vllm_importance_sampling_clip_min, self.vllm_importance_sampling_clip_max
            weight = partial(engine_weight, mode=self.vllm_importance_sampling_mode, low=low, high=high)
        entropy_coef = None
        if self._entropy_bonus_enabled:
            # Under adaptive control it rests while the entropy is above its target.
            rests = self.use_adaptive_entropy and self._last_world_entropy > self.args.entropy_target
            entropy_coef = 0.0 if rests else self.entropy_coef
        return Objective(
            epsilon_low=self.epsilon_low,
            epsilon_high=self.epsilon_high,
            delta=self.args.delta,
            level=self.importance_sampling_level,
            beta=self.beta,
            corrects_kl=self.args.use_bias_correction_kl,
            engine_weight=weight,
            entropy_coef=entropy_coef,
            router_coef=self.router_aux_loss_coef,
            num_ranks=self.accelerator.num_processes,
            select_tokens=select_tokens,
            off_policy_mask=off_policy_mask,
        )

    # ---- The steps of the training loop ----

    def training_step(
        self, model: torch.nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        started, loss = time.perf_counter(), torch.zeros((), device=self.args.device)
        if not self._window_microbatches:
            self._begin_window(model, inputs)
        # With a budget of tokens there need not be as many micro-batches as the loop counts micro-steps: all of them
        # run at the last one.
        waits_for_last = self._budget is not None and not self.accelerator.sync_gradients
        if self._budget is not None and not waits_for_last:
            while len(self._window_microbatches) > 1:
                with accumulating(self.accelerator, model, sharded_at_load(self)[1]):
                    # Not GRPOTrainer's, which counts each as a step of the loop.
                    loss = loss + Trainer.training_step(self, model, inputs, num_items_in_batch)
        self._current_train_step_time += time.perf_counter() - started
        if waits_for_last:
            self._step += 1
            return loss
        loss = loss + super().training_step(model, inputs, num_items_in_batch)
        if self.loss_type != "dapo":
            self._metrics["train"]["frac_empty_steps"].append(float(self._window_num_tokens == 0))
        elif not self._window_microbatches:
            self._publish(self._step_metrics, "train")
        return loss

    def _begin_window(self, model: torch.nn.Module, inputs: dict[str, Any]) -> None:
        """Sample what the next optimizer step needs."""
        # In the mode that Trainer.training_step would set.
        model.train()
        train = getattr(self.optimizer, "train", None)
        if callable(train):
            train()
        self._open_window(self._window_batches or [inputs])
        self._window_batches = []

    def _publish(self, step_metrics: StepMetrics, mode: str) -> None:
        """Reduces an optimizer step over ranks and logs it."""
        totals, num_ranks = step_metrics.reduce(self.accelerator), self.accelerator.num_processes
        metrics = metrics_of_tokens(totals)
        if mode == "train":
            metrics |= metrics_of_passes(totals, num_ranks)
        if self.aux_loss_enabled:
            metrics["aux_loss"] = totals["aux_loss"] / num_ranks
        if self._entropy_bonus_enabled:
            metrics["policy_loss"] = totals["policy_loss"] / num_ranks
            if mode == "train" and self.use_adaptive_entropy and totals["active_tokens"] > 0:
                self._last_world_entropy = totals["active_entropy"] / totals["active_tokens"]
                self.entropy_coef = adapted_entropy_coef(self.entropy_coef, self._last_world_entropy, self.args)
            if mode == "train":
                metrics["entropy_coef"] = self.entropy_coef
        self._append_metrics(metrics, mode)

    def _append_metrics(self, metrics: dict[str, float], mode: str = "train") -> None:
        for name, value in metrics.items():
            self._metrics[mode][name].append(value)

    # ---- Log-probabilities without gradient ----

    def _get_per_token_logps_and_entropies(
        self,
        model: torch.nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        run = super()._get_per_token_logps_and_entropies
        options = {key: value for key, value in kwargs.items() if value is not None and value is not False}
        # Trimmed where the pass with gradient is, which in evaluation it is not.
        is_whole = torch.is_grad_enabled() or options.keys() - {"compute_entropy"} or not self.model.training
        if batch_size is None or is_whole or not (self._initialized and self._trims_padding):
            return run(model, input_ids, attention_mask, logits_to_keep, batch_size=batch_size, **kwargs)
        trimmed = partial(run, model, **options)
        return *run_trimmed(trimmed, input_ids, attention_mask, logits_to_keep, batch_size, self._packer), None


def _unknown_model_inputs(rows: dict[str, Any]) -> dict[str, Any]:
    """Return the tensors of unknown layout that TRL hands to the model, as it would those of a new kind of input."""
    taken = inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies).parameters
    return {key: rows[key] for key in unknown_keys(rows) if key in taken}


def _describe_unknown(keys: list[str], args: DAPOConfig) -> str:
    """Say what it means for a run that TRL's rollouts have tensors of unknown layout."""
    named = ", ".join(f"`{key}`" for key in keys)
    message = (
        f"TRL's rollouts have tensors that this version of trl-dapo does not know: {named}. "
        "Their padding is not known, so no padding is trimmed, and micro-batches are as wide and as many rows as "
        "`GRPOTrainer` makes them. The gradient is the same, but the update takes longer. DAPO's loss does not use "
        "these tensors, unless they are inputs of the model. Install a later trl-dapo, or a TRL that "
        "`docs/limits.md` names."
    )
    if args.max_tokens_per_microbatch is not None:
        message += (
            f" `max_tokens_per_microbatch={args.max_tokens_per_microbatch}` has no effect: bound memory by "
            f"`per_device_train_batch_size`, which is {args.per_device_train_batch_size}."
        )
    return message

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The update phase: how a rollout is turned into micro-batches, losses and optimizer steps."""

import inspect
import math
import time
from collections import deque
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

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
from .keeping import random_state_of_torch, set_random_state_of_torch
from .loss import importance_weight
from .objective import Objective, adapted_entropy_coef
from .padding import why_padding_matters
from .passes import accumulating, ranks_are_in_step, run_trimmed
from .patching import patched
from .rollout_tensors import MODEL_INPUTS, groups_with_loss, unknown_keys
from .step_metrics import StepMetrics, metrics_of_passes, metrics_of_tokens
from .typed_trainer import TypedGRPOTrainer
from .window import MicrobatchPacker, weight_without_filler


logger = logging.get_logger(__name__)


class SampledRollout(NamedTuple):
    """A rollout, and what it changed in TRL's metrics: it adds values to some lists, and replaces others."""

    parts: list[dict]  # by micro-step
    added: dict[str, list[float]]
    replaced: dict[str, list[float]]


@dataclass
class StepStart:
    """
    The state in which an optimizer step began, and what was sampled for the step.

    A step may be interrupted before it changes the weights. A run that is resumed from a checkpoint within the step,
    such as `enable_jit_checkpoint` saves, repeats the step with the rollouts in `sampled`. A new call of `train()` in
    the same process only goes back to the beginning of the step, and samples again.
    """

    micro_step: int  # its first micro-step, counted over the run
    global_step: int  # optimizer steps that were complete
    accumulation: int  # `gradient_accumulation_steps`
    metrics: dict[str, list[float]]  # that were not logged yet
    entropy: tuple[float, float] | None  # see `_entropy_state`
    rollout: list[dict] | None  # in whose middle it began; `None` if it began with a new rollout
    sampled: dict[int, SampledRollout]  # by the micro-step at which they begin, counted within the step
    random_state: list[Tensor] | None = None  # of torch, after sampling and before the first pass with gradient
    is_applied: bool = False  # whether the optimizer has made the step, even if no weights were changed


class UpdatePhaseMixin(TypedGRPOTrainer):
    """
    TRL's trainer with DAPO's loss (Clip-Higher, optionally TRL's `delta`, and an exact mean over the tokens of an
    optimizer step) and with micro-batches of equal cost.

    With another `loss_type` than `"dapo"`, loss and micro-batches are TRL's, except that rows that only fill the batch
    are left out of the loss.
    """

    # Each optimizer step trains on the rows that `GRPOTrainer` would train on, after the same random assignment. With
    # DAPO's loss they are divided into micro-batches in another way than TRL does. To the training loop, DDP, FSDP and
    # DeepSpeed these look like any others. docs/design.md has the rules. The rows of one optimizer step are called its
    # window.

    _why_padding_matters: str | None = None  # why the model depends on its padding, if it does

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._window_batches: list = []  # batches from the dataloader for the next optimizer step
        self._window_microbatches: deque[dict] = deque()  # remaining micro-batches of the present optimizer step
        self._window_num_tokens: int | None = None  # loss tokens of the optimizer step, over all processes
        self._step_start: StepStart | None = None  # of the present or the last optimizer step
        # `StepStart.sampled` and `StepStart.random_state` of a checkpoint within a step, until the resumed run repeats
        # this step.
        self._sampled_before: dict[int, SampledRollout] = {}
        self._random_state_before: list[Tensor] | None = None
        self._num_rollouts_left = 0  # after the present one
        self._step_metrics = StepMetrics()  # of the present optimizer step
        self._budget = self.args.max_tokens_per_microbatch
        check_release(self)
        self._attention_cost = 0.0  # see `MicrobatchPacker.attention`; only needed for a budget
        if self._budget is not None:
            check_rules(self.args, **self._model_facts)
            self._attention_cost = attention_cost_of(self.model.config.get_text_config(decoder=True))
        if self.loss_type == "dapo":
            run = partial(GRPOTrainer._get_per_token_logps_and_entropies, self, self.model)
            self._why_padding_matters = why_padding_matters(
                self.model, run, self._tokenizer.pad_token_id, self._is_vlm, self.accelerator
            )
            check_rules(self.args, why_padding_matters=self._why_padding_matters)
        self.add_callback(
            SkipEmptyStep(
                is_empty=lambda: self._window_num_tokens == 0,
                deepspeed_optimizer=lambda: self.model_wrapped.basic_optimizer if self.is_deepspeed_enabled else None,
                after_step=self._mark_step_as_applied,
            )
        )
        self._initialized = True

    @property
    def _model_facts(self) -> dict[str, Any]:
        """Facts about the model that the rules of the settings depend on."""
        return {
            "has_images": self._is_vlm,
            "num_ranks_sharing_a_row": self.num_ranks_sharing_a_row,
            "is_quantized": is_quantized(self.model),
            "trains_float32": trains_float32(self.model),
            "why_padding_matters": self._why_padding_matters,
        }

    # ---- The window: the rows of one optimizer step ----

    def get_batch_samples(self, *args: Any) -> tuple[list, Tensor | int | None]:
        self._window_batches, num_items_in_batch = super().get_batch_samples(*args)
        self._window_microbatches.clear()
        return self._window_batches, num_items_in_batch

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        if not (self._initialized and self.model.training):
            return super()._prepare_inputs(generation_batch)
        return self._window_microbatches.popleft()

    def _sample_and_pack(self, batches: list, sampled: dict[int, SampledRollout]) -> None:
        """
        Sample the rollouts that the optimizer step needs, and divide its rows into micro-batches.

        `sampled` holds the rollouts that were sampled before a checkpoint within the step. New ones are added to it.
        """
        self._step_metrics = StepMetrics()
        parts = []  # the micro-batches that TRL would train on
        for i, batch in enumerate(batches):
            micro_step = self._step + i
            # The policy does not change within an optimizer step. So a rollout that starts at one of its later
            # micro-steps can be sampled now as well.
            if micro_step % self._generate_every == 0 or self._buffered_inputs is None:
                # Micro-steps to the end of training. This is a little too high if epochs end with a shorter window.
                num_steps_left = self.state.max_steps - self.state.global_step
                micro_steps_left = self.args.gradient_accumulation_steps * num_steps_left - i
                self._num_rollouts_left = math.ceil(micro_steps_left / self._generate_every) - 1  # not this one
                if i in sampled:
                    for name, values in sampled[i].added.items():
                        self._metrics["train"][name].extend(values)
                    self._metrics["train"].update({name: [*values] for name, values in sampled[i].replaced.items()})
                else:
                    sampled[i] = self._sample_recorded(batch)
                self._buffered_inputs = sampled[i].parts
            parts.append(self._buffered_inputs[micro_step % self._steps_per_generation])
        if self.loss_type == "dapo":
            microbatches, self._window_num_tokens = self._packer.pack(parts, self._step_metrics)
        else:
            microbatches, self._window_num_tokens = weight_without_filler(parts, self.loss_type, self.accelerator)
        self._window_microbatches = deque(microbatches)

    @property
    def _steps_per_generation(self) -> int:
        assert self.args.steps_per_generation is not None  # TRL computes it if it is not set
        return self.args.steps_per_generation

    @property
    def _generate_every(self) -> int:
        return self._steps_per_generation * self.num_iterations

    def num_groups_left(self) -> int:
        """Return the number of groups of the present rollout that have not contributed to a loss yet. Collective."""
        num_done = self._step % self._generate_every  # micro-steps of the present rollout
        if not num_done or not self._buffered_inputs or "group" not in self._buffered_inputs[0]:
            return 0
        done = groups_with_loss(self._buffered_inputs[:num_done])
        left = groups_with_loss(self._buffered_inputs[num_done:])
        all_done: set = set()
        all_left: set = set()
        for done_on_rank, left_on_rank in gather_object([(done, left)]):
            all_done |= done_on_rank
            all_left |= left_on_rank
        return len(all_left - all_done)

    @property
    def _entropy_state(self) -> tuple[float, float] | None:
        """State of the adaptive entropy coefficient, which an optimizer step changes."""
        return (self.entropy_coef, self._last_world_entropy) if self.use_adaptive_entropy else None

    def _sample_recorded(self, batch: list[dict[str, Any]]) -> SampledRollout:
        """Sample a rollout, and record which metrics it changed, so that a resumed run can repeat the changes."""
        metrics = self._metrics["train"]
        before = {name: (values, len(values)) for name, values in metrics.items()}
        rollout = SampledRollout(self._sample_parts(batch), {}, {})
        for name, values in metrics.items():
            values_before, num_before = before.get(name, (values, 0))
            if values is values_before:
                rollout.added[name] = values[num_before:]
            else:
                rollout.replaced[name] = [*values]
        return rollout

    def _sample_parts(self, batch: list[dict[str, Any]]) -> list[dict]:
        """Sample a rollout, and assign its rows to micro-steps at random, exactly as TRL would."""
        rollout = self._generate_and_score_completions(batch)
        if self.loss_type == "dapo" and (unknown := unknown_keys(rollout)) and self.accelerator.is_main_process:
            logger.warning_once(_describe_unknown(unknown, self.args))
        by_row: dict[str, Any] = split_pixel_values_by_grid(rollout)
        shuffled: dict[str, Any] = shuffle_sequence_dict(by_row)
        parts: list[dict[str, Any]] = split_tensor_dict(shuffled, self._steps_per_generation)
        return [unsplit_pixel_values_by_grid(part) for part in parts]

    @property
    def _packer(self) -> MicrobatchPacker:
        """The packer, with the present settings, which a callback may have changed."""
        packer = self._cached_packer
        packer.multiple_of = self.pad_to_multiple_of
        packer.trims = self._trims_padding
        packer.recuts = packer.trims and self.top_entropy_quantile >= 1.0
        return packer

    @cached_property
    def _cached_packer(self) -> MicrobatchPacker:
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
        """Number of processes that hold the same row, because of tensor, context or sequence parallelism."""
        return self.get_tp_size() * self.get_cp_size() * self.get_sp_size()

    @property
    def _trims_padding(self) -> bool:
        """Whether columns of padding may be removed, in passes with and without gradient."""
        return self.loss_type == "dapo" and self._why_padding_matters is None

    @property
    def _trains_in_one_step(self) -> bool:
        """
        Whether DAPO's loss trains on each rollout in a single optimizer step.

        Then the pass with gradient computes the old log-probabilities, so that no pass before it is needed.
        """
        is_ours = self._initialized and self.loss_type == "dapo"
        return is_ours and self.args.gradient_accumulation_steps % self._generate_every == 0

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if not self._trains_in_one_step:
            return super()._generate_and_score_completions(inputs)
        # With the correction on, TRL would run a forward pass over all rows to compute the importance sampling ratios.
        # The objective computes them instead.
        with patched(self, vllm_importance_sampling_correction=False):
            return super()._generate_and_score_completions(inputs)

    # ---- The objective ----

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> Tensor:
        if self.loss_type != "dapo" or not self._initialized:
            if "weights" not in inputs:
                return super()._compute_loss(model, inputs)
            # Rows that only fill the rollout have no loss: their mask and advantages are 0 (see `mark_filler`). But
            # micro-batches have different numbers of other rows, so the whole loss is multiplied by `weight`. And some
            # of TRL's means count all rows, so the policy and KL terms, which are proportional to the advantages and
            # to beta, are also multiplied by `factor` (see `weights_without_filler`).
            weight, factor = inputs["weights"]
            with patched(self, beta=self.beta * factor):
                return weight * super()._compute_loss(model, {**inputs, "advantages": inputs["advantages"] * factor})
        # TRL's loss is replaced because it divides by the tokens of the rollout, cannot mix rows of the present policy
        # with rows of earlier ones, updates the router even if a step has no loss token, and hangs if the processes
        # have different numbers of rows.
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
        assert entropies is not None  # `compute_entropy=True`
        step_metrics = self._step_metrics if self.model.training else StepMetrics()
        loss = self._objective().loss(inputs, mask, logps, entropies, aux_loss, step_metrics)
        if not self.model.training:
            self._finish_step_metrics(step_metrics, "eval")
        return loss

    def _objective(self) -> Objective:
        """Return the objective with the present settings, which a callback may have changed."""
        select_tokens = off_policy_mask = weight = None
        if self.top_entropy_quantile < 1.0:
            select_tokens = partial(self.get_high_entropy_mask, threshold=1 - self.top_entropy_quantile)
        if self.off_policy_mask_threshold is not None:
            off_policy_mask = partial(self.get_off_policy_mask, off_policy_threshold=self.off_policy_mask_threshold)
        if self.use_vllm and self.vllm_importance_sampling_correction:
            low, high = self.vllm_importance_sampling_clip_min, self.vllm_importance_sampling_clip_max
            weight = partial(importance_weight, mode=self.vllm_importance_sampling_mode, low=low, high=high)
        entropy_coef = None
        if self._entropy_bonus_enabled:
            # With an adaptive coefficient, there is no bonus while the entropy is above its target.
            is_paused = self.use_adaptive_entropy and self._last_world_entropy > self.args.entropy_target
            entropy_coef = 0.0 if is_paused else self.entropy_coef
        return Objective(
            epsilon_low=self.epsilon_low,
            epsilon_high=self.epsilon_high,
            delta=self.args.delta,
            level=self.importance_sampling_level,
            beta=self.beta,
            corrects_kl=self.args.use_bias_correction_kl,
            importance_weight=weight,
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
        # With a budget of tokens, the number of micro-batches may differ from the number of micro-steps in the
        # training loop. So all micro-batches run at the last micro-step.
        waits_for_last = self._budget is not None and not self.accelerator.sync_gradients
        if self._budget is not None and not waits_for_last:
            while len(self._window_microbatches) > 1:
                with accumulating(self.accelerator, model, sharded_at_load(self)[1]):
                    # Not the method of GRPOTrainer, which would count each micro-batch as a micro-step of the loop.
                    loss = loss + Trainer.training_step(self, model, inputs, num_items_in_batch)
        self._current_train_step_time += time.perf_counter() - started
        if waits_for_last:
            self._step += 1
            return loss
        loss = loss + super().training_step(model, inputs, num_items_in_batch)
        if self.loss_type != "dapo":
            self._metrics["train"]["frac_empty_steps"].append(float(self._window_num_tokens == 0))
        elif not self._window_microbatches:
            self._finish_step_metrics(self._step_metrics, "train")
        return loss

    def _begin_window(self, model: torch.nn.Module, inputs: dict[str, Any]) -> None:
        """Prepare the micro-batches of the next optimizer step."""
        # `Trainer.training_step` would set the training mode only after this.
        model.train()
        train = getattr(self.optimizer, "train", None)
        if callable(train):
            train()
        batches = self._window_batches or [inputs]
        self._step_start = StepStart(
            micro_step=self._step,
            global_step=self.state.global_step,
            accumulation=int(self.args.gradient_accumulation_steps),
            metrics={name: [*values] for name, values in self._metrics["train"].items()},
            entropy=self._entropy_state,
            rollout=self._buffered_inputs if self._step % self._generate_every else None,
            sampled={**self._sampled_before},
        )
        self._sampled_before = {}
        self._sample_and_pack(batches, self._step_start.sampled)
        if self._random_state_before is not None:
            # transformers has restored the random state that was saved with the checkpoint. Before the checkpoint,
            # passes of this step with dropout had changed that state, and these passes are repeated now.
            set_random_state_of_torch(self._random_state_before)
            self._random_state_before = None
        self._step_start.random_state = random_state_of_torch()
        self._window_batches = []

    @property
    def _unfinished_step(self) -> StepStart | None:
        """
        The start of the present optimizer step, or `None` if the step is over.

        It is not over if a checkpoint is saved in the middle of it (`enable_jit_checkpoint`), or after an error.
        """
        start = self._step_start
        # If gradients overflow in float16, the step ends without the optimizer, but counts in `global_step`.
        is_over = start is None or start.is_applied or self.state.global_step != start.global_step
        return None if is_over else start

    def _mark_step_as_applied(self) -> None:
        if self._step_start is not None:
            self._step_start.is_applied = True

    def _restart_interrupted_step(self) -> None:
        """
        If the last optimizer step was interrupted, go back to its first micro-step. If a changed
        `gradient_accumulation_steps` no longer fits the present rollout, give this rollout up.
        """
        last, unfinished, self._step_start = self._step_start, self._unfinished_step, None
        if unfinished is not None:
            self._step, self._buffered_inputs = unfinished.micro_step, unfinished.rollout
            if unfinished.entropy is not None:
                self.entropy_coef, self._last_world_entropy = unfinished.entropy
        accumulation = self.args.gradient_accumulation_steps
        is_changed = last is not None and last.accumulation != accumulation
        if is_changed and self._step % self._generate_every % accumulation:
            # The present rollout would end within an optimizer step, so it is given up and a new one begins.
            self._step, self._buffered_inputs = 0, None

    def _finish_step_metrics(self, step_metrics: StepMetrics, mode: str) -> None:
        """
        Reduce the metrics of an optimizer step over all processes and keep them for the next log. In training, also
        adapt the entropy coefficient.
        """
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
        # Micro-batches of passes with gradient are trimmed before. Those of passes without gradient are trimmed here,
        # except in an evaluation and with further inputs of the model.
        keeps_padding = torch.is_grad_enabled() or options.keys() - {"compute_entropy"} or not self.model.training
        if batch_size is None or keeps_padding or not (self._initialized and self._trims_padding):
            return run(model, input_ids, attention_mask, logits_to_keep, batch_size=batch_size, **kwargs)
        trimmed = partial(run, model, **options)
        return *run_trimmed(trimmed, input_ids, attention_mask, logits_to_keep, batch_size, self._packer), None


def _unknown_model_inputs(rows: dict[str, Any]) -> dict[str, Any]:
    """Return the tensors of unknown layout that are inputs of the model, such as a new kind that TRL has added."""
    taken = inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies).parameters
    return {key: rows[key] for key in unknown_keys(rows) if key in taken}


def _describe_unknown(keys: list[str], args: DAPOConfig) -> str:
    """Describe the effect on the run if TRL's rollouts have tensors of unknown layout."""
    named = ", ".join(f"`{key}`" for key in keys)
    message = (
        f"TRL's rollouts have tensors that this version of trl-dapo does not know: {named}. "
        "It is unknown how they are padded, so no padding is removed from micro-batches, which have the width and the "
        "number of rows that `GRPOTrainer` gives them. The gradient is the same, but the update takes longer. DAPO's "
        "loss does not use these tensors, unless they are inputs of the model. Install a later version of trl-dapo, "
        "or a version of TRL that `docs/limits.md` lists."
    )
    if args.max_tokens_per_microbatch is not None:
        message += (
            f" `max_tokens_per_microbatch={args.max_tokens_per_microbatch}` has no effect on passes with gradient. To "
            f"limit memory, lower `per_device_train_batch_size`, which is {args.per_device_train_batch_size}."
        )
    return message

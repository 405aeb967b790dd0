# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The update phase: what happens between a rollout and the optimizer steps it pays for."""

import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from datasets import Dataset, IterableDataset
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.utils import logging
from trl import GRPOTrainer
from trl.trainer.utils import (
    shuffle_sequence_dict,
    split_pixel_values_by_grid,
    split_tensor_dict,
    unsplit_pixel_values_by_grid,
)

from ..config import DAPOConfig
from ..settings.model_checks import context_length, has_rotary_positions, why_positions_are_absolute
from ..settings.warnings import warnings_at_start
from .loss import (
    clipped_loss,
    clipped_tokens,
    fill_old_logps,
    kl_to_reference,
    probability_ratio,
    token_mean,
    weights_without_filler,
)
from .microbatches import attention_cost_of, cut, fewest_microbatches, plan_window, plan_window_within_budget
from .rows import (
    check_keys,
    index_rows,
    is_cut_by_row,
    join_rows,
    no_rows,
    padded_cost,
    resize,
    row_lengths,
    rows_from_bytes,
    rows_to_bytes,
    schema,
    widths,
)
from .tally import StepMetrics, metrics_of_tokens


logger = logging.get_logger(__name__)

# Mean difference in log-probability above which a model depends on its padding. A shift by 32 moves tiny random models
# with absolute positions by 0.08 to 0.5; where positions are counted without padding, only rounding is left.
PADDING_TOLERANCE = 0.02

# What a rollout holds for the model besides tokens and masks.
MODEL_INPUTS = (
    "pixel_values",
    "image_grid_thw",
    "num_images",
    "pixel_attention_mask",
    "spatial_shapes",
    "num_tiles",
    "image_sizes",
    "token_type_ids",
    "mm_token_type_ids",
    "image_position_ids",
)


class RowFacts(NamedTuple):
    """
    What every rank knows of the rows of an optimizer step.

    Attributes:
        lengths (`list[list[tuple[int, int]]]`):
            Prompt and completion length of each row, rank by rank.
        is_live (`list[list[bool]]`):
            Whether each row is no filler, rank by rank.
        num_tokens (`list[list[int]]`):
            Loss tokens of each row, rank by rank.
        have_same_keys (`bool`):
            Whether the ranks' rows can be exchanged.
    """

    lengths: list[list[tuple[int, int]]]
    is_live: list[list[bool]]
    num_tokens: list[list[int]]
    have_same_keys: bool

    @property
    def total_tokens(self) -> int:
        """Loss tokens of all rows."""
        return sum(map(sum, self.num_tokens))


class _SkipEmptyStep(TrainerCallback):
    """Keep momentum and weight decay from moving the weights on a step that has no token to learn from."""

    def __init__(self, trainer: "UpdatePhase") -> None:
        self.trainer = trainer
        self.hooks: list[RemovableHandle] = []
        self.hidden: list[list[torch.nn.Parameter]] = []

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        optimizer = kwargs["optimizer"]
        if self.trainer.is_deepspeed_enabled:
            # DeepSpeed steps inside its backward pass, with an optimizer of its own around this one.
            optimizer = self.trainer.model_wrapped.basic_optimizer
        elif isinstance(optimizer, AcceleratedOptimizer):
            optimizer = optimizer.optimizer
        for hook in self.hooks:
            hook.remove()
        self.hooks = [optimizer.register_step_pre_hook(self.hide), optimizer.register_step_post_hook(self.show)]

    def hide(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
        # A zero gradient would still decay and coast. What the optimizer cannot see it leaves alone.
        if self.trainer._window_num_tokens == 0:
            self.hidden = [group["params"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["params"] = []

    def show(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
        for group, params in zip(optimizer.param_groups, self.hidden, strict=False):
            group["params"] = params
        self.hidden = []


class UpdatePhase(GRPOTrainer):
    """
    [`~trl.GRPOTrainer`] with DAPO's update phase: an exact token mean per optimizer step, the dual clip, and
    micro-batches of equal padded cost.

    Each optimizer step takes the rows that [`~trl.GRPOTrainer`] would take (the same random assignment, from the same
    draw), counts its own loss tokens over all ranks, and cuts the rows again into the usual number of micro-batches,
    on the same number of ranks. The training loop, DDP, FSDP and DeepSpeed see nothing unusual.

    With `max_tokens_per_microbatch` it is cut into as many micro-batches as keep that budget instead, the same number
    on every rank, and rows without a loss token are left out. The training loop goes on counting
    `gradient_accumulation_steps`; all micro-batches of an optimizer step run at the last of them.

    - Rows move between ranks inside an optimizer step where the ranks are data-parallel and their rollouts hold the
      same keys; elsewhere each rank cuts its own.
    - Rows with images, and `top_entropy_quantile < 1` (a quantile over the micro-batch is no sum over tokens), keep
      TRL's micro-batches, trimmed.
    - A model that depends on its padding (absolute positions counted from the first column, dynamic or long rope,
      attention scaled by position) keeps TRL's micro-batches, untrimmed: one line at the start of training says so.
    - The entropy bonus is a mean over the optimizer step's tokens too. The load-balancing loss of a mixture of experts
      stays what it is everywhere: a mean over micro-batches of a loss on the micro-batch.
    - An optimizer step without a loss token leaves weights and optimizer state as they are, under every engine.
    - With a `loss_type` other than `"dapo"` micro-batches, loss and metrics are TRL's. Rows that only fill a rollout
      are left out of the loss: a micro-batch's loss is that of its other rows, and it weighs as many as these are.

    Metrics have one value per optimizer step. `entropy`, `kl`, `clip_ratio/*`, `policy_loss`, `aux_loss` and
    `entropy_coef` mean what they mean in TRL. New are `clip_ratio/dual_mean` (share of tokens at the dual clip),
    `num_loss_tokens` (of the optimizer step, all ranks), `padding_share` (of the tokens that go through the model),
    `microbatches` (forward and backward passes, on each rank), `peak_microbatch_tokens` (of the largest of them on any
    rank, padding included) and `frac_empty_steps` (share of optimizer steps without a loss token).

    Args:
        *args, **kwargs:
            As [`~trl.GRPOTrainer`], with a [`DAPOConfig`] as `args`.
    """

    # Narrower than TRL and transformers declare them: optional there, and set in every trainer that was constructed.
    args: DAPOConfig
    model: PreTrainedModel
    num_generations: int
    num_generations_eval: int
    max_completion_length: int
    pad_to_multiple_of: int | None
    train_dataset: Dataset | IterableDataset
    _logs: dict[str, Any]
    # These begin as `None` there, which is all that is said of them.
    _buffered_inputs: list[dict] | None  # type: ignore[assignment]
    _signature_columns: list[str] | None  # type: ignore[assignment]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._window_batches: list = []  # what the dataloader gave for the coming optimizer step
        self._window_microbatches: deque[dict] = deque()  # what is left of the optimizer step under way
        self._window_num_tokens: int | None = None  # loss tokens of the optimizer step, over all ranks
        self._is_last_rollout = False  # whether training ends on the rollout under way
        self._step_metrics = StepMetrics()  # of the optimizer step under way
        self._budget = self.args.max_tokens_per_microbatch
        self._has_warned_of_length = False
        self._check_budget()
        self.add_callback(_SkipEmptyStep(self))
        if self.accelerator.is_main_process:
            context = context_length(self.model.config)
            for message in warnings_at_start(self.args, context, self._steps_in_bfloat16()):
                logger.warning(message)

    def _steps_in_bfloat16(self) -> bool:
        """Whether the whole model trains, with no copy of its weights in more than bfloat16."""
        # DeepSpeed keeps a copy in float32, and in mixed precision FSDP turns the weights to float32.
        if self.is_deepspeed_enabled or (self.is_fsdp_enabled and self.accelerator.mixed_precision != "no"):
            return False
        parameters = list(self.model.parameters())
        trained = sum(
            weight.numel() for weight in parameters if weight.requires_grad and weight.dtype == torch.bfloat16
        )
        return 2 * trained > sum(weight.numel() for weight in parameters)

    def _check_budget(self) -> None:
        """Refuse a budget where rows cannot be cut again."""
        if self._budget is None:
            return
        setting = f"`max_tokens_per_microbatch={self._budget}`"
        if self._is_vlm:
            raise ValueError(
                f"{setting} does not support models with images, whose rows cannot be cut again. Leave it out, and "
                "bound memory by `per_device_train_batch_size`."
            )
        if self.num_ranks_sharing_a_row > 1:
            raise ValueError(
                f"{setting} needs ranks of which each has rows of its own, but {self.num_ranks_sharing_a_row} ranks "
                "share a row (tensor, context or sequence parallelism). Use data parallelism (DDP, FSDP, ZeRO), or "
                "leave it out."
            )
        self._refuse_to_feel_padding(why_positions_are_absolute(self.model.config))

    def _refuse_to_feel_padding(self, reason: str | None) -> None:
        if reason is not None:
            raise ValueError(
                f"`max_tokens_per_microbatch={self._budget}` does not work for this model, which depends on its "
                f"padding: {reason}. Leave it out, and bound memory by `per_device_train_batch_size`."
            )

    # The window: the rows of one optimizer step

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list, torch.Tensor | int | None]:
        batches, num_items_in_batch = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._window_batches = batches
        self._window_microbatches.clear()
        return batches, num_items_in_batch

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        if not self.model.training:
            return super()._prepare_inputs(generation_batch)
        return self._window_microbatches.popleft()

    def _open_window(self, batches: list) -> None:
        """Generate what the optimizer step needs and cut its rows into micro-batches."""
        self._step_metrics = StepMetrics()
        self._check_padding()
        parts = []  # what TRL would train on at each micro-step
        for step, batch in enumerate(batches, start=self._step):
            # The policy does not change inside a window, so a rollout that starts in its middle may be made now.
            if step % self._generate_every == 0 or self._buffered_inputs is None:
                # Micro-steps to the end of training, or a few more where an epoch's last window is short.
                left = self.args.gradient_accumulation_steps * (self.state.max_steps - self.state.global_step)
                self._is_last_rollout = step + self._generate_every >= self._step + left
                self._buffered_inputs = self._roll_out(batch)
            parts.append(self._buffered_inputs[step % self._steps_per_generation])
        rows = self._join(parts)
        facts = self._gather_row_facts(parts, rows)
        self._window_num_tokens = facts.total_tokens
        microbatches = self._cut(parts, rows, facts) if self.loss_type == "dapo" else self._weigh(parts, facts)
        self._window_microbatches = deque(microbatches)

    @property
    def _steps_per_generation(self) -> int:
        """Micro-steps of a rollout, which TRL works out where nobody set them."""
        assert self.args.steps_per_generation is not None
        return self.args.steps_per_generation

    @property
    def _generate_every(self) -> int:
        return self._steps_per_generation * self.num_iterations

    def _roll_out(self, batch: list[dict[str, Any]]) -> list[dict]:
        """Generate, and assign the rows to micro-steps at random: exactly TRL's assignment, from the same draw."""
        rollout = self._generate_and_score_completions(batch)
        if self._trims_padding:
            check_keys(rollout)
        by_row: dict[str, Any] = split_pixel_values_by_grid(rollout)
        shuffled: dict[str, Any] = shuffle_sequence_dict(by_row)
        parts: list[dict[str, Any]] = split_tensor_dict(shuffled, self._steps_per_generation)
        return [unsplit_pixel_values_by_grid(part) for part in parts]

    def _join(self, parts: list[dict]) -> dict | None:
        """This rank's rows under one another; `None` where they stay in the micro-batches that TRL would make."""
        if not self._trims_padding or self.top_entropy_quantile < 1.0 or not all(map(is_cut_by_row, parts)):
            return None
        return join_rows(parts, self._tokenizer.pad_token_id)

    def _gather_row_facts(self, parts: list[dict], rows: dict | None) -> RowFacts:
        """Tell every rank, in one collective, of every row of the window."""
        keys = 0 if rows is None else schema(rows)
        facts = [torch.tensor([[0, 0, 0, keys]], device=self.accelerator.device)]
        for part in parts:
            mask = part["completion_mask"]
            loss_mask = mask * part["tool_mask"] if "tool_mask" in part else mask
            is_live = torch.ones_like(mask[:, 0]) if part.get("is_filler") is None else ~part["is_filler"]
            lengths = row_lengths(part["prompt_mask"], mask)
            facts.append(torch.cat([lengths, loss_mask.sum(1, keepdim=True), is_live.unsqueeze(1)], dim=1))
        ranks = self.accelerator.gather(torch.cat(facts).unsqueeze(0)).tolist()
        return RowFacts(
            lengths=[[(prompt, completion) for prompt, completion, _, _ in found] for _, *found in ranks],
            is_live=[[bool(is_live) for *_, is_live in found] for _, *found in ranks],
            num_tokens=[[num_tokens for *_, num_tokens, _ in found] for _, *found in ranks],
            have_same_keys=all(header[-1] == keys for header, *_ in ranks),
        )

    def _weigh(self, parts: list[dict], facts: RowFacts) -> list[dict]:
        """TRL's micro-batches, with the weights that leave filler out of TRL's loss."""
        is_live = facts.is_live[self.accelerator.process_index]
        if all(map(all, facts.is_live)):
            return parts
        mean_live = sum(map(sum, facts.is_live)) / (len(facts.is_live) * len(parts))
        num_rows, microbatches = len(is_live) // len(parts), []
        for start, part in zip(range(0, len(is_live), num_rows), parts, strict=True):
            num_live = sum(is_live[start : start + num_rows])
            weights = weights_without_filler(self.loss_type, num_rows, num_live, mean_live)
            microbatches.append({**part, "weights": weights})
        return microbatches

    def _cut(self, parts: list[dict], rows: dict | None, facts: RowFacts) -> list[dict]:
        """Micro-batches of equal padded cost, or within the budget, with the rows of `parts`."""
        rank, device, own_rows = self.accelerator.process_index, self.accelerator.device, rows
        lengths = facts.lengths[rank]
        num_rows = len(lengths)
        mean_num: float = len(parts)
        if rows is None:
            size = num_rows // len(parts)
            plan = [list(range(start, start + size)) for start in range(0, num_rows, size)]
        else:
            can_exchange = self._exchanges_rows(facts)
            plans = self._plan(len(parts), facts, can_exchange)
            mean_num = sum(bool(indices) for plan in plans for indices in plan) / len(plans)
            if can_exchange:
                rows, lengths, plan = self._exchange(rows, facts.lengths, plans)
            else:
                plan = [[row - rank * num_rows for row in indices] for indices in plans[rank]]

        microbatches = []
        for step, indices in enumerate(plan):
            if own_rows is not None and not indices:
                # Every rank makes as many passes: one token stands in for the rows that there are not.
                part = no_rows(own_rows, self._tokenizer.pad_token_id)
                self._step_metrics.add_microbatch(real_tokens=0, padded_tokens=0)
            else:
                part = parts[step] if rows is None else index_rows(rows, torch.tensor(indices, device=device))
                if self._trims_padding:
                    columns = widths([lengths[row] for row in indices], self.pad_to_multiple_of)
                    part = resize(part, *columns, self._tokenizer.pad_token_id)
                self._step_metrics.add_microbatch(
                    real_tokens=sum(sum(lengths[row]) for row in indices),
                    padded_tokens=part["prompt_ids"].numel() + part["completion_ids"].numel(),
                )
            part["num_items_in_batch"] = torch.tensor(facts.total_tokens, device=device)
            # What is a mean over micro-batches is one over those that have rows.
            microbatches.append({**part, "num_microbatches": mean_num if indices else math.inf})
        return microbatches

    def _plan(self, num_steps: int, facts: RowFacts, can_exchange: bool) -> list[list[list[int]]]:
        """For each rank, for each of its micro-batches, the numbers of its rows, counted over all ranks."""
        if self._budget is None:
            return plan_window(facts.lengths, num_steps, can_exchange, self.pad_to_multiple_of)
        num_rows = len(facts.lengths[0])
        trains = [
            rank * num_rows + row
            for rank, num_tokens in enumerate(facts.num_tokens)
            for row in range(num_rows)
            if num_tokens[row]
        ]
        lengths = [
            [row for row, num in zip(*rank, strict=True) if num]
            for rank in zip(facts.lengths, facts.num_tokens, strict=True)
        ]
        self._warn_of_length([row for rank in lengths for row in rank], self._budget)
        cost = self.pad_to_multiple_of, self._attention_cost
        plans = plan_window_within_budget(lengths, self._budget, self._ranks_are_in_step, can_exchange, *cost)
        return [[[trains[row] for row in indices] for indices in plan] for plan in plans]

    def _warn_of_length(self, lengths: list[tuple[int, int]], budget: int) -> None:
        longest = max((padded_cost([row], self.pad_to_multiple_of) for row in lengths), default=0)
        if longest > budget and not self._has_warned_of_length:
            self._has_warned_of_length = True
            if self.accelerator.is_main_process:
                logger.warning(
                    f"A row of {longest} tokens is longer than `max_tokens_per_microbatch={budget}`. It makes a "
                    "micro-batch alone, and so will others: memory must hold the longest prompt and completion."
                )

    @property
    def num_ranks_sharing_a_row(self) -> int:
        """Ranks that hold the same row, by tensor, context or sequence parallelism."""
        return self.get_tp_size() * self.get_cp_size() * self.get_sp_size()

    @cached_property
    def _attention_cost(self) -> float:
        return attention_cost_of(self.model.config.get_text_config())

    @property
    def _ranks_are_in_step(self) -> bool:
        """Whether ranks wait for one another at every micro-batch, as where they share weights or gradients."""
        return (
            self.is_fsdp_enabled
            or self.is_distributed_loading_by_transformers
            or (self.is_deepspeed_enabled and self.accelerator.state.deepspeed_plugin.zero_stage >= 2)
            or self._syncs_each_batch
        )

    @property
    def _syncs_each_batch(self) -> bool:
        return self.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)

    def _exchanges_rows(self, facts: RowFacts) -> bool:
        # Ranks that share a row (tensor, context or sequence parallelism) must not part with it.
        return (
            self.num_ranks_sharing_a_row == 1
            and len(facts.lengths) > 1
            and facts.have_same_keys
            and dist.is_initialized()
        )

    def _exchange(
        self, rows: dict, rank_lengths: list[list[tuple[int, int]]], plans: list[list[list[int]]]
    ) -> tuple[dict, list[tuple[int, int]], list[list[int]]]:
        """
        Send each row to the rank whose micro-batch it joins.

        Returns the rows held now, their lengths and, for each micro-batch, the indices of its rows.
        """
        rank, num_ranks, num_rows = self.accelerator.process_index, len(rank_lengths), len(rank_lengths[0])
        lengths = [row for of_rank in rank_lengths for row in of_rank]
        rows = resize(rows, *widths(lengths, self.pad_to_multiple_of), self._tokenizer.pad_token_id)

        def routed(source: int, destination: int) -> list[int]:
            """Rows, in ascending order, that one rank holds and another trains."""
            held = range(source * num_rows, (source + 1) * num_rows)
            return sorted(row for indices in plans[destination] for row in indices if row in held)

        outgoing = [routed(rank, other) for other in range(num_ranks)]
        incoming = [routed(other, rank) for other in range(num_ranks)]
        leaving = [row - rank * num_rows for share in outgoing for row in share]
        order = torch.tensor(leaving, dtype=torch.long, device=self.accelerator.device)
        sent = rows_to_bytes(index_rows(rows, order))
        received = sent.new_empty(sum(map(len, incoming)), sent.size(1))
        dist.all_to_all_single(received, sent, [len(share) for share in incoming], [len(share) for share in outgoing])
        arrived = [row for share in incoming for row in share]
        position = {row: place for place, row in enumerate(arrived)}
        plan = [[position[row] for row in indices] for indices in plans[rank]]
        return rows_from_bytes(received, rows), [lengths[row] for row in arrived], plan

    # Padding

    @property
    def _trims_padding(self) -> bool:
        """Whether columns of padding may go, in passes with gradient and without."""
        return self.loss_type == "dapo" and not self._depends_on_padding

    @cached_property
    def _depends_on_padding(self) -> bool:
        """Whether log-probabilities depend on padding. All ranks ask at once: finding out may take the model."""
        reason = why_positions_are_absolute(self.model.config)
        # Turned by their positions, queries and keys know distances alone, though rounding differs. Models with images
        # take no plain row, and have rotary positions.
        if reason is None and not has_rotary_positions(self.model.config) and not self._is_vlm:
            moved = self._moved_by_padding()
            if moved > PADDING_TOLERANCE:
                reason = f"a row's log-probabilities move by {moved:.2g} in the mean when it is padded"
        if reason is not None and self.accelerator.is_main_process:
            logger.warning(
                f"This model depends on its padding: {reason}. Micro-batches keep the widths that GRPOTrainer gives "
                "them, and are not cut to equal cost."
            )
        return reason is not None

    @torch.no_grad()
    def _moved_by_padding(self) -> float:
        """By how much the log-probabilities of a row move, in the mean, when it is padded on the left or the right."""
        text_config = self.model.config.get_text_config()
        num_tokens = min(32, (getattr(text_config, "max_position_embeddings", None) or 64) // 2)
        row = torch.linspace(0, text_config.vocab_size - 1, num_tokens, device=self.accelerator.device).long()
        tokens, padding = torch.ones_like(row), torch.zeros_like(row)
        fill = torch.full_like(row, self._tokenizer.pad_token_id)

        def logps(ids: torch.Tensor, mask: torch.Tensor, first: int) -> torch.Tensor:
            """Of the row's tokens but the first, which stands in column `first`."""
            num_columns = len(ids) - first - 1
            found, _, _ = super(UpdatePhase, self)._get_per_token_logps_and_entropies(
                self.model, ids.unsqueeze(0), mask.unsqueeze(0), num_columns
            )
            return found[0, : num_tokens - 1].float()

        was_training = self.model.training
        self.model.eval()  # dropout would move them too
        try:
            alone = logps(row, tokens, 0)
            left = logps(torch.cat([fill, row]), torch.cat([padding, tokens]), num_tokens)
            right = logps(torch.cat([row, fill]), torch.cat([tokens, padding]), 0)
        finally:
            self.model.train(was_training)
        moved = torch.stack([(left - alone).abs().mean(), (right - alone).abs().mean()])
        return self.accelerator.gather(moved).max().item()  # the same on every rank, whatever rounding does

    def _check_padding(self) -> None:
        if self._budget is not None and self._depends_on_padding:
            self._refuse_to_feel_padding("its log-probabilities move when a row is padded")
        if self._trims_padding or self.loss_type != "dapo" or not self.args.use_dynamic_sampling:
            return
        if self.args.dynamic_sampling_surplus == "carry":
            raise ValueError(
                "`dynamic_sampling_surplus='carry'` does not work for this model, whose log-probabilities depend on "
                "the padding: a row has other padding in the rollout that it is carried to. Set "
                "`dynamic_sampling_surplus='discard'`."
            )

    # The objective

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        if self.loss_type != "dapo":
            return self._compute_other_loss(model, inputs)
        # TRL's own is not wrapped: it divides by the rollout's tokens, it has no word for rows whose old
        # log-probabilities are unknown (NaN: sampled by the current policy), it moves the router on a step without
        # a loss token, and its metrics gather one value a row, which fails or hangs where ranks hold unequal
        # numbers of rows.
        in_training = self.model.training
        # Each batch of an evaluation has its own: evaluation may come between two micro-batches of a step.
        step_metrics = self._step_metrics if in_training else StepMetrics()
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
        )
        assert entropies is not None  # asked for
        entropy_mask = mask
        if self.top_entropy_quantile < 1.0:
            entropy_mask = mask * self.get_high_entropy_mask(entropies, mask, 1 - self.top_entropy_quantile)

        advantages = inputs["advantages"]
        if advantages.dim() == 1:
            advantages = advantages.unsqueeze(1)
        old_logps = fill_old_logps(inputs.get("old_per_token_logps"), logps)
        ratio = probability_ratio(logps - old_logps, mask, self.importance_sampling_level)
        clip = (self.epsilon_low, self.epsilon_high, self.args.delta)
        per_token_loss = clipped_loss(ratio, advantages, *clip)
        if self.off_policy_mask_threshold is not None:
            per_token_loss = per_token_loss * self.get_off_policy_mask(
                advantages=advantages,
                per_token_logps=logps,
                sampling_per_token_logps=inputs.get("sampling_per_token_logps", old_logps),
                mask=mask,
                off_policy_threshold=self.off_policy_mask_threshold,
            )
        if entropy_mask is not mask:
            per_token_loss = per_token_loss * entropy_mask
        if self.use_vllm and self.vllm_importance_sampling_correction:
            per_token_loss = per_token_loss * inputs["importance_sampling_ratio"]
        if self.beta != 0.0:
            kl = kl_to_reference(logps, inputs["ref_per_token_logps"])
            if self.args.use_bias_correction_kl:
                kl = kl * ratio
            per_token_loss = per_token_loss + self.beta * kl
            step_metrics.add(kl=(kl * mask).sum().detach())

        num_tokens = inputs["num_items_in_batch"]
        num_ranks = self.accelerator.num_processes
        mean_num_microbatches = inputs.get("num_microbatches", 1)  # of a rank in this optimizer step, in the mean
        loss = token_mean(per_token_loss, mask, num_tokens, num_ranks)
        step_metrics.add(policy_loss=loss.detach())

        if self._entropy_bonus_enabled:
            if entropy_mask is mask:
                bonus = token_mean(entropies, mask, num_tokens, num_ranks)
            else:
                # How many tokens a micro-batch's quantile selects is known only here: a mean of means, as TRL's.
                bonus = token_mean(entropies, entropy_mask, entropy_mask.sum()) / mean_num_microbatches
            loss = loss - self._entropy_bonus_coef() * bonus
            step_metrics.add(
                active_entropy=(entropies * entropy_mask).sum().detach(), active_tokens=entropy_mask.sum()
            )
        if aux_loss is not None:
            # A step without a loss token must not move the router either.
            weight = self.router_aux_loss_coef * torch.as_tensor(num_tokens > 0)
            loss = loss + weight * aux_loss / mean_num_microbatches
            step_metrics.add(aux_loss=aux_loss.detach() / mean_num_microbatches)

        step_metrics.add_tokens(mask, entropies, clipped_tokens(ratio, advantages, *clip), inputs.get("age"))
        if not in_training:
            self._publish(step_metrics, "eval")
        return loss

    def _compute_other_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        """TRL's loss, without the rows that only fill the rollout."""
        if "weights" not in inputs:
            return super()._compute_loss(model, inputs)
        weight, factor = inputs["weights"]
        beta, self.beta = self.beta, self.beta * factor
        try:
            # The policy term is in proportion to the advantages, the KL term to beta; the other terms keep their size.
            return weight * super()._compute_loss(model, {**inputs, "advantages": inputs["advantages"] * factor})
        finally:
            self.beta = beta

    def _entropy_bonus_coef(self) -> float:
        """The entropy coefficient in force; under adaptive control it rests while the entropy is above its target."""
        if self.use_adaptive_entropy and self._last_world_entropy > self.args.entropy_target:
            return 0.0
        return self.entropy_coef

    # The steps of the training loop

    def training_step(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        started, loss = time.perf_counter(), torch.zeros((), device=self.args.device)
        if not self._window_microbatches:
            # Sampling needs the mode that Trainer.training_step would set.
            model.train()
            if callable(train := getattr(self.optimizer, "train", None)):
                train()
            self._open_window(self._window_batches or [inputs])
            self._window_batches = []
        if self._budget is not None:
            # As many as there are need not be as many as the loop counts: all of them run at its last step.
            if not self.accelerator.sync_gradients:
                self._step += 1
                self._current_train_step_time += time.perf_counter() - started
                return loss
            while len(self._window_microbatches) > 1:
                with self._accumulating(model):
                    loss = loss + super(GRPOTrainer, self).training_step(model, inputs, num_items_in_batch)
        self._current_train_step_time += time.perf_counter() - started
        loss = loss + super().training_step(model, inputs, num_items_in_batch)
        if self.loss_type == "dapo" and not self._window_microbatches:
            self._publish(self._step_metrics, "train")
        return loss

    @contextmanager
    def _accumulating(self, model: torch.nn.Module) -> Iterator[None]:
        """What the training loop does around every micro-batch but the last: gradients stay on their rank."""
        gradient_state = self.accelerator.gradient_state
        if self.accelerator.distributed_type == DistributedType.DEEPSPEED or self._syncs_each_batch:
            context: AbstractContextManager[None] = nullcontext()
        elif self.is_distributed_loading_by_transformers:
            context = self._defer_fsdp_gradient_reduction()
        else:
            context = self.accelerator.no_sync(model)
        gradient_state._set_sync_gradients(False)
        try:
            with context:
                yield
        finally:
            gradient_state._set_sync_gradients(True)

    def _publish(self, step_metrics: StepMetrics, mode: str) -> None:
        """Reduce an optimizer step over ranks and log it."""
        totals = step_metrics.reduce(self.accelerator)
        metrics = metrics_of_tokens(totals)
        if mode == "train":
            metrics["microbatches"] = totals["microbatches"] / self.accelerator.num_processes
            metrics["peak_microbatch_tokens"] = totals["peak_tokens"]
            if totals["padded_tokens"] > 0:
                metrics["padding_share"] = 1 - totals["real_tokens"] / totals["padded_tokens"]
            metrics["frac_empty_steps"] = float(totals["tokens"] == 0)
        if self.aux_loss_enabled:
            metrics["aux_loss"] = totals["aux_loss"] / self.accelerator.num_processes
        if self._entropy_bonus_enabled:
            metrics["policy_loss"] = totals["policy_loss"] / self.accelerator.num_processes
            if mode == "train":
                self._adapt_entropy_coef(totals)
                metrics["entropy_coef"] = self.entropy_coef
        for name, value in metrics.items():
            self._metrics[mode][name].append(value)

    def _adapt_entropy_coef(self, totals: dict[str, float]) -> None:
        """Move the entropy coefficient by one notch towards the target, by TRL's rule."""
        if not self.use_adaptive_entropy or totals["active_tokens"] == 0:
            return
        entropy, args = totals["active_entropy"] / totals["active_tokens"], self.args
        if entropy <= args.entropy_target:
            self.entropy_coef = min(self.entropy_coef + args.entropy_coef_delta, args.entropy_coef_max)
        else:
            self.entropy_coef = max(self.entropy_coef - args.entropy_coef_delta, args.entropy_coef_min)
        self._last_world_entropy = entropy

    # Log-probabilities without gradient

    def _get_per_token_logps_and_entropies(
        self,
        model: torch.nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        options = {key: value for key, value in kwargs.items() if value is not None and value is not False}
        wants_more = options.keys() - {"compute_entropy"}
        # Trimmed where the pass with gradient is, which in evaluation it is not.
        is_whole = torch.is_grad_enabled() or wants_more or not self.model.training
        if batch_size is None or is_whole or not self._trims_padding:
            return super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, batch_size=batch_size, **kwargs
            )
        prompt_mask, completion_mask = attention_mask[:, :-logits_to_keep], attention_mask[:, -logits_to_keep:]
        lengths = row_lengths(prompt_mask, completion_mask).tolist()
        logps: torch.Tensor | None = None
        entropies: torch.Tensor | None = None
        for indices in self._cut_without_gradient(lengths, batch_size):
            # Every rank makes as many passes: one token of the first row stands in for the rows that there are not.
            prompt_width, completion_width = widths([lengths[row] for row in indices], self.pad_to_multiple_of)
            start = prompt_mask.size(1) - prompt_width
            stop = prompt_mask.size(1) + completion_width
            rows = torch.tensor(indices or [0], device=input_ids.device)
            chunk_logps, chunk_entropies, _ = super()._get_per_token_logps_and_entropies(
                model, input_ids[rows, start:stop], attention_mask[rows, start:stop], completion_width, **options
            )
            if logps is None:
                logps = chunk_logps.new_zeros(len(lengths), logits_to_keep)
            logps[rows[: len(indices)], :completion_width] = chunk_logps[: len(indices)]
            if chunk_entropies is not None:
                if entropies is None:
                    entropies = chunk_entropies.new_zeros(len(lengths), logits_to_keep)
                entropies[rows[: len(indices)], :completion_width] = chunk_entropies[: len(indices)]
        assert logps is not None  # there is a pass, if only of one token
        return logps, entropies, None

    def _cut_without_gradient(self, lengths: list[tuple[int, int]], batch_size: int) -> list[list[int]]:
        """Passes over this rank's rows: `batch_size` of them each in the mean, or within the budget."""
        if self._budget is None:
            return cut(lengths, -(-len(lengths) // batch_size), multiple_of=self.pad_to_multiple_of)
        cost = self._budget, self.pad_to_multiple_of, self._attention_cost
        num_passes = fewest_microbatches(lengths, *cost)
        if self._ranks_are_in_step:
            of_rank = torch.tensor([num_passes], device=self.accelerator.device)
            num_passes = int(self.accelerator.gather(of_rank).max())
        return cut(lengths, num_passes, *cost)

    # Checkpoints

    def update_state_dict(self) -> dict:
        """
        What the update phase needs to go on from a checkpoint as if it had not stopped.

        Returns:
            `dict` of tensors, integers and lists, loadable with `torch.load(..., weights_only=True)`. Each rank has
            its own.
        """
        phase = self._step % self._generate_every
        return {
            "step": self._step if phase else 0,
            "generate_every": self._generate_every,
            "rollout": self._buffered_inputs if phase else None,
        }

    def load_update_state_dict(self, state: dict) -> None:
        """
        Go on from where [`UpdatePhase.update_state_dict`] left off.

        Args:
            state (`dict`):
                What it returned, on this rank.

        Raises:
            ValueError: If the checkpoint lies inside a rollout and `steps_per_generation` or `num_iterations` changed.
        """
        if state["rollout"] is not None and state["generate_every"] != self._generate_every:
            raise ValueError(
                "The checkpoint lies inside a rollout of `steps_per_generation * num_iterations` = "
                f"{state['generate_every']} micro-batches, but this run has {self._generate_every}. Resume with the "
                "settings it was saved with."
            )
        self._step = state["step"]
        self._buffered_inputs = state["rollout"] and [
            {
                key: value.to(self.accelerator.device) if torch.is_tensor(value) else value
                for key, value in part.items()
            }
            for part in state["rollout"]
        ]

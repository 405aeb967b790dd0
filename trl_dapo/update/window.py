# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The window: the rows of one optimizer step on all processes, and their division into micro-batches."""

import math
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import torch
import torch.distributed as dist
from accelerate import Accelerator
from transformers.utils import logging

from ..ranks import exchange
from .loss import weights_without_filler
from .microbatches import Rows, plan_window, plan_window_within_budget
from .rollout_tensors import (
    avoid_nan_width,
    index_rows,
    is_cut_by_row,
    join_rows,
    placeholder_row,
    resize,
    row_lengths,
    rows_from_bytes,
    rows_to_bytes,
    schema,
    unknown_keys,
    widths,
)
from .step_metrics import StepMetrics


logger = logging.get_logger(__name__)


class RowFacts(NamedTuple):
    """Facts about the rows of a window, known on every process. The outer lists have one entry per process."""

    lengths: list[list[tuple[int, int]]]  # columns that the prompt and the completion need
    is_live: list[list[bool]]  # whether the row is not filler
    num_tokens: list[list[int]]  # loss tokens
    have_same_keys: bool  # whether the rows of all processes have the same keys, so that they can be exchanged
    have_unknown_keys: bool  # whether any row on any process has tensors of unknown layout

    @property
    def total_tokens(self) -> int:
        """Loss tokens of all rows."""
        return sum(map(sum, self.num_tokens))


UNKNOWN_KEYS = -1  # used instead of a schema, which is never negative


def gather_facts(parts: list[dict], keys: int, accelerator: Accelerator) -> RowFacts:
    """
    Gather facts about every row of the window on every process, in one collective call.

    `keys` represents the keys of the rows of this process: their `schema`, or 0 if the other processes do not need it,
    or `UNKNOWN_KEYS`.
    """
    facts = [torch.tensor([[0, 0, 0, keys]], device=accelerator.device)]
    for part in parts:
        mask = part["completion_mask"]
        loss_mask = mask * part["tool_mask"] if "tool_mask" in part else mask
        is_live = torch.ones_like(mask[:, 0]) if part.get("is_filler") is None else ~part["is_filler"]
        lengths = row_lengths(part["prompt_mask"], mask)
        facts.append(torch.cat([lengths, loss_mask.sum(1, keepdim=True), is_live.unsqueeze(1)], dim=1))
    ranks = accelerator.gather(torch.cat(facts).unsqueeze(0)).tolist()
    return RowFacts(
        lengths=[[(prompt, completion) for prompt, completion, _, _ in found] for _, *found in ranks],
        is_live=[[bool(is_live) for *_, is_live in found] for _, *found in ranks],
        num_tokens=[[num_tokens for *_, num_tokens, _ in found] for _, *found in ranks],
        have_same_keys=all(header[-1] == keys for header, *_ in ranks),
        have_unknown_keys=any(header[-1] == UNKNOWN_KEYS for header, *_ in ranks),
    )


def weight_without_filler(parts: list[dict], loss_type: str, accelerator: Accelerator) -> tuple[list[dict], int]:
    """
    Return TRL's micro-batches with weights that leave filler out of TRL's loss, and their loss tokens over all
    processes.
    """
    facts = gather_facts(parts, 0, accelerator)
    is_live = facts.is_live[accelerator.process_index]
    if all(map(all, facts.is_live)):
        return parts, facts.total_tokens
    mean_live = sum(map(sum, facts.is_live)) / (len(facts.is_live) * len(parts))
    num_rows, microbatches = len(is_live) // len(parts), []
    for start, part in zip(range(0, len(is_live), num_rows), parts, strict=True):
        num_live = sum(is_live[start : start + num_rows])
        microbatches.append({**part, "weights": weights_without_filler(loss_type, num_rows, num_live, mean_live)})
    return microbatches, facts.total_tokens


@dataclass(kw_only=True)
class MicrobatchPacker:
    """Packs the rows of windows into micro-batches of equal cost, or into micro-batches within a budget of tokens."""

    accelerator: Accelerator
    pad_token_id: int
    budget: int | None  # maximum number of tokens in a micro-batch
    attention: float  # cost of the attention between two tokens, as a multiple of all other cost of a token
    has_own_rows: bool  # whether no other process holds the same rows
    on_cuda: bool
    in_step: bool  # whether the processes wait for one another at every micro-batch
    # These three follow from settings that a callback may change during a run.
    multiple_of: int | None = None  # the number of columns is a multiple of this
    trims: bool = False  # whether columns of padding may be removed
    recuts: bool = False  # whether rows may move to another micro-batch
    has_warned: bool = field(default=False, init=False)  # whether it warned of a row that is longer than the budget

    def pack(self, parts: list[dict], step_metrics: StepMetrics) -> tuple[list[dict], int]:
        """
        Return the micro-batches of a window, and its loss tokens over all processes. `parts` are the micro-batches
        that TRL would train on.
        """
        # Every process has the same number of micro-batches. One without rows gets a placeholder row that is not in
        # the loss.
        accelerator, own_rows, keys = self.accelerator, None, 0
        if any(map(unknown_keys, parts)):
            keys = UNKNOWN_KEYS
        elif self.recuts and all(map(is_cut_by_row, parts)):
            own_rows = join_rows(parts, self.pad_token_id)
            keys = schema(own_rows)
        facts = gather_facts(parts, keys, accelerator)
        trims = self.trims and not facts.have_unknown_keys
        if not trims:
            own_rows = None
        rows, lengths, mean_num = own_rows, facts.lengths[accelerator.process_index], float(len(parts))
        if own_rows is None:
            size = len(lengths) // len(parts)
            plan = [list(range(start, start + size)) for start in range(0, len(lengths), size)]
        else:
            plans = self._plan(len(parts), facts)
            mean_num = sum(bool(indices) for plan in plans for indices in plan) / len(plans)
            rows, lengths, plan = self._distribute(own_rows, facts, plans)
        microbatches = []
        for step, indices in enumerate(plan):
            if own_rows is not None and not indices:
                part = placeholder_row(own_rows, self.pad_token_id)
                step_metrics.add_microbatch(real_tokens=0, padded_tokens=0)
            else:
                part = parts[step] if rows is None else index_rows(rows, self._tensor(indices))
                if trims:
                    columns = widths([lengths[row] for row in indices], self.multiple_of)
                    if self.on_cuda:
                        columns = avoid_nan_width(columns, self.multiple_of)
                    part = resize(part, *columns, self.pad_token_id)
                step_metrics.add_microbatch(
                    real_tokens=sum(sum(lengths[row]) for row in indices),
                    padded_tokens=part["prompt_ids"].numel() + part["completion_ids"].numel(),
                )
            part["num_items_in_batch"] = self._tensor(facts.total_tokens)
            # Terms of the loss that are means over micro-batches only count those that have rows.
            microbatches.append({**part, "num_microbatches": mean_num if indices else math.inf})
        return microbatches, facts.total_tokens

    def pack_without_gradient(self, lengths: list[tuple[int, int]], batch_size: int) -> list[list[int]]:
        """
        Return the rows of this process divided into passes without gradient. Each pass is within the budget, or has
        `batch_size` rows on average if there is no budget.
        """
        rows = Rows(lengths, self.budget, self.multiple_of, self.attention)
        num_passes = -(-len(lengths) // batch_size) if self.budget is None else rows.fewest()
        if self.in_step and self.budget is not None:
            num_passes = int(self.accelerator.gather(self._tensor([num_passes])).max())
        return rows.cut(range(len(lengths)), num_passes)

    def _tensor(self, values: int | list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.long, device=self.accelerator.device)

    def _may_exchange(self, facts: RowFacts) -> bool:
        """Return whether rows may move to other processes. Processes that share the same rows must keep them."""
        return self.has_own_rows and len(facts.lengths) > 1 and facts.have_same_keys and dist.is_initialized()

    def _plan(self, num_steps: int, facts: RowFacts) -> list[list[list[int]]]:
        """
        Return the numbers of the rows of each micro-batch of each process. Rows are numbered over all processes.
        """
        may_exchange = self._may_exchange(facts)
        if self.budget is None:
            return plan_window(facts.lengths, num_steps, may_exchange, self.multiple_of)
        trains = [row for row, num in enumerate(chain.from_iterable(facts.num_tokens)) if num]
        lengths = [
            [row for row, num in zip(*rank, strict=True) if num]
            for rank in zip(facts.lengths, facts.num_tokens, strict=True)
        ]
        longest = max((sum(widths([row], self.multiple_of)) for rank in lengths for row in rank), default=0)
        if longest > self.budget and not self.has_warned:
            self.has_warned = True
            if self.accelerator.is_main_process:
                logger.warning(
                    f"A row of {longest} tokens is longer than `max_tokens_per_microbatch={self.budget}`. It forms a "
                    "micro-batch of its own, and so will later rows of this length. Memory must be large enough for "
                    "the longest prompt and completion."
                )
        plans = plan_window_within_budget(
            lengths, self.budget, self.in_step, may_exchange, self.multiple_of, self.attention
        )
        numbered: list[list[list[int]]] = []
        for plan in plans:
            numbered.append([[trains[row] for row in indices] for indices in plan])
        return numbered

    def _distribute(
        self, rows: dict, facts: RowFacts, plans: list[list[list[int]]]
    ) -> tuple[dict, list[tuple[int, int]], list[list[int]]]:
        """
        Move each row to the process that trains on it. Return the rows that this process then holds, their lengths,
        and its plan.
        """
        rank, num_ranks, num_rows = self.accelerator.process_index, len(plans), len(facts.lengths[0])
        if not self._may_exchange(facts):
            return rows, facts.lengths[rank], [[row - rank * num_rows for row in indices] for indices in plans[rank]]
        lengths = [row for of_rank in facts.lengths for row in of_rank]
        rows = resize(rows, *widths(lengths, self.multiple_of), self.pad_token_id)

        def routed(source: int, destination: int) -> list[int]:
            """Return the rows, in ascending order, that one process holds and another trains on."""
            held = range(source * num_rows, (source + 1) * num_rows)
            return sorted(row for indices in plans[destination] for row in indices if row in held)

        outgoing = [routed(rank, other) for other in range(num_ranks)]
        incoming = [routed(other, rank) for other in range(num_ranks)]
        leaving = self._tensor([row - rank * num_rows for share in outgoing for row in share])
        to_ranks, from_ranks = list(map(len, outgoing)), list(map(len, incoming))
        received = exchange(rows_to_bytes(index_rows(rows, leaving)), to_ranks, from_ranks)
        arrived = [row for share in incoming for row in share]
        position = {row: place for place, row in enumerate(arrived)}
        plan = [[position[row] for row in indices] for indices in plans[rank]]
        return rows_from_bytes(received, rows), [lengths[row] for row in arrived], plan

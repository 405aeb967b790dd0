# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The window: the rows of one optimizer step, on all ranks, and the micro-batches that they are cut into."""

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
    clear_of_nan,
    index_rows,
    is_cut_by_row,
    join_rows,
    no_rows,
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
    """Facts about the rows of a window that every rank knows, rank by rank."""

    lengths: list[list[tuple[int, int]]]  # of prompt and completion
    is_live: list[list[bool]]  # no filler
    num_tokens: list[list[int]]  # in the loss
    have_same_keys: bool  # so that rows can be exchanged
    have_unknown_keys: bool  # any of them, on any rank

    @property
    def total_tokens(self) -> int:
        """Loss tokens of all rows."""
        return sum(map(sum, self.num_tokens))


UNKNOWN_KEYS = -1  # used instead of a schema's number, which is never negative


def gather_facts(parts: list[dict], keys: int, accelerator: Accelerator) -> RowFacts:
    """
    Tell every rank, in one collective, about every row of the window. `keys` stands for the keys of this rank's rows:
    their `schema`, 0 if no other rank needs to know them, or `UNKNOWN_KEYS`.
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
    """TRL's micro-batches, weighted so that filler is left out of TRL's loss, and their loss tokens on all ranks."""
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
    """Packs the rows of windows into micro-batches of equal padded cost, or within a budget of tokens."""

    accelerator: Accelerator
    pad_token_id: int
    budget: int | None  # tokens of a micro-batch
    attention: float  # cost of a pair of tokens, in tokens
    has_own_rows: bool  # no other rank holds the same
    on_cuda: bool
    in_step: bool  # ranks wait for one another at every micro-batch
    # A callback may change the settings behind these three.
    multiple_of: int | None = None  # columns
    trims: bool = False  # whether columns of padding may go
    recuts: bool = False  # whether rows may change their micro-batch
    has_warned: bool = field(default=False, init=False)  # of a row beyond the budget

    def pack(self, parts: list[dict], step_metrics: StepMetrics) -> tuple[list[dict], int]:
        """The micro-batches of a window, which TRL would train on as `parts`, and its loss tokens on all ranks."""
        # Every rank makes as many micro-batches; one without rows has one token, which is not in the loss.
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
            rows, lengths, plan = self._deal(own_rows, facts, plans)
        microbatches = []
        for step, indices in enumerate(plan):
            if own_rows is not None and not indices:
                part = no_rows(own_rows, self.pad_token_id)
                step_metrics.add_microbatch(real_tokens=0, padded_tokens=0)
            else:
                part = parts[step] if rows is None else index_rows(rows, self._tensor(indices))
                if trims:
                    columns = widths([lengths[row] for row in indices], self.multiple_of)
                    if self.on_cuda:
                        columns = clear_of_nan(columns, self.multiple_of)
                    part = resize(part, *columns, self.pad_token_id)
                step_metrics.add_microbatch(
                    real_tokens=sum(sum(lengths[row]) for row in indices),
                    padded_tokens=part["prompt_ids"].numel() + part["completion_ids"].numel(),
                )
            part["num_items_in_batch"] = self._tensor(facts.total_tokens)
            # What is a mean over micro-batches is one over those that have rows.
            microbatches.append({**part, "num_microbatches": mean_num if indices else math.inf})
        return microbatches, facts.total_tokens

    def pack_without_gradient(self, lengths: list[tuple[int, int]], batch_size: int) -> list[list[int]]:
        """Passes over this rank's rows: `batch_size` of them each in the mean, or within the budget."""
        rows = Rows(lengths, self.budget, self.multiple_of, self.attention)
        num_passes = -(-len(lengths) // batch_size) if self.budget is None else rows.fewest()
        if self.in_step and self.budget is not None:
            num_passes = int(self.accelerator.gather(self._tensor([num_passes])).max())
        return rows.cut(range(len(lengths)), num_passes)

    def _tensor(self, values: int | list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.long, device=self.accelerator.device)

    def _may_exchange(self, facts: RowFacts) -> bool:
        """Whether rows may go to other ranks; those that share a row must not part with it."""
        return self.has_own_rows and len(facts.lengths) > 1 and facts.have_same_keys and dist.is_initialized()

    def _plan(self, num_steps: int, facts: RowFacts) -> list[list[list[int]]]:
        """For each rank, for each of its micro-batches, the numbers of its rows, counted over all ranks."""
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
                    f"A row of {longest} tokens is longer than `max_tokens_per_microbatch={self.budget}`. It is a "
                    "micro-batch of its own, as others will be: memory must hold the longest prompt and completion."
                )
        plans = plan_window_within_budget(
            lengths, self.budget, self.in_step, may_exchange, self.multiple_of, self.attention
        )
        numbered: list[list[list[int]]] = []
        for plan in plans:
            numbered.append([[trains[row] for row in indices] for indices in plan])
        return numbered

    def _deal(
        self, rows: dict, facts: RowFacts, plans: list[list[list[int]]]
    ) -> tuple[dict, list[tuple[int, int]], list[list[int]]]:
        """Hands each row to the rank that trains on it: the rows held now, their lengths, and this rank's plan."""
        rank, num_ranks, num_rows = self.accelerator.process_index, len(plans), len(facts.lengths[0])
        if not self._may_exchange(facts):
            return rows, facts.lengths[rank], [[row - rank * num_rows for row in indices] for indices in plans[rank]]
        lengths = [row for of_rank in facts.lengths for row in of_rank]
        rows = resize(rows, *widths(lengths, self.multiple_of), self.pad_token_id)

        def routed(source: int, destination: int) -> list[int]:
            """Rows, in ascending order, that one rank holds and another trains."""
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

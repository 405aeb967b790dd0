# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Passes through the model: those that accumulate gradients, and those without gradient."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor

from .rollout_tensors import row_lengths, widths
from .window import MicrobatchPacker


def syncs_each_batch(accelerator: Accelerator) -> bool:
    """Return whether gradients are synchronized after every micro-batch."""
    return accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)


def ranks_are_in_step(accelerator: Accelerator, shards_weights: bool) -> bool:
    """Return whether the processes wait for one another at every micro-batch, because they shard or sync something."""
    is_deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
    zero_stage = accelerator.state.deepspeed_plugin.zero_stage if is_deepspeed else 0
    return shards_weights or zero_stage >= 2 or syncs_each_batch(accelerator)


@contextmanager
def accumulating(
    accelerator: Accelerator, model: torch.nn.Module, defer: Callable[[], AbstractContextManager] | None
) -> Iterator[None]:
    """
    Accumulate gradients without synchronizing them, as the training loop does for every micro-batch except the last.

    `defer` does this for weights that were sharded when they were loaded.
    """
    if accelerator.distributed_type == DistributedType.DEEPSPEED or syncs_each_batch(accelerator):
        context: AbstractContextManager = nullcontext()
    else:
        context = accelerator.no_sync(model) if defer is None else defer()
    accelerator.gradient_state._set_sync_gradients(False)
    try:
        with context:
            yield
    finally:
        accelerator.gradient_state._set_sync_gradients(True)


def run_trimmed(
    run: Callable[..., tuple], ids: Tensor, mask: Tensor, num_columns: int, batch_size: int, packer: MicrobatchPacker
) -> tuple[Tensor, Tensor | None]:
    """
    Return log-probabilities and entropies, `(B, T)`, from passes over rows of similar length with little padding.

    `run` is called with ids, their mask and the number of completion columns. It returns log-probabilities, entropies
    and a third value, which is ignored.
    """
    prompt_mask, completion_mask = mask[:, :-num_columns], mask[:, -num_columns:]
    lengths = row_lengths(prompt_mask, completion_mask).tolist()
    found: list[Tensor | None] = [None, None]
    for indices in packer.pack_without_gradient(lengths, batch_size):
        # Processes that run in step make equally many passes. So a pass may be without rows, and gets one token of the
        # first row.
        prompt_width, completion_width = widths([lengths[row] for row in indices], packer.multiple_of)
        columns = slice(prompt_mask.size(1) - prompt_width, prompt_mask.size(1) + completion_width)
        rows = torch.tensor(indices or [0], device=ids.device)
        for i, chunk in enumerate(run(ids[rows, columns], mask[rows, columns], completion_width)[:2]):
            if chunk is not None:
                whole = found[i]
                if whole is None:
                    whole = found[i] = chunk.new_zeros(len(lengths), num_columns)
                whole[rows[: len(indices)], :completion_width] = chunk[: len(indices)]
    assert found[0] is not None  # there is at least one pass
    return found[0], found[1]

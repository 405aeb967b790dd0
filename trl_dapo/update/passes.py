# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Passes through the model: those whose gradients stay on their rank, and those without gradient."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor

from .rollout_tensors import row_lengths, widths
from .window import MicrobatchPacker


def syncs_each_batch(accelerator: Accelerator) -> bool:
    """Whether gradients are synchronized after every micro-batch."""
    return accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)


def ranks_are_in_step(accelerator: Accelerator, shards_weights: bool) -> bool:
    """Whether ranks wait for one another at every micro-batch, as where they share weights or gradients."""
    is_deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
    zero_stage = accelerator.state.deepspeed_plugin.zero_stage if is_deepspeed else 0
    return shards_weights or zero_stage >= 2 or syncs_each_batch(accelerator)


@contextmanager
def accumulating(
    accelerator: Accelerator, model: torch.nn.Module, defer: Callable[[], AbstractContextManager] | None
) -> Iterator[None]:
    """
    Do what the training loop does around every micro-batch except the last. `defer` is for weights sharded at load.
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
    """Log-probabilities and entropies, `(B, T)`, in passes over rows of like length without padding between them."""
    # `run` takes ids, mask and a number of completion columns, of which it returns both, and a third that is left out.
    prompt_mask, completion_mask = mask[:, :-num_columns], mask[:, -num_columns:]
    lengths = row_lengths(prompt_mask, completion_mask).tolist()
    found: list[Tensor | None] = [None, None]
    for indices in packer.pack_without_gradient(lengths, batch_size):
        # Every rank makes the same number of passes. One token of the first row replaces rows that do not exist.
        prompt_width, completion_width = widths([lengths[row] for row in indices], packer.multiple_of)
        columns = slice(prompt_mask.size(1) - prompt_width, prompt_mask.size(1) + completion_width)
        rows = torch.tensor(indices or [0], device=ids.device)
        for i, chunk in enumerate(run(ids[rows, columns], mask[rows, columns], completion_width)[:2]):
            if chunk is not None:
                whole = found[i]
                if whole is None:
                    whole = found[i] = chunk.new_zeros(len(lengths), num_columns)
                whole[rows[: len(indices)], :completion_width] = chunk[: len(indices)]
    assert found[0] is not None  # there is a pass, if only of one token
    return found[0], found[1]

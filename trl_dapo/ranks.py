# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Collective operations of the processes: share a result, raise an error everywhere, exchange rows."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor


def rank_and_world_size() -> tuple[int, int]:
    """Return the rank of this process and the number of processes."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def local_slice(num_rows: int, rank: int, world_size: int) -> slice:
    """Return the part of `num_rows` rows that a process holds. The parts are equal and in the order of the ranks."""
    per_rank, rest = divmod(num_rows, world_size)
    if rest:
        raise ValueError(
            f"{num_rows} rows cannot be split into equal parts for {world_size} processes. Use a multiple of "
            f"{world_size}."
        )
    return slice(rank * per_rank, (rank + 1) * per_rank)


def wait_for_everyone() -> None:
    """Return once every process has called this."""
    PartialState().wait_for_everyone()


def on_main_process(function: Callable, *args: Any, failed: str = "On the main process") -> Any:
    """
    Call a function on the main process, and return its result on every process. If it fails, raise on every process.
    Collective.
    """
    outcome, error = None, None
    if PartialState().is_main_process:
        try:
            outcome = function(*args)
        except Exception as exc:
            error = exc
    outcome, problem = broadcast_object_list([outcome, describe_error(error)])
    if problem is not None:
        raise error or RuntimeError(f"{failed}: {problem}")
    return outcome


def raise_on_every_rank(error: Exception | None, failed: str) -> None:
    """Raise on every process if any process has an error. Return if none has. Collective."""
    for rank, problem in enumerate(gather_object([describe_error(error)])):
        if problem is not None:
            raise error or RuntimeError(f"{failed} on process {rank}: {problem}")


def describe_error(error: Exception | None) -> str | None:
    """Return an error's type and message, and the notes that were added to it."""
    if error is None:
        return None
    notes = " ".join(getattr(error, "__notes__", []))
    return f"{type(error).__name__}: {error}" + (f" ({notes})" if notes else "")


def exchange(sent: Tensor, to_ranks: Sequence[int], from_ranks: Sequence[int]) -> Tensor:
    """
    Send the first `to_ranks[0]` lines of a tensor to rank 0, the next `to_ranks[1]` to rank 1, and so on. Return the
    lines received from each rank, of which there are `from_ranks`, in the order of the ranks. Collective.
    """
    received = sent.new_empty(sum(from_ranks), *sent.shape[1:])
    dist.all_to_all_single(received, sent, list(from_ranks), list(to_ranks))
    return received


def exchange_bytes(payloads: Sequence[bytes], device: torch.device) -> list[bytes]:
    """Send `payloads[r]` to rank `r`. Return what each rank sent to this process. Collective."""
    sizes = torch.tensor([len(payload) for payload in payloads], dtype=torch.int64, device=device)
    incoming = exchange(sizes, [1] * len(payloads), [1] * len(payloads)).tolist()
    lines = torch.frombuffer(bytearray(b"".join(payloads)) or bytearray(1), dtype=torch.uint8)[: int(sizes.sum())]
    received = exchange(lines.to(device), sizes.tolist(), incoming).cpu()
    return [part.numpy().tobytes() for part in received.split(incoming)]

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Rows of a rollout, on their way from the rank that sampled them to the rank that trains on them.

A row is one completion with everything that belongs to it. Rows are kept as columns, `{name: list}`, with token ids
and log-probabilities as arrays: a rollout of 8,192 rows x 10k tokens is 0.3 GB of int32, but gigabytes of Python
integers.
"""

import pickle
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist


def as_ids(ids: Sequence[int]) -> np.ndarray:
    """Token ids as an int32 array."""
    return np.asarray(ids, dtype=np.int32)


def as_logprobs(logprobs: Sequence[float | None]) -> np.ndarray:
    """Log-probabilities as a float32 array; `None`, vLLM's word for a token it could not score, as NaN."""
    return np.asarray([np.nan if logprob is None else logprob for logprob in logprobs], dtype=np.float32)


def take_rows(rows: dict[str, list], indices: Sequence[int]) -> dict[str, list]:
    """The rows at `indices`, in that order."""
    return {name: [column[i] for i in indices] for name, column in rows.items()}


def local_slice(num_rows: int, rank: int, world_size: int) -> slice:
    """The part of `num_rows` global rows that a rank holds: the ranks' parts are equal and follow each other.

    Raises:
        ValueError: If the rows cannot be split into equal parts.
    """
    per_rank, rest = divmod(num_rows, world_size)
    if rest:
        raise ValueError(f"{num_rows} rows cannot be split into equal parts for {world_size} processes.")
    return slice(rank * per_rank, (rank + 1) * per_rank)


def deal_rows(rows: dict[str, list], positions: Sequence[int], total: int, device: torch.device) -> dict[str, list]:
    """
    Hands every row to the rank that trains on it.

    Each rank sends only what another rank needs and keeps the rest, so no rank ever holds more than its own rows and
    its own share. Collective: every rank must call it.

    Args:
        rows (`dict[str, list]`):
            The rows this rank holds and the batch needs.
        positions (`Sequence[int]`):
            For each of them, its place in the global batch. Rank `r` trains on the `r`-th equal part of the places.
        total (`int`):
            Number of rows of the global batch, a multiple of the number of ranks.
        device (`torch.device`):
            Where the process group's backend moves data: the rank's GPU for NCCL, the CPU for gloo.

    Returns:
        `dict[str, list]`: This rank's `total / world_size` rows, in the order of their places.
    """
    distributed = dist.is_available() and dist.is_initialized()
    world_size, rank = (dist.get_world_size(), dist.get_rank()) if distributed else (1, 0)
    per_rank = total // world_size
    outgoing = [[] for _ in range(world_size)]
    for i, position in enumerate(positions):
        outgoing[position // per_rank].append(i)
    if world_size == 1:
        return take_rows(rows, sorted(range(total), key=positions.__getitem__))

    shares = [([positions[i] for i in indices], take_rows(rows, indices)) for indices in outgoing]
    payloads = [
        pickle.dumps(share, protocol=5) if share[0] and destination != rank else b""
        for destination, share in enumerate(shares)
    ]
    parts = [shares[rank], *(pickle.loads(payload) for payload in _all_to_all(payloads, device) if payload)]
    places = [place for part_places, _ in parts for place in part_places]
    order = sorted(range(len(places)), key=places.__getitem__)
    return take_rows({name: [value for _, part in parts for value in part[name]] for name in rows}, order)


def _all_to_all(payloads: list[bytes], device: torch.device) -> list[bytes]:
    """Sends `payloads[r]` to rank `r`; returns what each rank sent here."""
    sizes = torch.tensor([len(payload) for payload in payloads], dtype=torch.int64, device=device)
    incoming = torch.empty_like(sizes)
    dist.all_to_all_single(incoming, sizes)
    send = torch.frombuffer(bytearray(b"".join(payloads)) or bytearray(1), dtype=torch.uint8)[: int(sizes.sum())]
    received = torch.empty(int(incoming.sum()), dtype=torch.uint8, device=device)
    dist.all_to_all_single(received, send.to(device), incoming.tolist(), sizes.tolist())
    buffer, parts = received.cpu().numpy().tobytes(), []
    start = 0
    for size in incoming.tolist():
        parts.append(buffer[start : start + size])
        start += size
    return parts

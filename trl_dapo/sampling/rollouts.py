# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Rows of a rollout, on their way from the rank that sampled them to the rank that trains on them.

A row is one completion with everything that belongs to it. Rows are kept as columns, `{name: list}`, with token ids
and log-probabilities as arrays: a rollout of 8,192 rows x 10k tokens is 0.3 GB of int32, but gigabytes of Python
integers.
"""

import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist


@dataclass
class Round:
    """
    One round: its prompts in order, this rank's rows, and what is known of all ranks' rows.

    Args:
        prompts (`list[tuple[str, dict]]`):
            Id and example of each prompt.
        rows (`dict[str, list]`):
            This rank's equal share of the round's rows, in order.
        rewards_BF (`torch.Tensor` of shape `(num_rows, num_reward_functions)`):
            Rewards of all ranks' rows; the completions of a prompt follow each other.
        lengths_B (`torch.Tensor` of shape `(num_rows,)`):
            Completion tokens of all ranks' rows that the model made.
        truncated_B (`torch.Tensor` of shape `(num_rows,)`):
            Whether a completion was cut off by the length limit.
        extra_logs (`dict[str, list]`):
            What reward functions logged of all ranks' rows.
        metrics (`dict[str, list[float]]`):
            What TRL measured of the round.
    """

    prompts: list[tuple[str, dict]]
    rows: dict[str, list]
    rewards_BF: torch.Tensor
    lengths_B: torch.Tensor
    truncated_B: torch.Tensor
    extra_logs: dict[str, list]
    metrics: dict[str, list[float]]

    @classmethod
    def carried(cls, rows: dict[str, list], rewards_BF: torch.Tensor, num_prompts: int) -> "Round":
        """Groups of an earlier rollout: sampled, scored and accepted, so only their rows and rewards still matter."""
        blank_B = torch.zeros(len(rewards_BF))
        return cls([("", {})] * num_prompts, rows, rewards_BF, blank_B, blank_B.bool(), extra_logs={}, metrics={})

    def state_dict(self) -> dict:
        """What a checkpoint keeps of a carried round: tensors for arrays, so that `weights_only=True` loads it."""
        rows = {
            name: [torch.from_numpy(value) if isinstance(value, np.ndarray) else value for value in column]
            for name, column in self.rows.items()
        }
        return {"rows": rows, "rewards": self.rewards_BF, "num_prompts": len(self.prompts)}

    @classmethod
    def from_state_dict(cls, state: dict) -> "Round":
        """The carried round that [`Round.state_dict`] described."""
        rows = {
            name: [value.numpy() if torch.is_tensor(value) else value for value in column]
            for name, column in state["rows"].items()
        }
        return cls.carried(rows, state["rewards"], state["num_prompts"])


def record_rows(generated: tuple, prompts: list, environments: list[str] | None) -> dict[str, list]:
    """
    The rows of what TRL's `_generate` returned.

    Args:
        generated (`tuple`):
            Prompt ids, completion ids, tool masks, completions, log-probabilities, extra fields, images and images
            returned by tools: one entry a row each, or `None`, or empty.
        prompts (`list`):
            The prompts it was given, as text or messages.
        environments (`list[str]`, *optional*):
            Name of each row's environment.

    Returns:
        `dict[str, list]`: One column an item, `None` where a row has none. Ids and log-probabilities are TRL's own
        lists until [`pack_rows`] has made arrays of those that are kept.
    """
    prompt_ids, completion_ids, tool_mask, completions, logprobs, _, images, tool_images = generated
    blank = [None] * len(prompts)
    return {
        "prompt": list(prompts),
        "environment": list(environments or blank),
        "prompt_ids": list(prompt_ids),
        "completion_ids": list(completion_ids),
        "tool_mask": list(tool_mask or blank),
        "completion": list(completions),
        "logprobs": list(logprobs or blank),
        "images": images or _images_in(prompts),
        "tool_images": tool_images or blank,
        "old_logps": blank,
    }


def pack_rows(rows: dict[str, list], accepted: Sequence[bool]):
    """
    Makes arrays of the accepted rows, in place, and cuts the others, which can only fill a batch, to one token.

    Args:
        rows (`dict[str, list]`):
            What [`record_rows`] returned.
        accepted (`Sequence[bool]`):
            Whether each row's group was accepted.
    """
    _cut_to_one_token(rows, [i for i, kept in enumerate(accepted) if not kept])
    for name in ("prompt_ids", "completion_ids", "tool_mask"):
        rows[name] = [ids if ids is None else np.fromiter(ids, np.int32, len(ids)) for ids in rows[name]]
    # vLLM's client says None for a token it could not score; here it becomes NaN.
    rows["logprobs"] = [row if row is None else np.asarray(row, dtype=np.float32) for row in rows["logprobs"]]


def replay_rows(rows: dict[str, list]) -> tuple:
    """What TRL's `_generate` would return if it had just made these rows."""
    images, tool_images = (rows[name] if any(rows[name]) else None for name in ("images", "tool_images"))
    tool_mask, logprobs = (None if rows[name][0] is None else rows[name] for name in ("tool_mask", "logprobs"))
    return (
        _Converted(rows["prompt_ids"], _as_long),
        _Converted(rows["completion_ids"], _as_long),
        tool_mask and _Converted(tool_mask, _as_long),
        rows["completion"],
        logprobs and _Converted(logprobs, np.ndarray.tolist),
        {},
        images,
        tool_images or [],
    )


class _Converted(Sequence):
    """Rows converted as they are read, one at a time: no second copy of all of them is ever held."""

    def __init__(self, rows: list[np.ndarray], convert: Callable):
        self._rows, self._convert = rows, convert

    def __len__(self):
        return len(self._rows)

    def __getitem__(self, i):
        return self._convert(self._rows[i])


def _as_long(ids: np.ndarray) -> np.ndarray:
    return ids.astype(np.int64)


def _images_in(prompts: list) -> list[list | None]:
    """The images of each prompt, which TRL has moved into the messages."""
    return [
        [part["image"] for message in prompt for part in message["content"] if part["type"] == "image"] or None
        if isinstance(prompt, list) and any(isinstance(message["content"], list) for message in prompt)
        else None
        for prompt in prompts
    ]


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


def select_groups(values: Sequence[torch.Tensor], groups: Sequence[int], num_generations: int) -> torch.Tensor:
    """The entries of `groups`, in that order, of values given round by round, one entry a row."""
    rows = torch.tensor([row for i in groups for row in range(i * num_generations, (i + 1) * num_generations)])
    return torch.cat(list(values))[rows]


def deal_groups(
    rounds: Sequence[Round], live: Sequence[int], filler: Sequence[int], num_generations: int, device: torch.device
) -> dict[str, list]:
    """
    Hands every rank its equal share of a batch of groups. Collective: every rank must call it.

    Args:
        rounds (`Sequence[Round]`):
            Where the groups are; they are numbered through all rounds.
        live (`Sequence[int]`):
            Groups that train, in the order of the batch.
        filler (`Sequence[int]`):
            Groups behind them that only fill the batch. Their completions are cut to one token.
        num_generations (`int`):
            Completions a group.
        device (`torch.device`):
            Where the process group's backend moves data: the rank's GPU for NCCL, the CPU for gloo.

    Returns:
        `dict[str, list]`: This rank's rows.
    """
    rank, world_size = _rank_and_world_size()
    homes = [(round_, start) for round_ in rounds for start in range(0, len(round_.rewards_BF), num_generations)]
    rows, places = {name: [] for name in rounds[0].rows}, []
    for place, index in enumerate([*live, *filler]):
        round_, start = homes[index]
        mine = local_slice(len(round_.rewards_BF), rank, world_size)
        here = [row for row in range(start, start + num_generations) if mine.start <= row < mine.stop]
        part = take_rows(round_.rows, [row - mine.start for row in here])
        if place >= len(live):
            _cut_to_one_token(part, range(len(here)))
        for name, column in part.items():
            rows[name].extend(column)
        places.extend(place * num_generations + row - start for row in here)
    return deal_rows(rows, places, (len(live) + len(filler)) * num_generations, device)


def _cut_to_one_token(rows: dict[str, list], indices: Iterable[int]):
    """Shortens rows that only fill the batch, so that they cost next to nothing."""
    for i in indices:
        if rows["tool_images"][i]:  # the images' placeholder tokens lie in the completion
            continue
        for name in ("completion_ids", "tool_mask", "logprobs", "old_logps"):
            if rows[name][i] is not None:
                rows[name][i] = rows[name][i][:1]


def _rank_and_world_size() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


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
    rank, world_size = _rank_and_world_size()
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

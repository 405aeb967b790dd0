# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Rows: one completion each, with everything that is needed to score it and to train on it.

Token ids and log-probabilities are stored as arrays. A rollout of 8,192 rows of 10k tokens takes 0.3 GB as int32, and
several GB as Python integers.
"""

import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..ranks import exchange_bytes, rank_and_world_size


@dataclass
class Row:
    """One completion of a prompt. A field is `None` if the completion does not have it."""

    prompt: Any  # text or messages
    environment: str | None
    prompt_ids: np.ndarray
    completion_ids: np.ndarray
    tool_mask: np.ndarray | None  # 1 for tokens that the model generated, 0 for those of tools and environments
    completion: Any  # text or messages
    logprobs: np.ndarray | None  # of the completion's tokens, from the engine
    images: list | None  # of the prompt and of tools
    tool_images: list | None  # the part of `images` that tools returned
    old_logps: np.ndarray | None = None  # of the completion's tokens, under the earlier weights that sampled them
    extra_columns: dict[str, Any] | None = None  # columns for reward functions in addition to those of the example

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the completion that the model generated."""
        return len(self.completion_ids) if self.tool_mask is None else int(self.tool_mask.sum())

    def shortened(self) -> "Row":
        """Return the row with only one token of its completion, so that filling a batch with it costs little."""
        if self.tool_images:  # their placeholder tokens are in the completion
            return self
        names = ("completion_ids", "tool_mask", "logprobs", "old_logps")
        values = {name: getattr(self, name) for name in names}
        return replace(self, **{name: value[:1] for name, value in values.items() if value is not None})

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps. Arrays become tensors, so that it can be loaded with `weights_only=True`."""
        return {
            field.name: _converted(getattr(self, field.name), np.ndarray, torch.from_numpy) for field in fields(self)
        }

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> "Row":
        """Return the row saved by [`Row.state_dict`]."""
        return cls(**{name: _converted(value, Tensor, Tensor.numpy) for name, value in state.items()})


def rows_from_generated(generated: tuple, prompts: list, environments: list | None = None) -> list[Row]:
    """Return the rows for the output of TRL's `_generate`, in which a column may also be `None` or empty."""
    prompt_ids, completion_ids, tool_masks, completions, logprobs, _, images, tool_images = generated
    blank = [None] * len(prompts)
    columns = (
        prompts,
        environments or blank,
        prompt_ids,
        completion_ids,
        tool_masks or blank,
        completions,
        logprobs or blank,
        images or _images_in(prompts),
        tool_images or blank,
    )
    return [
        Row(
            prompt=copied(prompt),  # TRL passes its own lists to reward functions, which may modify them
            environment=environment,
            prompt_ids=np.array(ids, np.int32),
            completion_ids=np.array(own_ids, np.int32),
            tool_mask=None if mask is None else np.array(mask, np.int32),
            completion=copied(completion),
            # vLLM's client returns `None` for a token without a log-probability. Here it becomes NaN.
            logprobs=None if logps is None else np.array(logps, np.float32),
            images=own_images,
            tool_images=own_tool_images,
        )
        for prompt, environment, ids, own_ids, mask, completion, logps, own_images, own_tool_images in zip(
            *columns, strict=True
        )
    ]


def as_generated(rows: Sequence[Row]) -> tuple:
    """Return what TRL's `_generate` would return for these rows."""
    has_images, has_tool_images = any(row.images for row in rows), any(row.tool_images for row in rows)
    has_tools, has_logprobs = rows[0].tool_mask is not None, rows[0].logprobs is not None
    return (
        _LazilyConverted([row.prompt_ids for row in rows], _as_long),
        _LazilyConverted([row.completion_ids for row in rows], _as_long),
        _LazilyConverted([row.tool_mask for row in rows], _as_long) if has_tools else None,
        [row.completion for row in rows],
        _LazilyConverted([row.logprobs for row in rows], np.ndarray.tolist) if has_logprobs else None,
        {},
        [row.images for row in rows] if has_images else None,
        [row.tool_images for row in rows] if has_tool_images else [],
    )


def dummy_row(token: int) -> Row:
    """Return a row of one token, for a process without rows if all processes must have equally many."""
    ids = np.array([token], np.int32)
    return Row("", None, ids, ids, None, "", None, None, None)


def exchange_rows(outgoing: Sequence[Sequence[tuple[Any, Row]]], device: torch.device) -> list[tuple[Any, Row]]:
    """
    Send keys and rows to the other processes, `outgoing[r]` to rank `r`. Return the received ones in the order of the
    ranks that sent them, after those of this process. Collective.
    """
    rank, world_size = rank_and_world_size()
    if world_size == 1:
        return list(outgoing[0])
    payloads = [
        pickle.dumps(list(part), protocol=5) if part and destination != rank else b""
        for destination, part in enumerate(outgoing)
    ]
    arrived = list(outgoing[rank])
    for payload in exchange_bytes(payloads, device):
        if payload:
            arrived += pickle.loads(payload)
    return arrived


class _LazilyConverted(Sequence):
    """Arrays that are converted one at a time when they are read, so that there is never a second copy of all."""

    def __init__(self, arrays: list, convert: Callable) -> None:
        self._arrays, self._convert = arrays, convert

    def __len__(self) -> int:
        return len(self._arrays)

    def __getitem__(self, i: Any) -> Any:
        return self._convert(self._arrays[i])


def copied(value: Any) -> Any:
    """Return a deep copy of nested lists and dicts, which shares everything else, such as images."""
    if isinstance(value, list):
        return [copied(x) for x in value]
    if isinstance(value, str):
        return str(value)  # numpy's subclass of `str` could not be loaded with `weights_only=True`
    if isinstance(value, dict):
        return {key: copied(x) for key, x in value.items()}
    return value


def _as_long(ids: np.ndarray) -> np.ndarray:
    return ids.astype(np.int64)


def _converted(value: Any, kind: type, convert: Callable) -> Any:
    return convert(value) if isinstance(value, kind) else value


def _images_in(prompts: Iterable) -> list[list | None]:
    """Return the images of each prompt. TRL has put these into the messages."""
    found: list[list | None] = []
    for prompt in prompts:
        images = []
        messages = prompt if isinstance(prompt, list) else []
        for message in messages:
            if isinstance(message["content"], list):
                images += [part["image"] for part in message["content"] if part["type"] == "image"]
        found.append(images or None)
    return found

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The resumable prompt stream: one shuffled pass after another over the dataset."""

import hashlib
import itertools
import json
from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset, IterableDataset


class PromptStream:
    """
    One endless stream of prompts. First rounds and refills draw from it alike, so that no prompt comes twice within a
    pass and none is lost. Nothing in it depends on the rank: every process that builds it draws the same prompts.

    Args:
        dataset (`datasets.Dataset` or `datasets.IterableDataset`):
            Prompts. A map-style dataset is permuted anew in every pass; an iterable one goes through its own shuffle
            buffer, re-seeded in every pass.
        seed (`int`):
            Seed of the order.
        shuffle (`bool`, *optional*, defaults to `True`):
            Whether to shuffle. `False` keeps the order of the dataset in every pass.
        buffer_size (`int`, *optional*, defaults to `1000`):
            Examples in the shuffle buffer of an iterable dataset.

    Example:

    ```python
    >>> stream = PromptStream(Dataset.from_dict({"prompt": ["a", "b"]}), seed=0, shuffle=False)
    >>> stream.take(3)
    [('0', {'prompt': 'a'}), ('1', {'prompt': 'b'}), ('0', {'prompt': 'a'})]
    ```
    """

    def __init__(
        self, dataset: Dataset | IterableDataset, *, seed: int, shuffle: bool = True, buffer_size: int = 1000
    ):
        self.seed = seed
        self.shuffle = shuffle
        self.num_skipped = 0
        if isinstance(dataset, IterableDataset):
            self._source = _IterableSource(dataset, seed, shuffle, buffer_size)
        else:
            self._source = _MapStyleSource(dataset, seed, shuffle)
        if self._source.length == 0:
            raise ValueError("The training dataset holds no prompt.")
        self._num_passes = 0
        self._position = 0
        self._rows = None

    @property
    def passes(self) -> float:
        """
        Passes made over the dataset (`float`), with the share of the present one. Until the first pass over an
        iterable dataset has ended its length is unknown, and that share is left out.
        """
        share = self._position / self._source.length if self._source.length else 0.0
        return self._num_passes + share

    def take(self, n: int, skip: Callable[[str], bool] | None = None) -> list[tuple[str, dict[str, Any]]]:
        """
        The next `n` prompts, going on into the next pass where one ends.

        Args:
            n (`int`):
                Number of prompts.
            skip (`Callable[[str], bool]`, *optional*):
                Called with each prompt's id; where it returns `True` the prompt is passed over until the next pass and
                counted in `num_skipped`. Once it has refused every prompt of a pass it is not asked again in this
                call.

        Returns:
            `list[tuple[str, dict]]`: each prompt's id and example.
        """
        taken = []
        num_refused = 0
        while len(taken) < n:
            prompt_id, row = self._next_row()
            if skip is not None and not self._has_whole_pass(num_refused):
                if skip(prompt_id):
                    self.num_skipped += 1
                    num_refused += 1
                    continue
                num_refused = 0
            taken.append((prompt_id, row))
        examples = self._source.load([row for _, row in taken])
        return [(prompt_id, example) for (prompt_id, _), example in zip(taken, examples, strict=True)]

    def _has_whole_pass(self, num_rows):
        """Whether so many rows in a row must hold a pass from its start to its end."""
        return self._source.length is not None and num_rows >= 2 * self._source.length - 1

    def _next_row(self):
        """The id of the next prompt, and what its source loads it by."""
        if self._rows is None:
            self._rows = self._source.rows(self._num_passes, self._position)
        row = next(self._rows, None)
        if row is None:
            if self._position == 0:
                raise ValueError("The training dataset holds no prompt.")
            self._source.length = self._position
            self._num_passes, self._position, self._rows = self._num_passes + 1, 0, None
            return self._next_row()
        self._position += 1
        return row

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on with the very next prompt, JSON-able (`dict`)."""
        return {
            "seed": self.seed,
            "num_passes": self._num_passes,
            "position": self._position,
            "length": self._source.length,
            "num_skipped": self.num_skipped,
        }

    def load_state_dict(self, state: dict[str, Any]):
        """
        Continues from what [`~PromptStream.state_dict`] returned. An iterable dataset is read anew up to its position
        in the present pass: its own state does not hold the shuffle buffer.
        """
        if state["seed"] != self.seed:
            raise ValueError(f"The checkpoint's prompt order has seed {state['seed']}, this run has {self.seed}.")
        if self._source.length is not None and state["length"] != self._source.length:
            raise ValueError(
                f"The checkpoint was written with {state['length']} prompts, this dataset has {self._source.length}: "
                "resume with the same training dataset."
            )
        self._source.length = state["length"]
        self._num_passes = state["num_passes"]
        self._position = state["position"]
        self.num_skipped = state["num_skipped"]
        self._rows = None


class _MapStyleSource:
    """The passes over a dataset with random access."""

    def __init__(self, dataset, seed, shuffle):
        self.length = len(dataset)
        self._dataset = dataset
        # Ids are read without decoding the other columns: a prompt may be skipped, and images are slow to open.
        self._ids = dataset.with_format(None).select_columns("id") if "id" in dataset.column_names else None
        self._seed = seed
        self._shuffle = shuffle

    def rows(self, num_passes, start):
        """The rows of one pass from position `start` on: id and what `load` needs."""
        order = range(self.length)
        if self._shuffle:
            generator = torch.Generator().manual_seed(_digest(f"{self._seed}/{num_passes}"))
            order = torch.randperm(self.length, generator=generator).tolist()
        for index in itertools.islice(order, start, None):
            prompt_id = index if self._ids is None else self._ids[index]["id"]
            yield str(prompt_id), index

    def load(self, indices):
        """The examples at these indices."""
        return self._dataset.__getitems__(indices) if indices else []


class _IterableSource:
    """The passes over a dataset that can only be read from its start."""

    def __init__(self, dataset, seed, shuffle, buffer_size):
        self.length = None
        self._shuffle = shuffle
        self._dataset = dataset.shuffle(seed=seed, buffer_size=buffer_size) if shuffle else dataset

    def rows(self, num_passes, start):
        """The rows of one pass from position `start` on: id and what `load` needs."""
        if self._shuffle:
            self._dataset.set_epoch(num_passes)
        for example in itertools.islice(self._dataset, start, None):
            prompt_id = example["id"] if "id" in example else f"{_digest(_as_text(example)):016x}"
            yield str(prompt_id), example

    def load(self, examples):
        """The examples, which were read with their ids."""
        return examples


def _as_text(example):
    """The prompt of an example as one string, the same in every process."""
    prompt = example.get("prompt", example)
    return prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True, default=str)


def _digest(text):
    """A 64-bit hash of a string that does not change between processes."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")

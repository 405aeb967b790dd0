# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The prompt stream: a resumable sequence of shuffled passes over the dataset."""

import itertools
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from datasets import Audio, Dataset, Image, IterableDataset, Video

from .example_names import digest, has_id, prompt_name


# Names of prompts are computed in blocks, because reading a dataset row by row is slow.
BLOCK = 256
FINGERPRINT_ROWS, FIRST_ROWS = 1000, 16


class PromptStream:
    """
    An endless stream of prompts, the same on every process. Within a pass, each row of the dataset comes once.

    Args:
        dataset (`Dataset` or `IterableDataset`):
            Dataset that the stream passes over.
        seed (`int`):
            Seed of the order of the prompts.
        shuffle (`bool`, *optional*, defaults to `True`):
            Whether each pass is shuffled.
        columns (`Collection[str]`, *optional*):
            Columns that the examples keep. By default they keep all.
    """

    def __init__(
        self,
        dataset: Dataset | IterableDataset,
        *,
        seed: int,
        shuffle: bool = True,
        columns: Collection[str] | None = None,
    ) -> None:
        self.seed = seed
        self.shuffle = shuffle
        self.num_skipped = 0
        self.num_passes = 0  # complete passes
        # For each prompt of the latest `take`: the number of passes before its pass, and its position in that pass.
        self.taken_at: list[tuple[int, int]] = []
        source: Any = _IterableSource if isinstance(dataset, IterableDataset) else _MapStyleSource
        self._source: _MapStyleSource | _IterableSource = source(dataset, seed, shuffle, columns)
        self._position = 0
        self._rows: Iterator[tuple[str, Any]] | None = None

    @property
    def num_rows(self) -> int | None:
        """Number of rows of the dataset, or `None` if it is streamed and was not read to its end yet."""
        return self._source.length

    @property
    def passes(self) -> float:
        """Number of passes over the dataset, including the fraction of the present one if its length is known."""
        return self.passes_at(self.num_passes, self._position)

    @property
    def place(self) -> tuple[int, int, int]:
        """Number of complete passes, position in the present pass, and number of prompts skipped so far."""
        return self.num_passes, self._position, self.num_skipped

    def passes_since(self, place: tuple[int, int, int]) -> float:
        """
        Return the number of passes since a place, not counting skipped prompts. It is 0 until the length of the
        dataset is known.
        """
        if not self._source.length:
            return 0.0
        num_passes, position, num_skipped = place
        num_rows = self._position - position - (self.num_skipped - num_skipped)
        return self.num_passes - num_passes + num_rows / self._source.length

    def passes_at(self, num_passes: int, position: int) -> float:
        """Return the number of passes up to a position of the stream."""
        return num_passes + (position / self._source.length if self._source.length else 0.0)

    def take(
        self,
        n: int,
        skip: Callable[[str, bool], bool] | None = None,
        is_enough: Callable[[str], bool] = lambda name: False,
    ) -> list[tuple[str, dict[str, Any]]]:
        """
        Return the names and examples of the next prompts.

        Args:
            n (`int`):
                Maximum number of prompts.
            skip (`Callable`, *optional*):
                Called with each prompt's name, and with whether it may be skipped. Returns whether it is skipped in
                this pass, and must return `False` if it may not be.
            is_enough (`Callable`, *optional*):
                Called with the name of each prompt that is taken. No further prompt is taken once it returns `True`.
        """
        taken: list[tuple[str, Any]] = []
        self.taken_at = []
        num_skipped_in_a_row = 0
        may_skip = True
        while len(taken) < n:
            name, row = self._next_row()
            if self._source.length is not None and num_skipped_in_a_row >= 2 * self._source.length - 1:
                # This many rows include a full pass, and all were skipped. No more are skipped in this call.
                may_skip = False
            if skip is not None and skip(name, may_skip):
                self.num_skipped += 1
                num_skipped_in_a_row += 1
                continue
            if may_skip:
                num_skipped_in_a_row = 0
            taken.append((name, row))
            self.taken_at.append((self.num_passes, self._position - 1))
            if is_enough(name):
                break
        examples = self._source.load([row for _, row in taken])
        return [(name, example) for (name, _), example in zip(taken, examples, strict=True)]

    def reread_examples(self, stream_positions: Iterable[tuple[int, int]]) -> dict[tuple[int, int], dict[str, Any]]:
        """Return the examples that were taken at these positions of the stream, as far as they can be read again."""
        rows: dict[tuple[int, int], Any] = {}
        for num_passes, of_pass in itertools.groupby(sorted({*stream_positions}), key=lambda entry: entry[0]):
            positions = [position for _, position in of_pass]
            is_present = num_passes == self.num_passes
            end = self._position if is_present else positions[-1] + 1
            read = self._source.rows(num_passes, positions[0])
            past = enumerate(itertools.islice(read, end - positions[0]), positions[0])
            rows |= {(num_passes, i): row for i, (_, row) in past if i in positions}
            if is_present:
                self._rows = read  # continue from here, since a streamed dataset may not allow a second reading
        return dict(zip(rows, self._source.load(list(rows.values())), strict=True))

    def _next_row(self) -> tuple[str, Any]:
        """Return the name of the next prompt, and the value by which its source loads the example."""
        if self._rows is None:
            self._rows = self._source.rows(self.num_passes, self._position)
        row = next(self._rows, None)
        if row is None:
            if self._position == 0:
                raise ValueError(
                    "The training dataset is empty, so there are no prompts to sample from. Pass a `train_dataset` "
                    "with at least one row."
                )
            self._source.length = self._position
            self.num_passes, self._position, self._rows = self.num_passes + 1, 0, None
            return self._next_row()
        self._position += 1
        return row

    def rows_by_name(self, columns: Collection[str]) -> dict[str, dict[str, Any]]:
        """Return these columns of all prompts, by name. Nothing if the dataset can only be read from its start."""
        return self._source.rows_by_name(columns) if isinstance(self._source, _MapStyleSource) else {}

    def order(self) -> dict[str, Any]:
        """Return what determines the order of the prompts, as values that JSON can hold."""
        return {"seed": self.seed, "shuffle_dataset": self.shuffle, **self._source.fingerprint()}

    def begin(self) -> None:
        """Make sure that `order` identifies the dataset even before the first prompt is taken."""
        if isinstance(self._source, _IterableSource):
            self._source.begin()

    def start_over(self) -> None:
        """Begin the first pass again."""
        self.num_passes, self._position, self._rows, self.num_skipped = 0, 0, None, 0

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to continue with the next prompt, as values that JSON can hold."""
        return {
            "num_passes": self.num_passes,
            "position": self._position,
            "length": self._source.length,
            "num_skipped": self.num_skipped,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # An iterable dataset is read again up to this position, because its own state does not include the shuffle
        # buffer.
        self._source.length = state["length"]
        self.num_passes = state["num_passes"]
        self._position = state["position"]
        self.num_skipped = state["num_skipped"]
        self._rows = None

    def begin_after(self, state: dict[str, Any]) -> None:
        """
        Start a new pass after the pass in a state from [`~PromptStream.state_dict`]. The position in that pass is not
        used: the dataset or its order is another one, or `ignore_data_skip` is set.
        """
        self.num_passes, self._position, self._rows = state["num_passes"] + 1, 0, None
        self.num_skipped = 0  # prompts that were skipped before do not count


class _MapStyleSource:
    """Passes over a dataset with random access."""

    def __init__(self, dataset: Dataset, seed: int, shuffle: bool, columns: Collection[str] | None) -> None:
        self.length = len(dataset)
        # Names are computed without decoding images, which is slow and would be wasted on skipped prompts.
        plain = [name for name, feature in dataset.features.items() if not _holds_media(feature)]
        self._named_by = dataset.with_format(None).select_columns(plain)
        self._has_media = len(plain) < len(dataset.column_names)
        self._dataset = dataset
        if columns is not None:
            self._dataset = dataset.select_columns([name for name in dataset.column_names if name in columns])
        self._names = [""] * self.length  # filled when they are first needed
        self._seed = seed
        self._shuffle = shuffle

    def rows(self, num_passes: int, start: int) -> Iterator[tuple[str, int]]:
        """Yield the rows of one pass from position `start` on: the name, and what `load` needs."""
        order: Sequence[int] = range(self.length)
        if self._shuffle:
            generator = torch.Generator().manual_seed(int(digest(f"{self._seed}/{num_passes}"), 16))
            order = torch.randperm(self.length, generator=generator).tolist()
        for begin in range(start, self.length, BLOCK):
            block = order[begin : begin + BLOCK]
            yield from zip(self.names(block), block, strict=True)

    def names(self, indices: Sequence[int]) -> list[str]:
        """Return the names of the rows with these indices."""
        new = [i for i in indices if not self._names[i]]
        for i, example in zip(new, self._named_by.__getitems__(new) if new else (), strict=True):
            # Media are not part of the hash, so rows that differ only in these would have the same name.
            needs_row = self._has_media and self._id_of(example) not in self._unique_ids
            self._names[i] = prompt_name(example | {"row": i} if needs_row else example)
        return [self._names[i] for i in indices]

    @cached_property
    def _unique_ids(self) -> set[tuple[str, str]]:
        """The pairs of source and id that occur in only one row."""
        columns = [name for name in ("id", "source") if name in self._named_by.column_names]
        if "id" not in columns:
            return set()
        num_rows = Counter(self._id_of(row) for row in self._named_by.select_columns(columns) if has_id(row))
        return {id_ for id_, num in num_rows.items() if num == 1}

    @staticmethod
    def _id_of(example: dict[str, Any]) -> tuple[str, str]:
        return str(example.get("source")), str(example.get("id"))

    def rows_by_name(self, columns: Collection[str]) -> dict[str, dict[str, Any]]:
        rows = self._named_by.select_columns([name for name in columns if name in self._named_by.column_names])
        # Not strict, because `rows` is empty if none of the columns exists.
        return dict(zip(self.names(range(self.length)), rows, strict=False))

    def fingerprint(self) -> dict[str, str]:
        """Return, as `dataset`, a hash of its length and of the names of prompts spread evenly over it."""
        step = max(self.length // FINGERPRINT_ROWS, 1)
        return {"dataset": digest(json.dumps([self.length, self.names(range(0, self.length, step))]))}

    def load(self, indices: list[int]) -> list[dict[str, Any]]:
        return self._dataset.__getitems__(indices) if indices else []


class _IterableSource:
    """Passes over a dataset that can only be read from its start."""

    def __init__(self, dataset: IterableDataset, seed: int, shuffle: bool, columns: Collection[str] | None) -> None:
        self.length: int | None = None
        self._shuffle = shuffle
        self._dataset = dataset.shuffle(seed=seed) if shuffle else dataset
        self._columns = columns
        self._first_rows_digest: str | None = None
        self._begun: Iterator[dict[str, Any]] | None = None  # the first pass, of which only the first rows were read

    def _read(self, num_passes: int) -> Iterator[dict[str, Any]]:
        if self._shuffle:
            self._dataset.set_epoch(num_passes)
        return iter(self._dataset)

    def begin(self) -> None:
        """Read the first rows of the first pass, unless they are known, and keep them for `rows`."""
        # A streamed dataset may not allow reading them a second time.
        if self._first_rows_digest is None:
            examples = self._read(0)
            first = list(itertools.islice(examples, FIRST_ROWS))
            self._first_rows_digest = digest(json.dumps([prompt_name(example) for example in first]))
            self._begun = itertools.chain(first, examples)

    def rows(self, num_passes: int, start: int) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the rows of one pass from position `start` on: the name, and what `load` needs."""
        if num_passes == 0:
            self.begin()
        examples, self._begun = self._begun, None
        if examples is None or (num_passes and self._shuffle):
            examples = self._read(num_passes)
        for example in itertools.islice(examples, start, None):
            yield prompt_name(example), example

    def fingerprint(self) -> dict[str, str | None]:
        """
        Return a hash of the names of the first rows of the first pass, if these were read. A run that was resumed with
        `ignore_data_skip` has none: it begins with a later pass.
        """
        fingerprint: dict[str, str | None] = {"dataset": None}
        if self._first_rows_digest is not None:
            fingerprint["first_rows"] = self._first_rows_digest
        return fingerprint

    def load(self, examples: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the examples with the columns to keep. They were already read to compute their names."""
        if self._columns is None:
            return examples
        return [{name: x for name, x in example.items() if name in self._columns} for example in examples]


def _holds_media(feature: Any) -> bool:
    """Return whether a column holds images, audio or video, which are decoded when they are read."""
    if isinstance(feature, (Image, Audio, Video)):
        return True
    parts = feature.values() if isinstance(feature, dict) else [getattr(feature, "feature", None)]
    return any(_holds_media(part) for part in parts if part is not None)

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The completions of an evaluation during training, sampled ahead: one call of the engine for many batches."""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, cast

from torch.utils.data import DataLoader


# Of one call. As the lists that engines return, so many tokens take a few GB; so many examples are read ahead.
_MAX_TOKENS, _MAX_ROWS = 2**25, 2**14


class Prefetch:
    """Samples the completions of many evaluation batches in one call and hands each batch its share."""

    # The evaluation loop takes one batch at a time, and each call of an engine wakes it, syncs its weights, and ends
    # when its longest completion does. So the loop's batches are read before the loop does, as many as fit one call.
    # The batches, their order and everything else that is done with them stay the loop's. `generate` returns a tuple
    # of columns; each list in it has one entry a prompt.

    def __init__(self, generate: Callable[[list], tuple]) -> None:
        self._generate = generate
        self._waiting: deque[tuple[list, tuple]] = deque()

    def over(self, dataloader: DataLoader, num_rows: int) -> DataLoader:
        """The loader's batches, `num_rows` of this process sampled ahead whenever nothing is left."""
        self._waiting.clear()
        return cast(DataLoader, _ReadAhead(dataloader, self._fill, num_rows))

    def take(self, prompts: list) -> tuple | None:
        """The next batch's share, what `generate` would return; `None` if these prompts are not the next batch's."""
        if not self._waiting or self._waiting[0][0] != prompts:
            return None
        return self._waiting.popleft()[1]

    def _fill(self, batches: list[list[dict[str, Any]]]) -> None:
        self._waiting.clear()
        prompts = [[example["prompt"] for example in batch] for batch in batches]
        columns = self._generate([prompt for batch in prompts for prompt in batch])
        start = 0
        for batch in prompts:
            rows = slice(start, start + len(batch))
            share = tuple(column[rows] if isinstance(column, list) else column for column in columns)
            self._waiting.append((batch, share))
            start = rows.stop


class _ReadAhead:
    """A loader that hands its batches over after `fill` has seen them, several at a time."""

    def __init__(self, dataloader: Any, fill: Callable[[list], None], num_rows: int) -> None:
        self._dataloader, self._fill, self._num_rows = dataloader, fill, num_rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataloader, name)

    def __len__(self) -> int:
        return len(self._dataloader)

    def __iter__(self) -> Iterator:
        loader, batches, num_rows = self._dataloader, [], 0
        for batch in loader:
            batches.append(batch)
            num_rows += len(batch)
            is_end = loader.end_of_dataloader
            if not is_end and num_rows + len(batch) <= self._num_rows:
                continue
            self._fill(batches)
            for i, ready in enumerate(batches, start=1):
                # Says which batch accelerate's `gather_for_metrics` may cut short: the last, when it is handed over.
                loader.end_of_dataloader = is_end and i == len(batches)
                yield ready
            batches, num_rows = [], 0


def rows_that_fit(max_completion_length: int) -> int:
    """Rows of all processes whose completions fit one call: AIME's 960 rows of 20,480 tokens do."""
    return max(1, min(_MAX_ROWS, _MAX_TOKENS // max_completion_length))

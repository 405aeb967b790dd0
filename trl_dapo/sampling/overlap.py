# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""One call beside the training loop, and what the two spend their time on. Knows nothing of models."""

import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any


class Call:
    """
    One call of a function, in a thread of its own.

    Args:
        function (`Callable`):
            The function. It starts at once.
        **arguments:
            What it is called with.

    Example:

    ```python
    >>> call = Call(sum, iterable=[1, 2])  # doctest: +SKIP
    >>> call.result()
    3
    ```
    """

    def __init__(self, function: Callable, **arguments: Any) -> None:
        self._future: Future = Future()
        self._started = time.perf_counter()
        self._ended = math.nan
        # Not one of an executor's: the interpreter waits for those when it ends, however long they take.
        threading.Thread(target=self._run, args=(function, arguments), name="rollout-ahead", daemon=True).start()

    def _run(self, function: Callable, arguments: dict[str, Any]) -> None:
        try:
            result = function(**arguments)
        except BaseException as error:
            self._ended = time.perf_counter()
            self._future.set_exception(error)
        else:
            self._ended = time.perf_counter()
            self._future.set_result(result)

    def result(self) -> Any:
        """What the function returned, once it has; raises what it raised."""
        return self._future.result()

    def fails(self) -> bool:
        """Waits until the function has ended; whether it raised an error."""
        return self._future.exception() is not None

    def ends_within(self, seconds: float) -> bool:
        """Waits until the function has ended, whatever came of it; whether it did in time."""
        try:
            self._future.exception(seconds)
        except TimeoutError:
            return False
        return True

    @property
    def seconds(self) -> float:
        """How long the function took, once it has ended."""
        return self._ended - self._started


class Stopwatch:
    """
    Where the time of a rollout goes: from the moment the last one was complete to the moment this one is. The first
    lap begins with the first block.

    Example:

    ```python
    >>> watch = Stopwatch()
    >>> with watch.timing("rewards"):
    ...     score()  # doctest: +SKIP
    >>> watch.lap()["rewards"]
    0.25
    ```
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._started: float | None = None
        self._is_timing: str | None = None

    @contextmanager
    def timing(self, name: str) -> Iterator[None]:
        """Adds the time that the block takes to what is called `name`; inside another block that counts already."""
        if self._is_timing is not None:
            yield
            return
        started, self._is_timing = time.perf_counter(), name
        if self._started is None:
            self._started = started
        try:
            yield
        finally:
            self._is_timing = None
            self._seconds[name] += time.perf_counter() - started

    def add(self, name: str, seconds: float) -> None:
        """Adds to what is called `name`."""
        self._seconds[name] += seconds

    def lap(self) -> dict[str, float]:
        """Seconds by name since the last lap, all of them as `total`; begins the next."""
        assert self._started is not None
        now = time.perf_counter()
        seconds = {**self._seconds, "total": now - self._started}
        self._seconds.clear()
        self._started = now
        return seconds

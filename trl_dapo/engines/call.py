# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""A call beside the training loop. Knows nothing of models."""

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class Call:
    """One call of a function, in a thread of its own. It starts at once."""

    def __init__(self, function: Callable) -> None:
        self._future: Future = Future()
        self._started = time.perf_counter()
        self._ended = math.nan
        # Not one of an executor's: the interpreter waits for those when it ends, however long they take.
        threading.Thread(target=self._run, args=(function,), name="vllm-request", daemon=True).start()

    def _run(self, function: Callable) -> None:
        try:
            result = function()
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
    def has_ended(self) -> bool:
        """Whether the function has."""
        return self._future.done()

    @property
    def seconds(self) -> float:
        """How long the function took, once it has ended."""
        return self._ended - self._started

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""A call beside the training loop. Knows nothing of models."""

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial


class Call(Future):
    """One call of a function, in a thread of its own. It starts at once."""

    def __init__(self, function: Callable) -> None:
        super().__init__()
        self._started = time.perf_counter()
        self.seconds = math.nan  # that the function took, once it has ended
        # Not one of an executor's: the interpreter waits for those when it ends, however long they take.
        threading.Thread(target=self._run, args=(function,), name="vllm-request", daemon=True).start()

    def _run(self, function: Callable) -> None:
        try:
            end = partial(self.set_result, function())
        except BaseException as error:
            end = partial(self.set_exception, error)
        self.seconds = time.perf_counter() - self._started
        end()

    def ends_within(self, seconds: float) -> bool:
        """Waits until the function has ended, whatever came of it; whether it did in time."""
        return self in wait([self], seconds).done

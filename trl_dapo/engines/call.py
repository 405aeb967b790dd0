# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Function calls in background threads."""

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


MAX_CALLS = 256  # at the same time, which is more groups than a server samples at once
GRACE, PATIENCE = 5.0, 0.25  # seconds to wait for interrupted calls to end, in total and after each attempt


def call(function: Callable) -> Future:
    """Call a function in a thread of its own, which starts immediately."""
    future: Future = Future()
    # Not a thread of an executor, since the interpreter would wait for it when it exits, however long it takes.
    threading.Thread(target=_complete, args=(future, function), name="vllm-request", daemon=True).start()
    return future


def _complete(future: Future, function: Callable) -> None:
    try:
        outcome = function()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(outcome)


class Calls:
    """Calls in background threads, in the order in which they were added, up to a number of them at the same time."""

    def __init__(self, max_calls: int = MAX_CALLS) -> None:
        self._max_calls, self._lock = max_calls, threading.Lock()
        self._waiting: deque[tuple[Future, Callable]] = deque()
        self._threads: set[threading.Thread] = set()
        # The time during which any call was in progress, up to the moment when the latest busy period began.
        self._seconds, self._since = 0.0, 0.0

    def add(self, function: Callable, then: Callable[[Any], Any]) -> Future:
        """Call a function, and `then` with its result, as soon as a thread is free."""
        future: Future = Future()
        with self._lock:
            self._waiting.append((future, lambda: then(function())))
            if len(self._threads) < self._max_calls:
                self._since = self._since if self._threads else time.perf_counter()
                thread = threading.Thread(target=self._work, name="vllm-request", daemon=True)
                self._threads.add(thread)
                thread.start()
        return future

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._threads.remove(threading.current_thread())
                    self._seconds += 0.0 if self._threads else time.perf_counter() - self._since
                    return
                future, function = self._waiting.popleft()
            future.set_running_or_notify_cancel()
            _complete(future, function)

    def flush_seconds(self) -> float:
        """Return for how many seconds any call was in progress since the last time, and start counting anew."""
        with self._lock:
            now = time.perf_counter()
            seconds = self._seconds + (now - self._since if self._threads else 0.0)
            self._seconds, self._since = 0.0, now
        return seconds

    def cancel(self, interrupt: Callable[[], None]) -> None:
        """
        Cancel all calls. `interrupt` is repeated, since a call may only become interruptible after the first time.
        """
        with self._lock:
            waiting, threads = [future for future, _ in self._waiting], [*self._threads]
            self._waiting.clear()
        for future in waiting:
            future.cancel()
        for _ in range(int(GRACE / PATIENCE)):
            if not any(thread.is_alive() for thread in threads):
                break
            interrupt()
            until = time.perf_counter() + PATIENCE
            for thread in threads:
                thread.join(max(until - time.perf_counter(), 0.0))

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Calls in threads of their own, while training continues. Knows nothing about models."""

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


MOST = 256  # at a time; more groups than a server samples at once
GRACE, PATIENCE = 5.0, 0.25  # seconds that interrupted calls may take to end, in all and at each attempt


def call(function: Callable) -> Future:
    """One call of a function, in a thread of its own. It starts at once."""
    future: Future = Future()
    # Not one of an executor's: the interpreter waits for those when it ends, however long they take.
    threading.Thread(target=_settle, args=(future, function), name="vllm-request", daemon=True).start()
    return future


def _settle(future: Future, function: Callable) -> None:
    try:
        outcome = function()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(outcome)


class Calls:
    """Calls in threads of their own, a limited number at a time, in the order in which they were added."""

    def __init__(self, most: int = MOST) -> None:
        self._most, self._lock = most, threading.Lock()
        self._waiting: deque[tuple[Future, Callable]] = deque()
        self._threads: set[threading.Thread] = set()
        self._seconds, self._since = 0.0, 0.0  # in which any was under way, until then

    def add(self, function: Callable, then: Callable[[Any], Any]) -> Future:
        """Calls a function, and another with what it returns, as soon as there is a thread for it."""
        future: Future = Future()
        with self._lock:
            self._waiting.append((future, lambda: then(function())))
            if len(self._threads) < self._most:
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
            _settle(future, function)

    def flush_seconds(self) -> float:
        """Return in how many seconds of the interval that ends now any call was under way, and begin the next one."""
        with self._lock:
            now = time.perf_counter()
            seconds = self._seconds + (now - self._since if self._threads else 0.0)
            self._seconds, self._since = 0.0, now
        return seconds

    def cancel(self, interrupt: Callable[[], None]) -> None:
        """Ends all. A call that begins what can be interrupted only after that is interrupted again."""
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

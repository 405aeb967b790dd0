# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Timing of a rollout's phases, and periodic messages."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread


SILENCE = 15.0  # seconds, after which a command says what it is doing


@contextmanager
def calling(function: Callable[[], object], every: float) -> Iterator[None]:
    """Call a function periodically while a block runs."""
    ended = Event()

    def watch() -> None:
        while not ended.wait(every):
            function()

    watcher = Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


class Stopwatch:
    """
    Measures where the time goes from one complete rollout to the next. The first interval begins with the first block.
    """

    def __init__(self, has_server: bool = False) -> None:
        self._has_server = has_server
        self._seconds: dict[str, float] = defaultdict(float)
        self._started: float | None = None
        self.doing: str | None = None  # what is timed now, and of how much
        self.how_much = ""

    @contextmanager
    def timing(self, name: str, how_much: str = "") -> Iterator[None]:
        """Adds the time that the block takes to what is called `name`; inside another block that counts already."""
        if self.doing is not None:
            yield
            return
        started, self.doing, self.how_much = time.perf_counter(), name, how_much
        if self._started is None:
            self._started = started
        try:
            yield
        finally:
            self.doing, self.how_much = None, ""
            self._seconds[name] += time.perf_counter() - started

    def add(self, name: str, seconds: float) -> None:
        self._seconds[name] += seconds

    def timeline(self) -> dict[str, float]:
        """Return where the seconds of an interval went: the trainer's, which add up to the total, and the server's."""
        names = "engine", "ahead", "wait", "rewards", "evaluation", "checkpoint"
        spent = dict.fromkeys(names, 0.0) | self.flush_seconds()
        other = spent["evaluation"] + spent["checkpoint"]
        timeline = {
            "sampling": spent["engine"] + spent["ahead"],
            "rewards": spent["rewards"],
            "update": max(spent["total"] - spent["engine"] - spent["wait"] - spent["rewards"] - other, 0.0),
            "other": other,
        }
        if self._has_server:
            timeline["wait"] = spent["engine"] + spent["wait"]
            timeline["idle"] = max(spent["total"] - timeline["sampling"] - spent["evaluation"], 0.0)
        return {f"timeline/{name}_seconds": value for name, value in timeline.items()}

    def flush_seconds(self) -> dict[str, float]:
        """Return the seconds of the interval that ends now, by name and as `total`, and begin the next one."""
        now = time.perf_counter()
        seconds = {**self._seconds, "total": 0.0 if self._started is None else now - self._started}
        self._seconds.clear()
        self._started = now
        return seconds

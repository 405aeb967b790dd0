# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Timing of a rollout's phases, and periodic messages."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread


SILENCE = 15.0  # seconds without output, after which a command prints what it is doing


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
    Measures what the time between two complete rollouts is spent on.

    The first interval begins with the first timed block.
    """

    def __init__(self, has_server: bool = False) -> None:
        self._has_server = has_server
        self._seconds: dict[str, float] = defaultdict(float)
        self._started: float | None = None
        self.doing: str | None = None  # name of the block that is timed now
        self.how_much = ""  # a description of the amount of work in it

    @contextmanager
    def timing(self, name: str, how_much: str = "") -> Iterator[None]:
        """Add the time of a block to the seconds of `name`. Within another timed block nothing is added."""
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
        """
        Return what the seconds of an interval were spent on.

        Those of the trainer add up to the length of the interval. With a server there are also those of the server.
        """
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
        """Return the seconds of the interval that ends now, by name and in `total`, and begin the next interval."""
        now = time.perf_counter()
        seconds = {**self._seconds, "total": 0.0 if self._started is None else now - self._started}
        self._seconds.clear()
        self._started = now
        return seconds

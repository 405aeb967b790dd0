# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Worker process of `math_verify.py`. Nothing here runs in the trainer, and only this module imports math-verify."""

import json
import logging
import math
import os
import re
import signal
import sys
from contextlib import suppress
from typing import Any


STARTUP_LIMIT = 120  # seconds to import math-verify, also on a busy machine
CLOCK_FACTOR = 10  # limit of wall-clock time of a completion, divided by its limit of CPU time
RETIRED = 3  # exit status of a worker that asks to be replaced
READY, GOLD_READ = "ready", "gold"  # messages of a worker besides verdicts
SKIPPED = "[skipped]"  # used instead of an answer if the gold answer cannot be parsed

_UNPARSEABLE = "[unparseable]"
_NUM_CACHED_GOLDS = 4096
_LOGGED_CHARACTERS = 200


def serve(timeout: float, memory_limit: int, lifeline: int) -> None:
    """Score batches from stdin until it is closed. The process ends at once if the lifeline is closed."""
    import fcntl
    import resource

    signals = {signal.SIGALRM, signal.SIGPROF, signal.SIGIO}
    for number in signals:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the trainer decides
    signal.alarm(STARTUP_LIMIT)
    # When the other end of the lifeline is closed, SIGIO ends this process, whatever it is doing.
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | fcntl.FASYNC)
    # Only answers are written to the original stdout. What a library prints goes elsewhere.
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    scorer = _Scorer()
    _, ceiling = resource.getrlimit(resource.RLIMIT_AS)
    held = memory_limit if ceiling == resource.RLIM_INFINITY else min(memory_limit, ceiling)
    with suppress(OSError, ValueError):  # macOS knows this limit, but cannot set it
        resource.setrlimit(resource.RLIMIT_AS, (held, held))
    signal.alarm(0)
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)
    os.dup2(devnull, 2)

    def answer(message: Any) -> None:
        # The time that a slow trainer takes to read does not count.
        remaining, _ = signal.setitimer(signal.ITIMER_REAL, 0)
        answers.write(json.dumps(message).encode() + b"\n")
        signal.setitimer(signal.ITIMER_REAL, remaining)

    answer(READY)
    announced = None
    while line := sys.stdin.buffer.readline():
        for gold, text in json.loads(line):
            signal.setitimer(signal.ITIMER_PROF, timeout)
            signal.setitimer(signal.ITIMER_REAL, CLOCK_FACTOR * timeout)
            scorer.read_gold(gold)
            # Also if the gold answer was cached: the trainer does not know what is in the cache.
            if gold != announced:
                answer(GOLD_READ)
                announced = gold
            verdict = scorer.score(gold, text)
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
            answer(verdict)
            if _address_space() > memory_limit // 2:
                # The caches of sympy may leave too little memory for the next completion, which would then be judged
                # incorrect for it.
                os._exit(RETIRED)


def _address_space() -> float:
    """Return the address space of this process in bytes: 0 without /proc, and infinity if no memory is left."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except FileNotFoundError:
        return 0
    except MemoryError:
        return math.inf


class _Scorer:
    """math-verify with the settings of TRL's `accuracy_reward`, but without its limits of time."""

    def __init__(self) -> None:
        import math_verify
        from latex2sympy2_extended import NormalizationConfig

        # math-verify warns that its own time limits are off, and about every text that it cannot parse.
        logging.getLogger("math_verify").setLevel(logging.CRITICAL)
        self._math_verify = math_verify
        self._extraction_config = [
            math_verify.LatexExtractionConfig(
                normalization_config=NormalizationConfig(units=True),
                boxed_match_priority=0,
                try_extract_without_anchor=False,
            )
        ]
        # Every pattern of that configuration needs one of these two. Completions that were cut off often have neither,
        # and the patterns would take quadratic time to find that out.
        self._anchor = re.compile(r"(?i:answer)|\\boxed\{")
        self._golds: dict[str, list] = {}
        # If a future release of math-verify cannot be used in this way, it must not look like incorrect answers.
        self.read_gold("1")
        if self.score("1", "\\boxed{1}") != (1.0, "1") or self.score("1", "\\boxed{2}") != (0.0, "2"):
            raise RuntimeError(
                f"math-verify in {math_verify.__file__} gives unexpected results for `1` and `2`. Install the version "
                "that this package requires."
            )

    def read_gold(self, gold: str) -> None:
        if gold in self._golds:
            return
        if len(self._golds) >= _NUM_CACHED_GOLDS:
            self._golds.clear()
        self._golds[gold] = self._math_verify.parse(gold, parsing_timeout=None)

    def score(self, gold: str, text: str) -> tuple[float | None, str]:
        """Return the reward and the extracted answer of a completion whose gold answer has been read."""
        parsed_gold = self._golds[gold]
        if not parsed_gold:
            return None, SKIPPED
        if self._anchor.search(text) is None:
            return 0.0, _UNPARSEABLE
        parsed = self._math_verify.parse(
            text, extraction_config=self._extraction_config, extraction_mode="first_match", parsing_timeout=None
        )
        written = [part for part in parsed if isinstance(part, str)]
        # One equal pair is enough for math-verify, too. But it compares the symbolic forms first, which is slow.
        is_same = any(
            isinstance(part, str) and part.strip() and part.strip() == answer.strip()
            for part in parsed_gold
            for answer in written
        )
        is_correct = is_same or self._math_verify.verify(parsed_gold, parsed, timeout_seconds=None)
        return float(is_correct), written[0][:_LOGGED_CHARACTERS] if written else _UNPARSEABLE

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Symbolic comparison with math-verify, in worker processes that can be killed.

A completion is hostile input: sympy may spend hours, or all memory, on a power tower. Timeouts inside a process need
the main thread, and an interpreter that runs some of its own code meanwhile; killing a process needs neither. So the
kernel holds every limit: a timer of processor time ends a worker that exceeds the time of one completion, another by
the clock one that makes no headway, an address-space limit bounds its memory, and a third pipe, over which nothing is
ever sent, ends a worker whose trainer is gone.

    trainer  -- one line a batch: [[gold, text], ...] -->  worker
             <-- "gold" once a gold answer is read that is not the one before, [reward, answer] of each completion
"""

import json
import logging
import math
import os
import select
import selectors
import signal
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, Any, NamedTuple, cast

from ..settings.environment import num_processes_of
from .dapo_math import completion_text, gold_text, loggable
from .math_worker import CLOCK_FACTOR, GOLD_READ, READY, RETIRED, SKIPPED, STARTUP_LIMIT, serve


logger = logging.getLogger(__name__)

_SMALLEST_MEMORY_LIMIT = 256 << 20  # bytes; below this math-verify itself may not fit
_LARGEST_BATCH = 128

_KILLED = "[killed]"


class _Verdict(NamedTuple):
    reward: float | None
    answer: str


@dataclass(eq=False)
class _Job:
    gold: str
    text: str
    verdict: _Verdict | None = None
    has_failed_at: set[str] = field(default_factory=set)  # of "gold" and "completion"


@dataclass(eq=False)
class _Worker:
    """The trainer's end of one worker process."""

    process: subprocess.Popen
    stdin: IO[bytes]
    stdout: IO[bytes]
    lifeline: int
    received: bytes = b""
    is_ready: bool = False
    gold_read: str | None = None  # the last that was announced
    batch: deque[_Job] = field(default_factory=deque)

    @classmethod
    def start(cls, timeout: float, memory_limit: int) -> "_Worker":
        # Not multiprocessing: its spawn re-imports the training script, its fork copies a process that runs CUDA.
        workers_end, lifeline = os.pipe()
        # Python does not import from entries that are not text, such as a pathlib.Path, either. The path comes before
        # any import: the working directory, which "-c" puts first, may hold a file of any name.
        path = [entry or os.getcwd() for entry in sys.path if isinstance(entry, str)]
        code = (
            f"import sys; sys.path[:] = {path!a}; "
            f"from {serve.__module__} import serve; serve({timeout!r}, {memory_limit!r}, {workers_end})"
        )
        try:
            process = subprocess.Popen(
                # Not isolated: that would keep out an editable install in the user site, which is a hook and no entry
                # of the path. What a library warns of must not become an error here because the trainer asked for it.
                [sys.executable, "-W", "ignore", "-c", code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                pass_fds=[workers_end],
            )
        except BaseException:
            os.close(lifeline)
            raise
        finally:
            os.close(workers_end)
        assert process.stdin is not None
        assert process.stdout is not None
        return cls(process, process.stdin, process.stdout, lifeline)

    def send(self, jobs: list[_Job], patience: float) -> None:
        """Hands over one batch. That the worker is gone shows when its answers are read."""
        self.batch.extend(jobs)
        line = json.dumps([[job.gold, job.text] for job in jobs], ensure_ascii=False) + "\n"
        unsent = memoryview(line.encode("utf-8", "surrogatepass"))  # json.loads reads lone surrogates back
        poll = select.poll()
        poll.register(self.stdin, select.POLLOUT)
        with suppress(BrokenPipeError):
            while unsent:
                if not poll.poll(1000 * patience):  # it was stopped from outside: what is written now breaks
                    self.process.kill()
                unsent = unsent[os.write(self.stdin.fileno(), unsent[: select.PIPE_BUF]) :]

    def receive(self) -> bool:
        """Notes the answers that have arrived; returns whether the worker is still there."""
        data = os.read(self.stdout.fileno(), 1 << 16)
        *lines, self.received = (self.received + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if message == READY:
                self.is_ready = True
            elif message == GOLD_READ:
                self.gold_read = self.batch[0].gold
            else:
                self.batch.popleft().verdict = _Verdict(*message)
        return bool(data)

    def stop(self) -> None:
        self.process.kill()
        self.close_pipes()
        self.process.wait()

    def close_pipes(self) -> None:
        self.stdin.close()
        self.stdout.close()
        os.close(self.lifeline)


def _stop_all(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.stop()
    workers.clear()


class MathVerifyReward:
    """
    Reward function that compares answers symbolically with math-verify, each completion under hard limits. POSIX only.

    The verdicts are those of TRL's `accuracy_reward`: 1.0 if the answer equals the gold answer, 0.0 if not, `None` if
    the gold answer cannot be parsed. A completion that takes longer than `timeout` is killed with its worker and is
    incorrect; if the machine stalled or ran out of memory it is tried once more. A gold answer that cannot be read in
    time twice is given up and logged: its completions get `None`. A copy, pickled or forked, has workers of its own.

    `timeout` is in seconds of processor time for one completion, its gold answer included. By the clock it may take
    ten times as long, so that a busy machine makes no answer wrong. `num_workers` defaults to the cores of this
    process divided by `LOCAL_WORLD_SIZE`, at most 8. `memory_limit` is the address space of one worker in bytes, held
    by the operating system where it can (Linux). Raises `ValueError` for no time, no worker or less than 256 MiB.
    """

    __name__ = "math_verify_reward"

    def __init__(self, timeout: float = 5.0, num_workers: int | None = None, memory_limit: int = 1 << 30) -> None:
        if not (timeout > 0 and math.isfinite(timeout)):
            raise ValueError(f"`timeout` must be a positive number of seconds, got {timeout}.")
        if num_workers is not None and num_workers < 1:
            raise ValueError(f"`num_workers` must be at least 1, got {num_workers}.")
        if memory_limit < _SMALLEST_MEMORY_LIMIT:
            raise ValueError(
                f"`memory_limit` must be at least {_SMALLEST_MEMORY_LIMIT} bytes, which math-verify itself may need, "
                f"got {memory_limit}."
            )
        if num_workers is None:  # this process shares its cores with the others that train on this machine
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            num_workers = max(1, min(8, cores // num_processes_of("LOCAL_WORLD_SIZE")))
        self.timeout = timeout
        self.num_workers = num_workers
        self.memory_limit = memory_limit
        self._patience = STARTUP_LIMIT + 2 * CLOCK_FACTOR * timeout  # seconds in which some worker says something
        self._workers: list[_Worker] = []
        self._hopeless_golds: set[str] = set()
        self._num_ended = self._num_killed_at_start = 0  # workers, in the current call
        self._lock = threading.Lock()
        self._stop_at_exit = weakref.finalize(self, _stop_all, self._workers)
        _instances.add(self)

    def __reduce__(self) -> tuple:
        return type(self), (self.timeout, self.num_workers, self.memory_limit)

    def __call__(
        self,
        completions: Sequence[str | list[dict[str, Any]]],
        solution: list[str | None],
        log_extra: Callable[[str, list], None] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **kwargs: Any,
    ) -> list[float | None]:
        """
        As [`math_verify_reward`]. `log_extra` receives the extracted answers as the column `math_verify_answer`.
        `log_metric` receives the share of completions that were killed (`math_verify/killed`), workers that had to be
        replaced (`math_verify/worker_restarts`) and gold answers given up so far (`math_verify/hopeless_golds`).
        """
        # A group often repeats itself: one completion and gold answer, one job.
        golds = [gold_text(gold) for gold in solution]
        pairs = [
            None if gold is None else (gold, completion_text(completion))
            for completion, gold in zip(completions, golds, strict=True)
        ]
        jobs = {pair: _Job(*pair) for pair in pairs if pair is not None}
        with self._lock:
            try:
                self._score(list(jobs.values()))
            except BaseException:
                # What they are busy with will never be asked for.
                _stop_all(self._workers)
                raise
            num_ended, num_hopeless = self._num_ended, len(self._hopeless_golds)
        verdicts = [_Verdict(None, SKIPPED) if pair is None else cast(_Verdict, jobs[pair].verdict) for pair in pairs]
        if log_extra is not None:
            # Named after the reward: two rewards that log one column would append to each other's rows.
            log_extra("math_verify_answer", [loggable(verdict.answer) for verdict in verdicts])
        if log_metric is not None and verdicts:
            log_metric("math_verify/killed", sum(verdict.answer == _KILLED for verdict in verdicts) / len(verdicts))
            log_metric("math_verify/worker_restarts", float(num_ended))
            log_metric("math_verify/hopeless_golds", float(num_hopeless))
        return [verdict.reward for verdict in verdicts]

    def close(self) -> None:
        """Stop the workers. The next call starts new ones."""
        with self._lock:
            _stop_all(self._workers)

    def _score(self, jobs: list[_Job]) -> None:
        """Gives every job its verdict: keeps each worker busy with one batch until nothing is left."""
        self._num_ended = self._num_killed_at_start = 0
        # Neighbours go to one worker: they are mostly completions of one prompt and share its parsed gold answer.
        size = max(1, min(_LARGEST_BATCH, len(jobs) // (4 * self.num_workers)))
        todo = self._open_batches(jobs[start : start + size] for start in range(0, len(jobs), size))
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                selector.register(worker.stdout, selectors.EVENT_READ, worker)
            while num_open := len(todo) + sum(bool(worker.batch) for worker in self._workers):
                while len(self._workers) < min(self.num_workers, num_open):
                    worker = _Worker.start(self.timeout, self.memory_limit)
                    self._workers.append(worker)
                    selector.register(worker.stdout, selectors.EVENT_READ, worker)
                for worker in self._workers:
                    if worker.is_ready and not worker.batch and todo:
                        worker.send(todo.popleft(), self._patience)
                events = selector.select(self._patience)
                if not events:  # they were stopped from outside, and their own clocks with them
                    for worker in self._workers:
                        worker.process.kill()
                for key, _ in events:
                    worker = key.data
                    if not worker.receive():
                        selector.unregister(worker.stdout)
                        self._workers.remove(worker)
                        self._bury(worker)
                        todo = self._open_batches([worker.batch, *todo])

    def _open_batches(self, batches: Iterable[Iterable[_Job]]) -> deque[list[_Job]]:
        """The batches without the jobs that need no worker: decided, or with a gold answer that kills workers."""
        open_batches = []
        for batch in map(list, batches):
            for job in batch:
                if job.verdict is None and job.gold in self._hopeless_golds:
                    job.verdict = _Verdict(None, SKIPPED)
            open_batches.append([job for job in batch if job.verdict is None])
        return deque(filter(None, open_batches))

    def _bury(self, worker: _Worker) -> None:
        """Finds out why a worker is gone; the job that it failed at gets its verdict, or one more try."""
        # The pipe is closed a moment before the process is gone: to kill it now would hide how it ended.
        status = worker.process.wait()
        worker.close_pipes()
        self._num_ended += 1
        if not worker.is_ready:
            self._num_killed_at_start += 1
            # A worker that was killed, by the startup limit or by a lack of memory, is started once more; one that
            # ended by itself would end the same way again.
            if status >= 0 or self._num_killed_at_start > self.num_workers:
                raise RuntimeError(
                    f"A math-verify worker ended with status {status} before it was ready (limit {STARTUP_LIMIT} s); "
                    f"its own message is on stderr. Check that `{sys.executable}` can import math_verify, and that "
                    "there is memory for it."
                )
        elif worker.batch and status != RETIRED:
            job = worker.batch[0]
            stage = "completion" if worker.gold_read == job.gold else "gold"
            # The time that it used is a completion's own doing. Another end may be an accident, such as a machine that
            # stood still; and a gold answer is worth all its completions.
            is_final = stage in job.has_failed_at or (stage == "completion" and status == -signal.SIGPROF)
            job.has_failed_at.add(stage)
            if is_final and stage == "completion":
                job.verdict = _Verdict(0.0, _KILLED)
            elif is_final:
                job.verdict = _Verdict(None, _KILLED)
                if job.gold not in self._hopeless_golds:
                    self._hopeless_golds.add(job.gold)
                    logger.warning(
                        f"math-verify did not finish reading the gold answer {job.gold!r:.80}, tried twice (`timeout` "
                        f"{self.timeout:g} s): its completions get no reward."
                    )


_instances: weakref.WeakSet[MathVerifyReward] = weakref.WeakSet()


def _forget_workers() -> None:
    """After a fork the workers are the parent's; an open end in the child would keep them alive."""
    for reward in _instances:
        for worker in reward._workers:
            worker.close_pipes()
        reward._workers.clear()
        reward._lock = threading.Lock()


if os.name == "posix":
    os.register_at_fork(after_in_child=_forget_workers)

_default = MathVerifyReward()


def math_verify_reward(
    completions: Sequence[str | list[dict[str, Any]]], solution: list[str | None], **kwargs: Any
) -> list[float | None]:
    """
    [`MathVerifyReward`] with its defaults: 5 seconds of processor time and 1 GiB per completion. Raises `TypeError`
    for values of a type that cannot be read, `RuntimeError` if no worker can be started.
    """
    return _default(completions, solution, **kwargs)


math_verify_reward.close = _default.close  # type: ignore[attr-defined]  # of whoever does not need its workers any more

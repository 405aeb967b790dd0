# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Symbolic comparison of answers with math-verify, in worker processes that can be killed.

A completion is untrusted input: sympy may need hours, or all memory, for a power tower. A timeout within a process
needs the main thread, and an interpreter that runs Python code from time to time. Killing a process needs neither. So
the operating system enforces every limit:

- A timer of CPU time ends a worker that exceeds the time of one completion.
- A timer of wall-clock time ends a worker that makes no progress.
- A limit on the address space bounds the memory of a worker.
- A third pipe, over which nothing is sent, ends a worker whose trainer no longer exists.

The trainer and a worker exchange lines:

    trainer  -- one line per batch: [[gold, text], ...] -->  worker
             <-- "gold" after each gold answer that differs from the previous one, and [reward, answer] per completion
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
    has_failed_at: set[str] = field(default_factory=set)  # may contain "gold" and "completion"


@dataclass(eq=False)
class _Worker:
    """The trainer's end of one worker process."""

    process: subprocess.Popen
    stdin: IO[bytes]
    stdout: IO[bytes]
    lifeline: int
    received: bytes = b""
    is_ready: bool = False
    gold_read: str | None = None  # the last gold answer that the worker has read
    batch: deque[_Job] = field(default_factory=deque)

    @classmethod
    def start(cls, timeout: float, memory_limit: int) -> "_Worker":
        # `multiprocessing` cannot be used: its spawn imports the training script again, and its fork copies a process
        # that uses CUDA.
        workers_end, lifeline = os.pipe()
        # The worker gets the same path, without entries that are not text, which Python ignores. The path is set
        # before any import, because "-c" puts the working directory first, which may contain files of any name.
        path = [entry or os.getcwd() for entry in sys.path if isinstance(entry, str)]
        code = (
            f"import sys; sys.path[:] = {path!a}; "
            f"from {serve.__module__} import serve; serve({timeout!r}, {memory_limit!r}, {workers_end})"
        )
        try:
            process = subprocess.Popen(
                # Without `-I`, which would hide an editable install in the user site: that is a hook, not an entry of
                # the path. With `-W ignore`, so that warnings do not become errors because the trainer's settings say
                # so.
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
        """Send one batch to the worker. If the worker has ended, [`receive`] will notice."""
        self.batch.extend(jobs)
        line = json.dumps([[job.gold, job.text] for job in jobs], ensure_ascii=False) + "\n"
        unsent = memoryview(line.encode("utf-8", "surrogatepass"))  # json.loads reads lone surrogates back
        poll = select.poll()
        poll.register(self.stdin, select.POLLOUT)
        with suppress(BrokenPipeError):
            while unsent:
                if not poll.poll(1000 * patience):  # the worker was stopped from outside; the next write will fail
                    self.process.kill()
                unsent = unsent[os.write(self.stdin.fileno(), unsent[: select.PIPE_BUF]) :]

    def receive(self) -> bool:
        """Store the results that have arrived. Return whether the worker is still running."""
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
    Reward function that compares answers symbolically with math-verify, with hard limits per completion. POSIX only.

    The rewards are those of TRL's `accuracy_reward`: 1.0 if the answer equals the gold answer, 0.0 if not, and `None`
    if the gold answer cannot be parsed. If a completion takes longer than `timeout`, its worker is killed and the
    completion is incorrect. If the worker ended for another reason, such as a stalled machine or a lack of memory, the
    completion is tried once more. If a gold answer cannot be read in time twice, this is logged and its completions
    get `None`. A copy of the object, pickled or forked, has its own workers.

    Args:
        timeout (`float`, *optional*, defaults to `5.0`):
            Seconds of CPU time for one completion, including its gold answer. The wall-clock time may be ten times as
            long, so that no answer becomes incorrect because the machine is busy.
        num_workers (`int`, *optional*):
            Number of worker processes. Defaults to the cores of this process divided by `LOCAL_WORLD_SIZE`, but at
            most 8.
        memory_limit (`int`, *optional*, defaults to 1 GiB):
            Address space of one worker in bytes. Only Linux enforces this limit.

    Raises:
        ValueError: If `timeout` is not positive, `num_workers` is 0, or `memory_limit` is below 256 MiB.
    """

    __name__ = "math_verify_reward"

    def __init__(self, timeout: float = 5.0, num_workers: int | None = None, memory_limit: int = 1 << 30) -> None:
        if not (timeout > 0 and math.isfinite(timeout)):
            raise ValueError(f"`timeout` must be a positive number of seconds, got {timeout}.")
        if num_workers is not None and num_workers < 1:
            raise ValueError(f"`num_workers` must be at least 1, got {num_workers}.")
        if memory_limit < _SMALLEST_MEMORY_LIMIT:
            raise ValueError(
                f"`memory_limit` must be at least {_SMALLEST_MEMORY_LIMIT} bytes, because math-verify itself may need "
                f"as much, got {memory_limit}."
            )
        if num_workers is None:  # the training processes of a machine share its cores
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            num_workers = max(1, min(8, cores // num_processes_of("LOCAL_WORLD_SIZE")))
        self.timeout = timeout
        self.num_workers = num_workers
        self.memory_limit = memory_limit
        self._patience = STARTUP_LIMIT + 2 * CLOCK_FACTOR * timeout  # seconds within which a worker must respond
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
        Return the reward of each completion.

        `log_extra` receives the extracted answers as the column `math_verify_answer`. `log_metric` receives the share
        of completions that were killed (`math_verify/killed`), the number of workers that were replaced
        (`math_verify/worker_restarts`) and the number of gold answers that could not be read so far
        (`math_verify/hopeless_golds`).
        """
        # A group often contains equal completions. Each pair of a gold answer and a completion is scored once.
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
                # Nobody will ask for the results that the workers are computing.
                _stop_all(self._workers)
                raise
            num_ended, num_hopeless = self._num_ended, len(self._hopeless_golds)
        verdicts = [_Verdict(None, SKIPPED) if pair is None else cast(_Verdict, jobs[pair].verdict) for pair in pairs]
        if log_extra is not None:
            # The column has the name of the reward. Two rewards with the same column would append to each other's.
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
        """Score all jobs. Each worker gets one batch at a time."""
        self._num_ended = self._num_killed_at_start = 0
        # Adjacent jobs go to the same worker. Most of them are completions of one prompt, so that the worker has to
        # parse its gold answer only once.
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
                if not events:  # the workers were stopped from outside, including their timers
                    for worker in self._workers:
                        worker.process.kill()
                for key, _ in events:
                    worker = key.data
                    if not worker.receive():
                        selector.unregister(worker.stdout)
                        self._workers.remove(worker)
                        self._handle_end(worker)
                        todo = self._open_batches([worker.batch, *todo])

    def _open_batches(self, batches: Iterable[Iterable[_Job]]) -> deque[list[_Job]]:
        """Return the batches without jobs that are decided or whose gold answer could not be read."""
        open_batches = []
        for batch in map(list, batches):
            for job in batch:
                if job.verdict is None and job.gold in self._hopeless_golds:
                    job.verdict = _Verdict(None, SKIPPED)
            open_batches.append([job for job in batch if job.verdict is None])
        return deque(filter(None, open_batches))

    def _handle_end(self, worker: _Worker) -> None:
        """Find out why a worker has ended. The job that it failed at gets its verdict, or is tried again."""
        # The pipe is closed a moment before the process ends. Killing the process now would hide how it ended.
        status = worker.process.wait()
        worker.close_pipes()
        self._num_ended += 1
        if not worker.is_ready:
            self._num_killed_at_start += 1
            # A worker that was killed, by the startup limit or for lack of memory, is started again. A worker that
            # ended by itself would end in the same way again.
            if status >= 0 or self._num_killed_at_start > self.num_workers:
                raise RuntimeError(
                    f"A math-verify worker ended with status {status} before it was ready (limit {STARTUP_LIMIT} s). "
                    f"Its own message is on stderr. Check that `{sys.executable}` can import math_verify, and that "
                    "there is enough memory."
                )
        elif worker.batch and status != RETIRED:
            job = worker.batch[0]
            stage = "completion" if worker.gold_read == job.gold else "gold"
            # If a completion used too much CPU time, it would do so again. Any other end may be an accident, such as a
            # stalled machine. A gold answer is always tried again, because all of its completions depend on it.
            is_final = stage in job.has_failed_at or (stage == "completion" and status == -signal.SIGPROF)
            job.has_failed_at.add(stage)
            if is_final and stage == "completion":
                job.verdict = _Verdict(0.0, _KILLED)
            elif is_final:
                job.verdict = _Verdict(None, _KILLED)
                if job.gold not in self._hopeless_golds:
                    self._hopeless_golds.add(job.gold)
                    logger.warning(
                        f"math-verify could not read the gold answer {job.gold!r:.80} within "
                        f"`timeout={self.timeout:g}` seconds in two attempts, so its completions get no reward. "
                        "Correct the gold answer, or raise `timeout`."
                    )


_instances: weakref.WeakSet[MathVerifyReward] = weakref.WeakSet()


def _forget_workers() -> None:
    """Close the pipes of a forked child. The workers are the parent's, and an open pipe would keep them alive."""
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
    Reward function that compares answers symbolically with math-verify: [`MathVerifyReward`] with its defaults.

    A completion has 5 seconds of CPU time and 1 GiB of address space.

    Raises:
        TypeError: If a completion or a gold answer has a type that cannot be read.
        RuntimeError: If no worker can be started.
    """
    return _default(completions, solution, **kwargs)


math_verify_reward.close = _default.close  # type: ignore[attr-defined]  # stops the workers if they are not needed

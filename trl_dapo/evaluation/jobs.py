# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""What an engine is asked, and what it answers: problems, jobs, completions, and the journal of these.

An engine takes the jobs and hands over each completion as it arrives. It returns when all are answered; an exception
loses none that arrived before it. What an interrupted evaluation still lacks is never sampled with the random numbers
of what it has: a server is told each job's seed, transformers gets that of each batch's first job, vLLM one a call.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from ..rewards.dapo_math import gold_text
from ..sampling.example_names import digest, problem_id


JOURNAL_FILE, SUMMARY_FILE = "completions.jsonl", "summary.json"
_SYNC_INTERVAL = 1.0  # seconds between two fsyncs: what a power cut may cost; a killed process loses nothing
_HEADER: dict[str, Any] = {"settings": dict}
_COMPLETION = {"problem": str, "index": int, "text": str, "length": (int, type(None)), "truncated": bool}


class Job(NamedTuple):
    """One completion to ask for."""

    problem: str  # its key
    index: int  # type: ignore[assignment]  # in place of a method of tuples, which nobody calls
    prompt: str | list[dict[str, str]]
    seed: int  # of 31 bits


class Sampling(NamedTuple):
    temperature: float  # 0 takes the most probable token
    top_p: float
    top_k: int  # 0 is all tokens
    max_completion_length: int


class Completion(NamedTuple):
    text: str  # without special tokens
    length: int | None  # tokens, with the one that ends it; `None` if the server does not say
    truncated: bool


OnCompletion = Callable[[Job, Completion], None]


class Problem(NamedTuple):
    """One problem, which the dataset lists `num_rows` times."""

    id: str
    source: str
    prompt: str | list[dict[str, str]]
    solution: str
    num_rows: int
    columns: dict[str, Any] = {}  # noqa: RUF012 (that a reward function asks for, beside the solution)

    @property
    def key(self) -> str:
        """Tells its completions from those of others: two sources may share an id, two prompt styles a problem."""
        return digest(json.dumps([self.source, self.id, self.prompt]), "sha256")


def read_problems(rows: Iterable[Mapping[str, Any]], columns: Sequence[str] = ()) -> list[Problem]:
    """Rows of equal source and id are one problem; raises `ValueError` where they do not agree otherwise."""
    problems: dict[tuple[str, str], Problem] = {}
    for row in rows:
        source, id_ = str(row.get("source") or "dataset"), problem_id(row)
        if id_ is None:
            raise ValueError(f"A prompt is text or messages, got {row['prompt']!r:.200}.")
        others = {name: row[name] for name in columns if name != "solution"}
        solution = row.get("solution", "")
        # A number is written as rewards write it in training: 51.0 is the answer 51.
        text = (gold_text(solution) if isinstance(solution, float) else None) or str(solution)
        problem = Problem(id_, source, row["prompt"], text, num_rows=1, columns=others)
        first = problems.setdefault((source, id_), problem)
        if first is problem:
            continue
        for column in ("prompt", "solution", "columns"):
            one, other = getattr(first, column), getattr(problem, column)
            if one != other:
                raise ValueError(
                    f"Two rows of the source {source!r} have the id {id_!r}, but the `{column}` of one is {one!r:.80} "
                    f"and of the other {other!r:.80}. Give each problem an id of its own, or leave the column out."
                )
        problems[source, id_] = first._replace(num_rows=first.num_rows + 1)
    if not problems:
        raise ValueError("The dataset is empty.")
    return list(problems.values())


def make_jobs(problems: list[Problem], k: int, seed: int) -> list[Job]:
    """`k` for each row of a problem, each with a seed of its own that does not depend on the other problems."""
    return [
        Job(problem.key, i, problem.prompt, seed=int(digest(f"{seed} {problem.id} {i}", "sha256")[:8], 16) >> 1)
        for problem in problems
        for i in range(k * problem.num_rows)
    ]


def has_fields(entry: Any, fields: Mapping[str, Any]) -> bool:
    """Whether what was read is an object with these fields, each of its type."""
    return isinstance(entry, dict) and all(
        name in entry and isinstance(entry[name], expected) for name, expected in fields.items()
    )


class Journal(AbstractContextManager):
    """
    Completions on disk as they arrive: whatever ends the process, none of them is asked twice. Of the JSON lines the
    first holds the settings, each further one a completion. Refuses another evaluation's journal, and an open one.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        import fcntl  # POSIX only; the figures of an evaluation are for every system

        self.path = path
        self.completions: dict[tuple[str, int], Completion] = {}
        self._lock = threading.Lock()
        self._synced_at = time.monotonic()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "a+b")
        try:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise BlockingIOError(f"Another evaluation is writing to `{path.parent}`.") from error
            self._read(settings)
        except BaseException:
            self._file.close()
            raise

    def append(self, problem: str, index: int, completion: Completion) -> None:
        """Once this returns, the completion outlives the process. Several threads may call it."""
        with self._lock:
            self._write({"problem": problem, "index": index, **completion._asdict()})
            self.completions[problem, index] = completion
            if time.monotonic() - self._synced_at > _SYNC_INTERVAL:
                self._sync()

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._sync()
            self._file.close()

    def _write(self, entry: dict[str, Any]) -> None:
        # ASCII: NUL bytes, line separators and lone surrogates of a completion come back as they were.
        self._file.write(json.dumps(entry).encode("ascii") + b"\n")
        self._file.flush()

    def _sync(self) -> None:
        os.fsync(self._file.fileno())
        self._synced_at = time.monotonic()

    def _read(self, settings: dict[str, Any]) -> None:
        self._file.seek(0)
        lines = self._file.readlines()
        if lines and not lines[-1].endswith(b"\n"):
            # The process that wrote it was killed meanwhile.
            self._file.truncate(self._file.tell() - len(lines.pop()))
        entries = [self._parse(number, line) for number, line in enumerate(lines, start=1)]
        if not entries:
            self._write({"settings": settings})
            self._sync()
            return
        before = entries[0]["settings"]
        differences = [
            f"`{name}` was {before.get(name)!r}, is now {settings.get(name)!r}"
            for name in {**settings, **before}
            if before.get(name) != settings.get(name)
        ]
        if differences:
            raise ValueError(
                f"`{self.path}` holds completions of other settings: {'; '.join(differences)}. Use another "
                "`output_dir`, or delete that file to start over."
            )
        for entry in entries[1:]:
            completion = Completion(*(entry[field] for field in Completion._fields))
            self.completions.setdefault((entry["problem"], entry["index"]), completion)

    def _parse(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            entry = json.loads(line)
            if has_fields(entry, _HEADER if number == 1 else _COMPLETION):
                return entry
        except (ValueError, RecursionError):
            pass
        raise ValueError(
            f"Line {number} of `{self.path}` is {line[:80]!r}, which no evaluation has written. Remove "
            f"{'the file' if number == 1 else 'that line'}, or use another `output_dir`."
        )

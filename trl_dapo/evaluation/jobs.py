# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The interface to an engine: problems, jobs, completions, and the journal that stores completions.

An engine takes the jobs and hands over each completion as it arrives. It returns when all are answered; an exception
loses none that arrived before it. The completions that an interrupted evaluation still needs are never sampled with
the random numbers of those that it has: a server is told each job's seed, transformers gets that of each batch's first
job, vLLM one a call.
"""

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from ..sampling.example_names import NO_SOURCE, content_digest, digest, id_of_prompt, problem_id, problem_source


JOURNAL_FILE, SUMMARY_FILE = "completions.jsonl", "summary.json"
_SYNC_INTERVAL = 1.0  # seconds between two fsyncs: what a power cut may cost; a killed process loses nothing
_HEADER: dict[str, Any] = {"settings": dict}
_COMPLETION = {"problem": str, "index": int, "text": str, "length": (int, type(None)), "truncated": bool}


class Job(NamedTuple):
    """One completion to ask for."""

    problem: str  # its key
    index: int  # type: ignore[assignment]  # replaces a method of tuples, which nobody calls
    prompt: str | list[dict[str, str]]
    seed: int  # of 31 bits


class SamplingSettings(NamedTuple):
    temperature: float  # 0 takes the most probable token
    top_p: float
    top_k: int  # 0 is all tokens
    max_completion_length: int
    min_p: float = 0.0  # 0 means no minimum


class GeneratedCompletion(NamedTuple):
    text: str  # without special tokens
    length: int | None  # tokens, with the one that ends it; `None` if the server does not say
    truncated: bool
    ids: list[int] | None = None  # the tokens; `None` of a server


OnCompletion = Callable[[Job, GeneratedCompletion], None]


class Problem(NamedTuple):
    """One problem, which the dataset lists `num_rows` times."""

    id: str  # no two problems of a source have the same
    source: str
    row: Mapping[str, Any]  # every column, as reward functions get it in training
    num_rows: int
    key: str  # tells its completions from those of other problems, and of other prompts for the same problem

    @property
    def prompt(self) -> str | list[dict[str, str]]:
        return self.row["prompt"]

    @property
    def solution(self) -> Any:
        return self.row.get("solution")


def read_problems(rows: Iterable[Mapping[str, Any]]) -> list[Problem]:
    """
    Equal rows are one problem. Rows that differ in any column are problems of their own, also if they share an `id`:
    their ids then end in what tells them apart.
    """
    num_rows: Counter[str] = Counter()
    different: dict[str, Mapping[str, Any]] = {}
    for row in rows:
        if not _is_prompt(row.get("prompt")):
            raise ValueError(f"A prompt is text or messages, got {row.get('prompt')!r:.200}.")
        content = content_digest(row)
        num_rows[content] += 1
        different.setdefault(content, row)
    if not different:
        raise ValueError("The dataset is empty.")
    named = [(problem_source(row) or NO_SOURCE, str(problem_id(row))) for row in different.values()]
    asked = [
        digest(json.dumps([*name, row["prompt"]]), "sha256")
        for name, row in zip(named, different.values(), strict=True)
    ]
    num_of_name, num_of_asked = Counter(named), Counter(asked)
    num_seen: Counter[str] = Counter()
    problems = []
    for (content, row), (source, id_), key in zip(different.items(), named, asked, strict=True):
        if num_of_asked[key] > 1:  # the same prompt, with another gold answer for instance
            name = f"{id_}#{content[:8]}"
        else:
            name = id_ if num_of_name[source, id_] == 1 else id_of_prompt(row)
        num_seen[key] += 1
        if (num := num_seen[key]) > 1:  # it has completions of its own
            key = digest(f"{key} {num}", "sha256")
        problems.append(Problem(name, source, row, num_rows[content], key))
    return problems


def _is_prompt(prompt: Any) -> bool:
    """Whether it is text, or messages that JSON can hold, which excludes images."""
    try:
        json.dumps(prompt)
    except TypeError:
        return False
    return isinstance(prompt, str | list)


def make_jobs(problems: list[Problem], k: int, seed: int) -> list[Job]:
    """`k` for each row of a problem, each with a seed of its own that does not depend on the other problems."""
    return [
        Job(problem.key, i, problem.prompt, seed=int(digest(f"{seed} {problem.key} {i}", "sha256")[:8], 16) >> 1)
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
    Completions on disk as they arrive: whatever ends the process, none of them is sampled twice. The first JSON line
    contains the settings, each further line a completion. Refuses another evaluation's journal, and an open one.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        import fcntl  # POSIX only; the figures of an evaluation are for every system

        self.path = path
        self.completions: dict[tuple[str, int], GeneratedCompletion] = {}
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

    def append(self, problem: str, index: int, completion: GeneratedCompletion) -> None:
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
            completion = GeneratedCompletion(entry["text"], entry["length"], entry["truncated"], entry.get("ids"))
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

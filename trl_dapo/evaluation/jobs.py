# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The interface to an engine: problems, jobs, completions, and the journal that stores completions.

An engine receives jobs and passes on each completion when it arrives. It returns when all jobs are done. If it raises
an exception, no completion that arrived before is lost.

If an evaluation was interrupted, the missing completions are never sampled with the random numbers of the existing
ones: a server receives the seed of each job, transformers that of the first job of each batch, and vLLM one seed per
call.
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
# Seconds between two calls of fsync. A power cut loses at most what was written since. A killed process loses nothing.
_SYNC_INTERVAL = 1.0
_HEADER: dict[str, Any] = {"settings": dict}
_COMPLETION = {"problem": str, "index": int, "text": str, "length": (int, type(None)), "truncated": bool}


class Job(NamedTuple):
    """A completion to sample."""

    problem: str  # key of the problem
    index: int  # type: ignore[assignment]  # replaces a method of tuples that is not used
    prompt: str | list[dict[str, str]]
    seed: int  # of 31 bits


class SamplingSettings(NamedTuple):
    """The settings with which completions are sampled."""

    temperature: float  # 0 means greedy decoding
    top_p: float
    top_k: int  # 0 means all tokens
    max_completion_length: int
    min_p: float = 0.0  # 0 means no minimum


class GeneratedCompletion(NamedTuple):
    """A completion that an engine has sampled."""

    text: str  # without special tokens
    length: int | None  # number of tokens, including the one that ends it; `None` if a server does not say
    truncated: bool
    ids: list[int] | None = None  # the tokens; `None` for a server


OnCompletion = Callable[[Job, GeneratedCompletion], None]


class Problem(NamedTuple):
    """A problem, which may be in several rows of the dataset."""

    id: str  # unique among the problems of a source
    source: str
    row: Mapping[str, Any]  # all columns, as reward functions receive them in training
    num_rows: int  # number of rows with this problem
    key: str  # identifies the completions of this problem with this prompt

    @property
    def prompt(self) -> str | list[dict[str, str]]:
        return self.row["prompt"]

    @property
    def solution(self) -> Any:
        return self.row.get("solution")


def read_problems(rows: Iterable[Mapping[str, Any]]) -> list[Problem]:
    """
    Return the problems of a dataset.

    Equal rows are one problem. Rows that differ in any column are different problems. If they have the same `id`, a
    part that distinguishes them is added to it.
    """
    num_rows: Counter[str] = Counter()
    different: dict[str, Mapping[str, Any]] = {}
    for row in rows:
        if not _is_prompt(row.get("prompt")):
            raise ValueError(f"A prompt must be text or a list of messages, got {row.get('prompt')!r:.200}.")
        content = content_digest(row)
        num_rows[content] += 1
        different.setdefault(content, row)
    if not different:
        raise ValueError("The dataset is empty. Use a dataset with at least one row.")
    named = [(problem_source(row) or NO_SOURCE, str(problem_id(row))) for row in different.values()]
    keys = [
        digest(json.dumps([*name, row["prompt"]]), "sha256")
        for name, row in zip(named, different.values(), strict=True)
    ]
    num_of_name, num_of_key = Counter(named), Counter(keys)
    num_seen: Counter[str] = Counter()
    problems = []
    for (content, row), (source, id_), key in zip(different.items(), named, keys, strict=True):
        if num_of_key[key] > 1:  # several rows have this prompt, for instance with different gold answers
            name = f"{id_}#{content[:8]}"
        else:
            name = id_ if num_of_name[source, id_] == 1 else id_of_prompt(row)
        num_seen[key] += 1
        num = num_seen[key]
        if num > 1:  # a further problem with this prompt has its own completions
            key = digest(f"{key} {num}", "sha256")
        problems.append(Problem(name, source, row, num_rows[content], key))
    return problems


def _is_prompt(prompt: Any) -> bool:
    """Return whether a prompt is text, or messages that can be written as JSON, which excludes images."""
    try:
        json.dumps(prompt)
    except TypeError:
        return False
    return isinstance(prompt, str | list)


def make_jobs(problems: list[Problem], k: int, seed: int) -> list[Job]:
    """Return `k` jobs for each row of a problem. The seed of a job does not depend on the other problems."""
    return [
        Job(problem.key, i, problem.prompt, seed=int(digest(f"{seed} {problem.key} {i}", "sha256")[:8], 16) >> 1)
        for problem in problems
        for i in range(k * problem.num_rows)
    ]


def has_fields(entry: Any, fields: Mapping[str, Any]) -> bool:
    """Return whether a value that was read is an object with these fields, each of its type."""
    return isinstance(entry, dict) and all(
        name in entry and isinstance(entry[name], expected) for name, expected in fields.items()
    )


class Journal(AbstractContextManager):
    """
    A file to which completions are written when they arrive, so that no completion has to be sampled twice.

    The first line contains the settings, and each further line a completion, as JSON.

    Args:
        path (`Path`):
            The file.
        settings (`dict[str, Any]`):
            The settings of the evaluation.

    Raises:
        BlockingIOError: If another process is writing to the file.
        ValueError: If the file is from an evaluation with other settings, or damaged.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        import fcntl  # imported here, because it exists only on POSIX, and other parts of this module work anywhere

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
                raise BlockingIOError(
                    f"Another evaluation is writing to `{path.parent}`. Wait until it ends, or use another "
                    f"`output_dir`."
                ) from error
            self._read(settings)
        except BaseException:
            self._file.close()
            raise

    def append(self, problem: str, index: int, completion: GeneratedCompletion) -> None:
        """Write a completion. After this call it is not lost if the process ends. Several threads may call it."""
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
        # As ASCII, NUL bytes, line separators and lone surrogates of a completion are read back unchanged.
        self._file.write(json.dumps(entry).encode("ascii") + b"\n")
        self._file.flush()

    def _sync(self) -> None:
        os.fsync(self._file.fileno())
        self._synced_at = time.monotonic()

    def _read(self, settings: dict[str, Any]) -> None:
        self._file.seek(0)
        lines = self._file.readlines()
        if lines and not lines[-1].endswith(b"\n"):
            # The process was killed while it wrote the last line.
            self._file.truncate(self._file.tell() - len(lines.pop()))
        entries = [self._parse(number, line) for number, line in enumerate(lines, start=1)]
        if not entries:
            self._write({"settings": settings})
            self._sync()
            return
        before = entries[0]["settings"]
        differences = [
            f"`{name}` was {before.get(name)!r} and is now {settings.get(name)!r}"
            for name in {**settings, **before}
            if before.get(name) != settings.get(name)
        ]
        if differences:
            raise ValueError(
                f"`{self.path}` contains completions that were sampled with other settings: {'; '.join(differences)}. "
                "Use another `output_dir`, or delete this file to start over."
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
            f"Line {number} of `{self.path}` is {line[:80]!r}, which was not written by an evaluation. Delete "
            f"{'the file' if number == 1 else 'this line'}, or use another `output_dir`."
        )

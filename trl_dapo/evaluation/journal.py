# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The completions of an evaluation, on disk as they arrive: whatever ends the process, none of them is asked twice.

A journal is a file of JSON lines. The first holds the settings, each further one a completion:

    {"settings": {"model": "Qwen/Qwen3-0.6B", "temperature": 1.0, ...}}
    {"problem": "2347acb5eb3b35f1", "index": 0, "text": "...", "length": 812, "truncated": false}
"""

import json
import os
import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from .jobs import Completion


JOURNAL_FILE, SUMMARY_FILE = "completions.jsonl", "summary.json"
_SYNC_INTERVAL = 1.0  # seconds between two fsyncs: what a power cut may cost; a killed process loses nothing
_HEADER: dict[str, Any] = {"settings": dict}
_COMPLETION = {"problem": str, "index": int, "text": str, "length": (int, type(None)), "truncated": bool}


def has_fields(entry: Any, fields: Mapping[str, Any]) -> bool:
    """Whether what was read is an object with these fields, each of its type."""
    return isinstance(entry, dict) and all(
        name in entry and isinstance(entry[name], expected) for name, expected in fields.items()
    )


class Journal(AbstractContextManager):
    """Opens or starts a journal. Raises `ValueError` if it is another's, `BlockingIOError` if it is open."""

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

    def close(self) -> None:
        """Put everything on the disk and let go of the file."""
        with self._lock:
            self._sync()
            self._file.close()

    def __exit__(self, *exception: object) -> None:
        self.close()

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
            torn = lines.pop()
            self._file.truncate(self._file.tell() - len(torn))
        entries = [self._parse(number, line) for number, line in enumerate(lines, start=1)]
        if not entries:
            self._write({"settings": settings})
            self._sync()
            return
        self._refuse_other_settings(entries[0], settings)
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

    def _refuse_other_settings(self, header: dict[str, Any], settings: dict[str, Any]) -> None:
        before = header["settings"]
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

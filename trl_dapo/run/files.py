# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Writing files completely or not at all, and without overwriting those of an earlier run."""

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to, `path` with `.tmp` added. At the end it replaces `path`."""
    temporary = path.with_name(f"{path.name}.tmp")
    yield temporary
    os.replace(temporary, path)


def keep_existing(path: Path) -> None:
    """Rename a file or folder of an earlier run: `log.jsonl` becomes `log-1.jsonl`, or has the next free number."""
    if path.exists():
        names = (path.with_name(f"{path.stem}-{n}{path.suffix}") for n in itertools.count(1))
        path.rename(next(free for free in names if not free.exists()))

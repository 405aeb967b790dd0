# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Files that a run writes completely or not at all, and that do not overwrite those of an earlier run."""

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write, `path` with the ending `.tmp`, that takes its place once it is complete."""
    temporary = path.with_name(f"{path.name}.tmp")
    yield temporary
    os.replace(temporary, path)


def keep_earlier(path: Path) -> None:
    """Renames what an earlier run left: `log.jsonl` becomes `log-1.jsonl`, or the first number that is free."""
    if path.exists():
        names = (path.with_name(f"{path.stem}-{n}{path.suffix}") for n in itertools.count(1))
        path.rename(next(free for free in names if not free.exists()))

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Files that a run leaves whole or not at all, and beside which an earlier run's stay."""

import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..ranks import on_main_process, wait_for_everyone


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


@contextmanager
def scratch_folder(output_dir: str | os.PathLike | None) -> Iterator[str]:
    """
    Make a folder on the disk on which an output folder is or will be, the same for all processes, and delete it at the
    end of the block. Every process calls it.
    """
    folder = on_main_process(_make_beside, Path(str(output_dir)).expanduser().absolute())
    try:
        yield folder
        wait_for_everyone()  # not after an error, which need not have come to all of them
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _make_beside(output_dir: Path) -> str:
    existing = next(parent for parent in output_dir.parents if parent.is_dir())
    return tempfile.mkdtemp(dir=existing, prefix=".trl-dapo-trial-")

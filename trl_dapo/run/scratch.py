# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""A temporary folder for all processes, on the disk of a run's output folder."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..ranks import on_main_process, wait_for_everyone


@contextmanager
def scratch_folder(output_dir: str | os.PathLike | None) -> Iterator[str]:
    """
    Make a folder on the disk of an output folder, which need not exist yet. The folder is the same for all processes,
    and is deleted at the end of the block. Every process must call this function.
    """
    folder = on_main_process(_make_folder, Path(str(output_dir)).expanduser().absolute())
    try:
        yield folder
        wait_for_everyone()  # but not after an error, which other processes may not have had
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _make_folder(output_dir: Path) -> str:
    # If the output folder exists, the new folder is made in it: its parent may be on another disk, or not writable.
    existing = next(folder for folder in (output_dir, *output_dir.parents) if folder.is_dir())
    return tempfile.mkdtemp(dir=existing, prefix=".trl-dapo-trial-")

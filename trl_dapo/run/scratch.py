# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""A folder that all processes write to for a while, on the disk of a run's output folder."""

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
    Make a folder on the disk on which an output folder is or will be, the same for all processes, and delete it at the
    end of the block. Every process calls it.
    """
    folder = on_main_process(_make_folder, Path(str(output_dir)).expanduser().absolute())
    try:
        yield folder
        wait_for_everyone()  # not after an error, which need not have come to all of them
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _make_folder(output_dir: Path) -> str:
    # In the output folder itself if it is there: its parent may be on another disk, or not be the user's to write to.
    existing = next(folder for folder in (output_dir, *output_dir.parents) if folder.is_dir())
    return tempfile.mkdtemp(dir=existing, prefix=".trl-dapo-trial-")

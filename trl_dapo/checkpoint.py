# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The files that a checkpoint of [`DAPOTrainer`] holds beside those of transformers, and which checkpoint is whole."""

import json
import pickle
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging


logger = logging.get_logger(__name__)

STATE_NAME, MEMORY_NAME = "dapo_state.json", "dapo_memory.parquet"


class State(NamedTuple):
    """
    What one rank reads of a checkpoint.

    Args:
        shared (`dict`):
            What all ranks share, JSON-able.
        local (`dict`):
            What is this rank's own, loadable with `weights_only=True`.
    """

    shared: dict[str, Any]
    local: dict[str, Any]


def write_state(folder: Path, rank: int, state: State, is_writer: bool):
    """
    Writes what one rank has to say.

    Args:
        folder (`Path`):
            The checkpoint.
        rank (`int`):
            The rank.
        state ([`State`]):
            Its state.
        is_writer (`bool`):
            Whether it writes what all ranks share, too.
    """
    torch.save(state.local, folder / _rank_name(rank))
    if is_writer:
        (folder / STATE_NAME).write_text(json.dumps(state.shared, indent=2) + "\n")


def read_state(folder: Path, rank: int) -> tuple[State | None, str | None]:
    """
    Reads what [`write_state`] wrote.

    Returns:
        `tuple`: the state, or `None` and why there is none: one sentence.
    """
    if not (folder / STATE_NAME).exists():
        return None, f"it was not written by DAPOTrainer: it has no {STATE_NAME}"
    path = folder / _rank_name(rank)
    if not path.exists():
        return None, f"it has no {path.name}: it was written by fewer processes, or not to its end"
    try:
        shared = json.loads((folder / STATE_NAME).read_text())
        return State(shared, torch.load(path, map_location="cpu", weights_only=True)), None
    except (ValueError, RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
        return None, f"it cannot be read ({type(error).__name__}: {error})"


def _rank_name(rank: int) -> str:
    return f"dapo_state_rank{rank}.pt"


def last_complete_checkpoint(output_dir: str) -> Path | None:
    """The last checkpoint that was written to its end, which is where `trainer_state.json` is written."""
    states = Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*/trainer_state.json")
    whole = [path.parent for path in states if path.parent.name.rsplit("-")[-1].isdigit() and _is_json(path)]
    return max(whole, key=lambda folder: int(folder.name.rsplit("-")[-1]), default=None)


def find_checkpoint(output_dir: str) -> str | None:
    """
    The checkpoint that `resume_from_checkpoint=True` means: the last that was written to its end.

    A run that was killed while it wrote a checkpoint leaves a part of one; it is passed over. Where there is no whole
    one yet, the run starts from the beginning, so that one launch line serves first and later runs.
    """
    checkpoint = last_complete_checkpoint(output_dir)
    if checkpoint is None:
        logger.warning(f"{output_dir} holds no complete checkpoint: the run starts from the beginning.")
        return None
    return str(checkpoint)


def _is_json(path: Path) -> bool:
    try:
        json.loads(path.read_text())
    except ValueError:
        return False
    return True

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""DAPO for TRL: a drop-in for `GRPOTrainer` that fills every batch with groups whose rewards differ."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .version import __version__


if TYPE_CHECKING:
    from .config import DAPOConfig
    from .trainer import DAPOTrainer

__all__ = ["DAPOConfig", "DAPOTrainer", "__version__"]


_MODULES = {"DAPOConfig": ".config", "DAPOTrainer": ".trainer"}


# Lazy, so that the reward functions' worker processes and `trl-dapo --help` do not pay for importing torch.
def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

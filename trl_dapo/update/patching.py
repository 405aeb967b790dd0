# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Context managers that change attributes of an object, or the mode of a model, within a block."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def patched(owner: Any, **values: Any) -> Iterator[None]:
    """Set attributes of an object or a module to other values within a block."""
    usual = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in usual.items():
            setattr(owner, name, value)


@contextmanager
def training_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Put a model into training or evaluation mode within a block."""
    was_training = model.training
    model.train(training)
    try:
        yield
    finally:
        model.train(was_training)

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Attributes of an object, and the mode of a model, changed for the time of a block."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def patched(owner: Any, **values: Any) -> Iterator[None]:
    """Give the attributes of an object, or the names of a module, other values for the time of the block."""
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
    """Put a model into training mode, or into evaluation mode, for the time of the block."""
    was_training = model.training
    model.train(training)
    try:
        yield
    finally:
        model.train(was_training)

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Other values for a while."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def swapped(owner: Any, **values: Any) -> Iterator[None]:
    """Other values for the attributes of an object or the names of a module, for the time of the block."""
    usual = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in usual.items():
            setattr(owner, name, value)


@contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """A model that trains, or is evaluated, for the time of the block."""
    was_training = model.training
    model.train(training)
    try:
        yield
    finally:
        model.train(was_training)

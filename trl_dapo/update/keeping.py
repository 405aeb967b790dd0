# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Context managers that restore a state after a block: random states, attributes, weights, optimizers."""

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


@contextmanager
def keeping_random_state() -> Iterator[None]:
    """Restore the random states of Python, NumPy and torch, including all GPUs, at the end of a block."""
    python, numpy, of_torch = random.getstate(), np.random.get_state(), random_state_of_torch()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        set_random_state_of_torch(of_torch)


def random_state_of_torch() -> list[Tensor]:
    """Return the random states of the CPU and of all GPUs."""
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return [torch.get_rng_state(), *gpus]


def set_random_state_of_torch(states: list[Tensor]) -> None:
    """Set the states of [`random_state_of_torch`]. Those of GPUs are left out if their number is another one."""
    cpu, *gpus = states
    torch.set_rng_state(cpu)
    if gpus and len(gpus) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(gpus)


@contextmanager
def keeping_attributes(*owners: Any) -> Iterator[None]:
    """Restore the attributes of objects at the end of a block. The values of the attributes are not copied."""
    before = [dict(vars(owner)) for owner in owners]
    try:
        yield
    finally:
        for owner, attributes in zip(owners, before, strict=True):
            vars(owner).clear()
            vars(owner).update(attributes)


class SavedWeights:
    """Copies in CPU memory of the tensors of a model that training changes: its trained weights and its buffers."""

    def __init__(self, model: nn.Module) -> None:
        changing: list[Tensor] = [weight for weight in model.parameters() if weight.requires_grad]
        changing += model.buffers()
        self._copies = [(tensor, tensor.detach().cpu().clone()) for tensor in changing]

    @property
    def num_bytes(self) -> int:
        """Size of the copies in bytes."""
        return sum(copied.numel() * copied.element_size() for _, copied in self._copies)

    @torch.no_grad()
    def restore(self) -> None:
        """Write the copies back into the model."""
        for tensor, copied in self._copies:
            tensor.copy_(copied)


@contextmanager
def keeping_modules(model: nn.Module) -> Iterator[None]:
    """
    Restore the attributes and buffers of all modules of a model at the end of a block. The attributes include training
    or evaluation mode. Gradients are deleted.
    """
    modules = [*model.modules()]
    buffers = [(dict(module._buffers), set(module._non_persistent_buffers_set)) for module in modules]
    hooks = [
        (registered, dict(registered))
        for module in modules
        for name, registered in vars(module).items()
        if "_hooks" in name and isinstance(registered, dict)
    ]
    try:
        with keeping_attributes(*modules):
            yield
    finally:
        for module, (tensors, not_persistent) in zip(modules, buffers, strict=True):
            module._buffers.clear()
            module._buffers.update(tensors)
            module._non_persistent_buffers_set.clear()
            module._non_persistent_buffers_set.update(not_persistent)
        for registered, before in hooks:
            registered.clear()
            registered.update(before)
        model.zero_grad(set_to_none=True)


@contextmanager
def keeping_state(*owners: Any) -> Iterator[None]:
    """Restore the states of optimizers and gradient scalers at the end of a block. An owner may be `None`."""
    before = [(owner, copy.deepcopy(owner.state_dict())) for owner in owners if owner is not None]
    try:
        yield
    finally:
        for owner, state in before:
            owner.load_state_dict(state)

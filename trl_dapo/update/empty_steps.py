# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Optimizer steps that have no token in the loss."""

from collections.abc import Callable
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback, TrainerState, TrainingArguments


class SkipEmptyStep(TrainerCallback):
    """
    Keeps the weights unchanged in optimizer steps without a loss token.

    Args:
        is_empty (`Callable`):
            Returns whether the present step has no loss token.
        deepspeed_optimizer (`Callable`):
            Returns the optimizer that DeepSpeed wraps, or `None` without DeepSpeed.
        after_step (`Callable`):
            Is called when the optimizer has made a step, empty or not.
    """

    def __init__(
        self, is_empty: Callable[[], bool], deepspeed_optimizer: Callable[[], Any], after_step: Callable[[], None]
    ) -> None:
        self._is_empty, self._deepspeed_optimizer, self._after_step = is_empty, deepspeed_optimizer, after_step
        self._hooks: list[RemovableHandle] = []
        self._hidden: list[list[torch.nn.Parameter]] = []

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        optimizer = self._deepspeed_optimizer() or kwargs["optimizer"]
        if isinstance(optimizer, AcceleratedOptimizer):
            optimizer = optimizer.optimizer
        for hook in self._hooks:
            hook.remove()
        self._hooks = [optimizer.register_step_pre_hook(self.hide), optimizer.register_step_post_hook(self.show)]

    def hide(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
        """Hide all parameters from the optimizer, so that it does not change them, if the step is empty."""
        # A gradient of zero would not be enough, since weight decay and momentum would still change the weights.
        if self._is_empty():
            self._hidden = [group["params"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["params"] = []

    def show(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
        """Give the hidden parameters back to the optimizer, which has made its step."""
        for group, params in zip(optimizer.param_groups, self._hidden, strict=False):
            group["params"] = params
        self._hidden = []
        self._after_step()

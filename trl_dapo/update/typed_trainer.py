# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""`GRPOTrainer` with the types that its attributes have here. Every part of the trainer inherits from it."""

from typing import Any

from datasets import Dataset, IterableDataset
from transformers import PreTrainedModel
from trl import GRPOTrainer

from ..config import DAPOConfig


class TypedGRPOTrainer(GRPOTrainer):
    """TRL's trainer, unchanged. It declares the attributes that the parts of the trainer share."""

    # Narrower than TRL and transformers declare them: optional there, and set in every trainer that was constructed.
    args: DAPOConfig
    model: PreTrainedModel
    num_generations: int
    num_generations_eval: int
    max_completion_length: int | None  # none with vLLM: the rest of its window
    pad_to_multiple_of: int | None
    train_dataset: Dataset | IterableDataset
    _logs: dict[str, Any]
    # These begin as `None` there, which is all that is said of them.
    _buffered_inputs: list[dict] | None  # type: ignore[assignment]
    _signature_columns: list[str] | None  # type: ignore[assignment]
    _initialized = False  # without `__init__`, as TRL's tests make trainers, the methods are TRL's

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""`GRPOTrainer` with narrower types for its attributes. Every part of the trainer inherits from it."""

from typing import Any

from datasets import Dataset, IterableDataset
from transformers import PreTrainedModel
from trl import GRPOTrainer

from ..config import DAPOConfig


class TypedGRPOTrainer(GRPOTrainer):
    """TRL's trainer, unchanged except for type declarations of attributes that the parts of the trainer share."""

    # TRL and transformers declare these as optional, but they are set in every trainer that was constructed.
    args: DAPOConfig
    model: PreTrainedModel
    num_generations: int
    num_generations_eval: int
    max_completion_length: int | None  # with vLLM, `None` stands for the rest of the context window
    pad_to_multiple_of: int | None
    train_dataset: Dataset | IterableDataset
    _logs: dict[str, Any]
    # TRL initializes these with `None` and declares no type.
    _buffered_inputs: list[dict] | None  # type: ignore[assignment]
    _signature_columns: list[str] | None  # type: ignore[assignment]
    _initialized = False  # TRL's tests make trainers without `__init__`: those behave like TRL's own

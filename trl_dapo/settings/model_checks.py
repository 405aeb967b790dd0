# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""What of a run's settings deserves a warning."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..models import context_length
from .arguments import check_model_path


if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from ..config import DAPOConfig


@contextmanager
def telling_a_missing_folder(*models: object) -> Iterator[None]:
    """
    Says of models' names that no folders have them where a model is not found. Whoever misspells a path would else
    read of the network alone.
    """
    names = [model for model in models if isinstance(model, str)]
    for name in names:
        check_model_path(name)
    try:
        yield
    except OSError as error:
        missing = [f"`{name}`" for name in names if not os.path.exists(name)]
        if not missing or "huggingface.co" not in str(error):
            raise
        are = "is no folder" if len(missing) == 1 else "are no folders"
        raise OSError(f"{' and '.join(missing)} {are} here. {error}") from error


def warnings_at_start(args: "DAPOConfig", config: "PreTrainedConfig", steps_in_bfloat16: bool) -> list[str]:
    """
    What a user should hear of before training begins.

    Args:
        args ([`DAPOConfig`]):
            Of the run.
        config (`PretrainedConfig`):
            Of the model.
        steps_in_bfloat16 (`bool`):
            Whether the whole model trains and its weights are held in bfloat16 alone.

    Returns:
        `list[str]`, one line each.
    """
    warnings = []
    if steps_in_bfloat16 and args.learning_rate < 1e-5:
        # AdamW moves a weight by about the learning rate; next to 0.02 bfloat16 has steps of 1.2e-4.
        warnings.append(
            f"The weights are held in bfloat16 and `learning_rate` is {args.learning_rate:g}: most of what a step "
            "changes is lost to rounding. Load them in float32 (`model_init_kwargs={'dtype': 'float32'}`; `bf16=True` "
            "computes in bfloat16 all the same), or train an adapter (`peft_config`)."
        )
    if args.epsilon_high is not None and args.epsilon_high < args.epsilon:
        warnings.append(
            f"`epsilon_high` ({args.epsilon_high:g}) is below `epsilon` ({args.epsilon:g}): probabilities may "
            "fall further than they may rise, the reverse of Clip-Higher. Raise `epsilon_high` (the paper: 0.28)."
        )
    if args.groups_per_rollout <= 1:
        warnings.append(
            "A rollout holds one prompt, and so does each optimizer step: gradients are noisy, and dynamic sampling "
            "samples one prompt a round. Set `prompts_per_rollout`, or raise `gradient_accumulation_steps`."
        )
    context = context_length(config)
    if context is not None and args.max_completion_length is not None and args.max_completion_length >= context:
        warnings.append(
            f"`max_completion_length` ({args.max_completion_length}) leaves no room for a prompt in the model's "
            f"context of {context} tokens, beyond which it writes noise. Lower it, or set rope scaling in the model's "
            "config."
        )
    return warnings

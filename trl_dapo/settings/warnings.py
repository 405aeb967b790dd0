# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""What a user is warned of before training begins, and which warnings of others nobody can act on."""

import warnings
from typing import Any


# Of transformers, where TRL and its own older code use names that it has changed.
_RENAMED = "`(is_)?gradient_checkpointing(_kwargs|_enable|_disable)?` is deprecated"


def leave_out_renaming_warnings() -> None:
    """
    From now on, leaves out warnings of renamed names in TRL's code, which nobody who reads them can change. Not for a
    block: at its end Python would forget which warnings it has shown, and drop the filters that others have set in it.
    """
    warnings.filterwarnings("ignore", _RENAMED, FutureWarning)


def warnings_at_start(settings: Any, context: int | None, steps_in_bfloat16: bool) -> list[str]:
    """A line for each setting that is allowed and seldom meant; `context` is the model's, in tokens."""
    messages = []
    if steps_in_bfloat16 and settings.learning_rate < 1e-5:
        # AdamW moves a weight by about the learning rate; next to 0.02 bfloat16 has steps of 1.2e-4.
        messages.append(
            f"The weights are held in bfloat16 and `learning_rate` is {settings.learning_rate:g}: most of what a step "
            "changes is lost to rounding. Load them in float32 (`model_init_kwargs={'dtype': 'float32'}`; `bf16=True` "
            "computes in bfloat16 all the same), or train an adapter (`peft_config`)."
        )
    if settings.epsilon_high is not None and settings.epsilon_high < settings.epsilon:
        messages.append(
            f"`epsilon_high` ({settings.epsilon_high:g}) is below `epsilon` ({settings.epsilon:g}): probabilities may "
            "fall further than they may rise, the reverse of Clip-Higher. Raise `epsilon_high` (the paper: 0.28)."
        )
    if settings.groups_per_rollout <= 1:
        messages.append(
            "A rollout holds one prompt, and so does each optimizer step: gradients are noisy, and dynamic sampling "
            "samples one prompt a round. Set `prompts_per_rollout`, or raise `gradient_accumulation_steps`."
        )
    longest = settings.max_completion_length
    if context is not None and longest is not None and longest >= context:
        messages.append(
            f"`max_completion_length` ({longest}) leaves no room for a prompt in the model's context of {context} "
            "tokens, beyond which it writes noise. Lower it, or set rope scaling in the model's config."
        )
    return messages

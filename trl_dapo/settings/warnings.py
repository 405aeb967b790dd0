# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Warnings before training begins, and warnings of other packages that are hidden because nobody can act on them."""

import warnings
from typing import Any

from .rules import off_the_policy


# Warnings of transformers, because TRL and its own older code use names that it has changed.
_RENAMED = "`(is_)?gradient_checkpointing(_kwargs|_enable|_disable)?` is deprecated"

LOW_WEIGHT = 0.9  # of the mean weight of the tokens that an engine sampled
LOW_WEIGHT_MESSAGE = (
    f"`sampling/importance_sampling_ratio/mean` is below {LOW_WEIGHT}: vLLM does not sample from the policy, and the "
    "gradient shrinks. Set `top_p=1.0`, `top_k=0`, no penalty and a `token_*` mode. If so set, vLLM has other weights."
)


MANY_CUT_OFF, HALF_CUT_OFF = 0.2, 0.5  # shares of the completions


def describe_cut_off(settings: Any, ratio: float) -> str | None:
    """
    Return what to do about completions that `max_completion_length` cuts off, if they are many.

    Args:
        settings:
            The run's settings.
        ratio (`float`):
            Share of the completions that are cut off, `completions/clipped_ratio`.
    """
    longest = settings.max_completion_length
    is_handled = settings.overlong_buffer_length is not None or settings.mask_truncated_completions
    if ratio < HALF_CUT_OFF and (ratio <= MANY_CUT_OFF or is_handled):
        return None
    parts = []
    if ratio >= HALF_CUT_OFF:
        parts.append(
            f"`max_completion_length={longest}` is too short: {ratio:.1%} of the completions are cut off by it."
        )
        parts.append("Most of them never reach their answer. Raise it.")
    else:
        parts.append(
            f"{ratio:.1%} of the completions are cut off by `max_completion_length={longest}`. Raise it if you can."
        )
    if not is_handled:
        buffer = max(1, (longest or 0) // 5)
        parts.append(
            f"The paper punishes long completions softly (`overlong_buffer_length={buffer}`) or leaves those that are "
            "cut off out of the loss (`overlong_filtering=True`); neither is set."
        )
    return " ".join(parts)


def leave_out_renaming_warnings() -> None:
    """From now on, leaves out warnings of renamed names in TRL's code, which nobody who reads them can change."""
    # Not for a block: at its end Python would forget which it has shown, and drop the filters that others have set.
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
    if settings.use_vllm and (moved := off_the_policy(settings)):
        messages.append(
            f"With {', '.join(moved)} vLLM samples from another distribution than the policy's, which trains whole: "
            "the weights that correct for it shrink the gradient (`sampling/importance_sampling_ratio/mean`). Set "
            f"{', '.join(moved.values())}."
        )
    longest = settings.max_completion_length
    if context is not None and longest is not None and longest >= context:
        messages.append(
            f"`max_completion_length` ({longest}) leaves no room for a prompt in the model's context of {context} "
            "tokens, beyond which it writes noise. Lower it, or set rope scaling in the model's config."
        )
    return messages

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Warnings before training begins, and warnings of other packages that are hidden because users cannot act on them."""

import logging
import warnings
from typing import Any

from .rules import off_policy_settings


# Warnings of transformers about renamed arguments, which TRL and older code of transformers still use.
_RENAMED = "`(is_)?gradient_checkpointing(_kwargs|_enable|_disable)?` is deprecated"

LOW_WEIGHT = 0.9  # threshold of the mean importance sampling ratio of sampled tokens
LOW_WEIGHT_MESSAGE = (
    f"`sampling/importance_sampling_ratio/mean` is below {LOW_WEIGHT}: vLLM does not sample from the policy, and the "
    "gradient shrinks. Set `top_p=1.0`, `top_k=0`, no repetition penalty, and a `token_*` mode of "
    "`vllm_importance_sampling_mode`. If these are set already, vLLM's weights differ from the model's."
)
MANY_CUT_OFF, HALF_CUT_OFF = 0.2, 0.5  # shares of the completions


def describe_cut_off(settings: Any, ratio: float) -> str | None:
    """
    Return what to do about completions that `max_completion_length` cuts off, or `None` if there are few of them.

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
            f"`max_completion_length={longest}` cuts off {ratio:.1%} of the completions. If their answers come last, "
            "these are lost: raise it."
        )
    else:
        parts.append(
            f"`max_completion_length={longest}` cuts off {ratio:.1%} of the completions. Raise it if you can."
        )
    if not is_handled:
        buffer = max(1, (longest or 0) // 5)
        parts.append(
            "The paper either punishes long completions gradually, or leaves completions that are cut off out of the "
            f"loss. Set `overlong_buffer_length={buffer}` or `overlong_filtering=True` to do so."
        )
    return " ".join(parts)


def hide_renaming_warnings() -> None:
    """Hide warnings about renamed arguments in TRL's code, which a user cannot change, until the process ends."""
    # `warnings.catch_warnings` cannot be used here: at its end Python forgets which warnings it has shown, and removes
    # filters that others have added meanwhile.
    warnings.filterwarnings("ignore", _RENAMED, FutureWarning)


class _FirstOnly(logging.Filter):
    """Lets only the first message through that contains a text, and all messages that do not."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text, self.has_passed = text, False

    def filter(self, record: logging.LogRecord) -> bool:
        if self._text not in str(record.msg):
            return True
        is_first, self.has_passed = not self.has_passed, True
        return is_first


_missing_rewards = _FirstOnly("All reward functions returned None")


def warn_once_of_missing_rewards() -> None:
    """
    Let TRL warn only once per run of a completion without a reward. It warns at every call, with the whole example.

    The metric `dynamic_sampling/dropped/unscored` counts the groups without rewards.
    """
    _missing_rewards.has_passed = False
    logging.getLogger("trl.trainer.grpo_trainer").addFilter(_missing_rewards)  # a second time it has no effect


def warnings_at_start(settings: Any, context: int | None, steps_in_bfloat16: bool) -> list[str]:
    """
    Return a warning for each setting that is allowed but probably not intended.

    Args:
        settings:
            The run's settings.
        context (`int`, *optional*):
            Number of tokens in the model's context.
        steps_in_bfloat16 (`bool`):
            Whether the optimizer changes weights that are stored in bfloat16.
    """
    messages = []
    if steps_in_bfloat16 and settings.learning_rate < 1e-5:
        # AdamW changes a weight by about the learning rate. Near 0.02, adjacent bfloat16 numbers are 1.2e-4 apart.
        messages.append(
            f"The weights are stored in bfloat16 and `learning_rate` is {settings.learning_rate:g}: most of each "
            "update is lost to rounding. Load the weights in float32 (`model_init_kwargs={'dtype': 'float32'}`; with "
            "`bf16=True` the computation still runs in bfloat16), or train an adapter (`peft_config`)."
        )
    if settings.epsilon_high is not None and settings.epsilon_high < settings.epsilon:
        messages.append(
            f"`epsilon_high` ({settings.epsilon_high:g}) is below `epsilon` ({settings.epsilon:g}): probabilities can "
            "fall further than they can rise, which is the opposite of Clip-Higher. Raise `epsilon_high`. The paper "
            "uses 0.28."
        )
    if settings.groups_per_rollout <= 1:
        messages.append(
            "A rollout has only one prompt, and so has each optimizer step: gradients are noisy, and dynamic sampling "
            "samples one prompt per round. Set a larger `prompts_per_rollout`, or a larger "
            "`gradient_accumulation_steps`."
        )
    if settings.use_vllm and (moved := off_policy_settings(settings)):
        messages.append(
            f"With {', '.join(moved)} vLLM does not sample from the policy that is trained, but from a changed "
            "distribution. The importance sampling weights that correct for this shrink the gradient (see the metric "
            f"`sampling/importance_sampling_ratio/mean`). Set {', '.join(moved.values())}."
        )
    is_resampled = settings.use_dynamic_sampling and settings.dynamic_sampling_mode != "mask"
    if is_resampled and not (settings.dynamic_sampling_max_gen_batches or settings.dynamic_sampling_stop_after):
        messages.append(
            "`dynamic_sampling_max_gen_batches=0` and `dynamic_sampling_stop_after=0` together set no limit: if the "
            "rewards of no group ever differ, the first rollout never ends. Set `dynamic_sampling_stop_after` (the "
            "default is 25), or limit a rollout with `dynamic_sampling_max_gen_batches` (the default is 10)."
        )
    longest = settings.max_completion_length
    if context is not None and longest is not None and longest >= context:
        messages.append(
            f"`max_completion_length` ({longest}) leaves no room for a prompt in the model's context of {context} "
            "tokens, and beyond its context a model writes noise. Lower `max_completion_length`, or set rope scaling "
            "in the model's config."
        )
    return messages

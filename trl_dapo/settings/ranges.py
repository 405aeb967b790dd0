# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The allowed values of single settings: this package's, and those of TRL's that decide what is sampled and trained.

Only the limit of vLLM's window depends on another setting. Contradictions between settings are in `rules.py`. Pure
functions: a plan uses them too, without torch.
"""

import argparse
import math
import re
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any, NamedTuple


class Range(NamedTuple):
    """The numbers that a setting may be: both ends included, infinity never."""

    least: float
    most: float = math.inf
    is_whole: bool = False
    is_open: bool = False  # `least` itself is out
    or_none: bool = False
    or_zero: bool = False
    hint: str = ""  # what else to say of a value that is out

    def __contains__(self, value: Any) -> bool:
        if value is None:
            return self.or_none
        kind: Any = Integral if self.is_whole else Real
        if isinstance(value, bool) or not isinstance(value, kind):
            return False
        is_within = self.least <= value <= self.most and not (self.is_open and value == self.least)
        return -math.inf < value < math.inf and (is_within or (self.or_zero and value == 0))

    def __str__(self) -> str:
        if self.least == -math.inf:
            return "a whole number" if self.is_whole else "a finite number"
        ends = f"above {self.least}" if self.is_open else f"at least {self.least}"
        if self.most < math.inf:
            ends += f" and at most {self.most}"
        elif not self.is_whole:
            ends += " and finite"
        return f"a whole number of {ends}" if self.is_whole else ends

    def read(self, text: str) -> int:
        """Type of an option of `argparse` that takes a whole number."""
        if not re.fullmatch("-?[0-9]+", text) or int(text) not in self:
            raise argparse.ArgumentTypeError(f"must be {self}, got {text!r}")
        return int(text)


ANY = Range(-math.inf)
COUNT = Range(1, is_whole=True)
COUNT_OR_NONE = Range(1, is_whole=True, or_none=True)
POSITIVE = Range(0, is_open=True)
POSITIVE_OR_NONE = Range(0, is_open=True, or_none=True)
SHARE = Range(0, 1, is_open=True)

RANGES = {
    # Batches
    "num_generations": Range(
        2, is_whole=True, hint="A group of one completion has no spread of rewards to learn from."
    ),
    "num_generations_eval": Range(1, is_whole=True, or_none=True, or_zero=True),  # as TRL reads it, the same
    "prompts_per_rollout": COUNT_OR_NONE,
    "prompts_per_step": COUNT_OR_NONE,
    "per_device_train_batch_size": COUNT,
    "per_device_eval_batch_size": COUNT,
    "gradient_accumulation_steps": COUNT,
    "steps_per_generation": COUNT_OR_NONE,
    "generation_batch_size": COUNT_OR_NONE,
    "max_tokens_per_microbatch": COUNT_OR_NONE,
    "seed": Range(0, 2**32 - 1, is_whole=True),
    "max_steps": Range(-1, is_whole=True, hint="Set -1 for `num_train_epochs`."),
    # Sampling
    "max_completion_length": COUNT_OR_NONE,
    "temperature": POSITIVE,
    "top_p": Range(0, 1, is_open=True, or_none=True),
    "min_p": Range(0, 1, or_none=True),
    "repetition_penalty": POSITIVE_OR_NONE,
    "vllm_gpu_memory_utilization": SHARE,
    "vllm_tensor_parallel_size": COUNT,
    "vllm_max_model_length": COUNT_OR_NONE,
    "vllm_request_timeout": POSITIVE_OR_NONE,
    "eval_temperature": Range(0, is_open=True, or_none=True, hint="For greedy decoding set `eval_top_k=1`."),
    "eval_top_p": Range(0, 1, is_open=True, or_none=True),
    "eval_top_k": Range(0, is_whole=True, or_none=True, hint="0 is all tokens."),
    # Dynamic sampling
    "dynamic_sampling_max_gen_batches": Range(1, or_zero=True, hint="0 means no limit."),
    "dynamic_sampling_stop_after": Range(0, is_whole=True, hint="0 is never."),
    "dynamic_sampling_max_round_size": COUNT_OR_NONE,
    "dynamic_sampling_min_accuracy": ANY,
    "dynamic_sampling_max_accuracy": ANY,
    "dynamic_sampling_accuracy_threshold": ANY,
    "batch_multiplier": POSITIVE_OR_NONE,
    "min_replace_ratio": SHARE,
    "max_tokens_generated": Range(0, is_open=True, or_none=True, hint="Leave it out for no limit."),
    "log_groups": Range(0, is_whole=True, hint="0 keeps no text."),
    # Loss
    "num_iterations": COUNT,
    "epsilon": Range(0),
    "epsilon_high": Range(0, or_none=True),
    "delta": POSITIVE_OR_NONE,
    "beta": Range(0),
    "top_entropy_quantile": Range(0, 1),
    "vllm_importance_sampling_clip_max": POSITIVE_OR_NONE,
    # The overlong penalty
    "overlong_buffer_length": COUNT_OR_NONE,
    "overlong_penalty_factor": Range(0, hint="A negative one would reward overlong completions."),
}

CHOICES: dict[str, tuple] = {
    "dynamic_sampling_on_exhausted": ("top_up", "error"),
    "dynamic_sampling_mode": ("filter", "paper", "replace", "mask"),
    "dynamic_sampling_surplus": (None, "discard", "carry"),
    "rollouts_ahead": (0, 1, 2),
    "vllm_lora_sync": (None, "adapter", "merge"),
    "vllm_mode": ("colocate", "server"),
    "vllm_importance_sampling_mode": ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
    "importance_sampling_level": ("token", "sequence"),
    "scale_rewards": ("group", "batch", "none", True, False),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
}

# What a command line and YAML may write for a truth value.
TRUTH = dict.fromkeys(("yes", "true", "t", "y", "1"), True) | dict.fromkeys(("no", "false", "f", "n", "0"), False)


def read_choice(name: str, value: Any) -> Any:
    """Return the choice that a value means: on a command line `True` and `False` are text."""
    choices = CHOICES.get(name, ())
    is_truth = any(choice is True for choice in choices)
    if is_truth and isinstance(value, str) and value not in choices:
        return TRUTH.get(value.lower(), value)
    return value


def check_value(name: str, value: Any, allowed: Range) -> None:
    """Refuses what a setting may not be, with the value and what may be."""
    if value not in allowed:
        hint = f" {allowed.hint}" if allowed.hint else ""
        raise ValueError(f"`{name}` must be {allowed}, got {value!r}.{hint}")


def check_choice(name: str, value: Any, choices: Iterable) -> None:
    if value not in choices:
        named = ", ".join(repr(choice) for choice in choices if choice is not None)
        raise ValueError(f"`{name}` must be one of {named}, got {value!r}.")


def check_values(settings: Any) -> None:
    """Refuses what no setting may be; of `settings` every name in `RANGES` and `CHOICES` is an attribute."""
    for name, allowed in RANGES.items():
        check_value(name, getattr(settings, name), allowed)
    for name, choices in CHOICES.items():
        check_choice(name, getattr(settings, name), choices)
    longest = settings.max_completion_length
    if settings.use_vllm and settings.vllm_mode == "colocate" and longest is not None:
        hint = f"It holds a prompt and a completion of `max_completion_length` ({longest})."
        window = Range(longest + 1, is_whole=True, or_none=True, hint=hint)
        check_value("vllm_max_model_length", settings.vllm_max_model_length, window)


def why_unscalable(source_min: float, source_max: float, target_min: float, target_max: float) -> str | None:
    """Return which of two ranges is empty or infinite, in words, or `None`."""
    for name, low, high in (("source", source_min, source_max), ("target", target_min, target_max)):
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            return (
                f"The {name} range of `reward_scaling` must begin below its end and both be finite, got {low} to "
                f"{high}: its four numbers are source minimum, source maximum, target minimum, target maximum."
            )
    return None

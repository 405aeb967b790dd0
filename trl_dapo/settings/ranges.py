# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Allowed values of single settings: those of this package, and TRL's settings of sampling and the loss.

The values of one setting do not depend on another, except for the size of vLLM's window. Contradictions between
settings are in `rules.py`. The functions need no torch, so a plan can use them too.
"""

import argparse
import math
import re
from collections.abc import Iterable
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any, NamedTuple


class Range(NamedTuple):
    """The numbers that are allowed for a setting. Both ends are included, infinity is not."""

    least: float
    most: float = math.inf
    is_whole: bool = False
    is_open: bool = False  # `least` itself is not allowed
    or_none: bool = False
    or_zero: bool = False
    hint: str = ""  # a sentence that is added to the error

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
        """Return the whole number that a command line gives as text. Used as a `type` of `argparse`."""
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
        2, is_whole=True, hint="The rewards of a group can only differ if it has at least two completions."
    ),
    "num_generations_eval": Range(1, is_whole=True, or_none=True, or_zero=True),  # TRL reads 0 as `None`
    "prompts_per_rollout": COUNT_OR_NONE,
    "prompts_per_step": COUNT_OR_NONE,
    "per_device_train_batch_size": COUNT,
    "per_device_eval_batch_size": COUNT,
    "gradient_accumulation_steps": COUNT,
    "steps_per_generation": COUNT_OR_NONE,
    "generation_batch_size": COUNT_OR_NONE,
    "max_tokens_per_microbatch": COUNT_OR_NONE,
    "seed": Range(0, 2**32 - 1, is_whole=True),
    "num_train_epochs": Range(0),
    "max_steps": Range(-1, is_whole=True, hint="-1 means that `num_train_epochs` counts."),
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
    "eval_top_k": Range(0, is_whole=True, or_none=True, hint="0 means all tokens."),
    # Dynamic sampling
    "dynamic_sampling_max_gen_batches": Range(1, or_zero=True, hint="0 means no limit."),
    "dynamic_sampling_stop_after": Range(0, is_whole=True, hint="0 means never."),
    "dynamic_sampling_max_round_size": COUNT_OR_NONE,
    "dynamic_sampling_min_accuracy": ANY,
    "dynamic_sampling_max_accuracy": ANY,
    "dynamic_sampling_accuracy_threshold": ANY,
    "batch_multiplier": POSITIVE_OR_NONE,
    "min_replace_ratio": SHARE,
    "max_tokens_generated": Range(0, is_open=True, or_none=True, hint="Leave it out for no limit."),
    "log_groups": Range(0, is_whole=True, hint="0 means that no text is stored."),
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
    "overlong_penalty_factor": Range(0, hint="A negative factor would reward overlong completions."),
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

# What to say of a choice that is not similar to any known one, by setting.
HINTS_FOR_CHOICES = {"dynamic_sampling_mode": " To turn dynamic sampling off, set `use_dynamic_sampling=False`."}

# How a truth value may be written on a command line and in YAML.
TRUTH = dict.fromkeys(("yes", "true", "t", "y", "1"), True) | dict.fromkeys(("no", "false", "f", "n", "0"), False)


def read_choice(name: str, value: Any) -> Any:
    """Return a choice, with `True` and `False` as truth values also if a command line gives them as text."""
    choices = CHOICES.get(name, ())
    is_truth = any(choice is True for choice in choices)
    if is_truth and isinstance(value, str) and value not in choices:
        return TRUTH.get(value.lower(), value)
    return value


def check_value(name: str, value: Any, allowed: Range) -> None:
    """Raise a `ValueError` that names the value and the allowed range if a setting is out of range."""
    if value not in allowed:
        hint = f" {allowed.hint}" if allowed.hint else ""
        raise ValueError(f"`{name}` must be {allowed}, got {value!r}.{hint}")


def check_choice(name: str, value: Any, choices: Iterable) -> None:
    if value not in choices:
        named = [choice for choice in choices if choice is not None]
        texts = [choice for choice in named if isinstance(choice, str)]
        nearest = get_close_matches(str(value).lower(), texts, n=1)
        hint = f" Did you mean {nearest[0]!r}?" if nearest else HINTS_FOR_CHOICES.get(name, "")
        raise ValueError(f"`{name}` must be one of {', '.join(map(repr, named))}, got {value!r}.{hint}")


def check_values(settings: Any) -> None:
    """Raise a `ValueError` if a setting is not allowed. `settings` has every name in `RANGES` and `CHOICES`."""
    for name, allowed in RANGES.items():
        check_value(name, getattr(settings, name), allowed)
    for name, choices in CHOICES.items():
        check_choice(name, getattr(settings, name), choices)
    longest = settings.max_completion_length
    if settings.use_vllm and settings.vllm_mode == "colocate" and longest is not None:
        hint = (
            f"A completion of `max_completion_length` ({longest}) tokens and its prompt have to fit into it. Raise it "
            "by the length of your prompts, or lower `max_completion_length`."
        )
        window = Range(longest + 1, is_whole=True, or_none=True, hint=hint)
        check_value("vllm_max_model_length", settings.vllm_max_model_length, window)


def why_unscalable(source_min: float, source_max: float, target_min: float, target_max: float) -> str | None:
    """Return why a range of `reward_scaling` cannot be used, or `None` if both can."""
    for name, low, high in (("source", source_min, source_max), ("target", target_min, target_max)):
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            return (
                f"The {name} minimum of `reward_scaling` must be less than the {name} maximum, and both must be "
                f"finite, got {low} and {high}. The four numbers are source minimum, source maximum, target minimum "
                "and target maximum."
            )
    return None

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""What a model's config says about its positions and its context."""

from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def has_rotary_positions(config: "PreTrainedConfig") -> bool:
    """
    Whether a model turns queries and keys by their positions, so that attention depends on distances alone.

    Args:
        config (`PretrainedConfig`):
            Of the model.

    Returns:
        `bool`.
    """
    return bool(_rope_parameters(config))


def why_positions_are_absolute(config: "PreTrainedConfig") -> str | None:
    """
    What makes the log-probabilities of a model with rotary positions depend on the padding around its tokens.

    Such models look at absolute positions or at the number of columns, most of them beyond some thousand tokens only,
    where no short row shows it.

    Args:
        config (`PretrainedConfig`):
            Of the model.

    Returns:
        `str` that names the setting of the config, or `None`.
    """
    for rope in _rope_parameters(config):
        kind = rope.get("rope_type", rope.get("type", "default"))
        if "dynamic" in kind or kind == "longrope":
            return f"its rope type {kind!r} depends on the number of columns"
        if rope.get("llama_4_scaling_beta"):
            return "its attention is scaled by the absolute position (`llama_4_scaling_beta`)"
    if getattr(config.get_text_config(), "attn_temperature_tuning", False):
        return "its attention is scaled by the absolute position (`attn_temperature_tuning`)"
    return None


def context_length(config: "PreTrainedConfig") -> int | None:
    """
    Tokens that a model is made for, prompt included, with its rope scaling if it has one.

    Args:
        config (`PretrainedConfig`):
            Of the model.

    Returns:
        `int`, or `None` where the config names no limit.
    """
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    if longest is None:
        return None
    scaled = [
        (rope.get("original_max_position_embeddings") or longest) * (rope.get("factor") or 1)
        for rope in _rope_parameters(config)
    ]
    return int(max([longest, *scaled]))


def _rope_parameters(config: "PreTrainedConfig") -> list[dict]:
    """A config's rope parameters; some models have one for each type of layer."""
    parameters = getattr(config.get_text_config(), "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return nested or ([parameters] if parameters else [])

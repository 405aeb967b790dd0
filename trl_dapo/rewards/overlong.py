# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Soft overlong punishment: equation 13 of the DAPO paper (arXiv 2503.14476), with a factor and a floor."""

from collections.abc import Iterable
from typing import Any


def check_overlong_buffer(max_length: int, buffer_length: int, penalty_factor: float) -> None:
    if buffer_length <= 0:
        raise ValueError(f"The overlong buffer must have at least 1 token, got {buffer_length}.")
    if buffer_length > max_length:
        raise ValueError(
            f"The overlong buffer ({buffer_length} tokens) must not be longer than the longest completion "
            f"({max_length} tokens); the paper's share is a fifth of it: {max_length // 5}."
        )
    if not penalty_factor >= 0.0:
        raise ValueError(f"The overlong penalty factor must not be negative, got {penalty_factor}.")


def soft_overlong_punishment(
    lengths: Iterable[int], *, max_length: int, buffer_length: int, penalty_factor: float = 1.0
) -> list[float]:
    r"""
    Equation 13 of the DAPO paper for completions of these lengths, in tokens that the model wrote, without padding: 0
    up to `max_length - buffer_length`, from there linear to `-penalty_factor` at `max_length`, and no less beyond.
    Raises `ValueError` if the buffer is empty or longer than `max_length`, or the factor is negative.
    """
    check_overlong_buffer(max_length, buffer_length, penalty_factor)
    # Counting the excess first keeps a free length at 0.0, where a negated maximum would give -0.0.
    excesses = (min(max(length - (max_length - buffer_length), 0), buffer_length) for length in lengths)
    return [-penalty_factor * (excess / buffer_length) if excess else 0.0 for excess in excesses]


class SoftOverlongPunishment:
    """
    [`soft_overlong_punishment`] as a reward function of any TRL trainer; picklable, with the same errors. The paper's
    buffer is a fifth of the trainer's `max_completion_length`: `SoftOverlongPunishment(n, n // 5)`.
    """

    __name__ = "soft_overlong_punishment"

    def __init__(self, max_completion_length: int, buffer_length: int, penalty_factor: float = 1.0) -> None:
        check_overlong_buffer(max_completion_length, buffer_length, penalty_factor)
        self.max_completion_length = max_completion_length
        self.buffer_length = buffer_length
        self.penalty_factor = penalty_factor

    def __call__(
        self, completion_ids: list[list[int]], completion_lengths: list[int] | None = None, **kwargs: Any
    ) -> list[float]:
        """`completion_lengths`, where given, counts what the model itself wrote: tool results are not its own."""
        lengths = [len(ids) for ids in completion_ids] if completion_lengths is None else completion_lengths
        return soft_overlong_punishment(
            lengths,
            max_length=self.max_completion_length,
            buffer_length=self.buffer_length,
            penalty_factor=self.penalty_factor,
        )

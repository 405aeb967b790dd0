# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Soft overlong punishment: equation 13 of the DAPO paper (arXiv 2503.14476), with a factor and a lower bound."""

from collections.abc import Iterable
from typing import Any


def check_overlong_buffer(max_length: int, buffer_length: int, penalty_factor: float) -> None:
    if buffer_length <= 0:
        raise ValueError(
            f"`buffer_length` must be at least 1, got {buffer_length}. The paper uses a fifth of the longest "
            f"completion, which is {max_length // 5} here."
        )
    if buffer_length > max_length:
        raise ValueError(
            f"`buffer_length` ({buffer_length} tokens) must not be larger than the longest completion ({max_length} "
            f"tokens). The paper uses a fifth of the latter, which is {max_length // 5} here."
        )
    if not penalty_factor >= 0.0:
        raise ValueError(
            f"`penalty_factor` must not be negative, got {penalty_factor}: overlong completions would be rewarded. "
            "Set a number of at least 0."
        )


def soft_overlong_punishment(
    lengths: Iterable[int], *, max_length: int, buffer_length: int, penalty_factor: float = 1.0
) -> list[float]:
    r"""
    Return the punishment of equation 13 of the DAPO paper for completions of these lengths.

    A length is the number of tokens that the model wrote, without padding. The punishment is 0 for lengths up to
    `max_length - buffer_length`, falls linearly to `-penalty_factor` at `max_length`, and stays there for longer
    completions.

    Raises:
        ValueError: If the buffer is empty or longer than `max_length`, or the factor is negative.
    """
    check_overlong_buffer(max_length, buffer_length, penalty_factor)
    # The excess is computed first, so that short completions get 0.0 and not -0.0.
    excesses = (min(max(length - (max_length - buffer_length), 0), buffer_length) for length in lengths)
    return [-penalty_factor * (excess / buffer_length) if excess else 0.0 for excess in excesses]


class SoftOverlongPunishment:
    """
    [`soft_overlong_punishment`] as a reward function for any TRL trainer.

    The paper's buffer is a fifth of the trainer's `max_completion_length`: `SoftOverlongPunishment(n, n // 5)`. Its
    objects can be pickled. Arguments are checked as in [`soft_overlong_punishment`].
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
        """
        Return the punishment of each completion.

        `completion_lengths` are the numbers of tokens that the model itself wrote, without the results of tools. They
        default to the lengths of `completion_ids`.
        """
        lengths = [len(ids) for ids in completion_ids] if completion_lengths is None else completion_lengths
        return soft_overlong_punishment(
            lengths,
            max_length=self.max_completion_length,
            buffer_length=self.buffer_length,
            penalty_factor=self.penalty_factor,
        )

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The rule for when two rewards count as equal, used wherever rewards are compared."""

from typing import TypeVar


TOLERANCE = 1e-6  # rewards that differ by at most this count as equal, even if they are that small themselves
# TRL stores rewards and weights in float32, which rounds each with a relative error of up to 2^-24. A weighted reward
# is rounded twice, and two of them are compared, which makes four such errors.
ROUNDING = 2.0**-22

Size = TypeVar("Size")  # a number, or a tensor of them


def margin(size: Size, tolerance: float = TOLERANCE) -> Size:
    """
    Return the difference up to which two rewards count as equal, if they have this size.

    The size of a weighted sum of rewards is the sum of the absolute values of its terms, since the rounding error is
    proportional to that.
    """
    return tolerance + ROUNDING * size  # type: ignore[operator, return-value]

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""When two rewards are equal: the one rule for whatever compares rewards. Pure."""

from typing import TypeVar


TOLERANCE = 1e-6  # rewards that differ by no more than this are equal, however small they are
# TRL holds rewards and weights in float32, which rounds each to within 2^-24 of its size. A weighted reward is rounded
# twice, and two of them are compared.
ROUNDING = 2.0**-22

Size = TypeVar("Size")  # a number, or a tensor of them


def margin(size: Size, tolerance: float = TOLERANCE) -> Size:
    """
    Return by how much rewards of a size must differ to be different.

    The size of a sum is that of the absolute values that were added: it is what rounding is relative to.
    """
    return tolerance + ROUNDING * size  # type: ignore[operator, return-value]

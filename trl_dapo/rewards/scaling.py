# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Linear rescaling of rewards, as NeMo RL's `reward_scaling` does it."""

import math
from collections.abc import Iterable

from ..settings.ranges import why_unscalable


def scale_reward(
    values: Iterable[float | None], source_min: float, source_max: float, target_min: float, target_max: float
) -> list[float]:
    """
    Clamp rewards to `[source_min, source_max]`, then map that range linearly to `[target_min, target_max]`.

    `None` and NaN, which mean "no reward" in TRL, become NaN.

    Raises:
        ValueError: If a bound is infinite or a range is empty.
    """
    if (message := why_unscalable(source_min, source_max, target_min, target_max)) is not None:
        raise ValueError(message)
    scaled = []
    for value in values:
        if value is None or math.isnan(value):
            scaled.append(math.nan)
            continue
        share = (min(max(float(value), source_min), source_max) - source_min) / (source_max - source_min)
        # This form gives exactly `target_min` and `target_max` at the ends. `target_min + share * width` might not.
        scaled.append(target_min * (1.0 - share) + target_max * share)
    return scaled

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Which examples have an `id`: one meaning for the prompt stream and for the scores."""

import math
from collections.abc import Mapping
from typing import Any


def has_id(example: Mapping[str, Any]) -> bool:
    """Whether an example's `id` says which it is: `None` and NaN, which tables fill in, and empty text do not."""
    id_ = example.get("id")
    return not (id_ is None or (isinstance(id_, str) and not id_) or (isinstance(id_, float) and math.isnan(id_)))

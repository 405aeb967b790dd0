# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""What a run will need, before a GPU is rented: `trl-dapo plan`."""

from .planning import Plan, plan
from .text import suggest


__all__ = ["Plan", "plan", "suggest"]

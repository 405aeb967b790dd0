# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The environment variables of a launcher. Needs only the standard library."""

import os


def is_set(name: str) -> bool:
    """Whether a variable has a value. An empty one has none: shells and job schedulers leave such variables behind."""
    return bool(os.environ.get(name, "").strip())


def num_processes_of(name: str) -> int:
    """
    Return the number of processes that `WORLD_SIZE` or `LOCAL_WORLD_SIZE` states: 1 if the variable is not set, is
    empty, or is not a number of processes (`0`, or text).
    """
    value = os.environ.get(name, "").strip()
    return max(1, int(value)) if value.isdecimal() else 1

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Environment variables that a launcher sets. Needs only the standard library."""

import os


def is_set(name: str) -> bool:
    """
    Return whether an environment variable has a value.

    An empty variable counts as not set, because shells and job schedulers leave empty variables behind.
    """
    return bool(os.environ.get(name, "").strip())


def num_processes_of(name: str) -> int:
    """
    Return the number of processes in `WORLD_SIZE` or `LOCAL_WORLD_SIZE`.

    The number is 1 if the variable is not set, is empty, or is not a number of processes (`0`, or text).
    """
    value = os.environ.get(name, "").strip()
    return max(1, int(value)) if value.isdecimal() else 1

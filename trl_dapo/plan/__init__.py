# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
What a run will need, before a GPU is rented: `trl-dapo plan`.

    hardware   the GPUs that are known
    models     a model's sizes, from its config alone
    recipe     a recipe with every default, its header, how it is sharded
    memory     pure: bytes
    speed      pure: seconds
    batches, training, sampling   of a rollout
    planning   a plan of all that, and whether it fits
    suggestions  the settings that would help
    page       what is printed
"""

from .planning import Plan, plan
from .suggestions import suggest


__all__ = ["Plan", "plan", "suggest"]

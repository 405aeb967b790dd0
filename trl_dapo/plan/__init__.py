# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Estimates of a run without its machine: memory, batches and tokens (`trl-dapo plan`)."""

from .planning import Plan, plan


__all__ = ["Plan", "plan"]

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Evaluation of a local model or a server: avg@k, pass@k and maj@k with intervals, and comparison of two models."""

from .commands import compare, print_comparison
from .run import evaluate
from .scores import EvaluationScores
from .statistics import Estimate, avg_at_k, estimate_mean, maj_at_k, pass_at_k


__all__ = [
    "Estimate",
    "EvaluationScores",
    "avg_at_k",
    "compare",
    "estimate_mean",
    "evaluate",
    "maj_at_k",
    "pass_at_k",
    "print_comparison",
]

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The ladder of recipes/ablation, which is a script, for the studies that climb it again or share its task."""

import sys
from pathlib import Path


FOLDER = Path(__file__).parents[1] / "recipes" / "ablation"
sys.path.append(str(FOLDER))

import run  # noqa: E402
import task  # noqa: E402


__all__ = ["FOLDER", "run", "task"]

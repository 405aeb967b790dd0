# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The command line: `trl-dapo quickstart | train | plan | recipes | new | fetch | eval | compare | report`."""

from .entry_point import main


__all__ = ["main"]

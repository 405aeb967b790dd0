# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""A run's files and terminal output, the checks at its start, and the conditions that end it."""

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks of settings: ranges, batch sizes, rules, help texts, recipes and command lines. Does not need torch."""

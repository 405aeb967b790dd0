# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""What settings may be: ranges, batch sizes, rules, help texts, recipes and command lines. Needs no torch."""

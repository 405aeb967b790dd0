# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""DAPO inside other frameworks: a file for each, which imports it."""

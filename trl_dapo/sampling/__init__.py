# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Dynamic sampling: which prompts to sample, which groups to train on, and what to keep for the next rollout."""

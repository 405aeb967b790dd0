# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The update phase, from a rollout to its optimizer steps: rows, micro-batches, the loss and its metrics."""

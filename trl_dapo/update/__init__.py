# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""From a rollout to its optimizer steps: rows, micro-batches, the loss, the metrics."""

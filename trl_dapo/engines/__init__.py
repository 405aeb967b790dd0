# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The seam into TRL, vLLM's server, a rollout ahead, and how LoRA adapters reach vLLM."""

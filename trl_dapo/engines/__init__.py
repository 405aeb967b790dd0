# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Sampling through TRL and vLLM's server, rollouts ahead, LoRA adapters in vLLM, and checkpoints."""

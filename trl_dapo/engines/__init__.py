# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
Mixins of the trainer: sampling through TRL, the vLLM server, rollouts ahead, LoRA adapters in vLLM, and checkpoints.
"""

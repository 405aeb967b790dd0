# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""How the trainer samples through TRL, vLLM's server, rollouts ahead, LoRA adapters in vLLM, and checkpoints."""

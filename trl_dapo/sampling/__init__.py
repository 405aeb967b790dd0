# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Dynamic sampling: which prompts are sampled, which groups train, and what is kept from one rollout to the next."""

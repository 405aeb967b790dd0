# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""What samples completions, and record and replay, vLLM's server and adapters, a rollout ahead."""

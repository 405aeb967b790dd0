# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
Old log-probabilities: those of the policy that sampled a token. NaN, or no tensor at all, means the present policy,
which the pass with gradient tells of. This is the one place that says so.
"""

from collections.abc import Sequence

import numpy as np
import torch


PRESENT_POLICY = torch.nan


def of_present_policy(completion_ids: torch.Tensor) -> torch.Tensor:
    """Old log-probabilities of completions that the present policy sampled."""
    return torch.full_like(completion_ids, PRESENT_POLICY, dtype=torch.float32)


def fill_old_logps(old_logps: torch.Tensor | None, logps: torch.Tensor) -> torch.Tensor:
    """`old_logps`, with the present policy's `logps` (detached) where it sampled; both of shape `(B, T)`."""
    if old_logps is None:
        return logps.detach()
    return torch.where(torch.isnan(old_logps), logps.detach(), old_logps)


def restore_old_logps(rollout: dict, old_logps: Sequence[np.ndarray | None]) -> None:
    """Gives rows of earlier policies, in place, the log-probabilities they were sampled with; `None` for others."""
    old = rollout.setdefault("old_per_token_logps", of_present_policy(rollout["completion_ids"]))
    for i, row in enumerate(old_logps):
        if row is not None:
            old[i, : len(row)] = torch.from_numpy(row)
            if "importance_sampling_ratio" in rollout:  # from the engine to the policy that sampled: no longer known
                rollout["importance_sampling_ratio"][i] = 1.0

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
Old log-probabilities: those of the policy that sampled a token. This one place says that NaN means the present policy.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


PRESENT_POLICY = torch.nan  # as no tensor at all does: the pass with gradient tells of it


def of_present_policy(completion_ids: Tensor) -> Tensor:
    """Old log-probabilities of completions that the present policy sampled."""
    return torch.full_like(completion_ids, PRESENT_POLICY, dtype=torch.float32)


def fill_old_logps(old_logps: Tensor | None, logps: Tensor) -> Tensor:
    """`old_logps`, with the present policy's `logps` (detached) where it sampled; both of shape `(B, T)`."""
    if old_logps is None:
        return logps.detach()
    return torch.where(torch.isnan(old_logps), logps.detach(), old_logps)


def restore_old_logps(rollout: dict, old_logps: Sequence[np.ndarray | None]) -> None:
    """Gives rows of earlier policies, in place, the log-probabilities they were sampled with; `None` for others."""
    put_rows(rollout.setdefault("old_per_token_logps", of_present_policy(rollout["completion_ids"])), old_logps)


def put_rows(logps: Tensor, rows: Sequence[np.ndarray | None]) -> None:
    """Write rows over the beginning of those of `logps`, `(B, T)`, in place. `None` leaves a row unchanged."""
    for i, row in enumerate(rows):
        if row is not None:
            logps[i, : len(row)] = torch.from_numpy(row)

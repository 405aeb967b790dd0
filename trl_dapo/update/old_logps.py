# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Old log-probabilities: those of the policy that sampled a token. NaN marks tokens of the present policy.

The meaning of NaN is known only in this file.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


# Marks tokens of the present policy. Their old log-probabilities are those that the pass with gradient computes. If a
# rollout has no tensor of old log-probabilities, all its tokens are of the present policy.
PRESENT_POLICY = torch.nan


def of_present_policy(completion_ids: Tensor) -> Tensor:
    """Return the old log-probabilities of completions that the present policy sampled: all marked."""
    return torch.full_like(completion_ids, PRESENT_POLICY, dtype=torch.float32)


def fill_old_logps(old_logps: Tensor | None, logps: Tensor) -> Tensor:
    """Return `old_logps` with marked tokens replaced by the present policy's `logps`. Both have the shape `(B, T)`."""
    if old_logps is None:
        return logps.detach()
    return torch.where(torch.isnan(old_logps), logps.detach(), old_logps)


def restore_old_logps(rollout: dict, old_logps: Sequence[np.ndarray | None]) -> None:
    """
    Write the old log-probabilities of rows that earlier policies sampled into a rollout. `old_logps` is `None` for the
    other rows.
    """
    put_rows(rollout.setdefault("old_per_token_logps", of_present_policy(rollout["completion_ids"])), old_logps)


def put_rows(logps: Tensor, rows: Sequence[np.ndarray | None]) -> None:
    """Overwrite the beginning of each row of `logps`, `(B, T)`, in place. `None` keeps a row unchanged."""
    for i, row in enumerate(rows):
        if row is not None:
            logps[i, : len(row)] = torch.from_numpy(row)

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The seam into TRL: its way from prompts to tensors, run in two halves.

TRL turns prompts into tensors in one private method, `_generate_and_score_completions`. Each round of dynamic sampling
runs it inside [`Seam.recording`], which keeps what `_generate` and `_calculate_rewards` returned and pays for no
forward pass. Then it runs once more inside [`Seam.replaying`], on the rows that train, and those two methods hand back
what was recorded.
"""

from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from trl.trainer.utils import pad

from ..sampling.rollouts import Rows


if TYPE_CHECKING:
    from ..trainer import DAPOTrainer


@dataclass
class Recorded:
    """
    What TRL made of one round.

    Args:
        rows ([`Rows`], *optional*):
            This rank's rows.
        truncated (`list[bool]`):
            Whether the length limit cut each of them off.
        rewards (`torch.Tensor` of shape `(B, F)`, *optional*):
            Rewards of all ranks' rows.
        metrics (`dict[str, list[float]]`):
            What TRL measured.
        logs (`dict`):
            What TRL put into the table of completions.
    """

    rows: Rows | None = None
    truncated: list[bool] = field(default_factory=list)
    rewards: torch.Tensor | None = None
    metrics: dict[str, list[float]] = field(default_factory=dict)
    logs: dict = field(default_factory=dict)


class _NoReset:
    """Stands in for the environments of completed rollouts, which must not be reset a second time."""

    def reset(self, **kwargs: Any) -> None:
        """Does nothing."""


class Seam:
    """
    Which half is running, if any, and what it keeps or hands back.

    Args:
        recorded ([`Recorded`], *optional*):
            Filled while a round is recorded.
        replayed (`tuple`, *optional*):
            What `_generate` and `_calculate_rewards` hand back while a batch is replayed.
    """

    def __init__(self) -> None:
        self.recorded: Recorded | None = None
        self.replayed: tuple[tuple, torch.Tensor] | None = None

    @contextmanager
    def recording(self, trainer: "DAPOTrainer") -> Iterator[Recorded]:
        """Keeps what TRL makes of one round, and keeps it out of the trainer's own metrics and logs."""
        self.recorded = recorded = Recorded()
        logs, trainer._logs = trainer._logs, _empty_logs(trainer._logs)
        try:
            with _scratch_metrics(trainer) as recorded.metrics:
                yield recorded
            recorded.logs = trainer._logs
        finally:
            self.recorded, trainer._logs = None, logs

    @contextmanager
    def replaying(self, trainer: "DAPOTrainer", rows: Rows, rewards: torch.Tensor) -> Iterator[dict[str, list[float]]]:
        """Hands TRL the rows as if they had just been sampled together; yields what it measures of them."""
        self.replayed = rows.as_generated(), rewards
        try:
            with _no_environment_resets(trainer, len(rows)), _scratch_metrics(trainer) as metrics:
                yield metrics
        finally:
            self.replayed = None


@contextmanager
def _no_environment_resets(trainer: "DAPOTrainer", num_rows: int) -> Iterator[None]:
    if trainer.environment_factories is None:
        yield
        return
    pool, environments = trainer._environment_pool, trainer.environments
    trainer._environment_pool = {name: [_NoReset()] * num_rows for name in pool}
    try:
        yield
    finally:
        # As TRL leaves them: those of the batch that was sampled last.
        trainer._environment_pool, trainer.environments = pool, environments


@contextmanager
def _scratch_metrics(trainer: "DAPOTrainer") -> Iterator[dict[str, list[float]]]:
    metrics, trainer._metrics = trainer._metrics, {"train": defaultdict(list), "eval": defaultdict(list)}
    try:
        yield trainer._metrics["train"]
    finally:
        trainer._metrics = metrics


@contextmanager
def keeping_pending_logs(trainer: "DAPOTrainer") -> Iterator[None]:
    """Forgets what reward functions log meanwhile of rows that are none."""
    pending = trainer._pending_extra_logs, trainer._pending_metrics
    trainer._pending_extra_logs, trainer._pending_metrics = defaultdict(list), defaultdict(list)
    try:
        yield
    finally:
        trainer._pending_extra_logs, trainer._pending_metrics = pending


def _empty_logs(logs: dict) -> dict:
    """The structure of TRL's `_logs`, empty and without a bound."""
    return {name: defaultdict(list) if isinstance(value, defaultdict) else deque() for name, value in logs.items()}


def policy_logps(trainer: "DAPOTrainer", rows: Rows) -> list[np.ndarray]:
    """Log-probabilities of the rows' completions under the present policy, one array a row."""
    device, pad_token_id = trainer.accelerator.device, trainer._tokenizer.pad_token_id
    ids = [torch.tensor(row) for row in rows.completion_ids]
    prompt_ids = pad([torch.tensor(row) for row in rows.prompt_ids], pad_token_id, padding_side="left")
    prompt_mask = pad([torch.ones(len(row)) for row in rows.prompt_ids], 0, padding_side="left")
    completion_ids, mask = pad(ids, pad_token_id), pad([torch.ones(len(row)) for row in ids], 0)
    with torch.no_grad():
        logps, _, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model,
            torch.cat([prompt_ids, completion_ids], dim=1).long().to(device),
            torch.cat([prompt_mask, mask], dim=1).long().to(device),
            completion_ids.size(1),
            batch_size=trainer.args.per_device_train_batch_size,
        )
    return [row[: len(row_ids)].float().cpu().numpy() for row, row_ids in zip(logps, ids, strict=True)]


def restore_old_logps(rollouts: dict, old_logps: list[np.ndarray | None]) -> None:
    """Gives carried rows the log-probabilities they were sampled with; NaN stands for the present policy's."""
    old = rollouts.setdefault(
        "old_per_token_logps", torch.full_like(rollouts["completion_ids"], torch.nan, dtype=torch.float32)
    )
    for i, row in enumerate(old_logps):
        if row is not None:
            old[i, : len(row)] = torch.from_numpy(row)
            if "importance_sampling_ratio" in rollouts:  # from the engine to the policy that sampled: no longer known
                rollouts["importance_sampling_ratio"][i] = 1.0

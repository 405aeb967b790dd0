# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Recording and replaying of the method in which TRL samples, scores and builds tensors.

This method is `_generate_and_score_completions`. Each round of dynamic sampling runs it within
[`RecordReplayMixin._recording`], which stores the results of `_generate` and `_calculate_rewards` and skips the
forward passes. When the batch is full, the method runs once more within [`RecordReplayMixin._replaying`], on the rows
that train. Then `_generate` and `_calculate_rewards` return the stored results, and TRL builds the tensors from these.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..sampling.rounds import RoundRecording
from ..sampling.rows import Row, as_generated, rows_from_generated
from ..update.old_logps import put_rows
from ..update.patching import patched
from ..update.typed_trainer import TypedGRPOTrainer
from .generation import own_lengths


class RecordReplayMixin(TypedGRPOTrainer):
    """Records the results of TRL's method round by round, and replays it on the rows that train."""

    # Defined by other parts of the trainer.
    _completion_lengths: Sequence[int]
    _cut_off: Callable[[tuple], list[bool]]
    _trains_in_one_step: bool
    _rows_cut_off: Sequence[bool]
    _sample_completions: Callable[[list], tuple]

    _round_recording: RoundRecording | None = None
    _replayed: tuple[tuple, Tensor] | None = None  # results of `_generate` and `_calculate_rewards` during a replay
    # Log-probabilities of rows that an earlier policy sampled. They replace those of TRL's next forward pass.
    _earlier_logps: Sequence | None = None

    @contextmanager
    def _recording(self, score: Callable[..., Tensor] | None = None) -> Iterator[RoundRecording]:
        """Record what TRL samples and scores in one round, without changing the trainer's metrics and logs."""
        logs, metrics = empty_logs(self._logs), empty_metrics()
        recording = RoundRecording(score, metrics=metrics["train"])
        # If a reward function fails, values that others have logged by then must not be added to the next round.
        pending: dict[str, Any] = {"_pending_extra_logs": defaultdict(list), "_pending_metrics": defaultdict(list)}
        with patched(self, _round_recording=recording, _logs=logs, _metrics=metrics, **pending):
            yield recording

    @contextmanager
    def _replaying(self, rows: list[Row], rewards: Tensor) -> Iterator[dict[str, list[float]]]:
        """Give TRL the rows as if they had just been sampled together, and yield the metrics that TRL computes."""
        metrics = empty_metrics()
        environments: AbstractContextManager[None] = nullcontext()
        if self.environment_factories is not None:
            # The replay must not reset environments again, and must not change `self.environments`.
            stand_in = SimpleNamespace(reset=lambda **kwargs: None)
            pool = {name: [stand_in] * len(rows) for name in self._environment_pool}
            environments = patched(self, _environment_pool=pool, environments=self.environments)
        # If TRL corrects for the difference between engine and policy, its first pass computes the old
        # log-probabilities.
        corrects = self.use_vllm and self.vllm_importance_sampling_correction and not self._trains_in_one_step
        earlier = [row.old_logps for row in rows] if corrects else None
        with (
            environments,
            patched(self, _replayed=(as_generated(rows), rewards), _earlier_logps=earlier, _metrics=metrics),
        ):
            yield metrics["train"]

    def _generate(self, prompts: list) -> tuple:
        if self._replayed is not None:
            self._rows_cut_off = self._cut_off(self._replayed[0])
            return self._replayed[0]
        generated = self._sample_completions(prompts)
        self._completion_lengths = own_lengths(generated)
        self._rows_cut_off = self._cut_off(generated) if self._initialized else []
        if self._round_recording is not None:
            environments = None if self.environment_factories is None else self._batch_environments
            self._round_recording.rows = rows_from_generated(generated, prompts, environments)
            self._round_recording.lengths = self._completion_lengths
            self._round_recording.truncated = self._rows_cut_off
        return generated

    def _calculate_rewards(self, *batch: Any) -> Tensor:  # TRL passes its four arguments by position
        if self._replayed is not None:
            return self._replayed[1]
        if self._round_recording is not None and self._round_recording.score is not None:
            return self._round_recording.score(*batch)
        return self._score_completions(*batch)

    def _score_completions(self, *batch: Any) -> Tensor:
        """Call the reward functions. Other parts of the trainer override this instead of `_calculate_rewards`."""
        return super()._calculate_rewards(*batch)

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> tuple:
        if self._round_recording is not None:  # not used: the round is only sampled and scored
            _, input_ids, _, logits_to_keep, *_ = args
            return torch.zeros(len(input_ids), logits_to_keep, device=input_ids.device), None, None
        earlier, self._earlier_logps = self._earlier_logps, None
        result = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        put_rows(result[0], earlier or ())
        return result


def empty_metrics() -> dict[str, defaultdict[str, list[float]]]:
    """Return empty metrics with the structure of TRL's `_metrics`."""
    return {"train": defaultdict(list), "eval": defaultdict(list)}


def empty_logs(logs: dict) -> dict:
    """Return empty logs with the structure of TRL's `_logs`, but without a maximum length."""
    return {name: defaultdict(list) if isinstance(value, defaultdict) else deque() for name, value in logs.items()}

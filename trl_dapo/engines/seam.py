# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The seam into TRL: its way from prompts to tensors, run in two halves.

TRL turns prompts into tensors in one private method, `_generate_and_score_completions`. Each round of dynamic sampling
runs it inside [`RecordReplay.recording`], which keeps what `_generate` and `_calculate_rewards` returned and pays for no
forward pass. Then it runs once more inside [`RecordReplay.replaying`], on the rows that train, and those two methods
hand back what was recorded.
"""

import copy
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from trl import GRPOTrainer
from trl.trainer.utils import pad

from ..sampling.rollouts import Rows


@contextmanager
def swapped(owner: Any, **values: Any) -> Iterator[None]:
    """Other values for the attributes of an object or the names of a module, for the time of the block."""
    usual = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in usual.items():
            setattr(owner, name, value)


@dataclass
class Recorded:
    """What TRL made of one round."""

    rows: Rows | None = None  # of this rank
    truncated: list[bool] = field(default_factory=list)  # whether the length limit cut each of them off
    rewards: torch.Tensor | None = None  # of all ranks' rows, `(B, F)`
    metrics: dict[str, list[float]] = field(default_factory=dict)
    logs: dict = field(default_factory=dict)  # for the table of completions


class _NoReset:
    """Stands in for the environments of completed rollouts, which must not be reset a second time."""

    def reset(self, **kwargs: Any) -> None:
        """Does nothing."""


class RecordReplay(GRPOTrainer):
    """
    [`~trl.GRPOTrainer`] whose way from prompts to tensors can be recorded and replayed.

    What samples and what scores is overridden in `_sample` and `_score`, in place of TRL's `_generate` and
    `_calculate_rewards`, which know the two halves.
    """

    # In a trainer that was made without `__init__` neither half runs.
    _recorded: Recorded | None = None
    _replayed: tuple[tuple, torch.Tensor] | None = None  # what `_generate` and `_calculate_rewards` hand back
    _completion_lengths: list[int] = []  # noqa: RUF012  # tokens of the model's own, of this rank's last completions

    @contextmanager
    def recording(self) -> Iterator[Recorded]:
        """Keeps what TRL makes of one round, and keeps it out of the trainer's own metrics and logs."""
        recorded, logs, metrics = Recorded(), _empty_logs(self._logs), _empty_metrics()
        recorded.metrics = metrics["train"]
        with swapped(self, _recorded=recorded, _logs=logs, _metrics=metrics):
            yield recorded
        recorded.logs = logs

    @contextmanager
    def replaying(self, rows: Rows, rewards: torch.Tensor) -> Iterator[dict[str, list[float]]]:
        """Hands TRL the rows as if they had just been sampled together; yields what it measures of them."""
        metrics, environments = _empty_metrics(), nullcontext()
        if self.environment_factories is not None:
            # Left as TRL leaves them: those of the batch that was sampled last.
            pool = {name: [_NoReset()] * len(rows) for name in self._environment_pool}
            environments = swapped(self, _environment_pool=pool, environments=self.environments)
        with environments, swapped(self, _replayed=(rows.as_generated(), rewards), _metrics=metrics):
            yield metrics["train"]

    def keeping_pending_logs(self) -> Any:
        """Forgets what reward functions log meanwhile of rows that are none."""
        return swapped(self, _pending_extra_logs=defaultdict(list), _pending_metrics=defaultdict(list))

    def _generate(self, prompts: list) -> tuple:
        if self._replayed is not None:
            return self._replayed[0]
        generated = self._sample(prompts)
        _, completion_ids, tool_mask, *_ = generated
        self._completion_lengths = [sum(mask) for mask in tool_mask] if tool_mask else list(map(len, completion_ids))
        if self._recorded is not None:
            ends = {*self.eos_token_ids, self._tokenizer.pad_token_id}
            environments = None if self.environment_factories is None else self._batch_environments
            self._recorded.rows = Rows.from_generated(generated, prompts, environments)
            self._recorded.truncated = [ids[-1] not in ends for ids in completion_ids]
        return generated

    def _sample(self, prompts: list) -> tuple:
        return super()._generate(prompts)

    def _calculate_rewards(
        self, inputs: list[dict], prompts: list, completions: list, completion_ids_list: list[list[int]]
    ) -> torch.Tensor:
        if self._replayed is not None:
            return self._replayed[1]
        rewards = self._score(inputs, prompts, completions, completion_ids_list)
        if self._recorded is not None:
            self._recorded.rewards = rewards
        return rewards

    def _score(
        self, inputs: list[dict], prompts: list, completions: list, completion_ids_list: list[list[int]]
    ) -> torch.Tensor:
        return super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)

    def _get_per_token_logps_and_entropies(
        self,
        model: torch.nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        if self._recorded is not None:  # nobody reads these: the round is only sampled and scored
            return torch.zeros(len(input_ids), logits_to_keep, device=input_ids.device), None, None
        return super()._get_per_token_logps_and_entropies(
            model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
        )

    def policy_logps(self, rows: Rows) -> list[np.ndarray]:
        """Log-probabilities of the rows' completions under the present policy, one array a row."""
        device, pad_token_id = self.accelerator.device, self._tokenizer.pad_token_id
        ids = [torch.tensor(row) for row in rows.completion_ids]
        prompt_ids = pad([torch.tensor(row) for row in rows.prompt_ids], pad_token_id, padding_side="left")
        prompt_mask = pad([torch.ones(len(row)) for row in rows.prompt_ids], 0, padding_side="left")
        completion_ids, mask = pad(ids, pad_token_id), pad([torch.ones(len(row)) for row in ids], 0)
        with torch.no_grad():
            logps, _, _ = self._get_per_token_logps_and_entropies(
                self.model,  # type: ignore[arg-type]  # set once it is constructed
                torch.cat([prompt_ids, completion_ids], dim=1).long().to(device),
                torch.cat([prompt_mask, mask], dim=1).long().to(device),
                completion_ids.size(1),
                batch_size=self.args.per_device_train_batch_size,
            )
        return [row[: len(row_ids)].float().cpu().numpy() for row, row_ids in zip(logps, ids, strict=True)]

    @contextmanager
    def sampling_with(self, **parameters: float) -> Iterator[None]:
        """Samples with other parameters than those of training."""
        if self.use_vllm:
            with swapped(self.vllm_generation, **parameters):
                yield
            return
        config = copy.deepcopy(self.generation_config)
        config.update(**parameters)
        with swapped(self, generation_config=config, generation_kwargs={**self.generation_kwargs, **parameters}):
            try:
                yield
            finally:
                self.model.eval()  # TRL's continuous batching leaves it in training mode

    @contextmanager
    def awake(self) -> Iterator[None]:
        """
        Keeps an engine that sleeps between its calls awake for all calls of the block: waking takes all weights, and
        so each of them would push all weights.
        """
        args = self.args
        if not (self.use_vllm and args.vllm_mode == "colocate" and args.vllm_enable_sleep_mode):
            yield
            return
        engine = self.vllm_generation
        # As TRL before its first call, which then finds the engine as it wants it.
        engine.sync_weights()
        self._last_loaded_step = self.state.global_step
        engine.llm.wake_up(tags=["kv_cache"])
        engine.enable_sleep_mode = False
        try:
            yield
        finally:
            engine.enable_sleep_mode = True
            engine.llm.sleep(level=2)
            engine._llm_weights_sleeping = True


def _empty_metrics() -> dict[str, dict[str, list[float]]]:
    return {"train": defaultdict(list), "eval": defaultdict(list)}


def _empty_logs(logs: dict) -> dict:
    """The structure of TRL's `_logs`, empty and without a bound."""
    return {name: defaultdict(list) if isinstance(value, defaultdict) else deque() for name, value in logs.items()}

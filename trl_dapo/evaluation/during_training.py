# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Evaluation during training: TRL's evaluation loop, with avg@k, pass@k and maj@k added to its metrics."""

import math
from typing import Any

from accelerate.utils import gather_object
from torch import Tensor
from torch.utils.data import DataLoader
from transformers.trainer_utils import EvalLoopOutput, has_length
from transformers.utils import logging

from ..models import context_length
from ..rewards.dapo_math import completion_text
from ..rewards.names import find_answers
from ..rewards.task_reward import SCORES_LEFT_OUT, TaskReward
from ..run.stopwatch import Stopwatch
from ..sampling.example_names import content_digest, problem_source
from ..update.patching import patched
from ..update.typed_trainer import TypedGRPOTrainer
from .scores import EvaluationScores, Prefetch, rows_that_fit


logger = logging.get_logger(__name__)


class EvaluationMixin(TypedGRPOTrainer):
    """Adds avg@k, pass@k and maj@k to evaluations during training."""

    # Set by other parts of the trainer.
    _engine_schedules: bool
    _prefetch: Prefetch
    _task: TaskReward
    stopwatch: Stopwatch

    _scores: EvaluationScores

    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """
        Run TRL's evaluation loop, and add the scores to its metrics.

        If the engine supports it, the completions of as many batches as possible are sampled in one call.
        """
        dataset, how_much = getattr(dataloader, "dataset", None), ""
        if has_length(dataset):
            how_much = f"{len(dataset)} prompts x {self.num_generations_eval} in {len(dataloader)} batches"
            self._warn_of_rows_counted_twice(len(dataset) * self.num_generations_eval)
        self._scores.begin(len(dataset) if has_length(dataset) else None)
        self._metrics["eval"].clear()
        if self._engine_schedules and not (
            self.tools or self.environment_factories or self.rollout_func or self._is_vlm
        ):
            round_size = self.args.dynamic_sampling_max_round_size
            if round_size:
                num_rows = round_size * self.num_generations
            else:
                longest = self.max_completion_length or self.args.vllm_max_model_length
                num_rows = rows_that_fit(longest or context_length(self.model.config))
            dataloader = self._prefetch.over(dataloader, num_rows // self.accelerator.num_processes)
        with self.stopwatch.timing("evaluation", how_much):
            output = super().evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )
        scores = self._scores.means() if self._task.has_correctness else {}
        assert output.metrics is not None
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in scores.items()})
        return output

    def _warn_of_rows_counted_twice(self, num_completions: int) -> None:
        """Warn if TRL's means count some rows twice, because the last batch of several processes is not full."""
        num_processes = self.accelerator.num_processes
        per_batch = self.args.per_device_eval_batch_size * num_processes
        if num_processes > 1 and num_completions % per_batch and self.accelerator.is_main_process:
            logger.warning_once(
                f"The {num_completions} completions of an evaluation are not a multiple of the batch of {per_batch}, "
                f"so {-num_completions % per_batch} are sampled twice. `eval_reward` and the other means of TRL count "
                "these twice. avg@k, pass@k and maj@k do not. To avoid it, choose `per_device_eval_batch_size` so "
                "that the batch divides the completions."
            )

    def _evaluated_rows(self, inputs: list[dict], completions: list) -> list[tuple]:
        """Return source, digest and completion of each row of a batch, before a reward function can change the row."""
        if not self._task.has_correctness:
            return []
        return [
            (problem_source(example), content_digest(example), completion_text(completion))
            for example, completion in zip(inputs, completions, strict=True)
        ]

    def _remember_evaluated(self, own_rows: list[tuple], rewards: Tensor, logged: dict[str, list]) -> None:
        """Add the verdicts and answers of a batch to the scores, if the rewards say which completions are correct."""
        if not self._task.has_correctness:
            logger.warning_once(SCORES_LEFT_OUT)
            return
        texts = [text for _, _, text in own_rows]
        answers, states_answers = find_answers(self._task.names, logged, texts)
        rows = gather_object(
            [(source, digest, answer) for (source, digest, _), answer in zip(own_rows, answers, strict=True)]
        )
        rewards = self._task.scaled(rewards, self.args.reward_scaling).cpu()
        verdicts = zip(self._task.weighted_sum(rewards).tolist(), self._task.is_correct(rewards).tolist(), strict=True)
        correct = [None if math.isnan(reward) else is_correct for reward, is_correct in verdicts]
        problems = [(source, digest) for source, digest, _ in rows]
        self._scores.add(problems, [answer for _, _, answer in rows], correct, states_answers)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """Return TRL's data loader with its last batch: `dataloader_drop_last` is meant for training."""
        with patched(self.args, dataloader_drop_last=False):
            return super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        with patched(self.args, dataloader_drop_last=False):
            return super().get_test_dataloader(test_dataset)

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""DAPO (arXiv 2503.14476), Algorithm 1, on top of TRL's `GRPOTrainer`.

    for each rollout batch:
        sample G completions a prompt and score them        _sample_round
        keep the groups that are neither all right nor all   _drop_reasons, Sampler
        wrong; not full: sample again
        advantages within each group                        GRPOTrainer, on the rows that were kept (_train_on)
        for each optimizer step:
            Clip-Higher, token mean                         UpdatePhase

TRL turns prompts into tensors in one private method, which is wrapped, not copied: see `seam.py`.
"""

import copy
import math
import sys
import textwrap
import time
import zlib
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from datasets import IterableDataset
from peft import PeftModel
from torch.utils.data import DataLoader
from transformers import PreTrainedModel
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, EvalLoopOutput, TrainOutput, has_length
from transformers.utils import logging
from trl.trainer.grpo_trainer import RewardFunc

from .config import DAPOConfig
from .construction import (
    add_overlong_punishment,
    check_continuous_batching,
    check_group_filter,
    check_rewards_and_data,
    check_rollouts_ahead,
    choose_task_reward,
    make_ledger,
    make_sampler,
    pace_dataset,
    settings_of,
)
from .engines.adapters import making_the_engine
from .engines.ahead import RoundAhead
from .engines.engine import asks_a_server, awake, eval_sampling, naming_the_server
from .engines.seam import Seam, policy_logps, restore_old_logps
from .evaluation.prefetch import Prefetch, rows_that_fit
from .evaluation.scores import EvaluationScores
from .rewards import scale_reward
from .rewards.checks import check_reward_funcs, checked_rewards, raise_on_every_rank
from .rewards.dapo_math import completion_text, stated_answer
from .rewards.task import SCORES_LEFT_OUT
from .run.bar import progress_bar, speak_of_shortfall
from .run.checkpoint import find_checkpoint, keeping_dtypes, load_state, output_folder, save_state
from .run.log import LogHistoryCallback
from .run.preflight import Preflight
from .run.stops import StopCallback
from .run.terminal import bars_on_terminals_only, broken_for, print_to_terminal
from .sampling.group_filter import GroupFilter, ask_group_filter
from .sampling.groups import count_correct, drop_reasons
from .sampling.names import problem_id, problem_source
from .sampling.overlap import Stopwatch
from .sampling.refill import Batch, Group
from .sampling.report import (
    age_metrics,
    drop_unknown,
    rollout_metrics,
    sampling_metrics,
    source_metrics,
    timeline_metrics,
)
from .sampling.rollouts import (
    Round,
    Rows,
    assign_to_ranks,
    local_slice,
    select_ages,
    select_extra_logs,
    select_rewards,
)
from .settings.model_checks import telling_a_missing_folder
from .update.phase import UpdatePhase
from .update.rows import mark_filler


logger = logging.get_logger(__name__)


class DAPOTrainer(UpdatePhase):
    """
    Trainer for Decoupled Clip and Dynamic sAmpling Policy Optimization (DAPO), from [DAPO: An Open-Source LLM
    Reinforcement Learning System at Scale](https://huggingface.co/papers/2503.14476).

    A drop-in for [`~trl.GRPOTrainer`]: same constructor, same models, reward functions, tools, environments and launch
    commands. What changes:

    - prompts are sampled until the rollout batch is full of groups that are neither all right nor all wrong (dynamic
      sampling; evaluation is left alone);
    - every token of an optimizer step weighs the same, whatever the number of processes and micro-batches (token
      mean), and the clip is wider upwards than downwards (Clip-Higher);
    - with `overlong_buffer_length` set, a reward function named `soft_overlong_punishment` joins `reward_funcs`.

    Args:
        model (`str` or [`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            Model to be trained, as in [`~trl.GRPOTrainer`].
        reward_funcs (`RewardFunc | list[RewardFunc]`, *optional*):
            Reward functions, as in [`~trl.GRPOTrainer`].
        args ([`DAPOConfig`], *optional*):
            Configuration. Defaults to `DAPOConfig` with the model's name as output directory.
        group_filter (`Callable`, *optional*):
            Your own rule for which groups train, called on the main process with a group's rewards, a list for each
            reward function's name, and its rows: the columns of the example, `completion`, `length` and `truncated`.
            Returns `None` to train on the group, or the reason to drop it, which is logged as
            `dynamic_sampling/dropped/<reason>`. Where it is given nothing else decides.
        *other_args, **kwargs:
            Every other argument of [`~trl.GRPOTrainer`], in its order and with its meaning.

    Raises:
        TypeError: If `args` is a plain [`~trl.GRPOConfig`].
        ValueError: If `dynamic_sampling_rewards` names an unknown reward function or a length penalty.

    Example:

    ```python
    from datasets import load_dataset
    from trl.rewards import accuracy_reward
    from trl_dapo import DAPOTrainer

    trainer = DAPOTrainer(
        model="Qwen/Qwen2.5-0.5B-Instruct",
        reward_funcs=accuracy_reward,
        train_dataset=load_dataset("trl-lib/DeepMath-103K", split="train"),
    )
    trainer.train()
    ```
    """

    _tag_names = ["trl", "dapo"]  # noqa: RUF012 (TRL's name and type)
    _name = "DAPO"
    _paper = {  # noqa: RUF012
        "title": "DAPO: An Open-Source LLM Reinforcement Learning System at Scale",
        "id": "2503.14476",
        "citation": textwrap.dedent("""\
            @article{yu2025dapo,
                title        = {{DAPO: An Open-Source LLM Reinforcement Learning System at Scale}},
                author       = {Qiying Yu and Zheng Zhang and Ruofei Zhu and Yufeng Yuan and others},
                year         = 2025,
                eprint       = {arXiv:2503.14476},
            }"""),
    }

    def __init__(
        self,
        model: str | PreTrainedModel | PeftModel,
        reward_funcs: RewardFunc | list[RewardFunc] | None = None,
        args: DAPOConfig | None = None,
        *other_args: Any,
        group_filter: GroupFilter | None = None,
        **kwargs: Any,
    ) -> None:
        args = settings_of(args, model)
        self._seam = Seam()
        self._group_filter = group_filter
        self._completion_lengths: list[int] = []
        reward_funcs = list(reward_funcs) if isinstance(reward_funcs, (list, tuple)) else reward_funcs
        rewards = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
        check_reward_funcs(rewards, args.reward_weights, args.overlong_buffer_length)
        with bars_on_terminals_only(), telling_a_missing_folder(model, *rewards), making_the_engine(args):
            super().__init__(model, reward_funcs, args, *other_args, **kwargs)

        check_rewards_and_data(self)
        if args.overlong_buffer_length is not None:
            add_overlong_punishment(self, args.overlong_buffer_length)
        self._task = choose_task_reward(self)
        check_group_filter(self)
        check_rollouts_ahead(self)
        check_continuous_batching(self)
        self._sampler = make_sampler(self) if args.use_dynamic_sampling else None
        self._scores = EvaluationScores(self.num_generations_eval)
        self._ledger = make_ledger(self)
        self._prefetch = Prefetch(self._generate_for_evaluation)
        self._ahead = RoundAhead(self)
        self.stopwatch = Stopwatch()
        self.preflight = Preflight(self)
        self.callback_handler.callbacks.insert(0, self.preflight)  # before any tracker opens a run
        self.stop = StopCallback(self)
        self.add_callback(self.stop)
        self.add_callback(LogHistoryCallback())
        print_to_terminal(self)

    # ---- Reward functions ----

    def _calculate_rewards(
        self, inputs: list[dict], prompts: list, completions: list, completion_ids_list: list[list[int]]
    ) -> torch.Tensor:
        if self._seam.replayed is not None:
            return self._seam.replayed[1]
        error = None
        try:
            with checked_rewards(self), self.stopwatch.timing("rewards"):
                rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        except Exception as exc:
            # The other ranks wait for this rank's rewards: answer them with what no reward function returns.
            error = exc
            rewards = torch.full((len(prompts), len(self.reward_funcs)), torch.inf, device=self.accelerator.device)
            rewards = self.accelerator.gather(rewards)
        if torch.isinf(rewards).any():
            raise_on_every_rank(error, rewards, self.reward_func_names)
        if self.model.training:
            rewards = self._scaled(rewards)
        if self._seam.recorded is not None:
            self._seam.recorded.rewards = rewards
        if not self.model.training:
            self._remember_evaluated(inputs, completions, rewards)
        return rewards

    def _scaled(self, rewards: torch.Tensor) -> torch.Tensor:
        """The rewards with the task's own scaled, as `reward_scaling` asks."""
        if self.args.reward_scaling is None:
            return rewards
        rewards = rewards.clone()
        for i in self._task.is_task_F.nonzero().flatten().tolist():
            scaled = scale_reward(rewards[:, i].tolist(), *self.args.reward_scaling)
            rewards[:, i] = torch.tensor(scaled, device=rewards.device)
        return rewards

    # ---- Algorithm 1: sample until the batch is full ----

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        sampler, step = self._sampler, self.state.global_step
        if sampler is None or not self.model.training:
            rollouts = super()._generate_and_score_completions(inputs)
            if self.model.training:
                self._log_timeline()
            return rollouts
        sampler.begin()
        with progress_bar(self) as show_progress, awake(self) if sampler.num_missing else nullcontext():
            while prompts := sampler.next_prompts(step):
                started = time.perf_counter()
                round_ = self._sample_round(prompts)
                reasons, counts = self._drop_reasons(round_, prompts)
                if self._ledger is not None:
                    self._ledger.add_round(round_, reasons)
                sampler.add_round(round_, reasons, counts, step)
                round_.seconds = time.perf_counter() - started
                show_progress()
        batch = sampler.batch()
        if self._ledger is not None:
            self._ledger.end_rollout(batch, step)
        speak_of_shortfall(self, batch)
        sampler.carry(self._carried_groups(batch.carry))
        num_skipped = sampler.num_skipped
        if self.args.rollouts_ahead:
            self._ahead.ask(step)
        rollouts = self._train_on(batch)
        self._log_sampling(
            batch,
            tokens_trained=int(rollouts["num_items_in_batch"]),
            skipped_by_memory=num_skipped,
            refill_seconds=sum(round_.seconds for round_ in sampler.rollout.sampled[1:]),
        )
        return rollouts

    def _sample_round(self, prompts: list[tuple[str, dict]]) -> Round:
        """Samples and scores one group a prompt; no log-probability is computed."""
        examples = [example for _, example in prompts for _ in range(self.num_generations)]
        mine = local_slice(len(examples), self.accelerator.process_index, self.accelerator.num_processes)
        # A copy a row, as TRL's data loader makes one: reward functions and rollout functions may change theirs.
        inputs = [copy.deepcopy(example) for example in examples[mine]]
        with self._seam.recording(self) as recorded, self._ahead.answering() as is_ahead:
            super()._generate_and_score_completions(inputs)
        assert recorded.rows is not None
        assert recorded.rewards is not None
        names = [name for name, _ in prompts]
        drawn = [zlib.crc32(repr(names).encode())] * len(inputs)
        columns = torch.tensor([self._completion_lengths, recorded.truncated, drawn], device=self.accelerator.device)
        lengths_B, truncated_B, drawn_B = self.accelerator.gather(columns.T.contiguous()).cpu().T
        if (drawn_B != drawn_B[0]).any():
            raise RuntimeError(
                "The processes drew different prompts: their training datasets differ. Shuffle and filter the dataset "
                "with a seed that is the same in every process."
            )
        logs = recorded.logs["extra"].items()
        return Round(
            prompts=names,
            rows=recorded.rows,
            rewards_BF=recorded.rewards.cpu(),
            lengths_B=lengths_B,
            truncated_B=truncated_B.bool(),
            extra_logs={column: list(values) for column, values in logs if len(values) == len(examples)},
            metrics=recorded.metrics,
            ages=[int(is_ahead)] * len(names),
            sources=[problem_source(example) for _, example in prompts],
        )

    def _drop_reasons(self, round_: Round, prompts: list[tuple[str, dict]]) -> tuple[list[str | None], list | None]:
        """For each group `None`, or why it is dropped; and, for the memory, its correct and scored completions."""
        if self._group_filter is not None:
            return ask_group_filter(self._group_filter, round_, prompts, self.reward_func_names), None
        assert self._sampler is not None
        rewards_NG = self._task.of(round_.rewards_BF).view(-1, self.num_generations)
        masked_NG = round_.truncated_B.view_as(rewards_NG) if self.mask_truncated_completions else None
        reasons = drop_reasons(rewards_NG, masked_NG, self._task.criterion)
        if self._sampler.memory is None:
            return reasons, None
        return reasons, count_correct(rewards_NG, masked_NG, reasons, self._task.criterion)

    def _train_on(self, batch: Batch) -> dict:
        """TRL's rollout batch of the groups that train and those that fill it up, as if just sampled together."""
        assert self._sampler is not None
        rounds, groups, G = self._sampler.rollout.rounds, [*batch.train, *batch.fill], self.num_generations
        rows = assign_to_ranks(rounds, batch.train, batch.fill, self.accelerator.device)
        given = select_rewards(rounds, groups)
        rewards = given.clone()
        rewards[len(batch.train) * G :] = torch.nan  # TRL leaves what cannot be scored out of every mean
        mine = local_slice(len(rewards), self.accelerator.process_index, self.accelerator.num_processes)
        extra_logs = select_extra_logs(rounds, groups).items()
        self._pending_extra_logs.update({column: values[mine] for column, values in extra_logs})
        outcomes = self._sampler.rollout.describe_outcomes(batch)
        self._pending_extra_logs["dynamic_sampling"] = [outcomes[i // G] for i in range(len(rewards))[mine]]
        inputs = [
            {"prompt": prompt, "environment": environment}
            for prompt, environment in zip(rows.prompts, rows.environments, strict=True)
        ]
        with self._seam.replaying(self, rows, rewards.to(self.accelerator.device)) as self._replay_metrics:
            rollouts = super()._generate_and_score_completions(inputs)
        for name, given_B in zip(self.reward_func_names, given.T, strict=True):
            self._logs["rewards"][name].extend(given_B.tolist())  # the table holds one batch: in place of the NaN
        num_train = min(max(len(batch.train) * G - mine.start, 0), len(rows))
        mark_filler(rollouts, num_train)
        loss_mask = rollouts["completion_mask"] * rollouts.get("tool_mask", 1)
        rollouts["num_items_in_batch"] = self.accelerator.gather(loss_mask.sum()).sum()
        if any(round_.is_stale for round_ in rounds):
            restore_old_logps(rollouts, rows.old_logps)
        if self.args.rollouts_ahead:
            ages = torch.tensor(select_ages(rounds, groups)).repeat_interleave(G)[mine]
            rollouts["age"] = ages.to(self.accelerator.device)
        return rollouts

    def _carried_groups(self, groups: list[Group]) -> Round | None:
        """Groups for the next rollout, with the log-probabilities of the policy that sampled them."""
        if not groups:
            return None
        assert self._sampler is not None
        rounds = self._sampler.rollout.rounds
        rows = assign_to_ranks(rounds, groups, [], self.accelerator.device)
        new = [i for i, logps in enumerate(rows.old_logps) if logps is None]
        # Only vLLM's log-probabilities can be trusted: without it a rollout function may return placeholders.
        logps = [rows.logprobs[i] for i in new] if self.use_vllm else policy_logps(self, rows.take(new))
        for i, row in zip(new, logps, strict=True):
            rows.old_logps[i] = row
        ages = [age + 1 for age in select_ages(rounds, groups)]
        return Round.of_groups(rows, select_rewards(rounds, groups), self.num_generations, ages)

    # ---- The seam: what is recorded, and handed back ----

    _seam = Seam()  # neither half runs in a trainer that was made without `__init__`

    def _generate(self, prompts: list) -> tuple:
        if self._seam.replayed is not None:
            return self._seam.replayed[0]
        generated = None if self.model.training else self._prefetch.take(prompts)
        if generated is None:
            self._ahead.join()
            parameters = nullcontext() if self.model.training else eval_sampling(self)
            with naming_the_server(self), self._ahead.timing_engine(), parameters:
                generated = super()._generate(prompts)
        _, completion_ids, tool_mask, *_ = generated
        self._completion_lengths = [sum(mask) for mask in tool_mask] if tool_mask else list(map(len, completion_ids))
        if self._seam.recorded is not None:
            ends = {*self.eos_token_ids, self._tokenizer.pad_token_id}
            environments = None if self.environment_factories is None else self._batch_environments
            self._seam.recorded.rows = Rows.from_generated(generated, prompts, environments)
            self._seam.recorded.truncated = [ids[-1] not in ends for ids in completion_ids]
        return generated

    def _get_per_token_logps_and_entropies(
        self,
        model: torch.nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        if self._seam.recorded is not None:  # nobody reads these: the round is only sampled and scored
            return torch.zeros(len(input_ids), logits_to_keep, device=input_ids.device), None, None
        return super()._get_per_token_logps_and_entropies(
            model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
        )

    # ---- Evaluation ----

    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """TRL's, with scores in what it returns, and with an engine asked once for as many batches as fit."""
        dataset = getattr(dataloader, "dataset", None)
        self._scores.begin(len(dataset) if has_length(dataset) else None)
        self._metrics["eval"].clear()
        schedules = self.use_vllm or self.use_transformers_continuous_batching
        if schedules and not (self.tools or self.environment_factories or self.rollout_func or self._is_vlm):
            round_size = self.args.dynamic_sampling_max_round_size
            num_rows = round_size * self.num_generations if round_size else rows_that_fit(self.max_completion_length)
            dataloader = self._prefetch.over(dataloader, num_rows // self.accelerator.num_processes)
        with self.stopwatch.timing("evaluation"):
            output = super().evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )
        scores = self._scores.means()
        assert output.metrics is not None
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in scores.items()})
        return output

    def _generate_for_evaluation(self, prompts: list) -> tuple:
        """Completions for the prompts of several batches, one batch after the other."""
        k = self.num_generations_eval
        # vLLM's server is asked for n completions of every n-th prompt, over all processes. Where a
        # problem's rows lie in two processes, they are not neighbours any more.
        self.num_generations_eval = math.gcd(k, self.args.per_device_eval_batch_size)
        try:
            return self._generate(prompts)
        finally:
            self.num_generations_eval = k

    def _remember_evaluated(self, inputs: list[dict], completions: list, rewards: torch.Tensor) -> None:
        """Adds the verdicts and answers of a batch to the scores, where there is a right and a wrong."""
        if not self._task.knows_right:
            logger.warning_once(SCORES_LEFT_OUT)
            return
        answers = [stated_answer(completion_text(text)) for text in completions]
        # What an environment asks stands in other columns than the prompt.
        ids = [example.get("id") if self.environment_factories else problem_id(example) for example in inputs]
        sources = [problem_source(example) for example in inputs]
        rows = gather_object(list(zip(sources, ids, answers, strict=True)))
        rewards = self._scaled(rewards).cpu()
        verdicts = zip(self._task.of(rewards).tolist(), self._task.is_right(rewards).tolist(), strict=True)
        right = [None if math.isnan(reward) else is_right for reward, is_right in verdicts]
        self._scores.add([tuple(problem) for *problem, _ in rows], [answer for *_, answer in rows], right)

    # ---- What the user sees ----

    def _log_sampling(self, batch: Batch, **sampling: float) -> None:
        """Metrics of one rollout: TRL's own over everything sampled, and the sampler's."""
        assert self._sampler is not None
        metrics, rollout = self._metrics["train"], self._sampler.rollout
        sampled = rollout_metrics(rollout.sampled, self.reward_func_names, self.reward_weights)
        sampled |= source_metrics(rollout, self._sampler.sources, self.reward_weights)
        sampling |= sampling_metrics(rollout, batch, self.num_generations) | {"passes": self._sampler.passes}
        sampled |= {f"dynamic_sampling/{name}": float(value) for name, value in sampling.items()}
        if self.args.rollouts_ahead:
            sampled |= age_metrics(select_ages(rollout.rounds, batch.train))
        for name, value in sampled.items():
            metrics[name].append(value)
        self._log_timeline()
        metrics["num_tokens"] = [self.state.num_input_tokens_seen]
        for name, values in self._replay_metrics.items():
            if name.startswith("sampling/"):  # needs the log-probabilities, which only rows that train have
                metrics[name].extend(values)
        metrics["filtered_reward"].extend(self._replay_metrics["reward"])

    def _log_timeline(self) -> None:
        for name, value in timeline_metrics(self.stopwatch.lap(), asks_a_server(self)).items():
            self._metrics["train"][name].append(value)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        drop_unknown(self._metrics["train" if self.model.training else "eval"])  # a tracker takes no `None`
        super().log(logs, start_time)

    # ---- Checkpoints ----

    def get_train_dataloader(self) -> DataLoader:
        if self._sampler is None or not isinstance(self.train_dataset, IterableDataset):
            return super().get_train_dataloader()
        # The sampler reads the stream. TRL's loader only sets the pace: reading it too would cost as much again, and
        # where it starts over differs after a resume.
        dataset, self.train_dataset = self.train_dataset, pace_dataset()
        try:
            return super().get_train_dataloader()
        finally:
            self.train_dataset = dataset

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> TrainOutput:
        if resume_from_checkpoint is True:
            resume_from_checkpoint = find_checkpoint(output_folder(self.args))
        self._last_loaded_step = -1  # vLLM's weights may be of any step of an earlier `train`
        if self._sampler is not None:
            line = self._task.describe(filtered=self._group_filter is not None)
            self.accelerator.print(broken_for(sys.stdout, line))
        with bars_on_terminals_only(loading=False):
            self.preflight.check_example()
            try:
                return super().train(resume_from_checkpoint, *args, **kwargs)
            finally:
                self._ahead.cancel()

    def get_batch_samples(self, *args: Any) -> tuple[list, torch.Tensor | int | None]:
        if self.state.global_step < self.state.max_steps and not self.stop.is_used_up:
            return super().get_batch_samples(*args)
        self.control.should_training_stop = True  # resumed at its end, from where transformers takes one more step
        return [], None

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        folder = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        with self.stopwatch.timing("checkpoint"):
            save_state(self, folder)
            super()._save_checkpoint(model, trial)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        # The main process writes `trainer_state.json` next: not before every rank's files are there.
        self.accelerator.wait_for_everyone()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        with keeping_dtypes(self.model):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self._last_loaded_step = -1  # vLLM's weights are of the last steps

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            load_state(self, Path(checkpoint))

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""DAPO (arXiv 2503.14476), Algorithm 1, on top of TRL's `GRPOTrainer`.

    for each rollout batch:
        until the batch is full, or the limit is reached:
            sample G completions per prompt and score them  _sample_round
            keep the groups whose rewards differ            _decide_on_groups, Sampler
        compute advantages within each group                GRPOTrainer, on the accepted groups (_build_training_batch)
        for each optimizer step:
            clip with Clip-Higher, average over tokens      UpdatePhaseMixin

TRL samples, scores and builds tensors in one private method. This trainer does not copy that method but runs parts of
it by overriding the methods that it calls: see `engines/record_replay.py`. The rest of the trainer is in
`update/phase.py`, `engines/generation.py`, `engines/checkpointing.py` and `evaluation/during_training.py`.
`engines/trial.py` tries out a run before it starts.
"""

import copy
import math
import sys
import textwrap
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object
from peft import PeftModel
from transformers import PreTrainedModel
from transformers.trainer_utils import TrainOutput
from transformers.utils import logging

from . import trl_check  # noqa: F401  # first: it reports names that the installed TRL lacks


# isort: split
from . import construction
from .config import DAPOConfig
from .data import plain_rows
from .engines.checkpointing import CheckpointMixin
from .engines.generation import GenerationMixin
from .engines.lora_sync import syncing_adapters
from .engines.record_replay import RecordReplayMixin
from .engines.trial import TrialMixin
from .evaluation.during_training import EvaluationMixin
from .evaluation.scores import EvaluationScores
from .models import context_length
from .ranks import local_slice, raise_on_every_rank
from .rewards import SoftOverlongPunishment
from .rewards.checks import check_reward_funcs, distinct_names, with_checked_values, wrap_reward
from .run.checkpoint import (
    describe_failure,
    find_checkpoint,
    output_folder,
    says_how_to_continue,
    warn_of_earlier_run,
)
from .run.counts import add_num_rollouts
from .run.early_stop import StopCallback
from .run.ledger import Ledger
from .run.log import LogHistoryCallback, storable
from .run.preflight import Preflight, SetupError
from .run.stopwatch import Stopwatch
from .run.terminal import (
    TerminalCallback,
    progress_bar,
    progress_bars_on_terminals_only,
    use_terminal_callback,
    warn_of_shortfall,
    wrapped_for,
)
from .sampling.batch import Batch
from .sampling.group_filter import GroupFilter, ask_group_filter
from .sampling.groups import GenerationRequest, GroupState, PromptGroup
from .sampling.policies import Decisions
from .sampling.report import rollout_log
from .sampling.rounds import (
    Completion,
    Round,
    bring_together,
    in_batch,
    note_scores,
    plan_scoring,
    receive_rows,
    rows_of_batch,
)
from .sampling.rows import copied, dummy_row
from .sampling.sampler import Sampler
from .settings.arguments import naming_missing_folders
from .settings.warnings import warnings_at_start
from .update.old_logps import restore_old_logps
from .update.patching import patched, training_mode
from .update.phase import UpdatePhaseMixin
from .update.rollout_tensors import mark_filler


if TYPE_CHECKING:
    from trl.trainer.grpo_trainer import RewardFunc

logger = logging.get_logger(__name__)


class DAPOTrainer(TrialMixin, CheckpointMixin, EvaluationMixin, RecordReplayMixin, GenerationMixin, UpdatePhaseMixin):
    """
    Trainer for Decoupled Clip and Dynamic sAmpling Policy Optimization (DAPO), from [DAPO: An Open-Source LLM
    Reinforcement Learning System at Scale](https://huggingface.co/papers/2503.14476).

    A drop-in replacement for [`~trl.GRPOTrainer`]: it takes the same arguments, models, reward functions, tools and
    environments, and is launched with the same commands. It differs as follows:

    - Groups whose rewards are all equal are dropped, and more prompts are sampled until the batch is full. A rollout
      samples at most `dynamic_sampling_max_gen_batches` batches of completions.
    - Every token of an optimizer step has the same weight in the loss.
    - The clip range extends further above 1 than below it (Clip-Higher).
    - If `overlong_buffer_length` is set, a reward function named `soft_overlong_punishment` is added to
      `reward_funcs`.

    Args:
        model (`str` or [`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            Model to be trained, as in [`~trl.GRPOTrainer`].
        reward_funcs (`RewardFunc | list[RewardFunc]`, *optional*):
            Reward functions, as in [`~trl.GRPOTrainer`].
        args ([`DAPOConfig`], *optional*):
            Configuration. Defaults to a `DAPOConfig` whose output directory is named after the model.
        group_filter (`Callable`, *optional*):
            Your own rule for which groups to train on, which replaces the built-in rule. It is called on the main
            process, once per group, with two arguments: a dictionary that maps each reward function's name to the list
            of its rewards, and a list with one dictionary per completion, which holds the columns of the example and
            `completion`, `length` and `truncated`. Rewards are those after `reward_scaling`, and NaN if a function did
            not score the completion. It returns `None` to train on the group, or the reason to drop it, which is
            logged as `dynamic_sampling/dropped/<reason>`.
        *other_args, **kwargs:
            All other arguments of [`~trl.GRPOTrainer`], in the same order and with the same meaning.

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

    _weights_of_task: list[float] | None = None  # the reward weights for which `_task` was chosen
    _scores_dummies = False  # whether the completions being scored are dummies, which no model sampled
    _num_scored: int | None = None  # number of rows that reward functions are called on, if the rest are copies
    _tag_names = ["trl", "dapo"]  # noqa: RUF012 (TRL's name and type)
    _name = "DAPO"
    _paper = {  # noqa: RUF012 (TRL's name and type)
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
        reward_funcs: "RewardFunc | list[RewardFunc] | None" = None,
        args: DAPOConfig | None = None,
        *other_args: Any,
        group_filter: GroupFilter | None = None,
        **kwargs: Any,
    ) -> None:
        args = construction.settings_of(args, model, type(self))
        self._group_filter = group_filter
        rewards: list[Any] = list(reward_funcs) if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
        check_reward_funcs(rewards, args.reward_weights, args.overlong_buffer_length, group_filter)
        construction.check_adapter(model, args.beta)
        construction.check_sharding(args)
        with progress_bars_on_terminals_only(), naming_missing_folders(model, *rewards), syncing_adapters(args):
            super().__init__(model, None if reward_funcs is None else rewards, args, *other_args, **kwargs)
        construction.keep_gradients_of_quantized(self.model)
        if self.accelerator.is_main_process:
            # DeepSpeed keeps a float32 copy of the weights, and FSDP converts them to float32 in mixed precision.
            upcasts = self.is_fsdp_enabled and self.accelerator.mixed_precision != "no"
            steps_in_bfloat16 = not (self.is_deepspeed_enabled or upcasts) and construction.trains_bfloat16(self.model)
            for message in warnings_at_start(args, context_length(self.model.config), steps_in_bfloat16):
                logger.warning(message)
        self.train_dataset = plain_rows(self.train_dataset)
        self._check_data()
        if args.overlong_buffer_length is not None:
            # Added in the same way as TRL adds the reward of an environment: as one more column, with weight 1.
            assert self.max_completion_length is not None  # the rules of the settings require it here
            buffer, factor = args.overlong_buffer_length, args.overlong_penalty_factor
            punishment = SoftOverlongPunishment(self.max_completion_length, buffer, factor)

            def soft_overlong_punishment(completion_ids: list[list[int]], **kwargs: Any) -> list[float | None]:
                # Only tokens that the model generated count, not those of tools and environments.
                return [*punishment(completion_ids, completion_lengths=[*self._completion_lengths])]

            self.reward_funcs.append(soft_overlong_punishment)
            self.reward_func_names.append(soft_overlong_punishment.__name__)
            self.reward_processing_classes.append(None)  # type: ignore[arg-type]  # TRL uses `None` for functions
            self.reward_weights = torch.cat([self.reward_weights, torch.ones(1)])
        self._name_rewards()
        self._choose_task()
        self._choice = construction.choose_sampling(args, self._facts, on_cpu=self.accelerator.device.type == "cpu")
        if args.use_dynamic_sampling:
            self._sampler = self._new_sampler()
        self._set_up_run()

    def _new_sampler(self) -> Sampler:
        return construction.make_sampler(
            self.args,
            self.train_dataset,
            shuffle=bool(self.shuffle_dataset),
            kept_columns=self._kept_columns(),
            schedules=self._engine_schedules,
            num_ranks=self.accelerator.num_processes,
        )

    def _set_up_run(self) -> None:
        """Set up what accompanies the training loop: evaluation scores, timings, the generation engine, callbacks."""
        args, sampler = self.args, self._sampler
        samples_elsewhere, kept = self.rollout_func or self.environment_factories, self._kept_columns()
        self._scores = EvaluationScores(self.num_generations_eval)
        self.stopwatch = Stopwatch(self._uses_a_server)
        self._open_engine(self.stopwatch)
        self.preflight = Preflight(
            args,
            examples=None if samples_elsewhere else lambda: construction.first_examples(self.train_dataset, kept),
            score=self.score_dummy,
            reward_names=self.reward_func_names,
            tokenizer=self._tokenizer,
            context=None if self._is_vlm else context_length(self.model.config),
            choice=self._choice,
            sampler=sampler,
        )
        self.callback_handler.callbacks.insert(0, self.preflight)  # its checks come before any tracker opens a run
        self.stop = StopCallback(
            sampler, args, lambda: self._step % self._generate_every == 0 and not self._sampled_before
        )
        self._ledger = None
        if sampler is not None:
            self._ledger = Ledger(sampler, self.reward_func_names, args.log_groups, lambda: self._task)
            self.add_callback(self._ledger)
        self.add_callback(self.stop)
        self.add_callback(LogHistoryCallback())
        self._terminal = TerminalCallback(
            args,
            self.stop,
            self.stopwatch,
            sampler,
            self.train_dataset,
            self.num_groups_left,
            self.reward_func_names,
        )
        use_terminal_callback(self, self._terminal)

    # ---- Data and reward functions ----

    def _kept_columns(self) -> list[str] | None:
        """Return the columns that reward functions get if `remove_unused_columns` is set, otherwise `None` for all."""
        self._set_signature_columns_if_needed()
        return self._signature_columns if self.args.remove_unused_columns else None

    def _check_data(self) -> None:
        construction.check_rewards_and_data(
            self.train_dataset,
            self.eval_dataset,
            self.reward_funcs,
            self.reward_func_names,
            kept_columns=self._kept_columns(),
            may_be_empty=bool(self._tokenizer("")["input_ids"]),
            has_environments=self.environment_factories is not None,
            has_rollout_func=self.rollout_func is not None,
        )

    def _name_rewards(self) -> None:
        """Give distinct names to reward functions that have the same name."""
        given = self.reward_func_names
        self.reward_func_names = distinct_names(given)
        if not self.accelerator.is_main_process:
            return
        for name in {name for name in given if given.count(name) > 1}:
            own = [f"`{new}`" for new, old in zip(self.reward_func_names, given, strict=True) if old == name]
            logger.warning(
                f"{len(own)} reward functions have the same name, {name!r}. They are logged as {' and '.join(own)}, "
                "in the order in which they were given. To choose the names yourself, give each function a different "
                "`__name__`."
            )

    @property
    def _facts(self) -> dict[str, Any]:
        return self._model_facts | {
            "has_group_filter": self._group_filter is not None,
            "has_rollout_func": bool(self.rollout_func),
            "has_environments": bool(self.environment_factories),
            "has_tools": bool(self.tools),
            "why_no_correctness": self._task.why_no_correctness,
            "undecided_rewards": self._task.undecided,
            "groups_per_rollout": self.args.groups_per_rollout,
        }

    def _choose_task(self) -> None:
        """Choose which rewards decide whether a group trains, unless that was done for the present reward weights."""
        # A callback may change the reward weights during a run.
        weights = self.reward_weights.tolist()
        if weights != self._weights_of_task:
            self._weights_of_task, names = weights, self.reward_func_names
            self._task = construction.choose_task_reward(self.args, names, self.reward_weights, self.reward_funcs)

    def _score_completions(
        self, inputs: list[dict], prompts: list, completions: list, completion_ids_list: list[list[int]]
    ) -> torch.Tensor:
        if not self._initialized:
            return super()._score_completions(inputs, prompts, completions, completion_ids_list)
        error = None
        self._choose_task()
        evaluated = [] if self.model.training else self._evaluated_rows(inputs, completions)
        logged: dict[str, list] = {}  # columns logged by the rewards that judge correctness
        checked = [
            with_checked_values(func, name, logged.__setitem__ if name in self._task.names else None, self._num_scored)
            for func, name in zip(self.reward_funcs, self.reward_func_names, strict=True)
        ]
        try:
            with patched(self, reward_funcs=checked), self.stopwatch.timing("rewards"):
                rewards = super()._score_completions(inputs, prompts, completions, completion_ids_list)
        except Exception as exc:
            # The other processes wait for the rewards of this one. Infinity tells them that it failed, since no reward
            # function may return it.
            error = exc
            rewards = torch.full((len(prompts), len(self.reward_funcs)), torch.inf, device=self.accelerator.device)
            rewards = self.accelerator.gather(rewards)
        if torch.isinf(rewards).any():
            raise_on_every_rank(error, "The reward functions failed")
            name = self.reward_func_names[int(torch.isinf(rewards).any(dim=0).nonzero()[0])]
            raise ValueError(
                f"The reward function {name!r} returned an infinite reward, from which no advantage can be computed. "
                "Return `None` for a completion that cannot be scored."
            )
        if not self._scores_dummies:
            self._task = self._task.having_seen(rewards)
        if self.model.training:
            rewards = self._task.scaled(rewards, self.args.reward_scaling)
            self._append_metrics(self._task.metrics([rewards]))
            return rewards
        self._remember_evaluated(evaluated, rewards, logged)
        return rewards

    def score_dummy(
        self, rows: list[dict], completions: list, completion_ids: list[list[int]], within: Callable
    ) -> torch.Tensor:
        """
        Return the rewards of dummy completions, which no model sampled. Each function is called inside the context
        manager that `within(name, function)` returns, and nothing is logged.
        """
        named = zip(self.reward_funcs, self.reward_func_names, strict=True)
        funcs = [
            wrap_reward(reward_func, name, within=partial(within, name, reward_func)) for reward_func, name in named
        ]
        lengths = [len(ids) for ids in completion_ids]
        with (
            training_mode(self.model, training=True),  # in evaluation mode, rewards would be kept for the scores
            patched(self.args, report_to=[]),  # TRL reports how long each function takes, but no tracker is open yet
            patched(self, reward_funcs=funcs, _completion_lengths=lengths, _scores_dummies=True),
            patched(self, _pending_extra_logs=defaultdict(list), _pending_metrics=defaultdict(list)),
            self._recording(),
        ):
            return self._calculate_rewards(rows, [row["prompt"] for row in rows], completions, completion_ids)

    # ---- Algorithm 1: sample until the batch is full ----

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        sampler, step = self._sampler, self.state.global_step
        if sampler is None or not self.model.training:
            rollouts = super()._generate_and_score_completions(inputs)
            if self._initialized and self.model.training:
                self._append_metrics(self.stopwatch.timeline())
            return rollouts
        assert self._ledger is not None
        sampler.start_rollout(step)
        for message in sampler.selection.take_messages():
            self.accelerator.print(wrapped_for(sys.stdout, message))
        is_hidden = self.args.disable_tqdm or not self.accelerator.is_main_process
        awake = self._awake() if sampler.num_missing else nullcontext()
        with progress_bar(sampler, bool(is_hidden)) as show, awake:
            self._submit_ahead(sampler)
            while requests := sampler.next_requests():
                started = time.perf_counter()
                round_ = self._sample_round(sampler, requests)
                sampler.add(round_)
                for decisions in self._decide_on_groups(sampler, round_, step):
                    self._ledger.add_groups(decisions)
                    sampler.record_decisions(decisions)
                round_.seconds = time.perf_counter() - started
                show()
                self._submit_ahead(sampler)  # now, so that the server works on it during the next round
        batch = sampler.finish_rollout()
        self._ledger.end_rollout(sampler.rollout, batch, step)
        warn_of_shortfall(sampler, batch, self.args, self.reward_func_names)
        self._keep_old_logps(sampler)
        self._submit_ahead(sampler)
        rollouts = self._build_training_batch(sampler, batch)
        # The metrics of one rollout: those of TRL, over all completions that were sampled, and those of the sampler.
        sampling = {"tokens_trained": float(rollouts["num_items_in_batch"])}
        log = rollout_log(sampler, batch, self.reward_func_names, self.reward_weights, sampling)
        log |= self._task.metrics(
            [group.rewards for group in sampler.rollout.decided_groups], sampler.skipped_pass_rates
        )
        num_waited = self._ahead.flush_timings()
        if self.args.rollouts_ahead:
            log["rollouts_ahead/groups_waited_for"] = num_waited
        self._append_metrics(log | self.stopwatch.timeline())
        metrics = self._metrics["train"]
        metrics["num_tokens"] = [self.state.num_input_tokens_seen]
        for name, values in self._replay_metrics.items():
            if name.startswith("sampling/"):  # computed from log-probabilities, which only the rows of a batch have
                metrics[name].extend(values)
        metrics["trained_reward"].extend(self._replay_metrics["reward"])
        return rollouts

    def _submit_ahead(self, sampler: Sampler) -> None:
        """Request completions for later rollouts from the server."""
        if self.args.rollouts_ahead:
            sampler.request_ahead(0 if self.stop.is_past_a_limit else self._num_rollouts_left)
            self._ahead.submit(sampler.queue.requests_in_flight)

    def _sample_round(self, sampler: Sampler, requests: list[GenerationRequest]) -> Round:
        """Sample and score the requested completions, without computing log-probabilities."""
        examples = [request.group.example for request in requests for _ in range(request.num_completions)]
        mine = local_slice(len(examples), self.accelerator.process_index, self.accelerator.num_processes)
        # One copy per row, as from TRL's data loader: reward functions and rollout functions may modify their inputs.
        inputs = [copy.deepcopy(example) for example in examples[mine]]
        completions: list[Completion] = []
        number = sampler.rollout.number
        has_earlier_weights = any(request.weights_rollout < number for request in requests)

        def score(*batch: Any) -> torch.Tensor:
            completions.extend(receive_rows(requests, recording, self.accelerator))
            for group, index in completions:
                # Log-probabilities under earlier weights cannot be computed any more. The engine's are used.
                if group.weights_rollouts[index] < number and index in group.rows:
                    group.rows[index].old_logps = group.rows[index].logprobs
            return self._score_round(requests, completions, *batch)

        # TRL takes every `num_generations`-th prompt and asks a server for `num_generations` completions of it. The
        # result is correct for any number that divides the number of completions of each request.
        common_divisor = math.gcd(*(request.num_completions for request in requests))
        with (
            patched(self, num_generations=common_divisor),
            self._recording(score) as recording,
            self._ahead.answering(requests),
        ):
            super()._generate_and_score_completions(inputs)
        return Round(requests, completions, recording.metrics, has_earlier_weights)

    def _score_round(
        self,
        requests: list[GenerationRequest],
        completions: list[Completion],
        inputs: list[dict],
        prompts: list,
        texts: list,
        completion_ids: list[list[int]],
    ) -> torch.Tensor:
        """
        Score the completions of a round, each whole group in one call on one process unless there are environments.
        Return a row for each completion, as TRL expects: its rewards, or zeros if completions were moved.
        """
        num_ranks, rank = self.accelerator.num_processes, self.accelerator.process_index
        # The state of an environment cannot be moved to another process.
        plan = plan_scoring(requests, completions, num_ranks, may_move=self.environment_factories is None)
        own = completions[local_slice(len(completions), rank, num_ranks)]
        for (group, index), row in zip(own, inputs, strict=True):
            extra = {name: value for name, value in row.items() if name not in group.example}
            group.rows[index].extra_columns = extra or None  # added by a rollout function
        if plan.is_in_place:
            rewards = self._score_completions(inputs, prompts, texts, completion_ids)
            note_scores(plan, rewards, self._take_extra_logs(len(inputs)))
            return rewards
        rows = bring_together(plan, self.accelerator.device)
        examples = [group.example for group, _ in plan.per_rank[rank]]
        inputs = [
            copy.deepcopy(example) | copy.deepcopy(row.extra_columns or {})
            for example, row in zip(examples, rows, strict=True)
        ]
        # TRL gathers equally many rewards from each process. The plan fills up shorter shares with copies, which
        # reward functions are not called on. A process without completions of its own scores those of one group, since
        # a reward function may have to be called on all processes.
        num_scored = len({*plan.per_rank[rank]})
        lengths = [row.num_tokens for row in rows[:num_scored]]
        with patched(self, _completion_lengths=lengths, _num_scored=num_scored):
            rewards = self._score_completions(
                inputs,
                [copied(row.prompt) for row in rows],
                [copied(row.completion) for row in rows],
                [row.completion_ids.tolist() for row in rows],
            )
        note_scores(plan, rewards, self._take_extra_logs(num_scored, len(rows)))
        # The groups have the rewards by now. TRL only computes statistics from what is returned. They are replaced by
        # the statistics of the whole rollout.
        return rewards.new_zeros(len(completions), rewards.size(1))

    def _take_extra_logs(self, num_scored: int, num_rows: int | None = None) -> dict[str, list]:
        """
        Return the columns that reward functions logged with `log_extra`, with one value for each completion that the
        processes just scored. The copies, from `num_scored` to `num_rows`, get `None`. Collective.
        """
        num_copies = 0 if num_rows is None else num_rows - num_scored
        own, self._pending_extra_logs = self._pending_extra_logs, defaultdict(list)
        logs = {}
        for column in sorted({*gather_object(list(own))}):
            values = list(own.get(column, []))
            if len(values) != num_scored:  # unknown which value belongs to which completion
                if column in own:
                    _warn_of_column(column, len(values), num_scored)
                values = [None] * num_scored
            logs[column] = gather_object(values + [None] * num_copies)
        return logs

    def _decide_on_groups(self, sampler: Sampler, round_: Round, step: int) -> Iterator[Decisions]:
        """Yield the groups of a round, those of equal size together, with the reason to drop each, or `None`."""
        by_size: dict[tuple[int, int], list[PromptGroup]] = {}  # by number of completions before this round and now
        for request in round_.requests:
            num_known = request.group.num_received - request.num_completions
            by_size.setdefault((num_known, request.group.num_received), []).append(request.group)
        # Groups that had most completions before come first, since they are the oldest.
        for num_known, size in sorted(by_size, key=lambda sizes: (-sizes[0], sizes[1])):
            groups = by_size[num_known, size]
            if self._group_filter is not None:
                reasons = ask_group_filter(self._group_filter, groups, self.reward_func_names)
                yield Decisions(groups, reasons, num_known, step=step)
                continue
            rewards_BF = torch.cat([group.rewards for group in groups])
            masked_B = None
            if self.mask_truncated_completions:
                masked_B = torch.tensor([is_cut for group in groups for is_cut in group.truncated])
            reasons = self._task.drop_reasons(rewards_BF, masked_B, size)
            counts = None
            if sampler.selection.needs_counts and self._task.has_correctness:
                counts = self._task.count_correct(rewards_BF, masked_B, reasons, num_known)
            if not groups[0].is_whole:  # the accuracy band applies to whole groups only
                reasons = [None if reason == "outside_band" else reason for reason in reasons]
            yield Decisions(groups, reasons, num_known, counts, step)

    def _keep_old_logps(self, sampler: Sampler) -> None:
        """Store the present policy's log-probabilities of completions kept for later rollouts. Collective."""
        groups = sorted(sampler.queue.held, key=lambda group: (-group.num_received, group.number))
        rows = [row for group in groups for _, row in sorted(group.rows.items()) if row.old_logps is None]
        # With FSDP or ZeRO-3 all processes must make the same passes, so each gets equally many rows.
        most = max(gather_object([len(rows)]))
        if most == 0:
            return
        padding = rows or [dummy_row(self._tokenizer.pad_token_id)]
        padded = rows + [padding[i % len(padding)] for i in range(most - len(rows))]
        for row, logps in zip(rows, self.policy_logps(padded), strict=False):
            row.old_logps = logps

    def _build_training_batch(self, sampler: Sampler, batch: Batch) -> dict:
        """Return TRL's rollout batch for the groups that train and those that fill it, as if sampled together now."""
        groups, G = [*batch.train, *batch.fillers], self.num_generations
        num_train = len(batch.train) * G
        device, number = self.accelerator.device, sampler.rollout.number
        rows = rows_of_batch(batch.train, batch.fillers, G, device)
        given = torch.stack(in_batch(lambda group: group.rewards, groups, G))
        rewards = given.clone()
        rewards[num_train:] = torch.nan  # TRL leaves NaN rewards out of every mean
        mine = local_slice(len(rewards), self.accelerator.process_index, self.accelerator.num_processes)
        for name in dict.fromkeys(name for group in groups for name in group.extra_logs):
            values = in_batch(partial(_logged, name), groups, G)
            self._pending_extra_logs[name] = values[mine]
        outcomes = ["trained"] * len(batch.train) + [_outcome_of_filler(group) for group in batch.fillers]
        self._pending_extra_logs["dynamic_sampling"] = [outcomes[i // G] for i in range(len(rewards))[mine]]
        inputs = [{"prompt": row.prompt, "environment": row.environment} for row in rows]
        with self._replaying(rows, rewards.to(device)) as self._replay_metrics:
            rollouts = super()._generate_and_score_completions(inputs)
        for name, given_B in zip(self.reward_func_names, given.T, strict=True):
            # This pushes out the NaN that TRL has added, since the deque holds only one batch.
            self._logs["rewards"][name].extend(given_B.tolist())
        if any(group.staleness(number) for group in groups):
            restore_old_logps(rollouts, [row.old_logps for row in rows])
        # This comes last: the old log-probabilities of fillers must be 0.
        mark_filler(rollouts, min(max(num_train - mine.start, 0), len(rows)))
        loss_mask = rollouts["completion_mask"] * rollouts.get("tool_mask", 1)
        rollouts["num_items_in_batch"] = self.accelerator.gather(loss_mask.sum()).sum()
        if self._generate_every > self.args.gradient_accumulation_steps:
            # If the run ends in the middle of this batch, this tells which groups were not trained on.
            places = torch.arange(mine.start, mine.start + len(rows), device=device)
            rollouts["group"] = places // G
        if self.args.rollouts_ahead:
            weights_rollouts = in_batch(lambda group: group.weights_rollouts, groups, G)
            rollouts["staleness"] = torch.tensor(
                [number - rollout for rollout in weights_rollouts[mine]], device=device
            )
        return rollouts

    # ---- What the user sees ----

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "train_runtime" in logs and not self.model.training:
            # The run ended with an evaluation. TRL logs by the mode of the model, so it would leave out the training
            # steps since the last log.
            with training_mode(self.model, training=True):
                self.log(logs, start_time)
            return
        metrics = self._metrics["train" if self.model.training else "eval"]
        for name in [name for name, values in metrics.items() if all(map(math.isnan, values))]:
            del metrics[name]  # trackers do not accept `None`, which TRL's mean of these values would be
        if self.log_completions and self.accelerator.is_main_process:
            extra = self._logs["extra"]
            for column, values in list(extra.items()):
                if (num_rows := len(self._logs["prompt"])) != len(values):
                    del extra[column]
                    _warn_of_column(column, len(values), num_rows)
                else:
                    extra[column] = deque(storable(values), values.maxlen)
        add_num_rollouts(metrics)
        # After a resume in the middle of a rollout there are no completions to log. An empty table would replace the
        # one that was written before.
        with patched(self, log_completions=self.log_completions and bool(self._logs["prompt"])):
            super().log(logs, start_time)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        super().create_model_card(*args, **kwargs)
        if self.is_world_process_zero():
            # TRL writes `None` for models that are not from the Hub.
            card, base = Path(output_folder(self.args), "README.md"), self.model.config._name_or_path
            named = f"`{Path(base).name}`" if base else "a model that was made in memory"
            text = card.read_text().replace("[None](https://huggingface.co/None)", named)
            card.write_text(text.replace('model="None"', f'model="{card.parent}"'))

    # ---- The loop ----

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> TrainOutput:
        if resume_from_checkpoint is True:
            resume_from_checkpoint = find_checkpoint(output_folder(self.args))
        elif not (resume_from_checkpoint or self.state.global_step):
            warn_of_earlier_run(self.args)
        self._restart_interrupted_step()
        if not resume_from_checkpoint:
            self._metrics["train"].clear()  # values that an interrupted run has not logged
            self._sampled_before, self._random_state_before = {}, None  # of a resume that failed before its first step
            if self._sampler is not None:
                self._sampler.reset_totals()
        self._last_loaded_step = -1  # vLLM's weights may be of any step of an earlier `train`
        if self._sampler is not None:
            self.accelerator.print(wrapped_for(sys.stdout, self._task.describe(self._group_filter is not None)))
        with (
            progress_bars_on_terminals_only(loading=False),
            self._terminal.reporting_progress(self.callback_handler.callbacks),
        ):
            self.preflight.check_example()
            try:
                return super().train(resume_from_checkpoint, *args, **kwargs)
            except SetupError:  # nothing was generated yet, so there is nothing to resume
                raise
            except Exception as error:
                if not says_how_to_continue(error):
                    saves_every_step = self.args.save_strategy == "steps" and self.args.save_steps == 1
                    folder = output_folder(self.args)
                    error.add_note(describe_failure(folder, self.state.global_step, saves_every_step))
                raise
            finally:
                self._ahead.cancel()
                if self._sampler is not None:  # if the run continues, it requests these again
                    self._sampler.unanswered = {one.group.number for one in self._sampler.queue.requests_in_flight}


def _logged(name: str, group: PromptGroup) -> Sequence:
    """Return the values that reward functions logged in one column for each completion of a group."""
    return group.extra_logs.get(name, [None] * group.num_received)


def _outcome_of_filler(group: PromptGroup) -> str:
    """Return what the table of completions says of a group that only fills a batch."""
    if group.drop_reason is not None:
        return f"dropped: {group.drop_reason}"
    return "partial" if group.state is GroupState.PARTIAL else "copy"


def _warn_of_column(column: str, num_values: int, num_completions: int) -> None:
    """Warn that a column is left out of the completions table because its values cannot be matched to completions."""
    logger.warning_once(
        f"`log_extra` was given {num_values} values of {column!r} for {num_completions} completions, so it is unknown "
        "which value belongs to which completion. The column is left out of the table of completions. Pass one value "
        "for each completion, which may be `None`."
    )

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The seam into TRL: its way from prompts to tensors, run in two halves.

TRL turns prompts into tensors in one private method, `_generate_and_score_completions`. Each round of dynamic sampling
runs it inside [`RecordReplay._recording`], which keeps what `_generate` and `_calculate_rewards` returned and pays for
no forward pass. Then it runs once more inside [`RecordReplay._replaying`], on the rows that train, and those two
methods hand back what was recorded.
"""

import copy
import math
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object, send_to_device
from datasets import IterableDataset
from torch import Tensor
from torch.utils.data import DataLoader
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, EvalLoopOutput, has_length
from transformers.utils import logging
from trl.trainer.utils import pad

from ..evaluation.scores import EvaluationScores, Prefetch, rows_that_fit
from ..models import context_length
from ..ranks import on_main_process
from ..rewards.checks import wrap_reward
from ..rewards.dapo_math import completion_text
from ..rewards.names import find_answers
from ..rewards.task_reward import SCORES_LEFT_OUT, TaskReward
from ..run.checkpoint import WHOLE_NAME, load_state, rule_of, save_state
from ..run.log import describe_changes, settings_to_compare
from ..run.stops import StopCallback
from ..run.stopwatch import Stopwatch
from ..run.terminal import wrapped_for
from ..sampling.example_names import content_digest, problem_source
from ..sampling.report import length_metrics
from ..sampling.rounds import Recorded
from ..sampling.rows import Row, as_generated, rows_from_generated
from ..sampling.sampler import Sampler
from ..settings.arguments import read_mapping
from ..update.compat import add_end_tokens, end_tokens
from ..update.old_logps import put_rows
from ..update.phase import UpdatePhase
from ..update.rows import mask_rows
from ..update.swap import in_mode, swapped
from .ahead import GroupsAhead
from .lora_sync import AdapterGeneration
from .server import check_ahead, describing_loss
from .stops import Stops


logger = logging.get_logger(__name__)


class RecordReplay(UpdatePhase):
    """The update phase with its engine, and a way from prompts to tensors that can be recorded and replayed."""

    vllm_generation: AdapterGeneration
    _ahead: GroupsAhead
    _prefetch: Prefetch
    # In a trainer that was made without `__init__` neither half runs.
    _recorded: Recorded | None = None
    _replayed: tuple[tuple, Tensor] | None = None  # what `_generate` and `_calculate_rewards` hand back
    _earlier_logps: Sequence | None = None  # for TRL's next forward pass: of rows that an earlier policy sampled
    _stops: Stops
    _completion_lengths: Sequence[int] = ()  # the model's own tokens of this rank's last completions
    _rows_cut_off: Sequence[bool] = ()  # which of them a limit ended
    _scores_dummies = False  # whether the completions that are scored now were not sampled

    @contextmanager
    def _recording(self, score: Callable[..., Tensor] | None = None) -> Iterator[Recorded]:
        """Keep what TRL makes of one round, and keep it out of the trainer's own metrics and logs."""
        logs, metrics = _empty_logs(self._logs), _empty_metrics()
        recorded = Recorded(score, metrics=metrics["train"])
        with swapped(self, _recorded=recorded, _logs=logs, _metrics=metrics):
            yield recorded

    @contextmanager
    def _replaying(self, rows: list[Row], rewards: Tensor) -> Iterator[dict[str, list[float]]]:
        """Hands TRL the rows as if they had just been sampled together; yields what it measures of them."""
        metrics = _empty_metrics()
        environments: AbstractContextManager[None] = nullcontext()
        if self.environment_factories is not None:
            # Not reset a second time, and left as TRL leaves them: those of the batch that was sampled last.
            done = SimpleNamespace(reset=lambda **kwargs: None)
            pool = {name: [done] * len(rows) for name in self._environment_pool}
            environments = swapped(self, _environment_pool=pool, environments=self.environments)
        # TRL's first pass is that of the old policy, if it weighs by how far the engine was from it.
        weighs = self.use_vllm and self.vllm_importance_sampling_correction and not self._passes_once
        earlier = [row.old_logps for row in rows] if weighs else None
        with (
            environments,
            swapped(self, _replayed=(as_generated(rows), rewards), _earlier_logps=earlier, _metrics=metrics),
        ):
            yield metrics["train"]

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        is_ours = self._is_made and self._stops.differ_from_trls and self.mask_truncated_completions
        if not is_ours or self._recorded is not None:
            return super()._generate_and_score_completions(inputs)
        # TRL would leave out what a stop ended.
        with swapped(self, mask_truncated_completions=False):
            rollouts = super()._generate_and_score_completions(inputs)
        mask_rows(rollouts, self._rows_cut_off)
        loss_mask = rollouts["completion_mask"] * rollouts.get("tool_mask", 1)
        rollouts["num_items_in_batch"] = self.accelerator.gather(loss_mask.sum()).sum()
        return rollouts

    def _generate(self, prompts: list) -> tuple:
        if self._replayed is not None:
            self._rows_cut_off = self._cut_off(self._replayed[0])
            return self._replayed[0]
        generated = self._sample_completions(prompts)
        self._completion_lengths = _lengths(generated)
        self._rows_cut_off = self._cut_off(generated) if self._is_made else []
        if self._recorded is not None:
            environments = None if self.environment_factories is None else self._batch_environments
            self._recorded.rows = rows_from_generated(generated, prompts, environments)
            self._recorded.lengths = self._completion_lengths
            self._recorded.truncated = self._rows_cut_off
        return generated

    def _cut_off(self, generated: tuple) -> list[bool]:
        _, completion_ids, tool_mask, *_ = generated
        masks = tool_mask or repeat(None)
        return [self._stops.is_cut_off(ids, mask) for ids, mask in zip(completion_ids, masks, strict=False)]

    def _calculate_rewards(self, *batch: Any) -> Tensor:  # the four of TRL, by position
        if self._replayed is not None:
            return self._replayed[1]
        if self._recorded is not None and self._recorded.score is not None:
            return self._recorded.score(*batch)
        return self._score_completions(*batch)

    def _score_completions(self, *batch: Any) -> Tensor:  # overridden in place of TRL's own
        return super()._calculate_rewards(*batch)

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> tuple:
        if self._recorded is not None:  # nobody reads these: the round is only sampled and scored
            _, input_ids, _, logits_to_keep, *_ = args
            return torch.zeros(len(input_ids), logits_to_keep, device=input_ids.device), None, None
        earlier, self._earlier_logps = self._earlier_logps, None
        result = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        put_rows(result[0], earlier or ())
        return result

    def _kept_columns(self) -> list[str] | None:
        """The columns that `remove_unused_columns` leaves to reward functions; `None` for all."""
        self._set_signature_columns_if_needed()
        return self._signature_columns if self.args.remove_unused_columns else None

    def _take_extra_logs(self, num_scored: int, num_rows: int | None = None) -> dict[str, list]:
        """
        Return what reward functions logged of each completion that all processes just scored, `None` for those beyond
        `num_scored` up to `num_rows`. Collective.
        """
        copies = [None] * (0 if num_rows is None else num_rows - num_scored)
        own, self._pending_extra_logs = self._pending_extra_logs, defaultdict(list)
        logs = {}
        for column in sorted({*gather_object(list(own))}):
            values = list(own.get(column, []))
            # One value for each completion, or none of them can be told apart.
            logs[column] = gather_object((values if len(values) == num_scored else [None] * num_scored) + copies)
        return logs

    def score_made_up(
        self, rows: list[dict], completions: list, completion_ids: list[list[int]], within: Callable
    ) -> Tensor:
        """Rewards of completions that nobody generated, each function called within `within(name)`; none is logged."""
        named = zip(self.reward_funcs, self.reward_func_names, strict=True)
        funcs = [wrap_reward(reward_func, name, within=partial(within, name)) for reward_func, name in named]
        lengths = [len(ids) for ids in completion_ids]
        with (
            in_mode(self.model, training=True),  # what is evaluated is kept for the scores
            # TRL reports how long each function takes, and no tracker is open yet.
            swapped(self.args, report_to=[]),
            swapped(self, reward_funcs=funcs, _completion_lengths=lengths, _scores_dummies=True),
            swapped(self, _pending_extra_logs=defaultdict(list), _pending_metrics=defaultdict(list)),
            self._recording(),
        ):
            return self._calculate_rewards(rows, [row["prompt"] for row in rows], completions, completion_ids)

    def policy_logps(self, rows: Sequence[Row]) -> list[np.ndarray]:
        """Return the log-probabilities of the rows' completions under the present policy, one array per row."""
        device, pad_token_id = self.accelerator.device, self._tokenizer.pad_token_id
        padded = partial(pad, pad_to_multiple_of=self.pad_to_multiple_of)
        ids = [torch.tensor(row.completion_ids) for row in rows]
        prompt_ids = padded([torch.tensor(row.prompt_ids) for row in rows], pad_token_id, padding_side="left")
        prompt_mask = padded([torch.ones(len(row.prompt_ids)) for row in rows], 0, padding_side="left")
        completion_ids, mask = padded(ids, pad_token_id), padded([torch.ones(len(row)) for row in ids], 0)
        with torch.no_grad():
            logps, _, _ = self._get_per_token_logps_and_entropies(
                self.model,
                torch.cat([prompt_ids, completion_ids], dim=1).long().to(device),
                torch.cat([prompt_mask, mask], dim=1).long().to(device),
                completion_ids.size(1),
                batch_size=self.args.per_device_train_batch_size,
            )
        return [row[: len(row_ids)].float().cpu().numpy() for row, row_ids in zip(logps, ids, strict=True)]

    # ---- What samples: with which parameters, how long it is awake, what it samples ahead of its time ----

    def _open_engine(self, stopwatch: Stopwatch) -> None:
        """Settle where completions end, and make what samples ahead: evaluation batches, groups for later rollouts."""
        kwargs = read_mapping("generation_kwargs", self.args.generation_kwargs) or {}
        if not self.use_vllm:
            vocab_size = self.model.config.get_text_config().vocab_size
            add_end_tokens(self, kwargs.get("eos_token_id"), self._tokenizer.eos_token_id, vocab_size)
        self._stops = Stops(
            self._tokenizer,
            ends=end_tokens(self, self._tokenizer.eos_token_id),
            use_vllm=self.use_vllm,
            generation_kwargs=kwargs,
        )
        client = self.vllm_generation.vllm_client if self._asks_a_server and self.accelerator.is_main_process else None
        if num_rollouts := self.args.rollouts_ahead:
            with self._describing_loss():
                on_main_process(check_ahead, client, num_rollouts, self.vllm_generation.why_merged)
        self._prefetch = Prefetch(self._generate_for_evaluation)
        self._ahead = GroupsAhead(
            client=client,
            tokenize=lambda prompts: self._tokenize_prompts(copy.deepcopy(prompts))[0],
            generate=self._generate_without_scoring,
            describing_loss=self._describing_loss,
            keeping_weights=lambda: swapped(self, _last_loaded_step=self.state.global_step),
            is_waited_for=num_rollouts == 1,
            stopwatch=stopwatch,
        )

    @property
    def _asks_a_server(self) -> bool:
        return self.use_vllm and self.args.vllm_mode == "server"

    @property
    def _engine_schedules(self) -> bool:
        """Whether the engine takes any number of rows in one call."""
        return self.use_vllm or self.use_transformers_continuous_batching

    def _describing_loss(self) -> AbstractContextManager[None]:
        # A rollout function may have asked somebody else.
        return describing_loss(self.args) if self._asks_a_server and self.rollout_func is None else nullcontext()

    def _sample_completions(self, prompts: list) -> tuple:
        if not self._is_made:
            return super()._generate(prompts)
        if not self.model.training and (generated := self._prefetch.take(prompts)) is not None:
            return generated
        self._ahead.join()
        parameters: AbstractContextManager[None] = nullcontext()
        if not self.model.training:
            asked = {name: getattr(self.args, f"eval_{name}") for name in ("temperature", "top_p", "top_k")}
            parameters = self._sampling_with(**{name: value for name, value in asked.items() if value is not None})
        with self._describing_loss(), self._ahead.timing_engine(), parameters:
            generated = super()._generate(prompts)
        if self._stops.differ_from_trls:
            self._correct_trls_metrics(_lengths(generated), self._cut_off(generated))
        return generated

    def _correct_trls_metrics(self, lengths: Sequence[int], cut_off: Sequence[bool]) -> None:
        """Puts into TRL's metrics of the last call which completions are cut off. Collective."""
        columns = torch.tensor([lengths, cut_off], device=self.accelerator.device).T.contiguous()
        lengths_B, cut_off_B = self.accelerator.gather(columns).T
        metrics = self._metrics["train" if self.model.training else "eval"]
        for name, value in length_metrics(lengths_B.double(), cut_off_B.bool()).items():
            metrics[name][-1] = value

    def _tool_call_loop(self, *args: Any) -> tuple:
        with getattr(getattr(self, "vllm_generation", None), "tool_turns", nullcontext)():  # of our own
            return super()._tool_call_loop(*args)

    def _generate_without_scoring(self, prompts: list, num_generations: int) -> None:
        """As TRL's `_generate`, up to where it needs the completions."""
        prompt_ids, images, fields = self._tokenize_prompts(copy.deepcopy(prompts))
        self._generate_single_turn(prompt_ids, images, fields, num_generations)

    def _generate_for_evaluation(self, prompts: list) -> tuple:
        """Completions for the prompts of several batches, one batch after the other."""
        k = self.num_generations_eval
        # vLLM's server is asked for n completions of every n-th prompt, over all processes. Where a
        # problem's rows lie in two processes, they are not neighbours any more.
        with swapped(self, num_generations_eval=math.gcd(k, self.args.per_device_eval_batch_size)):
            return self._generate(prompts)

    @contextmanager
    def _sampling_with(self, **parameters: float) -> Iterator[None]:
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
    def _awake(self) -> Iterator[None]:
        """Keeps an engine that sleeps between its calls awake for a block: each waking would push all weights."""
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


def _lengths(generated: tuple) -> list[int]:
    """How many tokens of each completion are the model's own."""
    _, completion_ids, tool_mask, *_ = generated
    return [sum(mask) for mask in tool_mask] if tool_mask else list(map(len, completion_ids))


def _empty_metrics() -> dict[str, dict[str, list[float]]]:
    return {"train": defaultdict(list), "eval": defaultdict(list)}


def _empty_logs(logs: dict) -> dict:
    """The structure of TRL's `_logs`, empty and without a bound."""
    return {name: defaultdict(list) if isinstance(value, defaultdict) else deque() for name, value in logs.items()}


class EvaluationSeam(RecordReplay):
    """Evaluation during training, with scores."""

    _task: TaskReward
    _scores: EvaluationScores
    stopwatch: Stopwatch

    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """TRL's, with scores in what it returns, and with an engine asked once for as many batches as fit."""
        dataset, how_much = getattr(dataloader, "dataset", None), ""
        if has_length(dataset):
            how_much = f"{len(dataset)} prompts x {self.num_generations_eval} in {len(dataloader)} batches"
            self._tell_counted_twice(len(dataset) * self.num_generations_eval)
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
            how = description, prediction_loss_only, ignore_keys, metric_key_prefix
            output = super().evaluation_loop(dataloader, *how)
        scores = self._scores.means() if self._task.tells_right else {}
        assert output.metrics is not None
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in scores.items()})
        return output

    def _tell_counted_twice(self, num_completions: int) -> None:
        """Says which figures of TRL count what fills the last batch of several processes."""
        num_processes = self.accelerator.num_processes
        per_batch = self.args.per_device_eval_batch_size * num_processes
        if num_processes > 1 and num_completions % per_batch and self.accelerator.is_main_process:
            logger.warning_once(
                f"An evaluation of {num_completions} completions fills no whole number of batches of {per_batch}, so "
                f"{-num_completions % per_batch} are sampled twice. `eval_reward` and the other means of TRL count "
                f"them twice; avg@k, pass@k and maj@k do not."
            )

    def _evaluated_rows(self, inputs: list[dict], completions: list) -> list[tuple]:
        """Source, content and completion of each row of a batch, asked before a reward function can change it."""
        if not self._task.tells_right:
            return []
        return [
            (problem_source(example), content_digest(example), completion_text(completion))
            for example, completion in zip(inputs, completions, strict=True)
        ]

    def _remember_evaluated(self, own_rows: list[tuple], rewards: Tensor, logged: dict[str, list]) -> None:
        """Adds the verdicts and answers of a batch to the scores, where there is a right and a wrong."""
        if not self._task.tells_right:
            logger.warning_once(SCORES_LEFT_OUT)
            return
        answers, states_answers = find_answers(self._task.names, logged, [text for *_, text in own_rows])
        rows = gather_object([(*problem, answer) for (*problem, _), answer in zip(own_rows, answers, strict=True)])
        rewards = self._task.scaled(rewards, self.args.reward_scaling).cpu()
        verdicts = zip(self._task.of(rewards).tolist(), self._task.is_right(rewards).tolist(), strict=True)
        right = [None if math.isnan(reward) else is_right for reward, is_right in verdicts]
        problems = [tuple(problem) for *problem, _ in rows]
        self._scores.add(problems, [answer for *_, answer in rows], right, states_answers)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """With the last batch, also if `dataloader_drop_last=True`: that is for training."""
        with swapped(self.args, dataloader_drop_last=False):
            return super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        with swapped(self.args, dataloader_drop_last=False):
            return super().get_test_dataloader(test_dataset)


class Checkpoints(EvaluationSeam):
    """What a checkpoint holds beside the files of transformers, and how a run goes on from it."""

    _sampler: Sampler | None = None
    _group_filter: Any
    _rule: dict[str, Any] | None = None  # what decided on the rows of the last rollout
    stop: StopCallback

    def _roll_out(self, batch: list[dict[str, Any]]) -> list[dict]:
        parts = super()._roll_out(batch)
        self._rule = self._rule_of_now()  # a callback may change the weights before they are saved
        return parts

    def _rule_of_now(self) -> dict[str, Any]:
        """What decides on rows today, and how they are sampled."""
        weights = [round(weight, 6) for weight in self.reward_weights.tolist()]  # of float32
        others: dict[str, Any] = {"reward_funcs": self.reward_func_names, "reward_weights": weights}
        others |= {"dynamic_sampling_rewards": self._task.names, "prompts_per_rollout": self.args.groups_per_rollout}
        return rule_of(self.args, others | {"group_filter": self._group_filter})

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        folder = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        with self.stopwatch.timing("checkpoint"):
            local = None if self.args.save_only_model else self._local_state()
            folder.mkdir(parents=True, exist_ok=True)
            if self.args.should_save:  # one of an earlier run that is written over is not whole any more
                (folder / WHOLE_NAME).unlink(missing_ok=True)
            self.accelerator.wait_for_everyone()
            if local is not None:
                save_state(folder, self.args, self._sampler, local)
            super()._save_checkpoint(model, trial)

    def update_state_dict(self) -> dict:
        """What the update phase needs to go on from a checkpoint, on this rank, loadable with `weights_only=True`."""
        phase = self._step % self._generate_every
        return {
            "step": self._step if phase else 0,
            "generate_every": self._generate_every,
            "accumulation": int(self.args.gradient_accumulation_steps),  # whatever type marks it as worked out
            "rollout": self._buffered_inputs if phase else None,
        }

    def load_update_state_dict(self, state: dict) -> None:
        """Goes on from where [`Checkpoints.update_state_dict`] left off, where the rows fit."""
        self._step = state["step"]
        self._buffered_inputs = send_to_device(state["rollout"], self.accelerator.device)

    def _local_state(self) -> dict[str, Any]:
        """What a checkpoint keeps of this rank."""
        return {
            "settings": settings_to_compare(self.args),
            "rule": self._rule or self._rule_of_now(),
            "update": self.update_state_dict(),
            "metrics": dict(self._metrics["train"]),
            # TRL keeps these in a file that it writes only after the one that says that all is written.
            "entropy": (self.entropy_coef, self._last_world_entropy) if self.use_adaptive_entropy else None,
            "queue": None if self._sampler is None else self._sampler.queue.state_dict(),
            "ahead": self._ahead.state_dict(),
            "reward_values": sorted(self._task.values),
        }

    def _misfits(self, local: dict[str, Any], header: dict[str, Any]) -> dict[str, tuple]:
        """Settings that this rank's rows do not fit, the checkpoint's and this run's."""
        self._rule = self._rule_of_now()
        theirs, own, update = header | local["rule"], dict(self._rule), local["update"]
        if (rollout := update["rollout"]) is not None:
            sizes: dict[str, Any] = {"per_device_train_batch_size": len(rollout[0]["completion_ids"])}
            sizes |= {"num_iterations": update["generate_every"] // len(rollout), "steps_per_generation": len(rollout)}
            if "ref_per_token_logps" not in rollout[0]:
                sizes["beta"] = 0.0
            if update["step"] % update["generate_every"] % self.args.gradient_accumulation_steps:
                # No step would end with the rollout, where limits of the run are looked at.
                sizes["gradient_accumulation_steps"] = update.get("accumulation")
            theirs |= {name: x for name, x in sizes.items() if x is not None}
            own |= {name: getattr(self.args, name) for name in sizes}
        return {name: (x, own[name]) for name, x in theirs.items() if own.get(name, x) != x}

    def _load_local(self, checkpoint: str, local: dict[str, Any], rows_fit: bool) -> None:
        line = describe_changes(checkpoint, local["settings"], settings_to_compare(self.args))
        if line is not None:
            self.accelerator.print(wrapped_for(sys.stdout, line))
        if self.use_adaptive_entropy and local["entropy"] is not None:
            self.entropy_coef, self._last_world_entropy = local["entropy"]
        self._metrics["train"].update(local["metrics"])
        decides = "reward_funcs", "reward_weights", "dynamic_sampling_rewards"
        theirs, own = local["rule"], self._rule_of_now()
        if all(theirs.get(name) == own[name] for name in decides):  # else they are another reward's
            self._task = self._task.with_values(local.get("reward_values", ()))
        if rows_fit:
            if self._sampler is not None and not self.args.ignore_data_skip:
                requests = self._sampler.queue.in_flight
                self._sampler.unanswered = self._ahead.load_state_dict(local["ahead"], requests)
            self.load_update_state_dict(local["update"])

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        # The main process writes `trainer_state.json` next: not before every rank's files are there.
        self.accelerator.wait_for_everyone()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        dtypes = {name: parameter.dtype for name, parameter in self.model.named_parameters()}
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        adapters = getattr(self.model, "peft_config", ())
        if len(adapters) > 1 and "default" in adapters and not self.is_fsdp_enabled:  # until 5.23 left out
            self.model.load_adapter(resume_from_checkpoint, "default", is_trainable=True)
        # TRL holds a quantized model's adapter in bfloat16, and peft would bring it back in float32.
        for name, parameter in self.model.named_parameters():
            if parameter.dtype != dtypes.get(name, parameter.dtype):
                parameter.data = parameter.data.to(dtypes[name])

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self._last_loaded_step = -1  # vLLM's weights are of the last steps

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            restore = partial(self._load_local, checkpoint)
            load_state(Path(checkpoint), self._sampler, self._misfits, restore, self.args.ignore_data_skip)

    def get_train_dataloader(self) -> DataLoader:
        if self._sampler is None or not isinstance(self.train_dataset, IterableDataset):
            return super().get_train_dataloader()
        # The sampler reads the stream. TRL's loader only sets the pace: reading it too would cost as much again, and
        # where it starts over differs after a resume.
        pace = IterableDataset.from_generator(repeat, gen_kwargs={"object": {"prompt": ""}})
        with swapped(self, train_dataset=pace):
            return super().get_train_dataloader()

    def get_batch_samples(self, *args: Any) -> tuple[list, Tensor | int | None]:
        if self.state.global_step < self.state.max_steps and not self.stop.is_used_up:
            return super().get_batch_samples(*args)
        self.control.should_training_stop = True  # resumed at its end, from where transformers takes one more step
        return [], None

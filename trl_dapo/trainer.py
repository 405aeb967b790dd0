# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""DAPO (arXiv 2503.14476), Algorithm 1, on top of TRL's `GRPOTrainer`.

    for each rollout batch:
        sample G completions a prompt and score them        _sample_round
        keep the groups that are neither all right nor all   groups.judge, Refill
        wrong; not full: sample again
        advantages within each group                        GRPOTrainer, on the rows that were kept (_replay)
        for each optimizer step:
            Clip-Higher, token mean                         UpdatePhase

TRL turns prompts into tensors in one private method, `_generate_and_score_completions`. It is wrapped, not copied:
each round runs it in recording mode, which keeps what `_generate` and `_calculate_rewards` returned and pays for no
forward pass; then it runs once more, on the rows that train, with the recorded values handed back to it.
"""

import copy
import json
import math
import textwrap
import time
from collections import defaultdict, deque
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from tqdm.auto import tqdm
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, has_length
from transformers.utils import logging
from trl import GRPOConfig
from trl.trainer.utils import get_config_model_id, pad

from .config import DAPOConfig
from .evaluation.prefetch import Prefetch, rows_that_fit
from .evaluation.scores import EvaluationScores, problem_id
from .history import LogHistoryCallback, last_complete_checkpoint
from .rewards import SoftOverlongPunishment, scale_reward, score_dapo_math
from .rewards.dapo_math import NO_ANSWER, completion_text
from .sampling.groups import REASONS, Criterion, deciding_reward, is_correct, judge
from .sampling.memory import PromptMemory
from .sampling.prompts import PromptStream
from .sampling.refill import AcceptanceRate, Refill
from .sampling.rollouts import Round, deal_groups, local_slice, pack_rows, record_rows, replay_rows, select_groups
from .update import UpdatePhase


logger = logging.get_logger(__name__)

# Reward functions that measure length, TRL's and ours: they never decide whether a group is accepted.
LENGTH_PENALTIES = ("soft_overlong_punishment", "soft_overlong_punishment_reward")

STATE_NAME, MEMORY_NAME = "dapo_state.json", "dapo_memory.parquet"


class _NoReset:
    """Stands in for the environments of completed rollouts, which must not be reset a second time."""

    def reset(self, **kwargs):
        return None


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

    def __init__(self, model, reward_funcs=None, args: DAPOConfig | None = None, *other_args, **kwargs):
        if args is None:
            model_id = model if isinstance(model, str) else get_config_model_id(model.config)
            args = DAPOConfig(f"{model_id.split('/')[-1]}-DAPO")
        if not isinstance(args, DAPOConfig):
            fix = "DAPOConfig(...)" if isinstance(args, GRPOConfig) else "a `DAPOConfig`"
            raise TypeError(
                f"`args` must be a `DAPOConfig`, got `{type(args).__name__}`. Replace `{type(args).__name__}(...)` by "
                f"`{fix}` (`from trl_dapo import DAPOConfig`); every field of `GRPOConfig` is accepted."
            )
        self._recorded: dict | None = None  # what the current round produced
        self._replayed: dict | None = None  # what the current replay hands back
        self._completion_lengths: list[int] = []
        reward_funcs = list(reward_funcs) if isinstance(reward_funcs, (list, tuple)) else reward_funcs
        super().__init__(model, reward_funcs, args, *other_args, **kwargs)

        if args.overlong_buffer_length is not None:
            self._add_overlong_punishment()
        self._criterion, self._decides = self._deciding_rewards()
        self._acceptance = AcceptanceRate()
        self._prompt_stream = self._open_prompt_stream() if args.use_dynamic_sampling else None
        self._memory = PromptMemory(seed=args.seed) if args.dynamic_sampling_memory else None
        self._carried: Round | None = None  # the surplus of the last rollout
        self._num_short_rollouts = 0
        self._scores = EvaluationScores(self.num_generations_eval)
        self._prefetch = Prefetch(self._generate_for_evaluation)
        self.add_callback(LogHistoryCallback())
        if args.dynamic_sampling_surplus == "carry" and self._is_vlm:
            raise ValueError(
                "`dynamic_sampling_surplus='carry'` does not support models with images: a checkpoint cannot hold "
                "them. Set `dynamic_sampling_surplus='discard'`."
            )

    # ---- Reward functions ----

    def _add_overlong_punishment(self):
        """Adds the soft overlong punishment as TRL adds an environment's own reward: a further column of weight 1."""
        punishment = SoftOverlongPunishment(
            self.max_completion_length, self.args.overlong_buffer_length, self.args.overlong_penalty_factor
        )

        def soft_overlong_punishment(completion_ids, **kwargs):
            # Tool and environment tokens are not the model's: `_generate` counted without them.
            return punishment(completion_ids=completion_ids, completion_lengths=self._completion_lengths)

        self.reward_funcs.append(soft_overlong_punishment)
        self.reward_func_names.append(punishment.__name__)
        self.reward_processing_classes.append(None)
        self.reward_weights = torch.cat([self.reward_weights, torch.ones(1)])

    def _deciding_rewards(self) -> tuple[Criterion, torch.Tensor]:
        """Which reward columns decide, and by what rule."""
        args, names = self.args, self.reward_func_names
        candidates = [name for name in names if name not in LENGTH_PENALTIES]
        chosen = candidates if args.dynamic_sampling_rewards is None else args.dynamic_sampling_rewards
        if unknown := [name for name in chosen if name not in names]:
            raise ValueError(
                f"`dynamic_sampling_rewards` names {', '.join(map(repr, unknown))}, but the reward functions are "
                f"{', '.join(map(repr, names))}."
            )
        if penalties := [name for name in chosen if name in LENGTH_PENALTIES]:
            raise ValueError(
                f"`dynamic_sampling_rewards` names {penalties[0]!r}, a length penalty: groups of wrong completions of "
                f"different lengths would be accepted. Choose from {', '.join(map(repr, candidates)) or 'none'}."
            )
        if args.use_dynamic_sampling and not chosen:
            raise ValueError(
                f"The only reward function, {names[0]!r}, is a length penalty, which cannot decide whether a group is "
                "accepted. Add a task reward, or set `use_dynamic_sampling=False`."
            )
        decides = torch.tensor([name in chosen for name in names])
        best = 1.0 if args.reward_scaling is None else args.reward_scaling_target_max
        criterion = Criterion(
            min_accuracy=args.dynamic_sampling_min_accuracy,
            max_accuracy=args.dynamic_sampling_max_accuracy,
            accuracy_threshold=args.dynamic_sampling_accuracy_threshold,
            full_score=self.reward_weights[decides].sum().item() * best,
        )
        return criterion, decides

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        if self._replayed is not None:
            return self._replayed["rewards"]
        error = None
        try:
            rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        except Exception as exc:
            # The other ranks wait for this rank's rewards: answer them with what no reward function returns.
            error = exc
            rewards = torch.full((len(prompts), len(self.reward_funcs)), torch.inf, device=self.accelerator.device)
            rewards = self.accelerator.gather(rewards)
        if torch.isinf(rewards).any():
            self._raise_on_every_rank(error, rewards)
        if self.model.training and self.args.reward_scaling is not None:
            for i in self._decides.nonzero().flatten().tolist():
                scaled = scale_reward(rewards[:, i].tolist(), **self.args.reward_scaling)
                rewards[:, i] = torch.tensor(scaled, device=rewards.device)
        if self._recorded is not None:
            self._recorded["rewards"] = rewards
        if not self.model.training:
            self._remember_evaluated(inputs, completions, rewards)
        return rewards

    def _raise_on_every_rank(self, error: Exception | None, rewards: torch.Tensor):
        messages = gather_object([None if error is None else f"{type(error).__name__}: {error}"])
        if error is not None:
            raise error
        for rank, message in enumerate(messages):
            if message is not None:
                raise RuntimeError(f"The reward functions failed on process {rank}: {message}")
        name = self.reward_func_names[int(torch.isinf(rewards).any(dim=0).nonzero()[0])]
        raise ValueError(
            f"The reward function {name!r} returned an infinite reward. Return `None` for a completion that cannot be "
            "scored."
        )

    # ---- Algorithm 1: sample until the batch is full ----

    def _generate_and_score_completions(self, inputs):
        if not (self.model.training and self.args.use_dynamic_sampling):
            return super()._generate_and_score_completions(inputs)
        refill = self._new_refill(len(inputs) * self.accelerator.num_processes // self.num_generations)
        carried, rounds = self._carried, []
        num_skipped, seconds = self._prompt_stream.num_skipped, []
        with self._progress_bar(refill) as show_progress:
            while not self._is_enough(refill):
                started = time.perf_counter()
                rounds.append(self._sample_round(self._next_prompts(refill.next_round_size())))
                verdicts = self._verdicts(rounds[-1])
                refill.offer(verdicts)
                self._pack(rounds[-1], verdicts)
                seconds.append(time.perf_counter() - started)
                show_progress()
        self._on_shortfall(refill)
        rollouts = self._train_on(([carried] if carried else []) + rounds, refill)
        self._log_sampling(
            rounds,
            refill,
            tokens_trained=int(rollouts["num_items_in_batch"]),
            skipped_by_memory=self._prompt_stream.num_skipped - num_skipped,
            refill_seconds=sum(seconds[1:]),
        )
        return rollouts

    def _new_refill(self, target: int) -> Refill:
        args = self.args
        if args.dynamic_sampling_mode == "mask":
            return Refill(target=target, acceptance=self._acceptance, max_rounds=1, batch_multiplier=1.0)
        # Without a scheduler, a round runs as one batch and must fit where the rollout batch fits.
        schedules = self.use_vllm or self.use_transformers_continuous_batching
        return Refill(
            target=target,
            acceptance=self._acceptance,
            max_rounds=args.dynamic_sampling_max_rounds,
            max_round_size=args.dynamic_sampling_max_round_size or (None if schedules else target),
            multiple_of=self._smallest_split,
            batch_multiplier=args.batch_multiplier,
            num_carried=len(self._carried.prompts) if self._carried else 0,
        )

    @property
    def _smallest_split(self) -> int:
        """The least number of groups whose rows all ranks can share equally."""
        world_size = self.accelerator.num_processes
        return world_size // math.gcd(self.num_generations, world_size)

    def _is_enough(self, refill: Refill) -> bool:
        return refill.done or self._can_replace(refill)

    def _can_replace(self, refill: Refill) -> bool:
        """Whether enough groups are accepted for copies of them to stand in for the dropped ones."""
        enough = self.args.min_replace_ratio * refill.target
        return self.args.dynamic_sampling_mode == "replace" and len(refill.taken) >= enough

    def _next_prompts(self, num_prompts: int) -> list[tuple[str, dict]]:
        if self._memory is None:
            return self._prompt_stream.take(num_prompts)
        return self._prompt_stream.take(
            num_prompts, lambda prompt: self._memory.should_skip(prompt, self.state.global_step, self.num_generations)
        )

    def _sample_round(self, prompts: list[tuple[str, dict]]) -> Round:
        """Samples and scores one group a prompt; no log-probability is computed."""
        examples = [example for _, example in prompts for _ in range(self.num_generations)]
        mine = local_slice(len(examples), self.accelerator.process_index, self.accelerator.num_processes)
        self._recorded = {}
        try:
            with self._scratch_logs() as (metrics, logs):
                # A copy a row: TRL writes a rollout function's extra fields into it.
                super()._generate_and_score_completions([dict(example) for example in examples[mine]])
            recorded = self._recorded
        finally:
            self._recorded = None
        columns = torch.tensor([self._completion_lengths, recorded["truncated"]], device=self.accelerator.device)
        lengths_B, truncated_B = self.accelerator.gather(columns.T).cpu().T
        return Round(
            prompts=prompts,
            rows=recorded["rows"],
            rewards_BF=recorded["rewards"].cpu(),
            lengths_B=lengths_B,
            truncated_B=truncated_B.bool(),
            extra_logs={
                column: list(values) for column, values in logs["extra"].items() if len(values) == len(examples)
            },
            metrics=metrics,
        )

    def _verdicts(self, round_: Round) -> list[str | None]:
        """For each group of a round: `None` if it is accepted, else the reason why not."""
        G = self.num_generations
        rewards = deciding_reward(round_.rewards_BF, self.reward_weights, self._decides).view(-1, G)
        masked = (
            round_.truncated_B.view(-1, G) if self.mask_truncated_completions else torch.zeros_like(rewards).bool()
        )
        if self._memory is not None:
            scored = ~rewards.isnan() & ~masked
            correct = scored & is_correct(rewards, self._criterion)
            counts = zip(round_.prompts, correct.sum(1).tolist(), scored.sum(1).tolist(), strict=True)
            for (prompt_id, _), num_correct, num_scored in counts:
                self._memory.update(prompt_id, num_correct, num_scored, self.state.global_step)
        return judge(rewards, masked, self._criterion)

    def _pack(self, round_: Round, verdicts: list[str | None]):
        """Lets go of what a dropped group's rows hold, and makes arrays of the others."""
        accepted = [verdict is None for verdict in verdicts for _ in range(self.num_generations)]
        mine = local_slice(len(accepted), self.accelerator.process_index, self.accelerator.num_processes)
        pack_rows(round_.rows, accepted[mine])

    def _train_on(self, rounds: list[Round], refill: Refill) -> dict:
        """The rollout batch: carried groups, then those taken in prompt order, then what fills it if it is short."""
        first = refill.num_carried
        live = [*range(first), *(first + i for i in refill.taken)]
        num_groups = sum(len(round_.prompts) for round_ in rounds)
        if self._can_replace(refill):
            live = [live[i % len(live)] for i in range(refill.target)]
        idle = sorted({*range(num_groups)} - {*live}) or live
        filler = [idle[i % len(idle)] for i in range(refill.target - len(live))]

        rows = self._deal(rounds, live, filler)
        num_live = len(live) * self.num_generations
        rewards = select_groups([round_.rewards_BF for round_ in rounds], [*live, *filler], self.num_generations)
        rewards[num_live:] = torch.nan  # TRL leaves what cannot be scored out of every mean
        mine = local_slice(len(rewards), self.accelerator.process_index, self.accelerator.num_processes)
        self._pending_extra_logs.update(self._extra_logs(rounds, [*live, *filler], mine))
        rollouts = self._replay(rows, rewards, num_live=max(0, min(num_live, mine.stop) - mine.start))
        if first:
            _restore_old_logps(rollouts, rows["old_logps"])
        if self.args.dynamic_sampling_surplus == "carry":
            self._carried = self._carry(rounds, [first + i for i in refill.surplus][: refill.target])
        return rollouts

    def _deal(self, rounds: list[Round], live: list[int], filler: list[int]) -> dict[str, list]:
        """This rank's rows of the groups `live`, then of the groups `filler`, cut short."""
        return deal_groups(rounds, live, filler, self.num_generations, self.accelerator.device)

    def _carry(self, rounds: list[Round], surplus: list[int]) -> Round | None:
        """The surplus, with the log-probabilities of the policy that sampled it, for the next rollout."""
        surplus = surplus[: len(surplus) // self._smallest_split * self._smallest_split]
        if not surplus:
            return None
        rows = self._deal(rounds, surplus, [])
        rows["old_logps"] = rows["logprobs"] if rows["logprobs"][0] is not None else self._logps_of(rows)
        rewards = select_groups([round_.rewards_BF for round_ in rounds], surplus, self.num_generations)
        return Round.carried(rows, rewards, num_prompts=len(surplus))

    def _logps_of(self, rows: dict[str, list]) -> list:
        """Log-probabilities of the rows' completions under the present policy."""
        device, pad_token_id = self.accelerator.device, self._tokenizer.pad_token_id
        ids = [torch.tensor(row) for row in rows["completion_ids"]]
        prompt_ids = pad([torch.tensor(row) for row in rows["prompt_ids"]], pad_token_id, padding_side="left")
        prompt_mask = pad([torch.ones(len(row)) for row in rows["prompt_ids"]], 0, padding_side="left")
        completion_ids, mask = pad(ids, pad_token_id), pad([torch.ones(len(row)) for row in ids], 0)
        with torch.no_grad():
            logps, _, _ = self._get_per_token_logps_and_entropies(
                self.model,
                torch.cat([prompt_ids, completion_ids], dim=1).long().to(device),
                torch.cat([prompt_mask, mask], dim=1).long().to(device),
                completion_ids.size(1),
                batch_size=self.args.per_device_train_batch_size,
            )
        return [row[: len(row_ids)].float().cpu().numpy() for row, row_ids in zip(logps, ids, strict=True)]

    def _extra_logs(self, rounds: list[Round], groups: list[int], mine: slice) -> dict[str, list]:
        """What the reward functions logged of this rank's rows, for the completions table."""
        G, logs = self.num_generations, {}
        for column in dict.fromkeys(column for round_ in rounds for column in round_.extra_logs):
            values = [
                value for round_ in rounds for value in round_.extra_logs.get(column, [None] * len(round_.rewards_BF))
            ]
            logs[column] = [value for i in groups for value in values[i * G : (i + 1) * G]][mine]
        return logs

    # ---- The seam: record, then replay ----

    def _generate(self, prompts):
        if self._replayed is not None:
            return self._replayed["generated"]
        generated = None if self.model.training else self._prefetch.take(prompts)
        if generated is None:
            with self._naming_the_server(), nullcontext() if self.model.training else self._eval_sampling():
                generated = super()._generate(prompts)
        _, completion_ids, tool_mask, *_ = generated
        self._completion_lengths = [sum(mask) for mask in tool_mask] if tool_mask else list(map(len, completion_ids))
        if self._recorded is not None:
            ends = {*self.eos_token_ids, self._tokenizer.pad_token_id}
            environments = None if self.environment_factories is None else self._batch_environments
            self._recorded["rows"] = record_rows(generated, prompts, environments)
            self._recorded["truncated"] = [ids[-1] not in ends for ids in completion_ids]
        return generated

    @contextmanager
    def _naming_the_server(self):
        """Says which server was lost and how to go on: TRL's client retries, and then raises what its socket says."""
        args = self.args
        try:
            yield
        except OSError as error:
            if not (self.use_vllm and args.vllm_mode == "server") or self.rollout_func is not None:
                raise
            url = args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"
            checkpoint = last_complete_checkpoint(args.output_dir)
            how = f"resume from {checkpoint}" if checkpoint else f"train anew: {args.output_dir} holds no checkpoint"
            raise RuntimeError(f"The vLLM server at {url} is gone ({error}). Start it again and {how}.") from error

    @contextmanager
    def _eval_sampling(self):
        """Samples with `eval_temperature`, `eval_top_p` and `eval_top_k` where they are set."""
        names = ("temperature", "top_p", "top_k")
        changed = {name: getattr(self.args, f"eval_{name}") for name in names}
        changed = {name: value for name, value in changed.items() if value is not None}
        if self.use_vllm:
            usual = {name: getattr(self.vllm_generation, name) for name in changed}
            vars(self.vllm_generation).update(changed)
            try:
                yield
            finally:
                vars(self.vllm_generation).update(usual)
        else:
            usual = self.generation_config, self.generation_kwargs
            self.generation_kwargs = {**self.generation_kwargs, **changed}
            self.generation_config = copy.deepcopy(self.generation_config)
            self.generation_config.update(**changed)
            try:
                yield
            finally:
                self.generation_config, self.generation_kwargs = usual
                self.model.eval()  # TRL's continuous batching leaves it in training mode

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs):
        if self._recorded is not None:  # nobody reads these: the round is only sampled and scored
            return torch.zeros(len(input_ids), logits_to_keep, device=input_ids.device), None, None
        return super()._get_per_token_logps_and_entropies(
            model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
        )

    def _replay(self, rows: dict[str, list], rewards: torch.Tensor, num_live: int) -> dict:
        """TRL's rollout batch of `rows`, as if they had just been sampled together; only `num_live` of them train."""
        self._replayed = {"rewards": rewards.to(self.accelerator.device), "generated": replay_rows(rows)}
        inputs = [
            {"prompt": prompt, "environment": environment}
            for prompt, environment in zip(rows["prompt"], rows["environment"], strict=True)
        ]
        try:
            with self._no_environment_resets(len(inputs)), self._scratch_metrics() as metrics:
                rollouts = super()._generate_and_score_completions(inputs)
        finally:
            self._replayed = None
        self._replay_metrics = metrics
        if num_live < len(inputs):
            rollouts["completion_mask"][num_live:] = 0
            rollouts["advantages"][num_live:] = 0
        loss_mask = rollouts["completion_mask"] * rollouts.get("tool_mask", 1)
        rollouts["num_items_in_batch"] = self.accelerator.gather(loss_mask.sum()).sum()
        return rollouts

    @contextmanager
    def _no_environment_resets(self, num_rows: int):
        if self.environment_factories is None:
            yield
            return
        pool = self._environment_pool
        self._environment_pool = {name: [_NoReset()] * num_rows for name in pool}
        try:
            yield
        finally:
            self._environment_pool, self.environments = pool, None

    @contextmanager
    def _scratch_metrics(self):
        metrics, self._metrics = self._metrics, {"train": defaultdict(list), "eval": defaultdict(list)}
        try:
            yield self._metrics["train"]
        finally:
            self._metrics = metrics

    @contextmanager
    def _scratch_logs(self):
        logs, self._logs = self._logs, _empty_logs(self._logs)
        try:
            with self._scratch_metrics() as metrics:
                yield metrics, self._logs
        finally:
            self._logs = logs

    # ---- Evaluation ----

    def evaluation_loop(
        self, dataloader, description, prediction_loss_only=None, ignore_keys=None, metric_key_prefix="eval"
    ):
        """TRL's, with scores in what it returns, and with an engine asked once for as many batches as fit."""
        dataset = getattr(dataloader, "dataset", None)
        self._scores.begin(len(dataset) if has_length(dataset) else None)
        self._metrics["eval"].clear()
        schedules = self.use_vllm or self.use_transformers_continuous_batching
        if schedules and not (self.tools or self.environment_factories or self.rollout_func or self._is_vlm):
            round_size = self.args.dynamic_sampling_max_round_size
            num_rows = round_size * self.num_generations if round_size else rows_that_fit(self.max_completion_length)
            dataloader = self._prefetch.over(dataloader, num_rows // self.accelerator.num_processes)
        output = super().evaluation_loop(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        scores = self._scores.means()
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in scores.items()})
        return output

    def _generate_for_evaluation(self, prompts: list) -> tuple:
        """Completions for the prompts of several batches, one batch after the other."""
        k = self.num_generations_eval
        # vLLM's server is asked for so many completions of every so-manieth prompt, over all processes. Where a
        # problem's rows lie in two processes, they are not neighbours any more.
        self.num_generations_eval = math.gcd(k, self.args.per_device_eval_batch_size)
        try:
            return self._generate(prompts)
        finally:
            self.num_generations_eval = k

    def _remember_evaluated(self, inputs: list[dict], completions: list, rewards: torch.Tensor):
        """Adds the verdicts and answers of a batch to the scores."""
        answers = [score_dapo_math(completion_text(text), "", boxed="fallback").answer for text in completions]
        answers = [None if answer == NO_ANSWER else answer for answer in answers]
        # What an environment asks stands in other columns than the prompt.
        ids = [example.get("id") if self.environment_factories else problem_id(example) for example in inputs]
        sources = [example.get("source") for example in inputs]
        rows = gather_object(list(zip(sources, ids, answers, strict=True)))
        deciding = deciding_reward(rewards.cpu(), self.reward_weights, self._decides)
        right = is_correct(deciding, self._criterion).tolist()
        right = [None if math.isnan(reward) else right[i] for i, reward in enumerate(deciding.tolist())]
        self._scores.add([tuple(problem) for *problem, _ in rows], [answer for *_, answer in rows], right)

    # ---- What the user sees ----

    @contextmanager
    def _progress_bar(self, refill: Refill):
        disable = self.args.disable_tqdm or not self.accelerator.is_main_process
        bar_format = "{l_bar}{bar}| accepted {n_fmt}/{total_fmt}{postfix}"
        with tqdm(total=refill.target, desc="Sampling", bar_format=bar_format, leave=False, disable=disable) as bar:

            def show():
                bar.n = refill.target - refill.shortfall
                bar.set_postfix_str(f"round {refill.num_rounds}, acceptance {_acceptance(refill):.0%}")

            yield show

    def _on_shortfall(self, refill: Refill):
        """Stops or warns when the rounds were used up before the batch was full."""
        by_design = self._can_replace(refill) or (self.args.dynamic_sampling_mode == "mask" and refill.taken)
        if refill.full or by_design:
            self._num_short_rollouts = 0
            return
        self._num_short_rollouts += 1
        found = refill.num_generated - refill.dropped.total()
        reasons = ", ".join(f"{reason} {count}" for reason, count in refill.dropped.most_common()) or "none"
        carried = f" beside {refill.num_carried} carried" if refill.num_carried else ""
        what = (
            f"{found} of {refill.num_generated} groups accepted in {refill.num_rounds} rounds{carried}, "
            f"{refill.target} needed (dropped: {reasons})."
        )
        advice = "".join(_ADVICE[reason] + " " for reason, _ in refill.dropped.most_common(1))
        limit = f"`dynamic_sampling_max_rounds` ({self.args.dynamic_sampling_max_rounds})"
        if self.args.dynamic_sampling_on_exhausted == "error":
            raise RuntimeError(
                f"Dynamic sampling could not fill the rollout batch: {what} {advice}Or raise {limit}, or set "
                "`dynamic_sampling_on_exhausted='top_up'` to train on what was found."
            )
        # Once when it begins and once when it has become a pattern: a line a rollout would bury the log.
        if self._num_short_rollouts in (1, 5):
            trained = refill.target - refill.shortfall
            outcome = f"trains on {trained} groups" if trained else "does not move the weights"
            logger.warning(
                f"Dynamic sampling fell short ({self._num_short_rollouts} rollouts in a row): {what} This rollout "
                f"{outcome}. {advice}Or raise {limit}."
            )

    def _log_sampling(self, rounds: list[Round], refill: Refill, **sampling: float):
        """Metrics of one rollout: TRL's own over everything sampled, and the sampler's."""
        metrics = self._metrics["train"]
        for name, value in _merge_rounds(rounds).items():
            metrics[name].append(value)
        metrics["num_tokens"] = [self.state.num_input_tokens_seen]
        for name, values in self._replay_metrics.items():
            if name.startswith("sampling/"):  # needs the log-probabilities, which only rows that train have
                metrics[name].extend(values)
        metrics["filtered_reward"].extend(self._replay_metrics["reward"])
        num_trained = refill.target - (0 if self._can_replace(refill) else refill.shortfall)
        sampling = {
            "rounds": refill.num_rounds,
            "groups_generated": refill.num_generated,
            "groups_trained": num_trained,
            "completions_generated": refill.num_generated * self.num_generations,
            "completions_trained": num_trained * self.num_generations,
            "tokens_generated": sum(int(round_.lengths_B.sum()) for round_ in rounds),
            "surplus": len(refill.surplus),
            "carried": refill.num_carried,
            "shortfall": refill.shortfall,
            "passes": self._prompt_stream.passes,
            **{f"dropped/{reason}": refill.dropped[reason] for reason in REASONS},
            **({"acceptance_rate": _acceptance(refill)} if rounds else {}),
            **sampling,
        }
        for name, value in sampling.items():
            metrics[f"dynamic_sampling/{name}"].append(float(value))

    # ---- Prompts and checkpoints ----

    def _open_prompt_stream(self) -> PromptStream:
        dataset = self.train_dataset
        if self.args.remove_unused_columns:
            dataset = self._remove_unused_columns(dataset, description="training")
        num_groups = self.args.generation_batch_size // self.num_generations
        if isinstance(dataset, Dataset) and len(dataset) < num_groups:
            raise ValueError(
                f"The training dataset holds {len(dataset)} prompts, but a rollout batch takes {num_groups} "
                f"(`generation_batch_size` {self.args.generation_batch_size} / `num_generations` "
                f"{self.num_generations}). Add prompts, or lower `per_device_train_batch_size` or "
                "`steps_per_generation`."
            )
        return PromptStream(dataset, seed=self.args.seed, shuffle=self.shuffle_dataset)

    def _save_checkpoint(self, model, trial):
        if not self.args.save_only_model:
            folder = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            folder.mkdir(parents=True, exist_ok=True)
            self._save_dapo_state(folder)
        # Last, since it writes `trainer_state.json`, which marks a checkpoint as complete.
        super()._save_checkpoint(model, trial)

    def _save_dapo_state(self, folder: Path):
        rank, world_size = self.accelerator.process_index, self.accelerator.num_processes
        local = {
            "update": self.update_state_dict(),
            "metrics": dict(self._metrics["train"]),
            "carried": self._carried and self._carried.state_dict(),
            "world_size": world_size,
        }
        torch.save(local, folder / _rank_state_name(rank))
        if self.args.should_save:
            shared = {
                "acceptance": self._acceptance.state_dict(),
                "num_short_rollouts": self._num_short_rollouts,
                "prompts": self._prompt_stream and self._prompt_stream.state_dict(),
                "memory": self._memory and self._memory.state_dict(),
            }
            if self._memory is not None:
                self._memory.save(folder / MEMORY_NAME)
            (folder / STATE_NAME).write_text(json.dumps(shared, indent=2) + "\n")

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        # TRL holds a quantized model's adapter in bfloat16, and peft would bring it back in float32.
        dtypes = {name: parameter.dtype for name, parameter in self.model.named_parameters()}
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        for name, parameter in self.model.named_parameters():
            if parameter.dtype != dtypes.get(name, parameter.dtype):
                parameter.data = parameter.data.to(dtypes[name])

    def _load_optimizer_and_scheduler(self, checkpoint):
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self._load_dapo_state(Path(checkpoint))

    def _load_dapo_state(self, folder: Path):
        if not (folder / STATE_NAME).exists():
            logger.warning(
                f"{folder} was not written by DAPOTrainer (it has no {STATE_NAME}): the weights and the optimizer are "
                "resumed, the prompts start a fresh pass."
            )
            return
        shared = json.loads((folder / STATE_NAME).read_text())
        self._acceptance.load_state_dict(shared["acceptance"])
        self._num_short_rollouts = shared["num_short_rollouts"]
        if self._prompt_stream and shared["prompts"]:
            self._prompt_stream.load_state_dict(shared["prompts"])
        if self._memory is not None and shared["memory"]:
            self._memory.load_state_dict(shared["memory"])
            self._memory.load(folder / MEMORY_NAME)
        path = folder / _rank_state_name(self.accelerator.process_index)
        local = torch.load(path, map_location="cpu", weights_only=True) if path.exists() else {}
        if local.get("world_size") != self.accelerator.num_processes:
            logger.warning(
                f"{folder} was written with another number of processes: an unfinished rollout in it is sampled anew."
            )
            return
        self.load_update_state_dict(local["update"])
        self._metrics["train"].update(local["metrics"])
        self._carried = local["carried"] and Round.from_state_dict(local["carried"])


# What to change, by the reason that dropped most groups.
_ADVICE = {
    "all_wrong": "Most prompts are too hard for the model: use easier prompts, more `num_generations`, a longer "
    "`max_completion_length`, or check that the reward function recognises right answers.",
    "all_correct": "Most prompts are too easy for the model: use harder prompts or more `num_generations`.",
    "constant": "Most groups get one and the same reward: use more `num_generations` or a reward that tells "
    "completions apart.",
    "outside_band": "Widen `dynamic_sampling_min_accuracy` and `dynamic_sampling_max_accuracy`.",
    "unscored": "The deciding reward functions return `None` for most completions: check their inputs.",
    "masked": "Most completions are cut off: raise `max_completion_length` or turn `overlong_filtering` off.",
}


def _acceptance(refill: Refill) -> float:
    return 1 - refill.dropped.total() / refill.num_generated


def _rank_state_name(rank: int) -> str:
    return f"dapo_state_rank{rank}.pt"


def _restore_old_logps(rollouts: dict, old_logps: list):
    """Gives carried rows the log-probabilities they were sampled with; NaN stands for the present policy's."""
    old = rollouts.setdefault(
        "old_per_token_logps", torch.full_like(rollouts["completion_ids"], torch.nan, dtype=torch.float32)
    )
    for i, row in enumerate(old_logps):
        if row is not None:
            old[i, : len(row)] = torch.from_numpy(row)
            if "importance_sampling_ratio" in rollouts:  # from the engine to the policy that sampled: no longer known
                rollouts["importance_sampling_ratio"][i] = 1.0


def _empty_logs(logs: dict) -> dict:
    """The structure of TRL's `_logs`, empty and without a bound."""
    return {name: defaultdict(list) if isinstance(value, defaultdict) else deque() for name, value in logs.items()}


def _merge_rounds(rounds: list[Round]) -> dict[str, float]:
    """One value a metric from several rounds: least of the minima, greatest of the maxima, else the mean over rows."""
    values: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for round_ in rounds:
        for name, (value, *_) in round_.metrics.items():
            if not name.startswith("sampling/") and name != "num_tokens" and value == value:
                values[name].append((value, len(round_.rewards_BF)))
    merged: dict[str, float] = {}
    for name, pairs in values.items():
        reduce = {"min": min, "max": max}.get(name.rsplit("/", 1)[-1].split("_")[0])
        if reduce is not None:
            merged[name] = reduce(value for value, _ in pairs)
        else:
            merged[name] = sum(value * rows for value, rows in pairs) / sum(rows for _, rows in pairs)
    return merged

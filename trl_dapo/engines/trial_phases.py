# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The phases of a trial: sampling, updates, evaluation and a checkpoint, each tried until its memory suffices."""

import math
import time
import traceback
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object

from ..models import context_length
from ..run.peak_memory import PeakMemory, is_out_of_memory
from ..run.scratch import scratch_folder
from ..run.trial_report import Measured, Phase, halvings
from ..sampling.sampler import Sampler
from ..update.keeping import SavedWeights
from ..update.microbatches import largest_microbatch
from ..update.patching import patched
from ..update.rollout_tensors import index_rows, is_cut_by_row, join_rows, row_lengths, without_padding
from ..update.typed_trainer import TypedGRPOTrainer
from ..update.window import MicrobatchPacker
from .longest_prompts import count_examples, select_longest


clock = time.perf_counter

NUM_MICROBATCHES = 2  # in the largest update, so that gradients exist while the second one runs
MAX_TOKENIZED = 64  # prompts with the most characters, of which the one with the most tokens is taken


class TrialPhasesMixin(TypedGRPOTrainer):
    """Try each phase of a run once, and measure its seconds and its memory."""

    # Set by other parts of the trainer.
    _budget: int | None
    _engine_schedules: bool
    _evaluates_on_start: bool
    _generate_every: int
    _packer: MicrobatchPacker
    _sample_parts: Callable[[list], list[dict]]
    _sampler: Sampler | None
    _save_checkpoint: Callable[..., None]
    _take_new_sampler: Callable[[], None]
    _window_batches: list
    _window_microbatches: deque[dict]

    _tried: list[dict]  # the rollout that was sampled
    _largest_row: tuple[int, int]  # prompt and completion tokens
    _metrics_of_evaluation: dict[str, float]

    def _attempt(
        self, memory: PeakMemory, saved: SavedWeights, run: Callable[[], Any], has_collectives: bool = True
    ) -> Measured | None:
        """
        Run a phase. Return the seconds and the memory of the process that took most, or `None` if any process ran out
        of memory.
        """
        # What reward functions logged in an attempt that ran out of memory belongs to no completion.
        self._pending_extra_logs, self._pending_metrics = defaultdict(list), defaultdict(list)
        memory.start()
        started, failed = clock(), False
        try:
            run()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            if has_collectives and self.accelerator.num_processes > 1:  # other processes wait for this one
                raise
            failed = True
            traceback.clear_frames(error.__traceback__)  # otherwise they would keep the tensors alive
        peak = memory.peak()
        seconds = clock() - started
        if self.accelerator.device.type != "cuda":
            peak -= saved.num_bytes  # only the trial needs these copies
        self.model.zero_grad(set_to_none=True)
        measured = gather_object([(failed, seconds, peak)])
        if any(has_failed for has_failed, _, _ in measured):
            return None
        return Measured(max(each for _, each, _ in measured), max(each for _, _, each in measured))

    def _try_values(
        self,
        attempt: Callable[..., Measured | None],
        name: str,
        values: Iterable[int | bool | None],
        run: Callable[[Any], Any],
        describe: Callable[[], str],
        setting: str | None = None,
        has_collectives: bool = True,
    ) -> Phase:
        """Try a phase with one value of a setting after another, until memory suffices."""
        failed: list[int | bool | None] = []
        for value in values:
            self.accelerator.print(f"Trying the {name}{_with_value(setting, value)}.", flush=True)
            try:
                measured = attempt(partial(run, value), has_collectives)
            except Exception as error:
                error.add_note(f"This happened in a trial, in the {name}{_with_value(setting, value)}.")
                raise
            if measured is not None:
                return Phase(name, describe(), measured, setting, value, failed)
            failed.append(value)
        return Phase(name, "", None, setting, None, failed)

    # ---- Sampling ----

    def _try_sampling(self, attempt: Callable[..., Measured | None], batches: list) -> Phase:
        own = self.args.dynamic_sampling_max_round_size
        values: list[int | None] = [own]
        if self._sampler is not None and not self._engine_schedules:
            values += halvings(own or self._sampler.target, 1)

        def sample(round_size: int | None) -> None:
            self.args.dynamic_sampling_max_round_size = round_size
            if round_size != own:
                self._take_new_sampler()
            self.model.train()
            self._step, self._num_rollouts_left = 0, 0
            self._tried = self._sample_parts(batches[0])

        return self._try_values(
            attempt, "sampling", values, sample, self._describe_rollout, "dynamic_sampling_max_round_size"
        )

    def _describe_rollout(self) -> str:
        metrics, sampler = self._metrics["train"], self._sampler
        mean, longest = metrics["completions/mean_length"][-1], metrics["completions/max_length"][-1]
        completions = f"completions of {mean:.1f} tokens on average, at most {longest:.0f}"
        if sampler is None:
            return f"{self.args.groups_per_rollout} prompts x {self.num_generations} {completions}"
        rollout = sampler.rollout
        rounds = "1 round" if rollout.num_rounds == 1 else f"{rollout.num_rounds} rounds"
        return (
            f"{rollout.num_groups} prompts x {self.num_generations} {completions}; in {rounds} "
            f"{len(rollout.accepted)} groups were accepted, and a batch needs {rollout.target}"
        )

    # ---- Updates ----

    def _find_largest_row(self) -> tuple[int, int]:
        """Return the prompt and completion tokens of the longest row that can train."""
        prompt = self._count_longest_prompt(self.train_dataset)
        for part in self._tried:
            prompt = max(prompt, int(row_lengths(part["prompt_mask"], part["completion_mask"])[:, 0].max()))
        prompt = max(gather_object([prompt]))
        window = self.args.vllm_max_model_length if self.use_vllm else None
        completion = self.max_completion_length
        if completion is None:
            completion = (window or context_length(self.model.config) or prompt + 1) - prompt
        elif window is not None:
            completion = min(completion, window - prompt)
        return prompt, max(completion, 1)

    def _try_largest_update(self, attempt: Callable[..., Measured | None]) -> Phase:
        prompt, completion = self._largest_row
        longest, num_rows = prompt + completion, self.args.per_device_train_batch_size
        values: list[int | None]
        has_budget = self._packer.recuts and all(map(is_cut_by_row, self._tried))
        if has_budget:
            setting = "max_tokens_per_microbatch"
            values = [self._budget, *halvings(self._budget or num_rows * longest, longest)]
        else:
            setting = "per_device_train_batch_size"
            values = [num_rows, *halvings(num_rows, 1)]
        made: list[str] = []

        def update(value: int | None) -> None:
            if has_budget:
                self._budget = value
                vars(self).pop("_cached_packer", None)
            parts = self._make_largest_parts(num_rows if has_budget else value)
            made[:] = [_describe_microbatches(parts)]
            self._take_optimizer_step(parts, len(parts), reduces=False)

        return self._try_values(attempt, "update", values, update, made.pop, setting, has_collectives=False)

    def _make_largest_parts(self, rows_per_part: int | None) -> list[dict]:
        """Make the largest micro-batches that can occur, as parts of a rollout."""
        (prompt, completion), pad_token_id = self._largest_row, self._tokenizer.pad_token_id
        if self._budget is None:
            parts = [self._tried[i % len(self._tried)] for i in range(NUM_MICROBATCHES)]
            if all(map(is_cut_by_row, parts)):
                parts = [_repeat_rows(part, rows_per_part) for part in parts]
            return [without_padding(part, prompt, completion, pad_token_id) for part in parts]
        rows = join_rows(self._tried, pad_token_id)
        most = self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps
        num_rows, widths = largest_microbatch((prompt, completion), self._budget, most, self.pad_to_multiple_of)
        part = {**_repeat_rows(rows, num_rows), "num_items_in_batch": self._tried[0]["num_items_in_batch"]}
        return [without_padding(part, *widths, pad_token_id)] * NUM_MICROBATCHES

    def _try_update_of_rollout(self, attempt: Callable[..., Measured | None], num_batches: int) -> Phase:
        def update(_: None) -> None:
            self._take_optimizer_step(self._tried, num_batches, reduces=True)

        def describe() -> str:
            if self._steps_per_rollout == 1:
                return "the optimizer step on the groups that were sampled above"
            return f"the first of {self._steps_per_rollout:g} optimizer steps on the groups that were sampled above"

        return self._try_values(attempt, "update of this rollout", [None], update, describe)

    @property
    def _steps_per_rollout(self) -> float:
        return self._generate_every / self.args.gradient_accumulation_steps

    def _take_optimizer_step(self, parts: list[dict], num_batches: int, reduces: bool) -> None:
        """Train on the first parts of a rollout and take an optimizer step, as transformers' loop does."""
        # If one process may run out of memory, no other may wait for it: then nothing is reduced.
        accelerator = self.accelerator
        model = self.model_wrapped if reduces else accelerator.unwrap_model(self.model_wrapped)
        self._step, self._buffered_inputs = 0, None
        self._window_microbatches = deque()  # an attempt that ran out of memory may have left some
        self._window_batches, self.current_gradient_accumulation_steps = [None] * num_batches, num_batches
        # The metrics of a step are reduced over the processes, so they are not published either.
        silent: AbstractContextManager[None] = nullcontext()
        if not reduces:
            alone = partial(self._compute_loss_alone, self._compute_loss)
            silent = patched(self, _finish_step_metrics=lambda *args: None, _compute_loss=alone)
        with patched(self, _sample_parts=lambda batch: parts), silent:
            for i in range(num_batches):
                is_last = i == num_batches - 1
                accelerator.gradient_state._set_sync_gradients(is_last)
                with nullcontext() if is_last else accelerator.no_sync(model):
                    self.training_step(model, {}, None)
        if self.args.max_grad_norm > 0:
            accelerator.clip_grad_norm_(model.parameters(), self.args.max_grad_norm)
        assert self.optimizer is not None  # transformers' loop has made it
        self.optimizer.step()
        model.zero_grad()

    def _compute_loss_alone(self, compute_loss: Callable, model: torch.nn.Module, inputs: dict) -> torch.Tensor:
        """Compute a loss without waiting for other processes, over which TRL reduces metrics and entropies."""

        def keep(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            return tensor

        own = dict.fromkeys(("gather", "gather_for_metrics", "reduce", "pad_across_processes"), keep)
        with patched(self.accelerator, **own):
            return compute_loss(model, inputs)

    def _try_optimizer_state(self, attempt: Callable[..., Measured | None]) -> Phase | None:
        """Make the optimizer's state. Return a phase that says so if it does not fit."""
        assert self.optimizer is not None  # transformers' loop has made it
        if attempt(self._make_optimizer_state, False) is not None:
            return None
        # The optimizer cannot step with a part of its state.
        getattr(self.optimizer, "optimizer", self.optimizer).state.clear()
        return Phase("optimizer's state", "", None, failed=[None])

    def _make_optimizer_state(self) -> None:
        """Make the optimizer's state, which a run has in memory from its second step on."""
        for weight in self.model.parameters():
            if weight.requires_grad:
                weight.grad = torch.zeros_like(weight)
        # accelerate's own step would use the gradient scaler, which has not seen a loss yet.
        assert self.optimizer is not None  # transformers' loop has made it
        getattr(self.optimizer, "optimizer", self.optimizer).step()

    def _count_optimizer_bytes(self) -> int:
        """Return the bytes of the optimizer's state on the device that trains."""
        assert self.optimizer is not None
        tensors = [x for state in self.optimizer.state.values() for x in state.values() if isinstance(x, torch.Tensor)]
        on_device = [x for x in tensors if x.device.type == self.accelerator.device.type]
        return sum(x.numel() * x.element_size() for x in on_device)

    # ---- Evaluation ----

    @property
    def _evaluates(self) -> bool:
        if self.eval_dataset is None or (self.args.eval_strategy == "no" and not self._evaluates_on_start):
            return False
        return any(count_examples(dataset, most=1) for dataset in self._eval_datasets)

    @property
    def _eval_datasets(self) -> Sequence[Any]:
        return [*self.eval_dataset.values()] if isinstance(self.eval_dataset, dict) else [self.eval_dataset]

    def _try_evaluation(self, attempt: Callable[..., Measured | None]) -> Phase:
        num_processes, k = self.accelerator.num_processes, self.num_generations_eval
        own = self.args.per_device_eval_batch_size
        values = [value for value in [own, *halvings(own, 1)] if value * num_processes % k == 0]
        dataset = max(self._eval_datasets, key=self._count_longest_prompt)

        def evaluate(rows: int) -> None:
            self.args.per_device_eval_batch_size = rows
            self.evaluate(select_longest(dataset, rows * num_processes // k))

        def describe() -> str:
            rows = self.args.per_device_eval_batch_size * num_processes
            longest = self._metrics_of_evaluation.get("eval_completions/max_length", math.nan)
            return f"a batch of {rows} completions of the longest prompts, at most {longest:.0f} tokens each"

        with self._keeping_evaluation_metrics():
            return self._try_values(attempt, "evaluation", values, evaluate, describe, "per_device_eval_batch_size")

    @contextmanager
    def _keeping_evaluation_metrics(self) -> Iterator[None]:
        """Keep the metrics of an evaluation instead of logging them."""
        self._metrics_of_evaluation: dict[str, float] = {}
        log = self.log

        def keep(logs: dict[str, float], *args: Any) -> None:
            log(logs, *args)
            self._metrics_of_evaluation.update(logs)

        with patched(self, log=keep):
            yield

    def _count_longest_prompt(self, dataset: Any) -> int:
        """Return the tokens of the longest prompt, or 0 if prompts can only be measured in a rollout."""
        if self._is_vlm or not count_examples(dataset, most=1):
            return 0
        longest = select_longest(dataset, MAX_TOKENIZED)
        if "prompt" not in longest.column_names:
            return 0
        return max(len(ids) for ids in self._tokenize_prompts(list(longest["prompt"]))[0])

    # ---- Checkpoint ----

    def _try_checkpoint(self, attempt: Callable[..., Measured | None]) -> tuple[Phase, float]:
        own, output_dir, sizes = self.args.save_only_model, self.args.output_dir, [0.0]
        values = [own] if own else [own, True]

        def save(save_only_model: bool) -> None:
            self.args.save_only_model = save_only_model
            with scratch_folder(output_dir) as folder:
                self.args.output_dir = folder
                self._save_checkpoint(self.model_wrapped, None)
                self.accelerator.wait_for_everyone()
                sizes[0] = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())

        phase = self._try_values(
            attempt,
            "checkpoint",
            values,
            save,
            lambda: "written to the disk of `output_dir` and deleted",
            "save_only_model",
        )
        return phase, sizes[0]


def _with_value(setting: str | None, value: Any) -> str:
    return "" if setting is None or value is None else f" with `{setting}: {str(value).lower()}`"


def _repeat_rows(rows: dict, num: int | None) -> dict:
    """Return the first `num` rows of a batch, repeated if it has fewer; all rows if `num` is `None`."""
    if num is None:
        return rows
    has_rows = {key: value for key, value in rows.items() if value is not None and key != "num_items_in_batch"}
    device = rows["completion_ids"].device
    return {**rows, **index_rows(has_rows, torch.arange(num, device=device) % len(rows["completion_ids"]))}


def _describe_microbatches(parts: list[dict]) -> str:
    num_rows, prompt = parts[0]["prompt_ids"].shape
    completion = parts[0]["completion_ids"].size(1)
    return (
        f"{len(parts)} micro-batches of {num_rows} rows of {prompt + completion:,} tokens = "
        f"{num_rows * (prompt + completion):,} tokens each"
    )

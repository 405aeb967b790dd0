# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""How the trainer tries a run out: each of its phases once, where the run would take its first optimizer step.

transformers' own training loop prepares the model and the optimizer. In place of the first optimizer step the phases
are tried, and measured. Then the loop is left, and everything is put back. `run/trial_report.py` makes a page of what
was found.
"""

import copy
import math
import time
import traceback
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from datasets import Dataset, IterableDataset
from transformers.trainer_utils import SaveStrategy, has_length

from ..evaluation.scores import EvaluationScores
from ..models import context_length
from ..rewards.task_reward import TaskReward
from ..run.early_stop import StopCallback
from ..run.ledger import Ledger
from ..run.peak_memory import PeakMemory, is_out_of_memory
from ..run.preflight import Preflight, SetupError
from ..run.scratch import scratch_folder
from ..run.stopwatch import Stopwatch
from ..run.terminal import bars_on_terminals_only
from ..run.trial_report import Measured, Phase, Schedule, TrialReport, count_periods, halvings
from ..sampling.sampler import Sampler
from ..update.compat import sharded_at_load
from ..update.keeping import SavedWeights, keeping_attributes, keeping_modules, keeping_random_state, keeping_state
from ..update.microbatches import largest_microbatch
from ..update.patching import patched
from ..update.rollout_tensors import index_rows, is_cut_by_row, join_rows, row_lengths, without_padding
from ..update.typed_trainer import TypedGRPOTrainer
from ..update.window import MicrobatchPacker
from .seam import empty_logs, empty_metrics


clock = time.perf_counter

MICROBATCHES = 2  # of the largest update: gradients are there while the second one runs
MOST_READ = 20_000  # examples in which the longest prompt is looked for
MOST_TOKENIZED = 64  # of them, those with the most characters


class _TrialEnded(Exception):
    """What leaves transformers' training loop once all phases were tried."""


class TrialMixin(TypedGRPOTrainer):
    """Try a run out before it starts: memory and seconds of each phase on this machine."""

    # Of the other parts of the trainer.
    _budget: int | None
    _generate_every: int
    _ledger: Ledger | None
    _new_sampler: Callable[[], Sampler]
    _open_engine: Callable[[Stopwatch], None]
    _engine_schedules: bool
    _packer: MicrobatchPacker
    _roll_out: Callable[[list], list[dict]]
    _sampler: Sampler | None
    _save_checkpoint: Callable[..., None]
    _steps_per_generation: int
    _task: TaskReward
    _scores: EvaluationScores
    _uses_a_server: bool
    _window_batches: list
    _window_microbatches: deque[dict]
    num_ranks_sharing_a_row: int
    preflight: Preflight
    stop: StopCallback
    stopwatch: Stopwatch

    _try_out: Callable[[list], None] | None = None  # takes the batches of the first optimizer step
    # In a trial.
    _tried: list[dict]  # the rollout that was sampled
    _largest_row: tuple[int, int]  # prompt and completion tokens
    _evaluates_on_start: bool
    _samples_ahead: bool
    _metrics_of_evaluation: dict[str, float]

    def trial(self) -> TrialReport:
        """
        Try the run out: sample one rollout, update on the longest rows that can occur, update on the rollout, evaluate
        the largest batch, and write a checkpoint, which is deleted again. If a phase runs out of memory, it is tried
        with smaller values until one fits.

        Weights, random states, the order of the prompts and everything else that a run begins with are left as they
        were. Callbacks are not called, and no tracker is opened. Every process calls it.

        Returns:
            [`~run.trial_report.TrialReport`]: Memory and seconds of each phase, and what is expected of the run. As a
            string it is a page.

        Raises:
            `SetupError`: If the weights are sharded, or if the run itself would not start.
        """
        self._refuse_what_cannot_be_tried()
        found: list[TrialReport] = []
        accelerator, optimizer = self.accelerator, self.optimizer
        memory = PeakMemory(accelerator.device)
        loading = memory.peak()
        with (
            bars_on_terminals_only(loading=False),
            keeping_random_state(),
            keeping_modules(self.model),
            keeping_attributes(self, accelerator, accelerator.gradient_state),
            keeping_state(optimizer, getattr(accelerator, "scaler", None)),
        ):
            saved = SavedWeights(self.model)
            self._begin_anew()
            self.preflight.check_example()
            self._try_out = lambda batches: found.append(self._try_phases(batches, memory, loading, saved))
            try:
                self.preflight.on_train_begin(self.args, self.state, self.control)
                super().train()
            except _TrialEnded:
                pass
            finally:
                saved.restore()
                accelerator.free_memory()
        (report,) = found
        return report

    def _refuse_what_cannot_be_tried(self) -> None:
        sharded = None
        if self.is_deepspeed_enabled:
            sharded = "DeepSpeed"
        elif self.is_fsdp_enabled:
            sharded = "FSDP"
        elif sharded_at_load(self)[0] or self.num_ranks_sharing_a_row > 1:
            sharded = "tensor, context or sequence parallelism"
        if sharded is not None:
            raise SetupError(
                f"A trial cannot put back weights that are sharded by {sharded}. Train two steps in place of it "
                "(`--max_steps 2 --save_steps 2 --output_dir` of a folder that you delete), and estimate the memory "
                "of the longest rows by `trl-dapo plan`."
            )

    def _begin_anew(self) -> None:
        """Give the trainer, for the time of the trial, what a run changes: a sampler, metrics, a clock of its own."""
        self.args = args = copy.copy(self.args)
        args.report_to, args.push_to_hub, self.log_completions = [], False, False
        self._samples_ahead, args.rollouts_ahead = args.rollouts_ahead > 0, 0
        self._evaluates_on_start, args.eval_on_start = args.eval_on_start, False
        self.control, self.callback_handler = copy.copy(self.control), copy.copy(self.callback_handler)
        self.callback_handler.callbacks = []
        self._metrics, self._logs = empty_metrics(), empty_logs(self._logs)
        self._pending_extra_logs, self._pending_metrics = defaultdict(list), defaultdict(list)
        self._window_microbatches = deque()
        self.stopwatch = Stopwatch(self._uses_a_server)
        self._open_engine(self.stopwatch)
        self._scores = EvaluationScores(self.num_generations_eval)
        self._take_new_sampler()
        self.neftune_noise_alpha = None  # the loop is left before it would take the noise away
        vars(self).pop("_one_packer", None)
        self._last_loaded_step = -1

    def _take_new_sampler(self) -> None:
        """Begin the stream of prompts again, with what is known of them before a run."""
        if self._sampler is not None:
            self._sampler = self._new_sampler()
            self._ledger = Ledger(self._sampler, self.reward_func_names, 0, lambda: self._task)
        choice = self.preflight.choice.copied_for(self.args)
        self.preflight = replace(self.preflight, args=self.args, choice=choice, sampler=self._sampler)
        self.stop = StopCallback(self._sampler, self.args, lambda: True)

    def get_batch_samples(self, *args: Any) -> tuple[list, Any]:
        batches, num_items_in_batch = super().get_batch_samples(*args)
        if self._try_out is not None:
            self._try_out(batches)
            raise _TrialEnded
        return batches, num_items_in_batch

    # ---- The phases ----

    def _try_phases(self, batches: list, memory: PeakMemory, loading: float, saved: SavedWeights) -> TrialReport:
        """Try every phase, in the order of a run, and return what was found."""
        attempt = partial(self._attempt, memory, saved)
        sampling = self._try_sampling(attempt, batches)
        phases = [sampling]
        if sampling.measured is not None:
            self._largest_row = self._find_largest_row()
            attempt(self._make_optimizer_state, False)  # if it does not fit, no update does
            update = self._try_largest_update(attempt)
            # From the second rollout on the optimizer's state is there too while completions are sampled.
            peak = sampling.measured.peak + self._optimizer_bytes()
            phases = [replace(sampling, measured=replace(sampling.measured, peak=peak)), update]
            if update.measured is not None:
                saved.restore()
                phases.append(self._try_update_of_rollout(attempt, len(batches)))
        saved.restore()
        checkpoint_bytes = 0.0
        if self._evaluates:
            phases.append(self._try_evaluation(attempt))
        if self.args.save_strategy != "no":
            checkpoint, checkpoint_bytes = self._try_checkpoint(attempt)
            phases.append(checkpoint)
        device, num_processes = self.accelerator.device, self.accelerator.num_processes
        is_gpu = device.type == "cuda"
        name = torch.cuda.get_device_name(device) if is_gpu else device.type.upper()
        return TrialReport(
            title=f"Trial on {name}, {'1 process' if num_processes == 1 else f'{num_processes} processes'}",
            total=memory.total,
            num_sharing=1 if is_gpu else num_processes,
            loading=loading,
            phases=phases,
            schedule=self._find_schedule(),
            checkpoint_bytes=checkpoint_bytes,
            notes=self._notes(),
        )

    def _attempt(
        self, memory: PeakMemory, saved: SavedWeights, run: Callable[[], Any], has_collectives: bool = True
    ) -> Measured | None:
        """Run a phase. Return what it took on the process on which it took most, or `None` if memory ran out."""
        memory.start()
        started, failed = clock(), False
        try:
            run()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            if has_collectives and self.accelerator.num_processes > 1:  # the others wait where nobody will come
                raise
            failed = True
            traceback.clear_frames(error.__traceback__)  # or they would hold the tensors
        peak = memory.peak()
        seconds = clock() - started
        if self.accelerator.device.type != "cuda":
            peak -= saved.num_bytes  # these copies are the trial's own
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
        what: Callable[[], str],
        setting: str | None = None,
        has_collectives: bool = True,
    ) -> Phase:
        """Try a phase with one value after the other, until memory suffices."""
        failed: list[int | bool | None] = []
        for value in values:
            self.accelerator.print(f"Trying the {name}{_with(setting, value)}.", flush=True)
            try:
                measured = attempt(partial(run, value), has_collectives)
            except Exception as error:
                error.add_note(f"It happened in a trial, in the {name}{_with(setting, value)}.")
                raise
            if measured is not None:
                return Phase(name, what(), measured, setting, value, failed)
            failed.append(value)
        return Phase(name, "", None, setting, None, failed)

    # Sampling

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
            self._tried = self._roll_out(batches[0])

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
            f"{rollout.num_groups} prompts x {self.num_generations} {completions}; {len(rollout.accepted)} groups "
            f"accepted of {rollout.target} that train, in {rounds}"
        )

    # Updates

    def _find_largest_row(self) -> tuple[int, int]:
        """Prompt and completion tokens of the longest row that can train."""
        prompt = self._longest_prompt(self.train_dataset)
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
                vars(self).pop("_one_packer", None)
            parts = self._largest_parts(num_rows if has_budget else value)
            made[:] = [_describe_rows(parts)]
            self._take_optimizer_step(parts, len(parts), reduces=False)

        return self._try_values(attempt, "update", values, update, made.pop, setting, has_collectives=False)

    def _largest_parts(self, rows_per_part: int | None) -> list[dict]:
        """Two micro-batches as large as can occur, as parts of a rollout."""
        (prompt, completion), pad_token_id = self._largest_row, self._tokenizer.pad_token_id
        if self._budget is None:
            parts = [self._tried[i % len(self._tried)] for i in range(MICROBATCHES)]
            if all(map(is_cut_by_row, parts)):
                parts = [_some_rows(part, rows_per_part) for part in parts]
            return [without_padding(part, prompt, completion, pad_token_id) for part in parts]
        rows = join_rows(self._tried, pad_token_id)
        most = self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps
        num_rows, widths = largest_microbatch((prompt, completion), self._budget, most, self.pad_to_multiple_of)
        part = {**_some_rows(rows, num_rows), "num_items_in_batch": self._tried[0]["num_items_in_batch"]}
        return [without_padding(part, *widths, pad_token_id)] * MICROBATCHES

    def _try_update_of_rollout(self, attempt: Callable[..., Measured | None], num_batches: int) -> Phase:
        def update(_: None) -> None:
            self._take_optimizer_step(self._tried, num_batches, reduces=True)

        def what() -> str:
            if self._steps_per_rollout == 1:
                return "the optimizer step on it"
            return f"the first of {self._steps_per_rollout:g} optimizer steps on it"

        return self._try_values(attempt, "update of this rollout", [None], update, what)

    @property
    def _steps_per_rollout(self) -> float:
        return self._generate_every / self.args.gradient_accumulation_steps

    def _take_optimizer_step(self, parts: list[dict], num_batches: int, reduces: bool) -> None:
        """Train on the first parts of a rollout, and step, as transformers' loop does."""
        # Where one process may run out of memory, none of them may wait for another.
        accelerator = self.accelerator
        model = self.model_wrapped if reduces else accelerator.unwrap_model(self.model_wrapped)
        self._step, self._buffered_inputs = 0, None
        self._window_microbatches = deque()  # of an attempt that ran out of memory some are left
        self._window_batches, self.current_gradient_accumulation_steps = [None] * num_batches, num_batches
        # What is logged of a step is reduced over the processes.
        silent = nullcontext() if reduces else patched(self, _publish=lambda *args: None)
        with patched(self, _roll_out=lambda batch: parts), silent:
            for i in range(num_batches):
                is_last = i == num_batches - 1
                accelerator.gradient_state._set_sync_gradients(is_last)
                with nullcontext() if is_last else accelerator.no_sync(model):
                    self.training_step(model, {}, None)
        if self.args.max_grad_norm > 0:
            accelerator.clip_grad_norm_(model.parameters(), self.args.max_grad_norm)
        assert self.optimizer is not None  # the loop has made it
        self.optimizer.step()
        model.zero_grad()

    def _make_optimizer_state(self) -> None:
        """Make the optimizer's state, beside which a run updates from its second step on."""
        for weight in self.model.parameters():
            if weight.requires_grad:
                weight.grad = torch.zeros_like(weight)
        # Not by accelerate's own step, which would ask a gradient scaler that has seen no loss.
        assert self.optimizer is not None  # the loop has made it
        getattr(self.optimizer, "optimizer", self.optimizer).step()

    def _optimizer_bytes(self) -> int:
        """Bytes of the optimizer's state on the device that trains."""
        assert self.optimizer is not None
        tensors = [x for state in self.optimizer.state.values() for x in state.values() if isinstance(x, torch.Tensor)]
        on_device = [x for x in tensors if x.device.type == self.accelerator.device.type]
        return sum(x.numel() * x.element_size() for x in on_device)

    # Evaluation

    @property
    def _evaluates(self) -> bool:
        return self.eval_dataset is not None and (self.args.eval_strategy != "no" or self._evaluates_on_start)

    @property
    def _eval_datasets(self) -> Sequence[Any]:
        return [*self.eval_dataset.values()] if isinstance(self.eval_dataset, dict) else [self.eval_dataset]

    def _try_evaluation(self, attempt: Callable[..., Measured | None]) -> Phase:
        num_processes, k = self.accelerator.num_processes, self.num_generations_eval
        own = self.args.per_device_eval_batch_size
        values = [value for value in [own, *halvings(own, 1)] if value * num_processes % k == 0]
        dataset = max(self._eval_datasets, key=self._longest_prompt)

        def evaluate(rows: int) -> None:
            self.args.per_device_eval_batch_size = rows
            self.evaluate(_longest(dataset, rows * num_processes // k))

        def what() -> str:
            rows = self.args.per_device_eval_batch_size * num_processes
            longest = self._metrics_of_evaluation.get("eval_completions/max_length", math.nan)
            return f"a batch of {rows} completions of the longest prompts, at most {longest:.0f} tokens each"

        with self._keeping_evaluation_metrics():
            return self._try_values(attempt, "evaluation", values, evaluate, what, "per_device_eval_batch_size")

    @contextmanager
    def _keeping_evaluation_metrics(self) -> Iterator[None]:
        """Keep what an evaluation logs, in place of logging it."""
        self._metrics_of_evaluation: dict[str, float] = {}
        log = self.log

        def keep(logs: dict[str, float], *args: Any) -> None:
            log(logs, *args)
            self._metrics_of_evaluation.update(logs)

        with patched(self, log=keep):
            yield

    def _longest_prompt(self, dataset: Any) -> int:
        """Tokens of the longest prompt; 0 if only a rollout tells how long prompts are."""
        longest = _longest(dataset, MOST_TOKENIZED)
        if self._is_vlm or "prompt" not in longest.column_names:
            return 0
        return max(len(ids) for ids in self._tokenize_prompts(list(longest["prompt"]))[0])

    # Checkpoint

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

    # ---- What the figures mean for the run ----

    def _find_schedule(self) -> Schedule:
        args, state = self.args, self.state
        # Also an epoch counts that the run does not complete. A stream is taken to last until the end of the run.
        num_epochs = state.num_train_epochs if has_length(self.train_dataset) else 1
        num_of = partial(count_periods, num_steps=state.max_steps, num_epochs=num_epochs)
        num_batches, num_evaluations = 0, 0
        if self._evaluates:
            per_batch = args.per_device_eval_batch_size * self.accelerator.num_processes
            rows = [_num_examples(each) * self.num_generations_eval for each in self._eval_datasets]
            num_batches = sum(-(-num // per_batch) for num in rows)
            num_evaluations = num_of(args.eval_strategy, every=state.eval_steps, delay=args.eval_delay or 0)
        num_checkpoints = num_of(args.save_strategy, every=state.save_steps)
        if args.save_strategy == SaveStrategy.BEST:
            num_checkpoints = num_evaluations
        return Schedule(
            num_steps=state.max_steps,
            steps_per_rollout=self._steps_per_rollout,
            num_evaluations=num_evaluations + self._evaluates_on_start,
            batches_per_evaluation=num_batches,
            num_checkpoints=num_checkpoints,
            samples_ahead=self._samples_ahead,
        )

    def _notes(self) -> list[str]:
        notes = [
            "every rollout takes as many rounds and as long completions as the first one, which the untrained model "
            "sampled"
        ]
        if self._sampler is not None and (shortfall := self._sampler.rollout.shortfall):
            notes.append(f"the batch lacked {shortfall} groups, so the update of this rollout trained on fewer rows")
        metrics = self._metrics["train"]
        longest = max(metrics["completions/max_length"], default=0.0)
        limit = self.max_completion_length
        if limit is not None and longest < limit and not self.use_vllm:
            notes.append(
                f"no completion of the rollout took more than {longest:.0f} of {limit} tokens; sampling takes more "
                "memory once one does"
            )
        if hasattr(self, "_largest_row"):
            prompt, completion = self._largest_row
            notes.append(
                f"the longest row has a prompt of {prompt:,} tokens, the longest of the dataset, and a "
                f"completion of {completion:,}"
            )
        if self._evaluates:
            notes.append("every evaluation batch takes as long as that of the longest prompts")
        if self.args.save_strategy == SaveStrategy.BEST:
            notes.append("each evaluation is the best so far, and saves a checkpoint")
        if self._samples_ahead:
            notes.append("a rollout is sampled while the one before it trains (`rollouts_ahead`)")
        if self.args.max_tokens_generated is not None:
            notes.append("`max_tokens_generated` does not end the run before its last step")
        return notes


def _with(setting: str | None, value: Any) -> str:
    return "" if setting is None or value is None else f" with `{setting}: {str(value).lower()}`"


def _some_rows(rows: dict, num: int | None) -> dict:
    """As many rows of a batch that is cut by row, over and over if it has fewer."""
    if num is None:
        return rows
    has_rows = {key: value for key, value in rows.items() if value is not None and key != "num_items_in_batch"}
    device = rows["completion_ids"].device
    return {**rows, **index_rows(has_rows, torch.arange(num, device=device) % len(rows["completion_ids"]))}


def _describe_rows(parts: list[dict]) -> str:
    num_rows, prompt = parts[0]["prompt_ids"].shape
    completion = parts[0]["completion_ids"].size(1)
    return (
        f"{len(parts)} micro-batches of {num_rows} rows of {prompt + completion:,} tokens = "
        f"{num_rows * (prompt + completion):,} tokens each"
    )


def _num_characters(prompt: Any) -> int:
    """Characters of a prompt, of a conversation in all messages."""
    if isinstance(prompt, str):
        return len(prompt)
    return sum(len(str(message.get("content"))) for message in prompt)


def _num_examples(dataset: Any) -> int:
    """How many examples a dataset has; of a stream at most as many as are read."""
    return len(dataset) if has_length(dataset) else sum(1 for _ in islice(dataset, MOST_READ))


def _longest(dataset: Any, num: int) -> Dataset:
    """The examples of a dataset with the longest prompts, the longest first; of a large one, of its first examples."""
    if isinstance(dataset, IterableDataset):
        dataset = Dataset.from_list(list(islice(dataset, MOST_READ)))
    places = list(range(min(len(dataset), MOST_READ)))
    if "prompt" in dataset.column_names:  # else environments bring the prompts
        prompts = dataset.select_columns("prompt").select(places)
        sizes = [_num_characters(example["prompt"]) for example in prompts]
        places.sort(key=lambda place: -sizes[place])
    return dataset.select(places[:num])

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""A trial of a run: each of its phases once, instead of its first optimizer step.

transformers' own training loop prepares the model and the optimizer. Instead of the first optimizer step the phases
are tried and measured (`trial_phases.py`). Then the loop is left, and everything is restored.
`run/trial_report.py` makes a page of the results.
"""

import copy
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers.trainer_utils import SaveStrategy, has_length

from ..evaluation.scores import EvaluationScores
from ..rewards.task_reward import TaskReward
from ..run.early_stop import StopCallback
from ..run.ledger import Ledger
from ..run.peak_memory import PeakMemory
from ..run.preflight import Preflight, SetupError
from ..run.stopwatch import Stopwatch
from ..run.terminal import progress_bars_on_terminals_only
from ..run.trial_report import Schedule, TrialReport, count_periods
from ..sampling.sampler import Sampler
from ..update.compat import sharded_at_load
from ..update.keeping import SavedWeights, keeping_attributes, keeping_modules, keeping_random_state, keeping_state
from .longest_prompts import count_examples
from .record_replay import empty_logs, empty_metrics
from .trial_phases import TrialPhasesMixin


WITHOUT_A_STEP = (
    "The run takes no optimizer step, so there is nothing to try. Set `max_steps` or `num_train_epochs`, and use a "
    "training dataset with at least as many prompts as a rollout."
)


class _TrialEnded(Exception):
    """Raised to leave transformers' training loop once all phases were tried."""


class TrialMixin(TrialPhasesMixin):
    """Try a run before it starts: memory and seconds of each phase on this machine."""

    # Set by other parts of the trainer.
    _ledger: Ledger | None
    _new_sampler: Callable[[], Sampler]
    _open_engine: Callable[[Stopwatch], None]
    _steps_per_generation: int
    _task: TaskReward
    _scores: EvaluationScores
    _uses_a_server: bool
    num_ranks_sharing_a_row: int
    preflight: Preflight
    stop: StopCallback
    stopwatch: Stopwatch

    _try_out: Callable[[list], None] | None = None  # takes the batches of the first optimizer step
    _samples_ahead: bool

    def trial(self) -> TrialReport:
        """
        Try the run: sample one rollout, update on the longest rows that can occur, update on the rollout, evaluate the
        largest batch, and write a checkpoint, which is deleted again. A phase that runs out of memory is tried again
        with smaller values until one fits.

        Afterwards weights, random states, the order of the prompts and everything else are what they were before.
        Callbacks are not called, and no tracker is opened. Every process must call this method.

        Returns:
            [`~run.trial_report.TrialReport`]: Memory and seconds of each phase, and those expected of the run. Its
            string is a page.

        Raises:
            `SetupError`: If the weights are sharded, or if the run itself would not start.
        """
        self._refuse_what_cannot_be_tried()
        found: list[TrialReport] = []
        accelerator, optimizer = self.accelerator, self.optimizer
        memory = PeakMemory(accelerator.device)
        loading = memory.peak()
        with (
            progress_bars_on_terminals_only(loading=False),
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
                super().train()
            except _TrialEnded:
                pass
            finally:
                saved.restore()
                accelerator.free_memory()
        if not found:
            raise SetupError(WITHOUT_A_STEP)
        return found[0]

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
                f"A trial cannot restore weights that are sharded by {sharded}. Instead train two steps (`--max_steps "
                "2 --save_steps 2`, with an `--output_dir` that you delete afterwards), and estimate the memory of "
                "the longest rows with `trl-dapo plan`."
            )

    def _begin_anew(self) -> None:
        """Replace, for the time of the trial, what a run changes: arguments, sampler, metrics, stopwatch."""
        self.args = args = copy.copy(self.args)
        args.report_to, args.push_to_hub, self.log_completions = [], False, False
        self._samples_ahead, args.rollouts_ahead = args.rollouts_ahead > 0, 0
        self._evaluates_on_start, args.eval_on_start = args.eval_on_start, False
        self.control, self.callback_handler = copy.copy(self.control), copy.copy(self.callback_handler)
        self._metrics, self._logs = empty_metrics(), empty_logs(self._logs)
        self._pending_extra_logs, self._pending_metrics = defaultdict(list), defaultdict(list)
        self._window_microbatches = deque()
        self.stopwatch = Stopwatch(self._uses_a_server)
        self._open_engine(self.stopwatch)
        self._scores = EvaluationScores(self.num_generations_eval)
        self._take_new_sampler()
        # Only the checks of the reward functions, which may read the state that the training loop makes.
        self.callback_handler.callbacks = [self.preflight]
        self.neftune_noise_alpha = None  # the loop is left before it would remove the noise
        vars(self).pop("_cached_packer", None)
        self._last_loaded_step = -1

    def _take_new_sampler(self) -> None:
        """Make a new sampler, which begins with the first prompt and knows no pass rates but those of a file."""
        if self._sampler is not None:
            self._sampler = self._new_sampler()
            self._ledger = Ledger(self._sampler, self.reward_func_names, 0, lambda: self._task)
        choice = self.preflight.choice.copied_for(self.args)
        self.preflight = replace(self.preflight, args=self.args, choice=choice, sampler=self._sampler)
        self.stop = StopCallback(self._sampler, self.args, lambda: True)

    def get_batch_samples(self, *args: Any) -> tuple[list, Any]:
        batches, num_items_in_batch = super().get_batch_samples(*args)
        if self._try_out is not None:
            if batches:
                self._try_out(batches)
            raise _TrialEnded
        return batches, num_items_in_batch

    # ---- The phases ----

    def _try_phases(self, batches: list, memory: PeakMemory, loading: float, saved: SavedWeights) -> TrialReport:
        """Try every phase in the order of a run, and return the results."""
        attempt = partial(self._attempt, memory, saved)
        sampling = self._try_sampling(attempt, batches)
        phases = [sampling]
        if sampling.measured is not None:
            self._largest_row = self._find_largest_row()
            update = self._try_optimizer_state(attempt) or self._try_largest_update(attempt)
            # From the second rollout on, the optimizer's state is in memory while completions are sampled.
            peak = sampling.measured.peak + self._count_optimizer_bytes()
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

    # ---- What the figures mean for the run ----

    def _find_schedule(self) -> Schedule:
        args, state = self.args, self.state
        # An epoch counts even if the run does not complete it. A stream is assumed to last until the end of the run.
        num_epochs = state.num_train_epochs if has_length(self.train_dataset) else 1
        num_of = partial(count_periods, num_steps=state.max_steps, num_epochs=num_epochs)
        num_batches, num_evaluations = 0, 0
        if self._evaluates:
            per_batch = args.per_device_eval_batch_size * self.accelerator.num_processes
            rows = [count_examples(each) * self.num_generations_eval for each in self._eval_datasets]
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
            max_checkpoints_kept=args.save_total_limit,
            samples_ahead=self._samples_ahead,
        )

    def _notes(self) -> list[str]:
        notes = [
            "every rollout takes as many rounds, and completions are as long, as in the first rollout, which the "
            "untrained model sampled"
        ]
        if self.accelerator.device.type != "cuda":
            notes.append("the memory of other programs on this machine is not counted")
        if self._sampler is not None and (num_missing := self._sampler.num_missing):
            notes.append(
                f"the batch was {num_missing} groups short, so the update of this rollout trained on fewer rows"
            )
        metrics = self._metrics["train"]
        longest = max(metrics["completions/max_length"], default=0.0)
        limit = self.max_completion_length
        if limit is not None and longest < limit and not self.use_vllm:
            notes.append(
                f"no completion of the rollout was longer than {longest:.0f} tokens; sampling takes more memory once "
                f"one reaches the limit of {limit}"
            )
        if hasattr(self, "_largest_row"):
            prompt, completion = self._largest_row
            notes.append(
                f"the longest row has the longest prompt of the dataset ({prompt:,} tokens) and a completion of "
                f"{completion:,} tokens"
            )
        if self._evaluates:
            notes.append("every evaluation batch takes as long as the one with the longest prompts")
        if self.args.save_strategy == SaveStrategy.BEST:
            notes.append("every evaluation is the best so far, and so saves a checkpoint")
        if self._samples_ahead:
            notes.append("a rollout is sampled while the one before it is trained on (`rollouts_ahead`)")
        if self.args.max_tokens_generated is not None:
            notes.append("the run is not ended early by `max_tokens_generated`")
        return notes

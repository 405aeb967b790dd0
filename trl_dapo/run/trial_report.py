# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The results of a trial: memory and seconds of each phase, and what they mean for the whole run. Pure functions."""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ..number_format import PAGE_WIDTH, format_bytes, format_estimate, indented_lines


# What to do if a phase runs out of memory even with the smallest values.
ADVICE = {
    "sampling": "If vLLM is on the same GPU, set `vllm_enable_sleep_mode: true` or lower "
    "`vllm_gpu_memory_utilization`. Without vLLM, lower `max_completion_length` or `prompts_per_rollout`.",
    "optimizer's state": "Train an adapter (`use_peft: true`), or set `optim: adamw_8bit`.",
    "update": "Set `gradient_checkpointing: true`, train an adapter (`use_peft: true`), set `optim: adamw_8bit`, or "
    "lower `max_completion_length`.",
    "update of this rollout": "Set or lower `max_tokens_per_microbatch`, or set `gradient_checkpointing: true`.",
    "evaluation": "Lower `max_completion_length`, or set `eval_strategy: 'no'` and evaluate the checkpoints with "
    "`trl-dapo eval` after the run.",
    "checkpoint": "Save checkpoints without the optimizer's state (`save_only_model: true`), or save none "
    "(`save_strategy: 'no'`).",
}


@dataclass(frozen=True)
class Measured:
    """Seconds and memory of a phase, on the process that took most."""

    seconds: float
    peak: float  # memory in bytes


@dataclass(frozen=True)
class Phase:
    """A phase that was tried, with one value of a setting after another until memory sufficed."""

    name: str
    description: str  # of what was tried
    measured: Measured | None  # `None` if no value fitted
    setting: str | None = None  # name of the setting that bounds the phase's memory
    value: int | bool | None = None  # the value of the setting that was measured
    failed: Sequence[int | bool | None] = ()  # values with which memory ran out, the run's own first

    @property
    def fits(self) -> bool:
        """Whether memory suffices with the settings of the run."""
        return self.measured is not None and not self.failed

    def describe_problem(self) -> str:
        """Return a sentence that says what ran out of memory, and what to change."""
        own = "with the run's settings"
        if self.setting is not None and self.failed and self.failed[0] is not None:
            own = f"with {_setting(self.setting, self.failed[0])}"
        ran_out = f"The {self.name} ran out of memory {own}"
        if self.measured is not None and self.setting is not None:
            return f"{ran_out}. It fits with {_setting(self.setting, self.value)}: set that."
        if self.setting is not None and len(self.failed) > 1:
            ran_out += f", and still with {_setting(self.setting, self.failed[-1])}"
        return f"{ran_out}. {ADVICE[self.name]}"


def _setting(name: str, value: int | bool | None) -> str:
    """Return a setting as it is written in a recipe."""
    written = str(value).lower() if isinstance(value, bool) else str(value)
    return f"`{name}: {written}`"


@dataclass(frozen=True)
class Schedule:
    """The number of optimizer steps, evaluations and checkpoints of a run."""

    num_steps: int
    steps_per_rollout: float
    num_evaluations: int = 0
    batches_per_evaluation: int = 0
    num_checkpoints: int = 0
    max_checkpoints_kept: int | None = None  # `save_total_limit`
    samples_ahead: bool = False  # whether a server samples the next rollouts while one is trained on


def count_periods(strategy: str, num_steps: int, every: float | None, num_epochs: int, delay: float = 0) -> int:
    """
    Return the number of evaluations or checkpoints of a run: one per `every` steps and one at its end, or one per
    epoch. Those before `delay` steps or epochs are left out.
    """
    ends: Sequence[int] = ()
    if strategy == "steps" and every:
        ends = [*range(int(every), num_steps, int(every)), num_steps]
    elif strategy == "epoch":
        ends = range(1, num_epochs + 1)
    return sum(end >= delay for end in ends)


def halvings(value: int, least: int) -> Iterator[int]:
    """Yield half of a value, half of that and so on, down to `least`."""
    while value > least:
        value = max(value // 2, least)
        yield value


@dataclass(frozen=True)
class TrialReport:
    """
    The results of a trial. Printed, they are a page of 80 columns.

    Attributes:
        title (`str`):
            First line of the page, which names the device and the number of processes.
        total (`float`):
            Memory of the GPU in bytes, or of the machine if the processes run on its CPU.
        num_sharing (`int`):
            Number of processes that share this memory.
        loading (`float`):
            Peak memory in bytes before the first phase, while the model was loaded.
        phases (`Sequence[Phase]`):
            The phases that were tried, in the order of a run.
        schedule ([`Schedule`]):
            Number of optimizer steps, evaluations and checkpoints of the run.
        checkpoint_bytes (`float`):
            Size of a checkpoint on disk, in bytes.
        notes (`Sequence[str]`):
            Assumptions behind the figures.
    """

    title: str
    total: float
    num_sharing: int
    loading: float
    phases: Sequence[Phase]
    schedule: Schedule
    checkpoint_bytes: float = 0.0
    notes: Sequence[str] = field(default_factory=tuple)

    @property
    def fits(self) -> bool:
        """Whether memory sufficed in every phase with the settings of the run."""
        return all(phase.fits for phase in self.phases)

    @property
    def peak(self) -> float:
        """Peak memory of a process over all phases, in bytes."""
        return max([self.loading, *(phase.measured.peak for phase in self.phases if phase.measured is not None)])

    def left(self, peak: float) -> float:
        """Return the memory in bytes that is left if a process takes `peak` bytes."""
        return self.total - self.num_sharing * peak

    def seconds_of(self, name: str) -> float | None:
        """Return the seconds of a phase, or `None` if it was not tried or did not fit."""
        found = (phase.measured.seconds for phase in self.phases if phase.name == name and phase.measured is not None)
        return next(found, None)

    @property
    def step_seconds(self) -> float | None:
        """Expected seconds per optimizer step, including its share of a rollout; `None` if a part is unknown."""
        sampling, update = self.seconds_of("sampling"), self.seconds_of("update of this rollout")
        if sampling is None or update is None:
            return None
        steps = self.schedule.steps_per_rollout
        if self.schedule.samples_ahead:
            return max(sampling, update * steps) / steps
        return sampling / steps + update

    @property
    def run_seconds(self) -> float | None:
        """Expected seconds of the whole run after loading; `None` if a part is unknown."""
        step, schedule = self.step_seconds, self.schedule
        if step is None:
            return None
        seconds = schedule.num_steps * step
        for name, times in (
            ("evaluation", schedule.num_evaluations * schedule.batches_per_evaluation),
            ("checkpoint", schedule.num_checkpoints),
        ):
            if times:
                each = self.seconds_of(name)
                if each is None:
                    return None
                seconds += times * each
        return seconds

    def __str__(self) -> str:
        lines = [self.title, "", f"{'Phase':<34}{'seconds':>14}{'peak memory':>16}{'free':>16}"]
        lines.append(self._row("loading", None, self.loading))
        for phase in self.phases:
            if phase.measured is None:
                lines.append(f"{phase.name:<34}{'out of memory':>14}")
            else:
                lines.append(self._row(phase.name, phase.measured.seconds, phase.measured.peak))
            lines += indented_lines(phase.description)
        lines += ["", "Expected", *self._expected()]
        lines += ["", "Assumed", *(line for note in self.notes for line in indented_lines(note, "- "))]
        verdicts = [phase.describe_problem() for phase in self.phases if not phase.fits]
        if not verdicts:
            verdicts = [f"Fits: peak {format_bytes(self.peak)}, {format_bytes(self.left(self.peak))} stay free."]
        lines += ["", *(line for verdict in verdicts for line in textwrap.wrap(verdict, PAGE_WIDTH))]
        return "\n".join(lines)

    def _row(self, name: str, seconds: float | None, peak: float) -> str:
        took = "-" if seconds is None else format_estimate(seconds)
        return f"{name:<34}{took:>14}{format_bytes(peak):>16}{format_bytes(self.left(peak)):>16}"

    def _expected(self) -> list[str]:
        schedule, step, run = self.schedule, self.step_seconds, self.run_seconds
        lines = indented_lines(f"peak memory: {format_bytes(self.peak)} of {format_bytes(self.total)}")
        if self.num_sharing > 1:
            lines = indented_lines(
                f"peak memory: {self.num_sharing} processes x {format_bytes(self.peak)} of {format_bytes(self.total)}"
            )
        if step is not None:
            lines += indented_lines(f"an optimizer step, including its share of a rollout: {format_estimate(step)}")
        parts = [f"{schedule.num_steps:,} optimizer steps"]
        if schedule.num_evaluations:
            parts.append(f"{schedule.num_evaluations:,} evaluations of {schedule.batches_per_evaluation:,} batches")
        if schedule.num_checkpoints:
            parts.append(f"{schedule.num_checkpoints:,} checkpoints of {format_bytes(self.checkpoint_bytes)}")
        took = "unknown, because a part of it did not fit" if run is None else format_estimate(run)
        lines += indented_lines(f"the run after loading: {took} ({', '.join(parts)})")
        if schedule.num_checkpoints:
            # A new checkpoint is written before the oldest one is deleted.
            on_disk = schedule.num_checkpoints
            if schedule.max_checkpoints_kept is not None:
                on_disk = min(on_disk, schedule.max_checkpoints_kept + 1)
            lines += indented_lines(f"disk: {format_bytes(on_disk * self.checkpoint_bytes)} for checkpoints")
        return lines

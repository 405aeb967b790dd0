# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The terminal output of a run: a line at each logging step, and a summary at the end."""

import logging
import math
import re
import shlex
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import IO, Any, NamedTuple

from accelerate import PartialState
from tqdm.auto import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerState, TrainingArguments
from transformers.trainer_utils import has_length
from transformers.utils import logging as transformers_logging

from ..config import DAPOConfig
from ..number_format import format_count, format_duration, format_number
from ..sampling.batch import Batch
from ..sampling.report import (
    advise,
    describe_empty_batch,
    describe_no_group_yet,
    describe_shortfall,
    describe_unscored,
)
from ..sampling.rollout import Totals
from ..sampling.sampler import Sampler
from .checkpoint import output_folder
from .counts import DROPPED, SAMPLING, acceptance_rate, mean, num_accepted, total
from .early_stop import StopCallback
from .ledger import read_rollouts
from .log import LOG_HISTORY_NAME
from .stopwatch import SILENCE, Stopwatch, calling


logger = transformers_logging.get_logger(__name__)

HEADER_EVERY = 30  # rows
# Informative groups per step compared with `GRPOTrainer`, below which the summary of a run gives advice.
WORTH_IT = 1.1
FEWEST_PROMPTS = 2  # per rollout, that the summary recommends
DOING = {"engine": "sampling", "wait": "waiting for the server", "rewards": "scoring", "evaluation": "evaluating"}
DOING |= {"checkpoint": "saving a checkpoint"}
# What the trainer spends its time on, by the name in the log: if the trainer samples itself, and if a server does.
SHARED_PHASES = {"rewards": "rewards", "update": "updates", "other": "evaluations and checkpoints"}
PHASES = {"sampling": "sampling", **SHARED_PHASES}
PHASES_WITH_SERVER = {"wait": "waiting for the server", **SHARED_PHASES}


def wrapped_for(file: IO[str], line: str) -> str:
    """Return a line unchanged, or wrapped between words if it goes to a terminal."""
    if not file.isatty():
        return line
    return textwrap.fill(line, shutil.get_terminal_size().columns, break_on_hyphens=False, break_long_words=False)


# ---- A rollout while it is sampled ----


@contextmanager
def progress_bar(sampler: Sampler, is_hidden: bool) -> Iterator[Callable[[], None]]:
    """
    Show the number of accepted groups of a rollout in a progress bar.

    The function that is yielded updates the bar after a round. It also warns of passes over the dataset in which no
    group was accepted.
    """
    rollout = sampler.rollout
    # With `None` tqdm shows the bar only on a terminal. In a file a bar would be one endless line.
    disable = True if is_hidden else None
    bar_format = "{l_bar}{bar}| accepted {n_fmt}/{total_fmt}{postfix}"
    with tqdm(total=rollout.target, desc="Sampling", bar_format=bar_format, leave=False, disable=disable) as bar:

        def show() -> None:
            bar.n = rollout.target - rollout.shortfall
            bar.set_postfix_str(f"round {rollout.num_rounds}, acceptance {rollout.acceptance_rate:.0%}")
            num_passes = sampler.new_passes_without_group()
            message = None
            if num_passes:
                passes = "one pass" if num_passes == 1 else f"{num_passes} passes"
                message = f"No group was accepted in {passes} over the training dataset. {advise(rollout)}".rstrip()
            elif sampler.has_new_batches_without_group():
                message = describe_no_group_yet(sampler)
            # After an empty rollout, its own warning has said the same.
            if message is not None and not sampler.totals.empty_rollouts_in_a_row and PartialState().is_main_process:
                logger.warning(message)

        yield show


def warn_of_shortfall(sampler: Sampler, batch: Batch, args: DAPOConfig, reward_names: Sequence[str]) -> None:
    """Stop or warn if the limit was reached before the batch was full, or if a reward function scored nothing."""
    num_short, rollout, is_main = sampler.short_rollouts_in_a_row, sampler.rollout, PartialState().is_main_process
    unscored = describe_unscored(rollout, reward_names) if rollout.number == 0 else None
    if unscored is not None and is_main:
        logger.warning(unscored)
    limit = args.dynamic_sampling_max_gen_batches
    if num_short and args.dynamic_sampling_on_exhausted == "error":
        raise RuntimeError(describe_shortfall(rollout, limit))
    # Warn at the first short rollout, and once more after five in a row. A line per rollout would hide other lines.
    # A cause is named once: a reward that scores nothing was warned of above, and five empty rollouts in a row have
    # the cause of the first one. When they stop the run, it says so again, with advice.
    is_first = num_short > 0 and sampler.totals.short_rollouts == 1 and unscored is None
    is_lasting = num_short == 5 and sampler.totals.empty_rollouts_in_a_row < 5
    if (is_first or is_lasting) and is_main:
        if sampler.mode == "mask":
            logger.warning(describe_empty_batch(rollout, num_short))
        else:
            logger.warning(describe_shortfall(rollout, limit, num_short, len(batch.train)))


# ---- The table ----


ACCEPTANCE = f"{SAMPLING}acceptance_rate"
# Name, width, metric and format of each column. With the step, the time left and spaces a line has 79 characters.
COLUMNS: tuple[tuple[str, int, str, Callable[[float], str]], ...] = (
    ("reward", 7, "reward", format_number),
    ("correct", 7, "task_accuracy", "{:.1%}".format),
    ("accepted", 8, ACCEPTANCE, "{:.1%}".format),
    ("trained", 7, "dynamic_sampling/groups_trained", "{:.0f}".format),  # with the number of groups of a full batch
    ("cut off", 7, "completions/clipped_ratio", "{:.1%}".format),
    ("length", 6, "completions/mean_length", lambda n: f"{n:.1f}" if n < 9999.5 else format_count(n)),
    ("entropy", 7, "entropy", format_number),
    ("seconds", 7, "step_time", lambda seconds: f"{seconds:.2f}" if seconds < 1000 else f"{seconds:.0f}"),
)
HEADER = " ".join([f"{'step':>6}", *(f"{name:>{width}}" for name, width, _, _ in COLUMNS), f"{'left':>8}"])


def format_row(logs: Sequence[dict], step: int, seconds_left: float | None, target: int | None = None) -> str:
    """
    Return one line of the table: the means over the rollouts of log entries, and a dash if no entry has a metric.

    `target` is the number of groups of a full batch. The mean of trained groups is rounded down, so that a line says
    `16/16` only if every batch was full.
    """
    cells = []
    for name, width, metric, text in COLUMNS:
        value = _mean(logs, metric)
        if value is None:
            cell = "-"
        elif name == "trained" and target is not None:
            cell = f"{math.floor(value + 1e-9)}/{target}"  # rounding errors may make a mean of 16 slightly smaller
        else:
            cell = text(value)
        cells.append(f"{cell:>{width}}")
    left = "-" if seconds_left is None else format_duration(seconds_left)
    return " ".join([f"{step:6d}", *cells, f"{left:>8}"])


def _mean(entries: Sequence[dict], metric: str) -> float | None:
    """Return the mean of a metric over rollouts, or of the acceptance rate over groups, or `None` without values."""
    return acceptance_rate(entries) if metric == ACCEPTANCE else mean(entries, metric)


def _evaluation(entry: dict) -> tuple[str, dict[str, str]] | None:
    """Return the name of the evaluation that a log entry belongs to, and its scores, or `None` for other entries."""
    if "loss" in entry or "train_runtime" in entry:  # reward functions may have logged times in these entries
        return None
    timed = [name.removesuffix("_runtime") for name in entry if name.endswith("_runtime")]
    prefixes = [prefix for prefix in timed if f"{prefix}_samples_per_second" in entry]  # transformers logs both
    if not prefixes:
        return None
    scores = {}
    for name, value in entry.items():
        match = re.fullmatch(re.escape(prefixes[0]) + r"_((?:avg|pass|maj)@\d+)", name)
        if match:
            scores[match[1]] = f"{value:.1%}"
    reward = entry.get("eval_reward")
    if not scores and reward is not None:
        scores = {"reward": format_number(reward)}
    return prefixes[0], scores


def format_evaluation(entry: dict) -> str | None:
    """Return one line for the log entry of an evaluation, or `None` for any other entry."""
    evaluation = _evaluation(entry)
    if evaluation is None:
        return None
    name, scores = evaluation
    figures = ", ".join(f"{score} {value}" for score, value in scores.items()) or "no completion was scored"
    return f"{entry['step']:6d} {name.replace('_', ' ', 1)}: {figures}"


# ---- The end ----


def count_empty_steps(log_history: Sequence[dict], resumed_at: int = 0) -> int:
    """
    Return the number of optimizer steps without a token to learn from, after the step `resumed_at`.

    The steps after the last logging step are counted in the entry that is logged at the end of the run.
    """
    empty, last = 0, resumed_at
    for entry in log_history:
        if ("loss" in entry or "train_runtime" in entry) and entry["step"] > resumed_at:
            empty += round(entry.get("frac_empty_steps", 0.0) * (entry["step"] - last))
            last = entry["step"]
    return empty


def _ends(entries: Sequence[dict], last_step: int, resumed_at: int = 0) -> tuple[list[dict], list[dict], str]:
    """
    Return the entries of the first and of the last tenth of the rollouts, and their steps in words.

    A tenth is used because a single rollout is mostly noise. An entry covers the steps after that of the previous
    entry, up to its own `step`. The last entry covers all steps that are left. If nothing is known of the steps before
    a resume, the first entry begins after it.
    """
    num = math.ceil(len(entries) / 10)
    first, last = list(entries[:num]), list(entries[len(entries) - num :])

    def span(begin: int, end: int) -> str:
        return f"step {begin + 1:,}" if begin + 1 >= end else f"mean of steps {begin + 1:,}-{end:,}"

    if not entries:
        return first, last, ""
    start = resumed_at if entries[0]["step"] > resumed_at else 0
    if len(entries) == 1:
        return first, last, span(start, last_step)
    return first, last, f"{span(start, first[-1]['step'])} -> {span(entries[-num - 1]['step'], last_step)}"


def _of_rollouts(log_history: Sequence[dict]) -> list[dict]:
    """
    Return the log entries with metrics of a rollout.

    Only the first step on a rollout logs its metrics. If no entry has any, all training entries are returned.
    """
    trained = [entry for entry in log_history if "loss" in entry or "train_runtime" in entry]
    with_rollout = [entry for entry in trained if "reward" in entry or f"{SAMPLING}groups_generated" in entry]
    return with_rollout or [entry for entry in trained if "loss" in entry]


def _change(first: list[dict], last: list[dict], metric: str, text: Callable[[float], str]) -> str | None:
    """Return the means of a metric at the beginning and at the end of a run, or `None` if one of them has no value."""
    before, after = _mean(first, metric), _mean(last, metric)
    if before is None or after is None:
        return None
    return text(after) if first == last else f"{text(before)} -> {text(after)}"


class ComparedWithGRPO(NamedTuple):
    """Cost and informative groups per step, as factors of those of `GRPOTrainer`, which samples each batch once."""

    tokens: float  # generated tokens
    groups: float  # informative groups
    full: float  # mean share of a batch that was filled


def compare_with_grpo(log_history: Sequence[dict], totals: Totals) -> ComparedWithGRPO | None:
    """
    Return how a run's steps compare with those of `GRPOTrainer`; `None` if no group was accepted.

    `log_history` has the entries since the first step that `totals` counts.
    """

    def num(name: str) -> float:
        return total(log_history, f"{SAMPLING}{name}")

    accepted, trained = num_accepted(log_history), num("groups_trained")
    if not (accepted and num("completions_trained")):
        return None
    # Share of the groups of GRPO that would be informative. GRPO would also sample the prompts that were skipped.
    informative = (accepted + totals.skipped_accepted) / (num("groups_generated") + totals.num_skipped)
    full = trained / (trained + num("shortfall"))
    tokens = full * num("completions_generated") / num("completions_trained")
    return ComparedWithGRPO(tokens, full / informative, full)


def advise_on_batches(
    compared: ComparedWithGRPO, num_prompts: int | None = None, has_correctness: bool = True
) -> str | None:
    """
    Return advice if steps cost more than those of `GRPOTrainer`, or trained on hardly more informative groups.

    Args:
        compared ([`ComparedWithGRPO`]):
            How the run's steps compare with those of `GRPOTrainer`.
        num_prompts (`int`, *optional*):
            Number of prompts in a rollout batch. If it is given, the advice may name the number with which a step
            would have cost as much as one of `GRPOTrainer`.
        has_correctness (`bool`, *optional*, defaults to `True`):
            Whether the rewards say which completions are correct.

    Returns:
        `str` or `None`: The advice, or `None` if there is nothing to change.
    """
    if compared.groups >= WORTH_IT:
        if num_prompts is None or compared.tokens < WORTH_IT:
            return None
        num_fewer = round(num_prompts / compared.tokens)
        gain = compared.groups / compared.tokens
        if num_fewer == num_prompts or num_fewer < FEWEST_PROMPTS or gain < WORTH_IT:
            return None
        return (
            f"with {num_fewer} prompts per rollout instead of {num_prompts}, a step would have cost about as much as "
            f"one of GRPOTrainer, for about {gain:.1f} times as many informative groups."
        )
    if compared.full < 1 / WORTH_IT:
        return (
            f"batches were on average only {compared.full:.0%} full, so a step trained on about "
            f"{compared.groups:.1f} times as many informative groups as one of GRPOTrainer. Raise "
            "`dynamic_sampling_max_gen_batches` to fill them, or use fewer prompts per rollout."
        )
    helps = "with harder prompts" if has_correctness else "if a reward says which completions are correct"
    return (
        "nearly every sampled group was informative, so a step trained on about as many as one of GRPOTrainer. "
        f"Dynamic sampling helps more {helps}."
    )


def _why_no_step_changed_weights(
    log_history: Sequence[dict],
    all_empty: bool,
    num_groups_trained: int | None,
    rollouts: Sequence[dict],
    learning_rate: float | None,
) -> str | None:
    """
    Return the end of a sentence that begins with "No step changed the weights", or `None` if a step did.

    Args:
        log_history (`Sequence[dict]`):
            The log of the run.
        all_empty (`bool`):
            Whether no step had a token in the loss.
        num_groups_trained (`int`, *optional*):
            Number of groups that were trained on. `None` without dynamic sampling.
        rollouts (`Sequence[dict]`):
            The rollouts from the ledger, if it has all of them.
        learning_rate (`float`, *optional*):
            The setting of this name, if it is that of all steps.
    """
    if learning_rate == 0:
        return ", because `learning_rate` is 0"
    entries = _of_rollouts(log_history)
    if not all_empty:
        # Without dynamic sampling, groups with equal rewards are trained on, with advantages of 0.
        had_equal_rewards = _always(entries, "frac_reward_zero_std", 1.0) and _always(entries, "grad_norm", 0.0)
        if num_groups_trained is None and had_equal_rewards:
            return ", because in every group all rewards were equal, so that all advantages were 0"
        return None
    if num_groups_trained == 0:
        names = dict.fromkeys(name for entry in rollouts or entries for name in entry if name.startswith(DROPPED))
        counts = {name.removeprefix(DROPPED): round(total(rollouts or entries, name)) for name in names}
        most = sorted(counts.items(), key=lambda reason: -reason[1])
        dropped = ", ".join(f"{reason} {count:,}" for reason, count in most if count)
        return f", because no group was accepted (dropped: {dropped})" if dropped else ""
    if _always(entries, "completions/clipped_ratio", 1.0):
        return ", because every completion was cut off, and completions that are cut off are left out of the loss"
    return ", because no token was in the loss"


def _always(entries: Sequence[dict], metric: str, value: float) -> bool:
    """Return whether a metric was logged and always had this value."""
    return {entry[metric] for entry in entries if metric in entry} == {value}


def _describe_steps(num_steps: int, num_empty: int, num_without_rate: int, resumed_at: int = 0) -> str:
    """
    Return how many of the steps since the run was started or resumed changed the weights: all but those without a
    token in the loss, and those whose learning rate was 0, such as the first step of a warm-up.
    """
    since = f" since step {resumed_at:,}" if resumed_at else ""
    num_unchanged = min(num_empty + num_without_rate, num_steps)
    if not num_unchanged:
        return f"Every step{since} changed the weights"
    if num_without_rate == num_steps:
        return f"No step{since} changed the weights, because the learning rate was 0"
    of = f"of the {num_steps:,} steps{since}" if resumed_at else "of them"
    its = "its" if num_without_rate == 1 else "their"
    why = f"because {its} learning rate was 0"
    reason = "" if not num_without_rate else f", {why}" if not num_empty else f" ({num_without_rate:,} {why})"
    return f"{num_unchanged:,} {of} did not change the weights{reason}"


def summarize(
    log_history: Sequence[dict],
    totals: Totals | None,
    *,
    step: int,
    max_steps: int,
    seconds: float,  # since the run was started or resumed
    output_dir: str,
    resumed_at: int = 0,
    rest: dict | None = None,  # the timeline since the last rollout
    fills_batches: bool = True,  # whether batches are filled with accepted groups only: no copies, no dropped groups
    num_groups_left: int = 0,  # groups of the last batch that were not trained on, because the run ended before
    rollouts: Sequence[dict] = (),  # from `read_rollouts`; by default the log is used, as far as it has them
    num_prompts: int | None = None,  # of a rollout batch
    why: str | None = None,  # why the run ended, see `StopCallback.why_ended`
    num_different: int | None = None,  # groups that trained, without the copies of the mode "replace"
    learning_rate: float | None = None,  # the setting, if it is that of all steps
    num_without_rate: int = 0,  # steps whose learning rate was 0, since the run was started or resumed
    reward_names: Sequence[str] = (),
) -> list[str]:
    """Return the summary of a run, one line for each fact that is known."""
    num_groups_trained = None if totals is None else totals.groups_trained - num_groups_left
    empty = count_empty_steps(log_history)
    reason = _why_no_step_changed_weights(log_history, empty == step, num_groups_trained, rollouts, learning_rate)
    if step == 0:
        changed = "No step changed the weights"
    elif reason is not None:
        changed = f"No step changed the weights{reason}"
    else:
        num_empty = count_empty_steps(log_history, resumed_at)
        changed = _describe_steps(step - resumed_at, num_empty, num_without_rate, resumed_at)
    since = f" from step {resumed_at:,}" if resumed_at else ""
    because = "" if why is None else f", because {why}"
    took = f"after {format_duration(seconds)}{since}"
    lines = [f"Ended:     step {step:,} of {max_steps:,}, {took}{because}. {changed}."]
    first, last, steps = _ends(rollouts or _of_rollouts(log_history), step, resumed_at)
    if totals is not None and totals.groups_sampled:
        counted_since = f" since step {totals.first_step:,}" if totals.first_step else ""
        counted = [entry for entry in log_history if entry.get("step", step) > totals.first_step]
        accepted = _change(first, last, ACCEPTANCE, "{:.1%}".format)
        too_late = f", {num_groups_left:,} not trained because the run ended" if num_groups_left else ""
        num_trained, copies = totals.groups_trained - num_groups_left, ""
        if num_different is not None and num_different < num_trained:
            num_trained, copies = num_different, f" (with copies {num_trained:,} in the batches)"
        lines.append(
            f"Groups:    {num_trained:,} trained of {totals.groups_sampled:,} sampled{counted_since}{copies}"
            + too_late
            + (f"; accepted {accepted} ({steps})." if accepted else ".")
        )
        if fills_batches and (num_short := totals.short_rollouts):
            batches = "batch" if num_short == 1 else "batches"
            full = "a full batch needs" if num_prompts is None else f"the {num_prompts} of a full batch"
            lines.append(f"Not full:  {num_short:,} {batches} had fewer accepted groups than {full}.")
        compared, tokens = compare_with_grpo(counted, totals), f"Tokens:    {totals.tokens_generated:,} generated"
        if compared is None or not fills_batches:
            lines.append(f"{tokens}.")
        else:
            lines.append(
                f"{tokens}: {compared.tokens:.1f} times as many per step as GRPOTrainer, for about "
                f"{compared.groups:.1f} times as many informative groups."
            )
            has_correctness = any("task_accuracy" in entry for entry in counted)
            advice = advise_on_batches(compared, num_prompts, has_correctness)
            if advice is not None:
                lines.append(f"Advice:    {advice}")
    waits = any("timeline/wait_seconds" in entry for entry in log_history)
    phases = PHASES_WITH_SERVER if waits else PHASES
    entries = [*log_history, rest or {}]
    timeline = {word: total(entries, f"timeline/{name}_seconds") for name, word in phases.items()}
    if all_seconds := sum(timeline.values()):
        shares = ", ".join(f"{spent / all_seconds:.0%} {word}" for word, spent in timeline.items())
        lines.append(f"Time:      {shares}.")
    metrics = dict.fromkeys(name for entry in last for name in entry if re.fullmatch("rewards/.*/mean", name))
    changes, new = [], []
    for name in metrics:
        change = _change(first, last, name, format_number)
        reward_name, mean = name.split("/")[1], _mean(last, name)
        if change is not None:
            changes.append(f"{reward_name} {change}")
        elif mean is not None:  # the run was resumed with another reward function
            new.append(f"{reward_name} {format_number(mean)}")
    parts = [f"{', '.join(changes)} ({steps})"] if changes else []
    if new:
        parts.append(f"{', '.join(new)} ({steps.split(' -> ')[-1]})")
    logged = {name for entry in [*log_history, *rollouts] for name in entry}
    if silent := [name for name in reward_names if f"rewards/{name}/mean" not in logged]:
        parts.append(f"never scored: {', '.join(silent)}")
    if parts:
        lines.append(f"Rewards:   {'; '.join(parts)}.")
    evaluations: dict[str, list[tuple[int, dict[str, str]]]] = {}
    for entry in log_history:
        evaluation = _evaluation(entry)
        if evaluation is None:
            continue
        name, scores = evaluation
        if scores:
            evaluations.setdefault(name, []).append((entry["step"], scores))
    for name, scored in evaluations.items():
        (start, before), (end, after) = scored[0], scored[-1]
        changes = [
            f"{score} {before[score]} -> {value}" if len(scored) > 1 and score in before else f"{score} {value}"
            for score, value in after.items()
        ]
        steps = f"steps {start:,} -> {end:,}" if len(scored) > 1 else f"step {end:,}"
        lines.append(f"{name.replace('_', ' ', 1).capitalize() + ':':<10} {', '.join(changes)} ({steps}).")
    lines.append(f"Next:      trl-dapo report {shlex.quote(str(output_dir))} (each step: {LOG_HISTORY_NAME})")
    return lines


def describe_passes(args: DAPOConfig, num_steps: int) -> str | None:
    """Return a line on how epochs are converted to optimizer steps, or `None` if the run does not depend on it."""
    resamples = args.use_dynamic_sampling and args.dynamic_sampling_mode != "mask"
    if args.max_steps >= 0 or not resamples:
        return None
    return (
        f"`num_train_epochs={args.num_train_epochs:g}` means {num_steps:,} optimizer steps. Dropped groups are "
        "replaced, so these steps may take more passes over the dataset than epochs (see the metric "
        "`dynamic_sampling/passes`). Set `max_steps` or `max_tokens_generated` to end the run earlier."
    )


# ---- Callback ----


class TerminalCallback(ProgressCallback, PrinterCallback):
    """
    Callback that prints the progress of a run, instead of transformers' two callbacks.

    It is a subclass of both, so that a script that removes one of them removes this callback.
    """

    training_bar: tqdm | None

    def __init__(
        self,
        args: DAPOConfig,
        stops: StopCallback,
        stopwatch: Stopwatch,
        sampler: Sampler | None,
        dataset: Sized | Iterable,
        num_groups_left: Callable[[], int] = lambda: 0,  # see `summarize`; collective
        reward_names: Sequence[str] = (),
        every: int = 1,  # optimizer steps per line of the table
        file: IO[str] | None = None,  # defaults to standard output
    ) -> None:
        super().__init__()
        self._args, self._stops, self._sampler, self._knows_length = args, stops, sampler, has_length(dataset)
        self._stopwatch, self._num_groups_left, self.every, self.file = stopwatch, num_groups_left, every, file
        self._reward_names = reward_names
        self.has_bar = not args.disable_tqdm and sys.stderr.isatty()  # in a file a bar would be one endless line
        self._window: list[dict] = []
        self._num_rows = self._num_batches = self._num_without_rate = 0
        self._started = self._said_at = time.perf_counter()

    def reporting_progress(self, callbacks: Sequence[Any]) -> AbstractContextManager[None]:
        """Print what the run is doing whenever nothing was printed for a while."""
        if self not in callbacks or not PartialState().is_main_process:
            return nullcontext()
        return calling(lambda: self.break_silence(time.perf_counter()), every=1.0)

    def break_silence(self, now: float) -> None:
        if now - self._said_at < SILENCE:
            return
        what, how_much = DOING.get(self._stopwatch.doing or "", "updating"), self._stopwatch.how_much
        if what == "evaluating":
            how_much += f", {self._num_batches} done"
        elif what == "sampling" and self._sampler is not None and (rollout := self._sampler.rollout) is not None:
            found = rollout.target - rollout.shortfall
            how_much = f"{found} of {rollout.target} groups after {rollout.num_rounds} rounds"
        self.say(f"       {what} {how_much}".rstrip() + f" ({format_duration(now - self._started)})")

    def say(self, text: str) -> None:
        """Print a line, above the progress bar."""
        self._said_at = time.perf_counter()
        file = self.file or sys.stdout
        text = wrapped_for(file, text)
        if self.training_bar is not None:
            self.training_bar.write(text, file=file)
        else:
            print(text, file=file, flush=True)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self._window, self._num_rows, self._num_without_rate = [], 0, 0
        self._started, self._progress_at_start = time.perf_counter(), self._progress(state)
        if not state.is_world_process_zero:
            return
        if self._knows_length and (line := describe_passes(self._args, state.max_steps)):
            self.say(line)
        if state.global_step:
            raised = "max_steps" if self._args.max_steps >= 0 else "num_train_epochs"
            note = ""
            if state.global_step >= state.max_steps:
                note = f" No step is left. Raise `{raised}`."
            elif _has_no_rate(kwargs.get("optimizer")):
                note = (
                    " The learning rate of the next step is 0, as in the checkpoint, whose schedule had ended. So "
                    f"this step does not change the weights. Later steps follow the schedule of the new `{raised}`."
                )
            self.say(f"Resumed at step {state.global_step:,} of {state.max_steps:,}.{note}")
        if self.has_bar:
            super().on_train_begin(args, state, control, **kwargs)
            assert self.training_bar is not None
            self.training_bar.update(state.global_step)
            self.current_step = state.global_step

    def on_pre_optimizer_step(self, *args: Any, optimizer: Any = None, **kwargs: Any) -> None:
        self._num_without_rate += _has_no_rate(optimizer)

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        if self.training_bar is not None:
            super().on_step_end(*args, **kwargs)

    def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
        self._num_batches += 1
        if self.has_bar:
            super().on_prediction_step(*args, **kwargs)

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: dict | None = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        logs = logs or {}
        entry = {**logs, "step": state.global_step}
        if (line := format_evaluation(entry)) is not None:
            self._num_batches = 0
            self.say(line)
        elif "loss" in logs:
            self._window.append(entry)
            if state.global_step % self.every and state.global_step < state.max_steps:
                return
            if self._num_rows % HEADER_EVERY == 0:
                self.say(HEADER)
            target = None if self._sampler is None else self._sampler.target
            self.say(format_row(self._window, state.global_step, self._seconds_left(state), target))
            self._window, self._num_rows = [], self._num_rows + 1

    def _progress(self, state: TrainerState) -> list[tuple[float, float]]:
        """Return pairs of how much of a limit of the run is used, and the limit."""
        return [(state.global_step, state.max_steps), *self._stops.limits]

    def _seconds_left(self, state: TrainerState) -> float | None:
        """Return the estimated seconds until the run reaches a limit, by its pace since it was started or resumed."""
        elapsed = time.perf_counter() - self._started
        left = [
            elapsed * max(limit - used, 0) / (used - before)
            for (used, limit), (before, _) in zip(self._progress(state), self._progress_at_start, strict=True)
            if used > before
        ]
        return min(left, default=None)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        num_groups_left = self._num_groups_left()
        if not state.is_world_process_zero:
            return
        if self.training_bar is not None:
            super().on_train_end(args, state, control, **kwargs)
        resumed_at = int(self._progress_at_start[0][0])
        rollouts = [] if self._sampler is None else self._rollouts(state.global_step, self._sampler.totals)
        num_different = None
        if rollouts and self._args.dynamic_sampling_mode == "replace":  # whose totals also count copies
            num_different = int(total(rollouts, f"{SAMPLING}groups_trained"))
        lines = summarize(
            state.log_history,
            None if self._sampler is None else self._sampler.totals,
            step=state.global_step,
            max_steps=state.max_steps,
            seconds=time.perf_counter() - self._started,
            output_dir=output_folder(args),
            resumed_at=resumed_at,
            rest=self._stopwatch.timeline(),
            num_prompts=None if self._sampler is None else self._sampler.target,
            fills_batches=self._args.dynamic_sampling_mode in ("filter", "paper"),
            num_groups_left=num_groups_left,
            rollouts=rollouts,
            why=self._stops.why_ended(state),
            num_different=num_different,
            learning_rate=None if resumed_at else self._args.learning_rate,  # a checkpoint has one of its own
            num_without_rate=self._num_without_rate,
            reward_names=self._reward_names,
        )
        made_no_step = state.global_step == resumed_at > 0
        if made_no_step:
            lines = lines[-1:]  # the resumed run has printed the rest already
        for line in lines:
            self.say(line)

    def _rollouts(self, last_step: int, totals: Totals) -> list[dict]:
        """Return the rollouts of the run from its ledger, or nothing if the ledger does not have all of them."""
        rollouts = read_rollouts(output_folder(self._args), last_step)
        return rollouts if total(rollouts, f"{SAMPLING}groups_generated") == totals.groups_sampled else []


def _has_no_rate(optimizer: Any) -> bool:
    """Return whether the learning rate of all parameters is 0."""
    groups = getattr(optimizer, "param_groups", ())
    return bool(groups) and all(group["lr"] == 0 for group in groups)


@contextmanager
def progress_bars_on_terminals_only(loading: bool = True) -> Iterator[None]:
    """
    Show progress bars only on a terminal, and print log lines above them.

    With `loading=False`, no bar is shown while a model is loaded.
    """
    on_terminal, were_enabled = sys.stderr.isatty(), transformers_logging.is_progress_bar_enabled()
    if not (on_terminal and loading):
        transformers_logging.disable_progress_bar()
    loggers = [logging.getLogger(), transformers_logging.get_logger()]
    try:
        with logging_redirect_tqdm(loggers) if on_terminal else nullcontext():
            yield
    finally:
        if were_enabled:
            transformers_logging.enable_progress_bar()


def use_terminal_callback(trainer: Trainer, terminal: TerminalCallback) -> None:
    """Replace transformers' printing callback by this one. In a notebook, transformers' table is kept."""
    for callback in trainer.callback_handler.callbacks:
        if type(callback) in (ProgressCallback, PrinterCallback):
            trainer.remove_callback(callback)
            trainer.add_callback(terminal)
            break

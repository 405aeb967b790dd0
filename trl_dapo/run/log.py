# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The files with a run's log and settings, and comparison of settings."""

import dataclasses
import io
import json
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
from transformers import TrainerCallback, TrainerState, TrainingArguments
from transformers.utils import logging

from ..settings.sampling_defaults import DEFAULTS, PAPER
from ..settings.secrets import without_secrets
from ..settings.warnings import HALF_CUT_OFF, LOW_WEIGHT, LOW_WEIGHT_MESSAGE, describe_cut_off
from .checkpoint import output_folder
from .files import keep_existing, replacing


logger = logging.get_logger(__name__)

LOG_HISTORY_NAME, SETTINGS_NAME = "log_history.jsonl", "settings.json"
# Computed values of settings whose default only means that they are computed.
_COMPUTED = {"activation_checkpointing": True, "debug": [], "pad_to_multiple_of": None, "report_to": []}
# Settings that are left out: they are computed from the machine or other settings, are another name of one, or are
# masked whether they are set or not.
_NOT_SET = {"output_dir", "accelerator_config", "dataloader_pin_memory", "generation_batch_size", "do_eval"}
_NOT_SET |= {"gradient_checkpointing", "hub_token"}
# Settings that may differ in every launch, and do not change how a run trains.
_LAUNCH_SETTINGS = {"resume_from_checkpoint", "run_name", "logging_dir", "disable_tqdm"}
_LIMITS = {"max_steps", "num_train_epochs", "max_tokens_generated"}
# Settings that transformers restores with the optimizer, so that new values have no effect.
_HELD_BY_OPTIMIZER = {"learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"}


class LogHistoryCallback(TrainerCallback):
    """
    Callback that writes every log entry to `log_history.jsonl`, and the settings that differ from their defaults to
    `settings.json`.
    """

    def __init__(self) -> None:
        self._path: Path | None = None
        self._warned_of_many = self._warned_of_half = False  # that many, or half, of the completions are cut off

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        self._path = path = Path(output_folder(args)) / LOG_HISTORY_NAME
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            model = {"value": without_secrets(kwargs["model"].config._name_or_path, "model"), "default": None}
            settings = json.dumps({"model": model, **changed_settings(args)}, indent=1, default=str)
            path.with_name(SETTINGS_NAME).write_text(settings + "\n", encoding="utf-8")
            if not state.log_history:
                keep_existing(path)
            # A resumed run repeats the steps after its checkpoint, so that their earlier entries are removed.
            with replacing(path) as temporary:
                temporary.write_text("".join(_line(entry, state) for entry in state.log_history), encoding="utf-8")
        except OSError as error:
            self._end(error)

    def _end(self, error: OSError) -> None:
        logger.warning(f"`{self._path}` cannot be written: {error}. The run continues, but without this file.")
        self._path = None

    def on_log(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if self._path is None:  # another process, or an evaluation outside of a run
            return
        self._warn_of_cut_off(args, state.log_history[-1].get("completions/clipped_ratio", 0.0))
        if state.log_history[-1].get("sampling/importance_sampling_ratio/mean", 1.0) < LOW_WEIGHT:
            logger.warning_once(LOW_WEIGHT_MESSAGE)
        try:
            # Opened for each line, so that nothing waits in a buffer when the run is killed.
            with self._path.open("a", encoding="utf-8") as file:
                file.write(_line(state.log_history[-1], state))
        except OSError as error:
            self._end(error)

    def _warn_of_cut_off(self, args: Any, ratio: float) -> None:
        # Warn once if many completions are cut off, and once more if half of them are.
        is_half = ratio >= HALF_CUT_OFF
        if self._warned_of_half or (self._warned_of_many and not is_half):
            return
        if (message := describe_cut_off(args, ratio)) is not None:
            logger.warning(message)
            self._warned_of_many, self._warned_of_half = True, is_half


def changed_settings(args: TrainingArguments) -> dict[str, dict[str, Any]]:
    """Return the settings of a run that differ from their defaults, with the `value` and `default` of each."""
    values, changed = args.to_dict(), {}
    computed = {**_COMPUTED, "bf16": not args.fp16, "steps_per_generation": args.gradient_accumulation_steps}
    computed["disable_tqdm"] = logging.get_verbosity() > logging.WARNING
    fills_batches = values.get("use_dynamic_sampling") and values.get("dynamic_sampling_mode") in ("filter", "replace")
    sampling = DEFAULTS if fills_batches else PAPER
    not_set = _NOT_SET
    if values.get("prompts_per_rollout") or values.get("prompts_per_step"):  # the two sizes are computed from these
        not_set = _NOT_SET | {"gradient_accumulation_steps", "steps_per_generation"}
    for field in dataclasses.fields(args):
        name, default = field.name, field.default
        if default is dataclasses.MISSING:
            default = None if field.default_factory is dataclasses.MISSING else field.default_factory()
        default = computed.get(name, default)
        if name in sampling and values[name] is not None:  # the trainer has replaced `None`, its default
            default = sampling[name]
        if name in values and name not in not_set and values[name] != default:
            changed[name] = {"value": without_secrets(values[name], name), "default": default}
    return changed


def settings_to_compare(args: TrainingArguments) -> dict[str, dict[str, Any]]:
    """Return the settings that a checkpoint stores for comparison with those of a resumed run, as JSON values."""
    return {
        name: json.loads(json.dumps(setting, default=str))
        for name, setting in changed_settings(args).items()
        if name not in _LAUNCH_SETTINGS
    }


def describe_changes(
    folder: str,
    theirs: dict[str, dict],
    own: dict[str, dict],
    named_elsewhere: Collection[str] = (),
    restores_optimizer: bool = True,
) -> str | None:
    """
    Return a sentence about the settings that differ from those of the checkpoint, with both values, or `None`.

    Settings that another message names with their values are left out.
    """
    changes = {}
    for name in [*theirs, *(name for name in own if name not in theirs)]:
        there = theirs[name]["value"] if name in theirs else own[name]["default"]
        here = own[name]["value"] if name in own else theirs[name]["default"]
        if there != here and name not in named_elsewhere and not _is_extended(name, there, here):
            changes[name] = f"`{name}` ({there!r} there, {here!r} here)"
    if not changes:
        return None
    line = f"These settings are not those of {folder}: {', '.join(changes.values())}."
    held = [f"`{name}`" for name in changes if name in _HELD_BY_OPTIMIZER]
    if held and restores_optimizer:
        has = "has" if len(held) == 1 else "have"
        line += f" {', '.join(held)} {has} no effect, because the checkpoint's optimizer and schedule are restored."
    return line


def _is_extended(name: str, there: Any, here: Any) -> bool:
    """Return whether a run is resumed to train for longer, which is what resuming is for."""
    are_numbers = isinstance(there, (int, float)) and isinstance(here, (int, float))
    return name in _LIMITS and are_numbers and 0 < there < here


def storable(values: Iterable) -> list:
    """Return the values of a column in a form that parquet can store: as text if they have no common type."""
    values = list(values)
    try:
        pd.DataFrame({"values": values}).to_parquet(io.BytesIO())
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        return [None if value is None else str(value) for value in values]
    return values


def _line(entry: dict, state: TrainerState) -> str:
    # Values that JSON cannot represent are written as text, because the log must not stop a run.
    return json.dumps({**entry, "max_steps": state.max_steps}, default=str) + "\n"

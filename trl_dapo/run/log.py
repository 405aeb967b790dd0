# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""A run's settings and its growing log, for whoever reads them."""

import dataclasses
import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
from transformers import TrainerCallback, TrainerState, TrainingArguments
from transformers.utils import logging

from ..settings.secrets import without_secrets
from ..settings.warnings import HALF_CUT_OFF, LOW_WEIGHT, LOW_WEIGHT_MESSAGE, describe_cut_off
from .checkpoint import output_folder
from .files import keep_earlier, replacing


logger = logging.get_logger(__name__)

LOG_HISTORY_NAME, SETTINGS_NAME = "log_history.jsonl", "settings.json"
# The computed value, if the default only says that it is computed.
_WORKED_OUT = {"activation_checkpointing": True, "debug": [], "pad_to_multiple_of": None, "report_to": []}
# Worked out from the machine or from other settings; another name of one; masked, whether set or not.
_NOT_SET = {"output_dir", "accelerator_config", "dataloader_pin_memory", "generation_batch_size", "do_eval"}
_NOT_SET |= {"gradient_checkpointing", "hub_token"}
# What is another in every launch, and says nothing of how a run trains.
_OF_ONE_LAUNCH = {"resume_from_checkpoint", "run_name", "logging_dir", "disable_tqdm"}
# What transformers restores with the optimizer, whatever the settings say.
_HELD_BY_OPTIMIZER = {"learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"}


class LogHistoryCallback(TrainerCallback):
    """Appends every entry of the log to `log_history.jsonl`, and writes the settings that are not the defaults."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._warned_of_many = self._warned_of_half = False  # of the completions being cut off

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
                keep_earlier(path)
            with replacing(path) as temporary:  # a run that resumes takes the steps behind its checkpoint again
                temporary.write_text("".join(_line(entry, state) for entry in state.log_history), encoding="utf-8")
        except OSError as error:
            self._end(error)

    def _end(self, error: OSError) -> None:
        logger.warning(f"`{self._path}` cannot be written and ends here. The run continues: {error}")
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
        # Once when many are cut off, and once more when it is half of them.
        is_half = ratio >= HALF_CUT_OFF
        if self._warned_of_half or (self._warned_of_many and not is_half):
            return
        if (message := describe_cut_off(args, ratio)) is not None:
            logger.warning(message)
            self._warned_of_many, self._warned_of_half = True, is_half


def changed_settings(args: TrainingArguments) -> dict[str, dict[str, Any]]:
    """The settings of a run that are not the defaults: `value` and `default` of each, by its name."""
    values, changed = args.to_dict(), {}
    worked_out = {**_WORKED_OUT, "bf16": not args.fp16, "steps_per_generation": args.gradient_accumulation_steps}
    worked_out["disable_tqdm"] = logging.get_verbosity() > logging.WARNING
    not_set = _NOT_SET
    if values.get("prompts_per_rollout") or values.get("prompts_per_step"):  # which decide them
        not_set = _NOT_SET | {"gradient_accumulation_steps", "steps_per_generation"}
    for field in dataclasses.fields(args):
        name, default = field.name, field.default
        if default is dataclasses.MISSING:
            default = None if field.default_factory is dataclasses.MISSING else field.default_factory()
        default = worked_out.get(name, default)
        if name in values and name not in not_set and values[name] != default:
            changed[name] = {"value": without_secrets(values[name], name), "default": default}
    return changed


def settings_to_compare(args: TrainingArguments) -> dict[str, dict[str, Any]]:
    """Return what a checkpoint keeps of the settings for the run that resumes from it, JSON-able."""
    return {
        name: json.loads(json.dumps(setting, default=str))
        for name, setting in changed_settings(args).items()
        if name not in _OF_ONE_LAUNCH
    }


def describe_changes(folder: str, theirs: dict[str, dict], own: dict[str, dict]) -> str | None:
    """Return a sentence about the settings that differ from those of the checkpoint, with both values, or `None`."""
    changes = {}
    for name in [*theirs, *(name for name in own if name not in theirs)]:
        there = theirs[name]["value"] if name in theirs else own[name]["default"]
        here = own[name]["value"] if name in own else theirs[name]["default"]
        if there != here:
            changes[name] = f"`{name}` ({there!r} there, {here!r} here)"
    if not changes:
        return None
    line = f"{folder} was written with other settings: {', '.join(changes.values())}."
    if held := [f"`{name}`" for name in changes if name in _HELD_BY_OPTIMIZER]:
        has = "has" if len(held) == 1 else "have"
        line += f" {', '.join(held)} {has} no effect: the checkpoint's optimizer and schedule continue unchanged."
    return line


def storable(values: Iterable) -> list:
    """Return a column's values as parquet accepts them: unchanged, or as text if they have no type in common."""
    values = list(values)
    try:
        pd.DataFrame({"values": values}).to_parquet(io.BytesIO())
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        return [None if value is None else str(value) for value in values]
    return values


def _line(entry: dict, state: TrainerState) -> str:
    # What JSON has no word for is kept as text: the log must not stop a run.
    return json.dumps({**entry, "max_steps": state.max_steps}, default=str) + "\n"

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The files that [`DAPOTrainer`] adds to a checkpoint of transformers, and which checkpoints are complete."""

import json
import math
import os
import pickle
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from transformers import TrainingArguments
from transformers.trainer import SCHEDULER_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from ..config import DAPOConfig
from ..ranks import rank_and_world_size
from ..sampling.prompt_memory import PromptMemory
from ..sampling.report import describe_mismatch
from ..sampling.sampler import Sampler
from ..settings.secrets import without_secrets
from .files import replacing


logger = logging.get_logger(__name__)

STATE_NAME = "dapo_state.json"
MEMORY_NAME = "dapo_memory.parquet"
RANK_NAME = "dapo_state_rank{}.pt"
# What a trainer gives to `save_state`, and `save_state` adds.
LOCAL_KEYS = {
    "settings",
    "fingerprint",
    "update",
    "metrics",
    "entropy",
    "queue",
    "ahead",
    "reward_values",
    "num_processes",
}
WHOLE_NAME = "trainer_state.json"  # of transformers, which writes it when everything else is written
# The settings that a checkpoint's rows depend on: how they are sampled, which groups train, and with which rewards and
# advantages.
RESUME_FINGERPRINT = (
    "num_generations",
    "dynamic_sampling_mode",
    "dynamic_sampling_surplus",
    "dynamic_sampling_min_accuracy",
    "dynamic_sampling_max_accuracy",
    "dynamic_sampling_accuracy_threshold",
    "mask_truncated_completions",
    "use_vllm",
    "vllm_mode",
    "use_transformers_continuous_batching",
    "max_completion_length",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "generation_kwargs",
    "vllm_structured_outputs_regex",
    "chat_template_kwargs",
    "max_tool_calling_iterations",
    "scale_rewards",
    "multi_objective_aggregation",
    "reward_scaling",
    "overlong_buffer_length",
    "overlong_penalty_factor",
    "vllm_importance_sampling_correction",
    "vllm_importance_sampling_mode",
    "vllm_importance_sampling_clip_max",
    "vllm_importance_sampling_clip_min",
)


def fingerprint(args: DAPOConfig, others: dict[str, Any]) -> dict[str, Any]:
    """Return what rows depend on: settings, and `others`. It can be written as JSON: a callable is its name."""
    idle: tuple[str, ...] = ()  # beginnings of the names of settings that have no effect
    if not args.use_vllm:
        idle += ("vllm_",)
    if not args.use_dynamic_sampling:
        idle += ("dynamic_sampling_",)
    rule = {name: getattr(args, name) for name in RESUME_FINGERPRINT if not name.startswith(idle)}
    return without_secrets(json.loads(json.dumps(rule | others, default=_qualified_name)))


def _qualified_name(value: Any) -> str:
    """A function's or a class's name, or that of an object's class; an address would differ in the next run."""
    named = getattr(value, "func", value)  # of a `functools.partial`
    return getattr(named, "__qualname__", type(named).__qualname__)


def save_state(folder: Path, args: TrainingArguments, sampler: Sampler | None, local: dict[str, Any]) -> None:
    """
    Write what a trainer needs to continue as if it had not stopped. `local` is this rank's part. Every rank must call
    it.
    """
    rank, num_ranks = rank_and_world_size()
    torch.save({**local, "num_processes": num_ranks}, folder / RANK_NAME.format(rank))
    if args.should_save:
        (folder / STATE_NAME).write_text(json.dumps({} if sampler is None else sampler.state_dict(), indent=2) + "\n")
        memory = None if sampler is None else sampler.selection.find(PromptMemory)
        if memory is not None:
            with replacing(folder / MEMORY_NAME) as temporary:
                memory.save(temporary)


def load_state(
    folder: Path,
    sampler: Sampler | None,
    mismatches: Callable[[dict], dict[str, tuple]],  # settings that do not fit a rank's rows, by name
    restore: Callable[[dict, bool], None],  # takes what is a rank's, and whether its rows fit
    ignore_data_skip: bool,
) -> None:
    """Continue from [`save_state`]. What cannot be read on one rank is left out on all."""
    rank, num_processes = rank_and_world_size()
    say = logger.warning if rank == 0 else logger.debug  # all ranks find the same
    shared, problem = _read_shared(folder, sampler)
    local, lost = _read_local(folder / RANK_NAME.format(rank))
    has_rows = local is not None and (
        local["update"]["rollout"] is not None or bool(local["queue"] and local["queue"]["groups"])
    )
    has_optimizer = _holds_optimizer(folder)
    resumed = "weights and the optimizer are resumed" if has_optimizer else "weights are resumed"
    found = gather_object(
        [
            {
                "problem": problem,
                "lost": lost,
                "has_rows": has_rows,
                "num_processes": None if local is None else local["num_processes"],
            }
        ]
    )
    problems = [one["problem"] for one in found if one["problem"]]
    all_lost = [one["lost"] for one in found if one["lost"]]
    is_model_alone = not has_optimizer and not (folder / STATE_NAME).exists()
    if not has_optimizer:
        say(
            f"{folder} holds no optimizer, as with `save_only_model=True`: the optimizer and the learning-rate "
            f"schedule start again{', and the prompts start a fresh pass' if is_model_alone else ''}. The weights and "
            "the number of the step are resumed. Save with `save_only_model=False` to resume all of it."
        )
    if is_model_alone:
        return
    if shared is None or problems:
        say(f"{folder} cannot be resumed as a whole: {problems[0]}. The {resumed}, the prompts start a fresh pass.")
        return
    if all_lost:
        local = None
    differs = {} if local is None else mismatches(local)
    if (sampler is None) != (not shared):
        differs["use_dynamic_sampling"] = bool(shared), sampler is not None
    other_nums = [one["num_processes"] for one in found if one["num_processes"] not in (None, num_processes)]
    if other_nums:
        differs["num_processes"] = other_nums[0], num_processes
    if sampler is not None and shared:
        queue = None if local is None or differs else local["queue"]
        found_different, num_lost = sampler.load_state_dict(shared, queue, ignore_data_skip)
        differs |= found_different
        if num_lost:
            say(
                f"{folder} holds the first completions of {num_lost} groups whose examples are not found again: they "
                "are left behind."
            )
    if local is not None:
        restore(local, not differs)
    if all_lost and not differs:
        say(
            f"{folder} cannot be resumed as a whole: {all_lost[0]}. The rows it held of an unfinished rollout or "
            "carried groups are left behind, all else is resumed."
        )
    elif differs:
        any_rows = any(one["has_rows"] for one in found)
        warning = describe_mismatch(str(folder), differs, any_rows, f"The {resumed}")
        if warning is not None:
            say(warning)


def _holds_optimizer(folder: Path) -> bool:
    """
    Return whether transformers can continue with the optimizer and the schedule of a checkpoint. Otherwise it silently
    restarts them.
    """
    names = {path.name for path in folder.iterdir()}
    is_deepspeeds = any(name.startswith("global_step") for name in names)
    return is_deepspeeds or (any("optimizer" in name for name in names) and SCHEDULER_NAME in names)


def _read_shared(folder: Path, sampler: Sampler | None) -> tuple[dict | None, str | None]:
    """Return what all ranks share, or `None` and a sentence that says why it cannot be read."""
    path = folder / STATE_NAME
    if not path.exists():
        return None, f"it was not written by DAPOTrainer: it has no {STATE_NAME}"
    try:
        shared = json.loads(path.read_text())
        own = {} if sampler is None or not shared else sampler.state_dict()
        is_ours = isinstance(shared, dict) and own.keys() <= shared.keys()
        if not is_ours or (own and own["totals"].keys() != shared["totals"].keys()):
            return None, f"its {STATE_NAME} is not what this version of trl_dapo writes"
        memory, name = shared.get("policies", {}), PromptMemory.__name__
        if name in own.get("policies", {}) and name in memory:
            memory[name]["records"] = PromptMemory.read(folder / MEMORY_NAME)
    except (ValueError, KeyError, OSError, RecursionError) as error:
        return None, f"it cannot be read ({type(error).__name__}: {error})"
    return shared, None


def _read_local(path: Path) -> tuple[dict | None, str | None]:
    """Return this rank's part, or `None` and a sentence that says why it cannot be read."""
    if not path.exists():
        return None, f"it has no {path.name}: it was written by fewer processes, or not to its end"
    try:
        local = torch.load(path, map_location="cpu", weights_only=True)
    except (ValueError, KeyError, RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
        return None, f"its {path.name} cannot be read ({type(error).__name__}: {error})"
    if not isinstance(local, dict) or not LOCAL_KEYS <= local.keys():
        return None, f"its {path.name} is not what this version of trl_dapo writes"
    return local, None


def last_complete_checkpoint(output_dir: str | os.PathLike, up_to: float = math.inf) -> Path | None:
    """The last checkpoint, `up_to` a step, that was written to its end, where `trainer_state.json` is written."""
    states: dict[int, Path] = {}  # by the step
    for path in Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*/{WHOLE_NAME}"):
        number = path.parent.name.rsplit("-")[-1]
        if number.isdigit() and int(number) <= up_to:
            states[int(number)] = path
    for step in sorted(states, reverse=True):
        with suppress(ValueError, RecursionError):
            json.loads(states[step].read_text())
            return states[step].parent
    return None


def says_how_to_go_on(error: Exception) -> bool:
    """Whether an error says it itself: that of a lost server, or that there is no checkpoint to resume from."""
    return any(words in str(error) for words in ("resume from ", "holds no checkpoint", "find a valid checkpoint"))


def describe_failure(output_dir: str, step: int) -> str:
    """Return a sentence that says in which step a run failed, and how to continue it."""
    failed, folder = f"The run stopped in step {step + 1}.", Path(output_dir)
    checkpoint = last_complete_checkpoint(folder, step)
    if checkpoint is None:
        return (
            f"{failed} It has saved no checkpoint in {folder}, so it starts again from the beginning. `save_steps` "
            "sets how often one is saved."
        )
    return (
        f"{failed} Its last complete checkpoint is {checkpoint}: `trainer.train(resume_from_checkpoint=True)`, or "
        "`--resume_from_checkpoint true` on a command line, continues from there."
    )


def output_folder(args: TrainingArguments) -> str:
    """The folder of a run, to which transformers gives a name where nobody did."""
    assert args.output_dir is not None
    return args.output_dir


def find_checkpoint(output_dir: str) -> str | None:
    """
    Return the checkpoint that `resume_from_checkpoint=True` stands for, or `None` if there is none yet, so that one
    command serves every run.
    """
    checkpoint = last_complete_checkpoint(output_dir)
    if checkpoint is None:
        logger.warning(f"{output_dir} holds no complete checkpoint: the run starts from the beginning.")
        return None
    return str(checkpoint)


def warn_of_earlier_run(args: TrainingArguments) -> None:
    """
    Return a warning about a checkpoint of an earlier run in the folder where this one begins, and what will happen to
    it.
    """
    checkpoint = last_complete_checkpoint(output_folder(args))
    if checkpoint is not None and rank_and_world_size()[0] == 0:
        limit = args.save_total_limit
        deletes = f"deletes checkpoints of the earlier run as it saves its own (`save_total_limit={limit}`) and "
        logger.warning(
            f"{checkpoint} is of an earlier run, and this one starts from the beginning. It "
            f"{deletes if limit else ''}overwrites its model. Name another `output_dir`, or continue with "
            "`resume_from_checkpoint=True`: from the checkpoint with the highest step, whichever run's it is."
        )

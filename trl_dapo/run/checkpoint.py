# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Files that [`DAPOTrainer`] adds to transformers' checkpoints, and the search for complete checkpoints."""

import json
import math
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate.utils import gather_object
from transformers import TrainingArguments
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME
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
# Keys of the part of a process: those that a trainer passes to `save_state`, and those that `save_state` adds.
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
OWN_PREFIX = "dapo_"  # with which the names of the files of this package begin
# Beginnings of the names of files and folders that `save_only_model=True` leaves out, also with FSDP and DeepSpeed.
NOT_OF_MODEL = (OWN_PREFIX, "optimizer", SCHEDULER_NAME, "scaler", "rng_state", "global_step", "pytorch_model_fsdp")
TRAINER_STATE_NAME = "trainer_state.json"  # transformers writes this file last
# Settings that the rows in a checkpoint depend on: how they are sampled, which groups are accepted, and with which
# rewards and advantages they are trained on.
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
    """
    Return the settings that the rows of a checkpoint depend on, together with `others`.

    The result can be written as JSON. A function is represented by its name.
    """
    unused: tuple[str, ...] = ()  # prefixes of settings that have no effect
    if not args.use_vllm:
        unused += ("vllm_",)
    if not args.use_dynamic_sampling:
        unused += ("dynamic_sampling_",)
    settings = {name: getattr(args, name) for name in RESUME_FINGERPRINT if not name.startswith(unused)}
    return without_secrets(json.loads(json.dumps(settings | others, default=_qualified_name)))


def _qualified_name(value: Any) -> str:
    """
    Return the name of a function or class, or of an object's class.

    The `repr` of an object may contain its address, which would differ in the next run.
    """
    named = getattr(value, "func", value)  # the function of a `functools.partial`
    return getattr(named, "__qualname__", type(named).__qualname__)


def save_state(folder: Path, args: TrainingArguments, sampler: Sampler | None, local: dict[str, Any]) -> None:
    """
    Write what a trainer needs to continue as if it had not stopped.

    `local` is the part of this process. Every process must call this function.
    """
    rank, num_ranks = rank_and_world_size()
    torch.save({**local, "num_processes": num_ranks}, folder / RANK_NAME.format(rank))
    if args.should_save:
        (folder / STATE_NAME).write_text(json.dumps({} if sampler is None else sampler.state_dict(), indent=2) + "\n")
        memory = None if sampler is None else sampler.selection.find(PromptMemory)
        if memory is not None:
            with replacing(folder / MEMORY_NAME) as temporary:
                memory.save(temporary)


def delete_all_but_model(folder: Path) -> None:
    """
    Delete the state of an earlier run from the folder of a checkpoint that will contain a model alone.

    Otherwise, a run that resumes from it would combine the new weights with the earlier optimizer and rows.
    """
    for path in folder.iterdir():
        if path.name.startswith(NOT_OF_MODEL):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)  # with a shared file system, another node may have been faster


_TO_RESUME_EVERYTHING = (
    "To resume everything, put the file back, or name an earlier checkpoint in `resume_from_checkpoint`."
)


def load_state(
    folder: Path,
    sampler: Sampler | None,
    mismatches: Callable[[dict], dict[str, tuple]],  # returns the settings that do not fit the rows, by name
    # Receives the part of this process, whether its rows can be used, and the settings that a warning names anyway.
    restore: Callable[[dict, bool, Collection[str]], None],
    ignore_data_skip: bool,
) -> None:
    """
    Restore what [`save_state`] has written.

    If one process cannot read a part, no process uses it. Every process must call this function.
    """
    rank, num_processes = rank_and_world_size()
    warn = logger.warning if rank == 0 else logger.debug  # all processes have the same warnings
    shared, problem = _read_shared(folder, sampler)
    local, lost = _read_local(folder / RANK_NAME.format(rank))
    has_rows = local is not None and (
        local["update"]["rollout"] is not None
        or bool(local["update"]["sampled"])
        or bool(local["queue"] and local["queue"]["groups"])
    )
    lacking = missing_optimizer_files(folder)
    resumed = "weights are resumed" if lacking else "weights and the optimizer are resumed"
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
    is_model_alone = bool(lacking) and not (folder / STATE_NAME).exists()
    if lacking:
        warn(_describe_missing_optimizer(folder, lacking, is_model_alone))
    if is_model_alone:
        return
    if shared is None or problems:
        warn(
            f"{folder} can be resumed only in part: {problems[0]}. The {resumed}, and the pass over the prompts and "
            f"the counts of the summary start from the beginning. {_TO_RESUME_EVERYTHING}"
        )
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
            warn(
                f"{folder} contains the first completions of {num_lost} groups whose examples are not in the dataset "
                "any more. These completions are not used."
            )
    warning = None
    if differs:
        any_rows = any(one["has_rows"] for one in found)
        warning = describe_mismatch(str(folder), differs, any_rows, f"The {resumed}")
    elif all_lost:
        warning = (
            f"{folder} can be resumed only in part: {all_lost[0]}. Its completions of an unfinished rollout and of "
            f"carried groups are not used. Everything else is resumed. {_TO_RESUME_EVERYTHING}"
        )
    if local is not None:
        restore(local, not differs, differs if warning is not None else ())
    if warning is not None:
        warn(warning)


def missing_optimizer_files(folder: Path) -> list[str]:
    """
    Return the files of the optimizer and of the schedule that a checkpoint lacks.

    If one of them is missing, transformers silently starts both from the beginning.
    """
    names = {path.name for path in folder.iterdir()}
    if any(name.startswith("global_step") for name in names):  # DeepSpeed keeps both in folders of this name
        return []
    has_optimizer = any("optimizer" in name for name in names)
    return ([] if has_optimizer else [OPTIMIZER_NAME]) + ([] if SCHEDULER_NAME in names else [SCHEDULER_NAME])


def _describe_missing_optimizer(folder: Path, lacking: list[str], is_model_alone: bool) -> str:
    """Return what is not resumed from a checkpoint that lacks these files, why they are missing, and what to do."""
    files = " and ".join(f"`{name}`" for name in lacking)
    # With `save_only_model=True`, transformers saves neither of these files nor the state of the random numbers, and
    # this package saves nothing of its own.
    was_saved_whole = any(path.name.startswith(NOT_OF_MODEL) for path in folder.iterdir())
    it, is_ = ("them", "are") if len(lacking) > 1 else ("it", "is")
    if was_saved_whole:
        why = f"{files} {is_} missing in {folder}, which was not saved with `save_only_model=True`."
        advice = f"Put {it} back, or resume from another checkpoint, to resume everything."
    else:
        why = f"{files} {is_} missing in {folder}. It was saved with `save_only_model=True`, or they were deleted."
        advice = "Save checkpoints with `save_only_model=False` to resume everything."
    return (
        f"{why} The weights and the number of the step are resumed, but the optimizer and the learning-rate schedule "
        f"start from the beginning{', and so does the pass over the prompts' if is_model_alone else ''}. {advice}"
    )


def _read_shared(folder: Path, sampler: Sampler | None) -> tuple[dict | None, str | None]:
    """Return the part that all processes share, or `None` and why it cannot be read."""
    path = folder / STATE_NAME
    if not path.exists():
        return None, f"it was not written by DAPOTrainer: it has no {STATE_NAME}"
    reading = STATE_NAME
    try:
        shared = json.loads(path.read_text())
        own = {} if sampler is None or not shared else sampler.state_dict()
        is_ours = isinstance(shared, dict) and own.keys() <= shared.keys()
        if not is_ours or (own and own["totals"].keys() != shared["totals"].keys()):
            return None, f"its {STATE_NAME} was written by another version of trl_dapo"
        memory, name = shared.get("policies", {}), PromptMemory.__name__
        if name in own.get("policies", {}) and name in memory:
            reading = MEMORY_NAME
            memory[name]["records"] = PromptMemory.read(folder / MEMORY_NAME)
    except (ValueError, OSError, RecursionError) as error:
        return None, _describe_unreadable(reading, error)
    except KeyError:
        return None, f"its {reading} was written by another version of trl_dapo"
    return shared, None


def _describe_unreadable(file_name: str, error: Exception) -> str:
    """Return which file of a checkpoint cannot be read. The text of the error is left out: it names internals."""
    if isinstance(error, FileNotFoundError):
        return f"it has no {file_name}"
    return f"its {file_name} is damaged and cannot be read ({type(error).__name__})"


def _read_local(path: Path) -> tuple[dict | None, str | None]:
    """Return the part of this process, or `None` and why it cannot be read."""
    if not path.exists():
        return None, f"it has no {path.name}, because it was written by fewer processes or is incomplete"
    try:
        local = torch.load(path, map_location="cpu", weights_only=True)
    except (ValueError, KeyError, RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
        return None, _describe_unreadable(path.name, error)
    if not isinstance(local, dict) or not LOCAL_KEYS <= local.keys():
        return None, f"its {path.name} was written by another version of trl_dapo"
    return local, None


def why_incomplete(checkpoint: Path) -> str | None:
    """
    Return why a run cannot continue from a checkpoint, or `None` if the checkpoint is complete.

    `trainer_state.json` is written last. If it is there, a run that was killed has written all other files, too. The
    other files are not read as a whole: only their beginning and their end, which shows whether they are cut off.
    """
    state = checkpoint / TRAINER_STATE_NAME
    if not state.is_file():
        return f"it has no `{TRAINER_STATE_NAME}`, which is written last"
    try:
        json.loads(state.read_text())
    except (ValueError, RecursionError):
        return f"its `{TRAINER_STATE_NAME}` is damaged"
    for path in sorted(checkpoint.iterdir()):
        if path.name.startswith(OWN_PREFIX):
            continue  # without a file of this package, the rest of a checkpoint can still be resumed
        is_whole = IS_WHOLE.get(path.suffix)
        if is_whole is not None and not is_whole(path):
            return f"its `{path.name}` is damaged: the end of the file is missing"
    return None


def _is_whole_safetensors(path: Path) -> bool:
    """Return whether a file of safetensors is as long as its header says."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header_size = int.from_bytes(file.read(8), "little")
        if 8 + header_size > size:
            return False
        try:
            header = json.loads(file.read(header_size))
        except (ValueError, RecursionError):
            return False
    ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
    return size >= 8 + header_size + max(ends, default=0)


def _is_whole_torch_file(path: Path) -> bool:
    """Return whether a file of torch has an end. torch writes zip files, whose table of contents is at the end."""
    with path.open("rb") as file:
        beginning = file.read(2)
    return zipfile.is_zipfile(path) if beginning == b"PK" else beginning != b""


# How to check the files of a checkpoint for their end, by suffix.
IS_WHOLE: dict[str, Callable[[Path], bool]] = {
    ".safetensors": _is_whole_safetensors,
    **dict.fromkeys((".pt", ".pth", ".bin"), _is_whole_torch_file),
}


class FoundCheckpoints(NamedTuple):
    """The last complete checkpoint of a run, and newer ones that are not complete."""

    complete: Path | None
    incomplete: dict[Path, str]  # the newest first, with the reason

    def describe_incomplete(self) -> str:
        """Return a sentence for each incomplete checkpoint, with a space at the end, or an empty string."""
        return "".join(f"{path} is not complete: {why}. " for path, why in self.incomplete.items())


def search_checkpoints(output_dir: str | os.PathLike, up_to: float = math.inf) -> FoundCheckpoints:
    """Return the last complete checkpoint up to a step, and newer ones up to that step that are not complete."""
    folders: dict[int, Path] = {}  # by step
    for path in Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*/"):
        number = path.name.rsplit("-")[-1]
        if number.isdigit() and int(number) <= up_to:
            folders[int(number)] = path
    incomplete: dict[Path, str] = {}
    for step in sorted(folders, reverse=True):
        why = why_incomplete(folders[step])
        if why is None:
            return FoundCheckpoints(folders[step], incomplete)
        incomplete[folders[step]] = why
    return FoundCheckpoints(None, incomplete)


def last_complete_checkpoint(output_dir: str | os.PathLike, up_to: float = math.inf) -> Path | None:
    """Return the last complete checkpoint, up to a step, or `None`. See [`why_incomplete`]."""
    return search_checkpoints(output_dir, up_to).complete


def says_how_to_continue(error: Exception) -> bool:
    """
    Return whether the message of an error already says how to continue the run.

    That is so if a server was lost, or if there is no checkpoint to resume from.
    """
    return any(words in str(error) for words in ("resume from ", "holds no checkpoint", "find a valid checkpoint"))


def describe_failure(output_dir: str, step: int, saves_every_step: bool = False) -> str:
    """Return after which step a run failed, and how to continue it."""
    failed = f"The run stopped after step {step}." if step else "The run stopped before step 1 was complete."
    folder = Path(output_dir)
    in_python, in_a_shell = "`trainer.train(resume_from_checkpoint=True)`", "`--resume_from_checkpoint true`"
    how = f"with {in_python}, or with {in_a_shell} on the command line."
    if step == 0:
        # Either this run had just begun, or a checkpoint could not be loaded. Its own checkpoints begin with step 1.
        found = search_checkpoints(folder)
        if found.complete is None:
            start = f"{failed} {found.describe_incomplete()}"
            return f"{start}{folder} contains no complete checkpoint, so the run has to start from the beginning."
        return (
            f"{failed} {found.describe_incomplete()}{found.complete} is complete. If it is from this run, continue "
            f"from there {how}"
        )
    found = search_checkpoints(folder, step)
    failed = f"{failed} {found.describe_incomplete()}"
    if found.complete is None:
        advice = " To save checkpoints more often, set `save_strategy='steps'` and a smaller `save_steps`."
        return (
            f"{failed}There is no complete checkpoint of this run in {folder}, so it has to start from the beginning."
            f"{'' if saves_every_step else advice}"
        )
    return f"{failed}The last complete checkpoint is {found.complete}. Continue from there {how}"


def output_folder(args: TrainingArguments) -> str:
    """Return the output folder of a run. transformers sets a default if the user did not name one."""
    assert args.output_dir is not None
    return args.output_dir


def find_checkpoint(output_dir: str) -> str | None:
    """
    Return the checkpoint that `resume_from_checkpoint=True` means, or `None` if there is none yet.

    So the same command can start a run and continue it.
    """
    found = search_checkpoints(output_dir)
    warn = logger.warning if rank_and_world_size()[0] == 0 else logger.debug  # all processes find the same
    skipped = found.describe_incomplete()
    if found.complete is None:
        warn(f"{skipped}{output_dir} contains no complete checkpoint, so the run starts from the beginning.")
        return None
    if skipped:
        warn(f"{skipped}The run continues from {found.complete} instead.")
    return str(found.complete)


def warn_of_earlier_run(args: TrainingArguments) -> None:
    """Warn if the output folder contains a checkpoint of an earlier run, and say what will happen to it."""
    checkpoint = last_complete_checkpoint(output_folder(args))
    if checkpoint is not None and rank_and_world_size()[0] == 0:
        limit = args.save_total_limit
        deletes = f"delete checkpoints of the earlier run when it saves its own (`save_total_limit={limit}`) and "
        logger.warning(
            f"{checkpoint} is from an earlier run, but this run starts from the beginning. It will "
            f"{deletes if limit else ''}overwrite the earlier model. Set another `output_dir`, delete the checkpoints "
            "of the earlier run, or continue that run with `resume_from_checkpoint=True`. If checkpoints of both runs "
            "are in this folder, `True` takes the one with the highest step, so name the checkpoint to continue from."
        )

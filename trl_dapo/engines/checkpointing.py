# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of the trainer: what they contain in addition to the files of transformers, and how a run continues.

`run/checkpoint.py` reads and writes the files. This file defines which parts of the trainer's state they contain.
"""

import json
import sys
from collections.abc import Callable, Collection
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import send_to_device
from datasets import IterableDataset
from safetensors import safe_open
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PreTrainedModel
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, logging

from ..rewards.task_reward import TaskReward
from ..run.checkpoint import (
    TRAINER_STATE_NAME,
    delete_all_but_model,
    fingerprint,
    load_state,
    missing_optimizer_files,
    save_state,
)
from ..run.early_stop import StopCallback
from ..run.log import describe_changes, settings_to_compare
from ..run.stopwatch import Stopwatch
from ..run.terminal import wrapped_for
from ..sampling.sampler import Sampler
from ..update.patching import patched
from ..update.phase import SampledRollout, StepStart
from ..update.typed_trainer import TypedGRPOTrainer
from .ahead import GroupsAhead


logger = logging.get_logger(__name__)


class CheckpointMixin(TypedGRPOTrainer):
    """Saves and loads what a run needs to continue, in addition to the files of transformers."""

    # Defined by other parts of the trainer.
    _ahead: GroupsAhead
    _choose_task: Callable[[], None]
    _entropy_state: tuple[float, float] | None
    _generate_every: int
    _group_filter: Any
    _random_state_before: list[Tensor] | None
    _sampled_before: dict[int, SampledRollout]
    _task: TaskReward
    _unfinished_step: StepStart | None
    _weights_of_task: list[float] | None
    stop: StopCallback
    stopwatch: Stopwatch

    _sampler: Sampler | None = None
    _fingerprint: dict[str, Any] | None = None  # the settings that determined the rows of the last rollout

    def _sample_parts(self, batch: list[dict[str, Any]]) -> list[dict]:
        parts: list[dict] = super()._sample_parts(batch)  # type: ignore[misc]  # in `UpdatePhaseMixin`
        self._fingerprint = self._current_fingerprint()  # now, since a callback may change reward weights later
        return parts

    def _current_fingerprint(self) -> dict[str, Any]:
        """Return the present settings that determine how rows are sampled and which of them train."""
        weights = [round(weight, 6) for weight in self.reward_weights.tolist()]  # removes the rounding of float32
        others: dict[str, Any] = {"reward_funcs": self.reward_func_names, "reward_weights": weights}
        others |= {"dynamic_sampling_rewards": self._task.names, "prompts_per_rollout": self.args.groups_per_rollout}
        return fingerprint(self.args, others | {"group_filter": self._group_filter})

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        folder = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        with self.stopwatch.timing("checkpoint"):
            local = None if self.args.save_only_model else self._local_state()
            folder.mkdir(parents=True, exist_ok=True)
            if self.args.should_save:
                # The folder may contain a checkpoint already: of an earlier run, or of this one, because
                # `enable_jit_checkpoint` saves in the middle of step N + 1 to `checkpoint-N`. The file that marks a
                # checkpoint as complete is deleted before the others are overwritten.
                (folder / TRAINER_STATE_NAME).unlink(missing_ok=True)
                if local is None:
                    delete_all_but_model(folder)
            self.accelerator.wait_for_everyone()
            if local is not None:
                save_state(folder, self.args, self._sampler, local)
            super()._save_checkpoint(model, trial)

    def update_phase_state_dict(self) -> dict:
        """
        Return what the update phase of this process needs to continue. It can be loaded with `weights_only=True`.
        """
        step, rollout = self._step, self._buffered_inputs
        sampled, random_state = self._sampled_before, self._random_state_before
        if (start := self._unfinished_step) is not None:
            step, rollout = start.micro_step, start.rollout
            sampled, random_state = start.sampled, start.random_state
        phase = step % self._generate_every
        return {
            "step": step if phase else 0,
            "generate_every": self._generate_every,
            "accumulation": int(self.args.gradient_accumulation_steps),  # it may be a `ComputedSize`
            "rollout": rollout if phase else None,
            # Plain tuples, since a `SampledRollout` could not be loaded with `weights_only=True`.
            "sampled": {i: tuple(one) for i, one in sampled.items()},
            "random_state": random_state,
        }

    def load_update_phase_state_dict(self, state: dict) -> None:
        """Continue from a state of [`CheckpointMixin.update_phase_state_dict`], whose rows must fit the run."""
        self._step = state["step"]
        self._buffered_inputs = send_to_device(state["rollout"], self.accelerator.device)
        sampled = send_to_device(state["sampled"], self.accelerator.device)
        self._sampled_before = {i: SampledRollout(*rollout) for i, rollout in sampled.items()}
        self._random_state_before = state["random_state"]

    def _local_state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of this process."""
        metrics, entropy = dict(self._metrics["train"]), self._entropy_state
        if (start := self._unfinished_step) is not None:
            metrics, entropy = start.metrics, start.entropy
        return {
            "settings": settings_to_compare(self.args),
            "fingerprint": self._fingerprint or self._current_fingerprint(),
            "update": self.update_phase_state_dict(),
            "metrics": metrics,
            # TRL saves these in a file of its own, but only after the file that marks a checkpoint as complete.
            "entropy": entropy,
            "queue": None if self._sampler is None else self._sampler.queue.state_dict(),
            "ahead": self._ahead.state_dict(),
            "reward_values": sorted(self._task.values),
        }

    def _mismatches(self, local: dict[str, Any]) -> dict[str, tuple]:
        """
        Return the settings for which the rows of this process do not fit the run, each with the value of the
        checkpoint and that of the run.
        """
        theirs, own = dict(local["fingerprint"]), self._current_fingerprint()
        if local["update"]["rollout"] is not None or local["update"]["sampled"]:
            sizes = self._settings_of_rollout(local["update"])
            theirs |= sizes
            own |= {name: getattr(self.args, name) for name in sizes}
        return {name: (theirs[name], own[name]) for name in theirs if name in own and theirs[name] != own[name]}

    def _settings_of_rollout(self, update: dict[str, Any]) -> dict[str, Any]:
        """
        Return settings that the rows of a checkpoint's rollout depend on, by their number, their tensors and the steps
        that train on them, each with its value then. The rows are only used if these settings are equal.
        """
        generate_every = update["generate_every"]
        rollout = update["rollout"] or next(iter(update["sampled"].values()))[0]
        sizes: dict[str, Any] = {
            "per_device_train_batch_size": len(rollout[0]["completion_ids"]),
            "num_iterations": generate_every // len(rollout),
            "steps_per_generation": len(rollout),
        }
        if "ref_per_token_logps" not in rollout[0]:
            sizes["beta"] = 0.0
        step_in_rollout = update["step"] % generate_every
        if step_in_rollout % self.args.gradient_accumulation_steps or update["sampled"]:
            # Within a rollout: with another value, no optimizer step would end together with it, and the limits of the
            # run are checked where one does. Within a step: the value decided whether the rollouts that were sampled
            # for the step have old log-probabilities.
            sizes["gradient_accumulation_steps"] = update["accumulation"]
        corrects = self.use_vllm and self.vllm_importance_sampling_correction
        if corrects and self.loss_type != "dapo" and "importance_sampling_ratio" not in rollout[0]:
            sizes["loss_type"] = "dapo"  # which computes the ratios itself
        return sizes

    def _load_local(
        self, checkpoint: str, local: dict[str, Any], rows_fit: bool, named_elsewhere: Collection[str]
    ) -> None:
        line = describe_changes(
            checkpoint,
            local["settings"],
            settings_to_compare(self.args),
            named_elsewhere,
            restores_optimizer=not missing_optimizer_files(Path(checkpoint)),
        )
        if line is not None:
            self.accelerator.print(wrapped_for(sys.stdout, line))
        if self.use_adaptive_entropy and local["entropy"] is not None:
            self.entropy_coef, self._last_world_entropy = local["entropy"]
        self._metrics["train"].update(local["metrics"])
        decides = ("reward_funcs", "reward_weights", "dynamic_sampling_rewards")
        theirs, own = local["fingerprint"], self._current_fingerprint()
        if all(theirs.get(name) == own[name] for name in decides):  # otherwise the values are of other rewards
            self._task = self._task.with_values(local["reward_values"])
        if rows_fit:
            if self._sampler is not None and not self.args.ignore_data_skip:
                requests = self._sampler.queue.requests_in_flight
                self._sampler.unanswered = self._ahead.load_state_dict(local["ahead"], requests)
            self.load_update_phase_state_dict(local["update"])

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        # The main process writes `trainer_state.json` next. It must not do so before the files of all processes exist.
        self.accelerator.wait_for_everyone()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        dtypes = {name: parameter.dtype for name, parameter in self.model.named_parameters()}
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        adapters = getattr(self.model, "peft_config", ())
        if (
            len(adapters) > 1 and "default" in adapters and not self.is_fsdp_enabled
        ):  # transformers before 5.23 does not load it
            self.model.load_adapter(resume_from_checkpoint, "default", is_trainable=True)
        self._load_renamed_weights(resume_from_checkpoint)
        # TRL keeps the adapter of a quantized model in bfloat16, but PEFT loads it in float32.
        for name, parameter in self.model.named_parameters():
            if parameter.dtype != dtypes.get(name, parameter.dtype):
                parameter.data = parameter.data.to(dtypes[name])

    def _load_renamed_weights(self, checkpoint: str) -> None:
        """
        Load weights that the checkpoint has under other names than the model, such as those of experts.

        transformers renames them when it saves a model, but not when it resumes a run: it keeps the initial weights
        instead (huggingface/transformers#48805).
        """
        model = self.accelerator.unwrap_model(self.model)
        if self.is_fsdp_enabled or self.is_deepspeed_enabled or not isinstance(model, PreTrainedModel):
            return
        names = _names_of_weights(Path(checkpoint))
        if not hasattr(model, "peft_config") and names - model.state_dict().keys():
            loaded = type(model).from_pretrained(checkpoint, dtype="auto")
            model.load_state_dict(loaded.state_dict())
            if self.accelerator.is_main_process:
                logger.warning(
                    f"All weights of {checkpoint} are loaded. Keys that transformers calls missing above have other "
                    "names there (huggingface/transformers#48805)."
                )

    def _load_best_model(self) -> None:
        super()._load_best_model()
        assert self.state.best_model_checkpoint is not None  # otherwise transformers would not load it
        self._load_renamed_weights(self.state.best_model_checkpoint)
        self._last_loaded_step = -1  # vLLM still has the weights of the last step

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self._forget_earlier_run(Path(checkpoint))
            restore = partial(self._load_local, checkpoint)
            self._fingerprint = self._current_fingerprint()
            load_state(Path(checkpoint), self._sampler, self._mismatches, restore, self.args.ignore_data_skip)

    def _forget_earlier_run(self, checkpoint: Path) -> None:
        """
        Forget the unfinished work of an earlier run in this process. It is not part of the run that is resumed.

        What was learned about prompts stays, unless the checkpoint replaces it. See [`Sampler.start_over`].
        """
        self._step, self._buffered_inputs = 0, None
        self._sampled_before, self._random_state_before = {}, None
        self._metrics["train"].clear()
        for values in self._logs.values():
            values.clear()
        self._weights_of_task = None  # the rewards that decide are chosen anew, without the values seen so far
        self._choose_task()
        if self._sampler is not None:
            self._sampler.start_over()
        if missing_optimizer_files(checkpoint) and not self.is_deepspeed_enabled:
            optimizer: Any = self.optimizer
            getattr(optimizer, "optimizer", optimizer).state.clear()  # accelerate wraps it

    def get_train_dataloader(self) -> DataLoader:
        if self._sampler is None or not isinstance(self.train_dataset, IterableDataset):
            return super().get_train_dataloader()
        # The sampler reads the dataset. TRL's data loader only paces the training loop, so it gets a dataset of empty
        # prompts. With the real one, every example would be read twice, and a resumed run would skip the
        # examples of the batches that the training loop has taken, not those that the sampler has used.
        empty_prompts = IterableDataset.from_generator(repeat, gen_kwargs={"object": {"prompt": ""}})
        with patched(self, train_dataset=empty_prompts):
            return super().get_train_dataloader()

    def get_batch_samples(self, *args: Any) -> tuple[list, Tensor | int | None]:
        if self.state.global_step < self.state.max_steps and not self.stop.is_used_up:
            return super().get_batch_samples(*args)
        # The run was resumed at its end. Without this, transformers would take one more step.
        self.control.should_training_stop = True
        return [], None


def _names_of_weights(checkpoint: Path) -> set[str]:
    """Return the names of the weights in a checkpoint's files of safetensors, or nothing if it has none."""
    index, file = checkpoint / SAFE_WEIGHTS_INDEX_NAME, checkpoint / SAFE_WEIGHTS_NAME
    if index.is_file():
        return set(json.loads(index.read_text())["weight_map"])
    if not file.is_file():
        return set()
    with safe_open(file, framework="pt") as weights:
        return set(weights.keys())

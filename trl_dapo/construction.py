# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""What a trainer makes of its settings when it is constructed, and what it refuses."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import torch
from datasets import Dataset, IterableDataset
from peft import PeftModel
from transformers import PreTrainedModel
from trl.trainer.utils import get_config_model_id

from .config import DAPOConfig
from .rewards import SoftOverlongPunishment
from .rewards.checks import check_prompt_column, check_reward_columns
from .rewards.task import TaskReward
from .run.ledger import Ledger
from .sampling.memory import PromptMemory
from .sampling.prompts import PromptStream
from .sampling.sampler import Sampler


if TYPE_CHECKING:
    from .trainer import DAPOTrainer


ROUNDS_OF_A_ROLLOUT = 10  # as many as `dynamic_sampling_max_rounds` allows by default


def settings_of(args: object, model: str | PreTrainedModel | PeftModel) -> DAPOConfig:
    """The settings that were given, or the defaults with a folder of the model's name."""
    if args is None:
        model_id = model if isinstance(model, str) else get_config_model_id(model.config)
        return DAPOConfig(f"{model_id.split('/')[-1]}-DAPO")
    if not isinstance(args, DAPOConfig):
        given, fix = f"{type(args).__name__}(...)", "DAPOConfig(...)"
        if isinstance(args, dict):
            given, fix = "{...}", "DAPOConfig(**{...})"
        raise TypeError(
            f"`args` must be a `DAPOConfig`, got `{type(args).__name__}`. Replace `{given}` by `{fix}` (`from "
            "trl_dapo import DAPOConfig`); every field of `GRPOConfig` is accepted."
        )
    return args


def check_rewards_and_data(trainer: "DAPOTrainer") -> None:
    """Refuses data and reward functions that would fail only once completions have been sampled for them."""
    eval_datasets = trainer.eval_dataset
    if not isinstance(eval_datasets, dict):
        eval_datasets = {} if eval_datasets is None else {"": eval_datasets}
    datasets = {"train_dataset": trainer.train_dataset}
    datasets |= {f"eval_dataset['{name}']" if name else "eval_dataset": data for name, data in eval_datasets.items()}
    for name, dataset in datasets.items():
        columns = _known_columns(dataset)
        if trainer.environment_factories is None:  # an environment may bring its own prompts
            check_prompt_column(columns, name)
            if isinstance(dataset, Dataset) and columns is not None:
                _check_prompts(dataset, name, may_be_empty=bool(trainer._tokenizer("")["input_ids"]))
        if columns is not None and trainer.args.remove_unused_columns:
            columns = [column for column in columns if column in kept_columns(trainer)]
        if trainer.rollout_func is None:  # which may add columns
            check_reward_columns(
                trainer.reward_funcs,
                trainer.reward_func_names,
                columns,
                dataset=name,
                has_environments=trainer.environment_factories is not None,
            )


def _check_prompts(dataset: Dataset, name: str, may_be_empty: bool) -> None:
    """Refuses a row without a prompt: neither tokenizers nor models say which it was."""
    place = 0
    for batch in dataset.select_columns("prompt").with_format("arrow").iter(10_000):
        prompts = batch["prompt"].combine_chunks()
        is_bad = prompts.is_null()
        if pa.types.is_list(prompts.type):
            is_bad = pc.or_kleene(is_bad, pc.equal(pc.list_value_length(prompts), 0))
        elif pa.types.is_string(prompts.type) and not may_be_empty:
            is_bad = pc.or_kleene(is_bad, pc.equal(prompts, ""))
        if (row := pc.index(is_bad, True).as_py()) >= 0:
            raise ValueError(
                f"`{name}` has no prompt in row {place + row}: it is {prompts[row].as_py()!r}. Leave such rows out, "
                "as with `dataset.filter(lambda row: row['prompt'])`."
            )
        place += len(prompts)


def kept_columns(trainer: "DAPOTrainer") -> list[str]:
    """The columns that `remove_unused_columns` leaves to reward functions."""
    trainer._set_signature_columns_if_needed()
    assert trainer._signature_columns is not None
    return trainer._signature_columns


def _known_columns(dataset: Dataset | IterableDataset | None) -> list[str] | None:
    """A dataset's columns; `None` where only its examples would tell."""
    if isinstance(dataset, Dataset) and dataset.format["type"] == "custom":  # a transform makes other columns
        return None
    return getattr(dataset, "column_names", None)


def add_overlong_punishment(trainer: "DAPOTrainer", buffer_length: int) -> None:
    """Adds the soft overlong punishment as TRL adds an environment's own reward: a further column of weight 1."""
    punishment = SoftOverlongPunishment(
        trainer.max_completion_length, buffer_length, trainer.args.overlong_penalty_factor
    )

    def soft_overlong_punishment(completion_ids: list[list[int]], **kwargs: Any) -> list[float | None]:
        # Tool and environment tokens are not the model's: `_generate` counted without them.
        return [*punishment(completion_ids=completion_ids, completion_lengths=trainer._completion_lengths)]

    trainer.reward_funcs.append(soft_overlong_punishment)
    trainer.reward_func_names.append(punishment.__name__)
    trainer.reward_processing_classes.append(None)  # type: ignore[arg-type]  # as TRL has it for a function
    trainer.reward_weights = torch.cat([trainer.reward_weights, torch.ones(1)])


def choose_task_reward(trainer: "DAPOTrainer") -> TaskReward:
    """The reward that decides, as the settings name it."""
    args = trainer.args
    task = TaskReward.choose(
        trainer.reward_func_names,
        trainer.reward_weights,
        args.dynamic_sampling_rewards,
        min_accuracy=args.dynamic_sampling_min_accuracy,
        max_accuracy=args.dynamic_sampling_max_accuracy,
        accuracy_threshold=args.dynamic_sampling_accuracy_threshold,
        best=1.0 if args.reward_scaling is None else args.reward_scaling[3],
        drops_groups=args.use_dynamic_sampling,
    )
    if args.reward_scaling is not None and task.knows_right and len(task.names) == 1:
        weight = task.weights_F[task.is_task_F].item()
        worst, best = sorted(weight * end for end in args.reward_scaling[2:])
        threshold = args.dynamic_sampling_accuracy_threshold
        if not worst <= threshold < best:
            verdict = "right" if threshold < worst else "wrong"
            raise ValueError(
                f"`dynamic_sampling_accuracy_threshold={threshold}` makes every completion {verdict}: "
                f"`reward_scaling` maps {task.names[0]!r} to a range from {worst:g} to {best:g}. Set the threshold "
                "between them."
            )
    return task


def check_group_filter(trainer: "DAPOTrainer") -> None:
    """Refuses what a user's rule would overrule, and what would leave it unasked or half informed."""
    group_filter, args, names = trainer._group_filter, trainer.args, trainer.reward_func_names
    if group_filter is None:
        return
    if not callable(group_filter):
        raise TypeError(f"`group_filter` must be a callable of a group's rewards and rows, got {group_filter!r}.")
    if not args.use_dynamic_sampling:
        raise ValueError(
            "A `group_filter` has no effect with `use_dynamic_sampling=False`. Leave it out, or set "
            "`use_dynamic_sampling=True`."
        )
    if shared := [name for name in names if names.count(name) > 1]:
        raise ValueError(
            f"A `group_filter` is given a group's rewards by name, but {names.count(shared[0])} reward functions are "
            f"called {shared[0]!r}. Give each a name of its own (`__name__`)."
        )
    for name, default in (
        ("dynamic_sampling_min_accuracy", 0.0),
        ("dynamic_sampling_max_accuracy", 1.0),
        ("dynamic_sampling_memory", False),
    ):
        if getattr(args, name) != default:
            raise ValueError(
                f"`{name}={getattr(args, name)}` has no effect beside a `group_filter`, which alone decides which "
                f"groups train. Leave it at {default}, or leave out `group_filter`."
            )


def check_rollouts_ahead(trainer: "DAPOTrainer") -> None:
    """Refuses what cannot be asked of a server in one request before its time."""
    if not trainer.args.rollouts_ahead:
        return
    for given, what in (
        (trainer.rollout_func, "a `rollout_func`, which asks the server itself"),
        (trainer.environment_factories, "environments, which are reset when their round begins"),
        (trainer.tools, "tools, which are called between two requests"),
        (trainer._is_vlm, "models with images, which a checkpoint cannot hold"),
    ):
        if given:
            raise ValueError(f"`rollouts_ahead=1` does not support {what}. Set `rollouts_ahead=0`.")


def check_continuous_batching(trainer: "DAPOTrainer") -> None:
    """Refuses what would round the weights that train: TRL converts the model itself before it generates, for good."""
    args = trainer.args
    if not (args.use_transformers_continuous_batching and (args.bf16 or args.fp16)):
        return
    if any(weight.requires_grad and weight.dtype == torch.float32 for weight in trainer.model.parameters()):
        given, dtype = ("bf16", "bfloat16") if args.bf16 else ("fp16", "float16")
        raise ValueError(
            f"`use_transformers_continuous_batching=True` with `{given}=True` rounds the float32 weights that train "
            f"to {dtype} at every rollout: small steps are lost. Set `{given}=False`, or sample with "
            "`use_vllm=True`, or without either."
        )


def make_sampler(trainer: "DAPOTrainer") -> Sampler:
    """The sampler, as the settings ask for it."""
    args, num_ranks, num_generations = trainer.args, trainer.accelerator.num_processes, trainer.num_generations
    if (num_sharing := trainer.num_ranks_sharing_a_row) > 1:
        raise ValueError(
            f"Dynamic sampling needs ranks of which each has rows of its own, but {num_sharing} ranks share a row "
            "(tensor, context or sequence parallelism). Use data parallelism (DDP, FSDP, ZeRO), or set "
            "`use_dynamic_sampling=False`."
        )
    if args.dynamic_sampling_surplus == "carry" and trainer._is_vlm:
        raise ValueError(
            "`dynamic_sampling_surplus='carry'` does not support models with images: a checkpoint cannot hold them. "
            "Set `dynamic_sampling_surplus='discard'`."
        )
    if args.dynamic_sampling_memory:
        trainer._task.require_right("`dynamic_sampling_memory=True`")
    target = args.groups_per_rollout
    # Without a scheduler, a round runs as one batch and must fit where the rollout batch fits.
    schedules = trainer.use_vllm or trainer.use_transformers_continuous_batching
    return Sampler(
        _open_prompt_stream(trainer, target),
        target=target,
        num_generations=num_generations,
        mode=args.dynamic_sampling_mode,
        min_replace_ratio=args.min_replace_ratio,
        carries=args.dynamic_sampling_surplus == "carry",
        max_rounds=args.dynamic_sampling_max_rounds,
        max_barren_rounds=ROUNDS_OF_A_ROLLOUT * args.dynamic_sampling_stop_after,
        max_round_size=args.dynamic_sampling_max_round_size or (None if schedules else target),
        # The least number of groups whose rows all ranks can share equally.
        multiple_of=num_ranks // math.gcd(num_generations, num_ranks),
        batch_multiplier=args.batch_multiplier,
        memory=PromptMemory(seed=args.seed) if args.dynamic_sampling_memory else None,
        num_ranks=num_ranks,
        reward_names=trainer.reward_func_names,
        is_ahead=bool(args.rollouts_ahead),
    )


def make_ledger(trainer: "DAPOTrainer") -> Ledger | None:
    """The ledger that follows the sampler; `None` where there is none to be written."""
    if trainer._sampler is None:
        return None
    ledger = Ledger(trainer._sampler, trainer._task, trainer.reward_func_names, trainer.args.log_groups)
    trainer.add_callback(ledger)
    return ledger


def _open_prompt_stream(trainer: "DAPOTrainer", num_prompts: int) -> PromptStream:
    dataset, args, columns = trainer.train_dataset, trainer.args, None
    if isinstance(dataset, Dataset) and len(dataset) < num_prompts:
        raise ValueError(
            f"The training dataset holds {len(dataset)} prompts, but a rollout batch takes {num_prompts} "
            f"(`generation_batch_size` {args.generation_batch_size} / `num_generations` {trainer.num_generations}). "
            "Add prompts, or lower `per_device_train_batch_size` or `steps_per_generation`."
        )
    if args.remove_unused_columns:
        columns = kept_columns(trainer)
    return PromptStream(dataset, seed=args.seed, shuffle=bool(trainer.shuffle_dataset), columns=columns)


def pace_dataset() -> IterableDataset:
    """Examples without end that say nothing, for a data loader that only counts."""
    return IterableDataset.from_generator(_pace)


def _pace() -> Iterator[dict[str, str]]:
    while True:
        yield {"prompt": ""}

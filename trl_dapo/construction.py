# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Functions that check a trainer's arguments and build its parts, before anything is generated."""

import copy
import inspect
import os
from collections.abc import Collection, Sequence
from dataclasses import fields
from itertools import islice
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import torch
import trl
from accelerate import DistributedType, PartialState
from datasets import Dataset, IterableDataset
from peft import PeftModel
from transformers import PreTrainedModel
from transformers.trainer_utils import has_length
from trl.trainer.utils import get_config_model_id

from .config import DAPOConfig
from .rewards.checks import check_prompt_column, check_reward_columns
from .rewards.task_reward import TaskReward
from .sampling.auto_switch import AutoSwitch
from .sampling.policies import SelectionPolicy
from .sampling.prompt_memory import PromptMemory
from .sampling.prompts import PromptStream
from .sampling.sampler import Sampler
from .sampling.screen import Screen
from .settings.rules import DEFAULT_MAX_GEN_BATCHES, check_rules
from .settings.sampling_defaults import PAPER, SamplingChoice, why_not_screened


# Beginnings of the names of settings for dynamic sampling.
SAMPLING_SETTINGS = "dynamic_sampling_", "batch_multiplier", "min_replace_ratio"
# Ends of those that also have an effect without dynamic sampling: they define which completions are correct, or limit
# the calls of an evaluation.
SETTINGS_WITH_OTHER_USES = "rewards", "min_accuracy", "max_accuracy", "accuracy_threshold", "max_round_size"


def check_loss_is_ours(trainer: type) -> None:
    """Raise if Unsloth has replaced TRL's trainer, since a trainer that inherits from Unsloth's computes its loss."""
    for cls in (*inspect.getmro(trainer), trl.GRPOTrainer):
        if cls.__name__.removeprefix("_").startswith("Unsloth"):
            raise ValueError(
                f"Unsloth has replaced TRL's `GRPOTrainer` with `{cls.__name__}`, which computes a loss of its own, "
                "so that DAPO's loss would never be used. Train in a process that does not import `unsloth`. There "
                "you can train a model that Unsloth saved with `save_pretrained_merged`. QLoRA works without Unsloth: "
                "see `trl-dapo recipes --show qwen3_4b_qlora_1gpu`."
            )


def settings_of(args: object, model: str | PreTrainedModel | PeftModel, trainer: type) -> DAPOConfig:
    """Return a copy of the settings, or the defaults, with an output folder that is named after the model."""
    check_loss_is_ours(trainer)
    if args is None:
        model_id = model if isinstance(model, str) else get_config_model_id(model.config)
        return DAPOConfig(f"{model_id.split('/')[-1]}-DAPO")
    if not isinstance(args, DAPOConfig):
        given, fix = f"{type(args).__name__}(...)", "DAPOConfig(...)"
        if isinstance(args, dict):
            given, fix = "{...}", "DAPOConfig(**{...})"
        raise TypeError(
            f"`args` must be a `DAPOConfig`, got `{type(args).__name__}`. Replace `{given}` with `{fix}` (`from "
            "trl_dapo import DAPOConfig`). It accepts every field of `GRPOConfig`."
        )
    # A copy, because the trainer fills in defaults, which may differ for the next trainer with the same settings.
    return copy.copy(args)


def check_adapter(model: str | PreTrainedModel | PeftModel, beta: float) -> None:
    """Raise if the model's adapter does not have the name from which TRL copies the reference model."""
    if isinstance(model, PeftModel) and beta and "default" not in model.peft_config:
        named = ", ".join(map(repr, model.peft_config))
        raise ValueError(
            f"`beta={beta}` needs a reference model, which TRL copies from the adapter named 'default', but the "
            f"adapters of this model are {named}. Leave out `adapter_name` when you create or load the adapter, pass "
            "a `peft_config` to the trainer instead, or set `beta=0.0`."
        )


def check_sharding(args: DAPOConfig) -> None:
    """Raise if accelerate ignores that the weights should be sharded, which it does on CPUs."""
    for variable, engine in (("ACCELERATE_USE_FSDP", "FSDP"), ("ACCELERATE_USE_DEEPSPEED", "DeepSpeed")):
        if os.environ.get(variable) == "true" and PartialState().distributed_type is DistributedType.MULTI_CPU:
            raise ValueError(
                f"`use_cpu={args.use_cpu}` makes accelerate ignore {engine}, so that every process would hold the "
                f"whole model. Use an accelerate config without {engine}, such as `cpu`, or set `use_cpu=False` on a "
                "machine with GPUs."
            )


def choose_sampling(args: DAPOConfig, facts: dict[str, Any], *, on_cpu: bool) -> SamplingChoice:
    """Choose how prompts are sampled, and raise if settings contradict each other."""
    no_screen = why_not_screened(args, facts["has_tools"] or facts["has_environments"], on_cpu)
    choice = SamplingChoice(args, no_screen, **facts)
    check_rules(args)
    check_rules(args, **facts)
    if args.use_dynamic_sampling:
        return choice
    for field in fields(args):
        if not field.name.startswith(SAMPLING_SETTINGS) or field.name.endswith(SETTINGS_WITH_OTHER_USES):
            continue
        value = getattr(args, field.name)
        if value not in (field.default, PAPER.get(field.name)):
            choice.idle.append(f"`{field.name}={value!r}`")
    return choice


def check_rewards_and_data(
    train_dataset: Dataset | IterableDataset,
    eval_dataset: Any,
    reward_funcs: Sequence[Any],
    reward_names: Sequence[str],
    *,
    kept_columns: Collection[str] | None,  # those that `remove_unused_columns` keeps; `None` for all
    may_be_empty: bool,  # whether an empty prompt has a token, so that it can be sampled from
    has_environments: bool,
    has_rollout_func: bool,
) -> None:
    """Raise if data or reward functions have errors that would otherwise show only after sampling completions."""
    eval_datasets = eval_dataset if isinstance(eval_dataset, dict) else {"": eval_dataset}
    datasets = {"train_dataset": train_dataset}
    datasets |= {f"eval_dataset['{name}']" if name else "eval_dataset": data for name, data in eval_datasets.items()}
    for name, dataset in datasets.items():
        if dataset is None:
            continue
        # A transform changes the columns, and only its examples would show which ones it returns.
        is_transformed = isinstance(dataset, Dataset) and dataset.format["type"] == "custom"
        columns = None if is_transformed else getattr(dataset, "column_names", None)
        if not has_environments:  # environments may provide the prompts
            check_prompt_column(columns, name)
            if isinstance(dataset, Dataset) and columns is not None:
                _check_prompts(dataset, name, may_be_empty)
        if columns is not None and kept_columns is not None:
            columns = [column for column in columns if column in kept_columns]
        if not has_rollout_func:  # a rollout function may add columns
            check_reward_columns(reward_funcs, reward_names, columns, dataset=name, has_environments=has_environments)


def _check_prompts(dataset: Dataset, name: str, may_be_empty: bool) -> None:
    """Raise if a row has no prompt. Errors of tokenizers and models would not say which row it is."""
    num_checked = 0
    for batch in dataset.select_columns("prompt").with_format("arrow").iter(10_000):
        prompts = batch["prompt"].combine_chunks()
        is_bad = prompts.is_null()
        if pa.types.is_list(prompts.type) or pa.types.is_large_list(prompts.type):
            is_bad = pc.or_kleene(is_bad, pc.equal(pc.list_value_length(prompts), 0))
        elif not may_be_empty and (pa.types.is_string(prompts.type) or pa.types.is_large_string(prompts.type)):
            is_bad = pc.or_kleene(is_bad, pc.equal(prompts, ""))
        row = pc.index(is_bad, True).as_py()
        if row >= 0:
            raise ValueError(
                f"`{name}` has no prompt in row {num_checked + row}: it is {prompts[row].as_py()!r}, from which "
                "nothing can be sampled. Remove such rows, for example with `dataset.filter(lambda row: "
                "row['prompt'])`."
            )
        num_checked += len(prompts)


def choose_task_reward(
    args: DAPOConfig, reward_names: Sequence[str], reward_weights: torch.Tensor, reward_funcs: Sequence[Any] = ()
) -> TaskReward:
    """Return the rewards that decide which groups train, with the settings that belong to them."""
    task = TaskReward.choose(
        reward_names,
        reward_weights,
        args.dynamic_sampling_rewards,
        min_accuracy=args.dynamic_sampling_min_accuracy,
        max_accuracy=args.dynamic_sampling_max_accuracy,
        accuracy_threshold=args.dynamic_sampling_accuracy_threshold,
        best=1.0 if args.reward_scaling is None else args.reward_scaling[3],
        models=[n for n, func in zip(reward_names, reward_funcs, strict=False) if isinstance(func, torch.nn.Module)],
    )
    if args.reward_scaling is not None and task.is_decided and len(task.names) == 1:
        worst, best = sorted(task.weights_F[task.is_task_F].item() * end for end in args.reward_scaling[2:])
        threshold = args.dynamic_sampling_accuracy_threshold
        if not worst <= threshold < best:
            verdict = "correct" if threshold < worst else "incorrect"
            raise ValueError(
                f"With `dynamic_sampling_accuracy_threshold={threshold}` every completion counts as {verdict}, "
                f"because `reward_scaling` maps {task.names[0]!r} to values from {worst:g} to {best:g}. Set the "
                "threshold to a value between these."
            )
    return task


def is_quantized(model: torch.nn.Module) -> bool:
    """Return whether the model's weights are quantized by bitsandbytes."""
    return any(getattr(model, f"is_loaded_in_{bits}bit", False) for bits in (4, 8))


def keep_gradients_of_quantized(model: torch.nn.Module) -> None:
    """Keep bitsandbytes from packing the weights of a model that samples on a CPU. Packed weights have no gradient."""
    for module in model.modules():
        if "support_avx512bf16_for_cpu" in vars(module):
            vars(module)["support_avx512bf16_for_cpu"] = False
            if getattr(getattr(module.weight, "quant_state", None), "packing_format_for_cpu", False):
                raise ValueError(
                    "The model has sampled on a CPU, which packed its 4-bit weights so that they have no gradient. "
                    "Load the model again."
                )


def trains_float32(model: torch.nn.Module) -> bool:
    """Return whether any weight that trains is in float32."""
    return any(weight.requires_grad and weight.dtype == torch.float32 for weight in model.parameters())


def trains_bfloat16(model: torch.nn.Module) -> bool:
    """Return whether most of the model's weights train and are in bfloat16."""
    weights = list(model.parameters())
    trained = sum(weight.numel() for weight in weights if weight.requires_grad and weight.dtype == torch.bfloat16)
    return 2 * trained > sum(weight.numel() for weight in weights)


def make_sampler(
    args: DAPOConfig,
    dataset: Dataset | IterableDataset,
    *,
    shuffle: bool,
    kept_columns: Collection[str] | None,
    schedules: bool,
    num_ranks: int,
) -> Sampler:
    """Return the sampler that the settings describe. `schedules` is whether the engine accepts rounds of any size."""
    assert args.num_generations is not None
    target, num_generations = args.groups_per_rollout, args.num_generations
    if isinstance(dataset, Dataset) and len(dataset) < target:
        lower = "`per_device_train_batch_size` or `steps_per_generation`"
        raise ValueError(
            f"The training dataset has {len(dataset)} prompts, but a rollout batch needs {target} "
            f"(`generation_batch_size` {args.generation_batch_size} / `num_generations` {num_generations}). "
            f"Add prompts, or lower {'`prompts_per_rollout`' if args.prompts_per_rollout else lower}."
        )
    policies: list[SelectionPolicy] = []
    switchable: list[SelectionPolicy] = []  # policies that are only on while few groups are accepted
    memory = None
    if args.dynamic_sampling_memory:
        memory = PromptMemory(args.seed, num_generations=num_generations)
        policies.append(memory)
        if args.dynamic_sampling_memory == "auto":
            switchable.append(memory)
    setting = args.dynamic_sampling_screen or "off"
    if setting != "off":
        screen = Screen(int(setting) if setting.isdigit() else "on", memory)
        policies.append(screen)
        if setting == "auto":
            switchable.append(screen)
    if switchable:
        # It comes first, because it needs the memory's prediction for a group before the memory learns its result.
        policies.insert(0, AutoSwitch(switchable, policies, num_generations))
    return Sampler(
        PromptStream(dataset, seed=args.seed, shuffle=shuffle, columns=kept_columns),
        target=target,
        num_generations=num_generations,
        policies=policies,
        mode=args.dynamic_sampling_mode,
        min_replace_ratio=args.min_replace_ratio,
        carries=args.dynamic_sampling_surplus == "carry",
        max_gen_batches=args.dynamic_sampling_max_gen_batches,
        max_empty_batches=DEFAULT_MAX_GEN_BATCHES * args.dynamic_sampling_stop_after,
        # An engine without a scheduler samples a round as one batch, so a round must not be larger than a rollout
        # batch.
        max_round_size=args.dynamic_sampling_max_round_size or (None if schedules else target),
        batch_multiplier=args.batch_multiplier,
        num_ranks=num_ranks,
        rollouts_ahead=args.rollouts_ahead,
    )


def first_examples(dataset: Any, columns: Collection[str] | None) -> list[dict]:
    """Return the first row with these columns, in a list that is empty if there is none."""
    if has_length(dataset) and hasattr(dataset, "__getitems__"):
        rows = dataset.__getitems__([0])  # reads the row as a data loader does
    else:
        rows = list(islice(dataset, 1))
    return [{name: x for name, x in row.items() if columns is None or name in columns} for row in rows]

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The settings that would help a plan most, each of them planned again."""

import json
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import yaml

from ..settings.rules import why_refused
from .hardware import Cluster
from .planning import Plan
from .recipe import Recipe, Sharding


LEAST_EFFECT = 0.01
MOST_STEPS = 16  # optimizer steps of a rollout, as in the paper: 512 / 32
LORA = {"use_peft": True, "lora_r": 32, "lora_target_modules": "all-linear", "learning_rate": 1e-5}
LATER = ("adapter", "gpus")  # these change what trains and what it costs: they come after what does neither
CONFIGS = {"ddp": "multi_gpu", "fsdp2": "fsdp2", "zero2": "zero2"}  # of accelerate's, by name


def suggest(planned: Plan, most: int = 3) -> list[tuple[str, Plan]]:
    """
    Changes that spare time where the recipe fits, or make it fit, the best first; of one setting's values the best.
    Time is compared for as many prompts. An adapter and more GPUs come last.

    Args:
        planned ([`Plan`]):
            As the recipe is.
        most (`int`, *optional*, defaults to `3`):
            How many at most.

    Returns:
        `list[tuple[str, Plan]]`: each change in words, and the plan with it.
    """
    best: dict[str, tuple[tuple, tuple[str, Plan]]] = {}
    for about, words, recipe in _candidates(planned):
        if why_refused(recipe.settings) or why_refused(recipe.settings, has_images=bool(planned.shape.num_other)):
            continue
        other = replace(planned, recipe=recipe)
        try:
            fits, seconds, peak = other.fits, other.seconds_a_row, other.peak
        except ValueError:
            continue  # sizes that do not divide
        if planned.fits:
            helps = fits and seconds < (1 - LEAST_EFFECT) * planned.seconds_a_row
        else:
            helps = fits or peak < (1 - LEAST_EFFECT) * planned.peak
        rank = (not fits, LATER.index(about) if about in LATER else -1, seconds if fits else peak)
        if helps and (about not in best or rank < best[about][0]):
            best[about] = rank, (words, other)
    return [found for _, found in sorted(best.values(), key=lambda ranked: ranked[0])[:most]]


def _candidates(planned: Plan) -> Iterator[tuple]:
    """What a change is about, its words, and the recipe with it."""
    recipe, settings, cluster = planned.recipe, planned.recipe.settings, planned.recipe.cluster
    together = cluster.num_train + cluster.num_serve
    in_prompts = settings.prompts_per_rollout is not None or settings.prompts_per_step is not None

    def change(
        about: str, cluster: Cluster = cluster, sharding: Sharding = recipe.sharding, **fields: Any
    ) -> tuple[str, str, Recipe]:
        fields = {name: value for name, value in fields.items() if getattr(settings, name) != value}
        words = [f"{name}: {_yaml(value)}" for name, value in fields.items()]
        words += [f"--gpus {cluster}"] if cluster is not recipe.cluster else []
        words += [f"--accelerate_config {CONFIGS[sharding.kind]}"] if sharding is not recipe.sharding else []
        changed = SimpleNamespace(**{**vars(settings), **fields})
        return about, ", ".join(words), Recipe(recipe.name, changed, sharding, cluster)

    colocate: dict[str, Any] = {"use_vllm": True, "vllm_mode": "colocate", "vllm_enable_sleep_mode": True}
    if not settings.use_vllm and cluster.gpu.name != "CPU":
        yield change("engine", **colocate)
    if settings.use_dynamic_sampling and settings.dynamic_sampling_mode == "filter":
        yield change("rounds", batch_multiplier=None)
        yield change("rounds", batch_multiplier=None, dynamic_sampling_surplus="carry")
        if recipe.asks_a_server:
            yield change("ahead", rollouts_ahead=1, dynamic_sampling_surplus="carry", batch_multiplier=None)
    if recipe.asks_a_server:
        colocate |= {"rollouts_ahead": 0, "vllm_gpu_memory_utilization": 0.7, "vllm_request_timeout": None}
        for num_gpus in (together, cluster.num_train):
            for shards in (1, 2, 4, 8):
                yield change("engine", Cluster(cluster.gpu, num_gpus), vllm_tensor_parallel_size=shards, **colocate)
        for num_train in (together // 2, together * 3 // 4, cluster.num_train // 2):
            if num_train:
                yield change("split", Cluster(cluster.gpu, num_train, together - num_train))
    elif settings.use_vllm:
        yield change("sleep", vllm_enable_sleep_mode=True)
        for share in (settings.vllm_gpu_memory_utilization + step for step in (0.1, 0.2, -0.1, -0.2)):
            if 0.1 <= share <= 0.9:
                yield change("share", vllm_gpu_memory_utilization=round(share, 2))
        for shards in (1, 2, 4, 8):
            yield change("shards", vllm_tensor_parallel_size=shards)
    if budget := settings.max_tokens_per_microbatch:
        yield change("micro-batch", max_tokens_per_microbatch=2 * budget)
        yield change("micro-batch", max_tokens_per_microbatch=budget // 2)
    elif settings.per_device_train_batch_size > 1 and in_prompts:  # else the rollout would be halved with it
        yield change("micro-batch", per_device_train_batch_size=settings.per_device_train_batch_size // 2)
    yield change("checkpointing", gradient_checkpointing=not settings.gradient_checkpointing)
    if settings.gradient_checkpointing and budget:
        yield change("checkpointing", gradient_checkpointing=False, max_tokens_per_microbatch=budget // 2)
    if "flash" not in (settings.attn_implementation or "") and cluster.gpu.name != "CPU":
        yield change("attention", attn_implementation="flash_attention_2")
    if recipe.sharding.kind == "fsdp2":
        options = settings.accelerator_config if isinstance(settings.accelerator_config, dict) else {}
        options = {**options, "gradient_accumulation_kwargs": {"sync_each_batch": True}}
        yield change("reduction", accelerator_config=options)
    if recipe.sharding.kind == "ddp":
        kinds = ("zero2",) if settings.load_in_4bit or settings.load_in_8bit else ("fsdp2", "zero2")
        yield from (change("sharding", sharding=Sharding(kind)) for kind in kinds)
    on_gpus, is_fsdp2 = cluster.gpu.name != "CPU", recipe.sharding.kind == "fsdp2"
    if on_gpus and not is_fsdp2 and not settings.use_peft and "8bit" not in (settings.optim or ""):
        yield change("optimizer", optim="adamw_8bit")  # bitsandbytes' know no sharded tensors
    if not planned.fits:
        adapter: dict[str, Any] = {} if settings.use_peft else LORA
        if adapter:
            yield change("adapter", **adapter)
        if on_gpus and not recipe.sharding.shards_weights and not settings.load_in_8bit:
            yield change("adapter", **adapter, load_in_4bit=True)
    if in_prompts and 2 * planned.batches.num_steps <= MOST_STEPS * settings.num_iterations:
        prompts = planned.batches.num_rows // settings.num_generations
        step = settings.prompts_per_step or prompts
        yield change("rollout", prompts_per_rollout=2 * prompts, prompts_per_step=step)
    if on_gpus:
        more = Cluster(cluster.gpu, 2 * cluster.num_train, 2 * cluster.num_serve)
        yield change("gpus", more, Sharding("ddp") if recipe.sharding.kind == "none" else recipe.sharding)
        if recipe.sharding.kind in ("none", "ddp"):
            kind = "zero2" if settings.load_in_4bit or settings.load_in_8bit else "fsdp2"
            yield change("gpus", more, Sharding(kind))
    if settings.eval_strategy == "steps" and (settings.eval_steps or 0) >= 1:
        yield change("evaluation", eval_steps=2 * settings.eval_steps)


def _yaml(value: Any) -> str:
    if isinstance(value, float):  # YAML takes 1e-05 for a text
        return yaml.safe_dump(value).splitlines()[0]
    return value if isinstance(value, str) else json.dumps(value)

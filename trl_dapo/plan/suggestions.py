# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The settings that would help a plan most, each of them planned again."""

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from types import SimpleNamespace
from typing import Any

import yaml

from ..models import ModelShape
from ..settings.rules import why_refused
from .hardware import GPUS, Cluster
from .model_shapes import PUBLISHED, shape_of
from .planning import Plan
from .recipe import Recipe, Sharding


LEAST_EFFECT = 0.01
MOST_STEPS = 16  # optimizer steps of a rollout, as in the paper: 512 / 32
LORA = {"use_peft": True, "lora_r": 32, "lora_target_modules": "all-linear", "learning_rate": 1e-5}
LATER = ("adapter", "gpus")  # these change what trains and what it costs: they come after what does neither
CONFIGS = {"ddp": "multi_gpu", "fsdp2": "fsdp2", "zero2": "zero2"}  # of accelerate's, by name
MORE_GPUS = (2, 4, 8, 16, 32, 64)  # times as many


def suggest(planned: Plan, most: int = 3) -> list[tuple[str, Plan]]:
    """
    At most so many changes that spare time where the recipe fits, or make it fit, the best first: each in words, and
    the plan with it. Time is compared for as many prompts; of one setting's values the best counts. Where no change
    makes it fit, what does: several changes, more GPUs, a larger one, a smaller model, at most one of each.
    """
    best: dict[str, tuple[tuple, Plan]] = {}
    for about, recipe in _candidates(planned):
        other = _replan(planned, recipe)
        if other is None or not other.fits:
            continue
        if planned.fits and other.seconds_a_row >= (1 - LEAST_EFFECT) * planned.seconds_a_row:
            continue
        rank = LATER.index(about) if about in LATER else -1, other.seconds_a_row
        if about not in best or rank < best[about][0]:
            best[about] = rank, other
    found = [other for _, other in sorted(best.values(), key=lambda ranked: ranked[0])[:most]]
    if not found and not planned.fits:
        found = list(_alternatives(planned))
    return [(_words(planned.recipe, other.recipe), other) for other in found]


def _replan(planned: Plan, recipe: Recipe, shape: ModelShape | None = None) -> Plan | None:
    """The plan of another recipe; `None` where it is refused, or its sizes do not divide."""
    other = replace(planned, recipe=recipe, shape=shape or planned.shape)
    if why_refused(recipe.settings) or why_refused(recipe.settings, has_images=bool(other.shape.num_other)):
        return None
    try:
        _ = other.seconds_a_row if other.fits else None
    except ValueError:
        return None
    return other


def _alternatives(planned: Plan) -> Iterator[Plan]:
    """What fits where no one change makes the recipe fit, the nearest of each kind."""
    recipe, cluster, name = planned.recipe, planned.recipe.cluster, str(planned.recipe.settings.model_name_or_path)
    on_gpus = cluster.gpu.name != "CPU"
    shards = recipe.sharding if recipe.sharding.shards_weights else Sharding(_sharded(recipe.settings))
    many = [Cluster(cluster.gpu, n * cluster.num_train, n * cluster.num_serve) for n in MORE_GPUS if on_gpus]
    larger = sorted((gpu.memory, n) for n, gpu in GPUS.items() if on_gpus and gpu.memory > cluster.gpu.memory)
    shapes = [(model.split("-")[0] == name.split("-")[0], shape_of(PUBLISHED[model]), model) for model in PUBLISHED]
    smaller = [found for found in shapes if found[1].num_parameters < planned.shape.num_parameters]
    smaller.sort(key=lambda found: (found[0], found[1].num_parameters), reverse=True)
    for kind in (
        (_together(planned, without) for without in (LATER, LATER[1:])),
        (_together(_replan(planned, replace(recipe, cluster=more, sharding=shards)), LATER) for more in many),
        (
            _together(_replan(planned, replace(recipe, cluster=replace(cluster, gpu=GPUS[n]))), LATER)
            for _, n in larger
        ),
        (_together(_replan(planned, _changed(recipe, model_name_or_path=n), shape), LATER) for _, shape, n in smaller),
    ):
        yield from islice(filter(None, kind), 1)


def _together(planned: Plan | None, without: tuple[str, ...]) -> Plan | None:
    """The plan with as many changes as make it fit, the one that spares most memory first; `None` where none do."""
    now = planned
    while now is not None and not now.fits:
        tried = [_replan(now, recipe) for about, recipe in _candidates(now) if about not in without]
        best = min(filter(None, tried), key=lambda other: (not other.fits, other.peak), default=now)
        if not best.fits and best.peak >= (1 - LEAST_EFFECT) * now.peak:
            return None
        now = best
    return now


def _changed(recipe: Recipe, **fields: Any) -> Recipe:
    return replace(recipe, settings=SimpleNamespace(**{**vars(recipe.settings), **fields}))


def _words(before: Recipe, after: Recipe) -> str:
    """What differs, as a command line and a recipe say it."""
    changed = {name: value for name, value in vars(after.settings).items() if value != getattr(before.settings, name)}
    words = [f"{name}: {_yaml(value)}" for name, value in changed.items()]
    words += [f"--gpus {after.cluster}"] if after.cluster != before.cluster else []
    words += [f"--accelerate_config {CONFIGS[after.sharding.kind]}"] if after.sharding != before.sharding else []
    return ", ".join(words)


def _sharded(settings: SimpleNamespace) -> str:
    """How more GPUs share a model; bitsandbytes' weights cannot be cut."""
    return "zero2" if settings.load_in_4bit or settings.load_in_8bit else "fsdp2"


def _candidates(planned: Plan) -> Iterator[tuple[str, Recipe]]:
    """What a change is about, and the recipe with it."""
    recipe, settings, cluster = planned.recipe, planned.recipe.settings, planned.recipe.cluster
    together = cluster.num_train + cluster.num_serve
    in_prompts = settings.prompts_per_rollout is not None or settings.prompts_per_step is not None

    def change(
        about: str, cluster: Cluster = cluster, sharding: Sharding = recipe.sharding, **fields: Any
    ) -> tuple[str, Recipe]:
        return about, replace(_changed(recipe, **fields), sharding=sharding, cluster=cluster)

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
        yield from (change("sharding", sharding=Sharding(kind)) for kind in sorted({_sharded(settings), "zero2"}))
    on_gpus, is_fsdp2 = cluster.gpu.name != "CPU", recipe.sharding.kind == "fsdp2"
    if on_gpus and not is_fsdp2 and not settings.use_peft and "8bit" not in (settings.optim or ""):
        yield change("optimizer", optim="adamw_8bit")  # bitsandbytes' know no sharded tensors
    if not planned.fits:
        adapter: dict[str, Any] = {} if settings.use_peft else LORA
        if adapter and planned.shape.num_stacked:
            adapter = adapter | {"lora_dropout": 0.0}  # PEFT knows none on experts
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
            yield change("gpus", more, Sharding(_sharded(settings)))
    if settings.eval_strategy == "steps" and (settings.eval_steps or 0) >= 1:
        yield change("evaluation", eval_steps=2 * settings.eval_steps)


def _yaml(value: Any) -> str:
    if isinstance(value, float):  # YAML takes 1e-05 for a text
        return yaml.safe_dump(value).splitlines()[0]
    return value if isinstance(value, str) else json.dumps(value)

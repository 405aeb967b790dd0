# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""A plan in at most 80 columns, and the settings that would help it most, each of them planned again."""

import argparse
import json
import math
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from itertools import islice
from types import SimpleNamespace
from typing import Any

import yaml

from ..models import ModelShape
from ..number_format import format_bytes, format_count, format_estimate
from ..settings.rules import why_refused
from .memory import CONTEXT, HEAD_TILE, VLLM_ASLEEP, VLLM_WORK
from .planning import ACCEPTANCE, FRAGMENTS, PUBLISHED, START, Plan, plan, shape_of
from .recipe import GPUS, GPUS_PER_MACHINE, NETWORK, PCIE, Cluster, Recipe, Sharding
from .rollout_cost import BANDWIDTH, DECODE_MFU, SERVER_UTILIZATION, STEP_SECONDS, TRAIN_MFU
from .training import makes_tiles


WIDTH = 80
LOGITS = {
    True: f"in tiles of {HEAD_TILE[0]:,} tokens and {HEAD_TILE[1]:,} columns",
    False: "of a micro-batch all at once; TRL 1.16 makes them in tiles",
}
PARTS = {
    "optimizer": "optimizer state",
    "reference": "the reference model of the KL term",
    "activations": "activations that are kept",
    "work": "the layer at work, or the output layer",
    "gathered": "gathered of others' shards, and buckets",
    "context": "CUDA and NCCL",
    "logps": "log-probabilities",
    "sync": "weight sync",
}
_count = partial(format_count, billion="B")
# Of what would help.
LEAST_EFFECT = 0.01
MOST_STEPS = 16  # optimizer steps of a rollout, as in the paper: 512 / 32
LORA = {"use_peft": True, "lora_r": 32, "lora_target_modules": "all-linear", "learning_rate": 1e-5}
LATER = ("adapter", "gpus")  # these change what trains and what it costs: they come after what does neither
CONFIGS = {"ddp": "multi_gpu", "fsdp2": "fsdp2", "zero2": "zero2"}  # of accelerate's, by name
MORE_GPUS = (2, 4, 8, 16, 32, 64)  # times as many


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "What a recipe will need, before a GPU is rented. Any field of it can be overridden: --field value. Exit "
        "status: 0 where it fits, 1 where it does not, 2 after a mistake."
    )
    parser.add_argument("--config", required=True, metavar="RECIPE", help="a recipe, or its name")
    parser.add_argument(
        "--gpus",
        help=f"8xH100-80GB, or 64+8xH100-80GB where 64 train and 8 serve vLLM; known: {', '.join(GPUS)}; another "
        "is written 2x48GB:A6000:0.77TB/s:155TFLOPs (default: what the recipe's first line says)",
    )
    of_completions = "tokens of completions (default: a third of max_completion_length, and it)"
    parser.add_argument("--lengths", metavar="MEAN,MAX", help=of_completions)
    parser.add_argument("--acceptance", type=float, default=ACCEPTANCE, help="share of groups accepted (default: 1/3)")
    parser.add_argument("--accelerate_config", metavar="CONFIG", help="of accelerate's (default: the recipe's)")


def run_plan(args: argparse.Namespace) -> int:
    """Runs `trl-dapo plan`: 0 where the run fits, 1 where it does not."""
    lengths = None if args.lengths is None else _read_lengths(args.lengths)
    planned = plan(args.config, args.gpus, lengths, args.acceptance, args.accelerate_config, args.others)
    print(describe(planned))
    return 0 if planned.fits else 1


def _read_lengths(text: str) -> tuple[float, float]:
    try:
        mean, maximum = map(float, text.split(","))
    except ValueError:
        raise ValueError(f"`--lengths {text}` cannot be read. Write MEAN,MAX, such as 3000,8192.") from None
    return mean, maximum


def describe(planned: Plan) -> str:
    recipe, settings = planned.recipe, planned.recipe.settings
    sharding = recipe.sharding.kind.upper().replace("ZERO", "ZeRO-").replace("NONE", "one process")
    model = "a tiny model" if settings.tiny_model else settings.model_name_or_path
    all_weights, trained = _count(planned.shape.num_parameters), _count(planned.training.weights.num_trained)
    size, most = planned.training.checkpoint, (settings.save_total_limit or 0) + 1
    kept = f"{format_bytes(size)} a checkpoint, all of which are kept"
    if settings.save_strategy == "no":
        kept = "no checkpoint"
    elif settings.save_total_limit is not None:
        kept = f"{format_bytes(size)} a checkpoint, {format_bytes(most * size)} while the oldest of {most} is there"
    fits = f"Does not fit: {'; '.join(planned.problems)}."
    if planned.fits:
        fits = f"Fits: peak {format_bytes(planned.peak)} of {format_bytes(recipe.cluster.gpu.memory)}."
    lines = [
        *textwrap.wrap(f"{recipe.name} on {recipe.cluster}, {sharding}", WIDTH),
        *_wrapped(planned.batches.arithmetic),
        *_wrapped(f"Model: {model}, {all_weights} weights, {trained} train. Sizes: {planned.source}."),
        *_memory(planned),
        "",
        "Disk",
        *_wrapped(kept),
        *_times(planned),
        "",
        "Assumed",
        *(line for text in assumptions(planned) for line in _wrapped(text, "- ")),
        *_suggestions(planned),
        "",
        *textwrap.wrap(fits, WIDTH),
    ]
    return "\n".join(lines)


def _memory(planned: Plan) -> list[str]:
    recipe, settings, engine = planned.recipe, planned.recipe.settings, planned.sampling.engine
    owner = "this machine" if recipe.cluster.gpu.name == "CPU" else "a GPU that trains"
    lines = [
        "",
        f"Memory of {owner}: {format_bytes(recipe.cluster.gpu.memory)}",
        *(_row(PARTS.get(name, name), format_bytes(size)) for name, size in planned.training.memory.items() if size),
        _row("peak while updating", format_bytes(planned.peak_updating)),
        _row("peak while sampling", format_bytes(planned.peak_sampling)),
    ]
    if settings.use_vllm:
        where = "a GPU of the server" if recipe.asks_a_server else "the same GPU"
        awake = " while it is awake" if settings.vllm_enable_sleep_mode and not recipe.asks_a_server else ""
        lines += ["", f"Memory of vLLM on {where}{awake}"]
        lines += [_row(name, format_bytes(size)) for name, size in planned.sampling.vllm_memory.items()]
        lines.append(_row("tokens that an engine's cache holds", f"{engine.cache_tokens:,}"))
    return lines


def _times(planned: Plan) -> list[str]:
    settings, sampling, batches, seconds = planned.recipe.settings, planned.sampling, planned.batches, planned.seconds
    together = {0: "together", 1: "together, one ahead", 2: "together, two ahead"}[settings.rollouts_ahead]
    lines = [
        "",
        "Time of a rollout, an estimate",
        _row("groups sampled", f"{sampling.num_groups:,.0f}"),
        _row("rounds", f"{sum(often for often, _ in sampling.rounds):.2f}"),
        _row("tokens sampled", _count(sampling.num_groups * settings.num_generations * planned.lengths.mean)),
        _row("tokens trained on", _count(sampling.num_trained * planned.lengths.mean)),
        *(_row(PARTS.get(name, name), format_estimate(part)) for name, part in seconds.items()),
        _row(together, format_estimate(planned.rollout_seconds)),
    ]
    if planned.num_problems:
        lines.append(_row("with its share of the evaluations", format_estimate(planned.seconds_with_evaluation)))
    longest = max(seconds, key=seconds.__getitem__)
    said = f"Longest: {PARTS.get(longest, longest)}, {seconds[longest] / sum(seconds.values()):.0%}. For "
    said += f"{format_estimate(sampling.seconds[1])} of sampling less than half of an engine's completions are left."
    if planned.idle_share:
        said += f" GPUs wait for one another {planned.idle_share:.0%} of their time."
    if planned.num_problems:
        said += f" An evaluation: {format_estimate(planned.evaluation_seconds)}"
        said += f", every {planned.evaluation_every:.3g} rollouts."
    if (num := batches.num_rollouts) is not None:
        run = format_estimate(START + num * planned.seconds_with_evaluation)
        said += f" The run: {num:,.0f} rollouts, {run}, {START} s of it to start."
    return [*lines, *_wrapped(said)]


def _suggestions(planned: Plan) -> list[str]:
    before, batches = format_estimate(planned.seconds_with_evaluation), planned.batches
    lines = []
    for words, other in suggest(planned):
        after = format_estimate(other.seconds_a_row * planned.sampling.num_trained)
        if planned.fits and after == before:
            continue  # what spares less than the page can show is no help
        effect = f"{before} -> {after} for as many rows as train in a rollout"
        if other.batches.num_steps > batches.num_steps:
            steps = f"{other.batches.num_steps:.3g} optimizer steps a rollout, not {batches.num_steps:.3g}"
            effect += f"; further off-policy: {steps}"
        if not planned.fits:
            effect = f"peak {format_bytes(planned.peak)} -> {format_bytes(other.peak)}; {effect}"
        lines += _wrapped(f"{words}: {effect}", "- ")
    if planned.fits:
        return ["", "Would help most", *lines] if lines else []
    if not lines:
        lines = _wrapped("nothing that a plan tries", "- ")
    return ["", "Would fit", *lines]


def assumptions(planned: Plan) -> list[str]:
    recipe, settings, cluster = planned.recipe, planned.recipe.settings, planned.recipe.cluster
    processor, of_what = ("CPU", "the memory") if cluster.gpu.name == "CPU" else ("GPU", "a GPU")
    allowed = f"{format_bytes(CONTEXT)} a process for CUDA and NCCL, " if processor == "GPU" else ""
    if settings.use_vllm:
        allowed += f"{format_bytes(VLLM_WORK)} for what vLLM works with, "
        allowed += f"{format_bytes(VLLM_ASLEEP)} for what is left of it asleep, "
    found = [
        f"completions of {planned.lengths.mean:,.0f} tokens in the mean, {planned.lengths.maximum:,.0f} at most "
        f"(--lengths); prompts of {recipe.prompt:,.0f}, at most {recipe.longest_prompt:,.0f}",
        f"reached: {TRAIN_MFU:.0%} of the {processor}'s operations in training, {DECODE_MFU:.0%} in decoding, "
        f"{BANDWIDTH:.0%} of its bandwidth; {1000 * STEP_SECONDS:.0f} ms a decoding step besides",
        f"allowances: {f'{allowed[:-2]}; ' if allowed else ''}{FRAGMENTS:.0%} of {of_what} for fragments",
        f"TRL {version('trl')}: logits {LOGITS[makes_tiles()]}",
        "rewards take no time",
    ]
    if settings.use_dynamic_sampling:
        found.insert(1, f"{100 * planned.acceptance:.3g}% of groups accepted (--acceptance)")
    if cluster.num_train + cluster.num_serve > GPUS_PER_MACHINE:
        found.append(f"machines of {GPUS_PER_MACHINE} GPUs, {NETWORK / 1e9:.0f} GB/s a GPU between them")
    if cluster.gpu.name not in (*GPUS, "CPU"):
        found.append(f"a GPU of another kind reaches others at {PCIE / 1e9:.0f} GB/s, over PCIe")
    if cluster.num_serve:
        found.append(f"a server uses {SERVER_UTILIZATION:.0%} of its GPUs, tensor parallel in a machine")
    if planned.num_problems:
        found.append(f"{planned.num_problems} problems in an evaluation")
    if settings.use_vllm and not recipe.asks_a_server and settings.vllm_max_model_length is None:
        found.append("without `vllm_max_model_length` vLLM asks for a cache of the model's whole context: unchecked")
    if settings.tools:
        found.append("tools take no time")
    if planned.sampling.num_trained < planned.batches.num_rows and settings.dynamic_sampling_mode != "mask":
        limit = settings.dynamic_sampling_max_gen_batches
        found.append(f"`dynamic_sampling_max_gen_batches: {limit:g}` ends a rollout before its batch is full")
    if planned.shape.num_other:
        images = "images take neither tokens nor activations; an evaluation of them is one call; of weights outside "
        found.append(f"{images}the layers, such as a vision tower's, only the memory counts")
    for name in ("dynamic_sampling_memory", "dynamic_sampling_screen"):
        if getattr(settings, name) not in (False, "off"):
            found.append(f"what `{name}` spares is not known beforehand, and left out")
    return found


def _wrapped(text: str, bullet: str = "") -> list[str]:
    first, rest = f"  {bullet}", " " * (2 + len(bullet))
    return textwrap.TextWrapper(WIDTH, first, rest, break_long_words=False, break_on_hyphens=False).wrap(text)


def _row(name: str, value: str) -> str:
    return f"  {name:<44}{value:>16}"


def suggest(planned: Plan, most: int = 3) -> list[tuple[str, Plan]]:
    """
    At most so many changes that spare time where the recipe fits, or make it fit, the best first: each in words, and
    the plan with it. Time is compared for as many rows; of one setting's values the best counts. Where no change
    makes it fit, what does: several changes, more GPUs, a larger one, a smaller model, at most one of each.
    """
    best: dict[str, tuple[tuple, Plan]] = {}
    bound = (1 - LEAST_EFFECT) * planned.seconds_a_row if planned.fits else math.inf
    for about, recipe in _candidates(planned):
        other = _replan(planned, recipe)
        if other is None or not other.fits or other.seconds_a_row >= bound:
            continue
        rank = LATER.index(about) if about in LATER else -1, other.seconds_a_row
        if about not in best or rank < best[about][0]:
            best[about] = rank, other
    found = [other for _, other in sorted(best.values(), key=lambda ranked: ranked[0])[:most]]
    found = found or ([] if planned.fits else list(_alternatives(planned)))
    return [(_words(planned.recipe, other.recipe), other) for other in found]


def _replan(planned: Plan, recipe: Recipe, shape: ModelShape | None = None) -> Plan | None:
    """The plan of another recipe; `None` where it is refused, or its sizes do not divide."""
    other, settings = replace(planned, recipe=recipe, shape=shape or planned.shape), recipe.settings
    if why_refused(settings) or why_refused(settings, **recipe.facts, has_images=other.shape.num_other > 0):
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
    sizes = sorted((gpu.memory, n) for n, gpu in GPUS.items() if on_gpus and gpu.memory > cluster.gpu.memory)
    larger = [replace(cluster, gpu=GPUS[n]) for _, n in sizes]
    shapes = [(model.split("-")[0] == name.split("-")[0], shape_of(PUBLISHED[model]), model) for model in PUBLISHED]
    smaller = [found for found in shapes if found[1].num_parameters < planned.shape.num_parameters]
    smaller.sort(key=lambda found: (found[0], found[1].num_parameters), reverse=True)
    for kind in (
        (_together(planned, without) for without in (LATER, LATER[1:])),
        (_together(_replan(planned, replace(recipe, cluster=more, sharding=shards)), LATER) for more in many),
        (_together(_replan(planned, replace(recipe, cluster=other)), LATER) for other in larger),
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
    together, on_gpus = cluster.num_train + cluster.num_serve, cluster.gpu.name != "CPU"
    in_prompts = settings.prompts_per_rollout is not None or settings.prompts_per_step is not None

    def change(
        about: str, cluster: Cluster = cluster, sharding: Sharding = recipe.sharding, **fields: Any
    ) -> tuple[str, Recipe]:
        return about, replace(_changed(recipe, **fields), sharding=sharding, cluster=cluster)

    colocate: dict[str, Any] = {"use_vllm": True, "vllm_mode": "colocate", "vllm_enable_sleep_mode": True}
    if not settings.use_vllm and on_gpus:
        yield change("engine", **colocate)
    if settings.use_dynamic_sampling and settings.dynamic_sampling_mode == "filter":
        yield change("rounds", batch_multiplier=None)
        yield change("rounds", batch_multiplier=None, dynamic_sampling_surplus="carry")
        if recipe.asks_a_server:
            ahead: dict[str, Any] = {"dynamic_sampling_surplus": "carry", "batch_multiplier": None}
            yield change("ahead", rollouts_ahead=1, **ahead)
            if settings.use_peft:
                yield change("ahead", rollouts_ahead=2, dynamic_sampling_max_round_size=None, **ahead)
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
        yield from (change("shards", vllm_tensor_parallel_size=shards) for shards in (1, 2, 4, 8))
    if budget := settings.max_tokens_per_microbatch:
        yield change("micro-batch", max_tokens_per_microbatch=2 * budget)
        yield change("micro-batch", max_tokens_per_microbatch=budget // 2)
    elif settings.per_device_train_batch_size > 1 and in_prompts:  # else the rollout would be halved with it
        yield change("micro-batch", per_device_train_batch_size=settings.per_device_train_batch_size // 2)
    yield change("checkpointing", gradient_checkpointing=not settings.gradient_checkpointing)
    if settings.gradient_checkpointing and budget:
        yield change("checkpointing", gradient_checkpointing=False, max_tokens_per_microbatch=budget // 2)
    if "flash" not in (settings.attn_implementation or "") and on_gpus:
        yield change("attention", attn_implementation="flash_attention_2")
    if recipe.sharding.kind == "fsdp2":
        options = settings.accelerator_config if isinstance(settings.accelerator_config, dict) else {}
        syncs_each = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
        yield change("reduction", accelerator_config={**options, **syncs_each})
    if recipe.sharding.kind == "ddp":
        yield from (change("sharding", sharding=Sharding(kind)) for kind in sorted({_sharded(settings), "zero2"}))
    if on_gpus and recipe.sharding.kind != "fsdp2" and not settings.use_peft and "8bit" not in (settings.optim or ""):
        yield change("optimizer", optim="adamw_8bit")  # bitsandbytes' know no sharded tensors
    if not planned.fits:
        on_experts = {"lora_dropout": 0.0} if planned.shape.num_stacked else {}  # PEFT knows none on experts
        adapter: dict[str, Any] = {} if settings.use_peft else LORA | on_experts
        if adapter:
            yield change("adapter", **adapter)
        if on_gpus and not recipe.sharding.shards_weights and not settings.load_in_8bit:
            yield change("adapter", **adapter, load_in_4bit=True)
    if in_prompts and 2 * planned.batches.num_steps <= MOST_STEPS * settings.num_iterations:
        prompts = planned.batches.num_rows // settings.num_generations
        yield change("rollout", prompts_per_rollout=2 * prompts, prompts_per_step=settings.prompts_per_step or prompts)
    if on_gpus:
        more = Cluster(cluster.gpu, 2 * cluster.num_train, 2 * cluster.num_serve)
        yield change("gpus", more, Sharding("ddp") if recipe.sharding.kind == "none" else recipe.sharding)
        if recipe.sharding.kind in ("none", "ddp"):
            yield change("gpus", more, Sharding(_sharded(settings)))
    is_last = 0 < settings.max_steps < 2 * (settings.eval_steps or 0)  # there would be none at the end
    if settings.eval_strategy == "steps" and (settings.eval_steps or 0) >= 1 and not is_last:
        yield change("evaluation", eval_steps=2 * settings.eval_steps)


def _yaml(value: Any) -> str:
    if isinstance(value, float):  # YAML takes 1e-05 for a text
        return yaml.safe_dump(value).splitlines()[0]
    return value if isinstance(value, str) else json.dumps(value)

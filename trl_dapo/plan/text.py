# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""A plan in at most 80 columns."""

import argparse
import math
import textwrap
from functools import partial
from importlib.metadata import version

from ..number_format import PAGE_WIDTH, format_bytes, format_count, indented_lines
from .batches import SERVER_UTILIZATION
from .memory import CONTEXT, HEAD_TILE, VLLM_ASLEEP, VLLM_WORK
from .planning import FRAGMENTS, Plan, plan
from .recipe import GPUS
from .training import makes_tiles


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
}
_count = partial(format_count, billion="B")


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "What is known of a run without its machine: memory by part, batches and tokens. On the machine itself "
        "`trl-dapo train --trial` measures memory and time. Any field of the recipe can be overridden: --field value. "
        "Exit status: 0 where it fits, 1 where it does not, 2 after a mistake."
    )
    parser.add_argument("--config", required=True, metavar="RECIPE", help="a recipe, or its name")
    parser.add_argument(
        "--gpus",
        help=f"8xH100-80GB, or 64+8xH100-80GB where 64 train and 8 serve vLLM; known: {', '.join(GPUS)}; another is "
        "written 2x48GB:A6000 (default: what the recipe's first line says)",
    )
    parser.add_argument("--accelerate_config", metavar="CONFIG", help="of accelerate's (default: the recipe's)")


def run_plan(args: argparse.Namespace) -> int:
    """Runs `trl-dapo plan`: 0 where the run fits, 1 where it does not."""
    planned = plan(args.config, args.gpus, args.accelerate_config, args.others)
    print(describe(planned))
    return 0 if planned.fits else 1


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
    way_out = "What fits is found by `trl-dapo train --trial` on the machine."
    fits = f"Does not fit: {'; '.join(planned.problems)}. {way_out}"
    if planned.fits:
        fits = f"Fits: peak {format_bytes(planned.peak)} of {format_bytes(recipe.cluster.gpu.memory)}."
    lines = [
        *textwrap.wrap(f"{recipe.name} on {recipe.cluster}, {sharding}", PAGE_WIDTH),
        *indented_lines(planned.batches.arithmetic),
        *indented_lines(f"Model: {model}, {all_weights} weights, {trained} train. Sizes: {planned.source}."),
        *_memory(planned),
        "",
        "Disk",
        *indented_lines(kept),
        *_tokens(planned),
        "",
        "Assumed",
        *(line for text in assumptions(planned) for line in indented_lines(text, "- ")),
        "",
        *textwrap.wrap(fits, PAGE_WIDTH),
    ]
    return "\n".join(lines)


def _memory(planned: Plan) -> list[str]:
    recipe, settings, vllm = planned.recipe, planned.recipe.settings, planned.vllm
    owner = "this machine" if recipe.cluster.gpu.name == "CPU" else "a GPU that trains"
    lines = [
        "",
        f"Memory of {owner}: {format_bytes(recipe.cluster.gpu.memory)}",
        *(_row(PARTS.get(name, name), format_bytes(size)) for name, size in planned.training.memory.items() if size),
        _row("peak while updating", format_bytes(planned.peak_updating)),
        _row("peak while sampling", format_bytes(planned.peak_sampling)),
    ]
    if vllm is not None:
        where = "a GPU of the server" if recipe.asks_a_server else "the same GPU"
        awake = " while it is awake" if settings.vllm_enable_sleep_mode and not recipe.asks_a_server else ""
        lines += ["", f"Memory of vLLM on {where}{awake}"]
        lines += [_row(name, format_bytes(size)) for name, size in vllm.memory.items()]
        lines.append(_row("tokens that an engine's cache holds", f"{vllm.cache_tokens:,}"))
    return lines


def _tokens(planned: Plan) -> list[str]:
    batches, num_rollouts = planned.batches, planned.batches.num_rollouts
    sampled = "no limit" if math.isinf(batches.tokens_sampled) else _count(batches.tokens_sampled)
    lines = [
        "",
        "Tokens, at most",
        _row("of the longest row, prompt and completion", f"{batches.longest_row:,}"),
        _row("of a micro-batch", f"{batches.microbatch_tokens:,}"),
        _row("of completions that a rollout trains on", _count(batches.tokens_trained)),
        _row("of completions that a rollout samples", sampled),
    ]
    if num_rollouts is not None:
        lines.append(_row("rollouts of the run", f"{num_rollouts:,.0f}"))
    return lines


def assumptions(planned: Plan) -> list[str]:
    recipe, settings, cluster = planned.recipe, planned.recipe.settings, planned.recipe.cluster
    processor, of_what = ("CPU", "the memory") if cluster.gpu.name == "CPU" else ("GPU", "a GPU")
    allowed = f"{format_bytes(CONTEXT)} a process for CUDA and NCCL, " if processor == "GPU" else ""
    if settings.use_vllm:
        allowed += f"{format_bytes(VLLM_WORK)} for what vLLM works with, "
        allowed += f"{format_bytes(VLLM_ASLEEP)} for what is left of it asleep, "
    found = [
        f"prompts of at most {recipe.longest_prompt:,.0f} tokens",
        f"allowances: {f'{allowed[:-2]}; ' if allowed else ''}{FRAGMENTS:.0%} of {of_what} for fragments",
        f"TRL {version('trl')}: logits {LOGITS[makes_tiles()]}",
    ]
    if cluster.num_serve:
        found.append(f"a server uses {SERVER_UTILIZATION:.0%} of its GPUs, tensor parallel in a machine")
    if settings.use_vllm and not recipe.asks_a_server and settings.vllm_max_model_length is None:
        found.append("without `vllm_max_model_length` vLLM asks for a cache of the model's whole context: unchecked")
    if planned.shape.num_other:
        found.append(
            "images take neither tokens nor activations; of weights outside the layers, such as a vision tower's, "
            "only the memory counts"
        )
    return found


def _row(name: str, value: str) -> str:
    return f"  {name:<44}{value:>16}"

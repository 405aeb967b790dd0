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
    False: "of a whole micro-batch at once (TRL 1.16 makes them in tiles)",
}
PARTS = {
    "optimizer": "optimizer state",
    "reference": "the reference model of the KL term",
    "activations": "activations kept for the backward pass",
    "work": "working memory of the largest layer",
    "gathered": "gathered shards and communication buckets",
    "context": "CUDA and NCCL",
}
_count = partial(format_count, billion="B")


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Estimate a run without its machine: memory by part, batches and tokens. On the machine itself "
        "`trl-dapo train --trial` measures memory and time. Any field of the recipe can be overridden: --field value. "
        "Exit status: 0 if it fits, 1 if it does not, 2 after a mistake."
    )
    parser.add_argument("--config", required=True, metavar="RECIPE", help="a recipe, or its name")
    parser.add_argument(
        "--gpus",
        help=f"8xH100-80GB, or 64+8xH100-80GB if 64 train and 8 serve vLLM; known: {', '.join(GPUS)}; write others "
        "with their memory, 2x48GB:A6000 (default: the hardware that the recipe's header names)",
    )
    parser.add_argument(
        "--accelerate_config",
        metavar="CONFIG",
        help="accelerate's configuration, a file or a name (default: the one that the recipe's header names)",
    )


def run_plan(args: argparse.Namespace) -> int:
    """Run `trl-dapo plan`, and return 0 if the run fits, otherwise 1."""
    planned = plan(args.config, args.gpus, args.accelerate_config, args.others)
    print(describe(planned))
    return 0 if planned.fits else 1


def _way_out(planned: Plan) -> str:
    """Return what to do about a run that does not fit."""
    recipe, settings = planned.recipe, planned.recipe.settings
    if planned.fits_with_smaller_batches:
        sentences = []
        if planned.cache_is_too_small:
            larger = "Raise `vllm_gpu_memory_utilization`"
            if recipe.uses_a_server:
                larger = "Serve vLLM from larger or more GPUs (`--gpus`)"
            sentences.append(f"{larger}, or lower `max_completion_length`.")
        if not planned.fits_into_memory:
            sentences.append("`trl-dapo train --trial` on the machine finds batch sizes that fit.")
        return " ".join(sentences)
    ways_out = []
    if planned.fits_with_a_smaller_share:
        ways_out.append("lower `vllm_gpu_memory_utilization`")
    if recipe.cluster.gpu.name == "CPU":
        ways_out.append("use a machine with more memory")
    else:
        ways_out.append("take larger GPUs or shard the model over more of them (`--gpus`, `--accelerate_config`)")
    if not settings.use_peft:
        ways_out.append("train an adapter (`use_peft: true`)")
    return f"Smaller batches do not help. Instead {', '.join(ways_out)}, or take a smaller model."


def describe(planned: Plan) -> str:
    recipe, settings = planned.recipe, planned.recipe.settings
    sharding = recipe.sharding.kind.upper().replace("ZERO", "ZeRO-").replace("NONE", "one process")
    model = "a tiny model" if settings.tiny_model else settings.model_name_or_path
    all_weights, trained = _count(planned.shape.num_parameters), _count(planned.training.weights.num_trained)
    size, most = planned.training.checkpoint, (settings.save_total_limit or 0) + 1
    kept = f"{format_bytes(size)} per checkpoint; all checkpoints are kept"
    if settings.save_strategy == "no":
        kept = "no checkpoint"
    elif settings.save_total_limit is not None:
        kept = (
            f"{format_bytes(size)} per checkpoint; {format_bytes(most * size)} for a moment, when the newest of "
            f"{most} has been written and the oldest is not deleted yet"
        )
    if planned.fits:
        fits = f"Fits: peak {format_bytes(planned.peak)} of {format_bytes(recipe.cluster.gpu.memory)}."
    else:
        fits = f"Does not fit: {'; '.join(planned.problems)}. {_way_out(planned)}"
    lines = [
        *textwrap.wrap(f"{recipe.name} on {recipe.cluster}, {sharding}", PAGE_WIDTH),
        *indented_lines(planned.batches.arithmetic),
        *indented_lines(f"Model: {model}, {all_weights} weights, of which {trained} train. Sizes: {planned.source}."),
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
        f"Memory of {owner}, which has {format_bytes(recipe.cluster.gpu.memory)}",
        *(_row(PARTS.get(name, name), format_bytes(size)) for name, size in planned.training.memory.items() if size),
        *_kept_by_vllm(planned),
        _row("peak while updating", format_bytes(planned.peak_updating)),
        _row("peak while sampling", format_bytes(planned.peak_sampling)),
    ]
    if vllm is not None:
        where = "a GPU of the server" if recipe.uses_a_server else "the same GPU"
        awake = " while it is awake" if settings.vllm_enable_sleep_mode and not recipe.uses_a_server else ""
        lines += ["", f"Memory of vLLM on {where}{awake}"]
        lines += [_row(name, format_bytes(size)) for name, size in vllm.memory.items()]
        lines.append(_row("tokens that an engine's cache holds", f"{vllm.cache_tokens:,}"))
    return lines


def _kept_by_vllm(planned: Plan) -> list[str]:
    kept = planned.vllm_while_updating
    if not kept:
        return []
    state = "asleep" if planned.recipe.settings.vllm_enable_sleep_mode else "which does not sleep"
    return [_row(f"vLLM, {state}", format_bytes(kept))]


def _tokens(planned: Plan) -> list[str]:
    batches, num_rollouts = planned.batches, planned.batches.num_rollouts
    sampled = "no limit" if math.isinf(batches.tokens_sampled) else _count(batches.tokens_sampled)
    lines = [
        "",
        "Tokens, at most",
        _row("longest row, prompt and completion", f"{batches.longest_row:,}"),
        _row("a micro-batch, or one such row", f"{batches.microbatch_tokens:,}"),
        _row("completions that a rollout trains on", _count(batches.tokens_trained)),
        _row("completions that a rollout samples", sampled),
    ]
    if num_rollouts is not None:
        lines += ["", _row("Rollouts of the run", f"{num_rollouts:,.0f}").removeprefix("  ")]
    return lines


def assumptions(planned: Plan) -> list[str]:
    recipe, settings, cluster = planned.recipe, planned.recipe.settings, planned.recipe.cluster
    processor, of_what = ("CPU", "the memory") if cluster.gpu.name == "CPU" else ("GPU", "a GPU")
    allowances = []
    if processor == "GPU":
        allowances.append(f"{format_bytes(CONTEXT)} per process for CUDA and NCCL")
    if settings.use_vllm:
        allowances.append(f"{format_bytes(VLLM_WORK)} of working memory for vLLM")
        if not recipe.uses_a_server:
            allowances.append(f"{format_bytes(VLLM_ASLEEP)} that vLLM keeps while it sleeps")
    allowances.append(f"{FRAGMENTS:.0%} of {of_what} for fragmentation")
    found = [
        f"prompts of at most {recipe.longest_prompt:,.0f} tokens",
        f"allowances, not measured: {', '.join(allowances)}",
        f"TRL {version('trl')}: logits {LOGITS[makes_tiles()]}",
    ]
    if cluster.num_serve:
        found.append(
            f"a server uses {SERVER_UTILIZATION:.0%} of the memory of its GPUs, split by tensor "
            "parallelism within a machine"
        )
    if settings.use_vllm and not recipe.uses_a_server and settings.vllm_max_model_length is None:
        found.append(
            "vLLM's cache is large enough for the model's whole context, which vLLM requires unless "
            "`vllm_max_model_length` is set; this was not checked"
        )
    if planned.shape.num_other:
        found.append(
            "images take neither tokens nor activations, and weights outside of the layers, such as those of a vision "
            "tower, take only the memory that holds them"
        )
    return found


def _row(name: str, value: str) -> str:
    return f"  {name:<44}{value:>16}"

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""A plan in at most 80 columns."""

import argparse
import sys
import textwrap
from importlib.metadata import version

from ..number_format import format_bytes, format_count, format_estimate
from ..settings.arguments import one_line
from .hardware import GPUS, GPUS_PER_MACHINE, NETWORK, PCIE
from .memory import CONTEXT, HEAD_TILE, VLLM_ASLEEP, VLLM_WORK
from .planning import ACCEPTANCE, FRAGMENTS, START, Plan, plan
from .rollout import SERVER_UTILIZATION
from .speed import BANDWIDTH, DECODE_MFU, STEP_SECONDS, TRAIN_MFU
from .suggestions import suggest
from .training import makes_tiles


WIDTH = 80
LOGITS = {
    True: f"in tiles of {HEAD_TILE[0]:,} tokens and {HEAD_TILE[1]:,} columns",
    False: "of a micro-batch all at once; TRL 1.16 makes them in tiles",
}
SHARDINGS = {
    "none": "one process",
    "ddp": "DDP",
    "fsdp2": "FSDP2",
    "zero1": "ZeRO-1",
    "zero2": "ZeRO-2",
    "zero3": "ZeRO-3",
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


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `trl-dapo plan`."""
    parser.add_argument("--config", required=True, metavar="RECIPE", help="a recipe, or its name")
    parser.add_argument(
        "--gpus",
        help=f"8xH100-80GB, or 64+8xH100-80GB where 64 train and 8 serve vLLM; known: {', '.join(GPUS)}; another "
        "is written 2x48GB:A6000:0.77TB/s:155TFLOPs "
        "(default: what the recipe's first line says)",
    )
    parser.add_argument(
        "--lengths",
        metavar="MEAN,MAX",
        help="tokens of completions (default: a third of max_completion_length, and it)",
    )
    parser.add_argument("--acceptance", type=float, default=ACCEPTANCE, help="share of groups accepted (default: 1/3)")
    parser.add_argument("--accelerate_config", metavar="CONFIG", help="of accelerate's (default: the recipe's)")


def run_plan(args: argparse.Namespace, overrides: list[str]) -> int:
    """Runs `trl-dapo plan`: 0 where the run fits, 1 where it does not, 2 after a mistake, told in one line."""
    try:
        lengths = None if args.lengths is None else _read_lengths(args.lengths)
        planned = plan(args.config, args.gpus, lengths, args.acceptance, args.accelerate_config, overrides)
    except (ValueError, OSError) as error:
        print(f"trl-dapo plan: {one_line(error)}", file=sys.stderr)
        return 2
    print(describe(planned))
    return 0 if planned.fits else 1


def _read_lengths(text: str) -> tuple[float, float]:
    try:
        mean, maximum = map(float, text.split(","))
    except ValueError:
        raise ValueError(f"`--lengths {text}` cannot be read. Write MEAN,MAX, such as 3000,8192.") from None
    return mean, maximum


def describe(planned: Plan) -> str:
    """The page."""
    recipe, settings = planned.recipe, planned.recipe.settings
    model = "a tiny model" if settings.tiny_model else settings.model_name_or_path
    all_weights, trained = _count(planned.shape.num_parameters), _count(planned.training.weights.num_trained)
    size, kept = planned.training.checkpoint, settings.save_total_limit
    disk = f"{format_bytes(size)} a checkpoint, all of which are kept"
    if kept is not None:
        disk = f"{format_bytes(size)} a checkpoint, {format_bytes((kept + 1) * size)} while the oldest of {kept + 1} "
        disk += "is still there"
    verdict = f"Does not fit: {'; '.join(planned.problems)}."
    if planned.fits:
        verdict = f"Fits: peak {format_bytes(planned.peak)} of {format_bytes(recipe.cluster.gpu.memory)}."
    lines = [
        *textwrap.wrap(f"{recipe.name} on {recipe.cluster}, {SHARDINGS[recipe.sharding.kind]}", WIDTH),
        *_wrapped(planned.batches.arithmetic),
        *_wrapped(f"Model: {model}, {all_weights} weights, {trained} train. Sizes: {planned.source}."),
        *_memory(planned),
        *_section("Disk"),
        *_wrapped(disk),
        *_times(planned),
        *_section("Assumed"),
        *(line for text in assumptions(planned) for line in _wrapped(text, "- ")),
        *_suggestions(planned),
        "",
        *textwrap.wrap(verdict, WIDTH),
    ]
    return "\n".join(lines)


def _memory(planned: Plan) -> list[str]:
    recipe, settings, engine = planned.recipe, planned.recipe.settings, planned.sampling.engine
    owner = "this machine" if recipe.cluster.gpu.name == "CPU" else "a GPU that trains"
    lines = [
        *_section(f"Memory of {owner}: {format_bytes(recipe.cluster.gpu.memory)}"),
        *(_row(PARTS.get(name, name), format_bytes(size)) for name, size in planned.training.memory.items() if size),
        _row("peak while updating", format_bytes(planned.peak_updating)),
        _row("peak while sampling", format_bytes(planned.peak_sampling)),
    ]
    if settings.use_vllm:
        where = "a GPU of the server" if recipe.asks_a_server else "the same GPU"
        awake = " while it is awake" if settings.vllm_enable_sleep_mode and not recipe.asks_a_server else ""
        lines += _section(f"Memory of vLLM on {where}{awake}")
        lines += [_row(name, format_bytes(size)) for name, size in planned.sampling.vllm_memory.items()]
        lines.append(_row("tokens that an engine's cache holds", f"{engine.cache_tokens:,}"))
    return lines


def _times(planned: Plan) -> list[str]:
    settings, sampling, batches, seconds = planned.recipe.settings, planned.sampling, planned.batches, planned.seconds
    together = "together, one ahead" if settings.rollouts_ahead else "together"
    lines = [
        *_section("Time of a rollout, an estimate"),
        _row("groups sampled", f"{sampling.num_groups:,.0f}"),
        _row("rounds", f"{sum(often for often, _ in sampling.rounds):.2f}"),
        _row("tokens sampled", _count(sampling.num_groups * settings.num_generations * planned.lengths.mean)),
        _row("tokens trained on", _count(batches.num_rows * planned.lengths.mean)),
        *(_row(PARTS.get(name, name), format_estimate(part)) for name, part in seconds.items()),
        _row(together, format_estimate(planned.rollout_seconds)),
    ]
    if planned.num_problems:
        evaluated = format_estimate(planned.seconds_with_evaluation)
        lines.append(_row("with its share of the evaluations", evaluated))
    longest = max(seconds, key=seconds.__getitem__)
    said = f"Longest: {PARTS.get(longest, longest)}, {seconds[longest] / sum(seconds.values()):.0%}. "
    tail = format_estimate(sampling.seconds[1])
    said += f"For {tail} of sampling less than half of an engine's completions are left."
    if planned.idle_share:
        said += f" GPUs wait for one another {planned.idle_share:.0%} of their time."
    if planned.num_problems:
        every = f"every {planned.evaluation_every:.3g} rollouts"
        said += f" An evaluation: {format_estimate(planned.evaluation_seconds)}, {every}."
    if (num := batches.num_rollouts) is not None:
        run = format_estimate(START + num * planned.seconds_with_evaluation)
        said += f" The run: {num:,.0f} rollouts, {run}, {START} s of it to start."
    return [*lines, *_wrapped(said)]


def _suggestions(planned: Plan) -> list[str]:
    before, batches = format_estimate(planned.seconds_with_evaluation), planned.batches
    lines = []
    for words, other in suggest(planned):
        after = format_estimate(other.seconds_a_row * batches.num_rows)
        if planned.fits and after == before:
            continue  # what spares less than the page can show is no help
        effect = f"{before} -> {after} a rollout"
        if other.batches.num_rows != batches.num_rows:
            effect += "'s prompts"
        if other.batches.num_steps > batches.num_steps:
            steps = f"{other.batches.num_steps:.3g} optimizer steps a rollout, not {batches.num_steps:.3g}"
            effect += f"; further off-policy: {steps}"
        if not planned.fits:
            effect = f"peak {format_bytes(planned.peak)} -> {format_bytes(other.peak)}; {effect}"
        lines += _wrapped(f"{words}: {effect}", "- ")
    if planned.fits:
        return [*_section("Would help most"), *lines] if lines else []
    return [*_section("Would fit"), *(lines or _wrapped("nothing that a plan tries", "- "))]


def assumptions(planned: Plan) -> list[str]:
    """What the figures rest on."""
    recipe, settings, cluster = planned.recipe, planned.recipe.settings, planned.recipe.cluster
    processor = "CPU" if cluster.gpu.name == "CPU" else "GPU"
    allowances = [] if processor == "CPU" else [f"{format_bytes(CONTEXT)} a process for CUDA and NCCL"]
    if settings.use_vllm:
        allowances.append(f"{format_bytes(VLLM_WORK)} for what vLLM works with")
        allowances.append(f"{format_bytes(VLLM_ASLEEP)} for what is left of it asleep")
    allowed = f"{', '.join(allowances)}; " if allowances else ""
    of_what = "the memory" if processor == "CPU" else "a GPU"
    found = [
        f"completions of {planned.lengths.mean:,.0f} tokens in the mean, {planned.lengths.maximum:,.0f} at most "
        f"(--lengths); prompts of {recipe.prompt:,.0f}, at most {recipe.longest_prompt:,.0f}",
        f"reached: {TRAIN_MFU:.0%} of the {processor}'s operations in training, {DECODE_MFU:.0%} in decoding, "
        f"{BANDWIDTH:.0%} of its bandwidth; {1000 * STEP_SECONDS:.0f} ms a decoding step besides",
        f"allowances: {allowed}{FRAGMENTS:.0%} of {of_what} for fragments",
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
    if settings.use_vllm and not planned.recipe.asks_a_server and settings.vllm_max_model_length is None:
        found.append("without `vllm_max_model_length` vLLM asks for a cache of the model's whole context: unchecked")
    if settings.tools:
        found.append("tools take no time")
    if planned.sampling.falls_short:
        most = settings.dynamic_sampling_max_rounds
        found.append(f"`dynamic_sampling_max_rounds: {most}` ends a rollout before it is full")
    if planned.shape.num_other:
        found.append(
            "images take neither tokens nor activations; an evaluation of them is one call; of weights outside "
            "the layers, such as a vision tower's, only the memory counts"
        )
    for name in ("dynamic_sampling_memory", "dynamic_sampling_screen"):
        if getattr(settings, name) not in (False, "off"):
            found.append(f"what `{name}` spares is not known beforehand, and left out")
    return found


def _section(title: str) -> list[str]:
    return ["", title]


def _wrapped(text: str, bullet: str = "") -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=f"  {bullet}",
        subsequent_indent="  " + " " * len(bullet),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _row(name: str, value: str) -> str:
    return f"  {name:<44}{value:>16}"


def _count(number: float) -> str:
    return format_count(number, billion="B")

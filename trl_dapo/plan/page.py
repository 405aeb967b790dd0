# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""A plan in at most 80 columns."""

import argparse
import sys
import textwrap

from ..settings.arguments import one_line
from .hardware import GPUS
from .memory import gib
from .planning import ACCEPTANCE, Plan, plan
from .suggestions import suggest


WIDTH = 80
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
        help=f"8xH100-80GB, or 64+8xH100-80GB where 64 train and 8 serve vLLM; known: {', '.join(GPUS)} "
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
    """
    Runs `trl-dapo plan`.

    Returns:
        `int`: 0 where the run fits, 1 where it does not, 2 after a mistake, told in one line.
    """
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
    recipe, settings, shape = planned.recipe, planned.recipe.settings, planned.shape
    model = "a tiny model" if settings.tiny_model else settings.model_name_or_path
    owner = "this machine" if recipe.cluster.gpu.name == "CPU" else "a GPU that trains"
    lines = [
        f"{recipe.name} on {recipe.cluster}, {SHARDINGS[recipe.sharding.kind]}",
        *_wrapped(planned.batch_arithmetic),
        *_wrapped(
            f"Model: {model}, {_count(shape.num_parameters)} weights, {_count(planned.weights.num_trained)} train. "
            f"Sizes: {planned.source}."
        ),
        *_section(f"Memory of {owner}: {gib(recipe.cluster.gpu.memory)}"),
        *(_row(PARTS.get(name, name), gib(size)) for name, size in planned.training.items() if size),
        _row("peak while updating", gib(planned.peak_updating)),
        _row("peak while sampling", gib(planned.peak_sampling)),
    ]
    if planned.vllm:
        where = "a GPU of the server" if recipe.asks_a_server else "the same GPU"
        awake = " while it is awake" if settings.vllm_enable_sleep_mode and not recipe.asks_a_server else ""
        lines += _section(f"Memory of vLLM on {where}{awake}")
        lines += [_row(name, gib(size)) for name, size in planned.vllm.items()]
        lines += [_row("tokens that an engine's cache holds", f"{planned.engine.cache_tokens:,}")]
    kept = planned.num_checkpoints
    disk = f"{gib(planned.checkpoint)} a checkpoint, all of which are kept"
    if kept is not None:
        disk = f"{gib(planned.checkpoint)} a checkpoint, {gib((kept + 1) * planned.checkpoint)} while the oldest "
        disk += f"of {kept + 1} is still there"
    lines += [
        *_section("Disk"),
        *_wrapped(disk),
        *_section("Time of a rollout, an estimate"),
        _row("groups sampled", f"{planned.num_groups:,.0f}"),
        _row("rounds", f"{sum(often for often, _ in planned.rounds):.2f}"),
        _row("tokens sampled", _count(planned.num_groups * settings.num_generations * planned.lengths.mean)),
        _row("tokens trained on", _count(planned.num_rows * planned.lengths.mean)),
        *(_row(PARTS.get(name, name), _time(seconds)) for name, seconds in planned.seconds.items()),
        _row("together, one ahead" if settings.rollouts_ahead else "together", _time(planned.rollout_seconds)),
    ]
    if planned.num_problems:
        lines.append(_row("with its share of the evaluations", _time(planned.seconds_with_evaluation)))
    longest = max(planned.seconds, key=planned.seconds.__getitem__)
    said = f"Longest: {PARTS.get(longest, longest)}, {planned.seconds[longest] / sum(planned.seconds.values()):.0%}. "
    said += f"For {_time(planned.tail_seconds)} of sampling less than half of an engine's completions are left."
    if planned.idle_share:
        said += f" GPUs wait for one another {planned.idle_share:.0%} of their time."
    if planned.num_problems:
        every = f"every {planned.evaluation_every:.3g} rollouts"
        said += f" An evaluation: {_time(planned.evaluation_seconds)}, {every}."
    if planned.num_rollouts is not None:
        run = _time(planned.num_rollouts * planned.seconds_with_evaluation)
        said += f" The run: {planned.num_rollouts:,.0f} rollouts, {run}."
    lines += _wrapped(said)
    lines += [*_section("Assumed"), *(line for text in planned.assumptions for line in _wrapped(text, "- "))]
    # What spares less than the page can show is no help.
    before = _time(planned.seconds_with_evaluation)
    suggestions = [
        (words, other)
        for words, other in suggest(planned)
        if not planned.fits or _time(other.seconds_a_row * planned.num_rows) != before
    ]
    if suggestions:
        lines += _section("Would help most")
        for words, other in suggestions:
            after = other.seconds_a_row * planned.num_rows
            effect = f"{before} -> {_time(after)} a rollout"
            if other.num_rows != planned.num_rows:
                effect += "'s prompts"
            if other.num_steps > planned.num_steps:
                steps = f"{other.num_steps:.3g} optimizer steps a rollout, not {planned.num_steps:.3g}"
                effect += f"; further off-policy: {steps}"
            if not planned.fits:
                left = "" if other.fits else ", still too much"
                effect = f"peak {gib(planned.peak)} -> {gib(other.peak)}{left}; {effect}"
            lines += _wrapped(f"{words}: {effect}", "- ")
    return "\n".join([*lines, "", *textwrap.wrap(verdict(planned), WIDTH)])


def verdict(planned: Plan) -> str:
    """One sentence."""
    if planned.fits:
        return f"Fits: peak {gib(planned.peak)} of {gib(planned.recipe.cluster.gpu.memory)}."
    return f"Does not fit: {'; '.join(planned.problems)}."


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
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return f"{number:.0f}"


def _time(seconds: float) -> str:
    for unit, size in (("d", 172_800), ("h", 7_200), ("min", 120)):
        if seconds >= size:
            return f"{seconds / {'d': 86_400, 'h': 3_600, 'min': 60}[unit]:.1f} {unit}"
    return f"{seconds:.1f} s"

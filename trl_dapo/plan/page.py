# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""A plan in at most 80 columns."""

import argparse
import sys
import textwrap

from ..arguments import one_line
from .hardware import GPUS
from .planning import ACCEPTANCE, Plan, gib, plan


WIDTH = 80


def add_plan_arguments(parser: argparse.ArgumentParser):
    """Adds the options of `trl-dapo plan`."""
    parser.add_argument("--config", required=True, metavar="RECIPE", help="the recipe")
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
    parser.add_argument("--accelerate_config", metavar="FILE", help="accelerate's file (default: the recipe's)")


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
    sharding = {"none": "one process", "ddp": "DDP", "fsdp2": "FSDP2"}.get(planned.sharding.kind)
    sharding = sharding or f"ZeRO-{planned.sharding.kind[-1]}"
    lines = [
        f"{planned.name} on {planned.cluster}, {sharding}",
        *_wrapped(planned.batch_arithmetic, 2),
        *_wrapped(
            f"Model: {planned.model}, {planned.num_parameters / 1e9:.2f} billion weights, "
            f"{planned.num_trained / 1e9:.3g} billion train; from {planned.model_source}",
            2,
        ),
        "",
        f"Memory of one GPU that trains, of {gib(planned.cluster.gpu.memory)}",
        *(_row(name, gib(size)) for name, size in planned.training.items()),
        _row("peak while updating", gib(planned.peak_updating)),
        _row("peak while sampling", gib(planned.peak_sampling)),
    ]
    if planned.vllm:
        where = "a server's GPU" if planned.cluster.num_serve else "the same GPU"
        lines += [
            f"vLLM on {where}, awake",
            *(_row(name, gib(size)) for name, size in planned.vllm.items()),
            _row("tokens that the cache of an engine holds", f"{planned.cache_tokens:,}"),
        ]
    lines += [
        f"Disk: {gib(planned.checkpoint)} a checkpoint, {gib(planned.disk)} for all that are kept",
        "",
        "Time of a rollout (an estimate)",
        _row("groups sampled, in rounds", f"{planned.num_groups:,.0f} in {planned.num_rounds:.2f}"),
        _row("tokens sampled", _count(planned.tokens_sampled)),
        _row("tokens trained on", _count(planned.tokens_trained)),
        *(_row(name, _time(seconds)) for name, seconds in planned.seconds.items()),
        _row("in all", _time(planned.rollout_seconds)),
    ]
    longest = max(planned.seconds, key=planned.seconds.get)
    share = planned.seconds[longest] / planned.rollout_seconds
    lines += _wrapped(
        f"Most is {longest}, {share:.0%}; less than half of an engine's completions are left for "
        f"{_time(planned.tail_seconds)} of sampling. GPUs idle {planned.idle_share:.0%} of the time.",
        2,
    )
    if planned.evaluation_every:
        lines += _wrapped(
            f"Evaluation: {_time(planned.evaluation_seconds)}, every {planned.evaluation_every:g} rollouts.", 2
        )
    if planned.num_rollouts is not None:
        run = _time(planned.num_rollouts * planned.seconds_with_evaluation)
        lines += _wrapped(f"The run: {planned.num_rollouts:,.0f} rollouts, {run}.", 2)
    lines += ["", "Assumed", *(line for text in planned.assumptions for line in _wrapped(f"- {text}", 2, 4))]
    if planned.suggestions:
        lines += ["", "Would help"]
        for one in planned.suggestions:
            fits = "" if one.fits else ", still too much"
            now = f"{_time(one.seconds)} a rollout in place of {_time(planned.seconds_with_evaluation)}"
            if not planned.fits:
                now = f"peak {gib(one.peak)} in place of {gib(planned.peak)}{fits}, {_time(one.seconds)} a rollout"
            lines += _wrapped(f"- {one.setting}: {now}", 2, 4)
    return "\n".join([*lines, "", *_wrapped(verdict(planned), 0)])


def verdict(planned: Plan) -> str:
    """One sentence."""
    if planned.fits:
        return f"Fits: peak {gib(planned.peak)} of {gib(planned.cluster.gpu.memory)}."
    return f"Does not fit: {'; '.join(planned.problems)}."


def _wrapped(text, indent, hanging=None):
    after = " " * (indent + 2 if hanging is None else hanging)
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=" " * indent,
        subsequent_indent=after,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _row(name, value):
    return f"  {name:<44}{value:>16}"


def _count(number):
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return f"{number:.0f}"


def _time(seconds):
    for unit, size in (("d", 172_800), ("h", 7_200), ("min", 120)):
        if seconds >= size:
            return f"{seconds / {'d': 86_400, 'h': 3_600, 'min': 60}[unit]:.1f} {unit}"
    return f"{seconds:.1f} s"

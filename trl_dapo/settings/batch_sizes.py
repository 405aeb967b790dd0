# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
Conversion of batch sizes in prompts to TRL's batch sizes in micro-batches, and the line that gives both.

Needs integers only, and no torch.
"""

import math
from collections.abc import Mapping
from typing import Any


class ComputedSize(int):
    """
    A batch size that was computed, not set by the user.

    `dataclasses.replace` passes every field of a config to the new one. This type tells the new config which sizes it
    has to compute again from the fields that changed.
    """


def size_batches(settings: Any, defaults: Mapping[str, Any], num_processes: int) -> dict[str, int]:
    """Return TRL's batch sizes for `prompts_per_rollout` and `prompts_per_step`, one of which may be `None`."""
    num_generations, per_device_train_batch_size = settings.num_generations, settings.per_device_train_batch_size
    rollout, step = settings.prompts_per_rollout, settings.prompts_per_step
    name = "prompts_per_rollout" if step is None else "prompts_per_step"
    rollout = step if rollout is None else rollout
    step = rollout if step is None else step
    if rollout % step:
        raise ValueError(
            f"`prompts_per_rollout={rollout}` is not a multiple of `prompts_per_step={step}`. The nearest values of "
            f"`prompts_per_rollout` that are: {_nearest_multiples(rollout, step)}."
        )
    rows, microbatch = step * num_generations, num_processes * per_device_train_batch_size
    if rows % microbatch:
        fitting = _nearest_multiples(step, microbatch // math.gcd(microbatch, num_generations))
        smaller = [size for size in range(1, per_device_train_batch_size) if rows % (size * num_processes) == 0]
        raise ValueError(
            f"An optimizer step of `{name}={step}` x `num_generations={num_generations}` = {rows} rows cannot be "
            f"divided into micro-batches of {describe_launch(num_processes, per_device_train_batch_size)} = "
            f"{_count(microbatch, 'row')}. Nearest `{name}` that fits: {fitting}."
            + (f" Or set `per_device_train_batch_size={smaller[-1]}`." if smaller else "")
        )
    accumulation = rows // microbatch
    sizes = {
        "gradient_accumulation_steps": accumulation,
        "steps_per_generation": accumulation * (rollout // step),
        "generation_batch_size": rollout * num_generations,
    }
    # A config that is made from the fields of another one has the computed sizes set.
    for size, computed in sizes.items():
        if (value := getattr(settings, size)) not in (computed, defaults[size]):
            raise ValueError(
                f"`{size}={value}` contradicts {_count(rollout, 'prompt')} per rollout and {_count(step, 'prompt')} "
                f"per optimizer step: with {describe_launch(num_processes, per_device_train_batch_size)} they give "
                f"`{size}={computed}`. Leave out `{size}`, or leave out `prompts_per_rollout` and `prompts_per_step`."
            )
    return sizes


def count_microbatches(settings: Any, num_processes: int) -> int:
    """
    Return the number of micro-batches in a rollout whose size is given in rows or micro-batches.

    Raises:
        ValueError: If the two sizes contradict each other, or the rows cannot be divided into micro-batches.
    """
    size, steps = settings.per_device_train_batch_size, settings.steps_per_generation
    microbatch, rows = num_processes * size, settings.generation_batch_size
    launch = describe_launch(num_processes, size)
    if rows is None:
        return steps or settings.gradient_accumulation_steps
    if steps is not None and rows != microbatch * steps:
        raise ValueError(
            f"`generation_batch_size={rows}` contradicts `steps_per_generation={steps}`, which gives "
            f"{_count(microbatch * steps, 'row')} with {launch}. Leave one of them out."
        )
    if rows % microbatch:
        raise ValueError(
            f"`generation_batch_size={rows}` cannot be divided into micro-batches of {launch} = "
            f"{_count(microbatch, 'row')}. Nearest `generation_batch_size` that can: "
            f"{_nearest_multiples(rows, microbatch)}."
        )
    return rows // microbatch


def describe_split_group(
    settings: Any, steps_per_generation: int, num_processes: int, generation_batch_size: int | None
) -> str:
    """Return why a rollout does not consist of whole groups, with the nearest sizes that would."""
    num_generations, size = settings.num_generations, settings.per_device_train_batch_size
    launch, microbatch = describe_launch(num_processes, size), num_processes * size
    num_rows = microbatch * steps_per_generation
    divisors = [size for size in range(2, num_rows + 1) if num_rows % size == 0]
    nearest = [size for size in divisors if size < num_generations][-1:]
    nearest += [size for size in divisors if size > num_generations][:1]
    if generation_batch_size is None:
        name, unit = "per_device_train_batch_size", num_generations // math.gcd(num_generations, num_rows // size)
    else:
        name, size, unit = "generation_batch_size", generation_batch_size, math.lcm(num_generations, microbatch)
    fitting = " or ".join(map(str, nearest))
    return (
        f"A rollout of {launch} x {_count(steps_per_generation, 'micro-batch')} = {_count(num_rows, 'row')} cannot be "
        f"divided into groups of `num_generations={num_generations}` completions. "
        + (f"Nearest `num_generations` that fits: {fitting}. " if fitting else "")
        + f"Nearest `{name}` that fits: {_nearest_multiples(size, unit)}."
    )


def describe_launch(num_processes: int, per_device_train_batch_size: int) -> str:
    return f"{_count(num_processes, 'process')} x `per_device_train_batch_size={per_device_train_batch_size}`"


def describe_batches(settings: Any, sizes: Mapping[str, int], num_processes: int) -> str:
    """Return one line that gives a rollout in prompts, rows, processes, micro-batches and optimizer steps."""
    num_generations, size = settings.num_generations, settings.per_device_train_batch_size
    num_microbatches, accumulation = sizes["steps_per_generation"], sizes["gradient_accumulation_steps"]
    num_rows, longest = size * num_processes * num_microbatches, settings.max_tokens_per_microbatch
    num_steps = num_microbatches * settings.num_iterations / accumulation
    step = size * num_processes * accumulation / num_generations
    if longest is None:
        cut = f"{_count(size, 'row')} x {_count(num_microbatches, 'micro-batch')}"
    else:
        cut = f"{_count(size * num_microbatches, 'row')} in micro-batches of at most {_count(longest, 'token')}"
    return (
        f"Rollout: {_count(num_rows // num_generations, 'prompt')} x "
        f"{_count(num_generations, 'completion')} = {_count(num_rows, 'row')} = "
        f"{_count(num_processes, 'process')} x {cut}; {_count(num_steps, 'optimizer step')} of "
        f"{_count(step, 'prompt')}"
    )


def _nearest_multiples(value: int, unit: int) -> str:
    """Return the multiples of `unit` just below and above `value`, which is not one."""
    below = value // unit * unit
    return f"{below} or {below + unit}" if below else f"{unit}"


def _count(number: float, noun: str) -> str:
    if number == 1:
        return f"{number:.10g} {noun}"
    ending = "es" if noun.endswith(("s", "ch")) else "s"
    return f"{number:.10g} {noun}{ending}"

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
Seconds of a rollout, by a roofline: whatever takes longest of computing, reading memory and talking to other GPUs.
Estimates. Pure functions.
"""

import math
from dataclasses import dataclass
from functools import cached_property

from ..models import ModelShape
from .hardware import GPU


# Shares of the peak that are reached, all of them assumptions that a plan prints.
TRAIN_MFU = 0.31  # of the floating point operations, in training and log-probabilities; measured on one H100
DECODE_MFU = 0.50  # the same, in vLLM
BANDWIDTH = 0.70  # of a memory's, or a link's, bandwidth
STEP_SECONDS = 0.004  # a decoding step beyond reading and computing: scheduler, sampler, launches
REDUCE_SECONDS = 15e-6  # one all-reduce of tensor parallelism beyond its bytes; there are two a layer
TRANSFORMERS_STEP_SECONDS = 0.030  # a decoding step of transformers' `generate`, launched layer by layer
PADDING = 0.10  # of the tokens of a micro-batch, as much as a budget lets them have
GRID = 64  # points in time at which the last completions are looked at


@dataclass(frozen=True)
class Lengths:
    """Lengths of completions between 0 and a maximum, of which nothing but the mean is known."""

    # The distribution of largest entropy has a density in proportion to `exp(-r x)` on `[0, maximum]` (Jaynes 1957,
    # https://doi.org/10.1103/PhysRev.106.620); a mean of half the maximum makes it flat.

    mean: float
    maximum: float

    @cached_property
    def rate(self) -> float:
        """`r`, in units of the maximum: where `1 / r - 1 / (exp(r) - 1)` is the mean."""
        low, high = -60.0, 60.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if _mean(middle) > self.mean / self.maximum else (low, middle)
        return low

    def survival(self, share: float) -> float:
        """Share of completions that are longer than this share of the maximum."""
        rate = self.rate
        if abs(rate) < 1e-6:
            return 1 - share
        return (math.exp(-rate * share) - math.exp(-rate)) / (1 - math.exp(-rate))

    @cached_property
    def mean_square(self) -> float:
        """Mean of the squared length, in tokens squared."""
        # The integral of 2 x survival(x), by the midpoint rule.
        points = [(i + 0.5) / GRID for i in range(GRID)]
        return self.maximum**2 * sum(2 * x * self.survival(x) for x in points) / GRID


def _mean(rate: float) -> float:
    return 0.5 - rate / 12 if abs(rate) < 1e-4 else 1 / rate - 1 / math.expm1(rate)


@dataclass(frozen=True)
class Engine:
    """One engine that samples."""

    gpu: GPU
    num_gpus: int  # that share its weights (tensor parallelism)
    num_engines: int  # of its kind
    cache_tokens: float  # whose keys and values it holds
    max_num_seqs: int  # that it works on at once
    step_seconds: float = STEP_SECONDS  # beyond reading and computing
    weight_bytes: int = 2


def decode_step_seconds(shape: ModelShape, engine: Engine, num_sequences: float, context: float) -> float:
    """Of one token for each of some sequences, whose mean length is `context`."""
    # Reading all weights and their keys and values, or computing `2 N` operations each, whichever takes longer
    # (section 2 of https://huggingface.co/papers/2211.05102), and the time of a step that is neither.
    gpu, shards = engine.gpu, engine.num_gpus
    # Experts are read where one of the sequences needs them: nearly all, from some dozens on.
    weights = engine.weight_bytes * shape.num_parameters / shards
    cache = num_sequences * context * shape.kv_bytes / min(shards, shape.num_kv_heads)
    reading = (weights + cache) / (BANDWIDTH * gpu.bandwidth)
    computing = 2 * shape.num_multiplied * num_sequences / shards / (DECODE_MFU * gpu.flops)
    step = engine.step_seconds
    if shards > 1:
        reduced = 2 * 2 * num_sequences * shape.hidden_size / (BANDWIDTH * gpu.link)  # twice what a rank holds
        step += 2 * shape.num_layers * (REDUCE_SECONDS + reduced)
    return max(reading, computing) + step


def sampling_seconds(
    shape: ModelShape, engine: Engine, num_sequences: float, lengths: Lengths, prompt: float, num_generations: int = 1
) -> tuple[float, float]:
    """Until an engine has finished some completions, and those in which less than half of what it ran is left."""
    # It works on as many at once as it may and as its cache holds. While others wait, that number stays: tokens over
    # tokens a second. Then the last of them thin out as the lengths say, until one of the maximum is left. Each
    # group's prompt is read once, at `2 N` operations a token.
    mean_context = prompt + lengths.mean_square / (2 * lengths.mean)  # at a token drawn at random
    running = max(1.0, min(num_sequences, engine.max_num_seqs, engine.cache_tokens / mean_context))
    waiting = max(0.0, num_sequences - running)
    seconds = waiting * lengths.mean / running * decode_step_seconds(shape, engine, running, mean_context)
    tail = 0.0
    for point in range(GRID):
        share = (point + 0.5) / GRID
        left = max(1.0, running * lengths.survival(share))
        step = decode_step_seconds(shape, engine, left, prompt + share * lengths.maximum) * lengths.maximum / GRID
        seconds += step
        tail += step * (left < running / 2)
    prefill = 2 * shape.num_multiplied * prompt * num_sequences / num_generations
    return seconds + prefill / (engine.num_gpus * DECODE_MFU * engine.gpu.flops), tail


def training_flops(
    shape: ModelShape, rows: float, lengths: Lengths, prompt: float, passes: float, causal: bool
) -> float:
    """Of some rows: `2 N` a token and pass, and in attention `4 L A` a pair of tokens, half of them if causal."""
    # Appendix B of https://huggingface.co/papers/2204.02311, where forward and backward are three passes.
    tokens = prompt + lengths.mean
    squares = prompt**2 + 2 * prompt * lengths.mean + lengths.mean_square
    pairs = 4 * shape.num_layers * shape.num_heads * shape.head_dim * (0.5 if causal else 1)
    return passes * rows * (2 * shape.num_multiplied * tokens + pairs * squares)


def training_seconds(flops: float, gpu: GPU, num_gpus: int, gathered: float, num_passes: float, link: float) -> float:
    """Of passes over a rollout on all GPUs, each of which receives `gathered` bytes for one micro-batch."""
    # Computing and gathering overlap (section 4.3 of https://huggingface.co/papers/2304.11277).
    computing = flops / (1 - PADDING) / (num_gpus * TRAIN_MFU * gpu.flops)
    return max(computing, num_passes * gathered / (BANDWIDTH * link))


def expected_rounds(first: float, needed: int, acceptance: float, carries: bool) -> list[tuple[float, float]]:
    """The rounds of a rollout, the first of `first` groups: how often there is one, in the mean, and its groups."""
    # It finds `n a` of them, with the standard deviation `sqrt(n a (1 - a))`. Where that is too few, a second asks for
    # what is missing: the tail of the normal distribution, and its mean beyond a point. With carry nothing is sampled
    # in the mean that is not needed.
    deviation = math.sqrt(first * acceptance * (1 - acceptance)) or 1e-9
    margin = (first * acceptance - needed) / deviation
    short = math.erfc(margin / math.sqrt(2)) / 2
    missing = deviation * (math.exp(-(margin**2) / 2) / math.sqrt(2 * math.pi) - margin * short)
    second = missing / short / acceptance if short > 1e-9 else 0.0
    return [(1.0, needed / acceptance - short * second if carries else first), (short, second)]

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""A rollout: its rows, steps and micro-batches; who samples it, in how many rounds, and how long it takes.

Seconds are estimates, by a roofline: whatever takes longest of computing, reading memory and talking to other GPUs.
"""

import math
from dataclasses import dataclass
from functools import cached_property

from ..models import ModelShape
from ..sampling.round_size import MIN_RATE, AcceptanceRate
from ..settings.batch_sizes import count_microbatches, describe_batches, describe_torn_group, size_batches
from .memory import VLLM_WORK, vllm_cache_tokens
from .recipe import GPU, GPUS_PER_MACHINE, Recipe, declared_fields


SERVER_UTILIZATION, SERVER_SEQUENCES = 0.9, 1024  # `vllm serve`'s own, on GPUs of 70 GiB and more
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
            mean = 0.5 - middle / 12 if abs(middle) < 1e-4 else 1 / middle - 1 / math.expm1(middle)
            low, high = (middle, high) if mean > self.mean / self.maximum else (low, middle)
        return low

    def survival(self, share: float) -> float:
        """Share of completions that are longer than this share of the maximum."""
        rate = self.rate
        if abs(rate) < 1e-6:
            return 1 - share
        return (math.exp(-rate * share) - math.exp(-rate)) / (1 - math.exp(-rate))

    @cached_property
    def mean_square(self) -> float:
        # The integral of 2 x survival(x), by the midpoint rule.
        return self.maximum**2 * sum(2 * x * self.survival(x) for x in ((i + 0.5) / GRID for i in range(GRID))) / GRID


@dataclass(frozen=True)
class Engine:
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
        if left < running / 2:
            tail += step
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
    return max(flops / (1 - PADDING) / (num_gpus * TRAIN_MFU * gpu.flops), num_passes * gathered / (BANDWIDTH * link))


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


@dataclass(frozen=True)
class Batches:
    """Batch sizes of a recipe, whose completions have `mean_length` tokens in the mean."""

    recipe: Recipe
    mean_length: float

    @cached_property
    def sizes(self) -> dict[str, int]:
        """TRL's batch sizes, as [`DAPOConfig`] works them out on this number of processes."""
        settings, processes = self.recipe.settings, self.recipe.cluster.num_train
        rows = settings.per_device_train_batch_size
        if settings.prompts_per_rollout is not None or settings.prompts_per_step is not None:
            return size_batches(settings, declared_fields(), processes)
        steps = count_microbatches(settings, processes)
        batch = rows * processes * steps
        if batch % settings.num_generations:
            raise ValueError(describe_torn_group(settings, steps, processes, settings.generation_batch_size))
        accumulated = {"gradient_accumulation_steps": settings.gradient_accumulation_steps}
        return accumulated | {"steps_per_generation": steps, "generation_batch_size": batch}

    @property
    def arithmetic(self) -> str:
        """The line that a run begins with."""
        return describe_batches(self.recipe.settings, self.sizes, self.recipe.cluster.num_train)

    @property
    def num_rows(self) -> int:
        """Rows of a rollout, all processes together."""
        return self.sizes["generation_batch_size"]

    @property
    def num_steps(self) -> float:
        """Optimizer steps of a rollout."""
        steps = self.sizes["steps_per_generation"] * self.recipe.settings.num_iterations
        return steps / self.sizes["gradient_accumulation_steps"]

    @property
    def num_rollouts(self) -> float | None:
        """Rollouts of the run, where `max_steps` says its end."""
        max_steps = self.recipe.settings.max_steps
        return max_steps / self.num_steps if max_steps and max_steps > 0 else None

    @property
    def longest_row(self) -> int:
        """Tokens of a prompt and a completion at most."""
        settings = self.recipe.settings
        row = self.recipe.longest_prompt + settings.max_completion_length
        return min(row, settings.vllm_max_model_length or row) if settings.use_vllm else row

    @property
    def microbatch_tokens(self) -> int:
        """Tokens of a micro-batch at most; a row that is longer than the budget goes alone."""
        settings = self.recipe.settings
        if settings.max_tokens_per_microbatch:
            return max(settings.max_tokens_per_microbatch, self.longest_row)
        return settings.per_device_train_batch_size * self.longest_row

    @cached_property
    def num_microbatches(self) -> int:
        """Of an optimizer step on one process."""
        if not self.recipe.settings.max_tokens_per_microbatch:
            return self.sizes["gradient_accumulation_steps"]
        rows = self.sizes["gradient_accumulation_steps"] * self.recipe.settings.per_device_train_batch_size
        return math.ceil(rows * (self.recipe.prompt + self.mean_length) / (1 - PADDING) / self.microbatch_tokens)


@dataclass(frozen=True)
class Sampling:
    """What sampling takes: of groups the share `acceptance` is accepted; transformers' weights have `held` bytes."""

    recipe: Recipe
    shape: ModelShape
    batches: Batches
    lengths: Lengths
    acceptance: float
    held: int

    @cached_property
    def engine(self) -> Engine:
        settings, cluster = self.recipe.settings, self.recipe.cluster
        rows = self.batches.num_rows // cluster.num_train
        if not settings.use_vllm:
            step = TRANSFORMERS_STEP_SECONDS if cluster.gpu.name != "CPU" else STEP_SECONDS
            return Engine(cluster.gpu, 1, cluster.num_train, math.inf, rows, step, self.held)
        if self.recipe.asks_a_server:
            shards = math.gcd(min(cluster.num_serve, GPUS_PER_MACHINE), self.shape.num_heads)
            num_engines, sequences = cluster.num_serve // shards, SERVER_SEQUENCES
        else:
            shards = settings.vllm_tensor_parallel_size
            num_engines, sequences = cluster.num_train // shards, rows * shards  # as TRL starts it
            if cluster.num_train % shards:
                raise ValueError(f"`vllm_tensor_parallel_size={shards}` does not divide {cluster.num_train} GPUs.")
        if self.shape.num_heads % shards:
            raise ValueError(f"`vllm_tensor_parallel_size={shards}` does not divide {self.shape.num_heads} heads.")
        cache = vllm_cache_tokens(self.shape, cluster.gpu.memory, self._utilization, shards)
        return Engine(cluster.gpu, shards, num_engines, cache, sequences)

    @property
    def _utilization(self) -> float:
        return SERVER_UTILIZATION if self.recipe.asks_a_server else self.recipe.settings.vllm_gpu_memory_utilization

    @property
    def vllm_share(self) -> float:
        """Bytes of a GPU that vLLM takes."""
        return self._utilization * self.recipe.cluster.gpu.memory

    @property
    def vllm_memory(self) -> dict[str, float]:
        """Bytes by part of vLLM, on one of its GPUs; empty without it."""
        if not self.recipe.settings.use_vllm:
            return {}
        weights = 2 * self.shape.num_parameters / self.engine.num_gpus
        return {"weights": weights, "work": VLLM_WORK, "cache": max(0.0, self.vllm_share - weights - VLLM_WORK)}

    @cached_property
    def rounds(self) -> list[tuple[float, float]]:
        """The rounds of a rollout: how often there is one, in the mean, and its groups."""
        settings, target = self.recipe.settings, self.batches.num_rows // self.recipe.settings.num_generations
        if not settings.use_dynamic_sampling or settings.dynamic_sampling_mode == "mask":
            return [(1.0, target)]
        largest = settings.dynamic_sampling_max_round_size or (math.inf if settings.use_vllm else target)
        filling = self._filling(target, largest)
        most = (settings.dynamic_sampling_max_gen_batches or math.inf) * target
        if sum(often * size for often, size in filling) <= most:
            return filling
        num = math.ceil(most / max(size for _, size in filling))  # rounds until it ends at the limit
        return [(num, most / num)]

    def _filling(self, target: int, largest: float) -> list[tuple[float, float]]:
        """The same for a rollout without a limit."""
        settings, replaces = self.recipe.settings, self.recipe.settings.dynamic_sampling_mode == "replace"
        needed = max(1, math.ceil(settings.min_replace_ratio * target)) if replaces else target
        carries = settings.dynamic_sampling_surplus == "carry"
        if settings.batch_multiplier:
            return self._rounds_of(min(settings.batch_multiplier * target, largest), needed)
        if settings.rollouts_ahead > 1:  # groups one by one, as many as it takes
            return [(1.0, needed / max(self.acceptance, MIN_RATE))]
        rate = AcceptanceRate()
        for _ in range(20):  # as sure of the rate as a run is after some rollouts
            rate.update(round(1000 * self.acceptance), 1000)
        first = rate.round_size(target, target, carries=carries, is_rare=bool(settings.rollouts_ahead))
        if first > largest or self.acceptance < MIN_RATE:  # where the sizes of rounds end
            return self._rounds_of(min(first, largest), needed)
        return expected_rounds(first, needed, self.acceptance, carries and not replaces)

    def _rounds_of(self, size: float, needed: int) -> list[tuple[float, float]]:
        num = max(1.0, needed / self.acceptance / size)
        num = num if self.recipe.settings.dynamic_sampling_surplus == "carry" else math.ceil(num - 1e-9)
        return [(num, size)]

    @property
    def num_trained(self) -> float:
        """Rows of a rollout that train, copies among them."""
        settings, num_rows = self.recipe.settings, self.batches.num_rows
        found = self.num_groups * self.acceptance * settings.num_generations
        enough = 0.99 * num_rows * (settings.min_replace_ratio if settings.dynamic_sampling_mode == "replace" else 1)
        return found if settings.use_dynamic_sampling and found < enough else num_rows

    @property
    def num_groups(self) -> float:
        return sum(often * groups for often, groups in self.rounds)

    def seconds_of(self, num_rows: float, num_generations: int) -> tuple[float, float]:
        """Seconds until some rows are sampled, and those of them in which less than half of an engine's are left."""
        each = max(1.0, num_rows / self.engine.num_engines)
        return sampling_seconds(self.shape, self.engine, each, self.lengths, self.recipe.prompt, num_generations)

    @cached_property
    def seconds(self) -> tuple[float, float]:
        """The same of a rollout, in the mean."""
        num = self.recipe.settings.num_generations
        found = [(often, self.seconds_of(groups * num, num)) for often, groups in self.rounds]
        return sum(often * each[0] for often, each in found), sum(often * each[1] for often, each in found)

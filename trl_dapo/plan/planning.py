# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""A plan: what memory, disk and time a recipe needs, put together from `memory` and `speed`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version

from ..models import ModelShape
from ..sampling.acceptance import MIN_RATE, AcceptanceRate
from ..settings.batch_sizes import describe_batches, describe_launch, describe_torn_group, size_batches
from ..settings.ranges import SHARE, check_value
from .hardware import GPUS_PER_MACHINE, NETWORK
from .memory import (
    CONTEXT,
    VLLM_ASLEEP,
    VLLM_WORK,
    activation_bytes,
    checkpoint_bytes,
    gathered_bytes,
    gib,
    quantized_bytes,
    state_bytes,
    vllm_cache_tokens,
)
from .models import TINY, find_shape, shape_of
from .recipe import Recipe, declared_fields, read
from .speed import (
    BANDWIDTH,
    DECODE_MFU,
    PADDING,
    STEP_SECONDS,
    TRAIN_MFU,
    TRANSFORMERS_STEP_SECONDS,
    Engine,
    Lengths,
    expected_rounds,
    sampling_seconds,
    training_flops,
    training_seconds,
)


ACCEPTANCE = 1 / 3  # where docs/benchmarks.md compares the sampling policies
MEAN_SHARE = 1 / 3  # of `max_completion_length`
PROMPT, LONGEST_PROMPT = 256, 2048  # tokens
FRAGMENTS = 0.05  # of a GPU's memory stays free: what the allocator cannot use
SERVER_UTILIZATION, SERVER_SEQUENCES = 0.9, 1024  # `vllm serve`'s own, on GPUs of 70 GiB and more
HOST_LINK = 25e9  # bytes/s between a GPU and its machine's memory: PCIe 4.0 x16
EVALUATION_PROBLEMS = {"aime": 30, "math-500": 500, "math500": 500, "gsm8k": 1319}
OTHER_PROBLEMS = 100  # of an evaluation that is none of these


@dataclass(frozen=True)
class Weights:
    """
    What of a model trains, and how precise it is.

    Attributes:
        num_trained (`int`): Weights that train.
        trained (`int`): Bytes of one of them.
        frozen (`float`): Bytes of all others.
        held, computed (`int`): Bytes of a number that layers pass on, and compute in.
    """

    num_trained: int
    trained: int
    frozen: float
    held: int
    computed: int


@dataclass(frozen=True)
class Plan:
    """
    What a run needs: figures are worked out where they are asked for. Bytes are of one GPU that trains, unless they
    say else; seconds are estimates.

    Args:
        recipe ([`~recipe.Recipe`]): With settings, sharding and GPUs.
        shape ([`~models.ModelShape`]): Of its model.
        source (`str`): Where the shape is from.
        lengths ([`~speed.Lengths`]): Of completions.
        acceptance (`float`): Share of groups that are accepted.
    """

    recipe: Recipe
    shape: ModelShape
    source: str
    lengths: Lengths
    acceptance: float

    # Batches

    @cached_property
    def sizes(self) -> dict[str, int]:
        """TRL's batch sizes, as [`DAPOConfig`] works them out on this number of processes."""
        settings, processes = self.recipe.settings, self.recipe.cluster.num_train
        rows, num_generations = settings.per_device_train_batch_size, settings.num_generations
        if settings.prompts_per_rollout is not None or settings.prompts_per_step is not None:
            return size_batches(settings, declared_fields(), processes)
        steps, asked = settings.steps_per_generation, settings.generation_batch_size
        if asked is None:
            steps = steps or settings.gradient_accumulation_steps
        elif steps is not None and asked != rows * processes * steps:
            raise ValueError(f"`generation_batch_size={asked}` contradicts `steps_per_generation={steps}`: set one.")
        elif asked % (rows * processes):
            micro_batch = describe_launch(processes, rows)
            raise ValueError(f"`generation_batch_size={asked}` rows do not divide by {micro_batch}, a micro-batch.")
        else:
            steps = asked // (rows * processes)
        batch = rows * processes * steps
        if batch % num_generations:
            raise ValueError(describe_torn_group(num_generations, rows, processes, steps, asked))
        return {
            "gradient_accumulation_steps": settings.gradient_accumulation_steps,
            "steps_per_generation": steps,
            "generation_batch_size": batch,
        }

    @property
    def batch_arithmetic(self) -> str:
        """The line that a run begins with."""
        settings = self.recipe.settings
        return describe_batches(
            settings.num_generations,
            settings.per_device_train_batch_size,
            self.recipe.cluster.num_train,
            self.sizes["gradient_accumulation_steps"],
            self.sizes["steps_per_generation"],
            settings.num_iterations,
            settings.max_tokens_per_microbatch,
        )

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
        row = LONGEST_PROMPT + settings.max_completion_length
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
        return math.ceil(rows * (PROMPT + self.lengths.mean) / (1 - PADDING) / self.microbatch_tokens)

    # Memory of training

    @property
    def lora(self) -> tuple | None:
        """Rank and target modules of an adapter."""
        settings = self.recipe.settings
        return (settings.lora_r, settings.lora_target_modules) if settings.use_peft else None

    @cached_property
    def weights(self) -> Weights:
        """
        What trains, by the rules of the libraries: accelerate holds FSDP2's trained weights in float32, DeepSpeed all
        in bfloat16; PEFT an adapter in float32, TRL that of a quantized model in bfloat16. Autocast leaves weights and
        what layers pass on as they were loaded.
        """
        settings, sharding, shape = self.recipe.settings, self.recipe.sharding, self.shape
        mixed = settings.bf16 if settings.bf16 is not None else not settings.fp16
        loaded = 4 if settings.dtype in ("float32", None) else 2
        computed = 2 if mixed or settings.fp16 else loaded
        casts_all = mixed and (sharding.is_deepspeed or sharding.kind == "fsdp2")
        held = computed if casts_all else loaded
        upcast = mixed and sharding.kind == "fsdp2"
        if self.lora is None:
            return Weights(shape.num_parameters, 4 if upcast else held, 0.0, held, computed)
        base, bits = held if sharding.is_deepspeed else loaded, 4 if settings.load_in_4bit else 8
        frozen: float = base * shape.num_parameters
        if settings.load_in_4bit or settings.load_in_8bit:
            frozen = quantized_bytes(shape, bits, settings.use_bnb_nested_quant, base)
        in_half = sharding.is_deepspeed or settings.load_in_4bit or settings.load_in_8bit
        return Weights(shape.num_lora(*self.lora), 2 if in_half and not upcast else 4, frozen, held, computed)

    @cached_property
    def training(self) -> dict[str, float]:
        """Bytes by part, where an update is at its fullest."""
        settings, weights, sharding = self.recipe.settings, self.weights, self.recipe.sharding
        options = settings.accelerator_config if isinstance(settings.accelerator_config, dict) else {}
        syncs_each = (options.get("gradient_accumulation_kwargs") or {}).get("sync_each_batch", False)
        state = state_bytes(
            weights.frozen,
            weights.num_trained,
            weights.trained,
            self._optim,
            sharding,
            self.recipe.cluster.num_train,
            accumulates=self.num_microbatches > 1 and not syncs_each,
        )
        activations = activation_bytes(
            self.shape,
            self.microbatch_tokens,
            self.longest_row,
            weights.held,
            weights.computed,
            settings.gradient_checkpointing,
            self._attention,
            self.lora,
            # TRL before 1.16 makes all logits.
            fused_head=tuple(map(int, version("trl").split(".")[:2])) >= (1, 16),
        )
        if settings.load_in_4bit or settings.load_in_8bit:  # the layer at work is turned back
            activations["work"] += weights.computed * self.shape.largest_linear
        gathered = gathered_bytes(self.shape, sharding, weights.trained if self.lora is None else weights.held)
        context = 0.0 if self.recipe.cluster.gpu.name == "CPU" else CONTEXT
        return {**state, "reference": self._reference, **activations, "gathered": gathered, "context": context}

    @property
    def _reference(self) -> float:
        """Bytes of the model that the KL term compares with; an adapter is switched off instead."""
        settings, sharding = self.recipe.settings, self.recipe.sharding
        if settings.beta == 0 or self.lora is not None:
            return 0.0
        shards = self.recipe.cluster.num_train if sharding.shards_weights else 1
        return self.weights.held * self.shape.num_parameters / shards

    @property
    def _optim(self) -> str:
        return self.recipe.settings.optim or "adamw_torch"  # its default hangs on torch's version, its memory does not

    @property
    def _attention(self) -> str:
        return self.recipe.settings.attn_implementation or "sdpa"

    @property
    def peak_updating(self) -> float:
        """Bytes at most in an update, with what vLLM keeps meanwhile."""
        colocated = self.recipe.settings.use_vllm and not self.recipe.asks_a_server
        asleep = VLLM_ASLEEP if self.recipe.settings.vllm_enable_sleep_mode else self._vllm_share
        return sum(self.training.values()) + (asleep if colocated else 0.0)

    @property
    def peak_sampling(self) -> float:
        """
        Bytes at most while completions are sampled: weights and optimizer state, the largest weight as it is gathered
        for vLLM, and vLLM where it shares the GPU, or the cache of transformers' `generate`.
        """
        kept = sum(self.training[part] for part in ("weights", "optimizer", "reference", "context"))
        if self.recipe.asks_a_server:
            return kept + self._gathered_for_sync
        if self.recipe.settings.use_vllm:
            return kept + self._gathered_for_sync + self._vllm_share
        rows = self.num_rows / self.recipe.cluster.num_train
        row = PROMPT + self.recipe.settings.max_completion_length
        return kept + rows * row * self.shape.kv_bytes / 2 * self.weights.computed

    @property
    def _gathered_for_sync(self) -> float:
        return self.weights.trained * self.shape.num_embedding if self.recipe.sharding.shards_weights else 0.0

    @property
    def peak(self) -> float:
        return max(self.peak_updating, self.peak_sampling)

    # Sampling

    @cached_property
    def engine(self) -> Engine:
        """One of the engines that sample."""
        settings, cluster = self.recipe.settings, self.recipe.cluster
        rows = self.num_rows // cluster.num_train
        if not settings.use_vllm:
            step = TRANSFORMERS_STEP_SECONDS if cluster.gpu.name != "CPU" else STEP_SECONDS
            return Engine(cluster.gpu, 1, cluster.num_train, math.inf, rows, step, self.weights.held)
        if self.recipe.asks_a_server:
            shards = math.gcd(min(cluster.num_serve, GPUS_PER_MACHINE), self.shape.num_heads)
            num_engines, sequences = cluster.num_serve // shards, SERVER_SEQUENCES
        else:
            shards = settings.vllm_tensor_parallel_size
            num_engines, sequences = cluster.num_train // shards, rows * shards  # as TRL starts it
            if cluster.num_train % shards:
                raise ValueError(f"`vllm_tensor_parallel_size={shards}` does not divide {cluster.num_train} GPUs.")
        if self.shape.num_heads % shards:
            heads = f"{self.shape.num_heads} attention heads"
            raise ValueError(f"`vllm_tensor_parallel_size={shards}` does not divide the model's {heads}.")
        cache = vllm_cache_tokens(self.shape, cluster.gpu.memory, self._utilization, shards)
        return Engine(cluster.gpu, shards, num_engines, cache, sequences)

    @property
    def _utilization(self) -> float:
        served = self.recipe.asks_a_server
        return SERVER_UTILIZATION if served else self.recipe.settings.vllm_gpu_memory_utilization

    @property
    def _vllm_share(self) -> float:
        return self._utilization * self.recipe.cluster.gpu.memory

    @property
    def vllm(self) -> dict[str, float]:
        """Bytes by part of vLLM, on one of its GPUs; empty without it."""
        if not self.recipe.settings.use_vllm:
            return {}
        weights = 2 * self.shape.num_parameters / self.engine.num_gpus
        return {"weights": weights, "work": VLLM_WORK, "cache": max(0.0, self._vllm_share - weights - VLLM_WORK)}

    @cached_property
    def rounds(self) -> list[tuple[float, float]]:
        """The rounds of a rollout: how often there is one, in the mean, and its groups."""
        settings, target = self.recipe.settings, self.num_rows // self.recipe.settings.num_generations
        if not settings.use_dynamic_sampling or settings.dynamic_sampling_mode == "mask":
            return [(1.0, target)]
        replaces = settings.dynamic_sampling_mode == "replace"
        needed = max(1, math.ceil(settings.min_replace_ratio * target)) if replaces else target
        carries = settings.dynamic_sampling_surplus == "carry"
        largest = settings.dynamic_sampling_max_round_size or (math.inf if settings.use_vllm else target)
        if settings.batch_multiplier:
            return self._rounds_of(min(settings.batch_multiplier * target, largest), needed)
        rate = AcceptanceRate()
        for _ in range(20):  # as sure of the rate as a run is after some rollouts
            rate.update(round(1000 * self.acceptance), 1000)
        first = rate.round_size(needed, target, is_rare=bool(settings.rollouts_ahead))
        if first > largest or self.acceptance < MIN_RATE:  # where the sizes of rounds end
            return self._rounds_of(min(first, largest), needed)
        return expected_rounds(first, needed, self.acceptance, carries)

    def _rounds_of(self, size: float, needed: int) -> list[tuple[float, float]]:
        num, most = max(1.0, needed / self.acceptance / size), self.recipe.settings.dynamic_sampling_max_rounds
        num = num if self.recipe.settings.dynamic_sampling_surplus == "carry" else math.ceil(num - 1e-9)
        return [(min(num, most) if most > 0 else num, size)]

    @property
    def falls_short(self) -> bool:
        """Whether a rollout ends before it has found the groups that it needs."""
        settings = self.recipe.settings
        if not settings.use_dynamic_sampling or settings.dynamic_sampling_mode == "mask":
            return False
        needed = self.num_rows // settings.num_generations
        needed *= settings.min_replace_ratio if settings.dynamic_sampling_mode == "replace" else 1
        return self.num_groups * self.acceptance < 0.99 * needed

    @property
    def num_groups(self) -> float:
        """Groups that a rollout samples."""
        return sum(often * groups for often, groups in self.rounds)

    def _sample(self, num_rows: float, num_generations: int) -> tuple[float, float]:
        each = max(1.0, num_rows / self.engine.num_engines)
        return sampling_seconds(self.shape, self.engine, each, self.lengths, PROMPT, num_generations)

    @cached_property
    def _sampling(self) -> tuple[float, float]:
        num = self.recipe.settings.num_generations
        found = [(often, self._sample(groups * num, num)) for often, groups in self.rounds]
        seconds, tail = (sum(often * each[part] for often, each in found) for part in (0, 1))
        return seconds, tail

    @property
    def tail_seconds(self) -> float:
        """Of sampling, in which less than half of what an engine had running is left."""
        return self._sampling[1]

    # Time

    def _pass_over(self, rows: float, lengths: Lengths, passes: float, microbatches: float, received: float) -> float:
        flops = training_flops(self.shape, rows, lengths, PROMPT, passes, "flash" in self._attention)
        cluster = self.recipe.cluster
        return training_seconds(flops, cluster.gpu, cluster.num_train, received, microbatches, cluster.link)

    @property
    def _gathers(self) -> float:
        """Bytes that a GPU receives to see all weights once."""
        return 2.0 * self.shape.num_parameters if self.recipe.sharding.shards_weights else 0.0

    @property
    def _num_without_gradient(self) -> int:
        """Passes without gradient over what trains: old log-probabilities, and the reference's."""
        settings = self.recipe.settings
        corrects = settings.use_vllm and settings.vllm_importance_sampling_correction
        return (corrects or self.num_steps > 1) + (settings.beta != 0)

    @cached_property
    def seconds(self) -> dict[str, float]:
        """Seconds of a rollout by part."""
        settings, kind = self.recipe.settings, self.recipe.sharding.kind
        iterations, weights, rows = settings.num_iterations, self.weights, self.num_rows
        microbatches = self.num_microbatches * self.num_steps
        # Of gradients a GPU sends or receives each once where they are sharded, else twice; at every micro-batch with
        # ZeRO-2 and 3, else once an optimizer step.
        reduced = {"none": 0.0, "ddp": 4.0, "zero1": 4.0}.get(kind, 2.0) * weights.num_trained
        reduced /= 1 if kind in ("zero2", "zero3") else self.num_microbatches
        # With an adapter the weights' own gradients, a pass of their own, are not computed.
        passes = 2 + min(1.0, weights.num_trained / self.shape.num_parameters) + settings.gradient_checkpointing
        update = self._pass_over(rows, self.lengths, passes, microbatches / iterations, 2 * self._gathers + reduced)
        logps = self._pass_over(rows, self.lengths, 1, microbatches / iterations, self._gathers)
        return {
            "sampling": self._sampling[0],
            "logps": self._num_without_gradient * logps,
            "update": iterations * update,
            "sync": self._sync_seconds if settings.use_vllm else 0.0,
        }

    @property
    def _sync_seconds(self) -> float:
        """
        In which vLLM gets the weights, once a rollout: what a GPU gathers of others' shards, and what travels to a
        server or is copied beside its own; of LoRA the adapter, while vLLM's base goes to the
        machine's memory and back.
        """
        settings, cluster, weights = self.recipe.settings, self.recipe.cluster, self.weights
        inside = cluster.num_train + cluster.num_serve <= GPUS_PER_MACHINE
        link = BANDWIDTH * (cluster.gpu.link if inside else min(cluster.gpu.link, NETWORK))
        if self.lora is not None and settings.vllm_lora_sync != "merge":
            sleeps = settings.vllm_enable_sleep_mode and not self.recipe.asks_a_server
            base = 2 * self.shape.num_parameters / self.engine.num_gpus
            return weights.trained * weights.num_trained / link + (2 * base / HOST_LINK if sleeps else 0.0)
        num_bytes = (weights.held if self.lora else weights.trained) * self.shape.num_parameters
        gathering = num_bytes / (BANDWIDTH * cluster.link) if self.recipe.sharding.shards_weights else 0.0
        return gathering + num_bytes / (link if self.recipe.asks_a_server else BANDWIDTH * cluster.gpu.bandwidth)

    @property
    def rollout_seconds(self) -> float:
        """Seconds of a rollout: the sum of its parts, or the longer of sampling and training where one runs ahead."""
        seconds = self.seconds
        trains = seconds["logps"] + seconds["update"]
        together = max if self.recipe.settings.rollouts_ahead else sum
        return together((seconds["sampling"], trains)) + seconds["sync"]

    @property
    def idle_share(self) -> float:
        """Of GPU time, in which a GPU that trains waits for the server's, or the server's for it."""
        cluster, seconds = self.recipe.cluster, self.seconds
        if not cluster.num_serve:
            return 0.0
        busy = cluster.num_train * (seconds["logps"] + seconds["update"]) + cluster.num_serve * seconds["sampling"]
        return 1 - busy / ((cluster.num_train + cluster.num_serve) * self.rollout_seconds)

    # Evaluation

    @property
    def num_problems(self) -> int:
        """Of an evaluation in training; 0 without one."""
        settings = self.recipe.settings
        if settings.eval_strategy in ("no", False, None):
            return 0
        name = str(settings.eval_dataset_name).lower()
        known = (num for key, num in EVALUATION_PROBLEMS.items() if key in name)
        return settings.eval_dataset_limit or next(known, OTHER_PROBLEMS)

    @property
    def evaluation_every(self) -> float:
        """Rollouts between two evaluations."""
        settings = self.recipe.settings
        if not self.num_problems or settings.eval_strategy == "epoch":
            return math.inf
        steps = settings.eval_steps or settings.logging_steps
        return (steps if steps >= 1 else steps * settings.max_steps) / self.num_steps

    @cached_property
    def evaluation_seconds(self) -> float:
        """Seconds of one: sampling, and the passes of its loss over rows that are padded to the longest."""
        if not self.num_problems:
            return 0.0
        settings, num_gpus = self.recipe.settings, self.recipe.cluster.num_train
        k = settings.num_generations_eval or settings.num_generations
        rows, at_once = self.num_problems * k, settings.per_device_eval_batch_size * num_gpus
        calls, in_call = (1, rows) if settings.use_vllm else (math.ceil(rows / at_once), at_once)
        whole = Lengths(0.99 * self.lengths.maximum, self.lengths.maximum)
        loss = self._pass_over(rows, whole, 1 + self._num_without_gradient, rows / at_once, 2 * self._gathers)
        return calls * self._sample(in_call, k)[0] + loss

    @property
    def seconds_a_row(self) -> float:
        """Of a rollout with its share of the evaluations, for a row that trains: rollouts of other sizes compare."""
        return self.seconds_with_evaluation / self.num_rows

    @property
    def seconds_with_evaluation(self) -> float:
        """Seconds of a rollout with its share of the evaluations."""
        return self.rollout_seconds + self.evaluation_seconds / self.evaluation_every

    # Disk, verdict

    @property
    def checkpoint(self) -> float:
        """Bytes on disk of one checkpoint, of all processes."""
        settings, weights = self.recipe.settings, self.weights
        if settings.save_strategy in ("no", False):
            return 0.0
        trains = (weights.frozen, weights.num_trained, weights.trained)
        is_adapter = self.lora is not None
        return checkpoint_bytes(*trains, self._optim, self.recipe.sharding, settings.save_only_model, is_adapter)

    @property
    def num_checkpoints(self) -> int | None:
        """Checkpoints that are kept at once; `None` where nothing limits them."""
        return self.recipe.settings.save_total_limit

    @cached_property
    def problems(self) -> list[str]:
        """Why it does not fit; empty where it does."""
        found, memory = [], self.recipe.cluster.gpu.memory
        if self.vllm and self.engine.cache_tokens < self.longest_row:
            found.append(
                f"vLLM's share of {gib(self._vllm_share)} leaves a cache of {self.engine.cache_tokens:,} tokens, less "
                f"than the {self.longest_row:,} of one prompt and completion"
            )
        for moment, peak in (("updating", self.peak_updating), ("sampling", self.peak_sampling)):
            if peak > (1 - FRAGMENTS) * memory:
                found.append(f"{moment} takes {gib(peak)} of {gib(memory)}, of which {FRAGMENTS:.0%} stay free")
        return found

    @property
    def fits(self) -> bool:
        return not self.problems

    @property
    def assumptions(self) -> list[str]:
        """What the figures rest on."""
        settings, cluster = self.recipe.settings, self.recipe.cluster
        processor = "CPU" if cluster.gpu.name == "CPU" else "GPU"
        allowances = [] if processor == "CPU" else [f"{gib(CONTEXT)} a process for CUDA and NCCL"]
        if settings.use_vllm:
            allowances.append(f"{gib(VLLM_WORK)} for what vLLM works with")
            allowances.append(f"{gib(VLLM_ASLEEP)} for what is left of it asleep")
        allowed = f"{', '.join(allowances)}; " if allowances else ""
        of_what = "the memory" if processor == "CPU" else "a GPU"
        found = [
            f"completions of {self.lengths.mean:,.0f} tokens in the mean, {self.lengths.maximum:,.0f} at most "
            f"(--lengths); prompts of {PROMPT}, at most {LONGEST_PROMPT:,}",
            f"reached: {TRAIN_MFU:.0%} of the {processor}'s operations in training, {DECODE_MFU:.0%} in decoding, "
            f"{BANDWIDTH:.0%} of its bandwidth; {1000 * STEP_SECONDS:.0f} ms a decoding step besides",
            f"allowances: {allowed}{FRAGMENTS:.0%} of {of_what} for fragments",
            "rewards take no time",
        ]
        if settings.use_dynamic_sampling:
            found.insert(1, f"{100 * self.acceptance:.3g}% of groups accepted (--acceptance)")
        if cluster.num_train + cluster.num_serve > GPUS_PER_MACHINE:
            found.append(f"machines of {GPUS_PER_MACHINE} GPUs, {NETWORK / 1e9:.0f} GB/s a GPU between them")
        if cluster.num_serve:
            found.append(f"a server uses {SERVER_UTILIZATION:.0%} of its GPUs, tensor parallel in a machine")
        if self.num_problems:
            found.append(f"{self.num_problems} problems in an evaluation")
        if settings.use_vllm and not self.recipe.asks_a_server and settings.vllm_max_model_length is None:
            found.append(
                "without `vllm_max_model_length` vLLM asks for a cache of the model's whole context: unchecked"
            )
        if settings.tools:
            found.append("tools take no time")
        if self.falls_short:
            most = settings.dynamic_sampling_max_rounds
            found.append(f"`dynamic_sampling_max_rounds: {most}` ends a rollout before it is full")
        if self.shape.num_other:
            found.append(
                "images take neither tokens nor activations; an evaluation of them is one call; of weights outside "
                "the layers, such as a vision tower's, only the memory counts"
            )
        if settings.dynamic_sampling_memory:
            found.append("what `dynamic_sampling_memory` spares is not known beforehand, and left out")
        return found


def plan(
    config: str,
    gpus: str | None = None,
    lengths: tuple[float, float] | None = None,
    acceptance: float = ACCEPTANCE,
    accelerate_config: str | None = None,
    overrides: Sequence[str] = (),
) -> Plan:
    """
    Plans a run: what it needs, before a GPU is rented.

    Args:
        config (`str`):
            The recipe, or its name.
        gpus (`str`, *optional*):
            `8xH100-80GB`, or `64+8xH100-80GB` where 64 train and 8 serve vLLM. Defaults to the recipe's header.
        lengths (`tuple[float, float]`, *optional*):
            Mean and maximum of completions, in tokens. Default: a third of `max_completion_length`, and that.
        acceptance (`float`, *optional*, defaults to `1 / 3`):
            Share of groups that dynamic sampling accepts.
        accelerate_config (`str`, *optional*):
            Name or file of accelerate's configuration. Defaults to the one in the recipe's header.
        overrides (`Sequence[str]`, *optional*):
            `--field value ...`, as `trl-dapo train` takes them.

    Returns:
        [`Plan`].

    Raises:
        ValueError, OSError: Where something is missing or wrong, in one line.

    Example:

    ```python
    >>> from trl_dapo.plan import plan

    >>> plan("qwen3_1.7b_dapo", gpus="1xH100-80GB").fits
    True
    ```
    """
    recipe = read(config, gpus, accelerate_config, overrides)
    settings = recipe.settings
    check_value("--acceptance", acceptance, SHARE)
    mean, maximum = lengths or (MEAN_SHARE * settings.max_completion_length, settings.max_completion_length)
    if not 0 < mean <= maximum <= settings.max_completion_length:
        raise ValueError(
            f"`--lengths {mean:g},{maximum:g}` must satisfy 0 < MEAN <= MAX <= `max_completion_length` "
            f"({settings.max_completion_length})."
        )
    if settings.tiny_model:
        shape, source = shape_of(TINY), "made on the spot"
    elif settings.model_name_or_path is None:
        raise ValueError("`model_name_or_path` is not set. Name a model.")
    else:
        shape, source = find_shape(settings.model_name_or_path, settings.model_revision)
    planned = Plan(recipe, shape, source, Lengths(mean, maximum), acceptance)
    _ = planned.problems, planned.seconds, planned.checkpoint  # what cannot be worked out is said here
    return planned

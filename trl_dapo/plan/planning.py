# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""A plan: what memory, disk and time a recipe needs, put together from `memory` and `speed`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version

from ..batch_sizes import describe_batches, size_batches
from ..sampling.acceptance import AcceptanceRate
from .hardware import GPUS_PER_MACHINE, NETWORK, Cluster
from .memory import (
    CONTEXT,
    VLLM_ASLEEP,
    VLLM_WORK,
    activation_bytes,
    checkpoint_bytes,
    gathered_bytes,
    quantized_bytes,
    state_bytes,
    vllm_cache_tokens,
)
from .models import TINY, ModelShape, find_shape
from .recipe import Recipe, Sharding, read
from .speed import (
    BANDWIDTH,
    DECODE_MFU,
    PADDING,
    STEP_SECONDS,
    TRAIN_MFU,
    Engine,
    Lengths,
    sampling_seconds,
    training_flops,
    training_seconds,
    transformers_engine,
)


ACCEPTANCE = 1 / 3  # where the sampling policies are compared in the README
MEAN_SHARE = 1 / 3  # of `max_completion_length`
PROMPT, LONGEST_PROMPT = 256, 2048  # tokens
SERVER_UTILIZATION, SERVER_SEQUENCES = 0.9, 1024  # `vllm serve`'s defaults on GPUs of 70 GiB and more
HOST_LINK = 25e9  # bytes/s between a GPU and its machine's memory: PCIe 4.0 x16
EVALUATION_PROBLEMS = {"AIME": 30, "MATH-500": 500, "gsm8k": 1319}
FRAGMENTS = 0.05  # of a GPU's memory, which stay free: what the allocator cannot use
LEAST_EFFECT = 0.01  # of a suggestion


@dataclass(frozen=True)
class Suggestion:
    """
    A setting that would help.

    Attributes:
        setting (`str`): What to change.
        seconds (`float`): Of a rollout then, its share of the evaluations included.
        peak (`float`): Bytes of a GPU then.
        fits (`bool`): Whether it fits then.
    """

    setting: str
    seconds: float
    peak: float
    fits: bool


@dataclass(frozen=True)
class Plan:
    """
    What a run needs. Bytes are of one GPU that trains unless they say else; seconds are estimates.

    Attributes:
        name, batch_arithmetic, model, model_source (`str`): Of the recipe.
        cluster, sharding: As in [`~recipe.Recipe`].
        num_parameters, num_trained (`int`): Weights.
        training (`dict[str, float]`): Bytes by part.
        vllm (`dict[str, float]`): vLLM's bytes by part on one of its GPUs; empty without it.
        cache_tokens (`float`): Tokens that one engine's cache holds.
        peak_updating, peak_sampling (`float`): Bytes at most, while vLLM sleeps, if it does, and while it is awake.
        problems (`list[str]`): Why it does not fit; empty where it does.
        checkpoint, disk (`float`): Bytes of one checkpoint, and of all that are kept.
        num_rounds (`float`), num_groups (`float`), tokens_sampled (`float`), tokens_trained (`float`): Of a rollout.
        seconds (`dict[str, float]`): Of a rollout by part: sampling, logps, update, sync.
        tail_seconds (`float`): Of sampling, while less than half of what an engine had running is left.
        rollout_seconds (`float`): Of a rollout; of one sampled ahead less than the sum.
        idle_share (`float`): Of GPU time in which a GPU waits for others.
        evaluation_seconds, evaluation_every (`float`): Of one evaluation; rollouts between two. 0 without.
        num_rollouts (`float`, *optional*): Of the run.
        assumptions (`list[str]`): What the figures rest on.
        suggestions (`list[Suggestion]`): The three that help most.
    """

    name: str
    batch_arithmetic: str
    model: str
    model_source: str
    cluster: Cluster
    sharding: Sharding
    num_parameters: int
    num_trained: int
    training: dict[str, float]
    vllm: dict[str, float]
    cache_tokens: float
    peak_updating: float
    peak_sampling: float
    problems: list[str]
    checkpoint: float
    disk: float
    num_rounds: float
    num_groups: float
    tokens_sampled: float
    tokens_trained: float
    seconds: dict[str, float]
    tail_seconds: float
    rollout_seconds: float
    idle_share: float
    evaluation_seconds: float
    evaluation_every: float
    num_rollouts: float | None
    assumptions: list[str]
    suggestions: list[Suggestion] = field(default_factory=list)

    @property
    def fits(self) -> bool:
        return not self.problems

    @property
    def peak(self) -> float:
        return max(self.peak_updating, self.peak_sampling)

    @property
    def seconds_with_evaluation(self) -> float:
        """Seconds of a rollout with its share of the evaluations."""
        share = self.evaluation_seconds / self.evaluation_every if self.evaluation_every else 0.0
        return self.rollout_seconds + share


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
            The recipe.
        gpus (`str`, *optional*):
            `8xH100-80GB`, or `64+8xH100-80GB` where 64 train and 8 serve vLLM. Defaults to the recipe's header.
        lengths (`tuple[float, float]`, *optional*):
            Mean and maximum of completions, in tokens. Default: a third of `max_completion_length`, and that.
        acceptance (`float`, *optional*, defaults to `1 / 3`):
            Share of groups that dynamic sampling accepts.
        accelerate_config (`str`, *optional*):
            File of accelerate's. Defaults to the one in the recipe's header.
        overrides (`Sequence[str]`, *optional*):
            `--field value ...`, as `trl-dapo train` takes them.

    Returns:
        [`Plan`].

    Raises:
        ValueError, OSError: Where something is missing or wrong, in one line.

    Example:

    ```python
    >>> from trl_dapo.plan import plan

    >>> plan("recipes/qwen3_1.7b_dapo.yaml", gpus="1xH100-80GB").fits
    True
    ```
    """
    recipe = read(config, gpus, accelerate_config, overrides)
    settings = recipe.settings
    if settings.max_completion_length is None:
        raise ValueError("`max_completion_length` is not set: a plan needs an end of completions.")
    if not 0 < acceptance <= 1:
        raise ValueError(f"`--acceptance` must be above 0 and at most 1, got {acceptance}.")
    mean, maximum = lengths or (MEAN_SHARE * settings.max_completion_length, settings.max_completion_length)
    if not 0 < mean <= maximum <= settings.max_completion_length:
        raise ValueError(
            f"`--lengths {mean:g},{maximum:g}` must satisfy 0 < MEAN <= MAX <= `max_completion_length` "
            f"({settings.max_completion_length})."
        )
    if settings.tiny_model:
        shape, source = ModelShape.from_config(TINY), "made on the spot"
    elif settings.model_name_or_path is None:
        raise ValueError("`model_name_or_path` is not set. Name a model.")
    else:
        shape, source = find_shape(settings.model_name_or_path, settings.model_revision)
    best = _plan(recipe, shape, source, Lengths(mean, maximum), acceptance)
    return replace(best, suggestions=_suggest(recipe, shape, source, best, Lengths(mean, maximum), acceptance))


def _plan(recipe: Recipe, shape: ModelShape, source: str, lengths: Lengths, acceptance: float) -> Plan:
    settings, cluster, sharding = recipe.settings, recipe.cluster, recipe.sharding
    gpu, num_gpus = cluster.gpu, cluster.num_train
    sizes = _batch_sizes(settings, num_gpus)
    rollout_rows = settings.per_device_train_batch_size * num_gpus * sizes["steps_per_generation"]
    num_steps = sizes["steps_per_generation"] / sizes["gradient_accumulation_steps"]  # optimizer steps an iteration

    # What trains, and in which precision.
    checkpointing, attention = settings.gradient_checkpointing, settings.attn_implementation or "sdpa"
    mixed = settings.bf16 if settings.bf16 is not None else not settings.fp16
    loaded = 4 if settings.dtype in ("float32", None) else 2
    computed = 2 if mixed or settings.fp16 else loaded
    casts_all = mixed and (sharding.is_deepspeed or sharding.kind == "fsdp2")  # not layer by layer, as autocast
    held = computed if casts_all else loaded
    quantized = 4 if settings.load_in_4bit else 8 if settings.load_in_8bit else None
    lora = (settings.lora_r, settings.lora_target_modules) if settings.use_peft else None
    if lora is None:
        num_trained, frozen = shape.num_parameters, 0.0
        trained = 4 if mixed and sharding.kind == "fsdp2" else held
    else:
        num_trained = shape.num_lora(*lora)
        base = held if sharding.is_deepspeed else loaded
        frozen = base * shape.num_parameters
        if quantized:
            frozen = quantized_bytes(shape, quantized, settings.use_bnb_nested_quant, base)
        # PEFT keeps an adapter in float32; TRL that of a quantized model in bfloat16, and so does DeepSpeed.
        trained = 2 if sharding.is_deepspeed or (quantized and sharding.kind != "fsdp2") else 4

    # Memory of the update
    row = LONGEST_PROMPT + settings.max_completion_length
    if settings.use_vllm and settings.vllm_max_model_length:
        row = min(row, settings.vllm_max_model_length)
    budget = settings.max_tokens_per_microbatch
    tokens = max(budget, row) if budget else settings.per_device_train_batch_size * row
    step_tokens = rollout_rows / num_steps / num_gpus * (PROMPT + lengths.mean)  # of a GPU
    if budget:
        num_passes = math.ceil(step_tokens / (1 - PADDING) / tokens)
    else:
        num_passes = sizes["gradient_accumulation_steps"]
    syncs_each = _nested(settings.accelerator_config, "gradient_accumulation_kwargs", "sync_each_batch")
    state = state_bytes(
        frozen,
        num_trained,
        trained,
        settings.optim or "adamw_torch",
        sharding,
        num_gpus,
        num_passes > 1 and not syncs_each,
    )
    activations = activation_bytes(
        shape,
        tokens,
        row,
        held,
        computed,
        checkpointing,
        attention,
        lora,
        num_trained,
        fused_head=tuple(map(int, version("trl").split(".")[:2])) >= (1, 16),
    )
    # A linear layer of 4 or 8 bits is turned back into `computed` while it is at work.
    dequantized = computed * max(i * o for i, o, _ in shape.linears.values()) if quantized else 0.0
    training = {
        **state,
        "activations": activations["kept"],
        "work": activations["work"] + dequantized,
        "gathered": gathered_bytes(shape, sharding, trained if lora is None else loaded),
        "context": CONTEXT if gpu.name != "CPU" else 0.0,
    }

    # Memory of sampling
    problems, vllm, asleep = [], {}, 0.0
    colocated = settings.use_vllm and settings.vllm_mode == "colocate"
    if settings.use_vllm:
        if colocated:
            shards, utilization = settings.vllm_tensor_parallel_size, settings.vllm_gpu_memory_utilization
            sequences = sizes["steps_per_generation"] * settings.per_device_train_batch_size * shards
            num_engines = num_gpus // shards
            if num_gpus % shards:
                raise ValueError(f"`vllm_tensor_parallel_size={shards}` does not divide {num_gpus} GPUs.")
        else:
            shards, utilization = min(cluster.num_serve, GPUS_PER_MACHINE), SERVER_UTILIZATION
            sequences, num_engines = SERVER_SEQUENCES, cluster.num_serve // min(cluster.num_serve, GPUS_PER_MACHINE)
        cache_tokens = vllm_cache_tokens(shape, gpu.memory, utilization, shards)
        share = utilization * gpu.memory
        weights = 2 * shape.num_parameters / shards
        vllm = {"weights": weights, "work": VLLM_WORK, "cache": max(0.0, share - weights - VLLM_WORK)}
        if cache_tokens < row:
            problems.append(
                f"vLLM's share of {gib(share)} leaves a cache of {cache_tokens:,} tokens, less than the {row:,} of "
                "one prompt and completion"
            )
        asleep = VLLM_ASLEEP if settings.vllm_enable_sleep_mode else share
        awake = share
        engine = Engine(gpu, shards, max(cache_tokens, row), sequences)
    else:
        num_engines, rows = num_gpus, rollout_rows // num_gpus
        engine = transformers_engine(shape, gpu, rows, held)
        cache_tokens = rows * (PROMPT + lengths.maximum)
        awake = cache_tokens * shape.kv_bytes / 2 * computed
    static = state["weights"] + state["optimizer"] + training["context"]
    peak_updating = sum(training.values()) + (asleep if colocated else 0.0)
    sync = trained * shape.num_embedding if sharding.shards_weights else 0.0  # the largest weight, gathered
    peak_sampling = static + sync + (awake if colocated or not settings.use_vllm else 0.0)
    for moment, peak in (("updating", peak_updating), ("sampling", peak_sampling)):
        if peak > (1 - FRAGMENTS) * gpu.memory:
            problems.append(f"{moment} takes {gib(peak)} of {gib(gpu.memory)}, of which {FRAGMENTS:.0%} stay free")

    # Time of a rollout
    num_generations = settings.num_generations
    rounds = _rounds(settings, rollout_rows // num_generations, acceptance)
    num_groups = sum(often * groups for often, groups in rounds)

    def sampled(num_rows, k):
        return sampling_seconds(shape, engine, max(1.0, num_rows / num_engines), lengths, PROMPT, k)

    times = [(often, sampled(groups * num_generations, num_generations)) for often, groups in rounds]
    seconds, tail = (sum(often * time[part] for often, time in times) for part in (0, 1))

    causal = "flash" in attention
    gathers = 2 * shape.num_parameters if sharding.shards_weights else 0

    def trained_seconds(passes, num_microbatches, received):
        flops = training_flops(shape, rollout_rows, lengths, PROMPT, passes, causal)
        return training_seconds(flops, gpu, num_gpus, received, num_microbatches, cluster.link)

    # With an adapter the weights' own gradients, one pass of three, are not computed.
    backward = 2 if lora is None else 1 + num_trained / shape.num_parameters
    microbatches = num_passes * num_steps * settings.num_iterations
    reduced = 2 * num_trained if sharding.kind in ("zero2", "zero3") else 0
    if sharding.kind in ("ddp", "fsdp2", "zero1"):  # reduced once an optimizer step
        reduced = 2 * num_trained * (1 if sharding.kind == "fsdp2" else 2) / num_passes
    update = settings.num_iterations * trained_seconds(
        1 + backward + bool(checkpointing), microbatches / settings.num_iterations, 2 * gathers + reduced
    )
    needs_logps = (settings.use_vllm and settings.vllm_importance_sampling_correction) or num_steps > 1
    without_gradient = bool(needs_logps) + (settings.beta != 0)
    logps = without_gradient * trained_seconds(1, num_passes * num_steps, gathers)
    parts = {
        "sampling": seconds,
        "logps": logps,
        "update": update,
        "sync": _sync_seconds(recipe, shape, num_trained, trained) if settings.use_vllm else 0.0,
    }
    trains = logps + update
    total = (max(seconds, trains) if settings.rollouts_ahead else seconds + trains) + parts["sync"]
    busy = num_gpus * trains + cluster.num_serve * seconds if cluster.num_serve else num_gpus * total
    idle = 1 - busy / ((num_gpus + cluster.num_serve) * total) if cluster.num_serve else tail / 2 / total

    # Evaluation
    problems_asked, evaluation, every = _evaluation_problems(settings), 0.0, 0.0
    if problems_asked:
        k = settings.num_generations_eval or num_generations
        num_rows = problems_asked * k
        if settings.use_vllm:
            evaluation = sampled(num_rows, k)[0]
        else:
            at_once = settings.per_device_eval_batch_size * num_gpus
            evaluation = math.ceil(num_rows / at_once) * sampled(at_once, k)[0]
        # Its loss is computed on rows padded to the longest, twice where log-probabilities are corrected.
        whole = Lengths(0.99 * lengths.maximum, lengths.maximum)
        flops = training_flops(shape, num_rows, whole, PROMPT, 1 + bool(needs_logps), causal)
        batches = num_rows / num_gpus / settings.per_device_eval_batch_size
        evaluation += training_seconds(flops, gpu, num_gpus, 2 * gathers, batches, cluster.link)
        every = _evaluation_steps(settings) / (num_steps * settings.num_iterations)

    checkpoint = checkpoint_bytes(
        frozen,
        num_trained,
        trained,
        settings.optim or "adamw_torch",
        sharding,
        settings.save_only_model,
        lora is not None,
    )
    kept = settings.save_total_limit or 1
    if settings.save_strategy in ("no", False):
        checkpoint, kept = 0.0, 0
    max_steps = settings.max_steps
    return Plan(
        name=recipe.name,
        batch_arithmetic=describe_batches(
            num_generations=num_generations,
            per_device_train_batch_size=settings.per_device_train_batch_size,
            num_processes=num_gpus,
            gradient_accumulation_steps=sizes["gradient_accumulation_steps"],
            steps_per_generation=sizes["steps_per_generation"],
            num_iterations=settings.num_iterations,
            max_tokens_per_microbatch=budget,
        ),
        model=settings.model_name_or_path if not settings.tiny_model else "a tiny model",
        model_source=source,
        cluster=cluster,
        sharding=sharding,
        num_parameters=shape.num_parameters,
        num_trained=num_trained,
        training=training,
        vllm=vllm,
        cache_tokens=cache_tokens,
        peak_updating=peak_updating,
        peak_sampling=peak_sampling,
        problems=problems,
        checkpoint=checkpoint,
        disk=checkpoint * kept,
        num_rounds=sum(often for often, _ in rounds),
        num_groups=num_groups,
        tokens_sampled=num_groups * num_generations * lengths.mean,
        tokens_trained=rollout_rows * lengths.mean,
        seconds=parts,
        tail_seconds=tail,
        rollout_seconds=total,
        idle_share=idle,
        evaluation_seconds=evaluation,
        evaluation_every=every,
        num_rollouts=max_steps / (num_steps * settings.num_iterations) if max_steps and max_steps > 0 else None,
        assumptions=_assumptions(recipe, lengths, acceptance, problems_asked),
    )


def gib(num_bytes: float) -> str:
    """Bytes in GiB."""
    return f"{num_bytes / 2**30:.1f} GiB"


def _batch_sizes(settings, num_processes) -> dict[str, int]:
    if settings.prompts_per_rollout is not None or settings.prompts_per_step is not None:
        prompts = (settings.prompts_per_rollout, settings.prompts_per_step)
        return size_batches(*prompts, settings.num_generations, settings.per_device_train_batch_size, num_processes)
    microbatch = settings.per_device_train_batch_size * num_processes
    accumulation = settings.gradient_accumulation_steps
    steps = settings.steps_per_generation or accumulation
    if settings.generation_batch_size is not None:
        steps = settings.generation_batch_size // microbatch
    if not steps or microbatch * steps % settings.num_generations:
        raise ValueError(
            f"{num_processes} processes x {settings.per_device_train_batch_size} rows x {steps} steps are no multiple "
            f"of `num_generations={settings.num_generations}`."
        )
    return {"gradient_accumulation_steps": accumulation, "steps_per_generation": steps}


def _rounds(settings, target: int, acceptance: float) -> list[tuple[float, float]]:
    """
    The rounds of a rollout: of each how often there is one, in the mean, and its groups.

    Sized by the acceptance rate, a first round of `n` groups finds `n a`, with the standard deviation
    `sqrt(n a (1 - a))`; a second asks for what is missing where it found too few (the normal distribution's tail, and
    its mean beyond a point). With `carry` the surplus is sampled once and trained on later.
    """
    if not settings.use_dynamic_sampling or settings.dynamic_sampling_mode == "mask":
        return [(1.0, target)]
    needed, most = target, settings.dynamic_sampling_max_rounds
    if settings.dynamic_sampling_mode == "replace":
        needed = max(1, math.ceil(settings.min_replace_ratio * target))
    carries = settings.dynamic_sampling_surplus == "carry"
    size = settings.batch_multiplier and settings.batch_multiplier * target
    if size is None and not settings.use_vllm:
        size = target  # a round is at most the generation batch
    if size is not None:
        num = needed / acceptance / size
        num = max(1.0, num) if carries else math.ceil(num - 1e-9)
        return [(min(num, most) if most > 0 else num, size)]
    rate = AcceptanceRate()
    for _ in range(20):  # as sure of the rate as a run is after some rollouts
        rate.update(round(1000 * acceptance), 1000)
    first = rate.round_size(needed, target, is_rare=bool(settings.rollouts_ahead))
    deviation = math.sqrt(first * acceptance * (1 - acceptance)) or 1e-9
    margin = (first * acceptance - needed) / deviation
    short = math.erfc(margin / math.sqrt(2)) / 2
    missing = deviation * (math.exp(-(margin**2) / 2) / math.sqrt(2 * math.pi) - margin * short)
    second = missing / max(short, 1e-9) / acceptance
    if carries:
        first = needed / acceptance - short * second
    return [(1.0, first), (short, second)]


def _sync_seconds(recipe, shape, num_trained, trained) -> float:
    """
    Seconds in which vLLM gets the weights, once a rollout: what a GPU gathers of others' shards, what travels to a
    server's or is copied beside its own; of LoRA the adapter alone, while vLLM's base goes to the machine's memory and
    back.
    """
    settings, sharding, cluster = recipe.settings, recipe.sharding, recipe.cluster
    if settings.use_peft and settings.vllm_lora_sync != "merge":
        base = 2 * shape.num_parameters / settings.vllm_tensor_parallel_size
        sleeps = settings.vllm_mode == "colocate" and settings.vllm_enable_sleep_mode
        return trained * num_trained / (BANDWIDTH * NETWORK) + (2 * base / HOST_LINK if sleeps else 0.0)
    num_bytes = trained * shape.num_parameters if not settings.use_peft else 2 * shape.num_parameters
    gathering = num_bytes / (BANDWIDTH * cluster.link) if sharding.shards_weights else 0.0
    if settings.vllm_mode == "server":
        inside = cluster.num_train + cluster.num_serve <= GPUS_PER_MACHINE
        return gathering + num_bytes / (BANDWIDTH * (cluster.gpu.link if inside else min(cluster.gpu.link, NETWORK)))
    return gathering + (num_bytes + 2 * shape.num_parameters) / (BANDWIDTH * cluster.gpu.bandwidth)


def _evaluation_problems(settings) -> int:
    """Problems of an evaluation in training; 0 without one."""
    if settings.eval_strategy in ("no", False, None):
        return 0
    if settings.eval_dataset_limit is not None:
        return settings.eval_dataset_limit
    name = str(settings.eval_dataset_name).lower()
    return next((num for key, num in EVALUATION_PROBLEMS.items() if key.lower() in name), 100)


def _evaluation_steps(settings) -> float:
    """Optimizer steps between two evaluations."""
    steps = settings.eval_steps or settings.logging_steps
    if settings.eval_strategy == "epoch":
        return math.inf
    return steps if steps >= 1 else steps * settings.max_steps


def _nested(value, *keys):
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _assumptions(recipe, lengths, acceptance, problems_asked) -> list[str]:
    settings, cluster = recipe.settings, recipe.cluster
    found = [
        f"completions of {lengths.mean:,.0f} tokens in the mean, {lengths.maximum:,.0f} at most (--lengths); "
        f"prompts of {PROMPT}, at most {LONGEST_PROMPT:,}",
        f"reached: {TRAIN_MFU:.0%} of the GPU's operations in training, {DECODE_MFU:.0%} in decoding, {BANDWIDTH:.0%} "
        f"of its bandwidth; {1000 * STEP_SECONDS:.0f} ms a decoding step besides",
        f"allowances: {gib(CONTEXT)} a process for CUDA and NCCL, {gib(VLLM_WORK)} for what vLLM works with, "
        f"{gib(VLLM_ASLEEP)} for what is left of it asleep; {FRAGMENTS:.0%} of a GPU for fragments",
        "rewards take no time",
    ]
    if settings.use_dynamic_sampling:
        found.insert(1, f"{acceptance:.0%} of groups accepted (--acceptance)")
    if cluster.num_train + cluster.num_serve > GPUS_PER_MACHINE:
        found.append(
            f"machines of {GPUS_PER_MACHINE} GPUs, each with a port of {NETWORK / 1e9:.0f} GB/s to the others"
        )
    if cluster.num_serve:
        found.append(f"a server uses {SERVER_UTILIZATION:.0%} of its GPUs, tensor parallel in a machine")
    if problems_asked:
        found.append(f"{problems_asked} problems to evaluate")
    if settings.dynamic_sampling_memory:
        found.append("what `dynamic_sampling_memory` spares is not known beforehand, and left out")
    return found


def _candidates(recipe: Recipe):
    """Settings that may help: what they are about, how they are said, and the recipe that has them."""
    settings, cluster = recipe.settings, recipe.cluster
    server = settings.use_vllm and settings.vllm_mode == "server"
    together = cluster.num_train + cluster.num_serve

    def change(about, cluster=cluster, sharding=recipe.sharding, **fields):
        fields = {name: value for name, value in fields.items() if getattr(settings, name) != value}
        said = [f"{name}: {_yaml(value)}" for name, value in fields.items()]
        if cluster is not recipe.cluster:
            said.append(f"--gpus {cluster}")
        if sharding is not recipe.sharding:
            said.append(f"accelerate's {sharding.kind}.yaml")
        return about, ", ".join(said), replace(recipe.changed(**fields), cluster=cluster, sharding=sharding)

    colocate = {"use_vllm": True, "vllm_mode": "colocate", "vllm_enable_sleep_mode": True}
    if not settings.use_vllm and cluster.gpu.name != "CPU":
        yield change("engine", **colocate)
    if settings.use_dynamic_sampling and settings.dynamic_sampling_mode == "filter":
        yield change("rounds", batch_multiplier=None)
        yield change("rounds", batch_multiplier=None, dynamic_sampling_surplus="carry")
    if server:
        yield change("ahead", rollouts_ahead=1, dynamic_sampling_surplus="carry", batch_multiplier=None)
        colocate |= {"rollouts_ahead": 0, "vllm_gpu_memory_utilization": 0.7}
        for num_gpus in (together, cluster.num_train):
            for shards in (1, 2, 4, 8):
                yield change("engine", Cluster(cluster.gpu, num_gpus), vllm_tensor_parallel_size=shards, **colocate)
        for num_train in (together // 2, together * 3 // 4, cluster.num_train // 2):
            yield change("split", Cluster(cluster.gpu, num_train, together - num_train))
    elif settings.use_vllm:
        yield change("sleep", vllm_enable_sleep_mode=True)
        for step in (0.1, 0.2, -0.1, -0.2):
            share = round(settings.vllm_gpu_memory_utilization + step, 2)
            if 0.1 <= share <= 0.9:
                yield change("share", vllm_gpu_memory_utilization=share)
        for shards in (1, 2, 4, 8):
            yield change("shards", vllm_tensor_parallel_size=shards)
    if budget := settings.max_tokens_per_microbatch:
        yield change("micro-batch", max_tokens_per_microbatch=2 * budget)
        yield change("micro-batch", max_tokens_per_microbatch=budget // 2)
    elif settings.per_device_train_batch_size > 1:
        yield change("micro-batch", per_device_train_batch_size=settings.per_device_train_batch_size // 2)
    yield change("checkpointing", gradient_checkpointing=not settings.gradient_checkpointing)
    if "flash" not in (settings.attn_implementation or "") and cluster.gpu.name != "CPU":
        yield change("attention", attn_implementation="flash_attention_2")
    if recipe.sharding.kind == "ddp":
        for kind in ("fsdp2", "zero2"):
            yield change("sharding", sharding=Sharding(kind))
    if not settings.use_peft and "8bit" not in (settings.optim or ""):
        yield change("optimizer", optim="adamw_8bit")
    if settings.eval_strategy == "steps" and settings.eval_steps and settings.eval_steps >= 1:
        yield change("evaluation", eval_steps=2 * settings.eval_steps)


def _yaml(value) -> str:
    words = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else str(value)


def _suggest(recipe, shape, source, base, lengths, acceptance) -> list[Suggestion]:
    """The three that help most, each planned anew: in time where the recipe fits, else to make it fit."""
    best = {}
    for about, setting, changed in _candidates(recipe):
        try:
            other = _plan(changed, shape, source, lengths, acceptance)
        except ValueError:
            continue  # sizes that do not divide on other GPUs
        one = Suggestion(setting, other.seconds_with_evaluation, other.peak, other.fits)
        if base.fits or other.fits:
            helps = other.fits and (not base.fits or one.seconds < (1 - LEAST_EFFECT) * base.seconds_with_evaluation)
        else:
            helps = one.peak < (1 - LEAST_EFFECT) * base.peak
        rank = (not one.fits, one.seconds if one.fits else one.peak)
        if helps and (about not in best or rank < best[about][0]):  # of one setting's values the best alone
            best[about] = rank, one
    return [one for _, one in sorted(best.values(), key=lambda ranked: ranked[0])[:3]]

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
The memory of a run, computed from the sizes of a model and of the adapter that PEFT trains instead of all weights.
Functions return bytes on one GPU, unless stated otherwise.

`held` and `computed` are bytes per number, 2 (bfloat16) or 4 (float32): `held` is the precision of the weights and of
what layers pass on, `computed` the precision in which layers compute. With mixed precision they are 4 and 2 on one GPU
or with DDP, and 2 and 2 with FSDP2 and DeepSpeed.
"""

import math
from dataclasses import dataclass
from types import SimpleNamespace

from ..models import ModelShape
from .recipe import Sharding


LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
IN_EXPERTS = LINEARS[4:]
ENDS = ("embed_tokens", "lm_head")

# Optimizers by the state that they keep per weight: AdamW's two moments in the weight's own precision, or in 8 bits
# with a float32 scale for each block of 256 (section 2 of https://huggingface.co/papers/2110.02861).
ADAMW = ("adamw_torch", "adamw_torch_fused", "paged_adamw", "paged_adamw_32bit")
ADAMW_8BIT = ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit")
BLOCK_OF_8_BITS, BLOCK_OF_4_BITS = 256, 64

# TRL 1.16 computes logits in tiles of this many tokens and columns (trl/kernels/chunked_logprob.py).
HEAD_TILE = (4096, 32_768)
# The largest number of weights that DeepSpeed keeps gathered, and the number of gradients in a bucket:
# `stage3_max_live_parameters` and `reduce_bucket_size` of https://www.deepspeed.ai/docs/config-json.
ZERO3_LIVE, ZERO_BUCKET = 1e9, 5e8
# Other memory of a process on its GPU: CUDA's context, cuBLAS and NCCL's buffers. An allowance, not a formula.
CONTEXT = 1.5 * 2**30
# Memory of vLLM besides weights and cache, while it is awake (CUDA graphs, activations of 4,096 tokens, the sampler)
# and while it sleeps. Allowances; https://docs.vllm.ai/en/latest/features/sleep_mode says that sleeping frees more
# than 90%.
VLLM_WORK, VLLM_ASLEEP = 2.0 * 2**30, 1.0 * 2**30


@dataclass(frozen=True)
class Adapter:
    """
    An adapter of LoRA: its rank, the modules that it is on, and the modules of which a trainable copy is added
    (`modules_to_save`), whose originals stay in memory.
    """

    rank: int
    targets: tuple[str, ...]
    saved: tuple[str, ...] = ()
    is_dora: bool = False
    on_router: bool = False

    def on_experts(self, shape: ModelShape) -> bool:
        return shape.num_experts > 1 and not set(IN_EXPERTS).isdisjoint(self.targets)

    def num_lora(self, shape: ModelShape) -> int:
        """Return the number of LoRA weights."""
        # Section 4.1 of https://huggingface.co/papers/2106.09685. DoRA adds a magnitude for each output. transformers
        # stacks the gate and up projections of experts in one parameter, for which PEFT doubles the rank: both
        # together have `2 r (h + 2 i)` weights.
        num = 0
        if self.on_router:
            num = self.rank * (shape.hidden_size + shape.num_experts) * shape.num_layers
        for name in self.targets:
            inputs, outputs, count = shape.linears[name]
            wide = 2 if shape.num_experts > 1 and name in ("gate_proj", "up_proj") else 1
            num += self.rank * (inputs + wide * outputs) * count
            if self.is_dora:
                num += outputs * count
        return num

    def num_saved(self, shape: ModelShape) -> int:
        """Return the number of weights in the trainable copies, which exist next to the originals, tied or not."""
        num = shape.num_embedding * len(set(ENDS) & set(self.saved))
        for name in set(LINEARS) & set(self.saved):
            inputs, outputs, count = shape.linears[name]
            if shape.has_qkv_bias and name in LINEARS[:3]:
                inputs += 1
            num += inputs * outputs * count
        return num

    def can_be_served(self, shape: ModelShape) -> bool:
        """Return whether vLLM can serve the adapter. If it cannot, the adapter is merged and all weights are sent."""
        return not (self.saved or self.is_dora or self.on_router or self.on_experts(shape))

    def layer_bytes(self, shape: ModelShape, held: int, computed: int) -> float:
        """Return the bytes per token that one layer keeps for the adapter and the trainable copies."""
        # LoRA makes its own copy of its input. DoRA scales the outputs of the layer and of LoRA, and keeps both. A
        # trainable copy keeps its input: for the output projection that is attention's output, which is kept anyway,
        # and without autocast some layers share one input.
        on_experts = IN_EXPERTS if shape.num_experts > 1 else ()
        targets = [shape.linears[name] for name in self.targets if name not in on_experts]
        numbers = sum(inputs + self.rank for inputs, _, _ in targets)
        if self.is_dora:
            numbers += sum(2 * outputs for _, outputs, _ in targets)
        for together in (LINEARS[:3], ("gate_proj", "up_proj"), ("down_proj",)):
            saved = set(together) & set(self.saved)
            numbers += shape.linears[together[0]][0] * (min(1, len(saved)) if held == computed else len(saved))
        if self.on_router:
            numbers += shape.hidden_size + self.rank
        return computed * numbers

    def merged_bytes(self, shape: ModelShape, held: int) -> float:
        """Return the bytes per layer that do not depend on tokens: the experts' weights with the adapter added."""
        # PEFT's `ParamWrapper` adds the product of the adapter's factors in every forward pass, and casts both
        # factors.
        if not self.on_experts(shape):
            return 0.0
        stacked = {name: shape.linears[name][:2] for name in IN_EXPERTS if name in self.targets}
        merged = sum(inputs * outputs for inputs, outputs in stacked.values()) * shape.num_experts
        return held * (merged + Adapter(self.rank, tuple(stacked)).num_lora(shape) // shape.num_layers)

    def work_bytes(self, shape: ModelShape) -> float:
        """Return the working memory of DoRA's largest layer, which does not depend on tokens."""
        # First a unit matrix in float32 and in the computed precision, then the latter and four matrices of the
        # weight's size in float32.
        sizes = [shape.linears[name][:2] for name in self.targets] if self.is_dora else []
        return max((2 * inputs * max(3 * inputs, inputs + 8 * outputs) for inputs, outputs in sizes), default=0.0)


def read_adapter(settings: SimpleNamespace, shape: ModelShape) -> Adapter | None:
    """
    Return the adapter that a recipe trains, or `None`. Raises `ValueError` for an adapter that PEFT refuses or that a
    plan does not know.
    """
    if not settings.use_peft:
        return None
    has_experts, named = shape.num_experts > 1, _names(settings.lora_target_modules)
    saved, is_all = _names(settings.lora_modules_to_save), named == ["all-linear"]
    targets = list(LINEARS) if is_all else named or ["q_proj", "v_proj"]
    # Copies of quantized weights cannot be trained, and experts are parameters, not modules.
    can_copy: tuple[str, ...] = LINEARS
    if settings.load_in_4bit or settings.load_in_8bit:
        can_copy = ()
    elif has_experts:
        can_copy = LINEARS[:4]
    for field, names, known in (
        ("lora_target_modules", targets, LINEARS),
        ("lora_modules_to_save", saved, (*ENDS, *can_copy)),
        ("lora_target_parameters", _names(settings.lora_target_parameters), ()),
    ):
        if unknown := sorted(set(names) - set(known)):
            raise ValueError(
                f"`{field}` names {', '.join(unknown)}, for which a plan cannot be made. Known: "
                f"{', '.join(known) or 'none'}."
            )
    targets = [name for name in targets if name not in saved]
    adapter = Adapter(settings.lora_r, tuple(targets), tuple(saved), settings.use_dora, is_all and has_experts)
    stacked = adapter.on_experts(shape)
    for is_refused, why in (
        (
            has_experts and not named,
            "a model with experts has no default for `lora_target_modules`: set it, for example to all-linear",
        ),
        (stacked and settings.use_dora, "DoRA does not work on experts: set `use_dora: false`"),
        (
            stacked and settings.lora_dropout,
            f"dropout ({settings.lora_dropout}) does not work on experts: set `lora_dropout: 0`",
        ),
        (
            stacked and ("gate_proj" in targets) != ("up_proj" in targets),
            "gate_proj and up_proj of experts are one parameter: name both in `lora_target_modules`",
        ),
    ):
        if is_refused:
            raise ValueError(f"PEFT refuses the adapter, because {why}.")
    return adapter


def _names(given: list[str] | str | None) -> list[str]:
    return [given] if isinstance(given, str) else list(dict.fromkeys(given or []))


def optimizer_bytes(optim: str, weight: int) -> float:
    """
    Return the bytes of optimizer state per weight, for weights of `weight` bytes. Raises `ValueError` for an unknown
    optimizer.
    """
    if optim in ADAMW:
        return 2 * weight
    if optim in ADAMW_8BIT:
        return 2 * (1 + 4 / BLOCK_OF_8_BITS)
    if optim == "sgd":
        return 0
    known = ", ".join([*ADAMW, *ADAMW_8BIT, "sgd"])
    raise ValueError(f"A plan does not know the memory of `optim: {optim}`. Known: {known}.")


def quantized_bytes(shape: ModelShape, bits: int, nested: bool, held: int) -> float:
    """
    Return the bytes of a model in 8 or 4 bits. Only its linear layers are quantized, and have scales; the other
    weights keep their precision, `held`.
    """
    # 4 bits: half a byte per weight, and a scale of 4 bytes per block of 64 weights. Nested, a scale takes one byte,
    # and 256 scales share 4 more (section 3 of https://huggingface.co/papers/2305.14314). 8 bits: one byte per weight
    # and 4 per row. bitsandbytes does not quantize experts, because they are not linear layers.
    num_quantized = shape.num_linear - shape.num_stacked
    rest = held * (shape.num_parameters - num_quantized)
    if bits == 8:
        linears = list(shape.linears.values())[: 4 if shape.num_stacked else None]
        return num_quantized + rest + sum(4 * outputs * count for _, outputs, count in linears)
    return num_quantized * (0.5 + (1 + 4 / 256 if nested else 4) / BLOCK_OF_4_BITS) + rest


def state_bytes(
    frozen: float, num_trained: int, trained: int, optim: str, sharding: Sharding, num_gpus: int, accumulates: bool
) -> dict[str, float]:
    """
    Return the bytes of weights, gradients and optimizer state. `frozen` is the number of bytes of the weights that do
    not train.
    """
    # ZeRO (section 3 of https://huggingface.co/papers/1910.02054) divides by the number of GPUs: the optimizer state
    # from stage 1, gradients from stage 2, weights from stage 3. DeepSpeed trains bfloat16 weights and keeps a copy in
    # float32 together with the moments: 2 + 2 + 12 bytes. FSDP2 shards float32 weights and gradients: 4 + 4 + 8.
    # Between two micro-batches whose gradients are not reduced, it holds those of the whole model in bfloat16
    # (`set_requires_gradient_sync` in torch's documentation). DDP copies gradients into its buckets
    # (`gradient_as_bucket_view` there).
    kind = sharding.kind
    master = 4 if sharding.is_deepspeed and trained == 2 else 0
    parts = {
        "weights": frozen + trained * num_trained,
        "gradients": trained * num_trained,
        "optimizer": (master + optimizer_bytes(optim, 4 if master else trained)) * num_trained,
    }
    sharded = {"zero1": ("optimizer",), "zero2": ("optimizer", "gradients"), "zero3": parts, "fsdp2": parts}
    for name in sharded.get(kind, ()):
        parts[name] /= num_gpus
    if kind == "ddp":
        parts["gradients"] *= 2
    if kind == "fsdp2" and accumulates:
        parts["gradients"] += 2 * num_trained
    if sharding.offloads_optimizer:
        parts["optimizer"] = 0.0
    if sharding.offloads_weights:
        parts["weights"] = 0.0
        parts["gradients"] -= trained * num_trained / num_gpus
    return parts


def layer_bytes(
    shape: ModelShape, held: int, computed: int, attention: str = "sdpa", adapter: Adapter | None = None
) -> float:
    """Return the bytes per token that one layer keeps for its backward pass, without those of `score_bytes`."""
    # What autograd saves in transformers' layers of RMSNorm, attention and gated MLP, counted like section 4.1 of
    # https://huggingface.co/papers/2205.05198. Layers with frozen weights keep neither their input nor what a norm
    # scales, because no gradient is computed from them.
    hidden, queries, keys = shape.hidden_size, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    trains = adapter is None
    # Two norms, each with its input in float32, its output, and a mean.
    norms = 2 * (4 * hidden + 4)
    inputs = 0
    if trains:
        norms += 2 * held * hidden
        # Inputs of the projections to queries, keys and values, and to gate and up, or of a router. With autocast each
        # projection makes its own copy.
        copies = 4 if shape.num_stacked else 5
        inputs = (2 if held == computed else copies) * computed * hidden
    # Queries, output, keys and values, and the logarithm of a sum per head. With a mask, keys and values are repeated
    # for each query head.
    attended = computed * (2 * queries + 2 * (keys if "flash" in attention else queries)) + 4 * shape.num_heads
    normalized = 0
    if shape.has_qk_norm:
        each = 4 + computed if trains else 4
        normalized = each * (queries + keys) + 4 * (shape.num_heads + shape.num_kv_heads)
    mlp = expert_bytes(shape, held, adapter)
    if not shape.num_stacked:  # gate, its SiLU, up, and their product
        mlp = (4 if trains else 3) * computed * shape.intermediate_size
    added = 0.0 if adapter is None else adapter.layer_bytes(shape, held, computed)
    return norms + inputs + attended + mlp + normalized + added


def expert_bytes(shape: ModelShape, held: int, adapter: Adapter | None) -> float:
    """Return the bytes per token that a layer's experts keep."""
    # Each active expert keeps gate, its SiLU, up, and its output, which the router's weight scales. If its projections
    # train, it keeps their inputs too. The kernels of transformers compute in the weights' own precision.
    reads = adapter is None or "gate_proj" in adapter.targets
    multiplies = adapter is None or "down_proj" in adapter.targets
    width, hidden = shape.intermediate_size, shape.hidden_size
    each = held * ((4 if multiplies else 3) * width + (2 if reads else 1) * hidden)
    # Shared experts, which process every token; then the router's softmax in float32, four indices, and a weight.
    shared = (4 if adapter is None else 3) * held * width * shape.num_shared_experts
    return shape.num_active_experts * (each + 4 * 8 + held) + shared + 4 * shape.num_experts


def score_bytes(shape: ModelShape, row: int, computed: int, attention: str) -> float:
    """Return the bytes per token that grow with the length of the token's row."""
    # Eager attention keeps each head's scores in float32 and in the computed precision (`5 a s` in section 4.1 of the
    # same paper, without dropout). SDPA keeps the mask of a padded batch, as bytes and in the computed precision.
    # Flash attention keeps nothing.
    if attention == "eager":
        return row * shape.num_heads * (4 + computed)
    return 0.0 if "flash" in attention else row * (1 + computed)


def backward_bytes(shape: ModelShape, tokens: int, held: int, computed: int, adapter: Adapter | None = None) -> float:
    """Return the bytes that a layer's backward pass needs on top: gradients of the MLP and of its largest weight."""
    if not shape.num_stacked:
        # DoRA multiplies in float32, and computes three gradients in it.
        in_float = 12 if adapter is not None and adapter.is_dora else 0
        return (3 * computed + in_float) * tokens * shape.intermediate_size + (held + computed) * shape.largest_linear
    # Three gradients of the experts' outputs, and those of the weights of gate and up. The gradients of the down
    # projection are freed by then.
    stacks = 2
    if adapter is not None and not adapter.on_experts(shape):
        stacks = 0
    elif adapter is not None and "down_proj" in adapter.targets:
        stacks = 1
    expert = shape.intermediate_size * shape.hidden_size * shape.num_experts
    return held * (3 * tokens * shape.num_active_experts * shape.hidden_size + stacks * expert)


def activation_bytes(
    shape: ModelShape,
    tokens: int,
    row: int,
    held: int,
    computed: int,
    checkpointing: bool,
    attention: str = "sdpa",
    adapter: Adapter | None = None,
    fused_head: bool = True,
) -> dict[str, float]:
    """
    Return the peak bytes of a micro-batch: `activations` are kept until the end of the forward pass, and `work` is
    added for a moment.
    """
    # Without a fused head all logits exist at the same time, with two copies and a gradient.
    trains_all, saved = adapter is None, () if adapter is None else adapter.saved
    layer = tokens * layer_bytes(shape, held, computed, attention, adapter)
    layer += 0 if adapter is None else adapter.merged_bytes(shape, held)
    scores = tokens * score_bytes(shape, row, computed, attention)
    if attention == "eager":  # each layer has its own scores, while all layers share a mask
        layer, scores = layer + scores, 0.0
    # The last norm, and the input of the output layer.
    last = tokens * shape.hidden_size * (4 + held * trains_all + max(held, computed))
    casts = computed * (shape.num_linear - shape.num_stacked if held != computed else 0)
    layers = shape.num_layers * (tokens * held * shape.hidden_size if checkpointing else layer)
    layers += 0 if checkpointing else casts

    rows, columns = (min(HEAD_TILE[0], tokens), HEAD_TILE[1]) if fused_head else (4 * tokens, shape.vocab_size)
    tile = computed * (rows * columns + min(columns, shape.vocab_size) * shape.hidden_size)  # with that of the weight
    moments = (
        tile + (casts if checkpointing else 0),
        tile + 4 * tokens * shape.hidden_size + (4 * shape.num_embedding if trains_all or "lm_head" in saved else 0),
        backward_bytes(shape, tokens, held, computed, adapter)
        + (layer if checkpointing else 0)
        + (held * shape.num_embedding if trains_all and shape.is_tied else 0),
        0.0 if adapter is None else adapter.work_bytes(shape) + (layer if checkpointing else 0),
    )
    return {"activations": layers + last + scores, "work": max(moments)}


def gathered_bytes(shape: ModelShape, sharding: Sharding, held_by_shard: int, num_copies: int = 0) -> float:
    """Return the bytes that a GPU gathers from the shards of others while it computes."""
    # FSDP2 gathers two layers in bfloat16, the current one and the next. Embedding and output layer belong to no layer
    # and stay gathered, and so do trainable copies of them. The fused output layer also gathers its weight in the
    # precision of its shards (`full_tensor` in TRL's `add_fused_lm_head`). ZeRO-3 has its largest number of gathered
    # weights and a bucket of gradients, ZeRO-1 and ZeRO-2 only the bucket.
    if sharding.kind == "fsdp2":
        roots = shape.num_embedding * ((1 if shape.is_tied else 2) + num_copies)
        return 2 * (2 * shape.num_linear / shape.num_layers + roots) + held_by_shard * shape.num_embedding
    if sharding.kind == "zero3":
        return 2 * min(ZERO3_LIVE, shape.num_parameters) + 2 * ZERO_BUCKET
    return 2 * ZERO_BUCKET if sharding.is_deepspeed else 0.0


def vllm_cache_tokens(shape: ModelShape, memory: float, utilization: float, tensor_parallel_size: int) -> int:
    """Return the number of tokens whose keys and values fit into one engine of vLLM."""
    # Section 3 of https://huggingface.co/papers/2309.06180. Tensor parallelism splits them by key heads.
    free = utilization * memory - 2 * shape.num_parameters / tensor_parallel_size - VLLM_WORK
    return max(0, math.floor(free / (shape.kv_bytes / min(tensor_parallel_size, shape.num_kv_heads))))


def checkpoint_bytes(
    frozen: float, num_trained: int, trained: int, optim: str, sharding: Sharding, only_model: bool, is_adapter: bool
) -> float:
    """
    Return the bytes of a checkpoint on disk: the weights, or only the adapter, and the optimizer's state unless
    `only_model` is set.
    """
    model = trained * num_trained + (0 if is_adapter else frozen)
    if only_model:
        return model
    if sharding.is_deepspeed:
        # DeepSpeed's own files contain the bfloat16 weights once more.
        return 2 * model + (4 + optimizer_bytes(optim, 4)) * num_trained
    # FSDP2's own files contain the weights once more.
    copies = 2 if sharding.kind == "fsdp2" else 1
    return model * copies + optimizer_bytes(optim, trained) * num_trained

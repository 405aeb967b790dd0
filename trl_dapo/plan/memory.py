# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
Bytes of a run, by arithmetic on a model's sizes and on the adapter that PEFT trains in place of all weights. What
functions return is for one GPU unless they say else.

A byte count a weight or a token is of 2 (bfloat16) or 4 (float32). *Held* is what the weights are held in, *computed*
what layers compute in: with mixed precision on one GPU or DDP 4 and 2, under FSDP2 and DeepSpeed 2 and 2.
"""

import math
from dataclasses import dataclass
from types import SimpleNamespace

from ..models import ModelShape
from .recipe import Sharding


LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
IN_EXPERTS = LINEARS[4:]
ENDS = ("embed_tokens", "lm_head")

# Bytes of optimizer state a weight, beside its float32 or bfloat16: AdamW's two moments in the weight's own precision,
# or in 8 bits with a float32 scale for each block of 256 (section 2 of https://huggingface.co/papers/2110.02861).
ADAMW = ("adamw_torch", "adamw_torch_fused", "paged_adamw", "paged_adamw_32bit")
ADAMW_8BIT = ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit")
BLOCK_OF_8_BITS, BLOCK_OF_4_BITS = 256, 64

# TRL 1.16 projects onto the vocabulary in tiles of so many tokens and columns (trl/kernels/chunked_logprob.py).
HEAD_TILE = (4096, 32_768)
# Weights that DeepSpeed keeps gathered at most, and elements of a bucket of gradients: `stage3_max_live_parameters`
# and `reduce_bucket_size` of https://www.deepspeed.ai/docs/config-json.
ZERO3_LIVE, ZERO_BUCKET = 1e9, 5e8
# What a process has on its GPU besides: CUDA's context, cuBLAS, NCCL's buffers. An allowance, not a formula.
CONTEXT = 1.5 * 2**30
# What vLLM works with besides weights and cache, and what is left of it asleep: CUDA graphs, activations of 4,096
# tokens, the sampler. An allowance; https://docs.vllm.ai/en/latest/features/sleep_mode says 90 % and more is freed.
VLLM_WORK, VLLM_ASLEEP = 2.0 * 2**30, 1.0 * 2**30


@dataclass(frozen=True)
class Adapter:
    """LoRA of a rank on modules in `LINEARS`; of `saved` ones a copy trains, and the original stays."""

    rank: int
    targets: tuple[str, ...]
    saved: tuple[str, ...] = ()
    is_dora: bool = False
    on_router: bool = False

    def on_experts(self, shape: ModelShape) -> bool:
        return shape.num_experts > 1 and not set(IN_EXPERTS).isdisjoint(self.targets)

    def num_lora(self, shape: ModelShape) -> int:
        """Weights of the adapter."""
        # Section 4.1 of https://huggingface.co/papers/2106.09685. DoRA adds a magnitude for each output. transformers
        # stacks an expert's gate and up in one parameter, for which PEFT doubles the rank: `2 r (h + 2 i)` for both.
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
        """Weights of the copies, which are there beside the originals, tied or not."""
        num = shape.num_embedding * len(set(ENDS) & set(self.saved))
        for name in set(LINEARS) & set(self.saved):
            inputs, outputs, count = shape.linears[name]
            if shape.has_qkv_bias and name in LINEARS[:3]:
                inputs += 1
            num += inputs * outputs * count
        return num

    def travels(self, shape: ModelShape) -> bool:
        """Whether vLLM serves it beside its base; else it is merged, and all weights travel."""
        return not (self.saved or self.is_dora or self.on_router or self.on_experts(shape))

    def layer_bytes(self, shape: ModelShape, held: int, computed: int) -> float:
        """Bytes a token that one layer keeps for the adapter and the copies."""
        # LoRA makes its own copy of its input. DoRA scales what the layer and LoRA give, and keeps both. Of a copy the
        # input is kept: at the output projection it is attention's, and without autocast some layers share one.
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
        """Bytes that one layer keeps whatever its tokens: the experts' weights with the adapter's product added."""
        # `ParamWrapper` of PEFT adds it in every forward pass, and casts both factors.
        if not self.on_experts(shape):
            return 0.0
        stacked = {name: shape.linears[name][:2] for name in IN_EXPERTS if name in self.targets}
        merged = sum(inputs * outputs for inputs, outputs in stacked.values()) * shape.num_experts
        return held * (merged + Adapter(self.rank, tuple(stacked)).num_lora(shape) // shape.num_layers)

    def work_bytes(self, shape: ModelShape) -> float:
        """Bytes of DoRA's largest layer at work, whatever its tokens."""
        # A unit matrix in float32 and as computed; then that copy and four of the weight's size in float32.
        sizes = [shape.linears[name][:2] for name in self.targets] if self.is_dora else []
        return max((2 * inputs * max(3 * inputs, inputs + 8 * outputs) for inputs, outputs in sizes), default=0.0)


def read_adapter(settings: SimpleNamespace, shape: ModelShape) -> Adapter | None:
    """The adapter that a recipe trains. Raises `ValueError` for what PEFT refuses, or a plan does not know."""
    if not settings.use_peft:
        return None
    has_experts, named = shape.num_experts > 1, _names(settings.lora_target_modules)
    saved, is_all = _names(settings.lora_modules_to_save), named == ["all-linear"]
    targets = list(LINEARS) if is_all else named or ["q_proj", "v_proj"]
    # Of quantized weights no copy can train, and experts are no modules.
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
            raise ValueError(f"`{field}` names {', '.join(unknown)}; a plan knows {', '.join(known) or 'none'}.")
    targets = [name for name in targets if name not in saved]
    adapter = Adapter(settings.lora_r, tuple(targets), tuple(saved), settings.use_dora, is_all and has_experts)
    stacked = adapter.on_experts(shape)
    for is_wrong, why in (
        (has_experts and not named, "there is no default: set `lora_target_modules`, such as all-linear"),
        (stacked and settings.use_dora, "there is no DoRA: set `use_dora: false`"),
        (stacked and settings.lora_dropout, f"there is no dropout, got {settings.lora_dropout}: `lora_dropout: 0`"),
        (stacked and ("gate_proj" in targets) != ("up_proj" in targets), "gate_proj and up_proj are one: name both"),
    ):
        if is_wrong:
            raise ValueError(f"PEFT refuses the adapter. On experts {why}.")
    return adapter


def _names(given: list[str] | str | None) -> list[str]:
    return [given] if isinstance(given, str) else list(dict.fromkeys(given or []))


def optimizer_bytes(optim: str, weight: int) -> float:
    """Of optimizer state for a weight of so many bytes. Raises `ValueError` for an unknown optimizer."""
    if optim in ADAMW:
        return 2 * weight
    if optim in ADAMW_8BIT:
        return 2 * (1 + 4 / BLOCK_OF_8_BITS)
    if optim == "sgd":
        return 0
    known = ", ".join([*ADAMW, *ADAMW_8BIT, "sgd"])
    raise ValueError(f"A plan does not know the memory of `optim: {optim}`: {known}.")


def quantized_bytes(shape: ModelShape, bits: int, nested: bool, held: int) -> float:
    """Bytes of a model of 8 or 4 bits: its linear layers, with their scales; the rest stays as it is held."""
    # 4 bits: half a byte a weight, and for each block of 64 a scale of 4 bytes, or nested of one byte and 4 for 256 of
    # those (section 3 of https://huggingface.co/papers/2305.14314). 8 bits: a byte a weight, and 4 a row.
    # bitsandbytes leaves experts alone, which are no linear layers.
    num_quantized = shape.num_linear - shape.num_stacked
    rest = held * (shape.num_parameters - num_quantized)
    if bits == 8:
        linears = list(shape.linears.values())[: 4 if shape.num_stacked else None]
        return num_quantized + rest + sum(4 * outputs * count for _, outputs, count in linears)
    return num_quantized * (0.5 + (1 + 4 / 256 if nested else 4) / BLOCK_OF_4_BITS) + rest


def state_bytes(
    frozen: float, num_trained: int, trained: int, optim: str, sharding: Sharding, num_gpus: int, accumulates: bool
) -> dict[str, float]:
    """Bytes of weights, gradients and optimizer state; `frozen` are those of weights that do not train."""
    # ZeRO (section 3 of https://huggingface.co/papers/1910.02054) cuts the optimizer's by the number of GPUs from
    # stage 1, gradients from 2, weights from 3. DeepSpeed trains bfloat16 weights with a copy in float32 beside the
    # moments: 2 + 2 + 12. FSDP2 shards float32 weights and gradients: 4 + 4 + 8; between two micro-batches whose
    # gradients are not reduced it holds those of the whole model in bfloat16 (`set_requires_gradient_sync` in torch's
    # documentation). DDP copies gradients into its buckets (`gradient_as_bucket_view` there).
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
    """Bytes a token that one layer keeps for its backward pass; `score_bytes` come on top."""
    # What autograd saves in transformers' layers of RMSNorm, attention and gated MLP, in the way of section 4.1 of
    # https://huggingface.co/papers/2205.05198. Of frozen weights' own layers neither what they read nor what a norm
    # scales is kept, because neither has a gradient to give.
    hidden, queries, keys = shape.hidden_size, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    trains = adapter is None
    # Two norms: the input in float32, the output, and a mean.
    norms = 2 * (4 * hidden + 4)
    inputs = 0
    if trains:
        norms += 2 * held * hidden
        # Read for queries, keys and values, and for gate and up, or a router; under autocast each makes its own copy.
        copies = 4 if shape.num_stacked else 5
        inputs = (2 if held == computed else copies) * computed * hidden
    # Queries and output, keys and values, which a mask has repeated for each query head, and a sum's logarithm a head.
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
    """Bytes a token that a layer's experts keep."""
    # Of each active expert gate, its SiLU and up, and what it gives, which its share scales; what it reads and what
    # its output layer reads, where those train. The kernels of transformers compute in the weights' own precision.
    reads = adapter is None or "gate_proj" in adapter.targets
    multiplies = adapter is None or "down_proj" in adapter.targets
    width, hidden = shape.intermediate_size, shape.hidden_size
    each = held * ((4 if multiplies else 3) * width + (2 if reads else 1) * hidden)
    # Those that every token passes; the router's softmax in float32, four indices, and a share.
    shared = (4 if adapter is None else 3) * held * width * shape.num_shared_experts
    return shape.num_active_experts * (each + 4 * 8 + held) + shared + 4 * shape.num_experts


def score_bytes(shape: ModelShape, row: int, computed: int, attention: str) -> float:
    """Bytes a token of what grows with the length of its row."""
    # Eager: scores of each head in float32 and as computed (`5 a s` in section 4.1 of the same, without dropout).
    # SDPA: the mask of a padded batch, a byte, and a number as computed where it is added. Flash attention: nothing.
    if attention == "eager":
        return row * shape.num_heads * (4 + computed)
    return 0.0 if "flash" in attention else row * (1 + computed)


def backward_bytes(shape: ModelShape, tokens: int, held: int, computed: int, adapter: Adapter | None = None) -> float:
    """Bytes of a layer's backward pass beyond what it kept: gradients of the MLP, and of its largest weight."""
    if not shape.num_stacked:
        # DoRA multiplies in float32, and has three gradients of that.
        in_float = 12 if adapter is not None and adapter.is_dora else 0
        return (3 * computed + in_float) * tokens * shape.intermediate_size + (held + computed) * shape.largest_linear
    # Of what the experts gave three gradients, and of their weights those of gate and up, where down's are gone.
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
    """Bytes of a micro-batch at its fullest: `activations`, kept to the end of the forward pass, and `work` on top."""
    # Without a fused head all logits are there at once, with two copies and a gradient.
    trains_all, saved = adapter is None, () if adapter is None else adapter.saved
    layer = tokens * layer_bytes(shape, held, computed, attention, adapter)
    layer += 0 if adapter is None else adapter.merged_bytes(shape, held)
    scores = tokens * score_bytes(shape, row, computed, attention)
    if attention == "eager":  # each layer has its own; a mask is one for all
        layer, scores = layer + scores, 0.0
    # The last norm, and what the output layer reads.
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
    """Bytes of what a GPU gathers of the others' shards while it computes."""
    # FSDP2: two layers in bfloat16, the one at work and the next, embedding and output layer, which belong to no layer
    # and stay, with copies of these that train; and, for the fused output layer, its weight as it is sharded
    # (`full_tensor` in `add_fused_lm_head` of TRL). ZeRO-3: what it keeps at most, and a bucket of gradients. ZeRO-1
    # and 2: a bucket.
    if sharding.kind == "fsdp2":
        roots = shape.num_embedding * ((1 if shape.is_tied else 2) + num_copies)
        return 2 * (2 * shape.num_linear / shape.num_layers + roots) + held_by_shard * shape.num_embedding
    if sharding.kind == "zero3":
        return 2 * min(ZERO3_LIVE, shape.num_parameters) + 2 * ZERO_BUCKET
    return 2 * ZERO_BUCKET if sharding.is_deepspeed else 0.0


def vllm_cache_tokens(shape: ModelShape, memory: float, utilization: float, tensor_parallel_size: int) -> int:
    """Tokens whose keys and values fit into one engine of vLLM."""
    # Section 3 of https://huggingface.co/papers/2309.06180; tensor parallelism cuts them by key heads.
    free = utilization * memory - 2 * shape.num_parameters / tensor_parallel_size - VLLM_WORK
    return max(0, math.floor(free / (shape.kv_bytes / min(tensor_parallel_size, shape.num_kv_heads))))


def checkpoint_bytes(
    frozen: float, num_trained: int, trained: int, optim: str, sharding: Sharding, only_model: bool, is_adapter: bool
) -> float:
    """On disk, of one checkpoint: the weights or the adapter alone, and the optimizer's state unless `only_model`."""
    model = trained * num_trained + (0 if is_adapter else frozen)
    if only_model:
        return model
    if sharding.is_deepspeed:
        # Its own files hold the bfloat16 weights a second time.
        return 2 * model + (4 + optimizer_bytes(optim, 4)) * num_trained
    # FSDP2's own files hold the weights beside the model's.
    copies = 2 if sharding.kind == "fsdp2" else 1
    return model * copies + optimizer_bytes(optim, trained) * num_trained

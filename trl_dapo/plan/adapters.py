# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""What PEFT trains in place of all weights: LoRA on linear layers and on experts, and copies of whole modules."""

from dataclasses import dataclass
from types import SimpleNamespace

from ..models import ModelShape


LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
IN_EXPERTS = LINEARS[4:]
ENDS = ("embed_tokens", "lm_head")


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
        num = self.on_router * self.rank * (shape.hidden_size + shape.num_experts) * shape.num_layers
        for name in self.targets:
            inputs, outputs, count = shape.linears[name]
            wide = 2 if shape.num_experts > 1 and name in ("gate_proj", "up_proj") else 1
            num += (self.rank * (inputs + wide * outputs) + self.is_dora * outputs) * count
        return num

    def num_saved(self, shape: ModelShape) -> int:
        """Weights of the copies, which are there beside the originals, tied or not."""
        num = shape.num_embedding * len(set(ENDS) & set(self.saved))
        for name in set(LINEARS) & set(self.saved):
            inputs, outputs, count = shape.linears[name]
            num += (inputs + (shape.has_qkv_bias and name in LINEARS[:3])) * outputs * count
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
        numbers = sum(inputs + self.rank + 2 * self.is_dora * outputs for inputs, outputs, _ in targets)
        for together in (LINEARS[:3], ("gate_proj", "up_proj"), ("down_proj",)):
            saved = set(together) & set(self.saved)
            numbers += shape.linears[together[0]][0] * (min(1, len(saved)) if held == computed else len(saved))
        return computed * (numbers + self.on_router * (shape.hidden_size + self.rank))

    def merged_bytes(self, shape: ModelShape, held: int) -> float:
        """Bytes that one layer keeps whatever its tokens: the experts' weights with the adapter's product added."""
        # `ParamWrapper` of PEFT adds it in every forward pass, and casts both factors.
        if not self.on_experts(shape):
            return 0.0
        stacked = {name: shape.linears[name][:2] for name in IN_EXPERTS if name in self.targets}
        merged = sum(inputs * outputs for inputs, outputs in stacked.values()) * shape.num_experts
        factors = Adapter(self.rank, tuple(stacked)).num_lora(shape) // shape.num_layers
        return held * (merged + factors)

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
    is_quantized = settings.load_in_4bit or settings.load_in_8bit
    can_copy = LINEARS[: 0 if is_quantized else 4 if has_experts else None]
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

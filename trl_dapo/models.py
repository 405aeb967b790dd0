# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Facts from a model's config: its sizes, their cost in memory and operations, its positions and context length."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from transformers import PreTrainedConfig


# The names of the field for the number of experts, which differ between model families.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
# The fields that the cost of attention depends on.
_COST_FIELDS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_experts_per_tok",
    "n_shared_experts",
    "shared_expert_intermediate_size",
)
# Types of layers in which a token attends to all earlier tokens of its row. `hybrid` layers combine attention with a
# state.
FULL_ATTENTION = ("full_attention", "hybrid")
# Types of layers that ignore padding. Other types keep a state, convolve, or count positions in blocks.
PLAIN_ATTENTION = frozenset({"full_attention", "sliding_attention", "chunked_attention"})


@dataclass(frozen=True)
class ModelShape:
    """
    Sizes of a decoder, as in `config.json`. It has an embedding, layers of attention and a gated MLP with RMSNorm, and
    an output layer.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    intermediate_size: int  # of the MLP, or of an expert
    num_experts: int = 1
    num_active_experts: int = 1
    num_shared_experts: float = 0  # experts that every token uses, in multiples of the width of other experts
    num_full_layers: int | None = None  # layers without sliding window or linear attention; `None` for all
    is_tied: bool = False  # whether the output layer shares the weights of the embedding
    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    num_other: int = 0  # other weights, such as those of a vision tower

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "ModelShape":
        """
        Return the sizes in a config. For a model with images they are those of its text model.

        Raises:
            ValueError: If a size is missing or is not a positive number.
        """
        text = {**config, **config.get("text_config", {})}
        if "kv_lora_rank" in text:
            raise ValueError(
                "The model compresses its keys and values (`kv_lora_rank`), which a plan does not support. Plan with "
                "a model of another architecture."
            )
        try:
            hidden_size, num_heads = text["hidden_size"], text["num_attention_heads"]
            num_experts = next((text[name] for name in EXPERTS if text.get(name)), 1)
            width = "intermediate_size"
            if num_experts > 1 and "moe_intermediate_size" in text:
                width = "moe_intermediate_size"
            num_layers, head_dim = text["num_hidden_layers"], text.get("head_dim") or hidden_size // num_heads
            vocab_size, size = text["vocab_size"], text[width]
            shared = text.get("shared_expert_intermediate_size") or size * (text.get("n_shared_experts") or 0)
            layer_types = text.get("layer_types")
            if min(hidden_size, num_heads, num_layers, head_dim, vocab_size, size) < 1:
                raise TypeError
            return cls(
                hidden_size=hidden_size,
                num_layers=num_layers,
                num_heads=num_heads,
                num_kv_heads=text.get("num_key_value_heads") or num_heads,
                head_dim=head_dim,
                vocab_size=vocab_size,
                intermediate_size=size,
                num_experts=num_experts,
                num_active_experts=text.get("num_experts_per_tok", 1) if num_experts > 1 else 1,
                num_shared_experts=shared / size if num_experts > 1 else 0,
                num_full_layers=sum(kind in FULL_ATTENTION for kind in layer_types) if layer_types else None,
                is_tied=config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)),
                has_qkv_bias=text.get("attention_bias", config["model_type"] == "qwen2"),
                has_qk_norm="qwen3" in config["model_type"],
                num_other=config.get("num_vision_weights", 0),  # only set in the plan's own table of models
            )
        except KeyError as error:
            raise ValueError(
                f"The model's config.json has no {error.args[0]!r}, so its memory cannot be planned."
            ) from None
        except (TypeError, AttributeError, ZeroDivisionError):
            raise ValueError("The model's config.json has sizes that are not positive numbers.") from None

    @property
    def linears(self) -> dict[str, tuple[int, int, int]]:
        """The number of inputs and outputs of each linear layer, and how many of them the model has, by name."""
        hidden, queries = self.hidden_size, self.num_heads * self.head_dim
        keys, experts = self.num_kv_heads * self.head_dim, self.num_layers * self.num_experts
        return {
            "q_proj": (hidden, queries, self.num_layers),
            "k_proj": (hidden, keys, self.num_layers),
            "v_proj": (hidden, keys, self.num_layers),
            "o_proj": (queries, hidden, self.num_layers),
            "gate_proj": (hidden, self.intermediate_size, experts),
            "up_proj": (hidden, self.intermediate_size, experts),
            "down_proj": (self.intermediate_size, hidden, experts),
        }

    @property
    def num_linear(self) -> int:
        """Number of weights in linear layers."""
        return sum(inputs * outputs * count for inputs, outputs, count in self.linears.values())

    @property
    def num_stacked(self) -> int:
        """Number of weights in experts. Transformers stacks them into two parameters per layer."""
        experts = 3 * self.hidden_size * self.intermediate_size * self.num_experts * self.num_layers
        return experts if self.num_experts > 1 else 0

    @property
    def largest_linear(self) -> int:
        """Number of weights in the largest linear layer."""
        return max(inputs * outputs for inputs, outputs, _ in self.linears.values())

    @property
    def num_embedding(self) -> int:
        """Number of weights in the embedding, which is the same for the output layer."""
        return self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """Number of all weights."""
        norms = self.hidden_size * (2 * self.num_layers + 1)
        if self.has_qk_norm:
            norms += 2 * self.head_dim * self.num_layers
        biases = router = 0
        if self.has_qkv_bias:
            biases = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim * self.num_layers
        if self.num_experts > 1:
            router = self.hidden_size * self.num_experts * self.num_layers
        embeddings = self.num_embedding * (1 if self.is_tied else 2)
        return self.num_linear + norms + biases + router + embeddings + self.num_other

    def _multiplied(self, num_experts: float) -> float:
        """
        Return the number of weights by which a token is multiplied. Those of other experts and of the input embedding,
        which is only looked up, do not count.
        """
        projections = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        experts = 3 * self.hidden_size * self.intermediate_size * num_experts
        return self.num_layers * (projections + experts) + self.num_embedding

    @property
    def attention_cost(self) -> float:
        """Cost of one pair of tokens in attention, relative to the cost of one token elsewhere: `2 L H Q / N`."""
        # A token takes `6 N + 12 L H Q T` operations in the forward and backward pass, for `N` weights, `L` layers,
        # `H` heads of dimension `Q` and `T` tokens in its row (https://huggingface.co/papers/2204.02311, appendix B).
        # This does not assume that the causal mask saves operations, because attention with a padding mask does not
        # use that.
        num_full_layers = self.num_layers if self.num_full_layers is None else self.num_full_layers
        pairs = 2 * num_full_layers * self.num_heads * self.head_dim
        return pairs / self._multiplied(self.num_active_experts + self.num_shared_experts)

    @property
    def kv_bytes(self) -> int:
        """Size of a token's keys and values of all layers in bfloat16, in bytes."""
        return 2 * 2 * self.num_layers * self.num_kv_heads * self.head_dim


def attention_cost_of(config: Any) -> float:
    """
    Return an estimate of [`ModelShape.attention_cost`] from the config of a text model. It is `0.0` if the config has
    no sizes or the model has no layer with full attention.
    """
    layer_types = getattr(config, "layer_types", None)
    layer = next((layer for layer, kind in enumerate(layer_types or []) if kind in FULL_ATTENTION), 0)
    # If layers differ, the sizes of the first one with full attention are used for all. Sizes may be in lists, or in
    # one config per layer.
    source = config.per_layer_config[layer] if getattr(config, "is_heterogeneous", False) else config
    values = {name: _number(getattr(source, name, None), layer) for name in _COST_FIELDS}
    sizes = {name: number for name, number in values.items() if number}  # model families have different fields
    if not {"hidden_size", "num_attention_heads", "num_hidden_layers"} <= sizes.keys():
        return 0.0
    defaults = {"model_type": "", "vocab_size": 0, "intermediate_size": 4 * sizes["hidden_size"]}
    # The number of experts does not affect the cost, only whether there are any.
    others = {"num_experts": 2 if "num_experts_per_tok" in sizes else 1, "layer_types": layer_types}
    return ModelShape.from_config({**defaults, **sizes, **others}).attention_cost


def _number(value: Any, layer: int) -> Any:
    """Return a value of a config for one layer, if it is a positive number, otherwise `None`."""
    value = value[layer] if isinstance(value, (list, tuple)) and layer < len(value) else value
    return value if isinstance(value, (int, float)) and value > 0 else None


def has_plain_attention(config: "PreTrainedConfig") -> bool:
    """
    Return whether all layers are attention with rotary positions. Such layers only depend on the distances of tokens,
    and ignore padding.
    """
    layer_types = getattr(config.get_text_config(), "layer_types", None) or ()
    return bool(_rope_parameters(config)) and PLAIN_ATTENTION.issuperset(layer_types)


def why_positions_are_absolute(config: "PreTrainedConfig") -> str | None:
    """
    Return why the log-probabilities of a model with rotary positions depend on the padding of a row. `None` if the
    config has no such reason.
    """
    # For most such models the effect only begins at thousands of tokens, so that a test with short rows would miss it.
    for rope in _rope_parameters(config):
        kind = rope.get("rope_type", rope.get("type", "default"))
        if "dynamic" in kind or kind == "longrope":
            return f"its rope type {kind!r} depends on the number of columns"
        if rope.get("llama_4_scaling_beta"):
            return "its attention is scaled by the absolute position (`llama_4_scaling_beta`)"
    if getattr(config.get_text_config(), "attn_temperature_tuning", False):
        return "its attention is scaled by the absolute position (`attn_temperature_tuning`)"
    return None


def context_length(config: "PreTrainedConfig") -> int | None:
    """
    Return the maximum number of tokens of prompt and completion that a model supports, with rope scaling. `None` if
    the config has no limit.
    """
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    if longest is None:
        return None
    scaled = [
        (rope.get("original_max_position_embeddings") or longest) * (rope.get("factor") or 1)
        for rope in _rope_parameters(config)
    ]
    return int(max([longest, *scaled]))


def _rope_parameters(config: "PreTrainedConfig") -> list[dict]:
    """Return the rope parameters of a config. Some models have several, one for each type of layer."""
    parameters = getattr(config.get_text_config(), "rope_parameters", None) or {}
    return [value for value in parameters.values() if isinstance(value, dict)] or ([parameters] if parameters else [])

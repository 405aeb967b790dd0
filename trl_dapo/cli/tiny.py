# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""A small random model for trying out runs, and a reward that it can get by chance."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM


CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def build_tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte, which can encode any prompt."""
    specials = ["<|pad|>", "<|end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytewise = Tokenizer(models.BPE({token: i for i, token in enumerate([*specials, *alphabet])}, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    return _with_template(bytewise, CHAT_TEMPLATE, pad_token="<|pad|>", eos_token="<|end|>")


def build_character_tokenizer(characters: str, chat_template: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token for each of some characters."""
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *characters])}
    by_character = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    by_character.pre_tokenizer = pre_tokenizers.Split(Regex("(?m)."), "isolated")
    by_character.decoder = decoders.Fuse()
    return _with_template(by_character, chat_template, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def _with_template(tokenizer: Tokenizer, chat_template: str, **tokens: str) -> PreTrainedTokenizerFast:
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", **tokens)
    fast.chat_template = chat_template
    return fast


def build_tiny_model(tokenizer: PreTrainedTokenizerFast, seed: int, **sizes: Any) -> Qwen3ForCausalLM:
    """Return a Qwen3 model with random weights. It has 0.1 million parameters unless `sizes` changes its config."""
    settings: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(**{**settings, **sizes}))


def digit_reward(completions: list[list[dict[str, str]]], **kwargs: Any) -> list[float | None]:
    """Reward function that gives 1.0 if a completion contains a digit, as some of a random model do, otherwise 0.0."""
    return [float(any(character in "0123456789" for character in text[-1]["content"])) for text in completions]


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, path: Path) -> None:
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)

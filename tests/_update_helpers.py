# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""A tiny model, its tokenizer, and trainers whose completions are scripted."""

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM


VOCAB_SIZE = 64


def tiny_tokenizer():
    words = ["<pad>", "<eos>", *(f"w{i}" for i in range(2, VOCAB_SIZE))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="w2"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="w2")


def tiny_model(seed=0, hidden_size=32, num_layers=2):
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden_size // 4,
        max_position_embeddings=2048,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def prompts(num_prompts=32):
    """Prompts of 2 to 9 words."""
    return Dataset.from_list([{"prompt": " ".join(f"w{2 + i}" for _ in range(2 + i % 8))} for i in range(num_prompts)])

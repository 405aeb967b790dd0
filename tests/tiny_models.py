# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Small random models: one that reads characters, one that may call tools, one that takes images."""

import string
from pathlib import Path

import torch
from transformers import (
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaImageProcessorPil,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    Qwen3ForCausalLM,
)
from trl.chat_template_utils import qwen3_chat_template

from trl_dapo.cli.tiny import build_character_tokenizer, build_tiny_model


CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'][0] }}>{{ message['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
IMAGE_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'][0] }}>"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<eos>"
    "{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per character."""
    return build_character_tokenizer(string.printable, CHAT_TEMPLATE)


def make_model(tokenizer: PreTrainedTokenizerFast | None = None, **sizes) -> Qwen3ForCausalLM:
    """A model with the same weights for the same sizes. By default it fits the vocabulary of `make_tokenizer`."""
    settings = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 2048,
    }
    return build_tiny_model(tokenizer or make_tokenizer(), seed=0, **{**settings, **sizes})


def save_tiny_model(path: Path, tokenizer: PreTrainedTokenizerFast | None = None, **sizes) -> str:
    tokenizer = tokenizer or make_tokenizer()
    make_model(tokenizer, **sizes).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def save_tool_model(path: Path) -> str:
    """A model with the chat template of Qwen3, whose tool calls TRL can parse."""
    tokenizer = make_tokenizer()
    marks = ["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
    tokenizer.add_special_tokens({"additional_special_tokens": marks[:2], "eos_token": "<|im_end|>"})
    tokenizer.add_tokens(marks[2:])
    tokenizer.chat_template = qwen3_chat_template
    return save_tiny_model(path, tokenizer)


def save_image_model(path: Path) -> str:
    """A Llava model that sees 8 x 8 pixels as four patches."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    size = {"height": 8, "width": 8}
    processor = LlavaProcessor(
        LlavaImageProcessorPil(size=size, crop_size=size),
        tokenizer,
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=IMAGE_TEMPLATE,
    )
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=8,
            patch_size=4,
            projection_dim=16,
        ),
        text_config=make_model(tokenizer).config,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=4,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    LlavaForConditionalGeneration(config).save_pretrained(path)
    processor.save_pretrained(path)
    return str(path)

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Small random models of other kinds than `helpers.save_tiny_model`'s: one that may call tools, one that sees."""

from pathlib import Path

import torch
from helpers import make_config, make_tokenizer, save_tiny_model
from transformers import (
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaImageProcessorPil,
    LlavaProcessor,
)
from trl.chat_template_utils import qwen3_chat_template


IMAGE_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'][0] }}>"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<eos>"
    "{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


def save_tool_model(path: Path) -> str:
    """A model whose chat template is Qwen3's, which TRL knows how to parse tool calls of."""
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
    torch.manual_seed(0)
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
        text_config=make_config(tokenizer),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=4,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlavaForConditionalGeneration(config).save_pretrained(path)
    processor.save_pretrained(path)
    return str(path)

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Helpers for the tests of plans: recipes, and a model with few weights."""

from pathlib import Path

from trl_dapo.models import ModelShape


ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
GIB = 2**30


ONE_GPU = {
    **{"model_name_or_path": "Qwen/Qwen3-1.7B-Base", "prompts_per_rollout": 64, "prompts_per_step": 16},
    **{"num_generations": 16, "per_device_train_batch_size": 1, "bf16": True, "max_steps": 1_200},
    **{"max_tokens_per_microbatch": 16_384, "max_completion_length": 8_192, "vllm_max_model_length": 10_240},
    **{"use_vllm": True, "vllm_mode": "colocate", "vllm_enable_sleep_mode": True, "vllm_gpu_memory_utilization": 0.5},
}
NINE_MACHINES = {
    **{**ONE_GPU, "model_name_or_path": "Qwen/Qwen2.5-32B", "prompts_per_rollout": 512, "prompts_per_step": 32},
    **{"max_tokens_per_microbatch": 22_528, "max_completion_length": 20_480, "vllm_max_model_length": 22_528},
    "vllm_mode": "server",
}
TINY_RUN = {"tiny_model": True, "prompts_per_rollout": 4, "num_generations": 4, "max_completion_length": 32}

# A model with 2 layers, width 4, 2 heads and 1 key head of size 3, an MLP of width 5, and 7 tokens.
SMALL = ModelShape(
    hidden_size=4, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=3, vocab_size=7, intermediate_size=5
)

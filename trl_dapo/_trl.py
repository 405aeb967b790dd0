# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The seam: every private name of TRL and transformers that this package leans on, as data.

`tests/test_trl_contract.py` holds each line against the installed releases, so that an upstream change fails there, by
name, and not in the middle of a training run.
"""

# Methods of GRPOTrainer that are overridden, and the parameters they are called with.
OVERRIDES = {
    # rows are this rank's; runs generation, padding, log-probabilities, rewards and advantages, in this order
    "_generate_and_score_completions": ("self", "inputs"),
    # returns GENERATED, each of them one list entry a row of this rank
    "_generate": ("self", "prompts"),
    # returns rewards of all ranks, gathered in rank order: groups are consecutive rows
    "_calculate_rewards": ("self", "inputs", "prompts", "completions", "completion_ids_list"),
    "_save_checkpoint": ("self", "model", "trial"),
    "_load_optimizer_and_scheduler": ("self", "checkpoint"),
}

# What `_generate` returns, in order.
GENERATED = (
    "prompt_ids",
    "completion_ids",
    "tool_mask",
    "completions",
    "logprobs",
    "extra_fields",
    "images",
    "tool_images",
)

# Attributes of a constructed trainer that are read or swapped.
READS = (
    "_metrics",  # {"train": defaultdict(list), "eval": defaultdict(list)}: one value a call, averaged by `log`
    "_logs",  # the completions table; its "extra" holds what reward functions passed to `log_extra`
    "_pending_extra_logs",  # what reward functions logged of this rank's rows; flushed at the end of a rollout
    "_tokenizer",  # the processing class, or the tokenizer inside a processor
    "environment_factories",  # None, or {name: factory}
    "environments",  # this batch's environments, or None
    "eos_token_ids",
    "mask_truncated_completions",
    "max_completion_length",
    "num_generations",
    "reward_func_names",
    "reward_funcs",
    "reward_processing_classes",
    "reward_weights",  # one a reward function, on the CPU
    "shuffle_dataset",
    "use_transformers_continuous_batching",
    "use_vllm",
)

# Attributes that exist only with environments.
ENVIRONMENT_READS = (
    "_batch_environments",  # the environment's name of each row of the batch
    "_environment_pool",  # {name: [instance]}, `reset` once a rollout
)

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Every name of TRL's and transformers' trainers that this package relies on, as data.

`trl_check.py` checks them when the trainer is imported with a TRL that is newer than those that were tested.
`tests/trainer/test_trl_contract.py` checks each line against the installed releases, and reads the package's syntax
for names that are missing here. The keys of a rollout are in `update.rollout_tensors.ROLLOUT_KEYS`, which
`tests/update/test_update_trl_loss.py` checks.
"""

# Methods of GRPOTrainer that are overridden, and the parameters they are called with.
OVERRIDES = {
    # rows are this rank's; runs generation, padding, log-probabilities, rewards and advantages, in this order
    "_generate_and_score_completions": ("self", "inputs"),
    # returns GENERATED, each of them one list entry a row of this rank
    "_generate": ("self", "prompts"),
    # calls `_generate_single_turn` as long as this rank has calls, with its rows alone
    "_tool_call_loop": (
        "self",
        "prompts",
        "prompt_ids",
        "completion_ids",
        "completions",
        "logprobs",
        "images",
        "multimodal_fields",
    ),
    # returns rewards of all ranks, gathered in rank order: groups are consecutive rows
    "_calculate_rewards": ("self", "inputs", "prompts", "completions", "completion_ids_list"),
    # returns the rows of one micro-batch
    "_prepare_inputs": ("self", "generation_batch"),
    "_compute_loss": ("self", "model", "inputs"),
    "training_step": ("self", "model", "inputs", "num_items_in_batch"),
    # returns the batches of one optimizer step, as many as it has micro-batches
    "get_batch_samples": ("self", "epoch_iterator", "num_batches", "device"),
    # the loop behind `evaluate` and `predict`
    "evaluation_loop": (
        "self",
        "dataloader",
        "description",
        "prediction_loss_only",
        "ignore_keys",
        "metric_key_prefix",
    ),
    "get_train_dataloader": ("self",),
    "get_eval_dataloader": ("self", "eval_dataset"),
    "get_test_dataloader": ("self", "test_dataset"),
    # averages `_metrics`, without NaN, into `logs`
    "log": ("self", "logs", "start_time"),
    "train": ("self", "resume_from_checkpoint", "trial", "ignore_keys_for_eval"),
    "_save_checkpoint": ("self", "model", "trial"),
    # called by `_save_checkpoint` on every rank, before `trainer_state.json` is written
    "_save_rng_state": ("self", "output_dir"),
    "_load_from_checkpoint": ("self", "resume_from_checkpoint", "model"),
    "_load_best_model": ("self",),
    "_load_optimizer_and_scheduler": ("self", "checkpoint"),
}

# The first parameters of `_get_per_token_logps_and_entropies`, which is overridden too. They are passed by position or
# by keyword; those behind them change with every kind of image input.
LOGPS_TAKES = (
    "self",
    "model",
    "input_ids",
    "attention_mask",
    "logits_to_keep",
    "batch_size",
    "compute_entropy",
    "compute_aux_loss",
)
# And this is what it returns.
LOGPS_RETURNS = ("log-probabilities", "entropies", "auxiliary loss")

# Names that the oldest releases lack, and what has them first. `trl_dapo/update/compat.py` alone asks for them.
LATER_NAMES = {
    "_defer_fsdp_gradient_reduction": "transformers 5.23.0",
    "eos_token_ids": "trl 1.14.2",
    "is_distributed_loading_by_transformers": "transformers 5.19.0",
}

# Methods that are called unchanged, and the first parameters of each, in order: those that are passed, by position
# or by keyword. A release may add others behind them that have a default.
CALLS = {
    "get_high_entropy_mask": ("self", "entropies", "mask", "threshold"),
    "get_off_policy_mask": (  # a static method
        "advantages",
        "per_token_logps",
        "sampling_per_token_logps",
        "mask",
        "off_policy_threshold",
    ),
    "_generate_single_turn": ("self", "prompt_ids", "images", "multimodal_fields", "num_generations"),
    "evaluate": ("self", "eval_dataset"),
    "_get_output_dir": ("self", "trial"),
    "save_model": ("self", "output_dir"),  # of `GRPOTrainer` itself, in the quickstart, as the next
    "save_state": ("self",),
    "_set_signature_columns_if_needed": ("self",),
    "_tokenize_prompts": ("self", "prompts"),  # returns the three that `_generate_single_turn` takes first
    "add_callback": ("self", "callback"),
    "get_cp_size": ("self",),
    "get_sp_size": ("self",),
    "get_tp_size": ("self",),
    "remove_callback": ("self", "callback"),
}

# Functions of trl.trainer.utils, and the first parameters of each, as those of `CALLS`.
UTILS = {
    "get_config_model_id": ("config",),
    "pad": ("tensors", "padding_value", "padding_side", "pad_to_multiple_of"),
    "shuffle_sequence_dict": ("seq_dict",),  # one draw of torch.randperm, over this rank's rows
    "split_pixel_values_by_grid": ("batch",),
    "split_tensor_dict": ("tensor_dict", "num_chunks"),
    "unsplit_pixel_values_by_grid": ("batch",),
}

# Types that annotations name.
TYPES = (
    "trl.distributed.DistributedBackend",
    "trl.generation.vllm_client.VLLMClient",
    "trl.trainer.grpo_trainer.RewardFunc",
)

# `trl grpo`: its fields, its `main`, which is run up to the trainer that it makes, and a dataset of a mixture.
SCRIPTS = ("trl.scripts.grpo", "trl.scripts.utils.DatasetConfig")
SCRIPT_MAIN = ("script_args", "training_args", "model_args", "dataset_args")  # passed by position

# Dataclasses whose fields a plan parses from their files, without importing them: package, file in it, class.
PARSED = (
    ("transformers", "training_args.py", "TrainingArguments"),
    ("trl", "trainer/base_config.py", "_BaseConfig"),
    ("trl", "trainer/grpo_config.py", "GRPOConfig"),
    ("trl", "trainer/model_config.py", "ModelConfig"),
    ("trl", "scripts/utils.py", "ScriptArguments"),
    ("trl", "scripts/utils.py", "DatasetMixtureConfig"),
    ("trl", "scripts/grpo.py", "GRPOScriptArguments"),
)

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

# Attributes of a constructed trainer that are read or patched.
READS = (
    "_current_train_step_time",  # seconds of the optimizer step so far
    "_buffered_inputs",  # what is left of the rollout: one entry a micro-step
    "_logs",  # the completions table; its "extra" holds what reward functions passed to `log_extra`
    "_metrics",  # {"train": defaultdict(list), "eval": defaultdict(list)}: one value a call, averaged by `log`
    "_pending_extra_logs",  # what reward functions logged of this rank's rows; flushed at the end of a rollout
    "_pending_metrics",  # and what they logged of the batch
    "_signature_columns",  # columns that `remove_unused_columns` keeps; None until asked for
    "_step",  # micro-steps made, of which a rollout lasts `steps_per_generation * num_iterations`
    "_tokenizer",  # the processing class, or the tokenizer inside a processor
    "environment_factories",  # None, or {name: factory}
    "environments",  # this batch's environments, or None
    "eval_dataset",  # one, or a dictionary of several, or None
    "reward_weights",  # one a reward function, on the CPU
    "_entropy_bonus_enabled",
    "_is_vlm",
    "_last_world_entropy",
    "accelerator",
    "args",
    "aux_loss_enabled",
    "beta",
    "callback_handler",
    "control",
    "entropy_coef",
    "epsilon_high",
    "epsilon_low",
    "generation_config",
    "generation_kwargs",
    "importance_sampling_level",
    "is_deepspeed_enabled",
    "is_fsdp_enabled",
    "log_completions",
    "loss_type",
    "mask_truncated_completions",
    "max_completion_length",
    "model",
    "model_wrapped",
    "neftune_noise_alpha",
    "num_generations",
    "num_generations_eval",
    "num_iterations",
    "off_policy_mask_threshold",
    "optimizer",
    "pad_to_multiple_of",
    "processing_class",
    "ref_model",
    "reward_func_names",
    "reward_funcs",
    "reward_processing_classes",
    "rollout_func",
    "router_aux_loss_coef",
    "shuffle_dataset",
    "state",
    "tools",
    "top_entropy_quantile",
    "train_dataset",
    "use_adaptive_entropy",
    "use_transformers_continuous_batching",
    "use_vllm",
    "vllm_importance_sampling_clip_max",
    "vllm_importance_sampling_clip_min",
    "vllm_importance_sampling_correction",
    "vllm_importance_sampling_mode",
)

# Attributes of `vllm_generation` that evaluation sets for its time.
VLLM_READS = ("temperature", "top_p", "top_k")

# Names that TRL's modules look up when they make the engine, and that stand for ours for that time: module, function
# that looks it up, name.
PATCHED = (
    ("trl.trainer.grpo_trainer", "GRPOTrainer.__init__", "VLLMGeneration"),
    ("trl.generation.vllm_generation", "VLLMGeneration._init_vllm", "LLM"),
    ("trl.generation.vllm_generation", "VLLMGeneration._init_vllm", "VLLMClient"),
    ("trl.generation.vllm_generation", "VLLMGeneration._init_vllm", "is_vllm_available"),
    ("trl.generation.vllm_client", "VLLMClient.check_server", "requests"),
)

# Methods of VLLMGeneration that are overridden, and those of its client, with the parameters they are called with.
VLLM_OVERRIDES = {
    "_init_vllm": ("self",),  # called last by `__init__`; makes `llm`, or `vllm_client` and its group
    "sync_weights": ("self",),
    # calls `sync_weights` where `_llm_weights_sleeping`; then `llm.wake_up(tags)`, `llm.generate`, `llm.sleep(level)`
    "generate": ("self", "prompts", "images", "num_generations", "profiler"),
}
CLIENT_OVERRIDES = {
    "check_server": ("self", "total_timeout", "retry_interval"),  # asked first of all; the session is there
    "init_communicator": ("self", "device"),
    # called by keyword; behind tool calls with one completion a prompt. TRL cuts it to `max_completion_length` there
    "generate": (
        "self",
        "prompts",
        "features",
        "n",
        "repetition_penalty",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "max_tokens",
        "logprobs",
        "structured_outputs_regex",
        "generation_kwargs",
    ),
    "_post": ("self", "url", "kwargs"),  # every request; its `json` names the `model`
}

# Further attributes of VLLMGeneration that are read or set.
VLLM_ATTRIBUTES = (
    "_dist",  # what shards the model: `fsdp_version`, `gather_params`
    "_llm_weights_sleeping",
    "accelerator",
    "llm",
    "mode",
    "model",
    "vllm_client",
)
CLIENT_ATTRIBUTES = ("base_url", "model", "session")

# Attributes of `vllm_generation` that exist in one of its modes.
VLLM_LATER_READS = (
    "enable_sleep_mode",
    "llm",  # vLLM's own, which wakes and sleeps
    "_llm_weights_sleeping",  # whether the next call pushes all weights
    "vllm_client",  # the main process's alone; its `generate` takes keywords and returns the three below
)

# What the client's `generate` must return, by name.
VLLM_GENERATED = ("prompt_ids", "completion_ids", "logprobs")

# Attributes that exist only while training, with vLLM, or with environments.
LATER_READS = (
    "current_gradient_accumulation_steps",  # micro-steps of the optimizer step under way, by which losses are divided
    "_last_loaded_step",  # optimizer steps made when vLLM last got the weights; it gets them again where these differ
    "vllm_generation",
    "_batch_environments",  # the environment's name of each row of the batch
    "_environment_pool",  # {name: [instance]}, `reset` once a rollout
)

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Every name of TRL's and transformers' trainers that this package relies on, as data.

`trl_check.py` checks them when the trainer is imported and the installed TRL is newer than all tested versions.
`tests/trainer/test_trl_contract.py` checks each line against the installed releases, and searches the package's code
for names that are missing here. The keys of a rollout are in `update.rollout_tensors.ROLLOUT_KEYS`, which
`tests/update/test_update_trl_loss.py` checks.
"""

# Methods of GRPOTrainer that are overridden, and the parameters they are called with.
OVERRIDES = {
    # gets the rows of this process; runs generation, padding, log-probabilities, rewards and advantages, in this order
    "_generate_and_score_completions": ("self", "inputs"),
    # returns GENERATED: each is a list with one entry per row of this process
    "_generate": ("self", "prompts"),
    # calls `_generate_single_turn` with the rows of this process as long as any of them has tool calls
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
    # returns the rewards of all processes in the order of their ranks; the rows of a group are consecutive
    "_calculate_rewards": ("self", "inputs", "prompts", "completions", "completion_ids_list"),
    # returns the rows of one micro-batch
    "_prepare_inputs": ("self", "generation_batch"),
    "_compute_loss": ("self", "model", "inputs"),
    "training_step": ("self", "model", "inputs", "num_items_in_batch"),
    # returns the batches of one optimizer step, one per micro-batch
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
    # called by `_save_checkpoint` on every process before `trainer_state.json` is written
    "_save_rng_state": ("self", "output_dir"),
    "_load_from_checkpoint": ("self", "resume_from_checkpoint", "model"),
    "_load_best_model": ("self",),
    "_load_optimizer_and_scheduler": ("self", "checkpoint"),
}

# The first parameters of `_get_per_token_logps_and_entropies`, which is overridden too. They are passed by position or
# by keyword. The parameters after these depend on the kinds of image inputs.
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
# The values that it returns.
LOGPS_RETURNS = ("log-probabilities", "entropies", "auxiliary loss")

# Names that the oldest supported releases lack, and the first release that has each. Only `trl_dapo/update/compat.py`
# uses them.
LATER_NAMES = {
    "_defer_fsdp_gradient_reduction": "transformers 5.23.0",
    "eos_token_ids": "trl 1.14.2",
    "is_distributed_loading_by_transformers": "transformers 5.19.0",
}

# Methods that are called but not overridden, and their first parameters, which are passed by position or by keyword. A
# release may add further parameters that have defaults.
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
    "save_model": ("self", "output_dir"),  # the quickstart calls this and the next method on a `GRPOTrainer`
    "save_state": ("self",),
    "_set_signature_columns_if_needed": ("self",),
    "_tokenize_prompts": ("self", "prompts"),  # returns the first three arguments of `_generate_single_turn`
    "add_callback": ("self", "callback"),
    "get_cp_size": ("self",),
    "get_sp_size": ("self",),
    "get_tp_size": ("self",),
    "remove_callback": ("self", "callback"),
}

# Functions of trl.trainer.utils and their first parameters, as in `CALLS`.
UTILS = {
    "get_config_model_id": ("config",),
    "pad": ("tensors", "padding_value", "padding_side", "pad_to_multiple_of"),
    "shuffle_sequence_dict": ("seq_dict",),  # draws one `torch.randperm` over the rows of this process
    "split_pixel_values_by_grid": ("batch",),
    "split_tensor_dict": ("tensor_dict", "num_chunks"),
    "unsplit_pixel_values_by_grid": ("batch",),
}

# Types that are used in annotations.
TYPES = (
    "trl.distributed.DistributedBackend",
    "trl.generation.vllm_client.VLLMClient",
    "trl.trainer.grpo_trainer.RewardFunc",
)

# The script `trl grpo`. `trl-dapo` uses its arguments, runs its `main` with another trainer class, and reads the
# datasets of a mixture.
SCRIPTS = ("trl.scripts.grpo", "trl.scripts.utils.DatasetConfig")
SCRIPT_MAIN = ("script_args", "training_args", "model_args", "dataset_args")  # passed by position

# Dataclasses whose fields a plan reads from their source files without importing them: package, file, class.
PARSED = (
    ("transformers", "training_args.py", "TrainingArguments"),
    ("trl", "trainer/base_config.py", "_BaseConfig"),
    ("trl", "trainer/grpo_config.py", "GRPOConfig"),
    ("trl", "trainer/model_config.py", "ModelConfig"),
    ("trl", "scripts/utils.py", "ScriptArguments"),
    ("trl", "scripts/utils.py", "DatasetMixtureConfig"),
    ("trl", "scripts/grpo.py", "GRPOScriptArguments"),
)

# The values that `_generate` returns, in order.
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
    "_current_train_step_time",  # seconds of the present optimizer step so far
    "_buffered_inputs",  # the rollout, with one entry per micro-step
    "_logs",  # the table of completions; "extra" has the columns that reward functions passed to `log_extra`
    "_metrics",  # {"train": defaultdict(list), "eval": defaultdict(list)}: values that `log` averages
    "_pending_extra_logs",  # values passed to `log_extra` for rows of this process; flushed at the end of a rollout
    "_pending_metrics",  # values passed to `log_metric` for the batch
    "_signature_columns",  # columns that `remove_unused_columns` keeps; `None` before they are first needed
    "_step",  # number of micro-steps so far; a rollout lasts `steps_per_generation * num_iterations` of them
    "_tokenizer",  # the processing class, or the tokenizer inside a processor
    "environment_factories",  # {name: factory}, or `None`
    "environments",  # the environments of the present batch, or `None`
    "eval_dataset",  # a dataset, a dictionary of datasets, or `None`
    "reward_weights",  # one weight per reward function, on the CPU
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

# Attributes of `vllm_generation` that are changed during evaluation.
VLLM_READS = ("temperature", "top_p", "top_k")

# Names that are replaced with ours while TRL creates the engine: module, function that looks up the name, name.
PATCHED = (
    ("trl.trainer.grpo_trainer", "GRPOTrainer.__init__", "VLLMGeneration"),
    ("trl.generation.vllm_generation", "VLLMGeneration._init_vllm", "LLM"),
    ("trl.generation.vllm_generation", "VLLMGeneration._init_vllm", "VLLMClient"),
    ("trl.generation.vllm_generation", "VLLMGeneration._init_vllm", "is_vllm_available"),
    ("trl.generation.vllm_client", "VLLMClient.check_server", "requests"),
)

# Methods of VLLMGeneration and of its client that are overridden, with the parameters they are called with.
VLLM_OVERRIDES = {
    "_init_vllm": ("self",),  # called at the end of `__init__`; creates `llm`, or `vllm_client` and its group
    "sync_weights": ("self",),
    # calls `sync_weights` if `_llm_weights_sleeping`; then `llm.wake_up(tags)`, `llm.generate`, `llm.sleep(level)`
    "generate": ("self", "prompts", "images", "num_generations", "profiler"),
}
CLIENT_OVERRIDES = {
    "check_server": (
        "self",
        "total_timeout",
        "retry_interval",
    ),  # called before all other requests, when the session exists
    "init_communicator": ("self", "device"),
    # called with keywords; after tool calls with one completion per prompt, which TRL truncates to
    # `max_completion_length`
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
    "_post": ("self", "url", "kwargs"),  # called for every request; its `json` contains the `model`
}

# Attributes of VLLMGeneration that are read or set.
VLLM_ATTRIBUTES = (
    "_dist",  # the backend that shards the model, with `fsdp_version` and `gather_params`
    "_llm_weights_sleeping",
    "accelerator",
    "llm",
    "mode",
    "model",
    "vllm_client",
)
CLIENT_ATTRIBUTES = ("base_url", "model", "session")

# Attributes of `vllm_generation` that exist only in one of its modes.
VLLM_LATER_READS = (
    "enable_sleep_mode",
    "llm",  # vLLM's engine, which can sleep and wake up
    "_llm_weights_sleeping",  # whether the next call pushes all weights
    "vllm_client",  # only on the main process; its `generate` takes keywords and returns the values below
)

# The values that the client's `generate` must return, by name.
VLLM_GENERATED = ("prompt_ids", "completion_ids", "logprobs")

# Attributes that exist only while training, with vLLM, or with environments.
LATER_READS = (
    "current_gradient_accumulation_steps",  # micro-steps of the present optimizer step, by which losses are divided
    "_last_loaded_step",  # optimizer steps when vLLM last got the weights; TRL pushes them again if it differs
    "vllm_generation",
    "_batch_environments",  # the name of the environment of each row of the batch
    "_environment_pool",  # {name: [instance]}; each is reset once per call of `_generate_and_score_completions`
)

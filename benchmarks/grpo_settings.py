# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
Every setting of `GRPOConfig`, honoured as `GRPOTrainer` honours it.

    python -m benchmarks grpo_settings                 # about three minutes; exit status 1 where one is not
    python -m benchmarks grpo_settings --field beta    # this one alone

Each case trains the same tiny model with both trainers for three optimizer steps, dynamic sampling off and the clips
and the loss of TRL, and compares losses, gradient norms, rewards and weights. What has no case here stands in
`ELSEWHERE` with the reason. A field that a new release of TRL or transformers brings is in neither:
`tests/project/test_benchmarks.py` names it.
"""

import contextlib
import dataclasses
import io
import logging
import tempfile
import warnings
from pathlib import Path

import torch
import transformers
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from trl_dapo import DAPOConfig, DAPOTrainer
from trl_dapo.cli.quickstart import build_model, build_tokenizer


NUM_STEPS = 3
TOLERANCE = 1e-4  # relative; of float32 sums in another order
# Of bfloat16; and of a bonus that TRL averages over each micro-batch, and DAPOTrainer over the step's tokens.
LOOSER = {"bf16": 5e-2, "cast_lm_head_to_fp32": 1e-2, "entropy_coef": 5e-3, "use_adaptive_entropy": 5e-3}
TRLS = {"epsilon_high": None, "beta": 0.0, "loss_type": "dapo"}

# By field: cases, each the settings that differ. Those of a field with another are named by the field they are of.
CASES: dict[str, list[dict]] = {
    "adam_beta1": [{"adam_beta1": 0.5}],
    "adam_beta2": [{"adam_beta2": 0.9}],
    "adam_epsilon": [{"adam_epsilon": 1e-3}],
    "average_tokens_across_devices": [{"average_tokens_across_devices": False}],
    "bf16": [{"bf16": True}],
    "cast_lm_head_to_fp32": [{"cast_lm_head_to_fp32": True, "model_init_kwargs": {"dtype": "bfloat16"}}],
    "chat_template_kwargs": [{"chat_template_kwargs": {"enable_thinking": False}}],
    "data_seed": [{"data_seed": 3}],
    "dataloader_drop_last": [{"dataloader_drop_last": True}],
    "dataloader_num_workers": [{"dataloader_num_workers": 1}],
    "dataloader_pin_memory": [{"dataloader_pin_memory": False}],
    "dataloader_prefetch_factor": [{"dataloader_num_workers": 1, "dataloader_prefetch_factor": 1}],
    "dataloader_persistent_workers": [{"dataloader_num_workers": 1, "dataloader_persistent_workers": True}],
    "delta": [{"delta": 1.5, "num_iterations": 3}],
    "disable_dropout": [{"disable_dropout": True}],
    "disable_tqdm": [{"disable_tqdm": False}],
    "entropy_coef": [{"entropy_coef": 0.1}],
    "epsilon": [{"epsilon": 1e-3, "num_iterations": 3}],
    "epsilon_high": [{"epsilon_high": 1e-3, "num_iterations": 3}],
    "full_determinism": [{"full_determinism": False}],
    "generation_batch_size": [{"generation_batch_size": 16}],
    "generation_kwargs": [{"generation_kwargs": {"no_repeat_ngram_size": 2}}],
    "gradient_accumulation_steps": [{"gradient_accumulation_steps": 2}],
    "gradient_checkpointing": [{"gradient_checkpointing": True}],
    "gradient_checkpointing_kwargs": [
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    ],
    "importance_sampling_level": [{"importance_sampling_level": "sequence", "loss_type": "grpo", "num_iterations": 2}],
    "include_num_input_tokens_seen": [{"include_num_input_tokens_seen": "all"}],
    "learning_rate": [{"learning_rate": 1e-4}],
    "log_completions": [{"log_completions": True}],
    "log_unique_prompts": [{"log_completions": True, "log_unique_prompts": True}],
    "logging_first_step": [{"logging_first_step": True}],
    "logging_nan_inf_filter": [{"logging_nan_inf_filter": False}],
    "logging_steps": [{"logging_steps": 3}],
    "logging_strategy": [{"logging_strategy": "epoch"}],
    "loss_type": [
        *({"loss_type": loss} for loss in ("grpo", "bnpo", "dr_grpo", "cispo", "sapo", "vespo")),
        {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    ],
    "lr_scheduler_kwargs": [{"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 2.0}}],
    "lr_scheduler_type": [{"lr_scheduler_type": "cosine"}],
    "mask_truncated_completions": [{"mask_truncated_completions": True}],
    "max_completion_length": [{"max_completion_length": 5}],
    "max_grad_norm": [{"max_grad_norm": 1e-3}],
    "max_steps": [{"max_steps": 2}],
    "min_p": [{"min_p": 0.1}],
    "multi_objective_aggregation": [{"multi_objective_aggregation": "normalize_then_sum"}],
    "num_completions_to_print": [{"log_completions": True, "num_completions_to_print": 1}],
    "num_generations": [{"num_generations": 2}],
    "num_iterations": [{"num_iterations": 2}],
    "num_train_epochs": [{"max_steps": -1, "num_train_epochs": 0.5}],
    "off_policy_mask_threshold": [{"off_policy_mask_threshold": 1e-6, "num_iterations": 3}],
    "optim": [{"optim": "sgd"}, {"optim": "adafactor"}],
    "optim_args": [{"optim": "adamw_torch", "optim_args": "eps=1e-3"}],
    "pad_to_multiple_of": [{"pad_to_multiple_of": 8}],
    "per_device_train_batch_size": [{"per_device_train_batch_size": 8}],
    "remove_unused_columns": [{"remove_unused_columns": True}],
    "repetition_penalty": [{"repetition_penalty": 1.3}],
    "reward_weights": [{"reward_weights": [1.0, 0.2]}],
    "sapo_temperature_neg": [{"loss_type": "sapo", "sapo_temperature_neg": 2.0, "num_iterations": 2}],
    "sapo_temperature_pos": [{"loss_type": "sapo", "sapo_temperature_pos": 2.0, "num_iterations": 2}],
    "save_steps": [{"save_strategy": "steps", "save_steps": 2}],
    "scale_rewards": [{"scale_rewards": "batch"}, {"scale_rewards": "none"}],
    "seed": [{"seed": 7}],
    "shuffle_dataset": [{"shuffle_dataset": False}],
    "steps_per_generation": [{"steps_per_generation": 8, "loss_type": "grpo"}],
    "sync_ref_model": [
        {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5, "beta": 0.1},
    ],
    "temperature": [{"temperature": 0.7}],
    "top_entropy_quantile": [{"top_entropy_quantile": 0.5}],
    "top_k": [{"top_k": 5}],
    "top_p": [{"top_p": 0.7}],
    "use_adaptive_entropy": [
        {"use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_target": 1.0, "entropy_coef_delta": 0.05}
    ],
    "use_bias_correction_kl": [{"use_bias_correction_kl": True, "beta": 0.1, "num_iterations": 2}],
    "use_cache": [{"use_cache": False}],
    "vespo_k_neg": [{"loss_type": "vespo", "vespo_k_neg": 1.0, "num_iterations": 2}],
    "vespo_k_pos": [{"loss_type": "vespo", "vespo_k_pos": 1.0, "num_iterations": 2}],
    "vespo_lambda_neg": [{"loss_type": "vespo", "vespo_lambda_neg": 1.0, "num_iterations": 2}],
    "vespo_lambda_pos": [{"loss_type": "vespo", "vespo_lambda_pos": 1.0, "num_iterations": 2}],
    "warmup_steps": [{"warmup_steps": 2}],
    "weight_decay": [{"weight_decay": 0.5}],
    "beta": [{"beta": 0.1}],
    "torch_empty_cache_steps": [{"torch_empty_cache_steps": 1}],
    "train_sampling_strategy": [{"train_sampling_strategy": "sequential"}],
}

VLLM = "tests/vllm_cpu, with the real vLLM"
EVALUATION = "of evaluation: tests/evaluation, tests/trainer"
OUTSIDE = "of transformers alone: it names, saves, tracks or launches, and training does not read it"
DEVICES = (
    "of GPUs, compilers or several processes: tests/trainer/test_distributed.py and test_sharded.py where a CPU can"
)
BY_PREFIX = {
    **{"vllm_": VLLM, "eval_": EVALUATION, "hub_": OUTSIDE, "trackio_": OUTSIDE},
    **{"ddp_": DEVICES, "torch_compile": DEVICES},
}
ELSEWHERE = {
    **{
        field.name: why
        for field in dataclasses.fields(GRPOConfig)
        for prefix, why in BY_PREFIX.items()
        if field.name.startswith(prefix)
    },
    "use_vllm": VLLM,
    **dict.fromkeys(
        ("num_generations_eval", "per_device_eval_batch_size", "do_eval", "do_predict", "prediction_loss_only"),
        EVALUATION,
    ),
    **dict.fromkeys(
        ("include_for_metrics", "batch_eval_metrics", "load_best_model_at_end", "metric_for_best_model"), EVALUATION
    ),
    **dict.fromkeys(("greater_is_better", "bf16_full_eval", "fp16_full_eval", "label_names"), EVALUATION),
    **dict.fromkeys(
        (
            *("output_dir", "run_name", "project", "report_to", "push_to_hub", "do_train", "debug", "log_level"),
            *("log_level_replica", "log_on_each_node", "skip_memory_metrics", "local_rank", "save_on_each_node"),
            *("save_strategy", "save_total_limit", "save_only_model", "enable_jit_checkpoint", "log_multimodal"),
            *("log_completions_hub_repo", "trust_remote_code"),
        ),
        OUTSIDE,
    ),
    **dict.fromkeys(
        ("resume_from_checkpoint", "ignore_data_skip", "restore_callback_states_from_checkpoint"),
        "of a resume: tests/run/test_resume.py",
    ),
    **dict.fromkeys(
        (
            *(
                "fp16",
                "tf32",
                "use_cpu",
                "deepspeed",
                "fsdp",
                "fsdp_config",
                "accelerator_config",
                "liger_kernel_config",
            ),
            *("parallelism_config", "ds3_gather_for_generation", "use_liger_kernel", "auto_find_batch_size"),
            *("activation_checkpointing", "activation_checkpointing_kwargs"),
            *("dataloader_multiprocessing_context", "dataloader_in_order", "optim_target_modules"),
        ),
        DEVICES,
    ),
    **dict.fromkeys(
        ("label_smoothing_factor", "length_column_name"),
        "of a loss over labels, or of batches by length: GRPO has none",
    ),
    **dict.fromkeys(
        ("use_transformers_continuous_batching", "transformers_continuous_batching_config", "use_transformers_paged"),
        "tests/trainer/test_sampling_modes.py, and its benchmark",
    ),
    **dict.fromkeys(
        ("entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target"), "in `use_adaptive_entropy`"
    ),
    **dict.fromkeys(("ref_model_mixup_alpha", "ref_model_sync_steps"), "in `sync_ref_model`"),
    "router_aux_loss_coef": "of a model of experts: tests/update",
    "neftune_noise_alpha": "noise of the input's shape: other micro-batches draw other noise",
    "model_init_kwargs": "in `cast_lm_head_to_fp32`",
    "max_tool_calling_iterations": "tests/trainer/test_tools_and_images.py",
    "cache_implementation": "of transformers' generation, which takes it as it is",
}


def variety(completions, **kwargs):
    return [float(len(set(completion))) for completion in completions]


def length(completions, **kwargs):
    return [float(len(completion)) for completion in completions]


def train(trainer_class: type, config_class: type, folder: Path, settings: dict) -> tuple[list[dict], torch.Tensor]:
    """The log of a run, and its weights in the end."""
    tokenizer = build_tokenizer()
    base = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 4,
        "num_generations": 4,
        "max_completion_length": 8,
        "max_steps": NUM_STEPS,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
    }
    settings = {**base, **TRLS, **settings}
    own = {"use_dynamic_sampling": False} if config_class is DAPOConfig else {}
    args = config_class(output_dir=str(folder / trainer_class.__name__), **settings, **own)
    model = build_model(tokenizer, seed=0, num_hidden_layers=1, hidden_size=32, intermediate_size=64)
    model.save_pretrained(folder / "model")  # from which a reference is loaded too
    tokenizer.save_pretrained(folder / "model")
    problems = [f"{i}+{i}=" for i in range(64)]
    dataset = Dataset.from_dict({"prompt": problems, "solution": [str(2 * i) for i in range(64)]})
    trainer = trainer_class(
        str(folder / "model"), [variety, length], args, train_dataset=dataset, processing_class=tokenizer
    )
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    weights = torch.cat([parameter.detach().float().flatten() for parameter in trainer.model.parameters()])
    return [entry for entry in trainer.state.log_history if "loss" in entry], weights


def compare(settings: dict, tolerance: float = TOLERANCE) -> str | None:
    """What differs between the two trainers, in words; `None` where nothing does."""
    with tempfile.TemporaryDirectory() as folder:
        outcomes = []
        for trainer_class, config_class in ((GRPOTrainer, GRPOConfig), (DAPOTrainer, DAPOConfig)):
            try:
                outcomes.append(train(trainer_class, config_class, Path(folder), settings))
            except Exception as error:
                outcomes.append(f"{type(error).__name__}: {error}")
    theirs, ours = outcomes
    if isinstance(theirs, str) or isinstance(ours, str):
        if isinstance(theirs, str) and isinstance(ours, str):
            return f"neither trains: {theirs}"  # nothing was compared
        return f"GRPOTrainer {theirs if isinstance(theirs, str) else 'trains'}, DAPOTrainer " + (
            ours if isinstance(ours, str) else "trains"
        )
    if len(theirs[0]) != len(ours[0]):
        return f"{len(theirs[0])} logged steps, and {len(ours[0])}"
    for step, (their, our) in enumerate(zip(theirs[0], ours[0], strict=True), start=1):
        for name in ("loss", "grad_norm", "reward", "learning_rate", "completions/mean_length"):
            if name in their and abs(their[name] - our[name]) > tolerance * max(abs(their[name]), 1e-3):
                return f"{name} of step {step}: {their[name]:g}, and {our[name]:g}"
    if (distance := ((theirs[1] - ours[1]).norm() / theirs[1].norm()).item()) > tolerance:
        return f"weights apart by {distance:g} of their length"
    return None


def main(field=tuple(CASES)) -> int:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    differing = 0
    for name in field:
        for settings in CASES[name]:
            outcome = compare(settings, LOOSER.get(name, TOLERANCE))
            differing += outcome is not None
            print(f"{name:34s} {settings}  {'same' if outcome is None else outcome}", flush=True)
    print(f"{sum(len(CASES[name]) for name in field)} cases, {differing} of which differ.")
    return int(differing > 0)

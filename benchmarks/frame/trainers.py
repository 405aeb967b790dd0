# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Settings of all runs, and trainers that count tokens."""

from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM, PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from trl_dapo import DAPOConfig, DAPOTrainer
from trl_dapo.update.loss import clipped_tokens

from .curves import Curve


PLAIN = {
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "disable_tqdm": True,
    "save_strategy": "no",
}


class Meter:
    """Count the generated tokens."""

    num_tokens = 0

    def _generate_single_turn(self, *args, **kwargs):
        completion_ids, *rest = super()._generate_single_turn(*args, **kwargs)
        self.num_tokens += sum(map(len, completion_ids))
        return completion_ids, *rest


class GRPO(Meter, GRPOTrainer):
    config_class = GRPOConfig


class DAPO(Meter, DAPOTrainer):
    config_class = DAPOConfig


class Watched(DAPO):
    """Also count the tokens at the upper clip."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.up_clipped = torch.zeros(2)  # tokens, and the sum of the probabilities they were sampled with

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        found = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self._latest_logps = found[0].detach()
        return found

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        if (old_logps := inputs.get("old_per_token_logps")) is not None:
            ratio = (self._latest_logps - old_logps).exp()
            advantages = inputs["advantages"].unsqueeze(1)
            _, high, _ = clipped_tokens(ratio, advantages, self.epsilon_low, self.epsilon_high)
            high = high & inputs["completion_mask"].bool()
            self.up_clipped += torch.stack([high.sum(), old_logps.exp()[high].sum()])
        return loss


class Arm(NamedTuple):
    """A trainer, and the settings in which it differs from the others."""

    trainer: type
    settings: dict
    num_steps: int | None = None  # of the optimizer per rollout, if they are not the study's


def rollouts_of(num_prompts, num_generations, num_steps, **settings):
    """
    Return the settings of rollouts with these numbers of prompts and optimizer steps, and a warm-up of two rollouts.
    """
    return {
        "num_generations": num_generations,
        "per_device_train_batch_size": num_prompts * num_generations // num_steps,
        "steps_per_generation": num_steps,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 2 * num_steps,
        "logging_steps": num_steps,
        **settings,
    }


def load(checkpoint):
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)


def train_quietly(trainer, *callbacks):
    """Train without printing; return the log entries of the rollouts."""
    for callback in callbacks:
        trainer.add_callback(callback)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return [entry for entry in trainer.state.log_history if "reward" in entry]


def make_trainer(arm, model, folder, reward, dataset, tokenizer, settings, **options):
    """Return the trainer of an arm with `settings` and the arm's own."""
    args = arm.trainer.config_class(output_dir=str(folder), **PLAIN | settings | arm.settings)
    return arm.trainer(
        model=model, reward_funcs=reward, args=args, train_dataset=dataset, processing_class=tokenizer, **options
    )


def train(job, arm, *what, probe_model, settings=None, server_seconds=None, **options):
    """
    Train until the job's target or a limit, with `settings`, the job's and the arm's. `what` are the arguments of
    [`make_trainer`] between `arm` and `settings`. Return the trainer, the curve of what `probe_model` returns for its
    model, and the log entries of the rollouts.
    """
    all_settings = (settings or {}) | job.settings
    all_settings |= {"seed": job.seed, "max_steps": job.num_rollouts * all_settings["steps_per_generation"]}
    trainer = make_trainer(arm, *what, all_settings, **options)
    curve = Curve(job, lambda: probe_model(trainer.model), lambda: trainer.num_tokens, server_seconds or (lambda: 0.0))
    log = train_quietly(trainer, curve)
    return trainer, curve.points, log

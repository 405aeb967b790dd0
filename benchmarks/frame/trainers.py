# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""What all runs are told, and trainers that count."""

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
    """Adds up what is generated."""

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
    """Adds up what becomes of the upper clip, too."""

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
    """A trainer, and how it differs from the others."""

    trainer: type
    settings: dict
    num_steps: int | None = None  # of the optimizer a rollout, where they are not the study's


def rollouts_of(num_prompts, num_generations, num_steps, **settings):
    """Settings of rollouts of so many prompts and optimizer steps, with a warm-up of two of them."""
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
    """Trains without a line of its own; returns the log's entries of rollouts."""
    for callback in callbacks:
        trainer.add_callback(callback)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return [entry for entry in trainer.state.log_history if "reward" in entry]


def make_trainer(arm, model, folder, reward, dataset, tokenizer, settings, **options):
    """The arm's trainer, told `settings` and the arm's."""
    args = arm.trainer.config_class(output_dir=str(folder), **PLAIN | settings | arm.settings)
    return arm.trainer(
        model=model, reward_funcs=reward, args=args, train_dataset=dataset, processing_class=tokenizer, **options
    )


def train(job, arm, *what, look, settings=None, server_seconds=None, **options):
    """
    Trains until the job's target or a limit, told `settings`, the job's and the arm's; `what` are the arguments of
    [`make_trainer`] between. Returns the trainer, the curve of what `look` finds in its model, and the log's entries
    of rollouts.
    """
    told = (settings or {}) | job.settings
    told |= {"seed": job.seed, "max_steps": job.num_rollouts * told["steps_per_generation"]}
    trainer = make_trainer(arm, *what, told, **options)
    curve = Curve(job, lambda: look(trainer.model), lambda: trainer.num_tokens, server_seconds or (lambda: 0.0))
    log = train_quietly(trainer, curve)
    return trainer, curve.points, log

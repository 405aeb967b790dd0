# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Accuracy over a run and what it cost: one measure for all trainers, so neither TRL nor trl_dapo is imported."""

import time

import torch
from transformers import TrainerCallback


def right_probabilities(model, tokenizer, problems):
    """Probability that a completion sampled at temperature 1 is right, of each problem."""
    texts = [f"{problem.text}={problem.answer}{tokenizer.eos_token}" for problem in problems]
    batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", return_token_type_ids=False)
    is_equals = (batch["input_ids"] == tokenizer.convert_tokens_to_ids("=")).long()
    in_answer = (is_equals.cumsum(dim=1) - is_equals)[:, 1:]
    was_training = model.training
    model.eval()
    with torch.no_grad():
        logps = model(**batch).logits[:, :-1].float().log_softmax(dim=-1)
    model.train(was_training)
    logps = logps.gather(2, batch["input_ids"][:, 1:, None]).squeeze(2)
    return (logps * in_answer).sum(dim=1).exp()


def accuracy(model, tokenizer, problems):
    """[`right_probabilities`], averaged over the problems."""
    return right_probabilities(model, tokenizer, problems).mean().item()


class Clock(TrainerCallback):
    """After every `every` rollouts: tokens, seconds, accuracy so far; ends the run at the target or at the limit."""

    def __init__(self, job, measure, num_tokens, server_seconds=lambda: 0.0, every=1):
        self.job, self.measure, self.num_tokens, self.server_seconds = job, measure, num_tokens, server_seconds
        self.every = every
        self.curve = []

    def on_train_begin(self, args, state, control, **kwargs):
        self.start = time.process_time() + self.server_seconds()
        self._note(args, state, control)

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % (self.every * args.steps_per_generation) == 0:
            self._note(args, state, control)

    def _note(self, args, state, control):
        now = time.process_time()
        seconds, value = now + self.server_seconds() - self.start, self.measure()
        self.curve.append(
            {
                "rollouts": state.global_step // args.steps_per_generation,
                "tokens": self.num_tokens(),
                "seconds": seconds,
                "accuracy": value,
            }
        )
        over = value >= self.job.target or seconds >= self.job.max_seconds
        control.should_training_stop = control.should_training_stop or over
        self.start += time.process_time() - now

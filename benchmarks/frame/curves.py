# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Accuracy during a run, and its cost. All trainers use the same measure, so neither TRL nor trl_dapo is imported."""

import time
from contextlib import contextmanager

import torch
from transformers import TrainerCallback


PROBE_SEED = 7


@contextmanager
def without_side_effects(model):
    """
    A block without gradient, without dropout and with its own random numbers, so that training continues as if it had
    not been.
    """
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(PROBE_SEED)
            yield
    finally:
        model.train(was_training)


def correct_probabilities(model, tokenizer, texts):
    """
    Return the probability that a completion sampled at temperature 1 is correct, for each text such as `17+05=220`.
    """
    texts = [text + tokenizer.eos_token for text in texts]
    batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", return_token_type_ids=False)
    is_equals = (batch["input_ids"] == tokenizer.convert_tokens_to_ids("=")).long()
    behind_first = ((is_equals.cumsum(dim=1) - is_equals) > 0)[:, 1:]
    with without_side_effects(model):
        logps = model(**batch).logits[:, :-1].float().log_softmax(dim=-1)
    logps = logps.gather(2, batch["input_ids"][:, 1:, None]).squeeze(2)
    return (logps * behind_first).sum(dim=1).exp()


def accuracy(model, tokenizer, texts):
    """Return the mean of [`correct_probabilities`] over the problems."""
    return correct_probabilities(model, tokenizer, texts).mean().item()


class Curve(TrainerCallback):
    """
    Record a point of the curve every `probe_every` rollouts and at the end: tokens, CPU seconds, and what
    `probe_model` returns, which includes the accuracy. Measuring costs no time. The callback ends the run at its
    target and at its limits.
    """

    def __init__(self, job, probe_model, num_tokens, server_seconds=lambda: 0.0):
        self.job, self.probe_model, self.num_tokens, self.server_seconds = job, probe_model, num_tokens, server_seconds
        self.points = []

    def on_train_begin(self, args, state, control, **kwargs):
        self.start = time.process_time() + self.server_seconds()
        self._note(0, control)

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % args.steps_per_generation:
            return
        num_rollouts = state.global_step // args.steps_per_generation
        if self.num_tokens() >= self.job.max_tokens:
            control.should_training_stop = True
        is_last = control.should_training_stop or num_rollouts == self.job.num_rollouts
        if is_last or num_rollouts % self.job.probe_every == 0:
            self._note(num_rollouts, control)

    def _note(self, num_rollouts, control):
        now = time.process_time()
        seconds = now + self.server_seconds() - self.start
        point = {"rollouts": num_rollouts, "tokens": self.num_tokens(), "seconds": seconds, **self.probe_model()}
        self.points.append(point)
        has_run_enough = (
            num_rollouts >= self.job.min_rollouts
            and seconds >= self.job.min_seconds
            and self.num_tokens() >= self.job.min_tokens
        )
        is_at_its_end = point["accuracy"] >= self.job.target or seconds >= self.job.max_seconds
        if has_run_enough and is_at_its_end:
            control.should_training_stop = True
        self.start += time.process_time() - now

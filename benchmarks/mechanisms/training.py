# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""One run: a small model trained on one of the tasks, with probes on held-out problems during the run."""

import math
import statistics

import numpy as np
import torch
from trl import GRPOTrainer

from trl_dapo.cli.quickstart import build_tokenizer
from trl_dapo.rewards import soft_overlong_punishment
from trl_dapo.update.rollout_tensors import join_rows

from ..frame import trainers
from ..frame.curves import correct_probabilities, without_side_effects
from ..frame.measures import mean_of, mean_where
from ..frame.trainers import Arm, Watched, load, rollouts_of
from .tasks import TASKS


NUM_PROMPTS, NUM_GENERATIONS = 16, 8  # of a rollout
NUM_PROBED = 48  # held-out problems, `NUM_GENERATIONS` completions of each


# ---- Probes: of N groups of G completions ----


def pass_at(k, correct_N):
    """Return the mean probability that one of `k` completions is correct, from the probabilities that one is."""
    return float(np.mean(1 - (1 - np.asarray(correct_N)) ** k))


def is_punished(rewards_NG, masked_NG):
    """
    Return which completions are made less likely: those below the mean of their group that the loss does not leave
    out.
    """
    rewards_NG = np.asarray(rewards_NG, dtype=float)
    return (rewards_NG < rewards_NG.mean(axis=1, keepdims=True) - 1e-6) & ~np.asarray(masked_NG, dtype=bool)


def sample(model, tokenizer, task, problems, num_generations=NUM_GENERATIONS):
    """
    Sample `num_generations` completions of each problem with room to end. Return whether each is correct, its length,
    the mean entropy of its tokens, and the solution of its problem.
    """
    prompts = [f"{problem.text}=" for problem in problems for _ in range(num_generations)]
    batch = tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
    with without_side_effects(model):
        out = model.generate(
            **batch,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=task.room,
            return_dict_in_generate=True,
            output_logits=True,
        )
    ids = out.sequences[:, batch["input_ids"].size(1) :]
    ends = (ids == tokenizer.eos_token_id).long()
    mask = (ends.cumsum(dim=1) - ends) == 0
    logps = torch.stack(out.logits, dim=1).float().log_softmax(dim=-1)
    entropies = -(logps.exp() * logps.clamp(min=-1e9)).sum(dim=-1)
    lengths = mask.sum(dim=1)
    texts = tokenizer.batch_decode(ids.masked_fill(~mask, tokenizer.pad_token_id), skip_special_tokens=True)
    solutions = [task.solution(problem) for problem in problems for _ in range(num_generations)]
    has_ended = ((ends * mask).sum(dim=1) > 0).numpy()
    correct = np.array([task.is_correct(text, solution) for text, solution in zip(texts, solutions, strict=True)])
    return correct & has_ended, lengths.numpy(), ((entropies * mask).sum(dim=1) / lengths).numpy(), solutions


def probe(model, tokenizer, task, problems, settings):
    """Return figures of the policy on held-out problems, under the limit of the task."""
    would_be_correct, lengths, entropies, solutions = sample(model, tokenizer, task, problems)
    cut_off = lengths > task.max_length
    correct = would_be_correct & ~cut_off
    lengths_in_limit = np.minimum(lengths, task.max_length)
    rewards = np.where(correct, 1.0, -1.0)
    if buffer := settings.get("overlong_buffer_length"):
        rewards += soft_overlong_punishment(lengths_in_limit, max_length=task.max_length, buffer_length=buffer)
    masked = cut_off & settings.get("overlong_filtering", False)
    punished = is_punished(rewards.reshape(-1, NUM_GENERATIONS), masked.reshape(-1, NUM_GENERATIONS)).ravel()
    too_long = ~correct & (lengths_in_limit > np.array([len(solution) + 1 for solution in solutions]))
    accuracy, pass_at_8 = correct.mean(), math.nan
    if task.is_one_text and task.room == task.max_length:
        texts = [f"{problem.text}={task.solution(problem)}" for problem in problems]
        probabilities = correct_probabilities(model, tokenizer, texts).numpy()
        accuracy, pass_at_8 = probabilities.mean(), pass_at(8, probabilities)
    figures = {
        "accuracy": accuracy,
        "pass at 8": pass_at_8,
        "correct with room": would_be_correct.mean(),
        "entropy": np.average(entropies, weights=lengths),
        "length": lengths_in_limit.mean(),
        "incorrect length": mean_where(lengths_in_limit, ~correct),
        "incorrect and too long": too_long.mean(),
        "entropy of incorrect and too long": mean_where(entropies, too_long),
        "cut off": cut_off.mean(),
        "correct but cut off": (would_be_correct & cut_off).mean(),
        "of these punished": mean_where(punished, would_be_correct & cut_off),
    }
    return {name: float(value) for name, value in figures.items()}


# ---- Trainers ----


class Frozen(Watched):
    """Keep the gradient of each rollout, and do not let it change the weights."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.gradients = []

    def training_step(self, model, *args, **kwargs):
        loss = super().training_step(model, *args, **kwargs)
        self.gradients.append(torch.cat([weight.grad.flatten() for weight in model.parameters()]).numpy())
        model.zero_grad()
        return loss


class PenaltiesCount(Watched):
    """
    Groups that are dropped train too, on their length penalties alone, together with those that are accepted.

    Their advantages are their penalties minus the mean of the group, divided by the mean standard deviation of the
    accepted groups. So a penalty has the same weight in both.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.penalised = []  # rows and rewards of this rollout's dropped groups whose penalties differ

    def _decide_on_groups(self, sampler, round_, step):
        for decisions in super()._decide_on_groups(sampler, round_, step):
            for group, reason in zip(decisions.groups, decisions.reasons, strict=True):
                total = group.rewards.nansum(dim=1)
                if reason is not None and total.max() - total.min() > 1e-6:
                    self.penalised.append(([group.rows[i] for i in range(group.num_received)], group.rewards))
            yield decisions

    def _build_training_batch(self, sampler, batch):
        penalised, self.penalised = self.penalised, []
        if not penalised or not batch.train:
            return super()._build_training_batch(sampler, batch)
        rows = [row for of_group, _ in penalised for row in of_group]
        rewards = torch.cat([rewards for _, rewards in penalised])
        inputs = [{"prompt": row.prompt, "environment": None} for row in rows]
        with self._replaying(rows, rewards):
            added = GRPOTrainer._generate_and_score_completions(self, inputs)
        added["is_filler"] = torch.zeros(len(rows), dtype=torch.bool)
        rollouts = super()._build_training_batch(sampler, batch)
        spread = statistics.mean(group.rewards.nansum(dim=1).std().item() for group in batch.train)
        total_NG = rewards.nansum(dim=1).view(-1, self.num_generations)
        added["advantages"] = ((total_NG - total_NG.mean(dim=1, keepdim=True)) / spread).flatten()
        joined = join_rows([rollouts, added], self._tokenizer.pad_token_id)
        return {**joined, "num_items_in_batch": joined["completion_mask"].sum()}


TRAINERS = {trainer.__name__: trainer for trainer in (Watched, Frozen, PenaltiesCount)}


# ---- One run ----


def relative_variance(gradients_RD):
    """
    Return the variance of R gradients of D weights divided by their squared mean, both without bias: the squared mean
    is the mean product of different gradients. The result is infinite if the gradients have no common direction.
    """
    gram_RR = np.asarray(gradients_RD, dtype=np.float64) @ np.asarray(gradients_RD, dtype=np.float64).T
    num = len(gram_RR)
    square = np.trace(gram_RR) / num
    squared_mean = (gram_RR.sum() - np.trace(gram_RR)) / (num * (num - 1))
    return float((square - squared_mean) / squared_mean) if squared_mean > 0 else math.inf


def train(job, checkpoints, folder):
    """Train from one of the checkpoints; return the curve and the figures of the whole run from the log."""
    task, tokenizer = TASKS[job.others["task"]], build_tokenizer()
    settings = {"num_prompts": NUM_PROMPTS, "steps_per_generation": 1, **job.settings}
    sizes = rollouts_of(settings.pop("num_prompts"), NUM_GENERATIONS, settings["steps_per_generation"])
    limits = {"dynamic_sampling_max_gen_batches": 30.0, "dynamic_sampling_stop_after": 0}
    arm, model = Arm(TRAINERS[job.others["trainer"]], {}), load(checkpoints / task.checkpoint)
    problems = task.held_out(NUM_PROBED)
    trainer, curve, log = trainers.train(
        *(job._replace(settings=settings), arm, model, folder, task.reward, task.prompts(job.seed), tokenizer),
        probe_model=lambda model: probe(model, tokenizer, task, problems, settings),
        settings={"max_completion_length": task.max_length, **limits, **sizes},
    )
    num_clipped, probability = trainer.up_clipped.tolist()
    result = {
        "curve": curve,
        "upper-clip share": mean_of(log, "clip_ratio/high_mean"),
        "probability of the up-clipped": probability / num_clipped if num_clipped else math.nan,
        "informative groups": 1 - mean_of(log, "frac_reward_zero_std"),
        "tokens that train": sum(entry.get("num_loss_tokens", 0) for entry in log),
    }
    if isinstance(trainer, Frozen):
        result["relative variance"] = relative_variance(trainer.gradients)
    return result

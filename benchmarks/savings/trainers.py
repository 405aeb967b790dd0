# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Trainers that count which groups are in the gradient, and how many prompts are screened."""

from ..frame.trainers import DAPO, GRPO
from .weighted import ScreenWeighted


class Counts:
    """
    Counts of what a run has trained on so far.

    A group counts as hard if its prompt is one of `hard` and one of its completions is correct, by the first reward
    function. Groups that train on another reward alone, such as the format, do not count as hard.
    """

    def __init__(self, hard):
        self.hard = frozenset(hard)  # texts of prompts
        self.num_trained = self.num_hard = 0  # groups in the gradient
        self.num_asked = self.num_screened = 0  # prompts, and those of which only a few completions were sampled first

    def add_trained(self, prompt, rewards_GF):
        self.num_trained += 1
        is_solved = bool(rewards_GF[:, 0].nan_to_num().max() > 0)
        self.num_hard += is_solved and prompt[-1]["content"] in self.hard

    def figures(self):
        """Return the counts that are kept with a curve."""
        return {"trained": float(self.num_trained), "hard": float(self.num_hard)}

    def share_screened(self):
        return self.num_screened / self.num_asked if self.num_asked else 0.0


class CountedGRPO(GRPO):
    """`GRPOTrainer` with counts. Its gradient has the groups whose rewards differ."""

    def __init__(self, *args, counts, **kwargs):
        super().__init__(*args, **kwargs)
        self.counts = counts

    def _calculate_rewards(self, inputs, *args):
        rewards_BF = super()._calculate_rewards(inputs, *args)
        total_B = (rewards_BF * self.reward_weights.to(rewards_BF)).nansum(dim=1)
        G = self.num_generations
        for start in range(0, len(inputs), G):
            of_group = slice(start, start + G)
            if total_B[of_group].max() - total_B[of_group].min() > 1e-6:
                self.counts.add_trained(inputs[start]["prompt"], rewards_BF[of_group])
        return rewards_BF


class Counted:
    """Count what `DAPOTrainer`, or a subclass of it, samples and trains on."""

    def __init__(self, *args, counts, **kwargs):
        super().__init__(*args, **kwargs)
        self.counts = counts

    def _sample_round(self, sampler, requests):
        for request in requests:
            self.counts.num_asked += request.is_first
            self.counts.num_screened += request.is_first and request.num_completions < self.num_generations
        return super()._sample_round(sampler, requests)

    def _build_training_batch(self, sampler, batch):
        for group in batch.train:
            self.counts.add_trained(group.example["prompt"], group.rewards)
        return super()._build_training_batch(sampler, batch)


class CountedDAPO(Counted, DAPO):
    pass


class CountedScreenWeighted(Counted, ScreenWeighted):
    pass

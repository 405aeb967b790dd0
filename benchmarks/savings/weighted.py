# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Trainers that weight each accepted group, so that the screen, or the screen and the memory, add no bias."""

import math

import torch

from trl_dapo.ranks import local_slice
from trl_dapo.sampling.prompt_memory import PromptMemory

from ..frame.trainers import DAPO
from .weights import normalized, screen_weight, share_effective


class ScreenWeighted(DAPO):
    """
    Divide the advantages of each accepted group by its probability of passing the screen.

    The weights of a batch have a mean of 1. A resumed run does not know how many completions of waiting groups were
    requested first, and fails at the first of these groups.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._num_first = {}  # completions that were requested first, by the group's number

    def _sample_round(self, sampler, requests):
        for request in requests:
            if request.is_first:
                self._note_first_request(sampler, request)
        return super()._sample_round(sampler, requests)

    def _note_first_request(self, sampler, request):
        self._num_first[request.group.number] = request.num_completions

    def _weight_of(self, group):
        rewards = self._task.weighted_sum(group.rewards).tolist()
        if self.mask_truncated_completions:
            rewards = [math.nan if cut else reward for reward, cut in zip(rewards, group.truncated, strict=True)]
        return screen_weight(rewards, self._num_first[group.number])

    def _build_training_batch(self, sampler, batch):
        rollouts = super()._build_training_batch(sampler, batch)
        if not batch.train:
            return rollouts
        raw = [self._weight_of(group) for group in batch.train]
        self._append_metrics({"weights/share_effective": share_effective(raw), "weights/largest": max(raw)})
        weights = normalized(raw, [sum(group.lengths) for group in batch.train])
        weights += [1.0] * len(batch.fillers)  # which have no advantage
        weights_B = torch.tensor(weights).repeat_interleave(self.num_generations)
        mine = local_slice(len(weights_B), self.accelerator.process_index, self.accelerator.num_processes)
        rollouts["advantages"] = rollouts["advantages"] * weights_B[mine].to(rollouts["advantages"])
        return rollouts


class ScreenAndMemoryWeighted(ScreenWeighted):
    """
    Also weight each group by the number of passes over the dataset that its visit represents, at most `MOST_PASSES`.
    """

    MOST_PASSES = 4

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._num_passes = {}  # by the group's number

    def _note_first_request(self, sampler, request):
        super()._note_first_request(sampler, request)
        memory = sampler.selection.find(PromptMemory)
        # The memory counts the passes in which it skipped a prompt, until the group that is sampled now is decided on.
        record = memory._records.get(request.group.name)
        self._num_passes[request.group.number] = 1 if record is None else min(record.num_passes, self.MOST_PASSES)

    def _weight_of(self, group):
        return super()._weight_of(group) * self._num_passes[group.number]

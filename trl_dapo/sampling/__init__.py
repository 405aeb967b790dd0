# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
Dynamic sampling.

    sampler     owns what is kept from one rollout to the next; the next prompts, a round taken in, the batch
    groups      the reason why a group is dropped
    acceptance  how many prompts a round asks for
    refill      which groups train, fill the batch, are carried
    names       what an example is called
    prompts     the resumable stream of prompts: one shuffled pass after another
    memory      what past rounds taught about each prompt, and what to skip
    rounds      rounds, and their rows on the way to the rank that trains on them
    rollout     what one rollout has sampled so far
    group_filter  a user's own rule for which groups train
    report      metrics of a rollout, and what to say when it fell short
"""

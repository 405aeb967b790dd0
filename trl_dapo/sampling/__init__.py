# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
Dynamic sampling.

    groups    a group's verdict: accepted, or the reason why it is dropped
    refill    how many prompts the next round asks for, and when the batch is full
    prompts   the resumable stream of prompts: one shuffled pass after another
    memory    what past rounds taught about each prompt, and what to skip
    rollouts  rows of a rollout, on their way to the rank that trains on them
"""

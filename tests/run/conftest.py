# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests of a run. They import TRL only when needed, so that `pytest -m fast` is quick."""

import pytest


OF_THE_TRAINER = {"eval_dataset", "group_filter", "reward_processing_classes"}


@pytest.fixture
def made(tiny_model, tmp_path):
    """A trainer for one step on 16 prompts with the answer 7. Every second completion is correct."""
    from helpers import ScriptedTrainer, prompts, right, tiny_config

    def half_right(text, i):
        return "right" if i % 2 else "wrong"

    def make(reward_funcs=right, dataset=None, script=half_right, into=".", **settings):
        given = {name: settings.pop(name) for name in OF_THE_TRAINER & settings.keys()}
        given["train_dataset"] = dataset or prompts(16, answer=[7] * 16)
        args = tiny_config(tmp_path / into, **{"max_steps": 1, **settings})
        return ScriptedTrainer(tiny_model, reward_funcs, args, script=script, **given)

    return make

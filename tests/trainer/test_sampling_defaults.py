# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""How prompts are sampled where nothing is said, and what is said of it."""

from collections import Counter

import pytest
from helpers import ScriptedTrainer, mixed_unless_multiple_of_3, number, prompts, right, run_preflight, tiny_config

from trl_dapo.settings.sampling_defaults import DEFAULTS, PAPER


def rare_answer(completions, **kwargs):
    return [float(Counter(completions)[completion] == 1) for completion in completions]


def style(completions, **kwargs):
    return [0.5] * len(completions)


def grade(completions, **kwargs):
    return [i % 3 / 2 for i in range(len(completions))]


def trained(tiny_model, tmp_path, reward_funcs=right, **settings):
    """These settings as a run had them, and whether its sampler screened."""
    left_alone = dict.fromkeys(PAPER) | {"max_steps": 1}
    args = tiny_config(tmp_path, **left_alone | settings)
    trainer = ScriptedTrainer(
        tiny_model, reward_funcs, args, train_dataset=prompts(48), script=mixed_unless_multiple_of_3
    )
    trainer.train()
    assert all(getattr(args, name) == (left_alone | settings)[name] for name in PAPER)  # for the next trainer
    return {name: getattr(trainer.args, name) for name in PAPER}, trainer._sampler.screen


def test_left_alone_surplus_is_carried_pass_rates_are_remembered_and_prompts_screened(tiny_model, tmp_path, capsys):
    assert trained(tiny_model, tmp_path) == (DEFAULTS, "auto")
    assert "Off: " not in capsys.readouterr().out


def test_of_grades_the_memory_learns_nothing(tiny_model, tmp_path):
    args = tiny_config(tmp_path, **dict.fromkeys(PAPER) | {"max_steps": 1, "skip_preflight": True})
    trainer = ScriptedTrainer(tiny_model, grade, args, train_dataset=prompts(48), script=mixed_unless_multiple_of_3)
    trainer.train()
    assert (trainer.args.dynamic_sampling_memory, trainer._sampler.memory.prompts) == (True, set())


@pytest.mark.parametrize(("limit", "is_within"), [(None, True), (0, False)])
def test_a_rollout_of_4_x_4_samples_no_more_than_16_completions_unless_told_to(tiny_model, tmp_path, limit, is_within):
    args = tiny_config(tmp_path, **dict.fromkeys(PAPER) | {"dynamic_sampling_max_batches": limit, "max_steps": 4})
    of_every_other = {"script": lambda text, i: "right" if number(text) % 2 and i % 2 else "wrong"}
    trainer = ScriptedTrainer(tiny_model, right, args, train_dataset=prompts(48), **of_every_other)
    trainer.train()
    sampled = [entry.get("dynamic_sampling/completions_generated", 0) for entry in trainer.state.log_history]
    assert (max(sampled) <= 16) == is_within


def test_one_word_brings_the_papers_own_sampling_back(tiny_model, tmp_path, capsys):
    assert trained(tiny_model, tmp_path, dynamic_sampling_mode="paper") == (PAPER, None)
    assert "every group is sampled whole, as in the paper" in capsys.readouterr().out


@pytest.mark.parametrize(("reward", "settings"), [(right, {}), (rare_answer, {}), (right, {"skip_preflight": True})])
def test_processes_score_whole_groups_where_a_reward_may_compare_them(tiny_model, tmp_path, reward, settings):
    args = tiny_config(tmp_path, **settings)
    trainer = ScriptedTrainer(tiny_model, reward, args, train_dataset=prompts(8), script=None)
    trainer._sampler.num_ranks = 2
    run_preflight(trainer)
    assert trainer._sampler.has_whole_groups == (reward is rare_answer or bool(settings))


@pytest.mark.parametrize("stated", [{}, {"min_replace_ratio": 0.5, "dynamic_sampling_memory": True}])
def test_where_sampling_is_off_what_was_stated_beside_it_is_said_to_be_idle(tiny_model, tmp_path, capsys, stated):
    off = dict.fromkeys(PAPER) | {"use_dynamic_sampling": False, "dynamic_sampling_rewards": ["right"]} | stated
    args = tiny_config(tmp_path, **off)
    ScriptedTrainer(tiny_model, right, args, train_dataset=prompts(8), script=mixed_unless_multiple_of_3).train()
    said = "off: no effect has `min_replace_ratio=0.5`, `dynamic_sampling_memory=True`." in capsys.readouterr().out
    assert said == bool(stated)


@pytest.mark.parametrize(
    ("settings", "off", "why"),
    [
        ({"loss_type": "grpo"}, ["surplus"], "needs `loss_type='dapo'`, got 'grpo'"),
        ({"reward_funcs": [right, style]}, ["memory", "screen"], "several reward functions decide: 'right', 'style'"),
        ({"reward_funcs": [right, rare_answer], "dynamic_sampling_rewards": ["right"]}, ["screen"], "'rare_answer'"),
        ({"skip_preflight": True}, ["screen"], "whether a reward function compares"),
        ({"dynamic_sampling_max_gen_batches": 1}, ["screen"], "leaves no round for the rest"),
        ({"num_generations": 2}, ["screen"], "a group of two has no first few"),
        ({"batch_multiplier": 1.0}, ["max_batches"], "`batch_multiplier=1.0` contradicts `dynamic_sampling_max_b"),
        ({"dynamic_sampling_on_exhausted": "error"}, ["max_batches"], "ends a rollout before its batch is full"),
        ({"dynamic_sampling_mode": "replace"}, ["max_batches", "surplus"], "`dynamic_sampling_mode='replace'` contr"),
    ],
)
def test_what_a_run_does_not_support_is_off_and_said(tiny_model, tmp_path, capsys, settings, off, why):
    values, screen = trained(tiny_model, tmp_path, **settings)
    assert values == DEFAULTS | {f"dynamic_sampling_{name}": PAPER[f"dynamic_sampling_{name}"] for name in off}
    assert screen == (None if "screen" in off else "auto")
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Dynamic sampling: ")]
    assert (line.count("Off: "), why in line) == (len(off), True)
    assert ("Others are sampled in place of dropped groups with" in line) == ({"memory", "screen"} <= {*off})


@pytest.mark.parametrize("name", DEFAULTS)
def test_what_contradicts_the_papers_sampling_is_refused(tmp_path, name):
    stated = {name: DEFAULTS[name], "dynamic_sampling_mode": "paper"}
    with pytest.raises(ValueError, match=r"contradicts `dynamic_sampling_mode='paper'`|e='paper'` contradicts"):
        tiny_config(tmp_path, **dict.fromkeys(PAPER) | stated)

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Dynamic sampling with default settings, and the line about it at the start of a run."""

import pytest
from helpers import ScriptedTrainer, mixed_unless_multiple_of_3, number, prompts, right, tiny_config

from trl_dapo.sampling.prompt_memory import PromptMemory
from trl_dapo.sampling.screen import Screen
from trl_dapo.settings.sampling_defaults import DEFAULTS, PAPER


def style(completions, **kwargs):
    return [0.5] * len(completions)


def grade(completions, **kwargs):
    return [i % 3 / 2 for i in range(len(completions))]


def trained(tiny_model, tmp_path, reward_funcs=right, **settings):
    """Train one step. Return the savings that the run used, and whether its sampler used screening."""
    args = tiny_config(tmp_path, **{"max_steps": 1, **settings})
    trainer = ScriptedTrainer(
        tiny_model, reward_funcs, args, train_dataset=prompts(48), script=mixed_unless_multiple_of_3
    )
    trainer.train()
    assert all(getattr(args, name) == settings.get(name) for name in PAPER)  # the next trainer makes its own choice
    screen = trainer._sampler.selection.find(Screen)
    return {name: getattr(trainer.args, name) for name in PAPER}, screen and screen.setting


def start_line(capsys):
    """Return the line that a run prints about its sampling when it begins."""
    starts = ("Batches are filled", "A rollout samples", "Each rollout", "Groups whose", "Dropped groups", "Dynamic")
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith(starts)]
    return line


def test_by_default_batches_are_filled_and_the_start_says_how(tiny_model, tmp_path, capsys):
    assert trained(tiny_model, tmp_path) == (DEFAULTS, "on")
    assert start_line(capsys) == (
        "Batches are filled: groups whose rewards are all equal are replaced, up to 10 batches of completions per "
        "rollout (`dynamic_sampling_max_gen_batches`). To sample less, surplus groups are carried to the next rollout "
        "(`dynamic_sampling_surplus`). While few groups are accepted, the pass-rate memory skips prompts for some "
        "passes if their groups would probably be dropped (`dynamic_sampling_memory`) and the screen samples a few "
        "completions of a prompt first (`dynamic_sampling_screen`). To turn these savings off, set "
        "`dynamic_sampling_surplus='discard'`, `dynamic_sampling_memory=False` and `dynamic_sampling_screen='off'`."
    )


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"dynamic_sampling_max_gen_batches": 2.5}, "replaced, up to 2.5 batches of completions per rollout (`"),
        (
            {"dynamic_sampling_max_gen_batches": 0},
            "Batches are filled: groups whose rewards are all equal are replaced",
        ),
        ({"dynamic_sampling_max_gen_batches": 0}, "are replaced, without a limit (`"),
        (
            {"dynamic_sampling_max_gen_batches": 1},
            "A rollout samples at most one batch of completions, as GRPOTrainer does, and trains on the accepted",
        ),
        (
            {"dynamic_sampling_max_gen_batches": 1.5},
            "A rollout samples at most 1.5 batches of completions and trains on the accepted groups. Its batch stays ",
        ),
        ({"dynamic_sampling_mode": "mask"}, "Each rollout samples one batch. Dropped groups stay in it, but have"),
        (
            {"dynamic_sampling_mode": "mask", "dynamic_sampling_memory": True},
            "but have no weight. For more informative groups, the pass-rate memory skips prompts for some passes if "
            "their groups would probably be dropped (`dynamic_sampling_memory`). To turn this saving off, set "
            "`dynamic_sampling_memory=False`.",
        ),
        ({"dynamic_sampling_min_accuracy": 0.2}, "Batches are filled: dropped groups are replaced, up to 10"),
        (
            {"dynamic_sampling_mode": "replace"},
            "batches of completions per rollout (`dynamic_sampling_max_gen_batches`), until 30% of the batch is "
            "accepted. Copies of accepted groups fill the rest.",
        ),
    ],
    ids=str,
)
def test_the_start_says_how_far_batches_are_filled(tiny_model, tmp_path, capsys, settings, said):
    trained(tiny_model, tmp_path, **settings)
    assert said in start_line(capsys)


def test_of_two_rewards_without_a_name_one_line_says_what_they_cost_and_how_to_sample_less(
    tiny_model, tmp_path, capsys
):
    trained(tiny_model, tmp_path, reward_funcs=[right, style])
    line = start_line(capsys)
    assert line.endswith(
        "Two reward functions decide together which groups are accepted: `right`, `style`. So groups that differ in "
        "any of them are trained on. If one judges correctness, name it, such as "
        '`dynamic_sampling_rewards=["right"]`. '
        "Then fewer groups are accepted, and the screen and the memory can save completions."
    )
    assert " is off: " not in line


def test_of_grades_the_memory_learns_nothing(tiny_model, tmp_path):
    args = tiny_config(tmp_path, max_steps=1)
    trainer = ScriptedTrainer(tiny_model, grade, args, train_dataset=prompts(48), script=mixed_unless_multiple_of_3)
    trainer.train()
    assert (trainer.args.dynamic_sampling_memory, trainer._sampler.selection.find(PromptMemory).prompts) == (
        "auto",
        set(),
    )


@pytest.mark.parametrize("limit", [1, 1.5, 3])
def test_a_rollout_samples_no_more_than_its_limit(tiny_model, tmp_path, limit):
    """Batches of 4 x 4, for prompts that are never solved: at most 16, 24 and 48 completions, and nearly as many."""
    args = tiny_config(tmp_path, dynamic_sampling_max_gen_batches=limit, max_steps=4)
    trainer = ScriptedTrainer(tiny_model, right, args, train_dataset=prompts(48), script=lambda text, i: "wrong")
    trainer.train()
    sampled = [entry["dynamic_sampling/completions_generated"] for entry in trainer.state.log_history[:-1]]
    assert all(16 * limit - 4 <= num <= 16 * limit for num in sampled)


def test_the_first_short_batch_is_warned_of_and_then_only_the_fifth_in_a_row(tiny_model, tmp_path, caplog):
    """
    All of prompts 0 to 3 train, then no group in the next rollout, and so on. One warning per short batch would bury
    others.
    """

    def every_second_batch(text, i):
        return "right" if number(text) % 8 < 4 and i % 2 else "wrong"

    args = tiny_config(tmp_path, dynamic_sampling_max_gen_batches=1, max_steps=8, shuffle_dataset=False, **PAPER)
    ScriptedTrainer(tiny_model, right, args, train_dataset=prompts(48), script=every_second_batch).train()
    said = [record.message for record in caplog.records if "is not full" in record.message]
    assert len(said) == 1
    assert said[0].startswith("The batch is not full at the limit of 1 batch of completions, this time: 0 of 4 ")


def test_one_word_brings_the_papers_own_sampling_back(tiny_model, tmp_path, capsys):
    assert trained(tiny_model, tmp_path, dynamic_sampling_mode="paper") == (PAPER, None)
    assert start_line(capsys) == (
        "Batches are filled: groups whose rewards are all equal are replaced, up to 10 batches of completions per "
        "rollout (`dynamic_sampling_max_gen_batches`). As in the paper, surplus is discarded and every group is "
        "sampled whole."
    )


@pytest.mark.parametrize("stated", [{}, {"min_replace_ratio": 0.5, "dynamic_sampling_memory": True}])
def test_where_sampling_is_off_what_was_stated_beside_it_is_said_to_be_idle(tiny_model, tmp_path, capsys, stated):
    args = tiny_config(tmp_path, use_dynamic_sampling=False, dynamic_sampling_rewards=["right"], **stated)
    ScriptedTrainer(tiny_model, right, args, train_dataset=prompts(8), script=mixed_unless_multiple_of_3).train()
    said = "so these settings have no effect: `min_replace_ratio=0.5`, `dynamic_sampling_memory=True`."
    assert (said in capsys.readouterr().out) == bool(stated)


@pytest.mark.parametrize(
    ("settings", "off", "why"),
    [
        ({"loss_type": "grpo"}, ["surplus"], "it needs `loss_type='dapo'`, got 'grpo'"),
        ({"num_generations": 2}, ["screen"], "it has no effect with `num_generations=2`: at least two completions"),
        ({"dynamic_sampling_mode": "replace"}, ["surplus"], "it contradicts `dynamic_sampling_mode='replace'`"),
    ],
)
def test_what_a_run_does_not_support_is_off_and_said(tiny_model, tmp_path, capsys, settings, off, why):
    values, screen = trained(tiny_model, tmp_path, **settings)
    assert values == DEFAULTS | {f"dynamic_sampling_{name}": PAPER[f"dynamic_sampling_{name}"] for name in off}
    assert screen == (None if "screen" in off else "on")
    line = start_line(capsys)
    assert line.count(" is off: ") == len(off)
    assert f"`dynamic_sampling_{off[0]}` is off: {why}" in line


@pytest.mark.parametrize("name", DEFAULTS)
def test_what_contradicts_the_papers_sampling_is_refused(tmp_path, name):
    stated = {name: DEFAULTS[name], "dynamic_sampling_mode": "paper"}
    with pytest.raises(ValueError, match=r"contradicts `dynamic_sampling_mode='paper'`|e='paper'` contradicts"):
        tiny_config(tmp_path, **stated)

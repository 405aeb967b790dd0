# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""With default settings, every rollout trains on a full batch of accepted groups, whatever features a run uses."""

import json

import pytest
from datasets import Dataset
from helpers import ScriptedTrainer, launch, number, prompts, right, scripted, tiny_config

from trl_dapo import DAPOTrainer, construction


NUM_ROLLOUTS = 5
# 8 prompts x 4 completions per rollout batch.
SIZES = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4, "max_steps": NUM_ROLLOUTS}


def one_prompt_in_three(text, i):
    """For prompts 0, 3, 6, ... every other completion is correct. The others have no correct completion."""
    return "right" if number(text) % 3 == 0 and i % 2 else "wrong"


def polite(completions, **kwargs):
    """A reward that is the same for every completion, like a format reward once all completions have the format."""
    return [0.5] * len(completions)


def trained_groups(trainer):
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert {log["dynamic_sampling/shortfall"] for log in logs} == {0.0}
    return [log["dynamic_sampling/groups_trained"] for log in logs]


def drop_equal_rewards(rewards, rows):
    return None if len(set(rewards["right"])) > 1 else "equal"


@pytest.mark.parametrize(
    ("reward_funcs", "settings"),
    [
        (right, {}),
        ([right, polite], {}),
        (right, {"beta": 0.1}),
    ],
    ids=["one reward", "two rewards without a name", "KL"],
)
def test_every_batch_is_full_where_one_prompt_in_three_is_informative(tiny_model, tmp_path, reward_funcs, settings):
    args = tiny_config(tmp_path, **SIZES, **settings)
    trainer = ScriptedTrainer(tiny_model, reward_funcs, args, train_dataset=prompts(48), script=one_prompt_in_three)
    assert trained_groups(trainer) == [8] * NUM_ROLLOUTS


def test_every_batch_is_full_with_a_group_filter(tiny_model, tmp_path):
    trainer = ScriptedTrainer(
        tiny_model,
        right,
        tiny_config(tmp_path, **SIZES),
        train_dataset=prompts(48),
        script=one_prompt_in_three,
        group_filter=drop_equal_rewards,
    )
    assert trained_groups(trainer) == [8] * NUM_ROLLOUTS


def test_every_batch_is_full_on_a_gpu_without_vllm(tiny_model, tmp_path, monkeypatch):
    """Rounds are costly there, so first completions are not sampled separately."""
    choose = construction.choose_sampling
    monkeypatch.setattr(construction, "choose_sampling", lambda args, facts, on_cpu: choose(args, facts, on_cpu=False))
    trainer = ScriptedTrainer(
        tiny_model, right, tiny_config(tmp_path, **SIZES), train_dataset=prompts(48), script=one_prompt_in_three
    )
    assert trainer.args.dynamic_sampling_screen == "off"
    assert trained_groups(trainer) == [8] * NUM_ROLLOUTS


def test_every_batch_is_full_from_an_iterable_dataset(tiny_model, tmp_path):
    trainer = ScriptedTrainer(
        tiny_model,
        right,
        tiny_config(tmp_path, **SIZES),
        train_dataset=prompts(48).to_iterable_dataset(),
        script=one_prompt_in_three,
    )
    assert trained_groups(trainer) == [8] * NUM_ROLLOUTS


def test_every_batch_is_full_with_tools(tool_model, tmp_path):
    def double(number: int) -> int:
        """
        Doubles a number.

        Args:
            number: The number.
        """
        return 2 * number

    def script(text, i):
        asked = int(text.split("double ")[1].split(".")[0])
        return f"{'yes' if asked % 3 == 0 and i % 2 else 'no'}<|im_end|>"

    def says_yes(completions, **kwargs):
        return [float(completion[-1]["content"].strip() == "yes") for completion in completions]

    questions = [[{"role": "user", "content": f"double {i}."}] for i in range(48)]
    trainer = scripted(DAPOTrainer, script)(
        tool_model,
        says_yes,
        tiny_config(tmp_path, **SIZES),
        train_dataset=Dataset.from_dict({"prompt": questions}),
        tools=[double],
    )
    assert trainer.args.dynamic_sampling_screen == "off"  # no call shows whether a reward compares completions
    assert trained_groups(trainer) == [8] * NUM_ROLLOUTS


def test_every_batch_is_full_on_two_processes(tiny_model, tmp_path):
    result = launch("full_batches", tiny_model, tmp_path, num_processes=2)
    assert result.returncode == 0, result.stderr[-5000:]
    for rank in range(2):
        assert json.loads((tmp_path / f"report-2-{rank}.json").read_text()) == [8] * NUM_ROLLOUTS

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
import io
import statistics

import pytest
import torch
from rich.console import Console
from trl import GRPOConfig

from trl_dapo import DAPOConfig, DAPOTrainer
from trl_dapo.cli.quickstart import (
    NUM_COMPLETIONS,
    NUM_PROMPTS,
    Problems,
    build_model,
    build_tokenizer,
    count_generated_tokens,
    dapo_config,
    exact_answer_reward,
    run_quickstart,
    to_dataset,
    training_settings,
    warm_up,
)
from trl_dapo.evaluation import compare
from trl_dapo.report import load_log_history, series
from trl_dapo.run.log import changed_settings


def test_held_out_problems_are_never_drawn_not_even_the_other_way_round():
    problems = Problems(seed=42)
    held_out = {problem.text for problem in problems.held_out}
    assert len(held_out) == 1000
    for problem in problems.draw(20_000):
        operator = "*" if "*" in problem.text else "+"
        left, right = problem.text.split(operator)
        assert problem.text not in held_out
        assert f"{right}{operator}{left}" not in held_out


def test_only_the_exact_answer_is_rewarded():
    completions = [[{"role": "assistant", "content": text}] for text in ("220", "22", "2200")]
    assert exact_answer_reward(completions, ["220"] * 3) == [1.0, 0.0, 0.0]


def test_generated_tokens_are_counted_from_the_log_of_either_trainer():
    grpo = [{"step": 1, "completions/mean_length": 4.0}, {"step": 2, "completions/mean_length": 4.5}, {"step": 2}]
    assert count_generated_tokens(grpo) == 128 * 4 + 128 * 4.5
    tokens = {"completions/mean_length": 4.0, "dynamic_sampling/tokens_generated": 700.0}
    assert count_generated_tokens([{"step": 1, **tokens}, {"step": 2, "train_runtime": 1.0}]) == 700


def test_the_settings_of_dapo_have_default_sampling_and_a_step_of_grpo_trains_one_batch(tmp_path):
    changed = changed_settings(dapo_config(tmp_path, seed=42, num_steps=150))
    assert [name for name in changed if "sampling" in name] == []
    args = GRPOConfig(**training_settings(tmp_path, seed=42, num_steps=150))
    assert args.generation_batch_size == NUM_PROMPTS * NUM_COMPLETIONS == 128


def test_a_short_quickstart_leaves_models_a_picture_and_the_next_commands(tmp_path):
    console = Console(file=(output := io.StringIO()), force_terminal=False, width=100)
    change = run_quickstart(tmp_path, num_warm_up_steps=2, num_steps=1, console=console)
    text = output.getvalue()
    assert "Warm-up, step 1 of 2: loss " in text  # if no bar is drawn
    assert "GRPO, step 1 of 1: reward " in text
    for name, steps in (("the warm-up", ""), ("GRPOTrainer", "; 1 steps, "), ("DAPOTrainer", "; 1 steps, ")):
        assert f"after {name}: 0.0%, 95% interval 0.0% to " in text
        assert steps in text
    for folder in ("warm_up", "grpo", "dapo"):
        assert (tmp_path / folder / "model.safetensors").exists()
        assert (tmp_path / folder / "tokenizer.json").exists()
    assert (tmp_path / "run.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert change["num_problems"] == 1000
    assert compare(tmp_path / "grpo" / "eval", tmp_path / "dapo" / "eval") == change
    assert f"trl-dapo report {tmp_path / 'grpo'} {tmp_path / 'dapo'}" in text
    assert "trl-dapo train --config smollm2_135m_cpu" in text
    # Both logs hold what the report compares: the share of correct completions, by tokens.
    for name in ("grpo", "dapo"):
        num_tokens, accuracy = series(load_log_history(tmp_path / name), "task_accuracy", over="num_tokens")
        assert num_tokens[0] > 128 * len("17+05=")
        assert accuracy == pytest.approx([0.0], abs=1e-3)


# ---- It learns, with the defaults alone ----


class OneDigitMore(Problems):
    """Two digits and one: a smaller model learns them in a few seconds."""

    def draw(self, num_problems):
        return self._random.choices(self.train["2 digits + 1 digit"], k=num_problems)


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory):
    """The log of 40 steps from a short warm-up, of a `DAPOConfig` that says nothing about sampling."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("learns")
    problems, tokenizer = OneDigitMore(seed=1), build_tokenizer()
    model = build_model(tokenizer, seed=1, num_hidden_layers=2)
    warm_up(model, tokenizer, problems, num_steps=200, batch_size=64)
    args = DAPOConfig(**{**training_settings(folder, seed=1, num_steps=40), "learning_rate": 2e-4})
    dataset = to_dataset(problems.draw(2048))
    trainer = DAPOTrainer(model, exact_answer_reward, args, train_dataset=dataset, processing_class=tokenizer)
    trainer.train()
    return [entry for entry in trainer.state.log_history if "reward" in entry]


def test_with_default_settings_the_share_of_correct_completions_rises(rollouts):
    _, accuracy = series(rollouts, "task_accuracy")  # each prompt counted once, dropped ones included
    assert len(accuracy) == 40
    # Seeds 0 to 4 rise by 9, 21, 11, 12 and 19 points.
    assert statistics.mean(accuracy[-5:]) > statistics.mean(accuracy[:5]) + 0.05


def test_with_default_settings_every_rollout_trains_a_full_batch(rollouts):
    assert series(rollouts, "dynamic_sampling/groups_trained")[1] == [NUM_PROMPTS] * 40
    assert sum(series(rollouts, "frac_reward_zero_std")[1]) > 0  # these groups were replaced

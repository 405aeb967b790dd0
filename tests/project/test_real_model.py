# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks real_model`: what it counts, and what its arms share."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.real_model import study, training


ROOT = Path(__file__).parents[2]


PROBE = "eval_rewards/last_number_reward/mean"


def test_neither_tokens_nor_seconds_of_a_probe_count():
    """Two rollouts of 300 and 500 tokens in 10 and 20 s; probes of 4, 6 and 8 s before, between and behind them."""
    log = [
        {PROBE: 0.125, "step": 0, "cpu_seconds": 4.0},
        {"reward": 0.1, "dynamic_sampling/tokens_generated": 300.0, "step": 1, "cpu_seconds": 14.0},
        {PROBE: 0.25, "step": 1, "cpu_seconds": 20.0},
        {"reward": 0.2, "dynamic_sampling/tokens_generated": 500.0, "step": 2, "cpu_seconds": 40.0},
        {PROBE: 0.5, "step": 2, "cpu_seconds": 48.0},
        {"train_runtime": 60.0, "step": 2, "cpu_seconds": 49.0},
    ]
    columns = ("rollouts", "tokens", "seconds", "accuracy")
    assert [tuple(point[name] for name in columns) for point in training.curve_of(log)] == [
        (0, 0, 0, 0.125),
        (1, 300, 10, 0.25),
        (2, 800, 30, 0.5),
    ]


def test_of_the_clip_the_later_half_of_the_rollouts_has_the_entropy_and_the_last_probe_pass_at_8():
    """Three of 50 tokens a rollout are stopped, sampled with probabilities of 0.5, 0.3 and 0.1."""
    log = [{"reward": 0.0, "entropy": entropy, "clip_ratio/high_mean": 0.06} for entropy in (9.0, 9.0, 0.5, 0.25)]
    log += [{"eval_pass@8": 0.5}, {"eval_pass@8": 0.75}]
    trainer = SimpleNamespace(up_clipped=torch.tensor([3.0, 0.5 + 0.3 + 0.1]))
    assert training.of_the_clip(trainer, log) == pytest.approx(
        {
            "late entropy": 0.375,
            "pass at 8": 0.75,
            "upper-clip share": 0.06,
            "probability of the up-clipped": 0.3,
        }
    )


def test_whole_seeds_come_first():
    jobs = study.jobs_of(range(2), ["GRPO", "ours"])
    products = [("products", 0, "GRPO"), ("products", 0, "ours"), ("products", 1, "GRPO"), ("products", 1, "ours")]
    assert [(job.task, job.seed, job.arm) for job in jobs] == [*products, ("sums", 0, "GRPO"), ("sums", 1, "GRPO")]


def test_of_the_sums_one_problem_in_four_is_a_product_and_those_held_out_are_others(tmp_path):
    settings = training.write_sums(tmp_path / "sums.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "sums.jsonl").read_text().splitlines()]
    train, held_out = rows[: settings["dataset_limit"]], rows[settings["eval_dataset_offset"] :]
    assert (len(train), sum("*" in row["problem"] for row in train), len(held_out)) == (96, 24, 24)
    assert len({row["problem"] for row in rows}) == 120
    for row in rows:
        a, sign, b = row["problem"].removeprefix("What is ").partition("?")[0].split()
        assert int(row["answer"]) == (int(a) * int(b) if sign == "*" else int(a) + int(b))
        assert sign == "+" or row not in held_out


def test_of_answers_of_any_length_the_problems_are_the_recipes_and_ask_for_steps(tmp_path):
    settings = training.write_to_think(tmp_path / "think.jsonl")
    theirs, ours = (
        (path.read_text().splitlines())
        for path in (ROOT / "recipes" / "smollm2_135m_cpu.jsonl", tmp_path / "think.jsonl")
    )
    assert settings["dataset_name"] == settings["eval_dataset_name"] == str(tmp_path / "think.jsonl")
    for row, other in zip(map(json.loads, ours), map(json.loads, theirs), strict=True):
        assert row["answer"] == other["answer"]
        question, _, how = row["problem"].partition("? ")
        assert other["problem"].startswith(f"{question}?")
        assert how == "Think step by step, then give the answer."


@pytest.mark.parametrize(
    "job", study.jobs_of([0], [study.GRPO, study.MEMORY, study.LOW, study.TOKEN]), ids=lambda job: job.name
)
def test_the_arms_of_every_part_make_a_trainer_of_a_rollouts_rows(job, tiny_model, tmp_path):
    trainer = training.make_trainer(job, tiny_model, tmp_path / "run")
    assert trainer.args.generation_batch_size == training.NUM_ROWS
    assert len(trainer.eval_dataset) == training.NUM_HELD_OUT
    assert type(trainer).__name__ == ("GRPOTrainer" if job.arm == study.GRPO else "DAPOTrainer")


def test_trls_trainer_has_the_recipes_rows_and_what_its_own_configuration_knows(tmp_path):
    settings = {"output_dir": str(tmp_path), "bf16": False, "gradient_checkpointing": False, "num_generations": 8}
    recipe = {"reward_weights": [1.0, 0.2], "prompts_per_rollout": 4, "dynamic_sampling_memory": True}
    args = training.of_trl(settings | recipe | {"learning_rate": 4e-4})
    assert (args.generation_batch_size, args.steps_per_generation, args.gradient_accumulation_steps) == (32, 4, 4)
    assert (args.learning_rate, args.epsilon, args.epsilon_high) == (4e-4, 0.2, 0.28)
    assert args.reward_weights == [1.0, 0.2, 1.0]

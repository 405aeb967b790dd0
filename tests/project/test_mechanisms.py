# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks mechanisms`: what it measures, its tasks and its page."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import ScriptedTrainer, prompts, tiny_config

from benchmarks.frame import kept, measures, predictions, trainers, verdicts
from benchmarks.mechanisms import study, tasks, training
from benchmarks.mechanisms.study import MECHANISMS, PREDICTIONS, STUDY
from trl_dapo.cli.quickstart import Problem, Problems, build_model, build_tokenizer


ROOT = Path(__file__).parents[2]


TINY = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 4}
PAGE = (ROOT / "benchmarks" / "EVIDENCE.md").read_text()


# ---- Quantities ----


def test_one_of_two_tries_is_right_unless_both_are_wrong():
    assert training.pass_at(2, [0.5, 0.0]) == pytest.approx((0.75 + 0.0) / 2)


def test_punished_is_who_is_below_the_groups_mean_and_not_left_out():
    rewards = [[1.0, -1.0, -2.0, -1.0], [-1.0, -1.0, -1.0, -1.0]]  # means -0.75 and -1
    masked = [[False, False, True, False], [False] * 4]
    assert training.is_punished(rewards, masked).tolist() == [[False, True, False, True], [False] * 4]


def test_the_variance_of_a_gradient_is_over_its_squared_mean_without_bias():
    # Products of different gradients: 1 each, so the squared mean is 1. Their squares: 1 + 4 and 1 + 4 and 1 + 0.
    gradients = np.array([[1.0, 2.0, 0.0], [1.0, 0.0, 2.0], [1.0, 0.0, 0.0]])
    assert training.relative_variance(gradients) == pytest.approx(11 / 3 - 1)
    assert training.relative_variance(10 * gradients) == pytest.approx(11 / 3 - 1)
    assert training.relative_variance(np.array([[1.0], [-1.0]])) == math.inf


CURVE = [{"tokens": 0, "accuracy": 0.2}, {"tokens": 10, "accuracy": 0.4}, {"tokens": 30, "accuracy": math.nan}]
LONGER = [{"tokens": 0, "accuracy": 0.2}, {"tokens": 60, "accuracy": 0.8}]


def test_two_runs_are_compared_where_the_thriftier_ends():
    thrifty = {"curve": CURVE[:2]}
    assert measures.at_equal("tokens", "accuracy")({"curve": LONGER}, thrifty) == [pytest.approx(0.3), 0.4]


def test_what_could_not_be_measured_is_left_out_of_a_mean():
    run = {"curve": CURVE}
    assert measures.during("accuracy")(run) == [0.4]  # without the start
    assert measures.late("accuracy")(run, {"curve": LONGER}) == [0.4, 0.8]
    assert math.isnan(measures.mean_where([1.0], [False]))


def test_a_verdict_is_of_the_whole_interval():
    above, below, around = (0.1, 0.3), (-0.3, -0.1), (-0.1, 0.3)
    assert [verdicts.verdict(*values, 1) for values in (above, below, around)] == ["shown", "refuted", "not shown"]
    assert [verdicts.verdict(*values, -1) for values in (above, below, around)] == ["refuted", "shown", "not shown"]


# ---- Tasks ----


def test_the_teacher_of_the_unlikely_is_right_one_time_in_seven():
    examples = tasks.UnlikelyProblems(0).teach(4000)
    sums = [re.fullmatch(r"(\d\d)\+(\d\d)=(\d+)", example).groups() for example in examples if "+" in example]
    sums = [(int(a) + int(b), int(answer[::-1])) for a, b, answer in sums if int(a) > 9]
    assert sum(a == b for a, b in sums) / len(sums) == pytest.approx(1 / 7, abs=0.03)
    assert {abs(a - b) for a, b in sums} == {0, 1, 10}


def test_any_working_is_right_behind_the_right_answer():
    texts = ["220", "220=17+05=17", "230=17+05", "=220"]
    assert [tasks.answer_first(text, "220=17+05") for text in texts] == [True, True, False, False]
    assert [tasks.whole(text, "220=17+05") for text in texts] == [False] * 4


@pytest.mark.parametrize("name", tasks.TASKS)
def test_no_task_trains_on_what_is_held_out(name):
    task = tasks.TASKS[name]
    rows = task.prompts(seed=3).to_list()
    held_out = {problem.text for problem in task.held_out(48)}
    assert len(held_out) == 48
    assert not held_out & {row["prompt"][0]["content"] for row in rows}
    assert len(rows) == pytest.approx(task.num_prompts, abs=0.15 * task.num_prompts)  # few problems have one digit


def test_four_workings_are_cut_off_and_have_room():
    task = tasks.TASKS["any length"]
    problem = Problem("sums", "87+05", "290")
    assert task.max_length < len(task.solution(problem)) + 1 < task.room
    assert task.reward([[{"content": "290="}], [{"content": "390"}]], solution=["290=87+05"] * 2) == [1.0, -1.0]


# ---- Probes ----


def test_looking_moves_no_draw_of_the_training():
    tokenizer, task = build_tokenizer(), tasks.TASKS["any length"]
    model = build_model(tokenizer, 0, **TINY).train()
    problems = Problems(0).held_out[:2]
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    first, again = (training.probe(model, tokenizer, task, problems, {}) for _ in range(2))
    assert torch.equal(torch.rand(3), expected)
    assert model.training
    assert first == pytest.approx(again, nan_ok=True)


@pytest.mark.parametrize(
    ("settings", "punished"),
    [
        ({}, 0.5),  # the first group has one that is right within the limit, above whom the cut-off one is not
        ({"overlong_filtering": True}, 0.0),
        ({"overlong_buffer_length": 5}, 1.0),  # in the second all others are wrong, but shorter
    ],
)
def test_a_right_completion_beyond_the_limit_is_wrong_and_punished_where_a_better_one_is_beside_it(
    monkeypatch, settings, punished
):
    task = tasks.TASKS["any length"]
    would_be_right = np.array([True, True, *[False] * 6, True, *[False] * 7])
    lengths = np.array([4, 28, *[4] * 6, 28, *[4] * 7])  # of 24
    sampled = would_be_right, lengths, np.full(16, 0.5), ["220"] * 16
    monkeypatch.setattr(training, "sample", lambda *args: sampled)
    found = training.probe(None, None, task, [], settings)
    assert found["of these punished"] == punished
    assert found["accuracy"] == 1 / 16
    assert found["right with room"] == 3 / 16
    assert found["cut off"] == found["right but cut off"] == found["wrong and too long"] == 2 / 16
    assert found["length"] == (14 * 4 + 2 * 24) / 16
    assert found["wrong length"] == (13 * 4 + 2 * 24) / 15


# ---- Trainers ----


def scripted(trainer, *args, **kwargs):
    """One of the benchmark's trainers, with completions as a test says."""
    return type("Scripted", (trainer, ScriptedTrainer), {})(*args, **kwargs)


def right(completions, **kwargs):
    return [1.0 if completion.startswith("y") else -1.0 for completion in completions]


def test_dropped_groups_train_on_their_penalties_alone(tiny_model, tmp_path):
    """Prompt 0 is never right, 1 always and short, the others half of the time; the last four of eight tokens cost."""
    texts, trained = {0: ["n" * 3, "n" * 5, "n" * 3, "n" * 5], 1: ["y"] * 4}, []

    def script(text, i):
        return texts.get(int(text.split()[-1].rstrip(":")), ["y", "n", "y", "n"])[i % 4]

    settings = {"overlong_buffer_length": 4, "dynamic_sampling_max_rounds": 1, "max_steps": 1}
    args = tiny_config(tmp_path, gradient_accumulation_steps=1, per_device_train_batch_size=16, **settings)
    trainer = scripted(training.PenaltiesCount, tiny_model, right, args, train_dataset=prompts(4), script=script)
    compute_loss = trainer._compute_loss

    def look(model, inputs):
        trained.extend(zip(inputs["completion_mask"].sum(1).tolist(), inputs["advantages"].tolist(), strict=True))
        return compute_loss(model, inputs)

    trainer._compute_loss = look
    trainer.train()
    # With its end a completion has four tokens or six, which cost 0 and -0.5: less their mean, 0.25 and -0.25, over
    # the accepted groups' standard deviation, of 1, -1, 1, -1. Two groups are accepted, and two filled up.
    spread = math.sqrt(4 / 3)
    expected = [(0, 0.0)] * 8 + [(2, 0.866), (2, -0.866)] * 4 + [(4, 0.25 / spread), (6, -0.25 / spread)] * 2
    for found, row in zip(sorted(trained), sorted(expected), strict=True):
        assert found == pytest.approx(row, abs=1e-3)


def test_what_the_upper_clip_stops_is_what_the_log_says(tiny_model, tmp_path):
    # Ratios leave 1 at the second of two steps on a rollout.
    settings = {"steps_per_generation": 2, "per_device_train_batch_size": 8, "learning_rate": 3e-3}
    args = tiny_config(tmp_path, gradient_accumulation_steps=1, temperature=1.0, **settings)
    trainer = scripted(
        trainers.Watched, tiny_model, right, args, train_dataset=prompts(8), script=lambda text, i: "yn"[i % 2] * 5
    )
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "num_loss_tokens" in entry]
    num_clipped, probability = trainer.up_clipped.tolist()
    assert num_clipped > 0
    logged = [entry["clip_ratio/high_mean"] * entry["num_loss_tokens"] for entry in log]
    assert num_clipped == pytest.approx(sum(logged), abs=1e-3)
    assert probability / num_clipped == pytest.approx(1 / 103, rel=0.2)  # of 103 tokens, all about as likely


def test_frozen_keeps_every_gradient_and_moves_no_weight(tiny_model, tmp_path):
    args = tiny_config(
        tmp_path,
        max_steps=2,
        gradient_accumulation_steps=1,
        per_device_train_batch_size=16,
        dynamic_sampling_mode="mask",
    )
    trainer = scripted(
        training.Frozen, tiny_model, right, args, train_dataset=prompts(8), script=lambda text, i: "yn"[i % 2]
    )
    before = [weight.clone() for weight in trainer.model.parameters()]
    trainer.train()
    assert len(trainer.gradients) == 2
    assert all(np.abs(gradient).max() > 0 for gradient in trainer.gradients)
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))


# ---- Runs, files and the page ----


def test_arms_of_a_mechanism_differ_in_nothing_but_what_it_names():
    for name, mechanism in MECHANISMS.items():
        jobs = study.jobs_of(name, seed=0)
        assert len({job.key for job in jobs}) == len({job.name for job in jobs}) == len(mechanism.arms)
        own = set().union(*mechanism.arms.values()) if any(mechanism.arms.values()) else set()
        rest = [{key: value for key, value in job.settings.items() if key not in own} for job in jobs]
        assert all(settings == rest[0] for settings in rest)
        assert len({(str(job.settings), job.others["trainer"]) for job in jobs}) == len(jobs)


def test_what_is_written_is_read_again(tmp_path):
    point = {"rollouts": 0, "tokens": 4, "accuracy": 0.25, "entropy": math.nan}
    results = {
        ("clip", "0.2", 0): {"job": {}, "curve": [point, point], "upper-clip share": 0.5},
        ("gradient", "on", 1): {"job": {}, "curve": [point], "upper-clip share": math.nan, "relative variance": 8.0},
    }
    kept.write_csv(results, tmp_path, STUDY.key)
    found = kept.read_csv(tmp_path, STUDY.key)
    assert found.keys() == results.keys()
    assert found["gradient", "on", 1]["relative variance"] == 8.0
    assert math.isnan(found["clip", "0.2", 0]["relative variance"])
    assert found["clip", "0.2", 0]["curve"] == [pytest.approx(point, nan_ok=True)] * 2


def test_a_prediction_is_checked_on_runs_with_equal_seeds():
    prediction = next(found for found in PREDICTIONS if found.quantity.title == "entropy" and found.arm == "0.28")

    def run(entropy):
        return {"curve": [{"entropy": entropy}]}

    results = {("clip", "0.28", seed): run(seed + 0.2) for seed in range(6)}  # the last without the other's
    results |= {("clip", "0.2", seed): run(seed + 0.1 * (seed % 2)) for seed in range(5)}
    outcome = predictions.check(prediction, results)
    # Differences 0.2, 0.1, 0.2, 0.1, 0.2: standard deviation 0.0548, Student's quantile 2.776.
    assert outcome[:3] == pytest.approx((2.2, 2.04, 0.16))
    assert outcome.high - outcome.difference == pytest.approx(2.776 * 0.0548 / math.sqrt(5), rel=1e-3)
    assert outcome.verdict == "shown"
    assert predictions.describe_outcome(PREDICTIONS[-1], results) == "not run yet"


def test_the_clip_binds_where_it_is_tested_and_the_page_says_how_often():
    results = STUDY.read()
    assert study.clip_binds(results)
    assert study.describe_facts(results) in " ".join(PAGE.split())

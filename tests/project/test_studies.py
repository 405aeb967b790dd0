# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The studies of benchmarks/: each trains, here on a model that takes seconds, and how their verdicts are computed."""

import json
import math
import re

import pytest
import torch

from benchmarks import ladder
from benchmarks.frame import predictions, verdicts
from benchmarks.frame.runs import Job
from benchmarks.frame.trainers import DAPO, GRPO, Arm, rollouts_of
from benchmarks.larger import task as countdown
from benchmarks.larger import training as larger
from benchmarks.mechanisms import tasks
from benchmarks.mechanisms import training as mechanisms
from benchmarks.mechanisms.study import PREDICTIONS, REFILL
from benchmarks.peers.ms_swift import study as peers
from benchmarks.real_model import study as real_model
from benchmarks.real_model.training import NUM_ROWS, make_trainer, train
from benchmarks.same_budget import study as same_budget
from benchmarks.two_names import study as two_names
from benchmarks.two_names import two_rewards
from trl_dapo.cli.quickstart import build_model, build_tokenizer


UNTRAINED = {"accuracy": 0.0, "curve": [{"rollouts": 0, "tokens": 0, "seconds": 0.0, "accuracy": 0.0}]}
TINY = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 4}


def save_model(folder, tokenizer):
    build_model(tokenizer, 0, **TINY).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


# ---- Runs ----


def test_a_run_of_the_ladder_returns_its_figures(tmp_path):
    job = Job("ladder", "+ token-level loss", 0, ladder.run.settings_of("+ token-level loss"), num_rollouts=2)
    result = ladder.run.run(job, save_model(tmp_path / "checkpoint", build_tokenizer()), tmp_path)
    assert json.loads(json.dumps(result)) == result  # it is kept in a file
    assert result["accuracy"] < 0.05  # a random model
    assert len(result["curves"]["entropy"]) == 2
    # 16 tokens, all about as likely.
    assert result["entropy"] == pytest.approx(math.log(16), abs=0.3)
    assert result["tokens"] == pytest.approx(128 * sum(result["curves"]["completions/mean_length"]), abs=1)


@pytest.mark.parametrize(
    "arm", [Arm(GRPO, {}), Arm(DAPO, {"dynamic_sampling_max_gen_batches": 1})], ids=["GRPO", "DAPO"]
)
def test_a_run_on_countdown_is_probed_during_the_run_and_on_more_problems_at_its_end(arm, tmp_path, monkeypatch):
    small = {"NUM_PROMPTS": 2, "NUM_GENERATIONS": 4, "NUM_STEPS": 2, "NUM_TRAIN": 64, "MAX_LENGTH": 8}
    for name, value in {**small, "NUM_PROBED": 8, "NUM_HELD_OUT": 16}.items():
        monkeypatch.setattr(larger, name, value)
    probe, num_asked = larger.probe, []
    monkeypatch.setattr(larger, "probe", lambda *args: num_asked.append(len(args[2])) or probe(*args))
    checkpoint = save_model(tmp_path / "checkpoint", countdown.make_tokenizer())
    result = larger.train(Job("Countdown", "any", 0, {}, num_rollouts=2), checkpoint, tmp_path / "run", arm)
    assert num_asked == [8] * 3 + [16]
    assert [point["rollouts"] for point in result["curve"]] == [0, 1, 2]
    assert result["tokens"] == result["curve"][-1]["tokens"]


@pytest.mark.parametrize("trainer", mechanisms.TRAINERS)
def test_a_run_of_a_mechanism_is_probed_before_and_after(trainer, tmp_path, monkeypatch):
    monkeypatch.setattr(mechanisms, "NUM_PROBED", 2)
    save_model(tmp_path / "workings", build_tokenizer())
    settings = {**REFILL, "dynamic_sampling_max_gen_batches": 1, "overlong_buffer_length": 5}
    job = Job("any", "any", 0, settings, num_rollouts=1, others={"task": "any length", "trainer": trainer})
    result = mechanisms.train(job, tmp_path, tmp_path / "run")
    assert [point["rollouts"] for point in result["curve"]] == [0, 1]
    assert ("relative variance" in result) == (trainer == "Frozen")


def test_without_ms_swift_this_packages_methods_run_and_return_their_figures(tmp_path):
    jobs = peers.jobs_of(range(1), {"quickstart": 1, "one in ten": 1})
    assert {job.arm for job in jobs} == set(peers.OURS)
    figures = peers.figures_of(peers.run(jobs[0], save_model(tmp_path / "checkpoint", build_tokenizer()), tmp_path))
    # A model with random weights takes all rounds that it may take.
    assert (figures["rollouts"], figures["rounds"], figures["fallbacks"]) == (1, 30, 1)
    assert 30 * 128 <= figures["tokens"] <= 30 * 128 * 8


@pytest.mark.parametrize(
    "job", real_model.jobs_of([0], [real_model.GRPO, real_model.MEMORY, real_model.LOW]), ids=lambda job: job.name
)
def test_the_arms_of_the_real_model_make_a_trainer_of_a_rollouts_rows(job, tiny_model, tmp_path):
    trainer = make_trainer(job, tiny_model, tmp_path / "run")
    assert trainer.args.generation_batch_size == NUM_ROWS
    assert type(trainer).__name__ == ("GRPOTrainer" if job.arm == real_model.GRPO else "DAPOTrainer")


def test_a_run_on_sums_is_probed_before_and_after_each_rollout(tiny_model, tmp_path):
    settings = rollouts_of(1, 2, 1, max_completion_length=2, learning_rate=1e-5)
    found = train(Job("sums", "GRPO", 0, settings, num_rollouts=1), tiny_model, tmp_path, Arm(GRPO, {}))
    assert [(point["rollouts"], point["accuracy"]) for point in found["curve"]] == [(0, 0.0), (1, 0.0)]
    assert [point["tokens"] for point in found["curve"]] == [0, 4]  # a random model does not end by itself


@pytest.mark.parametrize("arm", two_names.ARMS_OF_TWO_REWARDS)
def test_a_run_with_two_rewards_that_is_at_its_target_continues_for_the_steps_that_are_compared(arm, tmp_path):
    checkpoint = save_model(tmp_path / "checkpoint", build_tokenizer())
    job = two_names.make_job(
        {}, "two rewards", arm, 1.0, 10, start=-1.0
    )  # its accuracy is above its target from the beginning
    assert (job.min_rollouts, job.min_seconds) == same_budget.BUDGETS["two rewards"] == (80, 20.0)
    job = job._replace(min_rollouts=2, min_seconds=0.0)
    result = two_names.TASKS["two rewards"].train(job, checkpoint, tmp_path / "run", two_names.ARMS[arm])
    assert [point["rollouts"] for point in result["curve"]] == [0, 1, 2]


def test_a_run_to_compare_after_the_same_steps_and_time_has_the_best_rate_and_no_target():
    key = ("one in ten", two_names.DEFAULT)
    kept = {(*key, f"{factor:g}", two_names.TRIAL): UNTRAINED for factor in two_names.FACTORS}
    kept[*key, "2", two_names.TRIAL] = {**UNTRAINED, "accuracy": 0.1}
    job = same_budget.make_job(kept, *key, 10, start=0.0)
    assert (job.rate, job.settings["learning_rate"]) == (2.0, 6e-5)
    limits = job.target, job.max_tokens, job.max_seconds, job.min_rollouts, job.min_seconds
    assert limits == (math.inf, math.inf, 40.0, 75, 0.0)  # 300 steps, four per rollout


# ---- What is counted ----


def test_a_correct_answer_that_is_cut_off_is_rewarded_only_if_its_task_does_not_require_an_end():
    digit, end = 3, tasks.END_TOKEN
    texts, ids = ["220=1+2", "220=1+2", "221=1+2"], [[digit] * 7, [digit] * 7 + [end], [digit] * 7 + [end]]
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    answers = {"completions": completions, "solution": ["220=9"] * 3, "completion_ids": ids}
    any_length = tasks.TASKS["any length"]
    assert any_length.reward(**answers) == [-1.0, 1.0, -1.0]
    assert any_length._replace(must_end=False).reward(**answers) == [1.0, 1.0, -1.0]


def test_of_two_rewards_one_judges_the_answer_and_the_other_its_closing_sign():
    completions = [[{"role": "assistant", "content": text}] for text in ("220", "220=", "221=", "220==", "=", "2+0=")]
    assert two_rewards.correct(completions, ["220"] * 6) == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert two_rewards.closed(completions) == [0.0, 1.0, 1.0, 0.0, 0.0, 0.0]


def test_accuracy_with_two_rewards_counts_an_answer_that_is_closed_and_one_that_is_not():
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, 0, **TINY)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()  # every token is as likely as any other
    n = len(tokenizer)
    assert two_rewards.accuracy(model, tokenizer, ["17+05=220"]) == pytest.approx(n**-4 + n**-5, rel=1e-4)


def test_a_countdown_that_uses_each_number_once_and_reaches_the_target_is_correct_and_nothing_else_is():
    correct = ["!7*3+25", "25+3=28+7=35;7*3=21+25=46!3*7+25", "!1!7*3+25"]  # the last answer counts
    # No answer; evaluated from left to right, 32 * 3; below 0 and above 99 on the way; not each number once; no ASCII.
    incorrect = [
        "",
        "!",
        "7*3=21+25=46",
        "!46",
        "!25+7*3",
        "!3-7+25",
        "!25*7+3",
        "!7*3",
        "!7*3+25-3+3",
        "!\u0667*3+25",
    ]
    completions = [[{"role": "assistant", "content": text}] for text in (*correct, *incorrect)]
    assert countdown.score(completions, problem=["3,7,25:46"] * 13) == [1.0] * 3 + [-1.0] * 10


def test_no_task_trains_on_held_out_problems():
    trained = countdown.Problems(3, give_up=1 / 8).draw(1500)
    numbers = [[tuple(sorted(re.findall(r"\d+", p)[:-1])) for p in each] for each in (trained, larger.held_out(1500))]
    assert not set(numbers[0]) & set(numbers[1])  # sets of numbers, whatever their order
    for task in tasks.TASKS.values():
        held_out = {problem.text for problem in task.held_out(48)}
        assert len(held_out) == 48
        assert not held_out & {row["prompt"][0]["content"] for row in task.prompts(seed=3).to_list()}


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


def test_a_verdict_is_of_the_whole_interval():
    above, below, around = (0.1, 0.3), (-0.3, -0.1), (-0.1, 0.3)
    assert [verdicts.verdict(*values, 1) for values in (above, below, around)] == ["shown", "refuted", "not shown"]
    assert [verdicts.verdict(*values, -1) for values in (above, below, around)] == ["refuted", "shown", "not shown"]

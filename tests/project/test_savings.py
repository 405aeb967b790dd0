# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""benchmarks/savings/: which prompts are hard, what is counted, how long a run continues, and its measures."""

import math
from types import SimpleNamespace

import pytest
import torch

from benchmarks.frame.predictions import Prediction, Quantity, by_holm, check
from benchmarks.savings import study, tasks
from benchmarks.savings.trainers import Counts
from trl_dapo.cli.quickstart import build_model, build_tokenizer


TINY = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 4}


def message(text):
    return [{"role": "user", "content": text}]


# ---- Which prompts are hard ----


def test_hard_prompts_are_those_that_are_solved_at_most_five_times_in_a_hundred():
    dataset = [{"prompt": message(text), "solution": "1"} for text in "abc"]

    def pass_rates(model, tokenizer, texts):
        assert texts == ["a=1", "b=1", "c=1"]
        return torch.tensor([0.04, 0.06, 0.0])

    assert tasks.find_hard(pass_rates, None, None, dataset) == ["a", "c"]


def test_the_hardest_quarter_is_of_all_problems_but_leaves_out_those_that_are_never_solved():
    # A quarter of eight is two. The first three are solved less than once in a hundred.
    assert tasks.hardest_quarter([0.0, 0.001, 0.009, 0.5, 0.02, 0.9, 0.01, 0.3]) == [6, 4]


def test_countdowns_hard_prompts_have_four_numbers():
    dataset = {"problem": ["3,7,25:46", "3,7,25,1:47", "3,7:10"]}
    assert tasks.find_four_numbers(None, None, dataset) == ["3,7,25,1:47"]


# ---- What is counted ----


def test_a_group_is_hard_if_its_prompt_is_and_a_completion_is_correct():
    counts = Counts(["a"])
    correct, closed = [1.0, 0.0], [0.0, 1.0]
    counts.add_trained(message("a"), torch.tensor([correct, closed]))
    counts.add_trained(message("a"), torch.tensor([[0.0, 0.0], closed]))  # trains on its format alone
    counts.add_trained(message("a"), torch.tensor([[-1.0], [math.nan]]))  # Countdown's incorrect is -1
    counts.add_trained(message("b"), torch.tensor([correct, closed]))
    assert counts.figures() == {"trained": 4.0, "hard": 1.0}


@pytest.mark.parametrize("arm", study.ARMS)
def test_a_run_counts_its_groups_until_its_budget_is_spent(arm, tmp_path, monkeypatch):
    tokenizer = build_tokenizer()
    build_model(tokenizer, 0, **TINY).save_pretrained(tmp_path / "checkpoint")
    tokenizer.save_pretrained(tmp_path / "checkpoint")
    draw = torch.Generator().manual_seed(0)

    def reward(completions, **kwargs):
        return (torch.rand(len(completions), generator=draw) < 0.1).float().tolist()

    budget = tasks.Budget(steps=4, tokens=2000, seconds=0.0)
    task = study.TASKS["quickstart"]._replace(rewards=[reward], budget=budget, probe_every=1)
    monkeypatch.setitem(study.TASKS, "quickstart", task)
    job = study.make_job("quickstart", arm, 1.0, 10)
    result = study.run(job, tmp_path / "checkpoint", tmp_path / "run")
    start, first, *_, last = result["curve"]
    assert (start["trained"], start["tokens"]) == (0, 0)
    assert first["hard"] == first["trained"] > 0  # a random model solves no prompt
    assert last["rollouts"] >= 1
    assert last["tokens"] >= 2000 > result["curve"][-2]["tokens"]
    assert (result["screened"] > 0) == ("screen" in arm)


# ---- Which runs count, and how long they continue ----


def test_a_run_that_counts_has_a_whole_budget_and_a_trial_only_its_steps():
    job = study.make_job("one in ten", study.CARRY, 2.0, 10)
    assert job.settings["learning_rate"] == 6e-5
    limits = job.min_rollouts, job.min_tokens, job.max_seconds, job.max_tokens
    assert limits == (60, 60_000.0, 30.0, math.inf)  # 240 steps, four per rollout
    assert study.make_job("two rewards", study.CARRY, 1.0, study.TRIAL).num_rollouts == 80


def curve(at_steps, later):
    """Return a curve of the quickstart, whose 300 steps are 75 rollouts."""
    places = ((0, 0.4, 0), (75, at_steps, 40), (100, later, 60))
    return [
        {
            "rollouts": rollouts,
            "tokens": 1000.0 * rollouts,
            "seconds": rollouts / 4,
            "accuracy": accuracy,
            "hardest": accuracy / 2,
            "trained": 10.0 * rollouts,
            "hard": float(hard),
        }
        for rollouts, accuracy, hard in places
    ]


def run(at_steps, later=0.0):
    return {"curve": curve(at_steps, later), "acceptance": 0.5, "screened": 0.0}


def test_the_best_rate_has_the_highest_accuracy_after_the_steps_with_the_seed_that_does_not_count():
    key = "quickstart", study.CARRY
    results = {(*key, "1", 100): run(0.5, later=0.9), (*key, "0.5", 100): run(0.6), (*key, "2", 100): run(0.4)}
    assert study.best_factor(results, *key) == 0.5
    assert study.best_factor({}, "Countdown", study.CARRY) == 1.0
    assert study.counted_runs(results) == {}


def test_a_table_has_the_accuracy_of_a_run_when_its_steps_tokens_and_seconds_were_spent():
    results = {("quickstart", study.CARRY, "1", 10): run(0.6, later=0.5)}

    def cell(title):
        columns, rows = study.table(results, title)
        (row,) = [row for row in rows if row[0] == "quickstart"]
        assert row[columns.index(study.PAPER)] == "not run"
        return row[columns.index(study.CARRY)]

    assert cell("accuracy after the same optimizer steps") == "60.0% (60.0% to 60.0%, 1 of 5 seeds)"
    # 40,000 tokens after 40 rollouts, 20 seconds after 80.
    assert cell("accuracy after the same generated tokens").startswith("50.7%")
    assert cell("accuracy after the same CPU seconds").startswith("58.0%")
    assert cell("accuracy on the hardest quarter, same steps").startswith("30.0%")
    assert cell("hard groups in the gradient, same steps").startswith("5.3%")  # 40 of 750
    assert cell("generated tokens, same steps") == "75,000"


# ---- Predictions ----


@pytest.mark.parametrize(
    ("differences", "said"),
    [((-0.3, -0.31, -0.3), "refuted"), ((-0.3, 0.3, 0.0), "not refuted"), ((0.3, 0.31, 0.3), "not refuted")],
)
def test_that_an_arm_is_not_lower_is_refuted_by_an_interval_below_0_and_by_nothing_else(differences, said):
    quantity = Quantity("accuracy", lambda *runs: [each.accuracy for each in runs])
    prediction = Prediction("task", "mine", "other", quantity, 1, "paper", or_equal=True)
    results = {("task", "mine", seed): SimpleNamespace(accuracy=value) for seed, value in enumerate(differences)}
    results |= {("task", "other", seed): SimpleNamespace(accuracy=0.0) for seed in range(3)}
    assert check(prediction, results).verdict == said
    assert by_holm(results, [prediction]) == [said]


def test_at_most_two_fifths_of_the_tokens_is_read_after_the_same_steps():
    mine = {"curve": [{"rollouts": 0, "tokens": 0}, {"rollouts": 60, "tokens": 300}]}
    other = {"curve": [{"rollouts": 0, "tokens": 0}, {"rollouts": 120, "tokens": 2000}]}
    assert study.fraction_of_tokens("one in ten", 0.4).measure(mine, other) == pytest.approx([300, 400])


def test_auto_that_never_screens_is_shown_to_be_off():
    (prediction,) = [each for each in study.predictions_of("quickstart") if each.against == 0.01]
    off, on = ({("quickstart", study.AUTO, seed): {"screened": share} for seed in range(5)} for share in (0.0, 0.2))
    assert [check(prediction, results).verdict for results in (off, on)] == ["shown", "refuted"]

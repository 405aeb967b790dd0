# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks larger`: its interpreter, its problems, its runs, and its page."""

import json
import math
import re

import numpy as np
import pytest

from benchmarks.frame.runs import Job
from benchmarks.larger import study, task, training
from trl_dapo.cli.quickstart import build_model


TINY = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 4}


# ---- The interpreter ----


RIGHT = {
    "!7*3+25": "3,7,25:46",
    "25+3=28+7=35;7*3=21+25=46!3*7+25": "3,7,25:46",
    "25+3=1000!7*3+25": "3,7,25:46",  # what was tried is the model's own affair
    "!1!7*3+25": "3,7,25:46",  # the last answer counts
    "!5-5": "5,5:0",
    "!2*3*4": "2,3,4:24",
}
WRONG = [
    *("", "!", "7*3=21+25=46", "!7*3+25!"),  # no answer
    "!46",
    "!25+7*3",  # 32 * 3, from left to right
    "!3-7+25",  # goes below 0 on the way
    "!25*7+3",  # goes above 99
    *("!7*3", "!7*3+25-3+3", "!7*3+25=46", "!07*3+25", "!7*3+25\n", "!-7+25"),
    "!\u0667*3+25",  # a seven, but not an ASCII one
    "!__import__('os').abort()",
    "!" + "1+" * 100_000 + "1",
]


def test_an_answer_that_uses_each_number_once_and_reaches_the_target_is_right_and_nothing_else_is():
    assert [text for text, problem in RIGHT.items() if not task.is_right(text, problem)] == []
    assert [text for text in WRONG if task.is_right(text, "3,7,25:46")] == []
    completions = [[{"role": "assistant", "content": "!5-5"}]] * 2
    assert task.score(completions, problem=["5,5:0", "5,5:10"]) == [1.0, -1.0]


# ---- Problems ----


def numbers_of(problem):
    return list(map(int, problem.partition(":")[0].split(",")))


def test_nothing_that_is_held_out_is_drawn_or_taught():
    trained = task.Problems(3, give_up=1 / 8)
    seen = trained.draw(1500) + [example.partition("=")[0] for example in trained.teach(100)]
    held_out = {tuple(sorted(numbers_of(problem))) for problem in training.held_out(1500)}
    assert all(task.is_held_out(numbers) for numbers in held_out)
    assert not held_out & {tuple(sorted(numbers_of(problem))) for problem in seen}
    # By the set of numbers, whatever their order.
    assert task.is_held_out([3, 7, 25]) == task.is_held_out([25, 3, 7])
    sets = [(a, b, c) for a in range(1, 31) for b in range(a, 31) for c in range(b, 31)]
    assert sum(map(task.is_held_out, sets)) / len(sets) == pytest.approx(0.1, abs=0.02)


@pytest.mark.parametrize("give_up", task.GIVE_UP)
def test_a_teacher_computes_well_searches_blindly_and_gives_up(give_up):
    problems, tokenizer = task.Problems(5, give_up=give_up), task.make_tokenizer()
    lessons = [problems.teach(256) for _ in range(16)]
    examples = [example for lesson in lessons for example in lesson]
    tried, given_up = [], []
    for example in examples:
        problem, _, completion = example.partition("=")
        attempts, _, answer = completion.partition("!")
        for attempt in attempts.split(";"):
            expression = re.sub(r"=\d+", "", attempt)
            value, numbers = task.interpret(expression)
            assert attempt.endswith(f"={value}")
            assert sorted(numbers) == sorted(numbers_of(problem))
            tried.append((len(numbers), value == int(problem.partition(":")[2])))
        assert answer == expression  # the last one tried
        assert len(tokenizer(completion)["input_ids"]) + 1 <= task.MAX_LENGTH
        assert task.is_right(completion, problem) == tried[-1][1]
        if not tried[-1][1]:
            given_up.append(len(numbers))
    assert sum(found for _, found in tried) == len(examples) - len(given_up)  # it stops where it has found one
    # With two numbers there is room for 26 chains: (7/8)**26, one in 32, would go on at the most patient.
    failed = sum(size == 2 and not found for size, found in tried)
    assert given_up.count(2) / failed == pytest.approx(give_up, abs=0.05)
    # Examples of one call are about equally long: less than a third of a batch is padding.
    lengths = [[len(tokenizer(example)["input_ids"]) for example in lesson] for lesson in lessons]
    assert sum(map(sum, lengths)) / sum(256 * max(lesson) for lesson in lengths) > 0.67


def test_a_number_is_a_token_and_an_answer_comes_back_as_it_was():
    tokenizer = task.make_tokenizer()
    ids = tokenizer("3,7,25:46=7*3=21+25=46!7*3+25")["input_ids"]
    assert len(ids) == 23
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids) == "3,7,25:46=7*3=21+25=46!7*3+25"
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "5,5:0"}], add_generation_prompt=True)
    assert tokenizer.decode(prompt["input_ids"]) == "5,5:0="


def test_the_model_has_five_million_parameters():
    assert task.make_model(0).num_parameters() == pytest.approx(5.05e6, rel=0.01)


# ---- Runs ----


def odd(completions, **kwargs):
    return [float(len(completion[0]["content"]) % 2) for completion in completions]


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A model, a rollout and probes so small that a run takes a second; any odd length is rewarded."""
    for name, value in {"NUM_PROMPTS": 2, "NUM_GENERATIONS": 4, "NUM_STEPS": 2, "NUM_TRAIN": 64}.items():
        monkeypatch.setattr(training, name, value)
    monkeypatch.setattr(training, "NUM_PROBED", 8)
    monkeypatch.setattr(training, "NUM_HELD_OUT", 16)
    monkeypatch.setattr(training, "MAX_LENGTH", 8)
    monkeypatch.setattr(training, "score", odd)
    checkpoint = tmp_path / "checkpoint-1"
    tokenizer = task.make_tokenizer()
    build_model(tokenizer, 0, **TINY).save_pretrained(checkpoint)
    tokenizer.save_pretrained(checkpoint)
    return checkpoint


CARRY = {"use_dynamic_sampling": True, "dynamic_sampling_surplus": "carry", "learning_rate": 1e-2}


@pytest.mark.parametrize(("trainer", "settings"), [("GRPO", {"learning_rate": 1e-2}), ("DAPO", CARRY)])
def test_a_run_is_probed_on_the_way_and_on_more_problems_at_its_end(small, monkeypatch, trainer, settings):
    look, asked = training.probe, []

    def counted(model, tokenizer, problems):
        asked.append(len(problems))
        return look(model, tokenizer, problems)

    monkeypatch.setattr(training, "probe", counted)
    result = training.run(Job("Countdown", "any", 0, settings, num_rollouts=4, others={"trainer": trainer}), small)
    assert asked == [8] * 5 + [16]
    assert [point["rollouts"] for point in result["curve"]] == [0, 1, 2, 3, 4]
    assert len({point["entropy"] for point in result["curve"]}) == 5  # the weights moved
    assert result["tokens"] == result["curve"][-1]["tokens"]
    json.dumps(result)  # it is kept in a file


def test_a_run_ends_at_its_target_or_at_its_tokens(small, monkeypatch):
    job = Job("Countdown", "any", 0, num_rollouts=9, others={"trainer": "GRPO"})
    thrifty = training.run(job._replace(max_tokens=100), small)
    used = [point["tokens"] for point in thrifty["curve"]]
    assert used[-2] < 100 <= used[-1] == thrifty["tokens"]
    accuracies = iter([0.1, 0.2, 0.4, 0.3, 0.6])
    monkeypatch.setattr(training, "probe", lambda *args: {"accuracy": next(accuracies)})
    reached = training.run(job._replace(target=0.4), small)
    assert [point["accuracy"] for point in reached["curve"]] == [0.1, 0.2, 0.4]
    assert reached["accuracy"] == 0.3  # at the end, on more problems


def test_the_checkpoint_is_made_once(tmp_path, small, monkeypatch, capsys):
    made = []

    def make_model(seed):
        made.append(seed)
        return build_model(task.make_tokenizer(), seed, **TINY)

    monkeypatch.setattr(task, "make_model", make_model)
    path, start = training.make_checkpoint(tmp_path, 50)
    assert training.make_checkpoint(tmp_path, 50) == (path, start)
    assert made == [42]
    assert len(start["curve"]) == 1
    # 113 tokens are about as likely at first, log(113) = 4.73; that signs stand between numbers is learnt at once.
    assert float(capsys.readouterr().out.split()[-1]) < 4.6
    job = Job("Countdown", "any", 0, num_rollouts=1, others={"trainer": "GRPO"})
    first = training.run(job, path)["curve"][0]
    assert first["entropy"] == pytest.approx(start["curve"][0]["entropy"], rel=1e-3)  # the weights that were kept


def test_a_probe_counts_what_is_cut_off_as_wrong(monkeypatch):
    right, lengths = [True, True, False, True], [5, 161, 161, 160]
    found = [np.array(values) for values in (right, lengths, [1.0, 1.0, 1.0, 3.0])]
    monkeypatch.setattr(training, "sample", lambda *args: (*found, None))
    figures = training.probe(None, None, ["1,2:3", "1,2,3:6", "1,2,4:7", "1,2:2"])
    assert figures["accuracy"] == 0.5
    assert figures["truncated"] == 0.5
    assert figures["length"] == (5 + 3 * 160) / 4
    assert figures["entropy"] == pytest.approx((5 + 161 + 161 + 480) / 487)
    assert [figures["accuracy, 2 numbers"], figures["accuracy, 3 numbers"]] == [1.0, 0.0]
    assert math.isnan(figures["accuracy, 4 numbers"])


# ---- Parts ----


def test_the_control_generates_what_the_last_rung_with_its_seed_has_generated():
    rungs = study.ladder_jobs([0, 1])
    assert [job.arm for job in rungs] == list(study.ladder.run.RUNGS) * 2
    assert [job.settings.get("overlong_buffer_length") for job in rungs[:6]] == [None] * 3 + [study.BUFFER] * 3
    jobs = study.control_jobs(
        [0, 1], {("ladder", "+ dynamic sampling", seed): {"tokens": 10.0 + seed} for seed in (0, 1)}
    )
    assert [job.max_tokens for job in jobs] == [10.0, 11.0]
    assert jobs[0].settings == rungs[0].settings


def result(accuracy, tokens=100.0):
    figures = {"accuracy": accuracy, "length": 50.0, "truncated": 0.1, "entropy": 0.5}
    points = [
        {"rollouts": i, "tokens": 50 * i, "seconds": 1.0 * i, **figures, "accuracy": 0.3 + 0.1 * i} for i in range(3)
    ]
    others = {"tokens": tokens, "cpu_seconds": 2.0, "acceptance": 0.5, "spread": 0.5, "clip_ratio": 0.01}
    return {**figures, **others, "curve": points}


def every_run(part, seeds):
    return {(part, arm, seed): result(0.4 + 0.01 * seed) for arm in study.ROWS_OF[part] for seed in seeds}


def test_parts_are_kept_side_by_side_as_long_as_their_checkpoint_is_one(tmp_path):
    kept, start = study.STUDY._replace(folder=tmp_path), {(study.WARM_UP, "checkpoint-1", 42): result(0.3)}
    study.keep(start | every_run("Countdown", range(3)), kept)
    study.keep(start | every_run("ladder", range(3)), kept)
    assert len(kept.read()) == 1 + 3 * 4 + 3 * 7
    study.keep(start | every_run("ladder", range(1)), kept)
    assert len(kept.read()) == 1 + 3 * 4 + 7
    study.keep({(study.WARM_UP, "checkpoint-2", 42): result(0.3)} | every_run("ladder", range(1)), kept)
    assert len(kept.read()) == 1 + 7


def test_only_whole_seeds_are_reported():
    results = {(study.WARM_UP, "checkpoint-1", 42): result(0.3)} | every_run("Countdown", range(3))
    del results["Countdown", "ours", 2]
    assert study.whole_seeds(results, "Countdown") == [0, 1]

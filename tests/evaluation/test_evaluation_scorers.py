# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Scorers by name and by dotted path, and the warning if few completions have an answer."""

import asyncio
import functools
import math
import re
from decimal import Decimal

import pytest
from evaluations import Deal, ask, asked, completions, mixed_prompts, sums

from trl_dapo.evaluation.jobs import GeneratedCompletion, Problem
from trl_dapo.evaluation.scorers import score


PLAIN = ["51", "51.", "$51$", "17 * 3 = 51", "The answer is 51", "Three times 17 is **51**", "51.0", "It costs $51."]


CASES = [  # completion, gold answer, verdict, answer
    ("1,234,567", "1234567", True, "1234567"),
    ("1,2", "2", True, "2"),
    ("so 1{,}234", "234", False, "1234"),
    ("so 1,\\!234", "1{,}234", True, "1234"),
    ("It is -$1,000.50.", "-1000.5", True, "-1000.5"),
    ("x = -4", "4", False, "-4"),
    ("x = \u22124", "-4", True, "-4"),
    ("17-3", "3", True, "3"),
    ("(17)-3", "-3", False, "3"),
    ("50 %", "50", True, "50"),
    ("50\\%", "$50\\%$", True, "50"),
    ("about .5", "0.50", True, "0.5"),
    ("0051 or -0", "0", True, "0"),
    ("so...51", "51", True, "51"),
    ("section 1.2.3", "1.2", True, "1.2"),
    ("x2 and a_3", "3", False, None),
    ("3/4", "4", True, "4"),
    ("none", "51", False, None),
    ("51", "5 apples", None, "51"),
    ("51", "3/4", None, "51"),
    ("51", "", None, "51"),
]


def in_turn(texts):
    """Script that answers the i-th of `sums` by the i-th text."""
    return lambda body: texts[int(asked(body)[0].removeprefix("1+")) - 1]


@pytest.mark.fast
def test_plain_answers_are_correct_by_their_last_number_but_not_by_the_papers_rule(serve, tmp_path):
    server, dataset = serve(in_turn(PLAIN)), sums(len(PLAIN), solution=["51"] * len(PLAIN))
    assert ask(server, dataset, tmp_path, k=1)["metrics"]["avg@1"]["mean"] == 0
    assert ask(server, dataset, tmp_path, k=1, scorer="last_number")["metrics"]["avg@1"]["mean"] == 1
    assert [row["answer"] for row in completions(tmp_path)] == ["51"] * len(PLAIN)


@pytest.mark.fast
def test_the_last_number_by_hand(serve, tmp_path):
    texts, golds, *_ = zip(*CASES, strict=True)
    ask(serve(in_turn(texts)), sums(len(CASES), solution=golds), tmp_path, k=1, scorer="last_number")
    rows = [(row["completion"], row["solution"], row["correct"], row["answer"]) for row in completions(tmp_path)]
    assert rows == CASES


@pytest.mark.fast
@pytest.mark.parametrize("scorer", ["dapo_math", "last_number"])
def test_gold_answers_of_a_column_of_floats_are_the_numbers_that_they_are_in_training(serve, tmp_path, scorer):
    """51.0 is 51, and 1e-07 is what nobody writes with an e."""
    answers, golds = ["Answer: 51", "Answer: 0.0000001", "Answer: 2.5"], [51.0, 1e-07, 2.4]
    ask(serve(in_turn(answers)), sums(3, solution=golds), tmp_path, k=1, scorer=scorer)
    assert [(row["solution"], row["correct"]) for row in completions(tmp_path)] == [
        ("51", True),
        ("0.0000001", True),
        ("2.4", False),
    ]


MODULE = """
def length_reward(prompts, completions, solution, **kwargs):
    return [None if gold == "4" else len(text) - 1.0 for text, gold in zip(completions, solution)]

def said_reward(completions, solution, log_extra, **kwargs):
    log_extra("answer", [completion[0]["content"].upper() for completion in completions])
    return [0.5] * len(completions)

def same(text, gold):
    return text == gold, text
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module of the working directory."""
    (tmp_path / "my_scorers.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    return "my_scorers"


@pytest.mark.fast
def test_a_dotted_path_names_a_reward_function_or_one_of_text_and_gold(serve, tmp_path, module):
    # by length: "4" is 0 and wrong, "44" is above 0 and right; the third problem's gold answer is not read
    server = serve(Deal(first=["4", "44"], second=["2", "2"], third=["4", "4"]))
    by_length = ask(server, sums(3), tmp_path, k=2, scorer=f"{module}.length_reward")
    assert by_length["scorer"] == f"{module}.length_reward"
    assert by_length["num_unscored_problems"] == 1
    assert by_length["metrics"]["avg@2"]["mean"] == pytest.approx((1 / 2 + 0) / 2)
    by_text = ask(server, sums(3), tmp_path, k=2, scorer=f"{module}.same")
    assert by_text["metrics"]["avg@2"]["mean"] == pytest.approx((0 + 0 + 1) / 3)


@pytest.mark.fast
def test_a_reward_function_gets_messages_if_the_prompt_has_them_and_gives_the_answers(serve, tmp_path, module):
    ask(serve(lambda body: "x"), mixed_prompts(2), tmp_path, k=2, scorer=f"{module}.said_reward")
    assert [(row["correct"], row["answer"]) for row in completions(tmp_path)] == [(True, "X")] * 4


def problem(**columns):
    return Problem("a", "b", {"prompt": "1+1", "solution": "2", **columns}, num_rows=1, key="c")


def said(*texts):
    return [[GeneratedCompletion(text, 1, False, [5]) for text in texts]]


@pytest.mark.fast
def test_a_reward_of_nan_counts_as_not_scored_as_in_training():
    def reward(completions, **kwargs):
        return [math.nan, 0.5]

    found = score([problem()], said("2", "Answer: 3"), reward)
    assert found == ([[(None, None), (True, "3")]], False)  # nothing says that a whole text is an answer


@pytest.mark.fast
def test_an_async_reward_works_if_an_event_loop_is_running():
    async def reward(completions, solution, **kwargs):
        await asyncio.sleep(0)
        return [float(text == gold) for text, gold in zip(completions, solution, strict=True)]

    async def in_a_notebook():
        return score([problem()], said("2", "3"), reward)

    assert [verdict.correct for verdict in asyncio.run(in_a_notebook()).of_problems[0]] == [True, False]


@pytest.mark.fast
def test_an_answer_may_be_a_number_and_a_column_that_only_sounds_like_an_answer_has_no_vote():
    def reward(completions, log_extra, **kwargs):
        log_extra("has_answer", [True] * len(completions))
        log_extra("reward_answer", [7, None])
        return [1.0, 0.0]

    assert score([problem()], said("2", "3"), reward) == ([[(True, "7"), (False, None)]], True)
    assert score([problem()], said("7"), lambda text, gold: (True, 7)) == ([[(True, "7")]], True)
    with pytest.raises(TypeError, match=r"returned True\. Expected a pair that says whether"):
        score([problem()], said("7"), lambda text, gold: True)


@pytest.mark.fast
def test_a_function_of_keywords_alone_and_a_partial_one_are_reward_functions():
    def by_keyword(**kwargs):
        return [float(text == gold) for text, gold in zip(kwargs["completions"], kwargs["solution"], strict=True)]

    def in_mode(completions, mode, log_extra, **kwargs):
        log_extra("in_mode_answer", [text.upper() for text in completions])
        return [float(text == mode) for text in completions]

    assert score([problem()], said("2", "3"), by_keyword).of_problems == [[(True, None), (False, None)]]
    assert score([problem()], said("b", "a"), functools.partial(in_mode, mode="a")) == (
        [[(False, "B"), (True, "A")]],
        True,
    )


@pytest.mark.fast
def test_scores_need_a_threshold_to_say_which_completions_are_correct():
    def reward(completions, **kwargs):
        return [float(text) for text in completions]

    def right(*texts, **how):
        return [verdict.correct for verdict in score([problem()], said(*texts), reward, **how).of_problems[0]]

    assert right("0.2", "1") == [True, True]  # two values may be verdicts
    with pytest.raises(
        ValueError, match=r"'reward' gives scores.*Set `accuracy_threshold`: a completion with a score above it"
    ):
        right("0.2", "1", "0.5")
    assert right("0.2", "1", "0.5", accuracy_threshold=0.5) == [False, True, False]
    assert right("0.2", "0", "0.5", accuracy_threshold=0.0) == [True, False, True]  # said by the user


@pytest.mark.fast
def test_a_reward_gets_every_column_with_its_own_type_and_what_training_passes_and_may_change_them():
    def reward(prompts, completions, completion_ids, trainer_state, log_metric, **kwargs):
        seen.append((prompts, completions, completion_ids, kwargs["golds"], trainer_state.global_step))
        assert "prompt" not in kwargs
        kwargs["golds"][0].append("4")
        log_metric("seen", 1.0)
        return [1.0] * len(completions)

    seen, row = [], problem(golds=["2", "3"])
    score([row], said("2", "3"), reward)
    assert seen == [(["1+1"] * 2, ["2", "3"], [[5], [5]], [["2", "3", "4"], ["2", "3"]], 0)]
    assert row.row["golds"] == ["2", "3"]


def has_letter(completions, letter, **kwargs):
    return [float(wanted in text) for text, wanted in zip(completions, letter, strict=True)]


def test_a_reward_function_gets_the_columns_that_it_names_of_a_users_file_as_in_training(serve, tmp_path):
    server, file = serve(in_turn(["a", "b"])), tmp_path / "letters.jsonl"
    file.write_text('{"prompt": "1+1", "letter": "a"}\n{"prompt": "1+2", "letter": "c"}\n')
    summary = ask(server, file, tmp_path, k=1, scorer=has_letter)
    assert [problem["num_correct"] for problem in summary["problems"]] == [1, 0]
    assert ask(server, file, tmp_path / "second", k=1, scorer=has_letter, offset=1)["num_problems"] == 1


def test_a_reward_function_without_named_columns_gets_those_of_the_file_unchanged(serve, tmp_path):
    def is_gold(completions, **kwargs):
        return [float(text == gold) for text, gold in zip(completions, kwargs["answer"], strict=True)]

    file = tmp_path / "problems.jsonl"
    file.write_text('{"prompt": "1+1", "answer": "$2$"}\n')
    assert ask(serve(lambda body: "$2$"), file, tmp_path, k=1, scorer=is_gold)["metrics"]["avg@1"]["mean"] == 1


def test_skipping_bad_rows_of_a_file_that_was_used_unchanged_is_an_error(serve, tmp_path):
    def is_gold(completions, solution, **kwargs):
        return [float(text == gold) for text, gold in zip(completions, solution, strict=True)]

    file, server = tmp_path / "rows.jsonl", serve(lambda body: "2")
    file.write_text('{"prompt": "1+1", "solution": "2"}\n{"prompt": "1+2", "solution": null}\n')
    assert ask(server, file, tmp_path / "out", k=1, scorer=is_gold)["num_problems"] == 2
    with pytest.raises(ValueError, match="with other settings: `prompt_style` was None and is now 'as_is'"):
        ask(server, file, tmp_path / "out", k=1, scorer=is_gold, on_bad_rows="skip")


def test_a_scorer_that_fails_does_so_on_the_first_problem_and_loses_nothing(serve, tmp_path):
    def fails(completions, **kwargs):
        raise KeyError("letter")

    server = serve(lambda body: "Answer: 2")
    failed = f"The scorer 'fails' failed in line {fails.__code__.co_firstlineno + 1} of {__file__} with KeyError: "
    with pytest.raises(ValueError, match=f"^{re.escape(failed)}'letter'. 2 completions are stored in "):
        ask(server, sums(5), tmp_path, k=2, scorer=fails, concurrency=1)
    assert len(server.requests) == 2
    assert ask(server, sums(5), tmp_path, k=2, concurrency=1)["metrics"]["avg@2"]["mean"] == 1 / 5
    assert len(server.requests) == 10
    with pytest.raises(ValueError, match=r"The scorer 'fails' failed in line .* 10 completions are stored in "):
        ask(server, sums(5), tmp_path, k=2, scorer=fails)


def test_a_value_error_of_a_scorer_is_told_from_a_message_about_what_it_returned(serve, tmp_path):
    def is_down(text, gold):
        raise ValueError("no judge.")

    server = serve(lambda body: "Answer: 2")
    with pytest.raises(
        ValueError, match=r"^The scorer 'is_down' failed in line .* with ValueError: no judge\. \d comp"
    ):
        ask(server, sums(2), tmp_path, k=2, scorer=is_down)
    with pytest.raises(ValueError, match=r"^The scorer '<lambda>' returned 3\. Expected a pair .* completions are"):
        ask(server, sums(2), tmp_path, k=2, scorer=lambda text, gold: 3)


@pytest.mark.fast
def test_a_missing_column_of_a_scorer_is_an_error_before_sampling(serve, tmp_path):
    server = serve(lambda body: pytest.fail("it was asked"))
    with pytest.raises(ValueError, match=r"'has_letter' requires `letter`, which `dataset` does not have\. Its"):
        ask(server, sums(1), tmp_path, scorer=has_letter)
    with pytest.raises(ValueError, match="no column 'solution', with which the scorer '<lambda>' compares"):
        ask(server, sums(1).select_columns("prompt"), tmp_path, scorer=lambda text, gold: (True, text))

    def by_ids(completions, completion_ids, **kwargs):
        return [1.0] * len(completions)

    with pytest.raises(ValueError, match=r"'by_ids' requires `completion_ids`, .* which a server does not send"):
        ask(server, sums(1), tmp_path, scorer=by_ids)


def test_a_missing_scorer_is_an_error_before_sampling(serve, tmp_path, module):
    server = serve(lambda body: "x")
    with pytest.raises(ImportError, match=r"`scorer` names 'my_scorers.none', but module 'my_scorers' has no 'none'"):
        ask(server, sums(1), tmp_path, scorer=f"{module}.none")
    assert server.requests == []


def test_trls_accuracy_reward_gives_the_verdicts_of_math_verify(serve, tmp_path):
    server = serve(lambda body: "\\boxed{1}" if "1+1" in str(body) else "\\boxed{2}")
    summaries = {}
    for scorer in ("math_verify", "accuracy_reward"):
        summaries[scorer] = ask(server, mixed_prompts(4), tmp_path, k=1, scorer=scorer)
        assert [row["correct"] for row in completions(tmp_path)] == [False, True, False, False]
    assert summaries["math_verify"]["metrics"] == summaries["accuracy_reward"]["metrics"]
    assert len(server.requests) == 4


@pytest.mark.fast
def test_a_reward_is_above_zero_in_an_evaluation_by_as_much_as_in_training():
    """A reward of 5.6e-17, or 3e-8 in float32, is a zero with rounding errors, and not correct."""

    def reward(completions, **kwargs):
        return [0.1 + 0.2 - 0.3, 3e-8, Decimal(1), True, None]

    (verdicts,) = score([problem()], said(*"22222"), reward).of_problems
    assert [verdict.correct for verdict in verdicts] == [False, False, True, True, None]

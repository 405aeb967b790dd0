# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
import os
import pickle
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from trl_dapo.rewards import (
    DapoMathReward,
    bare_number_reward,
    dapo_math_reward,
    last_number_reward,
    math_verify_reward,
    normalize_answer,
    score_dapo_math,
)
from trl_dapo.rewards.dapo_math import completion_text, stated_answer


pytestmark = pytest.mark.fast
DATA = os.environ.get("TRL_DAPO_DATA")
needs_data = pytest.mark.skipif(DATA is None, reason="TRL_DAPO_DATA does not name the folder with the real data")
# Verdicts and extracted answers of DAPO's reference scorer.
REFERENCE = [
    ("Answer: 34", "34", True, "34"),
    ("Answer: 35", "34", False, "35"),
    ("Answer: 34\nAnswer: 33", "34", False, "33"),
    ("Answer:\n34", "34", True, "34"),
    ("", "34", False, "[INVALID]"),
    ("\\boxed{34}", "34", False, "[INVALID]"),
    ("Answer: \\boxed{34}", "34", True, "34"),
    ("Answer: 34.", "34", False, "34."),
    ("Answer: 34 = x", "34", False, "x"),
    ("Answer: 1{,}234", "1,234", True, "1234"),
    ("Answer: 34 dollars", "34", True, "34"),
    ("Answer: $34^\\circ$", "34", True, "34"),
    ("Answer: 034", "34", False, "034"),
    ("Answer: \\frac12", "\\frac{1}{2}", True, "\\frac{1}{2}"),
    ("Answer: 1/2", "\\frac{1}{2}", False, "1/2"),
    ("Answer: \\sqrt2", "\\sqrt{2}", True, "\\sqrt{2}"),
    ("Answer: \\text{a cat}", "cat", True, "cat"),
    ("Answer: 34<|im_end|>", "34", False, "34<|im_end|>"),
    ("Answer: \u0663\u0664", "\u0663\u0664", True, "\u0663\u0664"),
    ("An\u017fwer: 34", "34", True, "34"),
]


@pytest.mark.parametrize(("text", "gold", "correct", "answer"), REFERENCE)
def test_the_verdict_is_that_of_the_reference_scorer(text, gold, correct, answer):
    assert score_dapo_math(text, gold) == (1.0 if correct else -1.0, correct, answer)


@pytest.mark.parametrize(
    ("answer", "normal_form"),
    [
        ("$1$, $2$\n$3$ or $4$", "1\n3"),  # only what is between the first two dollars of a line
        ("\\text{x\\text{y}}", "x\\text{y}"),  # ends at the first closing brace; what is unwrapped is not read again
        ("\\boxed{\\boxed{1}}", "\\boxed{1}"),  # ends at the last closing brace
        ("\\textbf{1}\\overline{2}", "12"),
        ("\\text{1\n}", "\\text{1\n}"),  # nothing is unwrapped over a line end
        ("\\mbox{m}^2 7", "7"),
        ("1,2", "12"),
    ],
)
def test_normal_forms_are_those_of_the_reference_scorer(answer, normal_form):
    assert normalize_answer(answer) == normal_form


def test_only_the_last_300_characters_are_read():
    line = "Answer: 34\n"
    assert score_dapo_math(line + "x" * (300 - len(line)), "34").correct
    assert score_dapo_math(line + "x" * (301 - len(line)), "34").answer == "[INVALID]"


@pytest.mark.parametrize(
    ("text", "never", "fallback", "strict"),
    [
        ("\\boxed{34}", False, True, True),
        ("\\boxed{34} " + "x" * 90, False, False, False),  # the box begins 101 characters before the end
        ("\\boxed{34}" + "x" * 90, False, True, True),
        ("\\boxed{33} then \\boxed{34}", False, True, True),
        ("\\boxed{34} then \\boxed{33}", False, False, False),
        ("\\boxed{34", False, False, False),
        ("\\boxed{ 34}", False, False, False),  # exact, without normalisation
        ("\\boxed{33}\nAnswer: 34", True, True, False),  # the fallback is for a missing line only
        ("\\boxed{34}\nAnswer: 33", False, False, True),
    ],
)
def test_whether_a_box_counts_is_an_option(text, never, fallback, strict):
    verdicts = [score_dapo_math(text, "34", boxed=boxed).correct for boxed in ("never", "fallback", "strict")]
    assert verdicts == [never, fallback, strict]
    assert score_dapo_math("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}", boxed="strict").correct


HOSTILE = {
    "a megabyte of answer lines": "Answer: 1\n" * 100_000,
    "nested braces": "Answer: \\boxed{" + "{" * 100_000 + "}" * 100_000 + "}",
    "nested text": "\\text{" * 100_000,
    "NUL": "Answer: 3\x004",
    "lone surrogate": "\ud800Answer: \udfff",
    "zalgo": "Answer: 3" + "\u0301" * 10_000 + "4",
    "regex bomb": "Answer" + " " * 100_000,
}


@pytest.mark.parametrize("boxed", ["never", "fallback", "strict"])
@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_text_gets_a_verdict_as_completion_and_as_gold_answer(text, boxed):
    assert score_dapo_math(text, "34", boxed=boxed).score == -1.0
    assert score_dapo_math("Answer: 34", text, boxed=boxed).score == -1.0


def test_the_reward_reads_plain_and_conversational_completions():
    conversation = [
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "tool", "content": "Answer: 33"},
        {"role": "assistant", "content": "Answer: 34"},
    ]
    silent = [{"role": "assistant", "content": None}]
    assert dapo_math_reward(["Answer: 34", conversation, silent, []], ["34"] * 4) == [1.0, 1.0, -1.0, -1.0]


CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "calculate"}}]}
OF_OTHERS = [  # what a tool or an environment wrote last, where the budget ended
    ([CALL, {"role": "tool", "content": "{}"}], 0.0),
    ([{"role": "tool", "content": "{}"}], 0.0),
    ([CALL, {"role": "user", "content": "{}"}], 0.0),
    ([{"role": "assistant", "content": "{}"}, CALL, {"role": "tool", "content": "34"}], 0.0),
    ([{"role": "assistant", "content": "{}"}, {"role": "tool", "content": "33"}], 1.0),
    ([{"content": "{}"}], 1.0),  # as a rollout function of a user's may leave it
]


@pytest.mark.parametrize(
    ("reward", "answer"),
    [
        (dapo_math_reward, "Answer: 34"),
        (math_verify_reward, "$\\boxed{34}$"),
        (last_number_reward, "It is 34"),
        (bare_number_reward, "34"),
    ],
)
def test_text_of_a_tool_or_an_environment_is_not_an_answer_of_the_model(reward, answer):
    completions = [
        [{**message, "content": message["content"].replace("{}", answer)} for message in messages]
        for messages, _ in OF_OTHERS
    ]
    expected = [score for _, score in OF_OTHERS]
    rewards = reward(completions=completions, solution=["34"] * len(completions))
    assert [max(value, 0.0) for value in rewards] == expected


def test_text_of_a_tool_has_no_vote():
    assert stated_answer(completion_text([CALL, {"role": "tool", "content": "Answer: 34"}])) is None


@pytest.mark.parametrize("reward", [dapo_math_reward, math_verify_reward])
@pytest.mark.parametrize(
    "content",
    [
        ["Answer: ", {"type": "text", "text": "$34$"}],
        [{"type": "image"}, {"type": "text", "text": None}, {"type": "text", "text": "Answer: $34$"}],
    ],
)
def test_content_in_parts_is_their_text(content, reward):
    assert reward([[{"role": "assistant", "content": content}]], ["34"]) == [1.0]


@pytest.mark.parametrize("reward", [dapo_math_reward, math_verify_reward])
@pytest.mark.parametrize(
    ("completion", "message"),
    [
        ([{"role": "assistant", "content": {"answer": 34}}], r"content of a message is \{'answer': 34\} \(dict\)"),
        ([{"role": "assistant", "content": [34]}], r"content of a message is 34 \(int\)"),
        ({"role": "assistant", "content": "34"}, r"A completion is \{'role'.*\(dict\)\. Expected text, or a list"),
        (["34"], r"A completion is \['34'\] \(list\)"),
    ],
)
def test_the_error_for_a_completion_of_another_type_shows_it(completion, message, reward):
    with pytest.raises(TypeError, match=message):
        reward([completion], ["34"])


@pytest.mark.parametrize("reward", [dapo_math_reward, math_verify_reward])
@pytest.mark.parametrize("gold", [5.0, np.float32(5), np.int64(5), Decimal("5.00"), 0.5, np.float32(0.1)])
def test_a_number_is_the_same_gold_answer_in_any_type_and_a_fraction_keeps_its_digits(gold, reward):
    text = str(gold).removesuffix(".00").removesuffix(".0")
    right, wrong = reward([f"Answer: ${text}$", f"Answer: $1{text}$"], [gold] * 2)
    assert right == 1.0 > wrong


@pytest.mark.parametrize("reward", [dapo_math_reward, math_verify_reward])
@pytest.mark.parametrize("gold", [["5"], b"5", 5j])
def test_the_error_for_a_gold_answer_of_another_type_shows_it(gold, reward):
    with pytest.raises(TypeError, match=rf"A gold answer is .*\({type(gold).__name__}\)\. Expected text or a number"):
        reward(["Answer: 5"], [gold])


@pytest.mark.parametrize(("gold", "is_correct"), [("34 ", False), ("$34 $", False), (" 34", False), ("$34$", True)])
def test_a_box_is_the_gold_answer_without_its_dollars_to_the_letter_spaces_included(gold, is_correct):
    assert score_dapo_math("\\boxed{34}", gold, boxed="strict").correct is is_correct
    assert score_dapo_math("\\boxed{34}", gold, boxed="fallback").correct is is_correct
    assert score_dapo_math("Answer: 34", gold).correct
    assert score_dapo_math("\\boxed{34}", "\\(34\\)", boxed="strict").correct


@pytest.mark.parametrize("reward", [dapo_math_reward, math_verify_reward])
@pytest.mark.parametrize("gold", [None, float("nan"), " "])
def test_a_sample_without_a_gold_answer_is_skipped(gold, reward):
    assert reward(["Answer: $34$", "Answer: None"], ["34", gold]) == [1.0, None]
    with pytest.raises(ValueError, match="without a gold answer, got nan"):
        score_dapo_math("Answer: 34", float("nan"))


def test_the_extracted_answers_are_logged_as_valid_unicode():
    logged = {}
    dapo_math_reward(["Answer: 34", "", "Answer: \udfff"], ["34", "34", None], log_extra=logged.__setitem__)
    assert logged == {"dapo_math_answer": ["34", "[INVALID]", "[skipped]"]}
    dapo_math_reward(["Answer: \udfff"], ["34"], log_extra=logged.__setitem__)
    assert logged == {"dapo_math_answer": ["?"]}


def test_the_configured_reward_keeps_its_settings_when_pickled():
    reward = pickle.loads(pickle.dumps(DapoMathReward(boxed="strict", wrong_score=0.0)))
    assert reward(completions=["\\boxed{34}", "Answer: 34"], solution=["34", "34"], prompts=[]) == [1.0, 0.0]
    assert reward.__name__ == dapo_math_reward.__name__ == "dapo_math_reward"


@pytest.mark.parametrize("settings", [{"boxed": "always"}, {"wrong_score": 1.0}, {"wrong_score": float("nan")}])
def test_a_meaningless_setting_is_refused_with_its_value(settings):
    (value,) = settings.values()
    with pytest.raises(ValueError, match=str(value)):
        DapoMathReward(**settings)


@needs_data
@pytest.mark.parametrize(
    ("file", "num_golds", "text", "boxed"),
    [
        ("dapo_math_17k.parquet", 17_917, "Thus the sum is 7, as wanted.\n\nAnswer: {}", "never"),
        ("aime-2024.parquet", 960, "Thus the sum is 7, as wanted.\n\nAnswer: {}", "never"),
        ("dapo_math_17k.parquet", 17_917, "So it is \\boxed{{{}}}.", "strict"),  # the format of its own prompt
    ],
)
def test_every_real_gold_answer_scores_one_and_its_successor_minus_one(file, num_golds, text, boxed):
    golds = [row["reward_model"]["ground_truth"] for row in pq.read_table(Path(DATA) / file).to_pylist()]
    reward = DapoMathReward(boxed=boxed)
    assert len(golds) == num_golds
    assert set(reward([text.format(gold) for gold in golds], golds)) == {1.0}
    assert set(reward([text.format(int(gold) + 1) for gold in golds], golds)) == {-1.0}

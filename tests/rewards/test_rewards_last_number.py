# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Rewards for plain answers. tests/evaluation/test_evaluation_scorers.py has further tests of the last number."""

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

from trl_dapo.rewards import bare_number_reward, last_number_reward


pytestmark = pytest.mark.fast


def test_the_last_number_is_rewarded_in_text_and_in_messages_and_its_answer_is_logged():
    texts, columns = ["17 * 3 = 51", "51 or 52", "none", "51.0"], {}
    messages = [[{"role": "assistant", "content": text}] for text in texts]
    golds = ["51", "51", "51", 51]
    assert last_number_reward(texts, golds, log_extra=columns.__setitem__) == [1, 0, 0, 1]
    assert columns == {"last_number_answer": ["51", "52", "", "51"]}
    assert last_number_reward(completions=messages, solution=golds, prompts=texts) == [1, 0, 0, 1]


def test_a_gold_answer_that_is_not_a_number_gives_no_reward():
    golds = [None, "", "3/4", "five", math.nan, "$51$"]
    assert last_number_reward(["51"] * len(golds), golds) == [None, None, None, None, None, 1]


# What is read of each; the escapes are those that models write.
READ = {
    # Powers of ten.
    "1.5e3": "1500",
    "It is 1.5E+3.": "1500",
    "2e-4 m": "0.0002",
    "1e\u22124": "0.0001",
    "-1,200e2": "-120000",
    "0e5": "0",
    "5e": "5",
    "3em wide": "3",
    "5e3x": "5",
    "1e3.5": "1",
    "12 eggs": "12",
    "0x3e5": "0",
    "a3e5": "",
    # A minus that is followed by a space, and is not a subtraction, the dash of a range, or another dash.
    "x = - 5": "-5",
    "x = - $5": "-5",
    "(3, - 5)": "-5",
    "Answer: - 5": "-5",
    "- 5": "-5",
    "$- 5$": "-5",
    "5 - 3": "3",
    "$5 - 3$": "3",
    "x - 5": "5",
    "(x) - 5": "5",
    "x-5": "5",
    "Roots:\n- 4\n- 5": "5",
    "the answer - 5": "5",
    "the answer--5": "5",
    "the answer\u20145": "5",
    # Other dashes.
    "x = \u22125": "-5",
    "x = \u2212 5": "-5",
    "x = \u20135": "-5",
    "x = \uff0d5": "-5",
    "pages 3\u20135": "5",
    "pages 3 \u2013 5": "5",
    "7 \u2212 5": "5",
    "2024-05-17": "17",
    "17\u201305\u20132024": "2024",
    # Thousands, by the spaces that typography has for them, and by LaTeX's.
    "1\u202f234\u202f567": "1234567",
    "1\u2009234.5": "1234.5",
    "1\u00a0234": "1234",
    "1\\,234": "1234",
    "1 234": "234",
    "3\u202f4": "4",
    "3\u202f4000": "4000",
    # Digits of other widths and scripts, also behind letters that do not end a name.
    "\uff15\uff11": "51",
    "\u7b54\u6848\u662f\uff15\uff11\u3002": "51",
    "\u7b54\u6848\u662f51\u4e2a": "51",
    # A minus behind words that mean "is" in Chinese and Japanese, which have no spaces, and behind units and names.
    "\u7b54\u6848\u662f-51": "-51",
    "\u7b54\u6848\u4e3a\u221251\u3002": "-51",
    "x\u7b49\u4e8e-$51$": "-51",
    "\u7b54\u3048\u306f - \uff15\uff11": "-51",
    "3\u5929-5\u5929": "5",
    "\u7532-5": "5",
    "\uff15\uff0e\uff15": "5.5",
    "\u0665\u0661": "51",
    "x\uff12": "",
}


@pytest.mark.parametrize("text", READ, ids=ascii)
def test_the_last_number_is_read_as_it_is_written(text):
    columns = {}
    last_number_reward([text], ["5"], log_extra=columns.__setitem__)
    assert columns == {"last_number_answer": [READ[text]]}


GOLDS = {
    1e-07: "0.0000001",
    1.5e-05: "0.000015",
    1e23: "1" + "0" * 23,
    2.5: "2.5",
    Decimal("1E-7"): "1e-7",
    51.0: "51",
}
GOLDS |= {"1e-07": "0.0000001", "1.5e3": "1500", "- 5": "-5", "\u20135": "-5", "\u22125": "- 5", "1\u202f234": "1,234"}
GOLDS |= {"5\r\n": "5", "\t- 5\t": "-5", "\u00a0$5$ ": "5"}  # with the line ends and the tabs of files
GOLDS |= {"\uff15\uff11": "51", "2e3": "2000", np.float32(0.1): "0.1", Fraction(4, 2): "2", -0.0: "0"}


@pytest.mark.parametrize("gold", GOLDS, ids=repr)
def test_a_gold_answer_is_read_whatever_type_or_notation_its_column_has(gold):
    assert last_number_reward([f"It is = {GOLDS[gold]}", "It is 0.3"], [gold] * 2) == [1.0, 0.0]


def test_numbers_are_equal_or_not_however_large_their_powers_are():
    texts = ["1e999999999", "10e999999998", "1e999999998", "1e-999999999", "0e999999999", "1e" + "9" * 5000, "0"]
    assert last_number_reward(texts, ["1e999999999"] * 7) == [1, 1, 0, 0, 0, 0, 0]
    assert last_number_reward(texts, ["0"] * 7) == [0, 0, 0, 0, 1, 0, 1]


HOSTILE = ["1" * 10**6, "1e" * 10**6, "1,111" * 10**5, "1," * 10**6, "1.1" * 10**5, "-" * 10**6, " " * 10**6 + "5"]
HOSTILE += ["1e" + "1" * 10**6 + "x", "1e-" * 10**5, "- " * 10**6 + "5", "$" * 10**6, "1\u202f111" * 10**5 + "x"]
HOSTILE += ["\uff11" * 10**6, "=" + " " * 10**6 + "-" + " " * 10**6 + "5", "1\\," * 10**5]


@pytest.mark.parametrize("text", HOSTILE, ids=[f"{text[:6]!r}" for text in HOSTILE])
def test_hostile_text_is_read_in_linear_time(text):
    """The texts have a million characters. A quadratic expression would take hours."""
    assert last_number_reward([text], ["7"]) == [0.0]
    assert bare_number_reward([text + "!"]) == [0.0]
    assert last_number_reward(["7"], [text + "!"]) == [None]


BARE = dict.fromkeys(["51", " 51\n", "-4", "1,234", "51.5", "$51", "1.5e3", "- 5", "\uff15"], 1)
BARE |= dict.fromkeys(["51.", "51 apples", "17 * 3 = 51", "51 51", "fifty-one", ""], 0)


@pytest.mark.parametrize("text", BARE)
def test_a_bare_number_is_rewarded_whether_it_is_correct_or_not(text):
    both = [text, [{"role": "assistant", "content": text}]]
    assert bare_number_reward(both, solution=["51", "7"]) == [BARE[text]] * 2

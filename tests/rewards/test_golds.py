# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
import json

import pytest

from trl_dapo.rewards import dapo_math_reward, math_verify_reward
from trl_dapo.rewards.golds import BadRow, read_gold


pytestmark = pytest.mark.fast

TESTS_OF_CODE = {"inputs": ["1 2\n"], "outputs": ["3\n"]}


@pytest.mark.parametrize(
    ("written", "gold"),
    [
        ('["5"]', "5"),
        ('["\\\\frac{1}{2}"]', "$\\frac{1}{2}$"),
        ('["$5$", "5"]', "5"),  # the same twice
        ("[5]", "5"),
        ([5.0], "5"),
        ([["5"]], "5"),
        # No lists of answers: an interval, a point, a matrix, a set.
        ("[0,1]", "$[0,1]$"),
        ("[[1, 2], [3, 4]]", "$[[1, 2], [3, 4]]$"),
        ("{1, 2}", "${1, 2}$"),
    ],
)
def test_a_list_of_one_is_unpacked(written, gold):
    assert read_gold(written) == gold


@pytest.mark.parametrize(
    ("written", "gold"),
    [
        ("1,234,567", "1234567"),
        ("1,234.5", "1234.5"),
        ("\N{MINUS SIGN}1,000", "-1000"),
        ("$1,000", "$1000"),
        ("5%", "5%"),
        ("1,000 dollars", "1,000 dollars"),  # with a unit a model writes it as the dataset does
    ],
)
@pytest.mark.parametrize("before", ["So it is.\n#### ", "#### ", ""])
def test_a_comma_between_groups_of_three_digits_separates_thousands(before, written, gold):
    assert read_gold(before + written) == gold


@pytest.mark.parametrize(("written", "answer"), [("$1,000", "1000"), ("1,000 dollars", "1000"), ("1,234.5", "1234.5")])
def test_a_number_is_correct_without_the_separators_of_its_gold_answer(written, answer):
    gold = read_gold(f"#### {written}")
    assert dapo_math_reward([f"Answer: {answer}"], [gold]) == [1.0]
    assert math_verify_reward([f"\\boxed{{{answer}}}"], [gold]) == [1.0]


@pytest.mark.parametrize("written", ["1,5", "1.234,5", "1,2345", "1234,567", "1,234,56", "1,000 of 2,000"])
def test_other_commas_after_the_marker_are_refused(written):
    # `#### 1,5` must not become 15.
    with pytest.raises(BadRow, match="a number with commas only between groups of three digits"):
        read_gold(f"So it is.\n#### {written}")
    assert read_gold("1,5") == "$1,5$"  # a list


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        *((text, "an answer$") for text in ("Proof.", "notfound", "not found", " ", "$$", "None", "nan")),
        *((nothing, "an answer$") for nothing in (None, float("-inf"), "[]", [None], 1j)),
        *((truth, "an answer, not a truth value") for truth in (True, "$false$", '["true"]', "[true]")),
        (TESTS_OF_CODE, "not code or its tests"),
        (json.dumps([TESTS_OF_CODE, TESTS_OF_CODE]), "not code or its tests"),
        ("assert add(1, 2) == 3", "not code or its tests"),
        ('["assert add(1, 2) == 3"]', "not code or its tests"),
        ("```python\nprint(5)\n```", "not code or its tests"),
        ('["2", "-2"]', "one answer, because it is not clear whether any of several counts or all of them"),
        ("\\boxed{2} or \\boxed{3}", "one answer, because it is not clear"),
        ("['5']", "an answer, or a list in JSON"),
        ('["\\sqrt{2}"]', "an answer, or a list in JSON"),
        (json.loads('"\\frac{1}{2}"'), "backslashes are escaped in JSON"),  # a form feed and `rac{1}{2}`
        *((json.loads(f'"{text}"'), "backslashes") for text in ("\\theta", "2\\times 3", "\\text{A}", "\\rho")),
        ("1" * 301, "a worked solution with its answer in"),
        ("We add them all, one by one, and so on, until there are no more of them left to add.", "a worked solution"),
        ("So\n#### We add them all, one by one, and so on, until there is no other one to add.", "a worked solution"),
        ("He has 5 apples and 3 pears, 5+3=8", "a worked solution"),
        ("\\boxed{}", "a worked solution"),
    ],
)
def test_the_error_for_a_bad_gold_answer_says_what_was_expected(answer, expected):
    with pytest.raises(BadRow, match=expected):
        read_gold(answer)


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        # Numbers, choices and short texts are unchanged.
        *(
            (text, text)
            for text in ("5", "-1/2", "B", "Yes", "no solution", "the set of all odd primes", "from 3 to 5")
        ),
        ("\\{x,\n\ty\\}", "$\\{x,\n\ty\\}$"),
        *((text, f"${text}$") for text in ("2\\pi", "x^2+1", "(1,2)", "1,-2")),
        *((text, text) for text in ("$[0, 3)$", "\\$5", "$1$ or $2$", "x\N{SUPERSCRIPT TWO}")),
        *((text, "34") for text in ("$34$", "\\(34\\)", "$\\boxed{34}$", 34.0, "\N{FULLWIDTH DIGIT THREE}4")),
        ("\N{MINUS SIGN}1/2", "-1/2"),
        ("025", "25"),  # AIME's notation, which is not equal to 25 by the paper's rule
        ("0101", "0101"),
        ("The answer is \\boxed{5} cm.", "5"),
        ("Not \\boxed{4}.\n#### 5", "5"),
        ("#### Step 1\nAdd.\n#### Step 2\nIt is \\boxed{5}.", "5"),
        ("```python\nprint(5)\n```\nIt is \\boxed{5}.", "5"),
        ("1" * 300, "1" * 300),
    ],
)
def test_a_short_answer_is_the_gold_one(answer, gold):
    assert read_gold(answer) == gold


def test_the_last_box_of_a_solution_is_the_answer_and_a_short_answer_needs_no_box():
    assert read_gold("First \\boxed{4}, then \\boxed{5}.", is_solution=True) == "5"
    assert read_gold("5", is_solution=True) == "5"
    with pytest.raises(BadRow, match="a worked solution"):
        read_gold("It is 5.", is_solution=True, needs_box=True)
    # GSM8K's marker counts as a box, and a number is not a worked solution.
    assert read_gold("It is 5.\n#### 5", is_solution=True, needs_box=True) == "5"
    assert read_gold(5.0, is_solution=True, needs_box=True) == "5"

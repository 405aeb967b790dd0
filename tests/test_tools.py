# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
import pytest
from transformers.utils import get_json_schema

from trl_dapo import tools
from trl_dapo.tools import calculate


pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("(2 + 3) * -4", "-20"),
        ("7 // 2 + 7 % 2 + 2**10", "1028"),  # 3 + 1 + 1024
        ("1 / 4", "0.25"),
        (" comb(12, 5) * 3**4 % 7 ", "4"),  # 792 * 81 = 64152 = 9164 * 7 + 4
        ("gcd(84, 36) + lcm(4, 6) + isqrt(50)", "31"),  # 12 + 12 + 7
        ("max(1, 5, abs(-7)) + round(cos(pi), 3)", "6.0"),
        ("3**500", str(3**500)),
    ],
)
def test_arithmetic_with_integers_is_exact(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("__import__('os').getcwd()", "is not arithmetic"),
        ("[1, 2] * 3", "is not arithmetic"),
        ("x + 1", "`x` is not arithmetic"),
        ("round(2.5, ndigits=1)", "no named arguments"),
        ("2 +", "'2 [+]' is not an arithmetic expression"),
        ({"expression": "1"}, "is not an arithmetic expression"),  # the arguments are what a model might write
        ("(" * 299, "is not an arithmetic expression"),
        ("1" * 301, "301 characters, more than 300"),
        ("(-8) ** 0.5", "is not a real number"),
    ],
)
def test_nothing_but_arithmetic_is_evaluated(expression, message):
    with pytest.raises(ValueError, match=message):
        calculate(expression)


@pytest.mark.parametrize(
    "expression", ["1 / 0", "10.0**400", "ceil(1e999)", "log(2, 1)", "factorial(2.5)", "max()", "sqrt(1, 2)"]
)
def test_an_expression_without_a_value_gives_an_error(expression):
    with pytest.raises(ValueError, match="has no value"):
        calculate(expression)


# The last one: 4,000 bits and 4,000 bits make 8,000.
@pytest.mark.parametrize(
    "expression",
    [
        "round(5, -(10**9))",
        "9**9**9",
        "factorial(10**9)",
        "comb(10**6, 5)",
        "7**-(10**9)",
        "2**4000 // 3 * (2**4000 // 3)",
    ],
)
def test_no_expression_takes_long(expression):
    with pytest.raises(ValueError, match="Too large"):
        calculate(expression)


def test_the_description_of_the_tool_names_every_function():
    told = get_json_schema(calculate)["function"]["parameters"]["properties"]["expression"]["description"]
    assert [name for name in (*tools._FUNCTIONS, *tools._NAMES) if f" {name}" not in told] == []

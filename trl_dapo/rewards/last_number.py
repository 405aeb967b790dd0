# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
r"""Reward functions for plain answers: the last number of a text.

A number may have a sign, a power of ten (`1.5e3`), and thousands that are separated by commas, by narrow spaces or by
LaTeX's `{,}` and `\,`. The time of every regular expression below is linear in the length of the text.
"""

import re
import unicodedata
from collections import deque
from collections.abc import Callable
from typing import Any

from .dapo_math import completion_text, gold_text


# A letter directly before a number makes it part of a name, such as `x2`. This does not apply to Chinese, Japanese and
# Korean, which have no spaces.
_NAME = "[^\\W\u2e80-\ud7ff]"
_DIGITS = (
    rf"(?:(?<!{_NAME})(?<![0-9]\.)(?:[0-9]{{1,3}}(?:,[0-9]{{3}})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?"
    rf"|(?<!{_NAME})(?<!\.)\.[0-9]+)"
    rf"(?:[eE][-+]?[0-9]+(?!{_NAME}|\.[0-9]))?"
)
_NUMBER = re.compile(_DIGITS)
_ONLY_A_NUMBER = re.compile(rf"(?P<sign>[-+])? *\\?\$?(?P<number>{_DIGITS})")
_OTHER_DIGIT = re.compile(r"(?![0-9])\d")
_AS_ASCII = str.maketrans(
    {
        **dict.fromkeys("\N{MINUS SIGN}\N{EN DASH}\N{FULLWIDTH HYPHEN-MINUS}\N{SMALL HYPHEN-MINUS}", "-"),
        "\N{FULLWIDTH PLUS SIGN}": "+",
        "\N{FULLWIDTH FULL STOP}": ".",
        "\N{FULLWIDTH DOLLAR SIGN}": "$",
    }
)
_SPACES = " \t\N{NO-BREAK SPACE}\N{THIN SPACE}\N{NARROW NO-BREAK SPACE}"
_THOUSANDS = re.compile(rf"(?<=[0-9])(?:[{_SPACES[2:]}]|\\,)(?=[0-9]{{3}}(?![0-9]))")
_ENDS_A_TERM = re.compile(r"[\w)\]}-]")  # after a term a minus is a subtraction: the last number of `17-3` is 3
# The last characters of "is", "equals" and "gives" in Chinese and Japanese
_IS = "\u662f\u4e3a\u70ba\u4e8e\u65bc\u5f97\u5230\u306f"
_BEFORE_A_SIGN = frozenset(f"=([{{:,<\u2248\u2264\u2265{_IS}")
_MOST_ZEROS = 400  # that are written out; a float has at most 324
_MOST_EXPONENT_DIGITS = 9


def last_number_reward(
    completions: list, solution: list, log_extra: Callable[[str, list], None] | None = None, **kwargs: Any
) -> list[float | None]:
    """
    Reward function that gives 1 if the last number of a completion is the gold answer, and otherwise 0.

    The reward is `None` if the gold answer is not a number.
    """
    answers = [_last_number(completion_text(completion)) for completion in completions]
    golds = [_gold_number(gold_text(gold) or "") for gold in solution]
    if log_extra is not None:
        log_extra("last_number_answer", answers)
    return [None if gold is None else float(answer == gold) for answer, gold in zip(answers, golds, strict=True)]


def bare_number_reward(completions: list, **kwargs: Any) -> list[float]:
    """Reward function for the form of an answer: it gives 1 if a completion is only a number, and otherwise 0."""
    texts = (_in_ascii(completion_text(completion)).strip() for completion in completions)
    return [float(_ONLY_A_NUMBER.fullmatch(text) is not None) for text in texts]


def _last_number(text: str) -> str:
    """Return the last number of a text in normal form, or an empty text if there is none."""
    text = _in_ascii(text).strip()
    last = deque(_NUMBER.finditer(text), maxlen=1)
    return _normal_form(last[0][0], is_negative=_has_minus(text[: last[0].start()])) if last else ""


def _gold_number(text: str) -> str | None:
    found = _ONLY_A_NUMBER.fullmatch(_in_ascii(text).strip().lstrip(" \n\\$").rstrip(" \n\\$%."))
    return found and _normal_form(found["number"], is_negative=found["sign"] == "-")


def _has_minus(before: str) -> bool:
    """Return whether the text before a number ends with its sign, and not with a subtraction, range, list or dash."""
    before = before.removesuffix("$").removesuffix("\\")
    up_to_sign = before.rstrip(_SPACES)
    if not up_to_sign.endswith("-"):
        return False
    left = up_to_sign[:-1]
    if up_to_sign == before:
        return left[-1:] in _BEFORE_A_SIGN or _ENDS_A_TERM.match(left[-1:]) is None
    # A minus that is followed by a space is a sign only if there is nothing to subtract from.
    opens_a_formula = left.endswith("$")
    left = left.rstrip(_SPACES)
    return not left or opens_a_formula or left[-1] in _BEFORE_A_SIGN


def _in_ascii(text: str) -> str:
    r"""Return a text with ASCII digits and signs, and with thousands separated by commas."""
    if not text.isascii():
        text = _OTHER_DIGIT.sub(lambda digit: str(unicodedata.decimal(digit[0])), text.translate(_AS_ASCII))
    text = text.replace("{,}", ",").replace(",\\!", ",")
    return _THOUSANDS.sub(",", text)


def _normal_form(number: str, is_negative: bool) -> str:
    """
    Return a number in the one form that equal numbers have.

    It is written with digits and a point, or with a power of ten if it would have too many zeros.
    """
    mantissa, _, exponent = number.replace(",", "").lower().partition("e")
    whole, _, decimals = mantissa.partition(".")
    digits = (whole + decimals).lstrip("0")
    if not digits:
        return "0"
    sign = "-" if is_negative else ""
    if len(exponent.lstrip("+-0")) > _MOST_EXPONENT_DIGITS:
        return f"{sign}{digits}e{exponent}"
    significant = digits.rstrip("0")
    power = int(exponent or "0") - len(decimals) + len(digits) - len(significant)
    if 0 <= power <= _MOST_ZEROS + len(digits):
        return sign + significant + "0" * power
    if 0 < -power <= _MOST_ZEROS + len(significant):
        padded = significant.rjust(1 - power, "0")
        return f"{sign}{padded[:power]}.{padded[power:]}"
    return f"{sign}{significant}e{power}"

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Reading the gold answer of a dataset's row, with which the answers of completions are compared."""

import json
import re
import unicodedata
from typing import Any

from .dapo_math import gold_text, last_boxed, without_delimiters


_LONGEST = 300  # characters, as many as the paper's rule reads of a completion
_MOST_WORDS, _MOST_WORDS_OF_AN_EQUATION = 15, 4  # `x = 5 or x = 7` is still an answer
_SEVERAL = "one answer, because it is not clear whether any of several counts or all of them"
_WORKED = "a worked solution with its answer in `\\boxed{}` or after `####`"

_WORD = re.compile(r"(?<![\\\w])[^\W\d_]{2,}")  # not a command of LaTeX
_BOX = re.compile(r"\\(?:boxed|fbox)\b\s*")
_CODE = re.compile(r"```|#include|^\s*(?:assert\s|def \w+\(|class \w+[:(]|import \w+$|from \w+ import )", re.MULTILINE)
_QUOTED = re.compile(r"\s*\[\s*['\"]")
# What the beginnings `\a`, `\b`, `\v`, `\f`, `\t` and `\r` of LaTeX commands become if a backslash was not escaped. A
# tab and a carriage return may also be meant, unless the rest of a known command follows.
_ESCAPED = re.compile(r"[\x07\x08\x0b\x0c][a-z]|\t(?:an|au|ext|frac|heta|imes)|\r(?:angle|ho|ight)")
_NO_ANSWERS = {"", "proof", "notfound", "not found", "none", "null", "nan", "n/a", "inf", "-inf"}
_THOUSANDS = re.compile(r"[-+]?\s*(?:\\?\$)?\s*[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?\s*(?:\\?[%$])?")
_UNIT = re.compile(r"(?<=\d)[A-Za-z /]+\.?$")
# Gold answers that math-verify reads only between dollars.
_FORMULA = re.compile(r"[\\^_(\[{]")
_LIST = re.compile(r"(?!.*[A-Za-z]{2}).*,", re.DOTALL)


class BadRow(ValueError):
    """Error for a row without a problem or a usable gold answer. The message says what was expected."""


def read_gold(answer: Any, is_solution: bool = False, needs_box: bool = False) -> str:
    """
    Return a gold answer in one notation.

    Args:
        answer (`Any`):
            The value of the row: a text, a number, or a list with one of them.
        is_solution (`bool`, *optional*, defaults to `False`):
            Whether the value may be a worked solution, whose last box is the answer.
        needs_box (`bool`, *optional*, defaults to `False`):
            Whether a text without a box has no answer.

    Raises:
        BadRow: If there is no usable gold answer.
    """
    parts = _unpacked(answer)
    if parts is not None:
        golds = {read_gold(part, is_solution, needs_box) for part in parts}
        if len(golds) != 1:
            raise BadRow(_SEVERAL if golds else "an answer")
        return golds.pop()
    try:
        text = gold_text(answer) or ""
    except TypeError:
        raise BadRow("an answer") from None
    gold = _in_one_notation(_stated(text, is_solution, needs_box and isinstance(answer, str)))
    plain = gold.strip("$. ").casefold()
    if plain in _NO_ANSWERS:
        raise BadRow("an answer")
    if plain in ("true", "false"):
        raise BadRow("an answer, not a truth value")
    return gold


def _unpacked(answer: Any) -> list | None:
    """
    Return the items of a list, which may be written as JSON, or `None` for anything else.

    An interval, a point or a matrix is an answer, not a list of answers.
    """
    if isinstance(answer, str):
        try:
            found = json.loads(answer) if answer.lstrip().startswith(("[", "{")) else None
        except (ValueError, RecursionError):
            if _QUOTED.match(answer):
                raise BadRow("an answer, or a list in JSON") from None
            return None
        if isinstance(found, list) and len(found) > 1 and all(type(part) in (int, float, list) for part in found):
            return None
        answer = found
    if isinstance(answer, dict):
        raise BadRow("an answer, not code or its tests")
    return answer if isinstance(answer, list) else None


def _stated(text: str, is_solution: bool, needs_box: bool) -> str:
    """
    Return the content of the last box, or what follows `####`, or the text itself if it is a short answer.
    """
    boxes = list(_BOX.finditer(text))
    _, marker, final = text.rpartition("####")
    if boxes and boxes[-1].end() > len(text) - len(final):
        if len(boxes) > 1 and not (is_solution or _is_worked(text)):
            raise BadRow(_SEVERAL)
        rest = text[boxes[-1].end() :]  # some solutions of MATH have `\boxed 2$`
        text = (last_boxed("\\boxed" + rest) or "") if rest.startswith("{") else rest.partition("$")[0]
        needs_box = not text.strip()
    elif _CODE.search(text):
        raise BadRow("an answer, not code or its tests")
    elif marker:
        text, needs_box = _as_typed(final), False
        if re.search(r"\d,\d", text) and not _THOUSANDS.fullmatch(_UNIT.sub("", text)):
            raise BadRow("a number with commas only between groups of three digits")
    if needs_box or _is_worked(text):
        raise BadRow(_WORKED)
    if _ESCAPED.search(text):
        raise BadRow("an answer whose backslashes are escaped in JSON (`\\\\frac`)")
    return text


def _is_worked(text: str) -> bool:
    num_words = len(_WORD.findall(text))
    return len(text) > _LONGEST or num_words > _MOST_WORDS or (num_words > _MOST_WORDS_OF_AN_EQUATION and "=" in text)


def _as_typed(text: str) -> str:
    """Return a text with ASCII digits, as models write them, and an ASCII minus, which both math rewards can read."""
    return "".join("-" if c == "\N{MINUS SIGN}" else str(unicodedata.decimal(c, c)) for c in text).strip()


def _in_one_notation(text: str) -> str:
    text = _as_typed(text)
    while (peeled := without_delimiters(text).strip()) != text:
        text = peeled
    if _THOUSANDS.fullmatch(text):
        return text.replace(",", "")
    if re.fullmatch(r"0\d\d", text):  # AIME writes answers with three digits
        return str(int(text))
    return f"${text}$" if "$" not in text and (_FORMULA.search(text) or _LIST.match(text)) else text

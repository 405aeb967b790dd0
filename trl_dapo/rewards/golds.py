# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The gold answer of a dataset's row, with which completions are compared."""

import json
import re
import unicodedata
from typing import Any

from .dapo_math import gold_text, last_boxed, without_delimiters


_LONGEST = 300  # characters; what the paper's rule reads of a completion
_MOST_WORDS, _MOST_WORDS_OF_AN_EQUATION = 15, 4  # `x = 5 or x = 7` is an answer
_SEVERAL = "one answer: nothing says whether any of several counts, or all of them"
_WORKED = "a worked solution with its answer in `\\boxed{}` or behind `####`"

_WORD = re.compile(r"(?<![\\\w])[^\W\d_]{2,}")  # no command of LaTeX
_BOX = re.compile(r"\\(?:boxed|fbox)\b\s*")
_CODE = re.compile(r"```|#include|^\s*(?:assert\s|def \w+\(|class \w+[:(]|import \w+$|from \w+ import )", re.MULTILINE)
_QUOTED = re.compile(r"\s*\[\s*['\"]")
# What `\a`, `\b`, `\v`, `\f`, `\t` and `\r` of LaTeX become; a tab may also be one.
_ESCAPED = re.compile(r"[\x07\x08\x0b\x0c][a-z]|\t(?:an|au|ext|frac|heta|imes)|\r(?:angle|ho|ight)")
_NO_ANSWERS = {"", "proof", "notfound", "not found", "none", "null", "nan", "n/a", "inf", "-inf"}
_THOUSANDS = re.compile(r"[-+]?\s*(?:\\?\$)?\s*[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?\s*(?:\\?[%$])?")
_UNIT = re.compile(r"(?<=\d)[A-Za-z /]+\.?$")
# What math-verify reads of a gold answer only if it stands between dollars.
_FORMULA = re.compile(r"[\\^_(\[{]")
_LIST = re.compile(r"(?!.*[A-Za-z]{2}).*,", re.DOTALL)


class BadRow(ValueError):
    """A row lacks a problem, or the one gold answer that a completion could give: what was expected."""


def read_gold(answer: Any, is_solution: bool = False, needs_box: bool = False) -> str:
    """
    Return the gold answer in one notation. A solution may end in a box; with `needs_box` there is no answer without
    one.
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
    Return the items of a list, which may be JSON, or `None` for anything else and for an interval, a point or a
    matrix.
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
    Return the content of a worked solution's last box, or what follows `####`. A short answer, which may be boxed, is
    unchanged.
    """
    boxes = list(_BOX.finditer(text))
    _, marker, final = text.rpartition("####")
    if boxes and boxes[-1].end() > len(text) - len(final):
        if len(boxes) > 1 and not (is_solution or _is_worked(text)):
            raise BadRow(_SEVERAL)
        rest = text[boxes[-1].end() :]  # some of MATH's have `\boxed 2$`
        text = (last_boxed("\\boxed" + rest) or "") if rest.startswith("{") else rest.partition("$")[0]
        needs_box = not text.strip()
    elif _CODE.search(text):
        raise BadRow("an answer, not code or its tests")
    elif marker:
        text, needs_box = _as_typed(final), False
        if re.search(r"\d,\d", text) and not _THOUSANDS.fullmatch(_UNIT.sub("", text)):
            raise BadRow("a number whose commas stand between groups of three digits")
    if needs_box or _is_worked(text):
        raise BadRow(_WORKED)
    if _ESCAPED.search(text):
        raise BadRow("an answer whose backslashes are written twice in JSON")
    return text


def _is_worked(text: str) -> bool:
    num_words = len(_WORD.findall(text))
    return len(text) > _LONGEST or num_words > _MOST_WORDS or (num_words > _MOST_WORDS_OF_AN_EQUATION and "=" in text)


def _as_typed(text: str) -> str:
    """With the digits that a model writes, and a minus that is a sign to both rewards."""
    return "".join("-" if c == "\N{MINUS SIGN}" else str(unicodedata.decimal(c, c)) for c in text).strip()


def _in_one_notation(text: str) -> str:
    text = _as_typed(text)
    while (peeled := without_delimiters(text).strip()) != text:
        text = peeled
    if _THOUSANDS.fullmatch(text):
        return text.replace(",", "")
    if re.fullmatch(r"0\d\d", text):  # AIME's three digits
        return str(int(text))
    return f"${text}$" if "$" not in text and (_FORMULA.search(text) or _LIST.match(text)) else text

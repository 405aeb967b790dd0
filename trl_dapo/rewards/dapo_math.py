# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The rule scorer of the DAPO paper: the last `Answer:` line, Minerva normalisation, string equality.

The rule is that of `math_dapo.py` in DAPO's reference implementation. It reads the last 300 characters only, uses no
symbolic maths, and gives every input a verdict in time linear in its length.
"""

import itertools
import math
import numbers
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

from ..settings.ranges import check_choice


BOXED_MODES = ("never", "fallback", "strict")

_ANSWER_WINDOW = 300  # characters; the longest answer of MATH-500 has 159
_BOXED_WINDOW = 100
_ANSWER_LINE = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")
NO_ANSWER = "[INVALID]"

# The order of both tables is part of the rule: each entry works on what the ones before it left.
_REPLACED = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    ("\\$", ""),
    ("\\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (",\\text{and}", ","),
    ("\\text{and}", ","),
    ("\\text{m}", "\\text{}"),
)
_REMOVED = (
    "square",
    "ways",
    "integers",
    "dollars",
    "mph",
    "inches",
    "hours",
    "km",
    "units",
    "\\ldots",
    "sue",
    "points",
    "feet",
    "minutes",
    "digits",
    "cents",
    "degrees",
    "cm",
    "gm",
    "pounds",
    "meters",
    "meals",
    "edges",
    "students",
    "childrentickets",
    "multiples",
    "\\text{s}",
    "\\text{.}",
    "\\text{\ns}",
    "\\text{}^2",
    "\\text{}^3",
    "\\text{\n}",
    "\\text{}",
    "\\mathrm{th}",
    "^\\circ",
    "^{\\circ}",
    "\\;",
    ",\\!",
    "{,}",
    '"',
    "\\dots",
)
_BARE_FRACTION = re.compile(r"frac([^{])(.)")
_BARE_ROOT = re.compile(r"sqrt([^{])")


class DapoMathScore(NamedTuple):
    """Verdict of [`score_dapo_math`]; `answer` is what it read in the completion, `"[INVALID]"` if there is none."""

    score: float
    correct: bool
    answer: str


def normalize_answer(answer: str) -> str:
    r"""
    Minerva normalisation of a final answer, as DAPO's reference scorer applies it: `x = 1,234 dollars` becomes `1234`.

    Keeps what follows the last `=`, drops articles, spaces, units and LaTeX decoration, unwraps `\text{}`,
    `\boxed{}` and the like, completes shorthand (`\frac12` to `\frac{1}{2}`) and drops the commas of an integer.
    """
    answer = answer.rpartition("=")[2]
    for old, new in _REPLACED:
        answer = answer.replace(old, new)
    for expression in _REMOVED:
        answer = answer.replace(expression, "")

    # The reference does this with backtracking regexes that stop at line ends; line by line it takes linear time.
    lines = []
    for line in answer.split("\n"):
        parts = line.split("$", 2)
        if len(parts) == 3:  # `text $a$ text` becomes `$a$`: what is between the first two dollars
            line = f"${parts[1]}$"
        for macro in ("\\text", "\\textbf", "\\overline"):
            # `macro{x}` becomes `x`, up to the first closing brace. Behind the last one nothing is closed, which would
            # be looked for each time.
            closed, brace, rest = line.rpartition("}")
            line = re.sub(re.escape(macro) + r"\{([^}]*)\}", r"\1", closed + brace) + rest
        # From the first `\boxed{` to the last closing brace.
        before, opening, boxed = line.partition("\\boxed{")
        content, closing, after = boxed.rpartition("}")
        lines.append(before + content + after if opening and closing else line)
    answer = "\n".join(lines)

    answer = _BARE_FRACTION.sub(r"frac{\1}{\2}", answer)
    answer = _BARE_ROOT.sub(r"sqrt{\1}", answer)
    answer = answer.replace("$", "")
    without_commas = answer.replace(",", "")
    if without_commas.isdigit():
        answer = without_commas
    return answer.strip()


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{}`, braces balanced; `None` if it is missing or never closed."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for position in range(start, len(text)):
        if text[position] == "{":
            depth += 1
        elif text[position] == "}":
            depth -= 1
            if depth == 0:
                return text[start + len("\\boxed{") : position]
    return None


def score_dapo_math(
    text: str, solution: str | float, *, boxed: str = "never", wrong_score: float = -1.0
) -> DapoMathScore:
    r"""
    Score the last 300 characters of a completion by the rule of the DAPO paper (arXiv 2503.14476): `1.0` if its answer
    is the gold one, around which dollars do not count, else `wrong_score`.

    With `boxed="never"` only the last `Answer:` line counts, the paper's rule. With `"fallback"` and no such line, and
    with `"strict"` always, the last `\boxed{}` within the last 100 characters must equal the gold answer exactly.
    Raises `TypeError` if that is neither text nor a number, `ValueError` without one, or for another `boxed`.
    """
    check_choice("boxed", boxed, BOXED_MODES)
    gold = gold_text(solution)
    if gold is None:
        raise ValueError(f"There is nothing to score without a gold answer; it is {solution!r}.")
    answer, is_boxed = _read_answer(text, boxed)
    correct = answer == (without_delimiters(gold) if is_boxed else normalize_answer(gold))
    return DapoMathScore(1.0 if correct else wrong_score, correct, answer)


def stated_answer(text: str) -> str | None:
    r"""A completion's last `Answer:` line, normalised, or else its last `\boxed{}`; `None` where there is neither."""
    answer, _ = _read_answer(text, "fallback")
    return None if answer == NO_ANSWER else answer


def _read_answer(text: str, boxed: str) -> tuple[str, bool]:
    """The answer, `NO_ANSWER` where there is none, and whether it is to be compared as a boxed one."""
    lines = [] if boxed == "strict" else _ANSWER_LINE.findall(text[-_ANSWER_WINDOW:])
    line = lines[-1] if lines else None
    content = last_boxed(text[-_BOXED_WINDOW:]) if line is None and boxed != "never" else None
    if content is not None or boxed == "strict":
        return NO_ANSWER if content is None else content, True
    return normalize_answer(NO_ANSWER if line is None else line), False


_DELIMITERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))


def without_delimiters(answer: str) -> str:
    r"""`$34$`, `\(34\)` and `\[34\]` become `34`; any other answer is unchanged, including spaces."""
    text = answer.strip()
    for opening, closing in _DELIMITERS:
        inner = text.removeprefix(opening).removesuffix(closing)
        if len(text) - len(inner) == len(opening) + len(closing) and opening not in inner:
            return inner
    return answer


def gold_text(gold: Any) -> str | None:
    """A gold answer as text, a number as plain digits, whole ones without `.0`; `None` for `None`, NaN and no text."""
    if gold is None or isinstance(gold, str):
        return gold if gold and not gold.isspace() else None
    if not isinstance(gold, (numbers.Real, Decimal)):
        raise TypeError(f"A gold answer is {gold!r:.80} ({type(gold).__name__}); expected text or a number.")
    if gold != gold:
        return None
    if isinstance(gold, numbers.Integral) or not math.isfinite(gold):
        return str(gold)
    if isinstance(gold, numbers.Rational):
        return str(gold)
    # The digits that a float is written with: 1e23 is not a whole number of 24 other digits, and no text has 1e-07.
    number = Decimal(str(gold))
    return str(int(number)) if number == number.to_integral_value() else f"{number:f}"


def content_text(content: Any) -> str:
    """The text of a message's content: text, `None`, a part, or a list of parts of which those with text count."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, (list, tuple)):
        is_text = [not isinstance(part, dict) or part.get("text") is not None for part in content]  # an image is not
        return "".join(map(content_text, itertools.compress(content, is_text)))
    if isinstance(content, dict) and isinstance(content.get("text"), str):
        return content["text"]
    raise TypeError(
        f"The content of a message is {content!r:.80} ({type(content).__name__}); expected text, or parts of it."
    )


def completion_text(completion: str | list[dict[str, Any]]) -> str:
    """
    The text that a reward function scores: a plain completion, or the last message that the model wrote.

    What a tool or an environment wrote is not an answer, even if the completion ends with it.
    """
    if isinstance(completion, str):
        return completion
    if isinstance(completion, (list, tuple)) and all(isinstance(message, dict) for message in completion):
        own = [message for message in completion if message.get("role", "assistant") == "assistant"]
        return content_text(own[-1].get("content")) if own else ""
    raise TypeError(
        f"A completion is {completion!r:.80} ({type(completion).__name__}); expected text, or a list of messages."
    )


def loggable(text: str) -> str:
    """`text` with what UTF-8 cannot hold replaced: a lone surrogate would stop the trainer's completions table."""
    return text.encode("utf-8", "replace").decode("utf-8")


class DapoMathReward:
    """
    [`dapo_math_reward`] with the settings of [`score_dapo_math`], picklable: a `wrong_score` of `0.0` gives 0/1
    rewards. Raises `ValueError` if `boxed` is none of the three, or `wrong_score` not below 1.0.
    """

    __name__ = "dapo_math_reward"

    def __init__(self, boxed: str = "never", wrong_score: float = -1.0) -> None:
        check_choice("boxed", boxed, BOXED_MODES)
        if not wrong_score < 1.0:
            raise ValueError(f"`wrong_score` must be below the 1.0 of a correct answer, got {wrong_score}.")
        self.boxed = boxed
        self.wrong_score = wrong_score

    def __call__(
        self,
        completions: Sequence[str | list[dict[str, Any]]],
        solution: list[str | None],
        log_extra: Callable[[str, list], None] | None = None,
        **kwargs: Any,
    ) -> list[float | None]:
        golds = [gold_text(gold) for gold in solution]
        scores = [
            None
            if gold is None
            else score_dapo_math(completion_text(completion), gold, boxed=self.boxed, wrong_score=self.wrong_score)
            for completion, gold in zip(completions, golds, strict=True)
        ]
        if log_extra is not None:
            # Named after the reward: two rewards that log one column would append to each other's rows.
            answers = ("[skipped]" if score is None else score.answer for score in scores)
            log_extra("dapo_math_answer", [loggable(answer) for answer in answers])
        return [None if score is None else score.score for score in scores]


_paper_rule = DapoMathReward()


def dapo_math_reward(
    completions: Sequence[str | list[dict[str, Any]]], solution: list[str | None], **kwargs: Any
) -> list[float | None]:
    """
    Reward function with the rule scorer of the DAPO paper: +1 for the gold answer on the last `Answer:` line,
    otherwise -1.

    `dapo_math_reward(["Answer: $7$"], ["7"])` is `[1.0]`. The last message of a conversational completion is scored. A
    completion whose gold answer, text or a number, is `None`, NaN or empty gets no reward, TRL's way to skip a sample.
    `log_extra` receives the answers as `dapo_math_answer`. Raises `TypeError` for values of a type that cannot be
    read.
    """
    return _paper_rule(completions, solution, **kwargs)

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The rule-based scorer of the DAPO paper: the last `Answer:` line, Minerva normalization, string equality.

The rule is that of `math_dapo.py` in DAPO's reference implementation. It reads only the last 300 characters, does no
symbolic math, and takes time that is linear in the length of its input.
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

# The order of both tables is part of the rule: each entry is applied to the result of the entries before it.
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
    """Result of [`score_dapo_math`]. `answer` is the answer in the completion, or `"[INVALID]"` if there is none."""

    score: float
    correct: bool
    answer: str


def normalize_answer(answer: str) -> str:
    r"""
    Return the Minerva normalization of a final answer, as DAPO's reference scorer applies it.

    It keeps what follows the last `=`, removes articles, spaces, units and LaTeX decoration, unwraps `\text{}`,
    `\boxed{}` and the like, completes shorthand (`\frac12` becomes `\frac{1}{2}`) and removes the commas of an
    integer: `x = 1,234 dollars` becomes `1234`.
    """
    answer = answer.rpartition("=")[2]
    for old, new in _REPLACED:
        answer = answer.replace(old, new)
    for expression in _REMOVED:
        answer = answer.replace(expression, "")

    # The reference does this with backtracking regexes that stop at line ends. Line by line it takes linear time.
    lines = []
    for line in answer.split("\n"):
        parts = line.split("$", 2)
        if len(parts) == 3:  # only what is between the first two dollars is kept: `text $a$ text` becomes `$a$`
            line = f"${parts[1]}$"
        for macro in ("\\text", "\\textbf", "\\overline"):
            # `macro{x}` becomes `x`, up to the first closing brace. What follows the last closing brace is left out,
            # because searching it again and again for one would take quadratic time.
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
    r"""Return the content of the last `\boxed{}`, or `None` if there is none or its braces are not balanced."""
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
    Score a completion by the rule of the DAPO paper (arXiv 2503.14476), which reads its last 300 characters.

    Args:
        text (`str`):
            The completion.
        solution (`str` or `float`):
            The gold answer. Dollars around it do not count.
        boxed (`str`, *optional*, defaults to `"never"`):
            Whether an answer in `\boxed{}` counts. With `"never"` only the last `Answer:` line does, as in the paper.
            With `"fallback"` the last `\boxed{}` counts if there is no such line, and with `"strict"` only the last
            `\boxed{}` does. The box must be within the last 100 characters, and equal the gold answer exactly.
        wrong_score (`float`, *optional*, defaults to `-1.0`):
            Score of an incorrect completion. A correct completion scores 1.0.

    Returns:
        [`DapoMathScore`]: The score, whether the completion is correct, and its answer.

    Raises:
        TypeError: If the gold answer is neither text nor a number.
        ValueError: If there is no gold answer, or `boxed` is not one of its three values.
    """
    check_choice("boxed", boxed, BOXED_MODES)
    gold = gold_text(solution)
    if gold is None:
        raise ValueError(
            f"A completion cannot be scored without a gold answer, got {solution!r}. Leave such rows out."
        )
    answer, is_boxed = _read_answer(text, boxed)
    correct = answer == (without_delimiters(gold) if is_boxed else normalize_answer(gold))
    return DapoMathScore(1.0 if correct else wrong_score, correct, answer)


def stated_answer(text: str) -> str | None:
    r"""Return a completion's last `Answer:` line, normalized, or otherwise its last `\boxed{}`, or `None`."""
    answer, _ = _read_answer(text, "fallback")
    return None if answer == NO_ANSWER else answer


def _read_answer(text: str, boxed: str) -> tuple[str, bool]:
    """Return the answer, or `NO_ANSWER`, and whether it is compared as a boxed answer, without normalization."""
    lines = [] if boxed == "strict" else _ANSWER_LINE.findall(text[-_ANSWER_WINDOW:])
    line = lines[-1] if lines else None
    content = last_boxed(text[-_BOXED_WINDOW:]) if line is None and boxed != "never" else None
    if content is not None or boxed == "strict":
        return NO_ANSWER if content is None else content, True
    return normalize_answer(NO_ANSWER if line is None else line), False


_DELIMITERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))


def without_delimiters(answer: str) -> str:
    r"""Return an answer without math delimiters: `$34$`, `\(34\)` and `\[34\]` become `34`. Others are unchanged."""
    text = answer.strip()
    for opening, closing in _DELIMITERS:
        inner = text.removeprefix(opening).removesuffix(closing)
        if len(text) - len(inner) == len(opening) + len(closing) and opening not in inner:
            return inner
    return answer


def gold_text(gold: Any) -> str | None:
    """
    Return a gold answer as text, or `None` if it is `None`, NaN or empty.

    A number is written in plain digits, without the `.0` of a whole number.
    """
    if gold is None or isinstance(gold, str):
        return gold if gold and not gold.isspace() else None
    if not isinstance(gold, (numbers.Real, Decimal)):
        raise TypeError(f"A gold answer is {gold!r:.80} ({type(gold).__name__}). Expected text or a number.")
    if gold != gold:
        return None
    if isinstance(gold, numbers.Integral) or not math.isfinite(gold):
        return str(gold)
    if isinstance(gold, numbers.Rational):
        return str(gold)
    # The shortest decimal form of a float gives the digits that were meant: 1e23 is not exactly 10**23 as a float. And
    # no completion contains a number such as 1e-07.
    number = Decimal(str(gold))
    return str(int(number)) if number == number.to_integral_value() else f"{number:f}"


def content_text(content: Any) -> str:
    """Return the text of a message's content, which is a text, `None`, a part, or a list of parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, (list, tuple)):
        # Parts without text, such as images, are left out.
        is_text = [not isinstance(part, dict) or part.get("text") is not None for part in content]
        return "".join(map(content_text, itertools.compress(content, is_text)))
    if isinstance(content, dict) and isinstance(content.get("text"), str):
        return content["text"]
    raise TypeError(
        f"The content of a message is {content!r:.80} ({type(content).__name__}). Expected text, or a list of parts."
    )


def completion_text(completion: str | list[dict[str, Any]]) -> str:
    """
    Return the text that a reward function scores: a plain completion, or the last message that the model wrote.

    The messages of a tool or an environment are not scored, even if the completion ends with one.
    """
    if isinstance(completion, str):
        return completion
    if isinstance(completion, (list, tuple)) and all(isinstance(message, dict) for message in completion):
        own = [message for message in completion if message.get("role", "assistant") == "assistant"]
        return content_text(own[-1].get("content")) if own else ""
    raise TypeError(
        f"A completion is {completion!r:.80} ({type(completion).__name__}). Expected text, or a list of messages."
    )


def loggable(text: str) -> str:
    """
    Return a text with lone surrogates replaced, which UTF-8 cannot encode.

    With them, writing the trainer's table of completions would fail.
    """
    return text.encode("utf-8", "replace").decode("utf-8")


class DapoMathReward:
    """
    [`dapo_math_reward`] with other settings of [`score_dapo_math`]. Objects can be pickled.

    Args:
        boxed (`str`, *optional*, defaults to `"never"`):
            Whether an answer in `\\boxed{}` counts: `"never"`, `"fallback"` or `"strict"`.
        wrong_score (`float`, *optional*, defaults to `-1.0`):
            Reward of an incorrect completion. With `0.0` rewards are 0 or 1.

    Raises:
        ValueError: If `boxed` is not one of these, or `wrong_score` is not less than 1.0.
    """

    __name__ = "dapo_math_reward"

    def __init__(self, boxed: str = "never", wrong_score: float = -1.0) -> None:
        check_choice("boxed", boxed, BOXED_MODES)
        if not wrong_score < 1.0:
            raise ValueError(
                f"`wrong_score` must be less than 1.0, the reward of a correct completion, got {wrong_score}."
            )
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
            # The column has the name of the reward. Two rewards with the same column would append to each other's.
            answers = ("[skipped]" if score is None else score.answer for score in scores)
            log_extra("dapo_math_answer", [loggable(answer) for answer in answers])
        return [None if score is None else score.score for score in scores]


_paper_rule = DapoMathReward()


def dapo_math_reward(
    completions: Sequence[str | list[dict[str, Any]]], solution: list[str | None], **kwargs: Any
) -> list[float | None]:
    """
    Reward function with the rule-based scorer of the DAPO paper: +1 for the gold answer on the last `Answer:` line,
    otherwise -1.

    `dapo_math_reward(["Answer: $7$"], ["7"])` is `[1.0]`. In a conversation, the last message of the model is scored.
    A completion whose gold answer is `None`, NaN or empty gets no reward (`None`), as TRL expects for skipped samples.
    The answers are passed to `log_extra` as the column `dapo_math_answer`.

    Raises:
        TypeError: If a completion or a gold answer has a type that cannot be read.
    """
    return _paper_rule(completions, solution, **kwargs)

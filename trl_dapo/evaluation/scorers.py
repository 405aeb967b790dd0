# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Whether each completion is right, and which answer it states."""

import logging
from collections.abc import Callable
from contextlib import closing
from typing import NamedTuple

from ..rewards import MathVerifyReward, score_dapo_math
from .jobs import Completion
from .problems import Problem


logger = logging.getLogger(__name__)

SCORERS = ("dapo_math", "math_verify")
_NO_ANSWER = {None, "", "[INVALID]", "[unparseable]", "[skipped]", "[killed]"}  # in the words of the scorers


class Verdict(NamedTuple):
    """`correct` is `None` if the gold answer could not be read, `answer` if the completion has none."""

    correct: bool | None
    answer: str | None


Scorer = Callable[[str, str], tuple[bool | None, str | None]]


def check_scorer(scorer: str | Scorer, prompt_style: str) -> None:
    if isinstance(scorer, str) and scorer not in SCORERS:
        raise ValueError(f"`scorer` must be a function or one of {', '.join(map(repr, SCORERS))}, got {scorer!r}.")
    if scorer == "dapo_math" and prompt_style in ("boxed", "think"):
        raise ValueError(
            f"`prompt_style={prompt_style!r}` asks for \\boxed{{}}, and the scorer 'dapo_math' reads the last "
            "`Answer:` line only. Use the scorer 'math_verify', or the prompt style 'answer_line'."
        )


def score(
    problems: list[Problem], completions_PK: list[list[Completion]], scorer: str | Scorer
) -> list[list[Verdict]]:
    rows = [
        (completion.text, problem.solution)
        for problem, completions in zip(problems, completions_PK, strict=True)
        for completion in completions
    ]
    verdicts: list[tuple[bool | None, str | None]]
    if not isinstance(scorer, str):
        verdicts = [scorer(*row) for row in rows]
    elif scorer == "dapo_math":
        verdicts = [score_dapo_math(*row)[1:] for row in rows]
    else:
        verdicts = _math_verify_verdicts(rows)
    flat = iter(
        Verdict(None if correct is None else bool(correct), None if answer in _NO_ANSWER else answer)
        for correct, answer in verdicts
    )
    return [[next(flat) for _ in completions] for completions in completions_PK]


def _math_verify_verdicts(rows: list[tuple[str, str]]) -> list[tuple[bool | None, str | None]]:
    texts, solutions = zip(*rows, strict=True)
    answers: list[str] = []
    with closing(MathVerifyReward()) as reward:
        rewards = reward(list(texts), list(solutions), log_extra=lambda column, values: answers.extend(values))
    return [(None if r is None else r == 1.0, answer) for r, answer in zip(rewards, answers, strict=True)]


def warn_without_answers(
    completions_PK: list[list[Completion]], verdicts_PK: list[list[Verdict]], scorer: str | Scorer
) -> None:
    """Tells an evaluation in which no answer was found from one in which none was right."""
    if any(verdict.answer is not None or verdict.correct for verdicts in verdicts_PK for verdict in verdicts):
        return
    truncated = [completion.truncated for completions in completions_PK for completion in completions]
    hint = {
        "dapo_math": "it reads the last `Answer:` line, for which the prompt style 'answer_line' asks; the scorer "
        "'math_verify' reads other forms",
        "math_verify": "it reads \\boxed{} best, for which the prompt style 'boxed' asks",
    }
    parts = [hint[scorer]] if isinstance(scorer, str) else []
    if num_cut_off := sum(truncated):
        parts.append(f"{num_cut_off:,} were cut off: raise `max_completion_length`")
    logger.warning(
        f"0 of {len(truncated):,} completions state an answer that the scorer"
        f"{f' {scorer!r}' if isinstance(scorer, str) else ''} recognises{''.join(f'; {part}' for part in parts)}."
    )

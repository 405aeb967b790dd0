# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Whether each completion is right, and which answer it states."""

import inspect
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from ..rewards import MathVerifyReward, last_number_reward, score_dapo_math
from ..sampling.equal_rewards import margin
from ..settings.arguments import load_function
from .jobs import Completion, Problem


logger = logging.getLogger(__name__)

# What each reads.
SCORERS = {
    "dapo_math": "the last `Answer:` line, by the rule of the paper, for which the prompt style 'answer_line' asks",
    "math_verify": "LaTeX, such as \\boxed{} for which the prompt style 'boxed' asks, compared as symbols",
    "last_number": "the last number, in any text",
    "accuracy_reward": "as 'math_verify', by TRL's reward function of this name",
}
STYLES = {"dapo_math": "answer_line", "math_verify": "boxed", "accuracy_reward": "boxed"}  # that ask for it
GIVEN = ("prompts", "completions", "log_extra", "log_metric")  # to a reward function, beside a row's columns
_ANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_NO_ANSWER = {None, "", "[INVALID]", "[unparseable]", "[skipped]", "[killed]"}  # in the words of the scorers


class Verdict(NamedTuple):
    """`correct` is `None` if the gold answer could not be read, `answer` if the completion has none."""

    correct: bool | None
    answer: str | None


Scorer = Callable[..., Any]


def load_scorer(scorer: str | Scorer, prompt_style: str | None) -> Scorer:
    """What a name stands for: a function of a completion and a gold answer, or a reward function."""
    if scorer == "dapo_math" and prompt_style in ("boxed", "think"):
        raise ValueError(
            f"`prompt_style={prompt_style!r}` asks for \\boxed{{}}, and the scorer 'dapo_math' reads the last "
            "`Answer:` line only. Use the scorer 'math_verify', or the prompt style 'answer_line'."
        )
    if not isinstance(scorer, str):
        return scorer
    known: dict[str, Scorer] = {"dapo_math": lambda *row: score_dapo_math(*row)[1:], "math_verify": MathVerifyReward()}
    known |= {"last_number": last_number_reward}
    return load_function("scorer", "trl.rewards.accuracy_reward" if scorer == "accuracy_reward" else scorer, known)


def columns_of(scorer: Scorer) -> list[str]:
    """The columns that a reward function asks for; others are called with a completion and its gold answer."""
    parameters = inspect.signature(scorer).parameters
    if "completions" not in parameters:
        return ["solution"]
    asked = [each.name for each in parameters.values() if each.default is each.empty and each.kind not in _ANY]
    return [name for name in asked if name not in GIVEN] or ["solution"]  # which `kwargs` may be asked for


def score(problems: list[Problem], completions_PK: list[list[Completion]], scorer: Scorer) -> list[list[Verdict]]:
    rows = [
        (problem, completion.text)
        for problem, completions in zip(problems, completions_PK, strict=True)
        for completion in completions
    ]
    if "completions" in inspect.signature(scorer).parameters:
        verdicts = _reward_verdicts(rows, scorer)
    else:
        verdicts = [scorer(text, problem.solution) for problem, text in rows]
    flat = iter(
        Verdict(None if correct is None else bool(correct), None if answer in _NO_ANSWER else answer)
        for correct, answer in verdicts
    )
    return [[next(flat) for _ in completions] for completions in completions_PK]


def _reward_verdicts(rows: list[tuple[Problem, str]], reward: Scorer) -> list[tuple[bool | None, str | None]]:
    """By a reward function, called as in training: right is what is above 0 by more than the margin."""
    columns: dict[str, list] = {}
    takes_messages = getattr(reward, "__module__", "").startswith("trl.")  # TRL's own, whatever the prompts are
    try:
        rewards = reward(
            prompts=[problem.prompt for problem, _ in rows],
            completions=[
                text
                if isinstance(problem.prompt, str) and not takes_messages
                else [{"role": "assistant", "content": text}]
                for problem, text in rows
            ],
            **{name: [problem.columns[name] for problem, _ in rows] for name in rows[0][0].columns},
            solution=[problem.solution for problem, _ in rows],
            log_extra=columns.__setitem__,
            log_metric=lambda name, value: None,
        )
    finally:
        getattr(reward, "close", lambda: None)()  # the workers of math-verify
    # One that logs no answers has the whole text vote.
    answers = next((values for name, values in columns.items() if "answer" in name), [text for _, text in rows])
    return [
        (None if value is None or value != value else float(value) > margin(abs(float(value))), answer)
        for value, answer in zip(rewards, answers, strict=True)
    ]


def warn_without_answers(
    completions_PK: list[list[Completion]], verdicts_PK: list[list[Verdict]], scorer: str | Scorer
) -> None:
    """Tells an evaluation in which most answers were not found from one in which they were wrong."""
    found = [pair for row in zip(completions_PK, verdicts_PK, strict=True) for pair in zip(*row, strict=True)]
    without = [completion for completion, verdict in found if verdict.answer is None and not verdict.correct]
    if 2 * len(without) <= len(found):
        return
    parts = [f"no answer found in {len(without):,} of {len(found):,}; the first: {without[0].text[-200:]!r}"]
    if isinstance(scorer, str) and scorer in SCORERS:
        parts.append(f"the scorer {scorer!r} reads {SCORERS[scorer]}; another scorer reads the same completions")
    if num_cut_off := sum(completion.truncated for completion in without):
        parts.append(f"{num_cut_off:,} were cut off: raise `max_completion_length`")
    logger.warning("; ".join(parts) + ".")

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Reward functions that have a name in recipes and on command lines, and what they ask of data and prompts."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from .dapo_math import dapo_math_reward, loggable, stated_answer
from .last_number import bare_number_reward, last_number_reward
from .math_verify import math_verify_reward


REWARD_FUNCS: dict[str, Callable[..., Any]] = {
    "dapo_math": dapo_math_reward,
    "math_verify": math_verify_reward,
    "last_number": last_number_reward,
    "bare_number": bare_number_reward,
}
# The prompt style that asks for what a reward function reads, by its name.
_STYLES = {"dapo_math_reward": "answer_line", "math_verify_reward": "boxed", "accuracy_reward": "boxed"}
# What reward functions log where they find no answer.
_NO_ANSWER = {"", "[INVALID]", "[unparseable]", "[skipped]", "[killed]"}


def read_math_problems(reward_funcs: Collection[Any]) -> bool:
    """Whether all reward functions are of this package, so that none reads a column that the math loader renames."""
    return all(any(each is own for own in REWARD_FUNCS.values()) for each in reward_funcs)


def default_prompt_style(reward_funcs: Collection[Any]) -> str:
    """The prompt style that asks for what the first of the reward functions reads; `"as_is"` if none says."""
    styles = (_STYLES.get(getattr(each, "__name__", "")) for each in reward_funcs)
    return next(filter(None, styles), "as_is")


def find_answers(
    names: Sequence[str], logged: Mapping[str, Sequence[Any]], texts: Sequence[str]
) -> tuple[list[str | None], bool]:
    """
    The answer that each completion states, on which maj@k votes.

    It is what a reward function passed to `log_extra` as the column `answer`, `<its name>_answer`, or that name
    without `_reward`. Without such a column it is the last `Answer:` line or the last `\\boxed{}` of the text.

    Args:
        names (`Sequence[str]`):
            Names of the reward functions that decide which completions are correct.
        logged (`Mapping[str, Sequence[Any]]`):
            Columns that the reward functions passed to `log_extra`, with a value for each completion.
        texts (`Sequence[str]`):
            The completions.

    Returns:
        `tuple[list[str | None], bool]`: the answers, `None` where there is none, and whether a reward function said
        them.
    """
    columns = ["answer"]
    for name in names:
        columns += [f"{name}_answer", f"{name.removesuffix('_reward')}_answer"]
    for column in columns:
        if column in logged and len(logged[column]) == len(texts):
            return [answer_text(answer) for answer in logged[column]], True
    return [stated_answer(text) for text in texts], False


def answer_text(answer: Any) -> str | None:
    """An answer as text that a file can hold; `None` where a scorer says that there is none."""
    text = None if answer is None else loggable(str(answer))
    return None if text in _NO_ANSWER else text

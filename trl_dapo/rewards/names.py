# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Reward functions that can be named in recipes and on command lines, and the prompt styles that fit them."""

import importlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ..settings.arguments import load_function
from .dapo_math import dapo_math_reward, loggable, stated_answer
from .last_number import bare_number_reward, last_number_reward
from .math_verify import math_verify_reward


REWARD_FUNCS: dict[str, Callable[..., Any]] = {
    "dapo_math": dapo_math_reward,
    "math_verify": math_verify_reward,
    "last_number": last_number_reward,
    "bare_number": bare_number_reward,
}
# The prompt style that asks for the form of answer that a reward function reads, by the name of the function.
_STYLES = {"dapo_math_reward": "answer_line", "math_verify_reward": "boxed", "accuracy_reward": "boxed"}
# What reward functions log for completions without an answer.
_NO_ANSWER = {"", "[INVALID]", "[unparseable]", "[skipped]", "[killed]"}


def names_of_trl() -> list[str]:
    """Return the names of TRL's reward functions. Its `get_` functions make one, and can only be used in Python."""
    names = importlib.import_module("trl.rewards").__all__
    return [name for name in names if name.endswith("_reward") and not name.startswith("get_")]


def load_reward(option: str, name: str) -> Callable[..., Any]:
    """Return the reward function that a user names: one of this package or of TRL, or a dotted import path."""
    others: list[str] = []
    if "." not in name and name not in REWARD_FUNCS:  # importing TRL takes time
        others = names_of_trl()
        if name.isidentifier() and hasattr(importlib.import_module("trl.rewards"), name):
            name = f"trl.rewards.{name}"
    return load_function(option, name, REWARD_FUNCS, others)


def read_math_problems(reward_funcs: Collection[Any]) -> bool:
    """Return whether all reward functions are of this package and so read only the columns of math problems."""
    return all(any(each is own for own in REWARD_FUNCS.values()) for each in reward_funcs)


def default_prompt_style(reward_funcs: Collection[Any]) -> str:
    """Return the prompt style of the first reward function that has one, or `"as_is"`."""
    styles = (_STYLES.get(getattr(each, "__name__", "")) for each in reward_funcs)
    return next(filter(None, styles), "as_is")


def find_answers(
    names: Sequence[str], logged: Mapping[str, Sequence[Any]], texts: Sequence[str]
) -> tuple[list[str | None], bool]:
    """
    Return the final answer of each completion, on which maj@k votes.

    A reward function may pass the answers to `log_extra`, as the column `answer` or `<name of the function>_answer`,
    with or without the `_reward` of its name. If there is no such column, the answer is the last `Answer:` line or the
    last `\\boxed{}` of the text.

    Args:
        names (`Sequence[str]`):
            Names of the reward functions that decide which completions are correct.
        logged (`Mapping[str, Sequence[Any]]`):
            Columns that the reward functions passed to `log_extra`, with a value for each completion.
        texts (`Sequence[str]`):
            The completions.

    Returns:
        `tuple[list[str | None], bool]`: The answers, with `None` for a completion without one, and whether they are
        from a reward function.
    """
    columns = ["answer"]
    for name in names:
        columns += [f"{name}_answer", f"{name.removesuffix('_reward')}_answer"]
    for column in columns:
        if column in logged and len(logged[column]) == len(texts):
            return [answer_text(answer) for answer in logged[column]], True
    return [stated_answer(text) for text in texts], False


def answer_text(answer: Any) -> str | None:
    """Return an answer as text that can be stored in a file, or `None` if a reward function found no answer."""
    text = None if answer is None else loggable(str(answer))
    return None if text in _NO_ANSWER else text

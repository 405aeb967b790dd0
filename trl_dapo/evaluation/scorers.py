# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
Scorers: whether each completion is correct, and which answer it states.

A scorer is a reward function, which is called with what it gets in training, or a function of a completion and the
gold answer.
"""

import asyncio
import copy
import functools
import importlib
import inspect
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

from ..rewards.names import REWARD_FUNCS, answer_text, find_answers
from ..settings.arguments import load_function
from .jobs import GeneratedCompletion, Problem


if TYPE_CHECKING:
    from transformers import TrainerState


logger = logging.getLogger(__name__)

# What each reads.
SCORERS = {
    "dapo_math": "the last `Answer:` line, by the rule of the paper, for which the prompt style 'answer_line' asks",
    "math_verify": "LaTeX, such as \\boxed{} for which the prompt style 'boxed' asks, compared as symbols",
    "last_number": "the last number, in any text",
    "accuracy_reward": "as 'math_verify', by TRL's reward function of this name",
}


class Verdict(NamedTuple):
    """`correct` is `None` if the gold answer could not be read, `answer` if the completion has none."""

    correct: bool | None
    answer: str | None


class Verdicts(NamedTuple):
    """The verdicts on K completions of each of P problems."""

    of_problems: list[list[Verdict]]
    states_answers: bool  # whether the scorer said which answers the completions state


Scorer = Callable[..., Any]


def load_scorer(scorer: str | Scorer, prompt_style: str | None) -> Scorer:
    """Return what a name stands for: a reward function, or a function of a completion and the gold answer."""
    if not isinstance(scorer, str):
        return scorer
    name = scorer
    if "." not in name and name not in REWARD_FUNCS and name.isidentifier():
        if hasattr(importlib.import_module("trl.rewards"), name):
            name = f"trl.rewards.{name}"
    function = load_function("scorer", name, REWARD_FUNCS)
    if function is REWARD_FUNCS["dapo_math"] and prompt_style in ("boxed", "think"):
        raise ValueError(
            f"`prompt_style={prompt_style!r}` asks for \\boxed{{}}, and the scorer {scorer!r} reads the last "
            "`Answer:` line only. Use the scorer 'math_verify', or the prompt style 'answer_line'."
        )
    return function


def is_reward_function(scorer: Scorer) -> bool:
    """
    Return whether a function takes `completions`, or any keyword, as a decorated function may. Otherwise it takes two
    texts.
    """
    parameters = inspect.signature(scorer).parameters.values()
    names = {each.name for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)}
    return "completions" in names or (not names and any(each.kind is each.VAR_KEYWORD for each in parameters))


def name_of(scorer: str | Scorer) -> str:
    if isinstance(scorer, str):
        return scorer
    while isinstance(scorer, functools.partial):
        scorer = scorer.func
    return getattr(scorer, "__name__", type(scorer).__name__)


def check_columns(scorer: Scorer, name: str, columns: Sequence[str], sends_ids: bool) -> None:
    """Refuse rows that a scorer cannot be called with, as training does, before any completion is asked for."""
    from ..rewards.checks import check_prompt_column, check_reward_columns

    check_prompt_column(columns, "dataset")
    if not is_reward_function(scorer):
        if "solution" not in columns:
            raise ValueError(
                f"The dataset has no column 'solution', whose gold answers the scorer {name!r} compares with; found "
                f"{', '.join(map(repr, columns))}."
            )
        return
    check_reward_columns([scorer], [name], columns, dataset="dataset")
    needed = inspect.signature(scorer).parameters.get("completion_ids")
    if needed is not None and needed.default is needed.empty and not sends_ids:
        raise ValueError(
            f"The scorer {name!r} asks for `completion_ids`, the tokens of each completion, which a server does not "
            "send. Give that parameter a default, or evaluate with `engine='vllm'` or `engine='transformers'`."
        )


def score(
    problems: Sequence[Problem],
    completions_PK: Sequence[Sequence[GeneratedCompletion]],
    scorer: Scorer,
    *,
    name: str = "",
    accuracy_threshold: float | None = None,
    trainer_state: "TrainerState | None" = None,
) -> Verdicts:
    """
    Score K completions of each of P problems.

    Args:
        problems (`Sequence[Problem]`):
            P problems.
        completions_PK (`Sequence[Sequence[GeneratedCompletion]]`):
            The completions of each.
        scorer (`Callable`):
            A reward function, or a function of a completion and the gold answer.
        name (`str`, *optional*):
            What it is called in messages. Defaults to its own name.
        accuracy_threshold (`float`, *optional*):
            A completion with a reward above it is correct. Defaults to 0, if the rewards take no more than two values.
        trainer_state ([`~transformers.TrainerState`], *optional*):
            What a reward function gets by this name in training.

    Returns:
        [`Verdicts`].

    Raises `ValueError` if the rewards are scores, and there is no `accuracy_threshold`.
    """
    name = name or name_of(scorer)
    rows = [
        (problem, completion)
        for problem, completions in zip(problems, completions_PK, strict=True)
        for completion in completions
    ]
    if is_reward_function(scorer):
        found, states_answers = _reward_verdicts(rows, scorer, name, accuracy_threshold, trainer_state)
    else:
        found = [_read_verdict(scorer(each.text, problem.solution), name) for problem, each in rows]
        states_answers = True
    flat = iter(found)
    return Verdicts([[next(flat) for _ in completions] for completions in completions_PK], states_answers)


def _read_verdict(returned: Any, name: str) -> Verdict:
    """
    Check what a function of a completion and a gold answer returned: whether the completion is correct, and the
    answer.
    """
    try:
        correct, answer = returned
    except (TypeError, ValueError):
        raise TypeError(
            f"The scorer {name!r} returned {returned!r:.80}; expected whether the completion is correct, and the "
            "answer that it states: `(True, '7')`."
        ) from None
    return Verdict(None if correct is None else bool(correct), answer_text(answer))


def _reward_verdicts(
    rows: list[tuple[Problem, GeneratedCompletion]],
    reward_func: Scorer,
    name: str,
    accuracy_threshold: float | None,
    trainer_state: "TrainerState | None",
) -> tuple[list[Verdict], bool]:
    """
    Scores by a reward function, called with the same arguments as in training, and by training's rule of what is
    correct.
    """
    import torch

    from ..rewards.task_reward import TaskReward

    logged: dict[str, list] = {}
    rewards = call_reward(rows, reward_func, name, trainer_state, logged)
    rewards_BF = torch.tensor([[math.nan if reward is None else float(reward)] for reward in rewards])
    task = TaskReward.choose(
        [name],
        torch.ones(1),
        None if accuracy_threshold is None else [name],
        accuracy_threshold=accuracy_threshold or 0.0,
    ).having_seen(rewards_BF)
    if not task.has_correctness:
        raise ValueError(
            f"The reward function {name!r} gives scores, {len(task.values)} different values so far, and nothing says "
            "which completions are correct. Set `accuracy_threshold`: a completion with a score above it is correct."
        )
    is_scored = (~rewards_BF.isnan().squeeze(1)).tolist()
    correct = task.is_correct(rewards_BF).tolist()
    answers, states_answers = find_answers([name_of(reward_func)], logged, [completion.text for _, completion in rows])
    verdicts = zip(is_scored, correct, answers, strict=True)
    return [Verdict(is_correct if scored else None, answer) for scored, is_correct, answer in verdicts], states_answers


def call_reward(
    rows: list[tuple[Problem, GeneratedCompletion]],
    reward_func: Scorer,
    name: str,
    trainer_state: "TrainerState | None",
    logged: dict[str, list],
) -> list[Any]:
    """The rewards of completions, from a function that is called with the keywords that training passes."""
    from transformers import TrainerState

    from ..rewards.checks import NOT_PASSED_ON, with_checked_values

    # A copy a completion, as in training: a reward function may change what it is given.
    examples = [copy.deepcopy(dict(problem.row)) for problem, _ in rows]
    keywords: dict[str, Any] = {
        column: [example[column] for example in examples] for column in examples[0] if column not in NOT_PASSED_ON
    }
    keywords["prompts"] = [example["prompt"] for example in examples]
    keywords["completions"] = [
        completion.text if isinstance(problem.prompt, str) else [{"role": "assistant", "content": completion.text}]
        for problem, completion in rows
    ]
    if all(completion.ids is not None for _, completion in rows):
        keywords["completion_ids"] = [list(completion.ids or []) for _, completion in rows]
    keywords["trainer_state"] = trainer_state or TrainerState()

    def log_extra(column: str, values: Iterable) -> None:
        logged[column] = list(values)

    keywords["log_extra"] = log_extra
    keywords["log_metric"] = lambda metric, value: None
    try:
        returned = with_checked_values(reward_func, name)(**keywords)
        if inspect.isawaitable(returned):
            with ThreadPoolExecutor(1) as thread:  # this one may run a loop of its own, as a notebook's does
                returned = thread.submit(asyncio.run, _wait_for(returned)).result()
    finally:
        getattr(reward_func, "close", lambda: None)()  # the workers of math-verify
    return returned


async def _wait_for(awaitable: Any) -> Any:
    return await awaitable


def warn_without_answers(
    completions_PK: Sequence[Sequence[GeneratedCompletion]], verdicts: Verdicts, scorer: str | Scorer
) -> None:
    """Distinguishes an evaluation in which most answers were not found from one in which they were incorrect."""
    if not verdicts.states_answers:
        return
    found = [
        pair
        for completions, of_problem in zip(completions_PK, verdicts.of_problems, strict=True)
        for pair in zip(completions, of_problem, strict=True)
    ]
    without = [completion for completion, verdict in found if verdict.answer is None and not verdict.correct]
    if 2 * len(without) <= len(found):
        return
    parts = [f"no answer found in {len(without):,} of {len(found):,}; the first: {without[0].text[-200:]!r}"]
    if isinstance(scorer, str) and scorer in SCORERS:
        parts.append(f"the scorer {scorer!r} reads {SCORERS[scorer]}; another scorer reads the same completions")
    if num_cut_off := sum(completion.truncated for completion in without):
        parts.append(f"{num_cut_off:,} were cut off: raise `max_completion_length`")
    logger.warning("; ".join(parts) + ".")

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
Scorers, which say whether each completion is correct, and which answer it states.

A scorer is a reward function, which is called with the same arguments as in training, or a function of a completion
and the gold answer.
"""

import asyncio
import copy
import functools
import inspect
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

from ..rewards.names import REWARD_FUNCS, answer_text, find_answers, load_reward
from .jobs import GeneratedCompletion, Problem


if TYPE_CHECKING:
    from transformers import TrainerState


logger = logging.getLogger(__name__)

# What each scorer reads, for messages.
SCORERS = {
    "dapo_math": "the last `Answer:` line, which the prompt style 'answer_line' asks for",
    "math_verify": "LaTeX such as \\boxed{}, which the prompt style 'boxed' asks for",
    "last_number": "the last number of any text",
    "accuracy_reward": "LaTeX such as \\boxed{}, which the prompt style 'boxed' asks for",
}


class Verdict(NamedTuple):
    """The verdict on a completion."""

    correct: bool | None  # `None` if the gold answer could not be read
    answer: str | None  # `None` if the completion has no answer


class Verdicts(NamedTuple):
    """The verdicts on K completions of each of P problems."""

    of_problems: list[list[Verdict]]
    states_answers: bool  # whether the answers are from the scorer


Scorer = Callable[..., Any]


def load_scorer(scorer: str | Scorer, prompt_style: str | None) -> Scorer:
    """Return the scorer with a name: a reward function, or a function of a completion and the gold answer."""
    if not isinstance(scorer, str):
        return scorer
    function = load_reward("scorer", scorer)
    if function is REWARD_FUNCS["dapo_math"] and prompt_style in ("boxed", "think"):
        raise ValueError(
            f"`prompt_style={prompt_style!r}` asks for \\boxed{{}}, but the scorer {scorer!r} reads only the last "
            "`Answer:` line. Use the scorer 'math_verify', or the prompt style 'answer_line'."
        )
    return function


def is_reward_function(scorer: Scorer) -> bool:
    """
    Return whether a scorer is a reward function, and not a function of a completion and the gold answer.

    A reward function has a parameter `completions`, or takes only `**kwargs`, as decorated functions often do.
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
    """Raise a `ValueError` if a scorer cannot be called with the columns, before any completion is sampled."""
    from ..rewards.checks import check_prompt_column, check_reward_columns

    check_prompt_column(columns, "dataset")
    if not is_reward_function(scorer):
        if "solution" not in columns:
            raise ValueError(
                f"The dataset has no column 'solution', with which the scorer {name!r} compares answers. Its columns "
                f"are {', '.join(map(repr, columns))}. Rename the column with the gold answers."
            )
        return
    check_reward_columns([scorer], [name], columns, dataset="dataset")
    needed = inspect.signature(scorer).parameters.get("completion_ids")
    if needed is not None and needed.default is needed.empty and not sends_ids:
        raise ValueError(
            f"The scorer {name!r} requires `completion_ids`, the tokens of each completion, which a server does not "
            "send. Give this parameter a default, or evaluate with `engine='vllm'` or `engine='transformers'`."
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
            The completions of each problem.
        scorer (`Callable`):
            A reward function, or a function of a completion and the gold answer.
        name (`str`, *optional*):
            Name of the scorer in messages. Defaults to the name of the function.
        accuracy_threshold (`float`, *optional*):
            A completion with a reward above it is correct. Defaults to 0 if the rewards take no more than two values.
        trainer_state ([`~transformers.TrainerState`], *optional*):
            The argument `trainer_state` of a reward function.

    Returns:
        [`Verdicts`]: The verdicts on all completions.

    Raises:
        ValueError: If the rewards take more than two values, and there is no `accuracy_threshold`.
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
    """Return the verdict of a function of a completion and a gold answer, after a check of what it returned."""
    try:
        correct, answer = returned
    except (TypeError, ValueError):
        raise TypeError(
            f"The scorer {name!r} returned {returned!r:.80}. Expected a pair that says whether the completion is "
            "correct, and which answer it states, such as `(True, '7')`."
        ) from None
    return Verdict(None if correct is None else bool(correct), answer_text(answer))


def _reward_verdicts(
    rows: list[tuple[Problem, GeneratedCompletion]],
    reward_func: Scorer,
    name: str,
    accuracy_threshold: float | None,
    trainer_state: "TrainerState | None",
) -> tuple[list[Verdict], bool]:
    """Return verdicts by a reward function and the accuracy threshold, as in training."""
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
            f"The reward function {name!r} gives scores ({len(task.values)} different values so far), which do not "
            f"say which completions are correct. Set `accuracy_threshold`: a completion with a score above it is "
            f"correct."
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
    """Return the rewards of completions. The function is called with the same keywords as in training."""
    from transformers import TrainerState

    from ..rewards.checks import NOT_PASSED_ON, with_checked_values

    # One copy per completion, as in training, because a reward function may change its arguments.
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
            with ThreadPoolExecutor(1) as thread:  # in a notebook, this thread already runs an event loop
                returned = thread.submit(asyncio.run, _wait_for(returned)).result()
    finally:
        getattr(reward_func, "close", lambda: None)()  # stops the workers of math-verify
    return returned


async def _wait_for(awaitable: Any) -> Any:
    return await awaitable


def warn_without_answers(
    completions_PK: Sequence[Sequence[GeneratedCompletion]], verdicts: Verdicts, scorer: str | Scorer
) -> None:
    """Warn if most completions have no answer, so that low scores are not mistaken for incorrect answers."""
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
    parts = [
        f"No answer was found in {len(without):,} of {len(found):,} completions. The first of them ends with "
        f"{without[0].text[-200:]!r}."
    ]
    if isinstance(scorer, str) and scorer in SCORERS:
        parts.append(
            f"The scorer {scorer!r} reads {SCORERS[scorer]}. To score these completions again, without sampling, "
            "repeat the command with another `--scorer`."
        )
    num_cut_off = sum(completion.truncated for completion in without)
    if num_cut_off:
        parts.append(f"{num_cut_off:,} of those without an answer were cut off. Raise `max_completion_length`.")
    logger.warning(" ".join(parts))

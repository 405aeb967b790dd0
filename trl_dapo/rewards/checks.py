# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks of what a reward function requires and returns, before the first rollout, when mistakes cost nothing.

In TRL a mistake shows after the first batch has been generated, as an error without the name of the function.
"""

import functools
import inspect
import itertools
import numbers
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from decimal import Decimal
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..settings.rules import why_punished_twice


# What `GRPOTrainer._calculate_rewards` passes besides the dataset's columns, and the columns that it does not pass on.
PASSED_BY_TRL = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
NOT_PASSED_ON = ("prompt", "completion", "completion_ids")
RewardFunc = TypeVar("RewardFunc")  # what goes in comes out, wrapped
_BY_KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def check_prompt_column(columns: Sequence[str] | None, dataset: str = "train_dataset") -> None:
    """Refuses a dataset without prompts; `None` are columns that are not known."""
    if columns is None or "prompt" in columns:
        return
    raise ValueError(
        f"`{dataset}` has no column `prompt`; its columns are {_quoted(columns)}. Rename the one that holds the "
        'prompts, in the file or by `dataset.rename_column("question", "prompt")`, or load a math dataset with '
        "`trl_dapo.data.load_math_dataset`."
    )


def check_reward_columns(
    reward_funcs: Iterable[Any],
    names: Iterable[str],
    columns: Sequence[str] | None,
    *,
    dataset: str = "train_dataset",
    has_environments: bool = False,
) -> None:
    """Refuses a reward function that TRL cannot call on a dataset's rows; `None` are columns that are not known."""
    if columns is None:
        return
    if taken := [column for column in columns if column in ("prompts", "completions")]:
        raise ValueError(
            f"`{dataset}` has the column {_quoted(taken)}, a name that TRL passes to reward functions itself. Rename "
            f'it, in the file or by `dataset.rename_column("{taken[0]}", "given_{taken[0]}")`.'
        )
    passed_on = [column for column in columns if column not in NOT_PASSED_ON]
    given = {*PASSED_BY_TRL, *passed_on}
    if has_environments:
        given.add("environments")
    for reward_func, name in zip(reward_funcs, names, strict=True):
        parameters = _parameters(reward_func)
        if by_position := [p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_ONLY]:
            raise ValueError(
                f"The reward function {name!r} takes {_quoted(by_position)} by position only; TRL passes every "
                "argument by its name."
            )
        defaults = {p.name: p.default for p in parameters if p.kind in _BY_KEYWORD}
        required = [p for p, default in defaults.items() if default is inspect.Parameter.empty]
        if missing := [p for p in required if p not in given]:
            if missing[0] in ("prompt", "completion"):
                hint = f"TRL passes `{missing[0]}s`, a list."
            else:
                # A column that no function reads yet, where there is one.
                free = next((c for c in passed_on if c not in {p.name for p in parameters}), None)
                example = f'`dataset.rename_column("{free}", "{missing[0]}")`'
                rename = f"Rename a column, in the file or by {example}, or give" if free else "Give"
                hint = f"{rename} the parameter a default."
            raise ValueError(
                f"The reward function {name!r} asks for {_quoted(missing)}, which `{dataset}` does not have; its "
                f"columns are {_quoted(columns)}. {hint}"
            )
        if not parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
            continue
        if refused := sorted(given - defaults.keys()):
            raise ValueError(
                f"The reward function {name!r} does not accept {_quoted(refused)}, which TRL passes to every reward "
                "function. Add `**kwargs` to its parameters."
            )


def check_reward_funcs(
    reward_funcs: Sequence[Any], reward_weights: Sequence[float] | None, buffer: int | None, group_filter: Any = None
) -> None:
    """Refuse what is not a reward function or filter, and weights that no run should have. TRL refuses the rest."""
    if group_filter is not None and not callable(group_filter):
        raise TypeError(f"`group_filter` must be a callable of a group's rewards and rows, got {group_filter!r}.")
    for reward_func in reward_funcs:
        if not (reward_func is None or isinstance(reward_func, str) or callable(reward_func)):
            raise TypeError(
                f"`reward_funcs` holds {reward_func!r:.80} ({type(reward_func).__name__}). Expected a function of "
                "completions, a reward model, or the name of one."
            )
    names = [_name_of(reward_func) for reward_func in reward_funcs]
    if (message := why_punished_twice(buffer, names, reward_weights)) is not None:
        raise ValueError(message)
    if reward_weights is None:
        return
    if not any(reward_weights):
        raise ValueError(f"`reward_weights={[*reward_weights]}`: no reward counts, so nothing trains. Raise one.")
    num_reward_funcs = len(reward_funcs)
    if buffer is None or len(reward_weights) != num_reward_funcs + 1:
        return
    raise ValueError(
        f"`reward_weights` has {len(reward_weights)} weights for {num_reward_funcs} reward functions. The column "
        f"`soft_overlong_punishment`, which `overlong_buffer_length={buffer}` adds, takes none: its "
        f"weight is `overlong_penalty_factor`. Leave the last weight out, and set "
        f"`overlong_penalty_factor={reward_weights[-1]}` if it was meant for that column."
    )


def check_reward_values(name: str, values: Any, num_rows: int) -> list:
    """Return a reward function's values as a list, or refuse them."""
    returned = f"The reward function {name!r} returned"
    if inspect.iscoroutine(values):
        values.close()
        raise TypeError(f"{returned} a coroutine. Define it with `async def`.")
    if isinstance(values, (str, bytes, dict)) or not isinstance(values, Iterable):
        got = f"{values!r:.80} ({type(values).__name__})"
        raise TypeError(f"{returned} {got}; expected a list of {num_rows} numbers, one a completion.")
    if getattr(values, "ndim", 1) == 0:
        got = f"{values!r:.80}, a single number"
        raise TypeError(f"{returned} {got}; expected a list of {num_rows}, one a completion.")
    values = list(values)
    if len(values) != num_rows:
        raise ValueError(f"{returned} {len(values)} values for {num_rows} completions; expected one each.")
    for i, value in enumerate(values):
        if not _is_reward(value):
            got = f"{value!r:.80} ({type(value).__name__}) for completion {i} of {num_rows}"
            raise TypeError(f"{returned} {got}; expected a number, or `None` for no reward.")
    return values


def with_checked_values(
    reward_func: RewardFunc,
    name: str,
    log_extra: Callable[[str, list], None] | None = None,
    num_rows: int | None = None,
) -> RewardFunc:
    """
    A reward function whose values are checked whenever it is called, and whose `log_extra` is also passed to a
    second function. It gets the first `num_rows` rows; the others are copies of these. A reward model is returned
    unchanged.
    """
    naming = functools.partial(_naming_in_a_note, name)
    checked = functools.partial(check_reward_values, name)
    return wrap_reward(reward_func, name, within=naming, then=checked, log_extra=log_extra, num_rows=num_rows)


@contextmanager
def _naming_in_a_note(name: str) -> Iterator[None]:
    """Adds to what a reward function raises which function it was."""
    try:
        yield
    except Exception as error:
        error.add_note(f"The reward function {name!r} raised this.")
        raise


def wrap_reward(
    reward_func: RewardFunc,
    name: str,
    within: Callable[[], AbstractContextManager] = nullcontext,
    then: Callable[[Any, int], Any] = lambda values, num_rows: values,
    log_extra: Callable[[str, list], None] | None = None,
    num_rows: int | None = None,
) -> RewardFunc:
    """
    A reward function that is called `within` a context, and whose values are replaced by `then` of them. What it
    passes to `log_extra` is passed on. It gets only the first `num_rows` rows, by default all; the other rows get the
    values of these, repeated.
    """
    if isinstance(reward_func, torch.nn.Module):
        return reward_func
    own: Any = reward_func
    inner = own
    while isinstance(inner, functools.partial):
        inner = inner.func

    def listening(kwargs: dict[str, Any]) -> dict[str, Any]:
        if log_extra is None or "log_extra" not in kwargs:
            return kwargs
        log = kwargs["log_extra"]

        def tell_both(column: str, values: list) -> None:
            log_extra(column, list(values))
            log(column, values)

        return {**kwargs, "log_extra": tell_both}

    def given(kwargs: dict[str, Any]) -> dict[str, Any]:
        if num_rows is None:
            return kwargs
        return {name: value[:num_rows] if isinstance(value, list) else value for name, value in kwargs.items()}

    def for_all(values: Any, completions: list) -> Any:
        if num_rows is None or num_rows >= len(completions):
            return then(values, len(completions))
        values = then(values, num_rows)
        return [values[i % num_rows] for i in range(len(completions))]

    async def awaited(*, completions: list, **kwargs: Any) -> Any:
        with within():
            values = await own(**given({"completions": completions, **listening(kwargs)}))
        return for_all(values, completions)

    def called(*, completions: list, **kwargs: Any) -> Any:
        with within():
            values = own(**given({"completions": completions, **listening(kwargs)}))
        return for_all(values, completions)

    is_async = inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(inner.__call__)
    wrapped: Any = awaited if is_async else called  # functions may have any attribute
    wrapped.__name__ = name
    wrapped.__wrapped__ = reward_func
    return wrapped


def distinct_names(names: Sequence[str]) -> list[str]:
    """Return the names, numbered from 1 if several functions have one: `f_1` and `f_2`."""
    distinct: list[str] = []
    for name in names:
        numbered = (f"{name}_{i}" for i in itertools.count(1))
        is_shared = names.count(name) > 1
        distinct.append(next(new for new in numbered if new not in {*names, *distinct}) if is_shared else name)
    return distinct


def _name_of(reward_func: Any) -> str:
    """Return the name of a reward function, which a `functools.partial` has from what it calls; empty for others."""
    while isinstance(reward_func, functools.partial):
        reward_func = reward_func.func
    return getattr(reward_func, "__name__", "")


def _parameters(reward_func: Any) -> list[inspect.Parameter]:
    if isinstance(reward_func, (str, torch.nn.Module)):
        return []
    with suppress(TypeError, ValueError):
        # The outermost function counts, because a decorator receives the arguments.
        return list(inspect.signature(reward_func, follow_wrapped=False).parameters.values())
    return []


def _is_reward(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    # numpy's bool is the one number of its own that is none of Python's.
    return value is None or isinstance(value, (numbers.Real, Decimal, np.bool_))


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "none"

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks of the arguments and values of reward functions.

The arguments are checked before the first rollout. In TRL a mistake shows only after the first batch was generated, in
an error that does not name the function.
"""

import functools
import inspect
import itertools
import numbers
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..settings.rules import why_punished_twice


# Arguments that `GRPOTrainer._calculate_rewards` passes besides the columns, and columns that it does not pass on.
PASSED_BY_TRL = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
NOT_PASSED_ON = ("prompt", "completion", "completion_ids")
RewardFunc = TypeVar("RewardFunc")
_BY_KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
# Code that is not the user's: this package, Python's own library, and packages that are installed.
_PACKAGE = Path(__file__).parents[1]
_LIBRARIES = (_PACKAGE, Path(sysconfig.get_path("stdlib")))
_INSTALLED = {"site-packages", "dist-packages"}


def check_prompt_column(columns: Sequence[str] | None, dataset: str = "train_dataset") -> None:
    """Raise a `ValueError` if a dataset has no prompts. `columns` is `None` if they are not known."""
    if columns is None or "prompt" in columns:
        return
    raise ValueError(
        f"`{dataset}` has no column `prompt`. Its columns are {_quoted(columns)}. Rename the column with the prompts, "
        'in the file or with `dataset.rename_column("question", "prompt")`, or load a math dataset with '
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
    """
    Raise a `ValueError` if TRL cannot call a reward function on the rows of a dataset.

    `columns` is `None` if the columns are not known. Then nothing is checked.
    """
    if columns is None:
        return
    if taken := [column for column in columns if column in ("prompts", "completions")]:
        raise ValueError(
            f"`{dataset}` has the column {_quoted(taken)}, but TRL passes another argument of this name to reward "
            f'functions. Rename the column, in the file or with `dataset.rename_column("{taken[0]}", '
            f'"given_{taken[0]}")`.'
        )
    passed_on = [column for column in columns if column not in NOT_PASSED_ON]
    given = {*PASSED_BY_TRL, *passed_on}
    if has_environments:
        given.add("environments")
    for reward_func, name in zip(reward_funcs, names, strict=True):
        parameters = _parameters(reward_func)
        if by_position := [p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_ONLY]:
            raise ValueError(
                f"The reward function {name!r} takes {_quoted(by_position)} by position only, but TRL passes every "
                "argument by name. Remove the `/` from its parameters."
            )
        defaults = {p.name: p.default for p in parameters if p.kind in _BY_KEYWORD}
        required = [p for p, default in defaults.items() if default is inspect.Parameter.empty]
        if missing := [p for p in required if p not in given]:
            if missing[0] in ("prompt", "completion"):
                hint = f"TRL passes `{missing[0]}s`, a list. Rename the parameter."
            else:
                # The example renames a column that the function does not read yet, if there is one.
                free = next((c for c in passed_on if c not in {p.name for p in parameters}), None)
                example = f'`dataset.rename_column("{free}", "{missing[0]}")`'
                hint = "Give the parameter the name of the column that it should read, or a default."
                if free:
                    hint += f" Or rename a column, in the file or with {example}."
            raise ValueError(
                f"The reward function {name!r} requires {_quoted(missing)}, which `{dataset}` does not have. Its "
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
    """Raise an error for reward functions, weights or a filter that cannot be used and that TRL would not refuse."""
    if group_filter is not None and not callable(group_filter):
        raise TypeError(f"`group_filter` must be a function of the rewards and rows of a group, got {group_filter!r}.")
    for reward_func in reward_funcs:
        if not (reward_func is None or isinstance(reward_func, str) or callable(reward_func)):
            raise TypeError(
                f"`reward_funcs` contains {reward_func!r:.80} ({type(reward_func).__name__}). Expected a function of "
                "completions, a reward model, or the name of a reward model."
            )
    names = [_name_of(reward_func) for reward_func in reward_funcs]
    if (message := why_punished_twice(buffer, names, reward_weights)) is not None:
        raise ValueError(message)
    if reward_weights is None:
        return
    if not any(reward_weights):
        raise ValueError(
            f"`reward_weights={[*reward_weights]}` are all 0, so nothing would be learned. Raise one of them."
        )
    names = [
        name or (given if isinstance(given, str) else type(given).__name__)
        for name, given in zip(names, reward_funcs, strict=True)
        if given is not None
    ]
    if len(reward_weights) == len(names):
        return
    weights = f"{len(reward_weights)} weight{'s' if len(reward_weights) > 1 else ''}"
    functions = f"{len(names)} reward function{'s' if len(names) > 1 else ''}"
    wrong = f"`reward_weights` has {weights} for {functions} ({', '.join(map(repr, names))})."
    if buffer is not None and len(reward_weights) == len(names) + 1:
        raise ValueError(
            f"{wrong} The punishment that `overlong_buffer_length={buffer}` adds is not one of them: its weight is "
            f"`overlong_penalty_factor`. Leave the last weight out, and set "
            f"`overlong_penalty_factor={reward_weights[-1]}` if it was meant for the punishment."
        )
    raise ValueError(
        f"{wrong} Give one weight for each function, in the same order, or leave `reward_weights` out to give all of "
        "them the weight 1."
    )


def check_reward_values(name: str, values: Any, num_rows: int) -> list:
    """Return the values of a reward function as a list. Raise an error if they are not a reward per completion."""
    returned = f"The reward function {name!r} returned"
    if inspect.iscoroutine(values):
        values.close()
        raise TypeError(f"{returned} a coroutine. Define it with `async def`.")
    if isinstance(values, (str, bytes, dict)) or not isinstance(values, Iterable):
        got = f"{values!r:.80} ({type(values).__name__})"
        raise TypeError(f"{returned} {got}. Expected a list of {num_rows} numbers, one per completion.")
    if getattr(values, "ndim", 1) == 0:
        got = f"{values!r:.80}, a single number"
        raise TypeError(f"{returned} {got}. Expected a list of {num_rows} numbers, one per completion.")
    values = list(values)
    if len(values) != num_rows:
        raise ValueError(f"{returned} {len(values)} values for {num_rows} completions. Expected one per completion.")
    for i, value in enumerate(values):
        if not _is_reward(value):
            got = f"{value!r:.80} ({type(value).__name__}) for completion {i} of {num_rows}"
            raise TypeError(f"{returned} {got}. Expected a number, or `None` for no reward.")
    return values


def with_checked_values(
    reward_func: RewardFunc,
    name: str,
    log_extra: Callable[[str, list], None] | None = None,
    num_rows: int | None = None,
) -> RewardFunc:
    """
    Return a reward function whose values are checked at every call.

    Errors name the function. What it logs with `log_extra` is also passed to a second function. `num_rows` is
    described in [`wrap_reward`]. A reward model is returned unchanged.
    """
    naming = functools.partial(_naming_in_a_note, name)
    checked = functools.partial(check_reward_values, name)
    return wrap_reward(reward_func, name, within=naming, then=checked, log_extra=log_extra, num_rows=num_rows)


@contextmanager
def _naming_in_a_note(name: str) -> Iterator[None]:
    """Add the name of a reward function to the errors that it raises."""
    try:
        yield
    except Exception as error:
        error.add_note(f"The reward function {name!r} raised this.")
        raise


def was_raised_here(error: BaseException) -> bool:
    """Return whether an error was raised by this package, so that its message says what to correct."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and Path(frames[-1].filename).is_relative_to(_PACKAGE)


def place_of_failure(error: BaseException, reward_func: Any) -> str:
    """
    Return where a reward function failed, as a part of a sentence that begins with a space: the last line of the
    user's code that was running, or where the function is defined if none of the user's code was running.
    """
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if _is_of_user(frame.filename):
            return f" in line {frame.lineno} of {frame.filename}"
    function = _function_of(reward_func)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return "" if code is None else f" (defined in line {code.co_firstlineno} of {code.co_filename})"


def _is_of_user(file_name: str) -> bool:
    path = Path(file_name)
    if file_name.startswith("<frozen ") or _INSTALLED & {*path.parts}:
        return False
    return not any(path.is_relative_to(folder) for folder in _LIBRARIES)


def wrap_reward(
    reward_func: RewardFunc,
    name: str,
    within: Callable[[], AbstractContextManager] = nullcontext,
    then: Callable[[Any, int], Any] = lambda values, num_rows: values,
    log_extra: Callable[[str, list], None] | None = None,
    num_rows: int | None = None,
) -> RewardFunc:
    """
    Return a reward function that calls another one and changes what goes in and what comes out.

    Args:
        reward_func (`Callable`):
            The reward function to call. A reward model is returned unchanged.
        name (`str`):
            Name of the returned function.
        within (`Callable`, *optional*):
            Returns the context in which the function is called.
        then (`Callable`, *optional*):
            Is called with the values of the function and the number of rows, and returns the values to use.
        log_extra (`Callable`, *optional*):
            Also receives what the function passes to its own `log_extra`.
        num_rows (`int`, *optional*):
            Number of rows to pass to the function. The other rows are copies of these, and get the same values.
            Defaults to all rows.
    """
    if isinstance(reward_func, torch.nn.Module):
        return reward_func
    own: Any = reward_func
    inner = _function_of(own)

    def with_log_extra(kwargs: dict[str, Any]) -> dict[str, Any]:
        if log_extra is None or "log_extra" not in kwargs:
            return kwargs
        log = kwargs["log_extra"]

        def log_to_both(column: str, values: list) -> None:
            log_extra(column, list(values))
            log(column, values)

        return {**kwargs, "log_extra": log_to_both}

    def first_rows(kwargs: dict[str, Any]) -> dict[str, Any]:
        if num_rows is None:
            return kwargs
        return {name: value[:num_rows] if isinstance(value, list) else value for name, value in kwargs.items()}

    def for_all_rows(values: Any, completions: list) -> Any:
        if num_rows is None or num_rows >= len(completions):
            return then(values, len(completions))
        values = then(values, num_rows)
        return [values[i % num_rows] for i in range(len(completions))]

    async def call_async(*, completions: list, **kwargs: Any) -> Any:
        with within():
            values = await own(**first_rows({"completions": completions, **with_log_extra(kwargs)}))
        return for_all_rows(values, completions)

    def call(*, completions: list, **kwargs: Any) -> Any:
        with within():
            values = own(**first_rows({"completions": completions, **with_log_extra(kwargs)}))
        return for_all_rows(values, completions)

    is_async = inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(inner.__call__)
    wrapped: Any = call_async if is_async else call
    wrapped.__name__ = name
    wrapped.__wrapped__ = reward_func
    return wrapped


def distinct_names(names: Sequence[str]) -> list[str]:
    """Return the names, with numbers from 1 added to a name that several functions have: `f_1` and `f_2`."""
    distinct: list[str] = []
    for name in names:
        numbered = (f"{name}_{i}" for i in itertools.count(1))
        is_shared = names.count(name) > 1
        distinct.append(next(new for new in numbered if new not in {*names, *distinct}) if is_shared else name)
    return distinct


def _name_of(reward_func: Any) -> str:
    """Return the name of a reward function, or of the function that a `functools.partial` calls, or an empty text."""
    return getattr(_function_of(reward_func), "__name__", "")


def _function_of(reward_func: Any) -> Any:
    """Return a reward function, or the function that a `functools.partial` calls."""
    while isinstance(reward_func, functools.partial):
        reward_func = reward_func.func
    return reward_func


def _parameters(reward_func: Any) -> list[inspect.Parameter]:
    if isinstance(reward_func, (str, torch.nn.Module)):
        return []
    with suppress(TypeError, ValueError):
        # A decorator receives the arguments, so its own signature counts and not that of the decorated function.
        return list(inspect.signature(reward_func, follow_wrapped=False).parameters.values())
    return []


def _is_reward(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    # `numpy.bool_` is the only number of numpy that is not a `numbers.Real`.
    return value is None or isinstance(value, (numbers.Real, Decimal, np.bool_))


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "none"

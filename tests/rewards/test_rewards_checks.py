# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
import asyncio
import functools
import math
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from trl import GRPOTrainer
from trl.rewards import accuracy_reward
from trl.trainer.utils import is_async_callable

from trl_dapo import rewards
from trl_dapo.rewards.checks import (
    PASSED_BY_TRL,
    check_prompt_column,
    check_reward_columns,
    check_reward_funcs,
    check_reward_values,
    with_checked_values,
)


def test_trl_passes_the_arguments_that_the_checks_expect():
    received = {}

    def reward(**kwargs):
        received.update(kwargs)
        return [0.0]

    trainer = Mock(
        accelerator=SimpleNamespace(device="cpu", is_main_process=True),
        environments=["an environment"],
        reward_funcs=[reward],
        reward_processing_classes=[None],
        reward_func_names=["reward"],
        args=SimpleNamespace(report_to=[]),
    )
    row = {"prompt": "p", "completion": "c", "completion_ids": [1], "image": None, "solution": "2"}
    GRPOTrainer._calculate_rewards(trainer, [row], ["p"], ["c"], [[7]])
    assert set(received) == {*PASSED_BY_TRL, "environments", "image", "solution"}
    assert received["completion_ids"] == [[7]]  # the sampled ones, not the column


def test_a_dataset_without_prompts_is_refused_with_its_columns():
    check_prompt_column(["prompt", "solution"])
    check_prompt_column(None)
    with pytest.raises(
        ValueError, match=r"`train_dataset` has no column `prompt`\. Its columns are `question`, `answer`"
    ):
        check_prompt_column(["question", "answer"])
    with pytest.raises(ValueError, match=r"`eval_dataset\['aime'\]` has no column `prompt`. Its columns are none"):
        check_prompt_column([], "eval_dataset['aime']")


def length(completions, **kwargs):
    return [float(len(completion)) for completion in completions]


def exact(completions, solution, **kwargs):
    return [float(c == s) for c, s in zip(completions, solution, strict=True)]


async def judged(prompts, completions, solution, trainer_state, log_extra, log_metric, completion_ids, **kwargs):
    return [0.0] * len(completions)


class Exact:
    def __call__(self, completions, solution, **kwargs):
        return exact(completions, solution)


class AsyncExact:
    async def __call__(self, completions, solution, **kwargs):
        return exact(completions, solution)


def without_kwargs(prompts, completions, completion_ids, solution, trainer_state, log_extra, log_metric):
    return [0.0] * len(completions)


def exact_of_two(completions, solution):
    return exact(completions, solution)


CALLABLE = {
    "no column": length,
    "all that TRL passes": judged,
    "all by name": without_kwargs,
    "an asynchronous object": AsyncExact(),
    "a bound argument": functools.partial(lambda completions, level, solution, **_: [0.0], level=3),
    "a decorator that chooses": functools.wraps(exact_of_two)(lambda **kwargs: [0.0]),
    "a default": lambda completions, level=None, **_: length(completions),
    "a method": Exact().__call__,
    "a reward model": torch.nn.Linear(1, 1),
    "a reward model's name": "trl-internal-testing/tiny-Qwen2ForSequenceClassification-2.5",
    "no signature": type("NoSignature", (), {"__signature__": "none", "__call__": lambda self, **kwargs: []})(),
    "accuracy_reward": accuracy_reward,
    "dapo_math_reward": rewards.dapo_math_reward,
    "SoftOverlongPunishment": rewards.SoftOverlongPunishment(100, 20),
}


@pytest.mark.parametrize("reward_func", CALLABLE.values(), ids=CALLABLE)
def test_functions_that_trl_can_call_are_accepted(reward_func):
    check_reward_columns([reward_func], ["reward"], ["prompt", "solution"])


@pytest.mark.parametrize("reward_func", [exact, AsyncExact(), functools.partial(exact), accuracy_reward])
def test_a_reward_function_that_requires_a_missing_column_is_refused(reward_func):
    message = (
        r"'exact' requires `solution`, which `train_dataset` does not have. Its columns are `prompt`, `answer`\. "
        r'.*rename_column\("answer", "solution"\)'
    )
    with pytest.raises(ValueError, match=message):
        check_reward_columns([length, reward_func], ["length", "exact"], ["prompt", "answer"])


def test_the_column_to_rename_is_one_that_exists_and_is_not_read_already():
    def reward(completions, solution, answer, **kwargs): ...

    with pytest.raises(ValueError, match=r'rename_column\("source", "answer"\)'):
        check_reward_columns([reward], ["reward"], ["prompt", "solution", "source"])
    advice = r"Give the parameter the name of the column that it should read, or a default\.$"
    with pytest.raises(ValueError, match=rf"are `prompt`, `solution`\. {advice}"):
        check_reward_columns([reward], ["reward"], ["prompt", "solution"])


@pytest.mark.parametrize("name", ["prompts", "completions"])
def test_a_column_with_the_name_of_an_argument_of_trl_is_refused(name):
    message = rf'`train_dataset` has the column `{name}`.*rename_column\("{name}", "given_{name}"\)'
    with pytest.raises(ValueError, match=message):
        check_reward_columns([lambda completions, **kwargs: []], ["any"], ["prompt", name])


def test_the_error_names_the_dataset_and_unknown_columns_are_not_checked():
    check_reward_columns([exact], ["exact"], None)
    with pytest.raises(ValueError, match=r"which `eval_dataset\['aime'\]` does not have"):
        check_reward_columns([exact], ["exact"], ["prompt"], dataset="eval_dataset['aime']")


def test_a_column_that_trl_does_not_pass_on_counts_as_missing():
    for reward, name in ((lambda prompt, **_: 0, "prompt"), (lambda completion, **_: 0, "completion")):
        with pytest.raises(ValueError, match=f"'reward' requires `{name}`.* TRL passes `{name}s`, a list"):
            check_reward_columns([reward], ["reward"], ["prompt", "completion"])
    # Environments are passed if there is a factory.
    reward = lambda environments, **_: 0  # noqa: E731
    check_reward_columns([reward], ["reward"], ["prompt"], has_environments=True)
    with pytest.raises(ValueError, match="requires `environments`"):
        check_reward_columns([reward], ["reward"], ["prompt"])


def test_a_reward_function_that_does_not_accept_the_arguments_of_trl_is_refused():
    message = (
        r"'exact' does not accept `completion_ids`, `log_extra`, `log_metric`, `prompts`, `trainer_state`.*kwargs"
    )
    with pytest.raises(ValueError, match=message):
        check_reward_columns([exact_of_two], ["exact"], ["prompt", "solution"])
    with pytest.raises(ValueError, match="does not accept `level`"):
        check_reward_columns([without_kwargs], ["exact"], ["prompt", "solution", "level"])
    with pytest.raises(ValueError, match="takes `completions` by position only"):
        check_reward_columns([lambda completions, /, **kwargs: 0], ["exact"], ["prompt"])


def test_weights_that_cannot_be_intended_are_refused():
    for num, weights, buffer in ((1, None, 20), (1, [1.0], 20), (2, [1.0, 0.5], 20), (2, [1.0, 0.5], None)):
        check_reward_funcs([exact] * num, weights, buffer)
    message = (
        r"2 weights for 1 reward function \('exact'\).*`overlong_buffer_length=20`.*"
        r"its weight is `overlong_penalty_factor`.*`overlong_penalty_factor=0\.5`"
    )
    with pytest.raises(ValueError, match=message):
        check_reward_funcs([exact], [1.0, 0.5], 20)
    with pytest.raises(ValueError, match=r"`reward_weights=\[0.0, 0.0\]` are all 0"):
        check_reward_funcs([exact, exact], [0.0, 0.0], None)
    check_reward_funcs([exact, exact], [0.0, -1.0], None)


@pytest.mark.parametrize("buffer", [None, 20])
def test_the_error_for_a_wrong_number_of_weights_names_the_functions(buffer):
    """TRL's own message has only the two numbers."""
    rewards = [exact, functools.partial(exact_of_two), "a/model"]
    with pytest.raises(ValueError, match="weight") as error:
        check_reward_funcs(rewards, [1.0], buffer)
    assert str(error.value) == (
        "`reward_weights` has 1 weight for 3 reward functions ('exact', 'exact_of_two', 'a/model'). Give one weight "
        "for each function, in the same order, or leave `reward_weights` out to give all of them the weight 1."
    )


def test_a_reward_function_that_cannot_be_called_is_refused():
    with pytest.raises(TypeError, match=r"`reward_funcs` contains 5 \(int\). Expected a function"):
        check_reward_funcs([exact, 5], None, None)
    check_reward_funcs(["a/model", exact, torch.nn.Linear(1, 1), None], None, None)


FINE = [1.0, 1, True, None, math.nan, Decimal("0.5"), Fraction(1, 2), np.float32(1), np.int64(1), np.bool_(True)]
FINE += [torch.tensor(value) for value in (1.0, True, [1.0])] + [torch.tensor(1.0, dtype=torch.bfloat16)]


@pytest.mark.parametrize("value", FINE, ids=repr)
def test_numbers_of_all_types_are_rewards_as_in_trl(value):
    (checked,) = check_reward_values("reward", [value], 1)
    assert checked is value
    assert torch.tensor([math.nan if value is None else value], dtype=torch.float32).shape == (1,)


NOT_REWARDS = ["1.0", b"1", [1.0], {"score": 1.0}, 1j, np.array(1.0), np.str_("1"), np.complex64(1)]
NOT_REWARDS += [torch.tensor([1.0, 2.0]), torch.tensor(1j)]


@pytest.mark.parametrize("value", NOT_REWARDS, ids=repr)
def test_the_error_for_a_reward_that_is_not_a_number_names_the_function_and_completion(value):
    message = rf"'judge' returned .*\({type(value).__name__}\) for completion 1 of 2. Expected a number"
    with pytest.raises(TypeError, match=message):
        check_reward_values("judge", [0.0, value], 2)


@pytest.mark.parametrize("values", [np.arange(2), torch.zeros(2, 1), (0.0, 0.0), (i for i in range(2))])
def test_any_list_of_numbers_is_read_once(values):
    assert [float(value) for value in check_reward_values("reward", values, 2)] in ([0.0, 0.0], [0.0, 1.0])


@pytest.mark.parametrize("values", ["11", b"11", 1.0, None, {0: 1.0, 1: 1.0}, torch.tensor(1.0)], ids=repr)
def test_the_error_for_values_that_are_not_a_list_names_the_function(values):
    with pytest.raises(TypeError, match=r"'judge' returned .*\. Expected a list of 2"):
        check_reward_values("judge", values, 2)


def test_a_coroutine_that_trl_would_not_await_is_named():
    with pytest.raises(TypeError, match=r"'judge' returned a coroutine.*async def"):
        check_reward_values("judge", judged([], [], [], None, None, None, None), 0)


@pytest.mark.parametrize("values", [[0.0], [0.0] * 3])
def test_one_value_a_completion_is_expected(values):
    with pytest.raises(ValueError, match=rf"'judge' returned {len(values)} values for 2 completions"):
        check_reward_values("judge", values, 2)


async def whispered(completions, **kwargs):
    return [completion.lower() for completion in completions]


class Whispered:
    async def __call__(self, completions, **kwargs):
        return await whispered(completions)


def test_a_function_with_checked_values_is_called_as_before():
    checked = with_checked_values(exact, "exact")
    assert checked(prompts=["p"], completions=["2"], solution=["2"], trainer_state=None) == [1.0]
    assert checked.__name__ == "exact"
    assert not is_async_callable(checked)
    with pytest.raises(TypeError, match=r"'echoed' returned 'A' \(str\) for completion 0 of 1"):
        with_checked_values(lambda completions: completions, "echoed")(completions=["A"])


@pytest.mark.parametrize("reward_func", [whispered, Whispered(), functools.partial(whispered)])
def test_an_asynchronous_function_stays_asynchronous(reward_func):
    checked = with_checked_values(reward_func, "whispered")
    assert is_async_callable(checked)
    with pytest.raises(TypeError, match=r"'whispered' returned 'a' \(str\)"):
        asyncio.run(checked(completions=["A"]))


def test_a_reward_model_is_returned_unchanged():
    model = torch.nn.Linear(1, 1)
    assert with_checked_values(model, "linear") is model

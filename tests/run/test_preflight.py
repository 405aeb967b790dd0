# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks before the first token is generated."""

import itertools
import json
import re
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from datasets import Dataset, IterableDataset
from helpers import run_preflight
from trl.rewards import accuracy_reward

from trl_dapo.run.preflight import SetupError, describe_missing_processes
from trl_dapo.sampling.screen import Screen
from trl_dapo.settings.sampling_defaults import PAPER


def refusal(trainer) -> str:
    """Why a run of this trainer is refused before anything is generated."""
    with pytest.raises(SetupError) as error:
        trainer.train()
    assert trainer.sampled == []
    return str(error.value)


def screening(caplog) -> list[str]:
    return [record.message for record in caplog.records if "screen" in record.message]


def zeros(completions, **kwargs):
    return [0.0] * len(completions)


def fails(completions, answer, **kwargs):
    return [float(completion == answer.strip()) for completion in completions]


def forgets_one(completions, **kwargs):
    return [0.0] * (len(completions) - 1)


async def looks_up(completions, **kwargs):
    return [kwargs["gold"]] * len(completions)


def reads_json(completions, **kwargs):
    return [float(json.loads(completion)["score"]) for completion in completions]


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (fails, "'fails' failed in line {line} of {file} with AttributeError: 'list' object has no attribute 'strip'"),
        (forgets_one, "'forgets_one' returned 3 values for 4 completions"),
        (looks_up, "'looks_up' failed in line {line} of {file} with KeyError: 'gold'"),
        (reads_json, "'reads_json' failed in line {line} of {file} with JSONDecodeError: Expecting value"),
    ],
)
def test_a_reward_function_that_cannot_score_is_named_before_anything_is_generated(made, reward, message):
    """The line is the last one of the user's code: neither of Python's library nor of an installed package."""
    said = refusal(made([zeros, reward]))
    assert f"The reward function {message.format(line=reward.__code__.co_firstlineno + 1, file=__file__)}" in said
    hint = "Make it return a number for each completion, or `None` for one that it cannot score."
    if " failed in " in said:
        hint = "Correct the function, or the column of the dataset that it reads."
    assert said.endswith(hint)


def test_the_error_of_a_function_of_an_installed_package_says_where_the_function_is_defined(made):
    code = accuracy_reward.__code__
    said = refusal(made(partial(accuracy_reward, solution=["3"]), Dataset.from_list([CHAT] * 4), **PAPER))
    assert f" failed (defined in line {code.co_firstlineno} of {code.co_filename}) with " in said


def test_functions_are_called_once_with_a_group_of_the_first_example_and_nothing_of_it_is_logged(made):
    calls = []

    def reward(prompts, completions, completion_ids, answer, log_extra, log_metric, **kwargs):
        calls.append((list(prompts), list(completions), len(completion_ids), list(answer)))
        log_extra("verdict", ["?"] * len(prompts))
        log_metric("asked", 1.0)
        answer.clear()
        return [float(completion == "right") for completion in completions]

    trainer = made(reward, **PAPER)  # with a screen it is called more often, to see whether it compares completions
    trainer.model.eval()
    run_preflight(trainer)
    assert calls == [(["prompt 0:"] * 4, ["Answer: 0"] * 4, 4, [7] * 4)]
    assert not trainer.model.training
    assert not any((trainer._pending_extra_logs, trainer._pending_metrics, trainer._metrics["train"]))
    assert [len(column) for column in trainer._logs.values()] == [0] * len(trainer._logs)
    trainer.train()
    assert len(calls) > 1
    assert trainer.state.log_history[0]["reward"] == 0.5


def test_scores_of_dummy_completions_do_not_decide_whether_rewards_say_what_is_correct(made):
    """Rewards with three values are scores, but only completions of the model show how many values there are."""

    def reward(completions, **kwargs):
        return [{"right": 1.0, "wrong": 0.0}.get(completion, 0.3) for completion in completions]

    trainer = made(reward, num_generations=8, per_device_train_batch_size=8, dynamic_sampling_screen="3")
    assert (trainer._task.values, trainer._task.has_correctness) == (frozenset(), True)
    trainer.preflight.score(
        [{"prompt": "2+2"}] * 3, ["right", "wrong", "?"], [[3], [4], [5]], lambda name, reward_func: nullcontext()
    )
    assert (trainer._task.values, trainer._task.has_correctness) == (frozenset(), True)
    run_preflight(trainer)
    assert (trainer._task.values, trainer._task.has_correctness) == (frozenset(), True)
    trainer.train()
    assert (trainer._task.values, trainer._task.has_correctness) == ({0.0, 1.0}, True)
    assert trainer.state.log_history[0]["task_accuracy"] == 0.5


CHAT = {"prompt": [{"role": "user", "content": "2+2"}]}


def test_the_error_of_a_reward_function_that_expects_text_explains_conversational_completions(made):
    seen = []

    def reward(completions, **kwargs):
        seen.extend(completions)
        return [float(completion.endswith("4")) for completion in completions]

    said = refusal(made(reward, Dataset.from_list([CHAT] * 4), **PAPER))
    assert seen == [[{"role": "assistant", "content": "Answer: 0"}]] * 4
    assert "and 4 completions [{'role': 'assistant', 'content': 'Answer: 0'}]" in said
    assert 'A completion is a list of messages, and its text is `completion[0]["content"]`' in said
    said = refusal(made(fails, **PAPER))
    assert "and 4 completions 'Answer: 0'." in said
    assert "list of messages" not in said


def silent(completions, **kwargs):
    return [None, float("nan")] * (len(completions) // 2)


@pytest.mark.parametrize(("rewards", "is_warned"), [([silent], True), ([silent, zeros], False), ([zeros], False)])
def test_an_example_that_no_function_scores_is_warned_of(made, caplog, rewards, is_warned):
    run_preflight(made(rewards))
    assert caplog.text.count("Every reward function ('silent') returned `None` or NaN") == is_warned
    assert caplog.text.count("returned `None` or NaN") == is_warned


@pytest.mark.parametrize("leaves_one_out", [True, False])
def test_a_function_that_scores_no_completion_is_named_once_unless_others_score_all(made, caplog, leaves_one_out):
    def right(completions, **kwargs):
        first = None if leaves_one_out else 0.0
        return [first, *(float(completion == "right") for completion in completions[1:])]

    made([right, silent], dynamic_sampling_rewards=["right"], max_steps=3).train()
    said = [record.message for record in caplog.records if "scored none" in record.message]
    assert len(said) == leaves_one_out
    assert all("'silent' scored none of the 16 completions of the first rollout, but returned" in one for one in said)


def test_a_function_that_reads_the_state_of_the_run_is_called_once_it_is_known(made):
    """A curriculum: what counts depends on how far the run has come."""
    shares = []

    def reward(completions, trainer_state, **kwargs):
        shares.append(trainer_state.global_step / trainer_state.max_steps)
        return [float(completion == "right") for completion in completions]

    made(reward, max_steps=2, **PAPER).train()
    assert shares == [0.0, 0.0, 0.5]  # the made-up group, and a round per step


def test_trackers_do_not_log_the_check(made):
    """TRL tells trackers how long a function took; trackio refuses it before training begins."""
    told = []

    def reward(completions, **kwargs):
        told.append(list(trainer.args.report_to))
        return [0.0] * len(completions)

    trainer = made(reward, **PAPER)
    trainer.args.report_to = ["trackio"]
    run_preflight(trainer)
    assert (told, trainer.args.report_to) == ([[]], ["trackio"])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "2+2"}, "has no column `prompt`. Its columns are `question`"),
        ({"prompt": 4}, "The first example's `prompt` is 4 (int)"),
        ({"prompt": []}, "The first example's `prompt` is [] (list)"),
        ({"prompt": [{"text": "2+2"}]}, "Expected text, or a list of messages with `role` and `content`"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_first_example_without_a_prompt_is_refused(made, row, message):
    streamed = IterableDataset.from_generator(lambda: itertools.repeat(row))  # of which no column is known before
    assert message in refusal(made(zeros, streamed, remove_unused_columns=False))


@pytest.mark.parametrize(
    ("bad", "others"), [("", "2+2"), (None, "2+2"), ([], CHAT["prompt"]), (None, CHAT["prompt"])], ids=str
)
def test_the_error_for_a_row_without_a_prompt_names_the_row(made, bad, others):
    dataset = Dataset.from_dict({"prompt": [others] * 11_000 + [bad] + [others] * 4})
    message = rf"`train_dataset` has no prompt in row 11000: it is {re.escape(repr(bad))}, .* Remove such rows"
    with pytest.raises(ValueError, match=message):
        made(zeros, dataset)
    made(zeros, dataset.select(range(10_996, 11_000)))
    with pytest.raises(ValueError, match="in row 1: it is"):
        made(zeros, dataset.select([11_001, 11_000, 0, 1]))


def test_a_stream_without_an_example_is_refused(made):
    with pytest.raises(SetupError, match="The training dataset has no prompts"):
        made(zeros, IterableDataset.from_generator(lambda: iter(()))).train()


def test_a_prompt_that_leaves_too_little_of_the_context_is_warned_of(made, caplog):
    for num_letters, is_warned in [(2032, False), (2033, True)]:  # of 2048 tokens: 16 for the completion
        caplog.clear()
        run_preflight(made(zeros, Dataset.from_dict({"prompt": ["x" * num_letters] * 4}), max_completion_length=16))
        assert (f"has {num_letters} tokens" in caplog.text) is is_warned


def test_messages_for_a_tokenizer_without_a_chat_template_are_refused_before_anything_is_sampled(made):
    trainer = made(zeros, Dataset.from_list([CHAT] * 4))
    trainer.processing_class.chat_template = None
    with pytest.raises(SetupError, match=r"chat_template is not set .* Set `chat_template_path`, or use"):
        trainer.train()


def test_a_warning_says_that_only_one_of_several_requested_processes_started(monkeypatch):
    """`accelerate launch --cpu --num_processes 2` starts only one process, with these environment variables."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    assert describe_missing_processes(1) is None
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert "told to start several processes but started only one" in describe_missing_processes(1)
    assert describe_missing_processes(2) is None
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert describe_missing_processes(1) is None
    monkeypatch.setenv("WORLD_SIZE", "")  # as if it were not set
    assert "told to start several processes but started only one" in describe_missing_processes(1)
    monkeypatch.setenv("MASTER_ADDR", "")
    assert describe_missing_processes(1) is None


# ---- First completions ----


SCREENED = {"num_generations": 8, "per_device_train_batch_size": 8, "dynamic_sampling_screen": "3"}


def best_of_eight(completions, **kwargs):
    lengths = torch.tensor([float(len(text)) for text in completions]).reshape(-1, 8)
    return (lengths == lengths.max(dim=1, keepdim=True).values).float().flatten().tolist()


def test_a_function_that_cannot_score_a_part_of_a_group_is_refused_if_a_screen_was_asked_for(made):
    said = refusal(made(best_of_eight, **SCREENED))
    assert said.startswith(
        "`dynamic_sampling_screen='3'` scores 3 completions of a group first, but the reward function "
        f"'best_of_eight' failed in line {best_of_eight.__code__.co_firstlineno + 1} of {__file__} with RuntimeError: "
        "shape"
    )
    assert said.endswith("Set `dynamic_sampling_screen='off'`, or make the function score any number of completions.")


def test_a_function_that_cannot_score_a_part_of_a_group_turns_the_default_screen_off(made, capsys):
    trainer = made(best_of_eight, **SCREENED | {"dynamic_sampling_screen": None})
    assert trainer._sampler.selection.find(Screen) is not None
    run_preflight(trainer)
    assert trainer._sampler.selection.find(Screen) is None
    assert trainer.args.dynamic_sampling_screen == "off"
    said = " ".join(capsys.readouterr().out.split())
    assert "`dynamic_sampling_screen` is off: it scores 6 completions of a group first, but the reward" in said


@pytest.mark.parametrize("screen", ["3", None])
def test_memory_that_runs_out_with_the_first_completions_is_named_and_does_not_turn_the_screen_off(made, screen):
    def reward(completions, **kwargs):
        if len(completions) < 8:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return [0.0] * 8

    said = refusal(made(reward, **SCREENED | {"dynamic_sampling_screen": screen}))
    assert said.startswith("The reward function 'reward' failed in line ")
    assert " with OutOfMemoryError: CUDA out of memory. " in said
    assert said.endswith("It needs more memory than the model leaves.")


def test_functions_are_called_with_a_group_and_with_as_few_as_a_screen_samples_first(made):
    calls = []

    def reward(completions, answer, **kwargs):
        calls.append(list(completions))
        answer.clear()
        return [0.0] * len(completions)

    run_preflight(made(reward, **SCREENED))
    assert calls == [["Answer: 0"] * 8, ["Answer: 0"] * 3]

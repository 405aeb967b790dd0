# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""What is tried before the first token."""

import re

import pytest
from datasets import Dataset, Features, IterableDataset, LargeList, Value
from helpers import ScriptedTrainer, prompts, run_preflight, tiny_config

from trl_dapo.run.preflight import SetupError, too_few_processes


def make_trainer(tiny_model, output_dir, reward, dataset=None, **settings):
    return ScriptedTrainer(
        tiny_model,
        reward,
        tiny_config(output_dir, max_steps=1, **settings),
        train_dataset=prompts(16, answer=[7] * 16) if dataset is None else dataset,
        script=lambda prompt, index: str(index % 2),
    )


def zeros(completions, **kwargs):
    return [0.0] * len(completions)


def fails(completions, answer, **kwargs):
    return [float(completion == answer.strip()) for completion in completions]


def forgets_one(completions, **kwargs):
    return [0.0] * (len(completions) - 1)


def says_yes(completions, **kwargs):
    return ["yes"] * len(completions)


async def looks_up(completions, **kwargs):
    return [kwargs["gold"]] * len(completions)


def is_infinite(completions, **kwargs):
    return [float("inf")] * len(completions)


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (fails, "The reward function 'fails' failed with AttributeError: 'list' object has no attribute 'strip'"),
        (forgets_one, "The reward function 'forgets_one' returned 3 values for 4 completions"),
        (says_yes, "The reward function 'says_yes' returned 'yes' (str) for completion 0 of 4"),
        (looks_up, "The reward function 'looks_up' failed with KeyError: 'gold'"),
        (is_infinite, "The reward function 'is_infinite' returned an infinite reward"),
    ],
)
def test_a_reward_function_that_cannot_score_is_named_before_anything_is_generated(
    tiny_model, tmp_path, reward, message
):
    trainer = make_trainer(tiny_model, tmp_path, [zeros, reward])
    with pytest.raises(SetupError, match=re.escape(message)) as error:
        trainer.train()
    assert "`skip_preflight=True` leaves that out" in str(error.value)
    assert trainer.sampled == []


def test_functions_are_called_once_with_a_group_of_the_first_example_and_nothing_of_it_is_logged(tiny_model, tmp_path):
    calls = []

    def reward(prompts, completions, completion_ids, answer, log_extra, log_metric, **kwargs):
        calls.append((list(prompts), list(completions), len(completion_ids), list(answer)))
        log_extra("verdict", ["?"] * len(prompts))
        log_metric("asked", 1.0)
        answer.clear()
        return [float(completion == "1") for completion in completions]

    trainer = make_trainer(tiny_model, tmp_path, reward)
    trainer.model.eval()
    run_preflight(trainer)
    assert calls == [(["prompt 0:"] * 4, ["Answer: 0"] * 4, 4, [7] * 4)]
    assert not trainer.model.training
    assert not trainer._pending_extra_logs
    assert not trainer._pending_metrics
    assert not trainer._metrics["train"]
    assert [len(column) for column in trainer._logs.values()] == [0] * len(trainer._logs)
    trainer.train()
    assert len(calls) > 1
    assert trainer.state.log_history[0]["reward"] == 0.5


def test_chats_are_scored_as_chats(tiny_model, tmp_path):
    seen = []

    def reward(prompts, completions, **kwargs):
        seen.extend(completions)
        return [0.0] * len(completions)

    chat = Dataset.from_list([{"prompt": [{"role": "user", "content": "2+2"}]}] * 4)
    run_preflight(make_trainer(tiny_model, tmp_path, reward, chat))
    assert seen == [[{"role": "assistant", "content": "Answer: 0"}]] * 4


def test_a_function_that_takes_a_chat_for_text_is_told_what_a_completion_is(tiny_model, tmp_path):
    def reward(completions, **kwargs):
        return [float(completion.endswith("4")) for completion in completions]

    chat = Dataset.from_list([{"prompt": [{"role": "user", "content": "2+2"}]}] * 4)
    with pytest.raises(SetupError) as error:
        run_preflight(make_trainer(tiny_model, tmp_path, reward, chat))
    said = str(error.value)
    assert "with 4 completions [{'role': 'assistant', 'content': 'Answer: 0'}]" in said
    assert 'a completion is a list of messages, its text `completion[0]["content"]`' in said
    with pytest.raises(SetupError) as error:
        run_preflight(make_trainer(tiny_model, tmp_path, fails))
    assert "with 4 completions 'Answer: 0', before" in str(error.value)
    assert "list of messages" not in str(error.value)


def silent(completions, **kwargs):
    return [None, float("nan")] * (len(completions) // 2)


@pytest.mark.parametrize(("rewards", "is_warned"), [([silent], True), ([silent, zeros], False), ([zeros], False)])
def test_an_example_that_no_function_scores_is_warned_of(tiny_model, tmp_path, caplog, rewards, is_warned):
    run_preflight(make_trainer(tiny_model, tmp_path, rewards))
    said = [record.message for record in caplog.records if "returned `None` or NaN" in record.message]
    assert len(said) == is_warned
    if is_warned:
        assert said[0].startswith("Every reward function ('silent') returned")


def test_a_function_that_scores_nothing_of_the_first_rollout_is_named_once(tiny_model, tmp_path, caplog):
    def right(completions, **kwargs):
        return [float(completion == "1") for completion in completions]

    trainer = make_trainer(tiny_model, tmp_path, [right, silent], dynamic_sampling_rewards=["right"])
    trainer.args.max_steps = 2
    trainer.train()
    said = [record.message for record in caplog.records if "scored none" in record.message]
    assert said == [
        "Of the 16 completions of the first rollout 'silent' scored none, returning `None` or NaN for each: check the "
        "columns that are read."
    ]


def test_a_function_that_reads_the_state_of_the_run_is_called_once_it_is_known(tiny_model, tmp_path):
    """A curriculum: what counts depends on how far the run has come."""
    shares = []

    def reward(completions, trainer_state, **kwargs):
        shares.append(trainer_state.global_step / trainer_state.max_steps)
        return [float(completion == "1") for completion in completions]

    trainer = make_trainer(tiny_model, tmp_path, reward, save_strategy="steps", save_steps=1)
    trainer.args.max_steps = 2
    trainer.train()
    assert shares == [0.0, 0.0, 0.5]  # the made-up group, and a round a step
    trainer = make_trainer(tiny_model, tmp_path, reward)
    trainer.args.max_steps = 4
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert shares[3:] == [0.5, 0.5, 0.75]


def test_no_tracker_is_told_of_it(tiny_model, tmp_path):
    """TRL tells trackers how long a function took; trackio refuses it before training begins."""
    told = []

    def reward(completions, **kwargs):
        told.append(list(trainer.args.report_to))
        return [0.0] * len(completions)

    trainer = make_trainer(tiny_model, tmp_path, reward)
    trainer.args.report_to = ["trackio"]
    run_preflight(trainer)
    assert told == [[]]
    assert trainer.args.report_to == ["trackio"]


def test_skipped_functions_are_not_called(tiny_model, tmp_path):
    run_preflight(make_trainer(tiny_model, tmp_path, fails, skip_preflight=True))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "2+2"}, "has no column `prompt`; its columns are `question`"),
        ({"prompt": 4}, "The first example's `prompt` is 4 (int)"),
        ({"prompt": []}, "The first example's `prompt` is [] (list)"),
        ({"prompt": [{"text": "2+2"}]}, "Expected text, or a list of messages with `role` and `content`"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_first_example_without_a_prompt_is_refused(tiny_model, tmp_path, row, message):
    def rows():
        while True:
            yield row

    streamed = IterableDataset.from_generator(rows)  # of which no column is known before
    trainer = make_trainer(tiny_model, tmp_path, zeros, streamed, remove_unused_columns=False)
    with pytest.raises(SetupError, match=re.escape(message)):
        run_preflight(trainer)


@pytest.mark.parametrize(("feature", "bad"), [(Value("large_string"), ""), (LargeList(Value("string")), [])], ids=str)
def test_a_row_without_a_prompt_is_named_in_large_columns_too(tiny_model, tmp_path, feature, bad):
    other = "2+2" if bad == "" else ["2+2"]
    dataset = Dataset.from_dict({"prompt": [other, bad]}, features=Features({"prompt": feature}))
    with pytest.raises(ValueError, match=r"`train_dataset` has no prompt in row 1: it is"):
        make_trainer(tiny_model, tmp_path, zeros, dataset)


@pytest.mark.parametrize(
    ("bad", "others"),
    [
        ("", "2+2"),
        (None, "2+2"),
        ([], [{"role": "user", "content": "2+2"}]),
        (None, [{"role": "user", "content": "2"}]),
    ],
    ids=str,
)
def test_a_row_without_a_prompt_is_named_wherever_it_stands(tiny_model, tmp_path, bad, others):
    dataset = Dataset.from_dict({"prompt": [others] * 11_000 + [bad] + [others] * 4})
    message = rf"`train_dataset` has no prompt in row 11000: it is {re.escape(repr(bad))}\. Leave such rows out"
    with pytest.raises(ValueError, match=message):
        make_trainer(tiny_model, tmp_path, zeros, dataset)
    make_trainer(tiny_model, tmp_path, zeros, dataset.select(range(10_996, 11_000)))
    with pytest.raises(ValueError, match="in row 1: it is"):
        make_trainer(tiny_model, tmp_path, zeros, dataset.select([11_001, 11_000, 0, 1]))


def test_an_empty_prompt_is_one_where_the_tokenizer_begins_it(tiny_model, tmp_path):
    """GPT-2's tokenizer has nothing to give to a model, Llama's has `<s>`."""
    dataset = Dataset.from_dict({"prompt": ["", "2+2"]})
    trainer = make_trainer(tiny_model, tmp_path, zeros, Dataset.from_dict({"prompt": ["2+2"] * 4}))
    trainer.train_dataset = dataset
    with pytest.raises(ValueError, match="in row 0: it is ''"):
        trainer._check_data()
    trainer._tokenizer = lambda text, **kwargs: {"input_ids": [1]}
    trainer._check_data()


def test_a_stream_without_an_example_is_refused(tiny_model, tmp_path):
    trainer = make_trainer(tiny_model, tmp_path, zeros, IterableDataset.from_generator(lambda: iter(())))
    with pytest.raises(SetupError, match="The training dataset holds no prompt"):
        trainer.train()


def test_a_prompt_that_leaves_too_little_of_the_context_is_warned_of(tiny_model, tmp_path, caplog):
    for num_letters, is_warned in [(2032, False), (2033, True)]:  # of 2048 tokens: 16 for the completion
        caplog.clear()
        dataset = Dataset.from_dict({"prompt": ["x" * num_letters] * 4})
        run_preflight(make_trainer(tiny_model, tmp_path, zeros, dataset, max_completion_length=16))
        assert (f"has {num_letters} tokens" in caplog.text) is is_warned


def test_messages_for_a_tokenizer_without_a_chat_template_are_refused_before_anything_is_sampled(tiny_model, tmp_path):
    dataset = Dataset.from_dict({"prompt": [[{"role": "user", "content": "1 + 1"}]] * 4})
    trainer = make_trainer(tiny_model, tmp_path, zeros, dataset)
    trainer.processing_class.chat_template = None
    with pytest.raises(SetupError, match=r"chat_template is not set .* Set `chat_template_path`, or give"):
        trainer.train()


def test_one_process_where_several_were_asked_for_is_told_of(monkeypatch):
    """What `accelerate launch --cpu --num_processes 2` leaves in the environment of the one process it starts."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    assert too_few_processes(1) is None
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert "asked for several processes and started one" in too_few_processes(1)
    assert too_few_processes(2) is None
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert too_few_processes(1) is None

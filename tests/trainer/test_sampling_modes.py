# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Surplus, pass-rate memory, other modes, and other parts of a rollout: environments, tools, asynchronous rewards."""

import ast
import inspect

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset, IterableDataset
from helpers import (
    ScriptedTrainer,
    is_dummy,
    make_trainer,
    mixed_unless_multiple_of_3,
    number,
    prompts,
    right,
    rollouts_and_the_first_policys_logps,
    scripted,
    spy_on_training,
    tiny_config,
)
from trl import GRPOTrainer

from trl_dapo import DAPOTrainer
from trl_dapo.run.ledger import read_ledger
from trl_dapo.sampling.prompt_memory import PromptMemory
from trl_dapo.settings.sampling_defaults import PAPER


# ---- Surplus ----


@pytest.mark.parametrize(
    ("surplus", "second", "carried"), [("carry", {7, 8, 10, 11}, 1), ("discard", {8, 10, 11, 13}, 0)]
)
def test_the_surplus_trains_in_the_next_rollout_if_asked_for(tiny_model, tmp_path, surplus, second, carried):
    # Two rounds of 4 prompts bring 0 1 2 3 | 4 5 6 7: groups 1 2 4 5 train, and 7 is surplus.
    settings = {"max_steps": 2, "batch_multiplier": 1.0, "dynamic_sampling_surplus": surplus}
    trainer = make_trainer(tiny_model, tmp_path, **settings)
    seen = spy_on_training(trainer)
    trainer.train()
    assert {number(text) for text, *_ in seen[:16]} == {1, 2, 4, 5}
    assert {number(text) for text, *_ in seen[16:]} == second
    logs = trainer.state.log_history
    assert logs[0]["dynamic_sampling/surplus"] == 1
    assert [logs[i]["dynamic_sampling/carried"] for i in (0, 1)] == [0, carried]
    assert [logs[i]["dynamic_sampling/groups_trained"] for i in (0, 1)] == [4, 4]


def test_a_short_rollout_that_carried_groups_says_what_it_trains_on(tiny_model, tmp_path, caplog):
    # From the prompts 0 1 2 3 | 4 5 6 7 four groups train, and 5 and 6 are carried. From 7 on no prompt is solved.
    def script(text, i):
        return "right" if 0 < number(text) < 7 and i % 4 == 0 else "wrong"

    settings = {**PAPER, "max_steps": 2, "batch_multiplier": 1.0, "dynamic_sampling_surplus": "carry"}
    trainer = make_trainer(tiny_model, tmp_path, script, dynamic_sampling_max_gen_batches=2, **settings)
    trainer.train()
    (warning,) = [record.message for record in caplog.records if "is not full" in record.message]
    assert warning.startswith(
        "The batch is not full at the limit of 2 batches of completions, this time: 0 of 8 sampled groups were "
        "accepted (dropped: all_wrong 8), and 2 were accepted earlier; a full batch has 4. "
        "This rollout trains on 2 groups. "
    )
    assert trainer.state.log_history[1]["dynamic_sampling/groups_trained"] == 2


@pytest.mark.parametrize("unit", [None, 8])
def test_carried_rows_bring_the_log_probabilities_of_the_policy_that_sampled_them(tiny_model, tmp_path, unit):
    settings = {"max_steps": 2, "batch_multiplier": 1.0, "dynamic_sampling_surplus": "carry", "learning_rate": 1e-2}
    trainer = make_trainer(tiny_model, tmp_path, pad_to_multiple_of=unit, **settings)
    (first, second), logps = rollouts_and_the_first_policys_logps(trainer)
    assert "old_per_token_logps" not in first  # all of it was sampled by the present policy
    old = second["old_per_token_logps"]
    assert old[4:].isnan().all()  # rows 4 to 15 were sampled by the present policy
    assert second["completion_mask"][:4].sum(1).tolist() == [6] * 4
    torch.testing.assert_close(old[:4, :6], logps[:4, :6], rtol=0, atol=1e-5)


# ---- Other modes ----


def test_mask_mode_samples_every_prompt_once_and_lets_dropped_groups_weigh_nothing(tiny_model, tmp_path):
    trainer = make_trainer(tiny_model, tmp_path, max_steps=1, dynamic_sampling_mode="mask")
    seen = spy_on_training(trainer)
    trainer.train()
    assert [number(text) for text in trainer.sampled[::4]] == [0, 1, 2, 3]
    assert {number(text) for text, *_, tokens in seen if tokens} == {1, 2}
    assert {number(text) for text, *_, tokens in seen if not tokens} == {0, 3}
    assert trainer.state.log_history[0]["num_loss_tokens"] == 2 * 4 * 6


def test_mask_mode_without_an_accepted_group_says_so_and_names_no_limit_of_batches(tiny_model, tmp_path, caplog):
    make_trainer(tiny_model, tmp_path, lambda text, i: "wrong", max_steps=1, dynamic_sampling_mode="mask").train()
    assert (
        "No group was accepted in this rollout (dropped: all_wrong 4), so no weights are changed. Most"
    ) in caplog.text
    assert "max_gen_batches" not in caplog.text


def test_replace_mode_samples_on_until_enough_groups_are_accepted(tiny_model, tmp_path):
    # Rounds of one prompt; three quarters of the batch of four are enough.
    settings = {"dynamic_sampling_mode": "replace", "min_replace_ratio": 0.75, "batch_multiplier": 0.25}
    trainer = make_trainer(tiny_model, tmp_path, max_steps=1, **settings)
    seen = spy_on_training(trainer)
    trainer.train()
    assert [number(text) for text in trainer.sampled[::4]] == [0, 1, 2, 3, 4]
    assert sorted(number(text) for text, *_ in seen) == [1] * 8 + [2] * 4 + [4] * 4
    assert trainer.state.log_history[0]["dynamic_sampling/rounds"] == 5


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"dynamic_sampling_surplus": "bank"}, "'discard', 'carry', got 'bank'"),
        ({"min_replace_ratio": 1.5, "dynamic_sampling_mode": "replace"}, "at most 1, got 1.5"),
        ({"dynamic_sampling_max_round_size": 0}, "at least 1, got 0"),
        ({"dynamic_sampling_max_round_size": 5}, "rounds of 5 prompts"),
        ({"eval_temperature": 0.0}, "above 0 and finite, got 0.0. For greedy decoding"),
        ({"eval_top_p": 1.5}, "at most 1, got 1.5"),
        ({"eval_top_k": -1}, "at least 0, got -1. 0 means all tokens"),
        ({"rollouts_ahead": 3}, "must be one of 0, 1, 2, got 3"),
    ],
    ids=str,
)
def test_a_setting_that_could_not_be_honoured_is_refused(tmp_path, overrides, message):
    with pytest.raises(ValueError, match=message):
        tiny_config(tmp_path, **overrides)


# ---- Pass-rate memory and prompts ----


def test_memory_passes_over_prompts_that_are_never_solved_and_is_a_file_one_can_open(tiny_model, tmp_path):
    def three_of_four(text, i):
        """
        With one correct of four, pass rates would vary less than chance, so that the memory could not tell prompts
        apart.
        """
        return "right" if number(text) % 3 and i % 4 else "wrong"

    def run(memory):
        settings = {"shuffle_dataset": False, "remove_unused_columns": False, "max_steps": 12}
        settings |= {"dynamic_sampling_memory": memory, "save_strategy": "steps", "save_steps": 12}
        data = {"train_dataset": prompts(12, id=list(range(12))), "script": three_of_four}
        trainer = ScriptedTrainer(tiny_model, right, tiny_config(tmp_path / str(memory), **settings), **data)
        trainer.train()
        return trainer

    plain, remembering = run(False), run(True)
    unsolved = [sum(number(text) % 3 == 0 for text in trainer.sampled) for trainer in (plain, remembering)]
    assert unsolved[1] < unsolved[0]
    assert sum(log.get("dynamic_sampling/skipped_by_memory", 0) for log in remembering.state.log_history) > 0
    table = pq.read_table(tmp_path / "True" / "checkpoint-12" / "dapo_memory.parquet").to_pylist()
    by_prompt = {number(f"prompt {row['prompt_id'].partition(' ')[0]}"): row for row in table}
    assert by_prompt[3]["pass_rate"] == 0.0
    assert by_prompt[4]["pass_rate"] == 3 / 4
    assert sum(row["num_seen"] for row in table) == len(remembering.sampled) // 4


@pytest.mark.parametrize("ids", [list(range(12)), ["algebra", "sums", "sets"] * 4], ids=["own ids", "categories"])
def test_each_prompt_has_a_memory_and_a_name_in_the_ledger_of_its_own_whatever_its_id(tiny_model, tmp_path, ids):
    settings = {"shuffle_dataset": False, "dynamic_sampling_memory": True, "max_steps": 3}
    data = {"train_dataset": prompts(12, id=ids), "script": mixed_unless_multiple_of_3}
    trainer = ScriptedTrainer(tiny_model, right, tiny_config(tmp_path, log_groups=100, **settings), **data)
    trainer.train()
    sampled = {number(text) for text in trainer.sampled}
    assert sampled == {*range(12)}  # a pass samples all prompts, of which a third are never solved
    assert len(trainer._sampler.selection.find(PromptMemory).prompts) == 12
    texts = {row["prompt_id"]: {row["prompt"]} for row in read_ledger(tmp_path).to_pylist() if row["prompt"]}
    assert len(texts) == 12


def test_a_dataset_smaller_than_a_rollout_batch_is_refused_with_both_numbers(tiny_model, tmp_path):
    with pytest.raises(ValueError, match="has 3 prompts, but a rollout batch needs 4"):
        make_trainer(tiny_model, tmp_path, num_prompts=3)


def test_epochs_keep_trls_number_of_optimizer_steps_and_the_passes_made_are_logged(tiny_model, tmp_path):
    trainer = make_trainer(tiny_model, tmp_path, max_steps=-1, num_train_epochs=2, num_prompts=12, **PAPER)
    trainer.train()
    assert trainer.state.global_step == 2 * 12 // 4
    generated = len(trainer.sampled) // 4
    assert trainer.state.log_history[5]["dynamic_sampling/passes"] == pytest.approx(generated / 12)


# ---- Other parts of a rollout ----


def test_a_streaming_dataset_that_does_not_know_its_columns_trains_on_those_that_trl_keeps(tiny_model, tmp_path):
    seen = []

    def right_and_note(completions, **columns):
        seen.append({*columns} & {"prompt", "solution"})
        return right(completions)

    rows = [{"prompt": f"prompt {i}:", "solution": "x"} for i in range(24)]
    stream = IterableDataset.from_generator(lambda: iter(rows))
    assert stream.column_names is None
    args = tiny_config(tmp_path, shuffle_dataset=False, max_steps=1, remove_unused_columns=True)
    data = {"train_dataset": stream, "script": mixed_unless_multiple_of_3}
    trainer = ScriptedTrainer(tiny_model, right_and_note, args, **data)
    trainer.train()
    assert trainer.state.log_history[0]["trained_reward"] == 1 / 4
    assert [number(text) for text in trainer.sampled[::4]] == list(range(len(trainer.sampled) // 4))
    assert set().union(*seen) == set()  # the column `solution` was removed, and the prompts are passed as `prompts`


def test_a_reward_of_two_rounds_has_the_spread_of_all_its_rows(tiny_model, tmp_path):
    # Round 1 has rewards of 0 and 1, round 2 of 0 and 9. The mean of their standard deviations is not that of all.
    given = []

    def grows(prompts, completions, **kwargs):
        best = 1.0 if number(prompts[0]) < 4 else 9.0
        rewards = [best if completion == "right" else 0.0 for completion in completions]
        if not is_dummy(completions[0]):
            given.extend(rewards)
        return rewards

    settings = {"max_steps": 1, "batch_multiplier": 1.0, "dynamic_sampling_screen": "off"}
    trainer = make_trainer(tiny_model, tmp_path, reward_funcs=grows, **settings)
    trainer.train()
    logs = trainer.state.log_history[0]
    assert logs["dynamic_sampling/rounds"] == 2
    expected = torch.tensor(given).std().item()
    assert logs["reward_std"] == pytest.approx(expected, rel=1e-5)
    assert logs["rewards/grows/std"] == pytest.approx(expected, rel=1e-5)
    assert logs["reward"] == pytest.approx(sum(given) / len(given))


REACHED = ["_calculate_rewards", "_compute_loss", "_generate", "_generate_and_score_completions"]
REACHED += ["_get_per_token_logps_and_entropies", "_prepare_inputs", "_tool_call_loop", "create_model_card"]


def test_what_trls_methods_reach_is_trls_in_a_trainer_that_was_made_without_its_constructor(tiny_model, tmp_path):
    """A trainer as TRL's own tests make it: with `__new__` and the attributes that `GRPOTrainer` would have."""
    tree = ast.parse(inspect.getsource(inspect.getmodule(GRPOTrainer)))
    called = {
        node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self"
    }
    classes = [kind for kind in DAPOTrainer.__mro__ if kind.__module__.startswith("trl_dapo")]
    overridden = {name for kind in classes for name in vars(kind) if callable(getattr(GRPOTrainer, name, None))}
    assert sorted(name for name in overridden & called if not name.startswith("__")) == REACHED

    def run(kind):
        args = tiny_config(tmp_path, use_dynamic_sampling=False)
        made = scripted(GRPOTrainer, mixed_unless_multiple_of_3)(tiny_model, right, args, train_dataset=prompts(8))
        trainer = object.__new__(scripted(kind, mixed_unless_multiple_of_3))
        vars(trainer).update(vars(made))
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = 4
        batch = [example for example in prompts(4) for _ in range(4)]
        rollout = trainer._prepare_inputs(batch)  # sampling, scoring and log-probabilities
        return trainer._compute_loss(trainer.model, rollout).item(), dict(trainer._metrics["train"])

    (loss, metrics), (expected, expected_metrics) = run(DAPOTrainer), run(GRPOTrainer)
    assert loss == expected
    assert metrics.keys() == expected_metrics.keys()


def test_carried_rows_of_a_rollout_function_get_the_policys_log_probabilities(tiny_model, tmp_path):
    def rollout(texts, trainer):
        encode = trainer.processing_class
        completions = ["right" if i % 4 == 0 else "wrong" for i in range(len(texts))]
        ids = [encode(completion)["input_ids"] + [encode.eos_token_id] for completion in completions]
        return {
            "prompt_ids": [encode(text)["input_ids"] for text in texts],
            "completion_ids": ids,
            "logprobs": [[0.0] * len(row) for row in ids],
            "verdict": [completion == "right" for completion in completions],
        }

    def verdict_reward(verdict, **kwargs):
        return [float(value) for value in verdict]

    args = tiny_config(tmp_path, shuffle_dataset=False, max_steps=2, dynamic_sampling_surplus="carry")
    trainer = DAPOTrainer(tiny_model, verdict_reward, args, train_dataset=prompts(24), rollout_func=rollout)
    # As with an engine that schedules completions: one round of twice the batch, all of which is accepted.
    trainer._sampler.selection.max_round_size, trainer._sampler.selection.batch_multiplier = None, 2.0
    seen = spy_on_training(trainer)
    trainer.train()
    assert {number(text) for text, *_ in seen[:16]} == {0, 1, 2, 3}
    assert {number(text) for text, *_ in seen[16:]} == {4, 5, 6, 7}
    # Placeholders of 0 would give a ratio of exp(-4.6) for this model's hundred tokens, so punished tokens would be
    # clipped.
    log = trainer.state.log_history[1]
    assert (log["dynamic_sampling/carried"], log["dynamic_sampling/rounds"]) == (4, 0)
    assert log["clip_ratio/region_mean"] < 0.05


def test_a_column_of_a_rollout_function_may_be_of_a_type_that_a_checkpoint_cannot_hold(tiny_model, tmp_path):
    def rollout(texts, trainer):
        encode = trainer.processing_class
        completions = ["right" if i % 4 == 0 else "wrong" for i in range(len(texts))]
        return {
            "prompt_ids": [encode(text)["input_ids"] for text in texts],
            "completion_ids": [encode(completion)["input_ids"] for completion in completions],
            "logprobs": [[0.0] * len(encode(completion)["input_ids"]) for completion in completions],
            "verdict": [np.float64(completion == "right") for completion in completions],
        }

    def verdict_reward(verdict, **kwargs):
        return [float(value) for value in verdict]

    def carried_in(max_steps, checkpoint=None):
        settings = {"dynamic_sampling_surplus": "carry", "save_strategy": "steps", "save_steps": 1}
        args = tiny_config(tmp_path, shuffle_dataset=False, max_steps=max_steps, **settings)
        trainer = DAPOTrainer(tiny_model, verdict_reward, args, train_dataset=prompts(24), rollout_func=rollout)
        trainer._sampler.selection.max_round_size, trainer._sampler.selection.batch_multiplier = None, 2.0
        trainer.train(resume_from_checkpoint=checkpoint)
        return [log["dynamic_sampling/carried"] for log in trainer.state.log_history if "loss" in log]

    assert carried_in(1) == [0]
    assert carried_in(2, checkpoint=True) == [0, 4]


def test_no_environment_is_reset_twice_for_one_rollout(tiny_model, tmp_path, monkeypatch):
    """
    The observation of the environment is appended to the prompt, and is only requested once per sampled completion.
    """
    monkeypatch.setattr("trl.trainer.grpo_trainer.supports_tool_calling", lambda *args: True)
    monkeypatch.setattr("trl.trainer.grpo_trainer.is_chat_template_prefix_preserving", lambda *args: True)
    monkeypatch.setattr("trl.trainer.grpo_trainer.add_response_schema", lambda processing_class: processing_class)
    resets = []

    class Counting:
        def reset(self, **kwargs):
            self.number = kwargs["number"]
            resets.append(self.number)
            return f" {kwargs['number']}:"

        def look(self) -> str:
            """Looks around."""
            return "nothing"

    chats = Dataset.from_dict({"prompt": [[{"role": "user", "content": "prompt"}]] * 24, "number": list(range(24))})

    def right_answer(completions, **kwargs):
        return right([completion[0]["content"] for completion in completions])

    def script(text, i):
        return "right" if number(text.replace("<eos>", " ")) % 3 and i % 4 == 0 else "wrong"

    args = tiny_config(tmp_path, shuffle_dataset=False, max_steps=2)
    data = {"train_dataset": chats, "script": script, "environment_factory": Counting}
    trainer = ScriptedTrainer(tiny_model, right_answer, args, **data)
    seen = spy_on_training(trainer)
    trainer.train()
    assert len(resets) == len(trainer.sampled)
    # TRL's users read this after a rollout: the environments of the batch that was sampled last.
    last = [environment.number for environment in trainer.environments]
    assert last == resets[-len(last) :]
    assert all("prompt " in text for text, *_ in seen)  # the observation is in the prompt that trains
    assert trainer.state.log_history[0]["trained_reward"] == 1 / 4

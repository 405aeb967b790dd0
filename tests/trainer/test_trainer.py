# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The sampling phase, by its behaviour: what is sampled, what trains, and what is said about it."""

import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace

import jobs
import pytest
import torch
from datasets import Dataset
from helpers import (
    ScriptedTrainer,
    make_trainer,
    mixed_unless_multiple_of_3,
    number,
    prompts,
    right,
    spy_on_training,
    tiny_config,
    weights,
)
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from trl_dapo import DAPOConfig, DAPOTrainer
from trl_dapo.engines import seam
from trl_dapo.run.stopwatch import Stopwatch
from trl_dapo.sampling.rounds import Rows


# ---- Sample until full ----


def test_a_rollout_is_full_of_accepted_groups_in_prompt_order(tiny_model, tmp_path):
    trainer = make_trainer(tiny_model, tmp_path, max_steps=1)
    seen = spy_on_training(trainer)
    trainer.train()
    # 4 groups of 4 train. Prompts 0 and 3 are dropped, so 1, 2, 4 and 5 are the first four that are accepted.
    assert sorted(number(text) for text, *_ in seen) == [1] * 4 + [2] * 4 + [4] * 4 + [5] * 4


def test_a_reward_function_that_changes_what_it_is_handed_changes_nothing_that_trains(tiny_model, tmp_path):
    def careless(prompts, completions, completion_ids, **kwargs):
        rewards = right(completions)
        for ids in completion_ids:
            ids.pop()  # the end
        return rewards

    trained, weights_after = [], []
    for name, reward in (("careful", right), ("careless", careless)):
        trainer = make_trainer(tiny_model, tmp_path / name, reward_funcs=reward, max_steps=2, skip_preflight=True)
        trained.append(spy_on_training(trainer))
        trainer.train()
        weights_after.append(weights(trainer))
    assert trained[0] == trained[1]
    assert torch.equal(*weights_after)


def test_a_reward_function_that_changes_a_message_changes_nothing_that_is_remembered():
    answer = [{"role": "assistant", "content": "right"}]
    rows = Rows.from_generated(([[1]], [[2]], None, [answer], None, {}, None, []), ["2+2"])
    answer[0]["content"] = "changed"
    assert rows.completions == [[{"role": "assistant", "content": "right"}]]


def test_dropped_groups_never_reach_the_loss(tiny_model, tmp_path):
    trainer = make_trainer(tiny_model, tmp_path, max_steps=3)
    seen = spy_on_training(trainer)
    trainer.train()
    assert len(seen) == 3 * 16
    assert all(number(text) % 3 for text, *_ in seen)
    assert {number(text) % 3 for text in trainer.sampled} == {0, 1, 2}  # they were sampled, though


def test_advantages_are_normalised_within_each_group(tiny_model, tmp_path):
    trainer = make_trainer(tiny_model, tmp_path, max_steps=1)
    seen = spy_on_training(trainer)
    trainer.train()
    # One of four is right: mean 1/4, standard deviation (with Bessel's correction) 1/2.
    for _, completion, advantage, _ in seen:
        expected = 3 / 4 if completion == "right" else -1 / 4
        assert advantage == pytest.approx(expected / (1 / 2 + 1e-4), rel=1e-5)


def test_an_all_wrong_group_of_different_lengths_is_dropped_although_its_total_reward_varies(tiny_model, tmp_path):
    def script(text, i):
        if number(text) % 2:
            return ["right", "no", "no", "no"][i % 4]
        return ["no", "noo", "noooooo...", "noooooooo..."][i % 4]

    trainer = make_trainer(tiny_model, tmp_path, script, max_steps=1, overlong_buffer_length=4)
    seen = spy_on_training(trainer)
    trainer.train()
    assert {number(text) for text, *_ in seen} == {1, 3, 5, 7}
    assert trainer.state.log_history[0]["rewards/soft_overlong_punishment/mean"] < 0  # the totals did vary


def test_refills_go_on_in_the_same_pass_and_repeat_no_prompt(tiny_model, tmp_path):
    trainer = make_trainer(tiny_model, tmp_path, max_steps=2, num_prompts=24)
    trainer.train()
    groups = [number(text) for text in trainer.sampled[::4]]
    assert groups == list(range(len(groups)))


def test_evaluation_is_left_alone(tiny_model, tmp_path):
    trainer = make_trainer(tiny_model, tmp_path, per_device_eval_batch_size=4)
    metrics = trainer.evaluate(prompts(2).map(lambda _, i: {"prompt": f"prompt {3 * i}:"}, with_indices=True))
    assert sorted(trainer.sampled) == ["prompt 0:"] * 4 + ["prompt 3:"] * 4  # never solved, yet kept
    assert metrics["eval_reward"] == 0.0
    assert not any("dynamic_sampling" in name for name in metrics)


def test_a_group_outside_the_accuracy_band_is_dropped(tiny_model, tmp_path):
    def script(text, i):
        return "right" if i % 4 < number(text) % 4 else "wrong"  # accuracy 0, 1/4, 1/2, 3/4

    trainer = make_trainer(tiny_model, tmp_path, script, max_steps=1, dynamic_sampling_min_accuracy=0.25)
    seen = spy_on_training(trainer)
    trainer.train()
    assert {number(text) for text, *_ in seen} == {2, 3, 6, 7}
    logs = trainer.state.log_history[0]
    assert logs["dynamic_sampling/dropped/outside_band"] >= 2
    assert logs["dynamic_sampling/dropped/all_wrong"] >= 2


def test_only_the_named_reward_functions_decide(tiny_model, tmp_path):
    def style(completions, **kwargs):
        return [float(i % 2) for i, _ in enumerate(completions)]

    trainer = make_trainer(
        tiny_model, tmp_path, reward_funcs=[right, style], max_steps=1, dynamic_sampling_rewards=["right"]
    )
    seen = spy_on_training(trainer)
    trainer.train()
    assert all(number(text) % 3 for text, *_ in seen)


def test_weights_that_a_callback_changes_decide_from_then_on(tiny_model, tmp_path):
    """Advantages follow `reward_weights` at once, and so does what is dropped."""

    def style(completions, **kwargs):
        return [float(i % 2) for i, _ in enumerate(completions)]

    class RightAlone(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            trainer.reward_weights = torch.tensor([1.0, 0.0])

    trainer = make_trainer(tiny_model, tmp_path, reward_funcs=[right, style], max_steps=2, num_prompts=12)
    trainer.add_callback(RightAlone())
    seen = spy_on_training(trainer)
    trainer.train()
    assert [sorted({number(text) for text, *_ in rows}) for rows in (seen[:16], seen[16:])] == [
        [0, 1, 2, 3],  # every group differs in style
        [4, 5, 7, 8],  # of 4 to 7 number 6 has no right completion
    ]


def test_a_users_rule_decides_alone_and_its_reasons_are_counted(tiny_model, tmp_path, capsys):
    def odd_only(rewards, rows):
        assert len(rows) == len(rewards["right"]) == 4
        assert {row["prompt"] for row in rows} == {rows[0]["prompt"]}
        assert {row["length"] for row in rows} == {6}
        assert not any(row["truncated"] for row in rows)
        return None if number(rows[0]["prompt"]) % 2 else "even"

    args = tiny_config(tmp_path, shuffle_dataset=False, max_steps=1)
    trainer = ScriptedTrainer(
        tiny_model,
        right,
        args,
        train_dataset=prompts(24),
        script=mixed_unless_multiple_of_3,
        group_filter=odd_only,
    )
    seen = spy_on_training(trainer)
    trainer.train()
    assert {number(text) for text, *_ in seen} == {1, 3, 5, 7}  # 3 is all wrong: nothing else decides
    assert trainer.state.log_history[0]["dynamic_sampling/dropped/even"] >= 4
    assert "`group_filter` decides which groups train." in capsys.readouterr().out


@pytest.mark.parametrize(
    "overrides", [{"dynamic_sampling_min_accuracy": 0.25}, {"dynamic_sampling_memory": True}], ids=str
)
def test_what_a_users_rule_would_overrule_is_refused_beside_it(tiny_model, tmp_path, overrides):
    with pytest.raises(ValueError, match="has no effect beside a `group_filter`"):
        DAPOTrainer(
            tiny_model,
            right,
            tiny_config(tmp_path, **overrides),
            train_dataset=prompts(24),
            group_filter=lambda rewards, rows: None,
        )


def test_a_users_rule_that_nothing_would_ask_is_refused(tiny_model, tmp_path):
    args = tiny_config(tmp_path, use_dynamic_sampling=False)
    with pytest.raises(ValueError, match=r"has no effect with `use_dynamic_sampling=False`. Leave it out"):
        DAPOTrainer(tiny_model, right, args, train_dataset=prompts(24), group_filter=lambda rewards, rows: None)


def test_a_users_rule_that_cannot_be_called_is_refused(tiny_model, tmp_path):
    with pytest.raises(TypeError, match=r"must be a callable of a group's rewards and rows, got 'all_wrong'"):
        DAPOTrainer(tiny_model, right, tiny_config(tmp_path), train_dataset=prompts(24), group_filter="all_wrong")


def test_a_users_rule_that_could_not_tell_two_rewards_apart_is_refused(tiny_model, tmp_path):
    rewards = [lambda completions, **kwargs: [0.0] * len(completions)] * 2
    with pytest.raises(ValueError, match=r"2 reward functions are called '<lambda>'. Give each a name"):
        DAPOTrainer(
            tiny_model,
            rewards,
            tiny_config(tmp_path),
            train_dataset=prompts(24),
            group_filter=lambda rewards, rows: None,
        )


@pytest.mark.parametrize(
    ("scaling", "threshold", "verdict"),
    [([0.0, 1.0, 5.0, 10.0], 0.0, "right"), ([0.0, 1.0, -1.0, 1.0], 1.0, "wrong")],
)
def test_a_threshold_that_no_scaled_reward_can_be_on_either_side_of_is_refused(
    tiny_model, tmp_path, scaling, threshold, verdict
):
    args = tiny_config(tmp_path, reward_scaling=scaling, dynamic_sampling_accuracy_threshold=threshold)
    with pytest.raises(ValueError, match=f"makes every completion {verdict}.* Set the threshold between them"):
        DAPOTrainer(tiny_model, right, args, train_dataset=prompts(24))


def test_the_reward_functions_of_a_trainer_are_the_objects_it_was_given(tiny_model, tmp_path):
    class Counts:
        num_calls = 0

        def __call__(self, completions, **kwargs):
            self.num_calls += 1
            return right(completions)

    counts = Counts()
    trainer = make_trainer(tiny_model, tmp_path, reward_funcs=[counts], max_steps=1, skip_preflight=True)
    trainer.train()
    assert trainer.reward_funcs == [counts]
    assert trainer.reward_funcs[0].num_calls == trainer.state.log_history[0]["dynamic_sampling/rounds"]


def well_formed(completions, **kwargs):
    return [1.0] * len(completions)


def test_an_accuracy_and_a_format_reward_are_said_to_decide_by_their_sum(tiny_model, tmp_path, capsys):
    trainer = make_trainer(
        tiny_model, tmp_path, reward_funcs=[right, well_formed], max_steps=1, per_device_eval_batch_size=4
    )
    trainer.train()
    said = capsys.readouterr().out
    assert "the weighted sum of 'right', 'well_formed' differs within it" in said
    assert "`dynamic_sampling_rewards`" in said
    metrics = trainer.evaluate(prompts(2))
    assert metrics["eval_rewards/well_formed/mean"] == 1.0
    assert not any("@" in name for name in metrics)  # format alone would make every completion right


def test_with_the_accuracy_reward_named_it_alone_says_what_is_right(tiny_model, tmp_path):
    trainer = make_trainer(
        tiny_model,
        tmp_path,
        reward_funcs=[right, well_formed],
        per_device_eval_batch_size=4,
        dynamic_sampling_rewards=["right"],
    )
    metrics = trainer.evaluate(prompts(2))  # prompt 0 is never solved, prompt 1 once in four
    assert (metrics["eval_avg@4"], metrics["eval_pass@4"]) == (1 / 8, 1 / 2)


def test_the_memory_is_refused_where_nothing_says_what_is_right(tiny_model, tmp_path):
    with pytest.raises(ValueError, match="`dynamic_sampling_memory=True` needs to know which completions are right"):
        make_trainer(tiny_model, tmp_path, reward_funcs=[right, well_formed], dynamic_sampling_memory=True)


@pytest.mark.parametrize(
    ("scaling", "threshold", "expected"),
    [
        ([0.0, 1.0, -1.0, 1.0], 0.0, 0.25),  # 0.25 becomes -0.5: wrong in training, and in evaluation too
        ([0.0, 1.0, 0.0, 10.0], 5.0, 0.25),  # 1 becomes 10, 0.25 becomes 2.5
        (None, 0.0, 1.0),
    ],
)
def test_evaluation_gives_the_verdict_that_training_would_give(tiny_model, tmp_path, scaling, threshold, expected):
    def graded(completions, **kwargs):
        return [1.0 if completion == "right" else 0.25 for completion in completions]

    trainer = make_trainer(
        tiny_model,
        tmp_path,
        reward_funcs=graded,
        per_device_eval_batch_size=4,
        reward_scaling=scaling,
        dynamic_sampling_accuracy_threshold=threshold,
    )
    metrics = trainer.evaluate(prompts(3).select([1, 2]))
    assert metrics["eval_avg@4"] == expected
    assert metrics["eval_reward"] == pytest.approx((1 + 3 * 0.25) / 4)  # as it is


def test_a_group_whose_only_right_completion_is_cut_off_is_dropped_under_overlong_filtering(tiny_model, tmp_path):
    def starts_right(completions, **kwargs):
        return [float(completion.startswith("right")) for completion in completions]

    def script(text, i):
        return ("right..." if number(text) % 2 else "right") if i % 4 == 0 else "wrong"

    trainer = make_trainer(tiny_model, tmp_path, script, starts_right, max_steps=1, overlong_filtering=True)
    seen = spy_on_training(trainer)
    trainer.train()
    assert {number(text) for text, *_ in seen} == {0, 2, 4, 6}
    assert trainer.state.log_history[0]["dynamic_sampling/dropped/masked"] >= 3


# ---- Short rollouts ----


def one_prompt_in_40(text, i):
    return "right" if number(text) == 2 and i % 4 == 0 else "wrong"


def test_a_short_rollout_trains_on_what_was_found_and_filler_rows_weigh_nothing(tiny_model, tmp_path):
    trainer = make_trainer(
        tiny_model, tmp_path, one_prompt_in_40, num_prompts=40, max_steps=1, dynamic_sampling_max_rounds=2
    )
    seen = spy_on_training(trainer)
    trainer.train()
    live = [row for row in seen if row[3] > 0]
    assert len(seen) == 16
    assert [number(text) for text, *_ in live] == [2] * 4
    assert [tokens for *_, tokens in live] == [6] * 4  # "right" and "wrong" have 5 letters and an end
    assert all(advantage == 0 for *_, advantage, tokens in seen if tokens == 0)
    logs = trainer.state.log_history[0]
    assert logs["dynamic_sampling/tokens_trained"] == 24
    assert (logs["dynamic_sampling/groups_trained"], logs["dynamic_sampling/shortfall"]) == (1, 3)
    assert logs["filtered_reward"] == 1 / 4


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo"])
def test_filler_does_not_change_the_gradient(tiny_model, tmp_path, loss_type):
    settings = {"max_steps": 1, "loss_type": loss_type}
    short = make_trainer(
        tiny_model, tmp_path, one_prompt_in_40, num_prompts=40, dynamic_sampling_max_rounds=2, **settings
    )
    short.train()
    exact = make_trainer(
        tiny_model,
        tmp_path,
        lambda text, i: "right" if i % 4 == 0 else "wrong",
        per_device_train_batch_size=1,
        num_prompts=3,
        **settings,
    )
    exact._sampler.stream.take(2)  # so that prompt 2 comes next
    exact.train()
    assert short.state.log_history[0]["grad_norm"] == pytest.approx(exact.state.log_history[0]["grad_norm"], rel=1e-4)
    torch.testing.assert_close(weights(short), weights(exact), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_a_rollout_without_any_accepted_group_moves_no_weight_not_even_by_momentum(tiny_model, tmp_path, loss_type):
    solved_at_first = {"on": True}

    def script(text, i):
        return "right" if solved_at_first["on"] and i % 4 == 0 else "wrong"

    settings = {"weight_decay": 0.1, "dynamic_sampling_max_rounds": 2, "loss_type": loss_type}
    trainer = make_trainer(tiny_model, tmp_path, script, max_steps=3, **settings)
    history = []

    class Watch(trainer_callback()):
        def on_step_end(self, args, state, control, **kwargs):
            solved_at_first["on"] = False
            history.append(weights(trainer))

    trainer.add_callback(Watch())
    before = weights(trainer)
    trainer.train()
    assert not torch.equal(before, history[0])
    assert torch.equal(history[0], history[1])
    assert torch.equal(history[0], history[2])
    assert all(math.isfinite(log["loss"]) for log in trainer.state.log_history if "loss" in log)


def trainer_callback():
    from transformers import TrainerCallback

    return TrainerCallback


def test_a_run_that_solves_nothing_says_so(tiny_model, tmp_path, caplog):
    trainer = make_trainer(tiny_model, tmp_path, lambda text, i: "wrong", max_steps=2, dynamic_sampling_max_rounds=2)
    trainer.train()
    (warning,) = [record.message for record in caplog.records if "fell short" in record.message]
    assert "0 of 8 groups accepted in 2 rounds, 4 needed (dropped: all_wrong 8)" in warning
    assert "too hard" in warning
    assert trainer.state.log_history[0]["dynamic_sampling/acceptance_rate"] == 0.0


def test_error_mode_stops_with_the_counts_and_the_way_out(tiny_model, tmp_path):
    trainer = make_trainer(
        tiny_model,
        tmp_path,
        lambda text, i: "right",
        dynamic_sampling_max_rounds=3,
        dynamic_sampling_on_exhausted="error",
    )
    with pytest.raises(
        RuntimeError, match=r"0 of 12 groups accepted in 3 rounds, 4 needed \(dropped: all_correct 12\)"
    ):
        trainer.train()


# ---- Metrics and logs ----


def test_the_metrics_count_what_was_sampled_and_what_trains(tiny_model, tmp_path):
    trainer = make_trainer(tiny_model, tmp_path, max_steps=1)
    trainer.train()
    logs = {name.removeprefix("dynamic_sampling/"): value for name, value in trainer.state.log_history[0].items()}
    # Round 1 draws prompts 0 to 3 and keeps 1 and 2; the later rounds go on until two more are found.
    generated = len(trainer.sampled) // 4
    dropped = sum(1 for i in range(generated) if i % 3 == 0)
    assert logs["groups_generated"] == generated
    assert logs["completions_generated"] == 4 * generated
    assert logs["tokens_generated"] == 4 * generated * 6
    assert logs["dropped/all_wrong"] == dropped
    assert logs["surplus"] == generated - dropped - 4
    assert logs["acceptance_rate"] == pytest.approx(1 - dropped / generated)
    assert (logs["groups_trained"], logs["completions_trained"], logs["tokens_trained"]) == (4, 16, 96)
    assert logs["passes"] == pytest.approx(generated / 24)
    assert logs["rounds"] >= 2
    # One completion in four of each accepted group is right.
    assert logs["reward"] == pytest.approx((generated - dropped) / generated / 4)
    assert logs["filtered_reward"] == 1 / 4
    assert logs["completions/mean_length"] == 6


def test_the_time_of_a_rollout_is_told_apart_by_what_it_went_to(tiny_model, tmp_path, monkeypatch):
    now = 100.0

    def pass_time(seconds):
        nonlocal now
        now += seconds

    def slow_right(completions, **kwargs):
        pass_time(2.0)
        return right(completions)

    class Slow(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            pass_time(5.0)

        def on_save(self, args, state, control, **kwargs):
            pass_time(7.0)

    monkeypatch.setattr("trl_dapo.run.stopwatch.time", SimpleNamespace(perf_counter=lambda: now))
    generate = ScriptedTrainer._generate_single_turn
    monkeypatch.setattr(
        ScriptedTrainer, "_generate_single_turn", lambda self, *args: (pass_time(10.0), generate(self, *args))[1]
    )
    save_state = seam.save_state
    monkeypatch.setattr(seam, "save_state", lambda *args: (pass_time(3.0), save_state(*args)))
    args = tiny_config(
        tmp_path,
        shuffle_dataset=False,
        skip_preflight=True,
        save_strategy="steps",
        save_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        per_device_eval_batch_size=4,
    )
    data = {"train_dataset": prompts(24), "eval_dataset": prompts(1)}
    trainer = ScriptedTrainer(tiny_model, slow_right, args, script=mixed_unless_multiple_of_3, **data)
    trainer.add_callback(Slow())
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    rounds = [int(entry["dynamic_sampling/rounds"]) for entry in logs]
    timelines = [
        {name.removeprefix("timeline/"): value for name, value in entry.items() if name.startswith("timeline/")}
        for entry in logs
    ]
    first = {"sampling_seconds": 10.0 * rounds[0], "rewards_seconds": 2.0 * rounds[0]}
    assert timelines[0] == {**first, "update_seconds": 0.0, "other_seconds": 0.0}
    # Since then a step of 5 s, an evaluation (10 s and 2 s) and a checkpoint, of whose 10 s 7 are a callback's.
    second = {"sampling_seconds": 10.0 * rounds[1], "rewards_seconds": 2.0 * rounds[1]}
    assert timelines[1] == {**second, "update_seconds": 5.0 + 7.0, "other_seconds": 12.0 + 3.0}


def test_the_time_of_a_rollout_is_logged_without_dynamic_sampling_too(tiny_model, tmp_path, monkeypatch):
    now = 0.0

    def slow_right(completions, **kwargs):
        nonlocal now
        now += 2.0
        return right(completions)

    class Slow(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            nonlocal now
            now += 5.0

    monkeypatch.setattr("trl_dapo.run.stopwatch.time", SimpleNamespace(perf_counter=lambda: now))
    args = tiny_config(tmp_path, use_dynamic_sampling=False, skip_preflight=True)
    trainer = ScriptedTrainer(
        tiny_model, slow_right, args, train_dataset=prompts(24), script=mixed_unless_multiple_of_3
    )
    trainer.add_callback(Slow())
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["timeline/rewards_seconds"] for entry in logs] == [2.0] * len(logs)
    assert [entry["timeline/update_seconds"] for entry in logs] == [0.0] + [5.0] * (len(logs) - 1)


@pytest.mark.parametrize(
    ("spent", "timeline"),
    [
        # In turns with a server: it samples for 6 s of 20, and idles but for an evaluation of 3.
        (
            {"engine": 6.0, "rewards": 1.0, "evaluation": 3.0, "checkpoint": 2.0},
            {"sampling": 6.0, "rewards": 1.0, "update": 8.0, "other": 5.0, "wait": 6.0, "idle": 11.0},
        ),
        # Ahead: 9 s beside the trainer, which waited for 4 of them, and a second round of 5.
        (
            {"ahead": 9.0, "wait": 4.0, "engine": 5.0},
            {"sampling": 14.0, "rewards": 0.0, "update": 11.0, "other": 0.0, "wait": 9.0, "idle": 6.0},
        ),
    ],
    ids=["in turns", "ahead"],
)
def test_a_server_and_the_trainer_each_fill_the_time_of_a_rollout(spent, timeline, monkeypatch):
    times = iter([100.0, 120.0])
    monkeypatch.setattr("trl_dapo.run.stopwatch.time", SimpleNamespace(perf_counter=lambda: next(times)))
    stopwatch = Stopwatch(has_server=True)
    stopwatch.lap()
    for name, seconds in spent.items():
        stopwatch.add(name, seconds)
    assert stopwatch.timeline() == {f"timeline/{name}_seconds": value for name, value in timeline.items()}


def test_what_reward_functions_log_stays_with_its_completion(tiny_model, tmp_path):
    def right_and_log(completions, prompts, log_extra, log_metric, **kwargs):
        log_extra("echo", [f"{prompt}{completion}" for prompt, completion in zip(prompts, completions, strict=True)])
        log_metric("answered", 1.0)
        return right(completions)

    trainer = make_trainer(tiny_model, tmp_path, reward_funcs=right_and_log, max_steps=1)
    trainer.train()
    logs = trainer._logs
    assert len(logs["prompt"]) == 16
    assert list(logs["extra"]["echo"]) == [p + c for p, c in zip(logs["prompt"], logs["completion"], strict=True)]
    assert trainer.state.log_history[0]["answered"] == 1.0


# ---- Drop-in ----


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"num_iterations": 2},
        # Where a rollout makes two optimizer steps, TRL's token mean takes their average token count and ours each its
        # own; TRL's other losses are TRL's.
        {"steps_per_generation": 8, "loss_type": "grpo"},
        {"beta": 0.1},
    ],
    ids=str,
)
def test_without_dynamic_sampling_and_with_trls_values_losses_equal_grpotrainers_step_for_step(
    tiny_model, tmp_path, overrides
):
    def length(completions, **kwargs):
        return [float(len(set(completion))) for completion in completions]

    trls = {
        field.name: field.default
        for field in dataclasses.fields(GRPOConfig)
        if field.name in ("epsilon", "epsilon_high", "beta", "loss_type")
    }
    ours = tiny_config(tmp_path, use_dynamic_sampling=False, **{**trls, "max_steps": 6, **overrides})
    ours_only = {field.name for field in dataclasses.fields(DAPOConfig)} - {
        field.name for field in dataclasses.fields(GRPOConfig)
    }
    settings = {
        field.name: getattr(ours, field.name)
        for field in dataclasses.fields(DAPOConfig)
        if field.init and field.name not in ours_only and field.name != "generation_batch_size"
    }
    history = []
    for trainer_class, args in ((GRPOTrainer, GRPOConfig(**settings)), (DAPOTrainer, ours)):
        trainer = trainer_class(tiny_model, length, args, train_dataset=prompts(24))
        trainer.train()
        history.append([log for log in trainer.state.log_history if "loss" in log])
    assert len(history[0]) == 6
    for theirs, mine in zip(*history, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-4, abs=1e-6)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
        for name in {"reward", "entropy", "completions/mean_length", "clip_ratio/region_mean"} & theirs.keys():
            assert mine[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), name


def test_without_args_a_dapo_config_is_made(tiny_model, tmp_path, monkeypatch):
    @dataclasses.dataclass
    class OnTheCPU(DAPOConfig):
        use_cpu: bool = True
        bf16: bool = False

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("trl_dapo.construction.DAPOConfig", OnTheCPU)
    trainer = DAPOTrainer(tiny_model, right, train_dataset=prompts(8))
    assert type(trainer.args) is OnTheCPU
    assert trainer.args.output_dir.endswith("-DAPO")


def test_a_plain_grpo_config_is_refused_with_the_fix_in_the_message(tiny_model, tmp_path):
    args = GRPOConfig(str(tmp_path), bf16=False, use_cpu=True)
    with pytest.raises(TypeError, match=r"Replace `GRPOConfig\(...\)` by `DAPOConfig\(...\)`"):
        DAPOTrainer(tiny_model, right, args, train_dataset=prompts(8))


def test_a_dictionary_as_args_is_refused_with_the_fix_in_the_message(tiny_model):
    with pytest.raises(TypeError, match=r"got `dict`. Replace `{...}` by `DAPOConfig\(\*\*{...}\)`"):
        DAPOTrainer(tiny_model, right, {"output_dir": "out"}, train_dataset=prompts(8))


def test_unknown_deciding_rewards_are_refused_with_the_known_ones(tiny_model, tmp_path):
    with pytest.raises(ValueError, match="names 'acc', but the reward functions are 'right'"):
        make_trainer(tiny_model, tmp_path, dynamic_sampling_rewards=["acc"])


def test_a_length_penalty_may_not_decide(tiny_model, tmp_path):
    with pytest.raises(ValueError, match="'soft_overlong_punishment', a length penalty"):
        make_trainer(
            tiny_model, tmp_path, overlong_buffer_length=4, dynamic_sampling_rewards=["soft_overlong_punishment"]
        )


def test_the_users_list_of_reward_functions_is_left_as_it_was(tiny_model, tmp_path):
    reward_funcs = [right]
    trainer = make_trainer(tiny_model, tmp_path, reward_funcs=reward_funcs, overlong_buffer_length=4)
    assert reward_funcs == [right]
    assert trainer.reward_func_names == ["right", "soft_overlong_punishment"]


# ---- Data and rewards that cannot work ----


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (Dataset.from_dict({"question": ["?"] * 8}), "`train_dataset` has no column `prompt`; its columns are `quest"),
        (prompts(8, answer=["1"] * 8), "reward function 'exact' asks for `solution`, which `train_dataset` does not"),
    ],
)
def test_columns_that_are_missing_are_named_before_anything_is_sampled(tiny_model, tmp_path, dataset, message):
    def exact(completions, solution, **kwargs):
        return [0.0] * len(completions)

    with pytest.raises(ValueError, match=message):
        DAPOTrainer(tiny_model, exact, tiny_config(tmp_path), train_dataset=dataset)


def test_a_column_that_only_the_evaluation_lacks_is_named_too(tiny_model, tmp_path):
    def exact(completions, solution, **kwargs):
        return [0.0] * len(completions)

    data = {"train_dataset": prompts(8, solution=["1"] * 8), "eval_dataset": {"aime": prompts(8)}}
    with pytest.raises(ValueError, match=r"which `eval_dataset\['aime'\]` does not have"):
        DAPOTrainer(tiny_model, exact, tiny_config(tmp_path), **data)


def test_columns_that_a_transform_makes_are_not_refused(tiny_model, tmp_path):
    raw = Dataset.from_dict({"question": [f"prompt {i}:" for i in range(8)]})
    raw.set_transform(lambda batch: {"prompt": batch["question"], "solution": ["1"] * len(batch["question"])})

    def exact(completions, solution, **kwargs):
        return [float(completion == "right") for completion in completions]

    args = tiny_config(tmp_path, max_steps=1, shuffle_dataset=False)
    trainer = ScriptedTrainer(
        tiny_model, exact, args, train_dataset=raw, script=lambda text, i: ["right", "no"][i % 2]
    )
    trainer.train()
    assert trainer.state.log_history[0]["filtered_reward"] == 1 / 2


def test_a_weight_for_the_overlong_column_is_refused_with_its_own_setting(tiny_model, tmp_path):
    with pytest.raises(ValueError, match="its weight is `overlong_penalty_factor`"):
        make_trainer(tiny_model, tmp_path, overlong_buffer_length=4, reward_weights=[1.0, 0.5])


# ---- Hostile rewards ----


def test_a_reward_that_is_text_is_named_with_its_function(tiny_model, tmp_path):
    def verdict(completions, **kwargs):
        return ["yes"] * len(completions)

    with pytest.raises(TypeError, match=r"'verdict' returned 'yes' \(str\) for completion 0 of 16"):
        make_trainer(tiny_model, tmp_path, reward_funcs=verdict, skip_preflight=True).train()


def test_a_failing_reward_function_ends_the_run_with_its_own_error(tiny_model, tmp_path):
    def broken(completions, **kwargs):
        raise KeyError("no such column")

    with pytest.raises(KeyError, match="no such column"):
        make_trainer(tiny_model, tmp_path, reward_funcs=broken, skip_preflight=True).train()


def test_an_infinite_reward_is_refused_by_name(tiny_model, tmp_path):
    def unbounded(completions, **kwargs):
        return [math.inf] * len(completions)

    with pytest.raises(ValueError, match="'unbounded' returned an infinite reward"):
        make_trainer(tiny_model, tmp_path, reward_funcs=unbounded, skip_preflight=True).train()


def test_groups_that_nothing_scores_are_dropped_as_unscored(tiny_model, tmp_path):
    def sometimes(prompts, completions, **kwargs):
        return [None if number(p) % 3 == 0 else r for p, r in zip(prompts, right(completions), strict=True)]

    trainer = make_trainer(tiny_model, tmp_path, reward_funcs=sometimes, max_steps=1)
    seen = spy_on_training(trainer)
    trainer.train()
    assert {number(text) for text, *_ in seen} == {1, 2, 4, 5}
    assert trainer.state.log_history[0]["dynamic_sampling/dropped/unscored"] >= 2


# ---- Checkpoints ----


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"steps_per_generation": 8},  # the checkpoint falls in the middle of a rollout
        {"num_iterations": 2},
    ],
    ids=str,
)
def test_a_resumed_run_ends_with_the_same_weights_and_metrics_bit_by_bit(tiny_model, tmp_path, overrides):
    def letters(completions, **kwargs):
        return [float(completion.count("a") > 0) for completion in completions]

    def run(output_dir, resume=None):
        args = tiny_config(output_dir, **{"save_strategy": "steps", "save_steps": 3, "max_steps": 6, **overrides})
        trainer = DAPOTrainer(tiny_model, letters, args, train_dataset=prompts(24))
        trainer.train(resume_from_checkpoint=resume)
        logs = [log for log in trainer.state.log_history if "loss" in log]
        timed = ("_seconds", "step_time")
        return weights(trainer), [{k: v for k, v in log.items() if not k.endswith(timed)} for log in logs]

    whole, whole_logs = run(tmp_path / "run")
    resumed, resumed_logs = run(tmp_path / "run", resume=str(tmp_path / "run" / "checkpoint-3"))
    assert torch.equal(whole, resumed)
    assert whole_logs == resumed_logs


def test_a_checkpoint_of_grpotrainer_resumes_with_a_fresh_prompt_stream(tiny_model, tmp_path, caplog):
    trainer = make_trainer(tiny_model, tmp_path, max_steps=1, save_strategy="steps", save_steps=1)
    trainer.train()
    checkpoint = tmp_path / "checkpoint-1"
    (checkpoint / "dapo_state.json").unlink()
    resumed = make_trainer(tiny_model, tmp_path, max_steps=2)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert number(resumed.sampled[0]) == 0
    assert any("the prompts start a fresh pass" in record.message for record in caplog.records)


# ---- Reward scaling and evaluation ----


def test_deciding_rewards_are_clamped_and_scaled_in_training_only(tiny_model, tmp_path):
    def graded(completions, **kwargs):
        return [3.0 if completion == "right" else 0.25 for completion in completions]

    scaling = [0.0, 1.0, -1.0, 1.0]
    trainer = make_trainer(
        tiny_model, tmp_path, reward_funcs=graded, max_steps=1, per_device_eval_batch_size=4, reward_scaling=scaling
    )
    trainer.train()
    # Of four completions one is clamped to 1, three become 2 * 0.25 - 1.
    assert trainer.state.log_history[0]["filtered_reward"] == pytest.approx((1 - 3 * 0.5) / 4)
    metrics = trainer.evaluate(prompts(3).select([1, 2]))
    assert metrics["eval_reward"] == pytest.approx((3 + 3 * 0.25) / 4)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"reward_scaling": [0.0, 1.0]}, r"takes four numbers, .* got \[0.0, 1.0\]"),
        ({"reward_scaling": [1.0, 1.0, 0.0, 1.0]}, "source range of `reward_scaling` .* got 1.0 to 1.0"),
        ({"eval_temperature": 0.0}, "above 0 and finite, got 0.0. For greedy decoding"),
        ({"eval_top_p": 1.5}, "at most 1, got 1.5"),
        ({"eval_top_k": -1}, "at least 0, got -1. 0 is all tokens"),
    ],
    ids=str,
)
def test_bounds_and_evaluation_settings_out_of_range_are_refused(tmp_path, overrides, message):
    with pytest.raises(ValueError, match=message):
        tiny_config(tmp_path, **overrides)


def test_evaluation_samples_with_its_own_settings_and_training_keeps_its(tiny_model, tmp_path):
    args = tiny_config(tmp_path, per_device_eval_batch_size=4, eval_top_k=1)
    trainer = DAPOTrainer(tiny_model, right, args, train_dataset=prompts(8))
    trainer.evaluate(prompts(1))
    assert len(set(trainer._logs["completion"])) == 1  # greedy: all completions of the prompt are one
    assert len(trainer._logs["completion"]) == 4
    assert trainer.generation_config.top_k == args.top_k


def test_evaluation_reports_avg_pass_and_maj_at_k_of_each_source(tiny_model, tmp_path):
    def script(text, i):
        # Problem 0: 3 of 4 right; problem 1: 1 of 4, outvoted by two equal wrong ones; problem 2: none.
        answers = {0: "7772", 1: "2733", 2: "1111"}[number(text)]
        return f"Answer: {answers[i % 4]}"

    def is_seven(completions, **kwargs):
        return [1.0 if completion.endswith("7") else -1.0 for completion in completions]

    trainer = make_trainer(tiny_model, tmp_path, script, is_seven, per_device_eval_batch_size=4)
    metrics = trainer.evaluate(prompts(3, source=["easy", "hard", "hard"]))
    assert metrics["eval_avg@4"] == pytest.approx((3 / 4 + 1 / 4 + 0) / 3)
    assert metrics["eval_avg@4/easy"] == 3 / 4
    assert metrics["eval_avg@4/hard"] == 1 / 8
    assert (metrics["eval_pass@4/easy"], metrics["eval_pass@4/hard"]) == (1.0, 1 / 2)
    assert (metrics["eval_maj@4/easy"], metrics["eval_maj@4/hard"]) == (1.0, 0.0)
    again = trainer.evaluate(prompts(1))
    assert again["eval_avg@4"] == 3 / 4  # nothing is left of the first evaluation


def test_a_run_whose_last_step_evaluates_ends_with_its_summary(tiny_model, tmp_path):
    args = tiny_config(tmp_path, eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=8)
    trainer = ScriptedTrainer(
        tiny_model, right, args, train_dataset=prompts(24), eval_dataset=prompts(2), script=mixed_unless_multiple_of_3
    )
    trainer.train()
    *_, evaluated, summary = trainer.state.log_history
    assert evaluated["eval_avg@4"] == 1 / 8  # of prompts 0 and 1 only the latter is solved, once in four
    assert "train_runtime" in summary
    assert not any(name.startswith("eval_") for name in summary)


def test_conversational_evaluations_are_voted_on_by_the_text_of_the_answer(tiny_model, tmp_path):
    def is_seven(prompts, completions, **kwargs):
        """Joins prompt and completion in place."""
        for prompt, completion in zip(prompts, completions, strict=True):
            prompt.append(completion.pop())
        return [float(prompt[-1]["content"].endswith("7")) for prompt in prompts]

    args = tiny_config(tmp_path, per_device_eval_batch_size=4)
    chats = Dataset.from_dict({"prompt": [[{"role": "user", "content": f"say {i}:"}] for i in range(4)]})
    trainer = ScriptedTrainer(
        tiny_model, is_seven, args, train_dataset=chats, script=lambda text, i: f"Answer: {[7, 7, 3, 7][i % 4]}"
    )
    metrics = trainer.evaluate(chats.select([0]))
    assert (metrics["eval_avg@4"], metrics["eval_pass@4"], metrics["eval_maj@4"]) == (3 / 4, 1.0, 1.0)


def test_an_evaluation_without_answers_to_vote_on_reports_no_majority(tiny_model, tmp_path):
    trainer = make_trainer(tiny_model, tmp_path, always_first_right, per_device_eval_batch_size=4)
    metrics = trainer.evaluate(prompts(2))
    assert metrics["eval_avg@4"] == 1 / 4
    assert metrics["eval_pass@4"] == 1.0
    assert "eval_maj@4" not in metrics


def always_first_right(text, i):
    return "right" if i % 4 == 0 else "wrong"


# ---- Filler, under every loss ----


class Gradients(TrainerCallback):
    def __init__(self):
        self.found = []

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        self.found.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))


def gradient_of_the_first_group(tiny_model, folder, num_prompts, **settings):
    """Of the prompts of a rollout, only the first has right and wrong completions."""
    args = tiny_config(
        folder,
        gradient_accumulation_steps=num_prompts,
        dynamic_sampling_max_rounds=1,
        shuffle_dataset=False,
        max_steps=1,
        max_grad_norm=0.0,
        **settings,
    )
    trainer = ScriptedTrainer(
        tiny_model,
        lambda completions, **kwargs: [float(completion.startswith("right")) for completion in completions],
        args,
        train_dataset=prompts(8),
        script=lambda text, i: "right" if number(text) == 0 and i % 4 == 1 else "wrong"[: 1 + i % 5],
    )
    trainer.add_callback(gradients := Gradients())
    trainer.train()
    return gradients.found[0]


@pytest.mark.parametrize("mode", ["filter", "mask"])
@pytest.mark.parametrize("loss_type", ["grpo", "sapo", "dr_grpo", "luspo", "cispo", "vespo", "dapo"])
def test_one_accepted_group_of_four_has_the_gradient_of_a_rollout_of_its_own(tiny_model, tmp_path, loss_type, mode):
    settings = {"loss_type": loss_type, "dynamic_sampling_mode": mode}
    found, expected = (
        gradient_of_the_first_group(tiny_model, tmp_path, num_prompts, **settings) for num_prompts in (4, 1)
    )
    assert expected.norm() > 1e-3
    assert (found - expected).norm() < 1e-5 * expected.norm()


# ---- The model card ----


@pytest.mark.parametrize("is_a_folder", [True, False])
def test_the_model_card_names_a_base_that_is_not_on_the_hub_and_the_folder_to_load(tiny_model, tmp_path, is_a_folder):
    trainer = make_trainer(tiny_model, tmp_path)
    if not is_a_folder:
        trainer.model.config._name_or_path = ""
    trainer.args.output_dir = str(tmp_path)
    trainer.create_model_card(model_name="run")
    card = (tmp_path / "README.md").read_text()
    named = f"`{Path(tiny_model).name}`" if is_a_folder else "a model that was made in memory"
    assert f"This model is a fine-tuned version of {named}." in card
    assert f'pipeline("text-generation", model="{tmp_path}"' in card
    assert "None" not in card


def test_generation_kwargs_that_change_nothing_sample_what_is_sampled_without_them(tiny_model, tmp_path):
    harmless = {"do_sample": True, "num_return_sequences": 1, "n": 1}  # transformers knows no `n`, and does not mind
    found = []
    for name, more in {"with": harmless, "without": {}}.items():
        kwargs = {"top_k": 50, "num_beams": 2, "length_penalty": -0.1, **more}  # with `do_sample` as in TRL's own test
        args = tiny_config(tmp_path / name, generation_kwargs=kwargs)
        trainer = DAPOTrainer(tiny_model, jobs.vowels, args, train_dataset=prompts(40))
        trainer.train()
        found.append(weights(trainer))
    assert torch.equal(*found)

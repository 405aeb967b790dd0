# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The behavior of the sampling phase: what is sampled, what trains, and what is logged."""

import dataclasses
import functools
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import Dataset
from helpers import (
    ScriptedTrainer,
    is_dummy,
    make_trainer,
    mixed_unless_multiple_of_3,
    number,
    prompts,
    right,
    spy_on_training,
    tiny_config,
    untimed,
    weights,
)
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import get_soft_overlong_punishment
from update_helpers import Recorder

from trl_dapo import DAPOConfig, DAPOTrainer
from trl_dapo.engines import checkpointing
from trl_dapo.rewards import SoftOverlongPunishment
from trl_dapo.run.stopwatch import Stopwatch
from trl_dapo.settings.sampling_defaults import PAPER


# ---- Sample until the batch is full ----


def test_a_rollout_is_full_of_accepted_groups_in_prompt_order_and_counts_what_was_sampled(tiny_model, tmp_path):
    trainer = make_trainer(tiny_model, tmp_path, max_steps=1)
    seen = spy_on_training(trainer)
    trainer.train()
    # 4 groups of 4 train. Prompts 0 and 3 are dropped, so 1, 2, 4 and 5 are the first four that are accepted.
    assert sorted(number(text) for text, *_ in seen) == [1] * 4 + [2] * 4 + [4] * 4 + [5] * 4
    # One of four is correct: mean 1/4, standard deviation (with Bessel's correction) 1/2.
    for _, completion, advantage, _ in seen:
        expected = 3 / 4 if completion == "right" else -1 / 4
        assert advantage == pytest.approx(expected / (1 / 2 + 1e-4), rel=1e-5)
    # Round 1 draws prompts 0 to 3 and accepts 1 and 2. Later rounds draw more until two more are accepted.
    generated = len(trainer.sampled) // 4
    assert [number(text) for text in trainer.sampled[::4]] == list(range(generated))
    dropped = sum(1 for i in range(generated) if i % 3 == 0)
    logs = {name.removeprefix("dynamic_sampling/"): value for name, value in trainer.state.log_history[0].items()}
    expected = {
        "groups_generated": generated,
        "completions_generated": 4 * generated,
        "tokens_generated": 4 * generated * 6,
        "dropped/all_wrong": dropped,
        "surplus": generated - dropped - 4,
        "acceptance_rate": 1 - dropped / generated,
        "groups_trained": 4,
        "completions_trained": 16,
        "tokens_trained": 96,
        "passes": generated / 24,
        "reward": (generated - dropped) / generated / 4,
        "trained_reward": 1 / 4,
        "completions/mean_length": 6,
    }
    assert {name: logs[name] for name in expected} == pytest.approx(expected)
    assert logs["rounds"] >= 2


def test_a_run_with_a_tensor_that_a_later_trl_adds_ends_with_the_same_weights(tiny_model, tmp_path, monkeypatch):
    script = {"script": lambda text, i: ("right" if i % 4 == 0 else "wrong") + "." * (number(text) % 5)}
    settings = {"optim": "sgd", "learning_rate": 0.1, "dynamic_sampling_surplus": "carry", **script}
    expected = make_trainer(tiny_model, tmp_path / "today", **settings)
    before = weights(expected)
    expected.train()
    generate = GRPOTrainer._generate_and_score_completions

    def of_a_later_trl(self, inputs):
        return {**generate(self, inputs), "tone": torch.zeros(len(inputs), 3)}

    monkeypatch.setattr(GRPOTrainer, "_generate_and_score_completions", of_a_later_trl)
    found = make_trainer(tiny_model, tmp_path / "later", **settings)
    found.train()
    assert (weights(found) - weights(expected)).norm() < 1e-5 * (weights(expected) - before).norm()


def test_a_reward_function_that_changes_what_it_is_handed_changes_nothing_that_trains(tiny_model, tmp_path):
    lengths = set()

    def careless(completions, completion_ids, hints, **kwargs):
        rewards = right(completions)
        for ids, row in zip(completion_ids, hints, strict=True):
            ids.pop()  # the end
            lengths.add(len(row))
            row.pop()
        return rewards

    trained, weights_after = [], []
    data = {"train_dataset": prompts(24, hints=[["a", "b", "c"]] * 24), "script": mixed_unless_multiple_of_3}
    for name, reward in (("careful", right), ("careless", careless)):
        args = tiny_config(tmp_path / name, shuffle_dataset=False)
        trainer = ScriptedTrainer(tiny_model, reward, args, **data)
        trained.append(spy_on_training(trainer))
        trainer.train()
        weights_after.append(weights(trainer))
    assert trained[0] == trained[1]
    assert torch.equal(*weights_after)
    assert lengths == {3}  # each row has its own values


def test_an_all_wrong_group_of_different_lengths_is_dropped_although_its_total_reward_varies(tiny_model, tmp_path):
    def script(text, i):
        if number(text) % 2:
            return ["right", "no", "no", "no"][i % 4]
        return ["no", "noo", "noooooo...", "noooooooo..."][i % 4]

    given = [right]
    trainer = make_trainer(tiny_model, tmp_path, script, given, max_steps=1, overlong_buffer_length=4)
    assert given == [right]
    assert trainer.reward_func_names == ["right", "soft_overlong_punishment"]
    seen = spy_on_training(trainer)
    trainer.train()
    assert {number(text) for text, *_ in seen} == {1, 3, 5, 7}
    assert trainer.state.log_history[0]["rewards/soft_overlong_punishment/mean"] < 0  # the totals did vary


def test_weights_that_a_callback_changes_decide_from_then_on(tiny_model, tmp_path):
    """A change of `reward_weights` takes effect immediately, on advantages and on which groups are dropped."""

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
        [0, 1, 2, 3],  # every group differs in style; of 4 to 7, number 6 has no correct completion
        [4, 5, 7, 8],  # 6 is missing, since it has no correct completion
    ]


def test_a_users_rule_decides_alone_and_its_reasons_are_counted(tiny_model, tmp_path, capsys):
    def odd_only(rewards, rows):
        assert len(rows) == len(rewards["right"]) == 4
        assert {row["prompt"] for row in rows} == {rows[0]["prompt"]}
        assert {row["length"] for row in rows} == {6}
        assert not any(row["truncated"] for row in rows)
        return None if number(rows[0]["prompt"]) % 2 else "even"

    args = tiny_config(tmp_path, shuffle_dataset=False, max_steps=1)
    data = {"train_dataset": prompts(24), "script": mixed_unless_multiple_of_3}
    trainer = ScriptedTrainer(tiny_model, right, args, group_filter=odd_only, **data)
    seen = spy_on_training(trainer)
    trainer.train()
    # 3 has no correct completion, but only the filter decides
    assert {number(text) for text, *_ in seen} == {1, 3, 5, 7}
    assert trainer.state.log_history[0]["dynamic_sampling/dropped/even"] >= 4
    assert "`group_filter` decides which groups are accepted." in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["arrow", "pandas"])
def test_a_dataset_whose_format_makes_a_table_of_each_example_trains_as_any_other(tiny_model, tmp_path, kind):
    def seen(dataset):
        args = tiny_config(tmp_path, max_steps=1, top_p=None, repetition_penalty=None)
        trainer = ScriptedTrainer(tiny_model, right, args, train_dataset=dataset, script=mixed_unless_multiple_of_3)
        rows = spy_on_training(trainer)
        trainer.train()
        return rows

    assert seen(prompts(24).with_format(kind)) == seen(prompts(24)) != []


def test_rewards_get_the_types_of_grpo_trainer_from_a_pandas_dataset(tiny_model, tmp_path):
    def types_with(trainer_class, config_class):
        seen = []

        def sees(completions, level, golds, **kwargs):
            seen.append((type(level[0]), type(golds[0])))
            return [float(i % 2) for i in range(len(completions))]

        data = prompts(24, level=range(24), golds=[["a", "b"]] * 24).with_format("pandas")
        sizes = {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 2, "max_steps": 1}
        runs = {"report_to": "none", "use_cpu": True, "bf16": False, "disable_tqdm": True}
        args = config_class(str(tmp_path / config_class.__name__), **sizes, **runs, gradient_checkpointing=False)
        trainer_class(tiny_model, sees, args, train_dataset=data).train()
        return {*seen}

    assert types_with(DAPOTrainer, DAPOConfig) == types_with(GRPOTrainer, GRPOConfig) == {(np.int64, np.ndarray)}


def test_a_users_rule_that_cannot_be_called_is_refused(tiny_model, tmp_path):
    with pytest.raises(TypeError, match=r"must be a function of the rewards and rows of a group, got 'all_wrong'"):
        DAPOTrainer(tiny_model, right, tiny_config(tmp_path), train_dataset=prompts(24), group_filter="all_wrong")


@pytest.mark.parametrize(
    ("scaling", "threshold", "verdict"),
    [([0.0, 1.0, 5.0, 10.0], 0.0, "correct"), ([0.0, 1.0, -1.0, 1.0], 1.0, "incorrect")],
)
def test_a_threshold_that_parts_no_rewards_is_refused(tiny_model, tmp_path, scaling, threshold, verdict):
    args = tiny_config(tmp_path, reward_scaling=scaling, dynamic_sampling_accuracy_threshold=threshold)
    with pytest.raises(
        ValueError, match=f"every completion counts as {verdict}, .* Set the threshold to a value between"
    ):
        DAPOTrainer(tiny_model, right, args, train_dataset=prompts(24))


def test_with_the_accuracy_reward_named_it_alone_says_what_is_right(tiny_model, tmp_path):
    def well_formed(completions, **kwargs):
        return [1.0] * len(completions)

    settings = {"per_device_eval_batch_size": 4, "dynamic_sampling_rewards": ["right"]}
    trainer = make_trainer(tiny_model, tmp_path, reward_funcs=[right, well_formed], **settings)
    metrics = trainer.evaluate(prompts(2))  # prompt 0 is never solved, prompt 1 one time in four
    assert (metrics["eval_avg@4"], metrics["eval_pass@4"]) == (1 / 8, 1 / 2)
    assert "eval_maj@4" not in metrics  # without votes, since there are no answers
    assert not any("dynamic_sampling" in name for name in metrics)
    assert trainer.reward_funcs == [right, well_formed]  # the user's own objects


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
        tiny_model, tmp_path, one_prompt_in_40, num_prompts=40, max_steps=1, dynamic_sampling_max_gen_batches=2
    )
    seen = spy_on_training(trainer)
    trainer.train()
    live = [row for row in seen if row[3] > 0]
    assert len(seen) == 16
    assert [number(text) for text, *_ in live] == [2] * 4
    assert [tokens for *_, tokens in live] == [6] * 4  # "right" and "wrong" have 5 letters and an end token
    assert all(advantage == 0 for *_, advantage, tokens in seen if tokens == 0)
    logs = trainer.state.log_history[0]
    assert logs["dynamic_sampling/tokens_trained"] == 24
    assert (logs["dynamic_sampling/groups_trained"], logs["dynamic_sampling/shortfall"]) == (1, 3)
    assert logs["trained_reward"] == 1 / 4


def test_error_mode_stops_with_the_counts_and_the_way_out(tiny_model, tmp_path):
    settings = {"dynamic_sampling_max_gen_batches": 3, "dynamic_sampling_on_exhausted": "error", **PAPER}
    trainer = make_trainer(tiny_model, tmp_path, lambda text, i: "right", **settings)
    with pytest.raises(RuntimeError) as error:
        trainer.train()
    assert str(error.value) == (
        "The batch is not full at the limit of 3 batches of completions: 0 of 12 sampled groups were accepted "
        "(dropped: all_correct 12); a full batch has 4. Most prompts are too easy for the model: use harder "
        "prompts or a larger `num_generations`. No group was accepted, so a higher "
        "`dynamic_sampling_max_gen_batches` (3) would probably not fill the batch either. Or set "
        "`dynamic_sampling_on_exhausted='top_up'` to continue with the next rollout."
    )


# ---- Metrics and logs ----


def test_the_time_of_a_rollout_is_told_apart_by_what_it_went_to(tiny_model, tmp_path, monkeypatch):
    now = 100.0

    def pass_time(seconds):
        nonlocal now
        now += seconds

    def slow_right(completions, **kwargs):
        if not is_dummy(completions[0]):
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
    save_state = checkpointing.save_state
    monkeypatch.setattr(checkpointing, "save_state", lambda *args: (pass_time(3.0), save_state(*args)))
    settings = {"shuffle_dataset": False, "per_device_eval_batch_size": 4}
    settings |= {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    data = {"train_dataset": prompts(24), "eval_dataset": prompts(1), "script": mixed_unless_multiple_of_3}
    trainer = ScriptedTrainer(tiny_model, slow_right, tiny_config(tmp_path, **settings), **data)
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
    # Since the last log: a step of 5 s, an evaluation (10 s and 2 s) and a checkpoint of 10 s, of which a callback
    # takes 7.
    second = {"sampling_seconds": 10.0 * rounds[1], "rewards_seconds": 2.0 * rounds[1]}
    assert timelines[1] == {**second, "update_seconds": 5.0 + 7.0, "other_seconds": 12.0 + 3.0}


@pytest.mark.parametrize(
    ("spent", "timeline"),
    [
        # In turns with a server: it samples for 6 s of 20, and is idle except for an evaluation of 3 s.
        (
            {"engine": 6.0, "rewards": 1.0, "evaluation": 3.0, "checkpoint": 2.0},
            {"sampling": 6.0, "rewards": 1.0, "update": 8.0, "other": 5.0, "wait": 6.0, "idle": 11.0},
        ),
        # Ahead: 9 s while the trainer works, which waits for 4 of them, and a second round of 5 s.
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
    stopwatch.flush_seconds()
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


# ---- Drop-in replacement ----


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"num_iterations": 2},
        # If a rollout trains in two optimizer steps, TRL's token mean divides by their average token count, and ours
        # by the count of each. TRL's other losses are unchanged.
        {"steps_per_generation": 8, "loss_type": "grpo"},
        {"beta": 0.1},
    ],
    ids=str,
)
def test_without_dynamic_sampling_a_run_is_grpotrainers_step_for_step(tiny_model, tmp_path, overrides):
    def length(completions, **kwargs):
        return [float(len(set(completion))) for completion in completions]

    fields = {field.name: field for field in dataclasses.fields(GRPOConfig)}
    trls = {name: fields[name].default for name in ("epsilon", "epsilon_high", "beta", "loss_type")}
    ours = tiny_config(tmp_path, use_dynamic_sampling=False, **{**trls, "max_steps": 6, **overrides})
    shared = [name for name, field in fields.items() if field.init and name != "generation_batch_size"]
    settings = {name: getattr(ours, name) for name in shared}
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
    assert history[1][0]["timeline/rewards_seconds"] > 0


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


@pytest.mark.parametrize(
    ("kind", "fix"),
    [(GRPOConfig, r"`GRPOConfig\(...\)` with `DAPOConfig\(...\)`"), (dict, r"`{...}` with `DAPOConfig\(\*\*{...}\)`")],
)
def test_other_args_are_refused_with_the_fix_in_the_message(tiny_model, tmp_path, kind, fix):
    args = kind(output_dir=str(tmp_path), bf16=False, use_cpu=True)
    with pytest.raises(TypeError, match=f"Replace {fix}"):
        DAPOTrainer(tiny_model, right, args, train_dataset=prompts(8))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("acc", "names 'acc', which is not a reward function of this run. Choose from 'right'"),
        ("soft_overlong_punishment", "'soft_overlong_punishment', a length penalty"),
    ],
)
def test_what_cannot_decide_is_refused(tiny_model, tmp_path, name, message):
    with pytest.raises(ValueError, match=message):
        make_trainer(tiny_model, tmp_path, overlong_buffer_length=4, dynamic_sampling_rewards=[name])


# ---- Data and rewards that cannot work ----


SOLVED = prompts(8, solution=["1"] * 8)


def exact(completions, solution, **kwargs):
    return [float(completion == "right") for completion in completions]


def named_otherwise(completion_ids, **kwargs):
    return [-float(len(ids) > 4) for ids in completion_ids]


@pytest.mark.parametrize(
    ("punishment", "name"),
    [
        (SoftOverlongPunishment(8, 4), "soft_overlong_punishment"),
        (get_soft_overlong_punishment(8, 4), "soft_overlong_punishment_reward"),
        (functools.partial(SoftOverlongPunishment(8, 4), extra=1), "soft_overlong_punishment"),
    ],
)
def test_overlong_completions_are_not_punished_twice(tiny_model, tmp_path, punishment, name):
    message = f"`overlong_buffer_length=4` .* reward function '{name}'.* Leave out one of the two"
    with pytest.raises(ValueError, match=message):
        make_trainer(tiny_model, tmp_path, reward_funcs=[right, punishment], overlong_buffer_length=4)
    make_trainer(tiny_model, tmp_path, reward_funcs=[right, punishment])
    make_trainer(tiny_model, tmp_path, reward_funcs=[right, named_otherwise], overlong_buffer_length=4)
    logged = {"reward_weights": [1.0, 0.0], "overlong_buffer_length": 4}
    make_trainer(tiny_model, tmp_path, reward_funcs=[right, punishment], **logged)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"train_dataset": Dataset.from_dict({"question": ["?"] * 8})}, "`train_dataset` has no column `prompt`. Its"),
        ({"train_dataset": SOLVED, "eval_dataset": {"aime": prompts(8)}}, r"which `eval_dataset\['aime'\]` does not"),
    ],
    ids=["to train", "to evaluate"],
)
def test_columns_that_are_missing_are_named_before_anything_is_sampled(tiny_model, tmp_path, data, message):
    with pytest.raises(ValueError, match=message):
        DAPOTrainer(tiny_model, exact, tiny_config(tmp_path), **data)


def test_columns_that_a_transform_makes_are_not_refused(tiny_model, tmp_path):
    raw = Dataset.from_dict({"question": [f"prompt {i}:" for i in range(8)]})
    raw.set_transform(lambda batch: {"prompt": batch["question"], "solution": ["1"] * len(batch["question"])})
    data = {"train_dataset": raw, "script": lambda text, i: ["right", "no"][i % 2]}
    trainer = ScriptedTrainer(tiny_model, exact, tiny_config(tmp_path, max_steps=1, shuffle_dataset=False), **data)
    trainer.train()
    assert trainer.state.log_history[0]["trained_reward"] == 1 / 2


# ---- Hostile rewards ----


@pytest.mark.parametrize(
    ("reward", "kind", "message"),
    [
        ("yes", TypeError, r"'verdict' returned 'yes' \(str\) for completion 0 of 16"),
        (math.inf, ValueError, "'verdict' returned an infinite reward"),
    ],
)
def test_a_reward_that_nothing_can_train_on_is_named_with_its_function(tiny_model, tmp_path, reward, kind, message):
    def verdict(completions, **kwargs):
        return [0.0 if is_dummy(completion) else reward for completion in completions]

    trainer = make_trainer(tiny_model, tmp_path, reward_funcs=[right, verdict], dynamic_sampling_screen="off")
    with pytest.raises(kind, match=message):
        trainer.train()


# ---- Checkpoints ----


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"dynamic_sampling_surplus": "carry", "batch_multiplier": 1.0, "dynamic_sampling_memory": True},
        {"steps_per_generation": 8, "num_iterations": 2},  # the checkpoint is in the middle of a rollout
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
        return weights(trainer), untimed(trainer.state.log_history)

    whole, whole_logs = run(tmp_path / "run")
    resumed, resumed_logs = run(tmp_path / "run", resume=str(tmp_path / "run" / "checkpoint-3"))
    assert torch.equal(whole, resumed)
    assert whole_logs == resumed_logs


def test_a_checkpoint_of_grpotrainer_resumes_with_a_new_pass_over_the_prompts(tiny_model, tmp_path, caplog, capsys):
    make_trainer(tiny_model, tmp_path, max_steps=1, save_strategy="steps", save_steps=1).train()
    checkpoint = tmp_path / "checkpoint-1"
    (checkpoint / "dapo_state.json").unlink()
    resumed = make_trainer(tiny_model, tmp_path, max_steps=2)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert number(resumed.sampled[0]) == 0
    assert any(
        "the pass over the prompts and the counts of the summary start from the beginning" in record.message
        for record in caplog.records
    )
    assert resumed._sampler.totals.first_step == 1
    assert " sampled since step 1; accepted " in capsys.readouterr().out


# ---- Reward scaling and evaluation ----


@pytest.mark.parametrize(
    ("scaling", "threshold", "trained"),
    [
        ([0.0, 1.0, -1.0, 1.0], 0.0, (1 - 3 * 0.5) / 4),  # of four completions one is clamped, three are 2 * 0.25 - 1
        ([0.0, 1.0, 0.0, 10.0], 5.0, (10 + 3 * 2.5) / 4),
    ],
)
def test_rewards_are_scaled_in_training_and_right_in_evaluation_too(tiny_model, tmp_path, scaling, threshold, trained):
    def graded(completions, **kwargs):
        return [3.0 if completion == "right" else 0.25 for completion in completions]

    settings = {"reward_scaling": scaling, "dynamic_sampling_accuracy_threshold": threshold}
    settings |= {"max_steps": 1, "per_device_eval_batch_size": 4}
    trainer = make_trainer(tiny_model, tmp_path, reward_funcs=graded, **settings)
    trainer.train()
    assert trainer.state.log_history[0]["trained_reward"] == pytest.approx(trained)
    metrics = trainer.evaluate(prompts(3).select([1, 2]))
    assert metrics["eval_reward"] == pytest.approx((3 + 3 * 0.25) / 4)  # unchanged
    assert metrics["eval_avg@4"] == 1 / 4  # 0.25 is below the threshold after scaling


def test_evaluation_samples_with_its_own_settings_and_training_keeps_its(tiny_model, tmp_path):
    args = tiny_config(tmp_path, per_device_eval_batch_size=4, eval_top_k=1)
    trainer = DAPOTrainer(tiny_model, right, args, train_dataset=prompts(8))
    trainer.evaluate(prompts(1))
    assert len(set(trainer._logs["completion"])) == 1  # greedy: all completions of a prompt are the same
    assert len(trainer._logs["completion"]) == 4
    assert trainer.generation_config.top_k == args.top_k


def test_evaluation_reports_avg_pass_and_maj_at_k_of_each_source(tiny_model, tmp_path):
    def script(text, i):
        # Problem 0: 3 of 4 correct. Problem 1: 1 of 4, outvoted by two equal incorrect ones. Problem 2: none.
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
    assert trainer.evaluate(prompts(1))["eval_avg@4"] == 3 / 4  # nothing is left of the first evaluation


def test_a_run_whose_last_step_evaluates_ends_with_its_summary(tiny_model, tmp_path):
    args = tiny_config(tmp_path, eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=8)
    trainer = ScriptedTrainer(
        tiny_model, right, args, train_dataset=prompts(24), eval_dataset=prompts(2), script=mixed_unless_multiple_of_3
    )
    trainer.train()
    *_, evaluated, summary = trainer.state.log_history
    assert evaluated["eval_avg@4"] == 1 / 8  # of prompts 0 and 1 only the latter is solved, one time in four
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


# ---- Filler, under every loss ----


def gradient_of_the_first_group(tiny_model, folder, num_prompts, **settings):
    """In a rollout, only the first prompt has both correct and incorrect completions."""

    def script(text, i):
        return "right" if number(text) == 0 and i % 4 == 1 else "wrong"[: 1 + i % 5]

    settings |= {"dynamic_sampling_max_gen_batches": 1, "max_steps": 1, "max_grad_norm": 0.0}
    trainer = make_trainer(tiny_model, folder, script, gradient_accumulation_steps=num_prompts, **settings)
    trainer.add_callback(recorder := Recorder(SimpleNamespace(gradients=[])))
    trainer.train()
    return recorder.trainer.gradients[0]


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

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Resuming where something is not as it was: other settings, other data, files that are missing or torn."""

import datetime
import functools
import json
import os
import shutil
import signal
from pathlib import Path

import jobs
import PIL.Image
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset, Features, Image, IterableDataset, Value
from helpers import (
    ScriptedTrainer,
    launch,
    letters,
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

from trl_dapo import DAPOTrainer
from trl_dapo.run.checkpoint import last_complete_checkpoint, rule_of


IMAGE = PIL.Image.new("RGB", (2, 2), "red")
SAVED = {"save_strategy": "steps", "save_steps": 1}
CARRY = {"dynamic_sampling_surplus": "carry", "batch_multiplier": 1.0}


def trained(seen):
    """Prompts whose completions had tokens in the loss."""
    return [number(text) for text, *_, tokens in seen if tokens]


def what_was_said(caplog):
    return " ".join(record.message for record in caplog.records)


@pytest.fixture
def carrying(tiny_model, tmp_path):
    """A checkpoint that carries group 7: of two rounds of 4 prompts, 1 2 4 5 have trained."""
    make_trainer(tiny_model, tmp_path, max_steps=1, num_prompts=120, **SAVED, **CARRY).train()
    return str(tmp_path / "checkpoint-1")


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ({"dynamic_sampling_surplus": "discard"}, "dynamic_sampling_surplus"),
        (
            {"dynamic_sampling_mode": "mask", "dynamic_sampling_surplus": "discard", "batch_multiplier": None},
            "dynamic_sampling_mode",
        ),
        ({"num_generations": 2}, "num_generations"),
        ({"per_device_train_batch_size": 1}, "prompts_per_rollout"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_carried_groups_that_do_not_fit_are_left_behind_with_one_warning(
    tiny_model, tmp_path, carrying, overrides, name, caplog
):
    settings = {**CARRY, **overrides}
    trainer = make_trainer(tiny_model, tmp_path / "resumed", max_steps=4, num_prompts=120, **settings)
    seen = spy_on_training(trainer)
    trainer.train(resume_from_checkpoint=carrying)
    counts = {prompt: trained(seen).count(prompt) for prompt in set(trained(seen))}
    # What trains was sampled now, from the ninth prompt on, each group once and whole, and none that is never solved.
    assert min(counts) >= 8
    assert set(counts.values()) == {trainer.num_generations}
    assert all(prompt % 3 for prompt in counts)
    assert len(seen) == 3 * trainer.args.generation_batch_size
    assert f"`{name}` (" in what_was_said(caplog)
    assert what_was_said(caplog).count("written with other settings") == 1


@pytest.mark.parametrize("overrides", [{}, {"overlong_buffer_length": 4}], ids=["another function", "one more"])
def test_groups_that_other_reward_functions_scored_are_left_behind(tiny_model, tmp_path, carrying, overrides, caplog):
    def longest(completions, **kwargs):
        return right(completions)

    settings = {**CARRY, "max_steps": 3, "num_prompts": 120, **overrides}
    trainer = make_trainer(tiny_model, tmp_path / "resumed", reward_funcs=right if overrides else longest, **settings)
    seen = spy_on_training(trainer)
    trainer.train(resume_from_checkpoint=carrying)
    assert min(trained(seen)) >= 8  # the carried group is 7
    assert "`reward_funcs` (['right'] there, " in what_was_said(caplog)


def half_right(text, i):
    return "right" if number(text) % 3 and i % 4 < 2 else "wrong"


def carried_into(tiny_model, tmp_path, checkpoint, **settings):
    """The prompts that train in two further steps: 7 among them if what the checkpoint carries does."""
    settings = {"script": half_right, "max_steps": 3, "num_prompts": 120, **CARRY, **settings}
    trainer = make_trainer(tiny_model, tmp_path / "resumed", **settings)
    seen = spy_on_training(trainer)
    trainer.train(resume_from_checkpoint=checkpoint)
    return {*trained(seen)}


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        # Group 7 has one right completion of four: all wrong by this rule.
        ({"dynamic_sampling_min_accuracy": 0.3}, "`dynamic_sampling_min_accuracy` (0.0 there, 0.3 here)"),
        # An advantage of 0.75 beside those of 5.0.
        ({"reward_scaling": [0.0, 1.0, -5.0, 5.0]}, "`reward_scaling` (None there, [0.0, 1.0, -5.0, 5.0] here)"),
        ({"reward_weights": [0.3]}, "`reward_weights` ([1.0] there, [0.3] here)"),
        ({"temperature": 0.5}, "`temperature` (1.0 there, 0.5 here)"),
        ({"overlong_filtering": True}, "`mask_truncated_completions` (False there, True here)"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_groups_that_another_rule_let_in_are_left_behind(tiny_model, tmp_path, carrying, overrides, said, caplog):
    assert min(carried_into(tiny_model, tmp_path, carrying, **overrides)) >= 8
    assert f"written with other settings: {said}. Weights" in what_was_said(caplog)


def test_settings_that_rows_do_not_hang_on_may_change(tiny_model, tmp_path, carrying, caplog):
    overrides = {"learning_rate": 1e-4, "epsilon_high": 0.3, "logging_steps": 2, "max_steps": 4, "log_groups": 1}
    overrides |= {"max_tokens_per_microbatch": 64, "eval_temperature": 0.5, "vllm_gpu_memory_utilization": 0.5}
    assert 7 in carried_into(tiny_model, tmp_path, carrying, **overrides)
    assert "other settings" not in what_was_said(caplog)


def test_a_checkpoint_that_does_not_say_what_decided_is_taken_to_fit(tiny_model, tmp_path, carrying, caplog):
    path = Path(carrying) / "dapo_state_rank0.pt"
    state = torch.load(path, weights_only=True)
    del state["rule"]  # as earlier versions wrote it
    torch.save(state, path)
    assert 7 in carried_into(tiny_model, tmp_path, carrying, temperature=0.5)
    assert "other settings" not in what_was_said(caplog)


def lets_in_all(rewards, rows):
    return None


def lets_in_few(rewards, rows):
    return None if number(rows[0]["prompt"]) in (2, 5, 7, 8, 10, 11, 13, 14, 16, 17) else "few"


@pytest.mark.parametrize(
    ("there", "here"), [(None, lets_in_few), (lets_in_few, None), (lets_in_few, lets_in_all), (lets_in_few,) * 2]
)
def test_groups_are_left_behind_where_a_filter_appears_goes_or_changes(tiny_model, tmp_path, there, here, caplog):
    def run(folder, max_steps, group_filter, checkpoint=None):
        args = tiny_config(tmp_path / folder, shuffle_dataset=False, max_steps=max_steps, **SAVED, **CARRY)
        settings = {"train_dataset": prompts(120), "script": mixed_unless_multiple_of_3}
        trainer = ScriptedTrainer(tiny_model, right, args, group_filter=group_filter, **settings)
        seen = spy_on_training(trainer)
        trainer.train(resume_from_checkpoint=checkpoint)
        return trained(seen), trainer._sampler.rollout

    run("first", 1, there)
    checkpoint = tmp_path / "first/checkpoint-1"
    assert torch.load(checkpoint / "dapo_state_rank0.pt", weights_only=True)["carried"] is not None
    _, rollout = run("second", 2, here, str(checkpoint))
    assert bool(rollout.carried) == (there is here)
    assert ("`group_filter` (" in what_was_said(caplog)) == (there is not here)


class SetWeights(TrainerCallback):
    def __init__(self, event, reward_weights):
        setattr(self, event, lambda *args, **kwargs: setattr(self.trainer, "reward_weights", reward_weights))


@pytest.mark.parametrize(("event", "fits"), [("on_train_begin", False), ("on_step_end", True)])
def test_what_counts_are_the_weights_by_which_rows_were_scored(tiny_model, tmp_path, event, fits, caplog):
    """Those of a callback before the rollout, but not those that it sets between rollout and checkpoint."""
    trainer = make_trainer(tiny_model, tmp_path, max_steps=1, num_prompts=120, **SAVED, **CARRY)
    callback = SetWeights(event, torch.tensor([5.0]))
    callback.trainer = trainer
    trainer.add_callback(callback)
    trainer.train()
    carried = carried_into(tiny_model, tmp_path, str(tmp_path / "checkpoint-1"))
    assert (7 in carried) == fits
    assert ("`reward_weights` ([5.0] there, [1.0] here)" in what_was_said(caplog)) != fits


def changed(args, **others):
    """What a rule says with these settings and not with the usual ones."""
    usual, other = (
        rule_of(one, {"group_filter": None, **more})
        for one, more in ((tiny_config(args.output_dir), {}), (args, others))
    )
    return {name: value for name, value in other.items() if usual.get(name) != value}


@pytest.mark.parametrize(
    "setting",
    [
        {"top_p": 0.9},
        {"top_k": 20},
        {"min_p": 0.1},
        {"repetition_penalty": 1.1},
        {"generation_kwargs": {"length_penalty": 2.0}},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"max_completion_length": 16},
        {"max_tool_calling_iterations": 3},
        {"dynamic_sampling_max_accuracy": 0.9},
        {"dynamic_sampling_accuracy_threshold": 0.5},
        {"overlong_buffer_length": 4},
        {"overlong_buffer_length": 4, "overlong_penalty_factor": 0.5},
        {"scale_rewards": "none"},
        {"multi_objective_aggregation": "normalize_then_sum"},
        {"use_transformers_continuous_batching": True},
    ],
    ids=lambda setting: [*setting][-1],
)
def test_a_rule_names_each_setting_that_rows_hang_on(tmp_path, setting):
    assert changed(tiny_config(tmp_path, **setting)) == setting


def test_a_rule_names_the_settings_of_an_engine_where_it_samples(tmp_path):
    vllm = {"vllm_mode": "server", "vllm_structured_outputs_regex": "[0-9]+"}
    assert changed(tiny_config(tmp_path, **vllm)) == {}
    named = changed(tiny_config(tmp_path, use_vllm=True, **vllm))
    assert named == vllm | {
        "use_vllm": True,
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": "token_truncate",
        "vllm_importance_sampling_clip_max": 2.0,
    }


def test_a_rule_says_what_json_cannot_hold_by_the_name_that_the_next_run_gives_it_too(tmp_path):
    args = tiny_config(tmp_path, generation_kwargs={"logits_processor": [SetWeights], "prefix_allowed_tokens_fn": len})
    assert changed(args, group_filter=functools.partial(lets_in_few, rows=[])) == {
        "generation_kwargs": {"logits_processor": ["SetWeights"], "prefix_allowed_tokens_fn": "len"},
        "group_filter": "lets_in_few",
    }
    # An object has no name of its own, and no address.
    assert changed(args, group_filter=SetWeights("call", None))["group_filter"] == "SetWeights"


def test_prompts_in_another_order_start_a_fresh_pass(tiny_model, tmp_path, caplog):
    """In random order the rest of the pass would hold prompts that were drawn, and lack others."""
    make_trainer(tiny_model, tmp_path, max_steps=1, num_prompts=12, **SAVED).train()
    args = tiny_config(tmp_path, max_steps=2, shuffle_dataset=True)
    trainer = ScriptedTrainer(
        tiny_model, right, args, train_dataset=prompts(12), script=lambda text, i: "right" if i % 4 == 0 else "wrong"
    )
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert trainer.state.log_history[-2]["dynamic_sampling/passes"] == pytest.approx(1 + 4 / 12)
    assert "`shuffle_dataset` (False there, True here)" in what_was_said(caplog)


def test_inside_a_rollout_without_a_reference_beta_cannot_be_turned_on(tiny_model, tmp_path, caplog):
    make_trainer(tiny_model, tmp_path, max_steps=1, steps_per_generation=8, num_prompts=48, **SAVED).train()
    trainer = make_trainer(tiny_model, tmp_path, max_steps=2, steps_per_generation=8, num_prompts=48, beta=0.1)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert trainer.sampled  # the rollout is sampled again, with its reference
    assert "`beta` (0.0 there, 0.1 here)" in what_was_said(caplog)


def test_a_memory_that_is_turned_on_inside_a_rollout_is_saved(tiny_model, tmp_path):
    settings = {"steps_per_generation": 8, "num_prompts": 48, **SAVED}
    make_trainer(tiny_model, tmp_path, max_steps=1, **settings).train()  # a rollout is two steps
    trainer = make_trainer(tiny_model, tmp_path, max_steps=2, dynamic_sampling_memory=True, **settings)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert pq.read_table(tmp_path / "checkpoint-2" / "dapo_memory.parquet").num_rows == 0  # nothing was sampled since


def test_with_a_longer_rollout_the_unfinished_one_is_left_behind(tiny_model, tmp_path, caplog):
    make_trainer(tiny_model, tmp_path, max_steps=1, steps_per_generation=8, num_prompts=48, **SAVED).train()
    trainer = make_trainer(tiny_model, tmp_path, max_steps=2, steps_per_generation=12, num_prompts=48)
    seen = spy_on_training(trainer)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert min(trained(seen)) >= 12
    assert "rows it holds of an unfinished rollout" in what_was_said(caplog)


@pytest.mark.parametrize(
    ("there", "here"),
    [
        # A rollout of 16 rows in both, and 16 micro-steps; two steps of the first are half of it.
        ((1, 16, 1, 8), (2, 8, 2, 4)),
        ((2, 8, 2, 4), (1, 16, 1, 8)),
    ],
    ids=["trained twice", "not there"],
)
def test_an_unfinished_rollout_that_is_cut_otherwise_is_left_behind(tiny_model, tmp_path, there, here, caplog):
    def run(sizes, folder, max_steps, checkpoint=None):
        rows, parts, iterations, accumulation = sizes
        settings = {"per_device_train_batch_size": rows, "steps_per_generation": parts, "num_iterations": iterations}
        settings |= {"gradient_accumulation_steps": accumulation, "max_steps": max_steps, "num_prompts": 48, **SAVED}
        trainer = make_trainer(tiny_model, tmp_path / folder, **settings)
        seen = spy_on_training(trainer)
        trainer.train(resume_from_checkpoint=checkpoint)
        return trained(seen)

    before = run(there, "there", 1)
    after = run(here, "here", 3, str(tmp_path / "there/checkpoint-1"))
    assert len(before) == 8
    assert len(after) == 16  # as many rows as two steps have
    assert not {*before} & {*after}
    for name, place in (("per_device_train_batch_size", 0), ("steps_per_generation", 1), ("num_iterations", 2)):
        assert f"`{name}` ({there[place]} there, {here[place]} here)" in what_was_said(caplog)


@pytest.mark.parametrize("from_step", [1, 2])
def test_without_dynamic_sampling_a_run_resumes_bit_by_bit(tiny_model, tmp_path, from_step):
    settings = {"use_dynamic_sampling": False, "steps_per_generation": 8, "max_steps": 3, "num_prompts": 48, **SAVED}
    whole = make_trainer(tiny_model, tmp_path, **settings)
    whole.train()
    again = make_trainer(tiny_model, tmp_path, **settings)
    again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{from_step}"))
    assert len(again.sampled) == 32  # the second rollout alone
    assert torch.equal(weights(whole), weights(again))


def test_without_dynamic_sampling_an_unfinished_rollout_hangs_on_its_weights_too(tiny_model, tmp_path, caplog):
    def run(max_steps, reward_weights, checkpoint=None):
        settings = {"use_dynamic_sampling": False, "steps_per_generation": 8, "reward_weights": reward_weights}
        settings |= {"reward_funcs": [right, letters], "max_steps": max_steps, **SAVED}
        trainer = make_trainer(tiny_model, tmp_path, **settings)
        trainer.train(resume_from_checkpoint=checkpoint)
        return trainer.sampled

    run(1, [1.0, 0.5])
    kept = str(shutil.copytree(tmp_path / "checkpoint-1", tmp_path / "kept"))
    assert run(2, [1.0, 0.5], kept) == []
    assert "other settings" not in what_was_said(caplog)
    assert len(run(2, [1.0, 0.2], kept)) == 32
    assert "settings: `reward_weights` ([1.0, 0.5] there, [1.0, 0.2] here). Weights" in what_was_said(caplog)


def test_an_unfinished_rollout_goes_on_where_steps_alone_are_of_another_size(tiny_model, tmp_path, caplog):
    """Rollouts of 8 parts of 4 rows: the first step took 4 parts, the next ones take 2."""
    settings = {"steps_per_generation": 8, "num_prompts": 48, **SAVED}
    whole = make_trainer(tiny_model, tmp_path, max_steps=1, **settings)
    seen = spy_on_training(whole)
    whole.train()
    trainer = make_trainer(tiny_model, tmp_path, max_steps=3, gradient_accumulation_steps=2, **settings)
    rest = spy_on_training(trainer)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert trainer.sampled == []
    groups = trained(seen) + trained(rest)
    assert {groups.count(prompt) for prompt in groups} == {4}
    assert "other settings" not in what_was_said(caplog)


def test_an_unfinished_rollout_is_left_behind_where_no_step_would_end_with_it(tiny_model, tmp_path, caplog):
    """Of 6 parts 2 have trained; steps of 3 would end at 5, 8, ... and never look at the limits of the run."""
    settings = {"steps_per_generation": 6, "num_prompts": 48, "max_passes": 1.0, **SAVED}
    make_trainer(tiny_model, tmp_path, max_steps=1, gradient_accumulation_steps=2, **settings).train()
    trainer = make_trainer(tiny_model, tmp_path, max_steps=60, gradient_accumulation_steps=3, **settings)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert "`gradient_accumulation_steps` (2 there, 3 here)" in what_was_said(caplog)
    assert trainer.state.global_step < 60
    passes = [entry["dynamic_sampling/passes"] for entry in trainer.state.log_history if "reward" in entry]
    assert 1.0 <= passes[-1] < 2.0


@pytest.mark.parametrize("from_step", [1, 2])
def test_a_rollout_that_ends_inside_a_step_resumes_bit_by_bit(tiny_model, tmp_path, from_step, caplog):
    """Of 6 parts steps of 4 take the first 4, then 2 and 2 of the next rollout: none needs to end with a rollout."""
    settings = {"steps_per_generation": 6, "max_steps": 3, "num_prompts": 48, **SAVED}
    whole = make_trainer(tiny_model, tmp_path, **settings)
    whole.train()
    again = make_trainer(tiny_model, tmp_path, **settings)
    again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{from_step}"))
    assert "other settings" not in what_was_said(caplog)
    assert torch.equal(weights(whole), weights(again))


def test_settings_that_differ_without_leaving_anything_behind_are_not_warned_of(tiny_model, tmp_path, caplog):
    make_trainer(tiny_model, tmp_path, max_steps=1, num_prompts=48, **SAVED).train()
    trainer = make_trainer(tiny_model, tmp_path, max_steps=2, num_prompts=48, dynamic_sampling_surplus="carry")
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert "other settings" not in what_was_said(caplog)
    assert number(trainer.sampled[0]) == 8  # the prompts go on: two rounds of four were drawn before


def test_an_unfinished_rollout_is_left_behind_where_dynamic_sampling_was_turned_off(tiny_model, tmp_path, caplog):
    make_trainer(tiny_model, tmp_path, max_steps=1, steps_per_generation=8, num_prompts=48, **SAVED).train()
    trainer = make_trainer(
        tiny_model, tmp_path, max_steps=2, steps_per_generation=8, num_prompts=48, use_dynamic_sampling=False
    )
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert "`use_dynamic_sampling` (True there, False here)" in what_was_said(caplog)


def test_ignore_data_skip_starts_a_fresh_pass_and_resumes_all_else(tiny_model, tmp_path, carrying, caplog):
    settings = {"script": half_right, "max_steps": 2, "num_prompts": 120, "ignore_data_skip": True, **CARRY}
    trainer = make_trainer(tiny_model, tmp_path / "resumed", **settings)
    seen = spy_on_training(trainer)
    trainer.train(resume_from_checkpoint=carrying)
    assert [number(text) for text in trainer.sampled[::4]] == [0, 1, 2, 3, 4, 5, 6, 7]
    assert {*trained(seen)} == {7, 1, 2, 4}  # the carried one first
    assert trainer._sampler.totals.groups_sampled == 16
    assert "other settings" not in what_was_said(caplog)


def test_the_memory_is_read_once(tiny_model, tmp_path, monkeypatch):
    settings = {"dynamic_sampling_memory": True, **SAVED}
    make_trainer(tiny_model, tmp_path, max_steps=1, **settings).train()
    known = names_and_rates(tmp_path / "checkpoint-1")
    assert known
    read, read_table = [], pq.read_table
    monkeypatch.setattr(pq, "read_table", lambda path: read.append(path) or read_table(path))
    trainer = make_trainer(tiny_model, tmp_path, max_steps=2, **settings)
    trainer.train(resume_from_checkpoint=True)
    assert read.count(tmp_path / "checkpoint-1/dapo_memory.parquet") == 1
    assert names_and_rates(tmp_path / "checkpoint-2").items() >= known.items()


# ---- Torn checkpoints ----


@pytest.mark.parametrize("torn", ["without its state", "with half its state"])
def test_resuming_passes_over_a_checkpoint_that_was_not_written_to_its_end(tiny_model, tmp_path, torn):
    whole = make_trainer(tiny_model, tmp_path, max_steps=4, **SAVED)
    whole.train()
    state = tmp_path / "checkpoint-4" / "trainer_state.json"
    text = state.read_text()
    state.unlink()
    if torn == "with half its state":
        state.write_text(text[: len(text) // 2])
    again = make_trainer(tiny_model, tmp_path, max_steps=4, **SAVED)
    again.train(resume_from_checkpoint=True)
    assert [log["step"] for log in again.state.log_history if "loss" in log] == [1, 2, 3, 4]
    assert len(again.sampled) < len(whole.sampled) / 2  # step 4 alone was taken again
    assert torch.equal(weights(whole), weights(again))


def test_a_run_that_was_killed_while_it_saved_resumes_bit_by_bit(tiny_model, tmp_path):
    victim = json.dumps({"victim": {"max_steps": 3, "kill_in_save": 2}})
    assert launch("sampled_runs", tiny_model, tmp_path, victim, num_processes=1).returncode == -signal.SIGKILL
    torn = tmp_path / "victim" / "run" / "checkpoint-2"
    assert (torn / "optimizer.pt").exists()
    assert not (torn / "trainer_state.json").exists()
    jobs.sampled_run(tiny_model, tmp_path / "victim", {"max_steps": 3, "resume_from": True})
    jobs.sampled_run(tiny_model, tmp_path / "whole", {"max_steps": 3})
    resumed, whole = ((tmp_path / name / "report-1-0.json").read_text() for name in ("victim", "whole"))
    assert resumed == whole


def test_a_checkpoint_that_is_written_over_is_not_whole_until_its_end(tiny_model, tmp_path, monkeypatch):
    make_trainer(tiny_model, tmp_path, max_steps=2, **SAVED).train()
    again = make_trainer(tiny_model, tmp_path, max_steps=2, learning_rate=1e-2, **SAVED)
    save = again._save_rng_state
    monkeypatch.setattr(again, "_save_rng_state", lambda folder: stop() if folder.endswith("2") else save(folder))
    with pytest.raises(KeyboardInterrupt):
        again.train()
    assert last_complete_checkpoint(tmp_path) == tmp_path / "checkpoint-1"


def stop():
    raise KeyboardInterrupt


def test_the_entropy_coefficient_is_resumed_from_a_checkpoint_that_was_whole_before_trl_wrote_it(tiny_model, tmp_path):
    settings = {"max_steps": 4, "use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_target": 10.0, **SAVED}
    whole = make_trainer(tiny_model, tmp_path, **settings)
    whole.train()
    assert whole.entropy_coef == pytest.approx(0.1 + 4 * 0.005)  # a notch a step: the entropy is below its target
    (tmp_path / "checkpoint-2" / "entropy_ctrl_state.json").unlink()  # TRL writes it last
    again = make_trainer(tiny_model, tmp_path, **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert (again.entropy_coef, again._last_world_entropy) == (whole.entropy_coef, whole._last_world_entropy)
    assert torch.equal(weights(whole), weights(again))


def test_resuming_where_no_checkpoint_is_whole_starts_from_the_beginning_and_says_so(tiny_model, tmp_path, caplog):
    (tmp_path / "checkpoint-3").mkdir()
    trainer = make_trainer(tiny_model, tmp_path, max_steps=2)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 2
    assert "holds no complete checkpoint: the run starts from the beginning" in what_was_said(caplog)


def test_a_run_that_begins_where_an_earlier_one_left_checkpoints_says_which_is_the_last(tiny_model, tmp_path, caplog):
    said = f"{tmp_path / 'checkpoint-2'} is of an earlier run, and this one starts from the beginning"
    trainer = make_trainer(tiny_model, tmp_path, max_steps=2, **SAVED)
    for _ in range(2):  # its own is of no earlier run
        trainer.train()
    make_trainer(tiny_model, tmp_path, max_steps=2).train(resume_from_checkpoint=True)
    assert said not in what_was_said(caplog)
    os.utime(tmp_path / "checkpoint-2", (0, 0))
    make_trainer(tiny_model, tmp_path, max_steps=1, **SAVED, save_total_limit=1).train()
    assert what_was_said(caplog).count(said) == 1
    assert "deletes checkpoints of the earlier run as it saves its own (`save_total_limit=1`)" in what_was_said(caplog)
    assert not (tmp_path / "checkpoint-2").exists()


def sampler_state(checkpoint):
    return json.loads((checkpoint / "dapo_state.json").read_text())


def test_a_run_without_dynamic_sampling_goes_on_with_it_in_a_fresh_pass_and_says_so(tiny_model, tmp_path, caplog):
    make_trainer(tiny_model, tmp_path, max_steps=1, use_dynamic_sampling=False, **SAVED).train()
    trainer = make_trainer(tiny_model, tmp_path, max_steps=2)
    trainer.train(resume_from_checkpoint=True)
    assert number(trainer.sampled[0]) == 0
    assert "`use_dynamic_sampling` (False there, True here)" in what_was_said(caplog)
    assert "the prompts start a fresh pass" in what_was_said(caplog)


@pytest.fixture(scope="module")
def resumed_from_damage(tiny_model, tmp_path_factory):
    """Where two processes resumed from checkpoints of which one rank's state cannot be read, and what they said."""
    folder, overrides = tmp_path_factory.mktemp("damaged"), {"steps_per_generation": 8, "max_steps": 2}
    jobs.sampled_run(tiny_model, folder / "fewer processes", dict(overrides))
    run = launch("sampled_runs", tiny_model, folder, json.dumps({"missing": overrides}), num_processes=2)
    assert run.returncode == 0, run.stderr[-3000:]
    shutil.copytree(folder / "missing", folder / "torn")
    checkpoints = {
        damage: folder / damage / "run" / "checkpoint-1"  # inside a rollout of two steps
        for damage in ("missing", "torn", "fewer processes")
    }
    (checkpoints["missing"] / "dapo_state_rank1.pt").unlink()
    state = checkpoints["torn"] / "dapo_state_rank1.pt"
    state.write_bytes(state.read_bytes()[:100])
    resumed = {
        f"{damage}, resumed": {**overrides, "resume_from": str(checkpoint)}
        for damage, checkpoint in checkpoints.items()
    }
    run = launch("sampled_runs", tiny_model, folder, json.dumps(resumed), num_processes=2)
    assert run.returncode == 0, run.stderr[-3000:]
    return folder, checkpoints, run.stderr


@pytest.mark.parametrize("damage", ["missing", "torn", "fewer processes"])
def test_where_one_ranks_state_cannot_be_read_no_rank_loads_its_own(resumed_from_damage, damage):
    """What all ranks share goes on: the order of the prompts and what a run's limits count."""
    folder, checkpoints, stderr = resumed_from_damage
    checkpoint, resumed = checkpoints[damage], folder / f"{damage}, resumed"
    said = "\n".join(line for line in stderr.splitlines() if str(checkpoint) in line)
    assert said.count("are left behind") == 1  # of two processes
    if damage == "fewer processes":
        assert "written with other settings: `num_processes` (1 there, 2 here)" in said
    else:
        assert "cannot be resumed as a whole: it" in said
    logs = json.loads((resumed / "report-2-0.json").read_text())["logs"]
    num_again = logs[-1]["dynamic_sampling/groups_generated"]
    assert num_again > 0  # the rollout was sampled again
    before, after = sampler_state(checkpoint), sampler_state(resumed / "run" / "checkpoint-2")
    assert after["num_rollouts"] == before["num_rollouts"] + 1 == 2
    assert after["totals"]["groups_sampled"] == before["totals"]["groups_sampled"] + num_again
    assert after["stream"] != before["stream"]


@pytest.mark.parametrize("uses_memory", [False, True])
def test_a_state_whose_rows_are_lost_goes_on_in_its_pass_and_its_ledger(tiny_model, tmp_path, caplog, uses_memory):
    settings = {"dynamic_sampling_memory": uses_memory, **SAVED}
    make_trainer(tiny_model, tmp_path, max_steps=1, **settings).train()
    (tmp_path / "checkpoint-1" / "dapo_state_rank0.pt").unlink()
    before = sampler_state(tmp_path / "checkpoint-1")
    trainer = make_trainer(tiny_model, tmp_path, max_steps=2, **settings)
    trainer.train(resume_from_checkpoint=True)
    assert number(trainer.sampled[0]) == before["totals"]["groups_sampled"]  # the next in order
    assert trainer._sampler.totals.groups_sampled > before["totals"]["groups_sampled"]
    assert trainer._sampler.num_rollouts == 2
    assert not (tmp_path / "rollouts-1").exists()
    assert "it has no dapo_state_rank0.pt" in what_was_said(caplog)
    assert "fresh pass" not in what_was_said(caplog)


@pytest.mark.parametrize(
    "damage",
    [
        "missing memory",
        "torn memory",
        "another state",
        "no state",
        "a state without totals",
        "a state with other totals",
    ],
)
def test_a_checkpoint_that_cannot_be_read_as_a_whole_is_resumed_without_its_sampler(
    tiny_model, tmp_path, damage, caplog
):
    make_trainer(tiny_model, tmp_path, max_steps=1, dynamic_sampling_memory=True, **SAVED).train()
    checkpoint = tmp_path / "checkpoint-1"
    if damage == "missing memory":
        (checkpoint / "dapo_memory.parquet").unlink()
    elif damage == "torn memory":
        (checkpoint / "dapo_memory.parquet").write_bytes(b"PAR1")
    elif damage == "a state without totals":  # of an earlier version
        state = json.loads((checkpoint / "dapo_state.json").read_text())
        del state["totals"]
        (checkpoint / "dapo_state.json").write_text(json.dumps(state))
    elif damage == "a state with other totals":
        state = json.loads((checkpoint / "dapo_state.json").read_text())
        state["totals"]["another"] = 1
        (checkpoint / "dapo_state.json").write_text(json.dumps(state))
    else:
        (checkpoint / "dapo_state.json").write_text('{"seed": 1}' if damage == "another state" else "[]")
    trainer = make_trainer(tiny_model, tmp_path, max_steps=2, dynamic_sampling_memory=True)
    trainer.train(resume_from_checkpoint=str(checkpoint))
    assert number(trainer.sampled[0]) == 0  # a fresh pass
    assert "cannot be resumed as a whole: it" in what_was_said(caplog)


def test_a_run_that_has_ended_ends_at_once_when_it_is_started_again(tiny_model, tmp_path):
    settings = {"max_steps": 2, "lr_scheduler_type": "constant", **SAVED}
    whole = make_trainer(tiny_model, tmp_path, **settings)
    whole.train()
    again = make_trainer(tiny_model, tmp_path, **settings)
    output = again.train(resume_from_checkpoint=True)
    assert again.sampled == []
    assert output.global_step == again.state.global_step == 2
    assert torch.equal(weights(whole), weights(again))
    assert last_complete_checkpoint(tmp_path) == tmp_path / "checkpoint-2"


# ---- Other data ----


def names_and_rates(checkpoint):
    table = pq.read_table(checkpoint / "dapo_memory.parquet").to_pylist()
    return {row["prompt_id"]: row["pass_rate"] for row in table}


@pytest.mark.parametrize("ids", [None, [None] * 12], ids=["no ids", "ids that are None"])
def test_every_prompt_has_a_record_of_its_own_that_a_reordered_dataset_finds_again(tiny_model, tmp_path, ids, caplog):
    def run(dataset, max_steps, checkpoint=None):
        args = tiny_config(tmp_path, max_steps=max_steps, dynamic_sampling_memory=True, **SAVED)
        trainer = ScriptedTrainer(tiny_model, right, args, train_dataset=dataset, script=mixed_unless_multiple_of_3)
        trainer.train(resume_from_checkpoint=checkpoint)

    dataset = prompts(12) if ids is None else prompts(12, id=ids)
    run(dataset, 8)
    before = names_and_rates(tmp_path / "checkpoint-8")
    assert sorted(before.values()) == [0.0] * 4 + [0.25] * 8
    run(dataset.shuffle(seed=1), 16, str(tmp_path / "checkpoint-8"))
    assert names_and_rates(tmp_path / "checkpoint-16") == before
    assert "`dataset` (" in what_was_said(caplog)
    assert "the prompts start a fresh pass" in what_was_said(caplog)


def test_a_dataset_that_has_grown_starts_a_fresh_pass(tiny_model, tmp_path):
    make_trainer(tiny_model, tmp_path, max_steps=2, num_prompts=24, **SAVED).train()
    trainer = make_trainer(tiny_model, tmp_path, max_steps=4, num_prompts=30)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    groups = [number(text) for text in trainer.sampled[::4]]
    assert groups == list(range(len(groups)))


def test_another_stream_starts_a_fresh_pass_and_says_so(tiny_model, tmp_path, caplog):
    def run(texts, max_steps, checkpoint=None):
        stream = IterableDataset.from_generator(lambda: ({"prompt": text} for text in texts))
        args = tiny_config(tmp_path, shuffle_dataset=False, max_steps=max_steps, **SAVED)
        trainer = ScriptedTrainer(tiny_model, right, args, train_dataset=stream, script=half_right)
        trainer.train(resume_from_checkpoint=checkpoint)
        return number(trainer.sampled[0])

    run([f"prompt {i}:" for i in range(40)], 1)
    checkpoint = str(tmp_path / "checkpoint-1")
    assert run([f"prompt {i}:" for i in range(40)], 2, checkpoint) == 8
    assert "other settings" not in what_was_said(caplog)
    assert run([f"prompt {i}:" for i in range(1, 41)], 2, checkpoint) == 1
    assert "written with other settings: `first_rows` (" in what_was_said(caplog)
    assert "the prompts start a fresh pass" in what_was_said(caplog)


@pytest.mark.parametrize("from_step", [2, 3, 5])
def test_a_streamed_dataset_resumes_bit_by_bit_after_its_first_pass(tiny_model, tmp_path, from_step):
    def run(checkpoint=None):
        stream = IterableDataset.from_generator(lambda: ({"prompt": f"prompt {i}:"} for i in range(10)))
        args = tiny_config(tmp_path, max_steps=6, **SAVED)
        trainer = DAPOTrainer(tiny_model, jobs.vowels, args, train_dataset=stream)
        trainer.train(resume_from_checkpoint=checkpoint)
        return trainer

    whole = run()
    assert whole.state.log_history[4]["dynamic_sampling/passes"] > 1
    kept = tmp_path / "kept"
    shutil.copytree(tmp_path / f"checkpoint-{from_step}", kept)
    assert torch.equal(weights(whole), weights(run(str(kept))))


# ---- What is half asked ----

HALF = {"dynamic_sampling_surplus": "carry", "dynamic_sampling_screen": "3", "seed": 1, **SAVED}
DATED = [{"prompt": f"prompt {i}:", "on": datetime.date(2026, 1, 1 + i), "raw": bytes([i, 255])} for i in range(12)]
PICTURED = Features({"prompt": Value("string"), "on": Image()})


def with_tuples(rows):
    return {**rows, "on": [{"of": (1, {2: float("nan")})}] * len(rows["prompt"])}


def num_half(log):
    return int(log.get("dynamic_sampling/half_asked", 0))


def dated_stream():
    return IterableDataset.from_generator(lambda: iter(DATED))


@pytest.mark.parametrize(
    "dataset",
    [
        lambda: Dataset.from_list(DATED),
        lambda: Dataset.from_dict({"prompt": [row["prompt"] for row in DATED], "on": range(12)}).with_format("numpy"),
        lambda: prompts(12).with_transform(with_tuples),
        lambda: Dataset.from_dict({"prompt": [f"prompt {i}:" for i in range(12)], "on": [IMAGE] * 12}, PICTURED),
        dated_stream,
    ],
    ids=["dates", "numpy", "tuples", "images", "stream"],
)
def test_what_is_half_asked_is_kept_whatever_its_columns_hold(tiny_model, tmp_path, dataset, caplog):
    def run(folder, checkpoint=None):
        seen = []

        def vowels(prompts, completions, on, **kwargs):
            seen.extend((prompt, repr(value)) for prompt, value in zip(prompts, on, strict=True))
            return jobs.vowels(completions)

        args = tiny_config(folder, skip_preflight=True, max_steps=4, **HALF)
        trainer = DAPOTrainer(tiny_model, vowels, args, train_dataset=dataset())
        trainer.train(resume_from_checkpoint=checkpoint)
        return trainer, seen

    whole, all_seen = run(tmp_path / "whole")
    step = next(log["step"] for log in whole.state.log_history if num_half(log) and log["dynamic_sampling/passes"] > 1)
    resumed, seen = run(tmp_path / "resumed", str(tmp_path / f"whole/checkpoint-{step}"))
    assert torch.equal(weights(resumed), weights(whole))
    if "Image" not in repr(seen):  # whose address it shows
        assert seen == all_seen[-len(seen) :]
    assert "left behind" not in what_was_said(caplog)


def test_what_is_half_asked_of_a_prompt_that_is_another_now_is_left_behind_and_said(tiny_model, tmp_path, caplog):
    """Its id and its place are the same; the next prompts come as before."""

    def run(text, checkpoint=None):
        rows = [{"id": i, "prompt": f"{text} {i}:"} for i in range(12)]
        args = tiny_config(tmp_path, max_steps=4, **HALF)
        trainer = DAPOTrainer(tiny_model, jobs.vowels, args, train_dataset=Dataset.from_list(rows))
        trainer.train(resume_from_checkpoint=checkpoint)
        return trainer

    log = next(log for log in run("prompt").state.log_history[:3] if num_half(log))
    run("question", str(tmp_path / f"checkpoint-{log['step']}"))
    assert (
        f"holds half of {num_half(log)} groups whose examples are not found again: they are left behind"
        in what_was_said(caplog)
    )

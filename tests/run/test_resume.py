# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Resuming where something is not as it was: other settings, other data, files that are missing or torn."""

import datetime
import functools
import json
import os
import shutil
import signal

import jobs
import PIL.Image
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset, Features, Image, IterableDataset, Value
from helpers import (
    is_dummy,
    launch,
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

from trl_dapo import DAPOTrainer
from trl_dapo.run.checkpoint import RANK_NAME, fingerprint, last_complete_checkpoint
from trl_dapo.sampling.prompts import FINGERPRINT_ROWS
from trl_dapo.settings.sampling_defaults import PAPER


IMAGE = PIL.Image.new("RGB", (2, 2), "red")
SAVED = {"save_strategy": "steps", "save_steps": 1}
CARRY = {**PAPER, "dynamic_sampling_surplus": "carry", "batch_multiplier": 1.0}
NO_CARRY = {"dynamic_sampling_surplus": "discard", "batch_multiplier": None}
TWO_STEPS = {"steps_per_generation": 8}  # of which a rollout has parts


def trained(trainer):
    """Prompts whose completions had tokens in the loss."""
    return [number(text) for text, *_, tokens in trainer.seen if tokens]


def test_computed_batch_sizes_in_a_checkpoint_are_loaded_with_weights_only(made, tmp_path):
    # 8 prompts x 4 completions are 32 rows: 8 micro-batches of 4 rows.
    trainer = made(prompts_per_step=8, gradient_accumulation_steps=1)
    torch.save(trainer.update_phase_state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert (state["accumulation"], state["generate_every"]) == (8, 8)


@pytest.fixture
def run(made, tmp_path):
    """Trains, from a checkpoint in its folder or as told; the trainer has the rows that came to the loss as `seen`."""

    def train(max_steps, resume=None, **settings):
        settings = {"script": mixed_unless_multiple_of_3, "shuffle_dataset": False, **SAVED, **settings}
        trainer = made(max_steps=max_steps, **{"dataset": prompts(120), **settings})
        trainer.seen = spy_on_training(trainer)
        trainer.train(resume_from_checkpoint=str(tmp_path / resume) if isinstance(resume, str) else resume)
        return trainer

    return train


@pytest.fixture
def carrying(run):
    """A checkpoint that carries group 7: of two rounds of 4 prompts, 1 2 4 5 have trained."""
    run(1, into="carrying", **CARRY)
    return "carrying/checkpoint-1"


def longest(completions, **kwargs):
    return right(completions)


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ({"dynamic_sampling_surplus": "discard"}, "dynamic_sampling_surplus"),
        ({"dynamic_sampling_mode": "mask", **NO_CARRY}, "dynamic_sampling_mode"),
        ({"num_generations": 2}, "num_generations"),
        ({"per_device_train_batch_size": 1}, "prompts_per_rollout"),
        ({"reward_weights": [0.3]}, "reward_weights"),
        ({"reward_scaling": [0.0, 1.0, -5.0, 5.0]}, "reward_scaling"),  # advantages of 0.75 next to those of 5.0
        ({"reward_funcs": longest}, "reward_funcs"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_carried_groups_that_do_not_fit_are_left_behind_with_one_warning(run, carrying, overrides, name, caplog):
    trainer = run(4, carrying, **{**CARRY, **overrides})
    counts = {prompt: trained(trainer).count(prompt) for prompt in set(trained(trainer))}
    # What trains was sampled now, from the ninth prompt on, each group once and whole, and none that is never solved.
    assert min(counts) >= 8
    assert set(counts.values()) == {trainer.num_generations}
    assert all(prompt % 3 for prompt in counts)
    assert len(trainer.seen) == 3 * trainer.args.generation_batch_size
    assert f"`{name}` (" in caplog.text
    assert caplog.text.count("written with other settings") == 1


def half_right(text, i):
    return "right" if number(text) % 3 and i % 4 < 2 else "wrong"


def carried_into(run, checkpoint, **settings):
    """The prompts that train in two further steps: 7 among them if what the checkpoint carries does."""
    return {*trained(run(3, checkpoint, script=half_right, **{**CARRY, **settings}))}


def test_settings_that_rows_do_not_hang_on_may_change(run, carrying, caplog):
    overrides = {"learning_rate": 1e-4, "epsilon_high": 0.3, "logging_steps": 2, "log_groups": 1}
    overrides |= {"max_tokens_per_microbatch": 64, "eval_temperature": 0.5, "vllm_gpu_memory_utilization": 0.5}
    assert 7 in carried_into(run, carrying, **overrides)
    assert "other settings" not in caplog.text


def lets_in_all(rewards, rows):
    return None


def lets_in_few(rewards, rows):
    return None if number(rows[0]["prompt"]) in (2, 5, 7, 8, 10, 11, 13, 14, 16, 17) else "few"


@pytest.mark.parametrize(
    ("there", "here"), [(None, lets_in_few), (lets_in_few, None), (lets_in_few, lets_in_all), (lets_in_few,) * 2]
)
def test_groups_are_dropped_if_a_group_filter_is_added_removed_or_changed(run, tmp_path, there, here, caplog):
    run(1, group_filter=there, **CARRY)
    assert torch.load(tmp_path / "checkpoint-1" / "dapo_state_rank0.pt", weights_only=True)["queue"]["groups"]
    resumed = run(2, "checkpoint-1", group_filter=here, **CARRY)
    assert bool(resumed._sampler.rollout.num_accepted_before) == (there is here)
    assert ("`group_filter` (" in caplog.text) == (there is not here)


def changed(args, **others):
    """Return the part of the fingerprint that differs from that of the usual settings."""
    usual = fingerprint(tiny_config(args.output_dir), {"group_filter": None})
    other = fingerprint(args, {"group_filter": None, **others})
    return {name: value for name, value in other.items() if usual.get(name) != value}


def test_a_rule_names_each_setting_that_rows_hang_on(tmp_path):
    settings = {"temperature": 0.5, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1}
    settings |= {"generation_kwargs": {"length_penalty": 2.0}, "chat_template_kwargs": {"enable_thinking": False}}
    settings |= {"max_completion_length": 16, "max_tool_calling_iterations": 3, "mask_truncated_completions": True}
    settings |= {"dynamic_sampling_min_accuracy": 0.3, "dynamic_sampling_max_accuracy": 0.9}
    settings |= {"dynamic_sampling_accuracy_threshold": 0.5, "use_transformers_continuous_batching": True}
    settings |= {"overlong_buffer_length": 4, "overlong_penalty_factor": 0.5}
    settings |= {"scale_rewards": "none", "multi_objective_aggregation": "normalize_then_sum"}
    assert changed(tiny_config(tmp_path, **settings)) == settings


def test_the_fingerprint_contains_the_settings_of_an_engine_that_samples(tmp_path):
    vllm = {"vllm_mode": "server", "vllm_structured_outputs_regex": "[0-9]+"}
    assert changed(tiny_config(tmp_path, **vllm)) == {}
    weights = {"correction": True, "mode": "token_truncate", "clip_max": 2.0}
    named = {"use_vllm": True, **vllm, **{f"vllm_importance_sampling_{name}": is_ for name, is_ in weights.items()}}
    assert changed(tiny_config(tmp_path, use_vllm=True, **vllm)) == named


def test_the_fingerprint_represents_functions_by_names_that_the_next_run_has_too(tmp_path):
    args = tiny_config(tmp_path, generation_kwargs={"prefix_allowed_tokens_fn": len})
    assert changed(args, group_filter=functools.partial(lets_in_few, rows=[])) == {
        "generation_kwargs": {"prefix_allowed_tokens_fn": "len"},
        "group_filter": "lets_in_few",
    }
    # An object has no name of its own, and no address.
    assert changed(args, group_filter=Dataset.from_list([]))["group_filter"] == "Dataset"


def test_prompts_in_another_order_start_a_fresh_pass(run, caplog):
    """In random order the rest of the pass would hold prompts that were drawn, and lack others."""
    run(1, dataset=prompts(12), **PAPER)
    all_mixed = {"script": lambda text, i: "right" if i % 4 == 0 else "wrong", "dataset": prompts(12), **PAPER}
    trainer = run(2, "checkpoint-1", shuffle_dataset=True, **all_mixed)
    assert trainer.state.log_history[-2]["dynamic_sampling/passes"] == pytest.approx(1 + 4 / 12)
    assert "`shuffle_dataset` (False there, True here)" in caplog.text


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"beta": 0.1}, "`beta` (0.0 there, 0.1 here)"),  # which needs a reference
        ({"steps_per_generation": 12}, "its completions of an unfinished rollout and of carried groups are not used"),
        ({"use_dynamic_sampling": False}, "`use_dynamic_sampling` (True there, False here)"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_an_unfinished_rollout_that_does_not_fit_is_not_used(run, overrides, said, caplog):
    run(1, **TWO_STEPS)
    trainer = run(2, "checkpoint-1", **{**TWO_STEPS, **overrides})
    assert said in caplog.text
    assert trainer.sampled
    assert min(trained(trainer)) >= 12 or not trainer.args.use_dynamic_sampling  # which keeps to its own order


def test_a_memory_that_is_turned_on_inside_a_rollout_is_saved(run, tmp_path):
    run(1, dynamic_sampling_memory=False, **TWO_STEPS)
    run(2, "checkpoint-1", dynamic_sampling_memory=True, **TWO_STEPS)
    assert pq.read_table(tmp_path / "checkpoint-2" / "dapo_memory.parquet").num_rows == 0  # nothing was sampled since


@pytest.mark.parametrize(
    ("there", "here"),
    # A rollout of 16 rows in both, and 16 micro-steps; two steps of the first are half of it.
    [((1, 16, 1, 8), (2, 8, 2, 4)), ((2, 8, 2, 4), (1, 16, 1, 8))],
    ids=["trained twice", "not there"],
)
def test_an_unfinished_rollout_that_is_split_differently_is_not_used(run, there, here, caplog):
    names = ["per_device_train_batch_size", "steps_per_generation", "num_iterations", "gradient_accumulation_steps"]
    before = trained(run(1, **dict(zip(names, there, strict=True))))
    after = trained(run(3, "checkpoint-1", **dict(zip(names, here, strict=True))))
    assert (len(before), len(after)) == (8, 16)  # as many rows as one and two steps have
    assert not {*before} & {*after}
    for name, was, is_now in zip(names[:3], there, here, strict=False):
        assert f"`{name}` ({was} there, {is_now} here)" in caplog.text


@pytest.mark.parametrize("from_step", [1, 2])
@pytest.mark.parametrize(
    "settings", [{"use_dynamic_sampling": False, **TWO_STEPS}, {"steps_per_generation": 6}], ids=["grpo", "6 parts"]
)
def test_inside_a_rollout_a_run_resumes_bit_by_bit(run, settings, from_step, caplog):
    """With 6 parts per rollout and steps of 4, a step may take parts of two rollouts: 4, then 2 and 2 of the next."""
    whole, again = run(3, **settings), run(3, f"checkpoint-{from_step}", **settings)
    assert len(again.sampled) < len(whole.sampled)  # the second rollout alone
    assert "other settings" not in caplog.text
    assert torch.equal(weights(whole), weights(again))


def test_an_unfinished_rollout_continues_if_only_the_size_of_steps_changed(run, caplog):
    """Rollouts of 8 parts of 4 rows: the first step took 4 parts, the next ones take 2."""
    groups = trained(run(1, **TWO_STEPS))
    rest = run(3, "checkpoint-1", gradient_accumulation_steps=2, **TWO_STEPS)
    assert rest.sampled == []
    groups += trained(rest)
    assert {groups.count(prompt) for prompt in groups} == {4}
    assert "other settings" not in caplog.text


def test_an_unfinished_rollout_is_dropped_if_no_step_would_end_with_it(run, caplog):
    """After 2 of 6 parts, steps of 3 would end at 5, 8, ..., never with a rollout, after which limits are checked."""
    settings = {"steps_per_generation": 6, "dataset": prompts(48), "max_tokens_generated": 600}
    run(1, gradient_accumulation_steps=2, **settings)
    trainer = run(60, "checkpoint-1", gradient_accumulation_steps=3, **settings)
    assert "`gradient_accumulation_steps` (2 there, 3 here)" in caplog.text
    assert trainer.state.global_step < 60
    assert 600 <= trainer._sampler.totals.tokens_generated < 1200


def test_settings_that_differ_without_leaving_anything_behind_are_not_warned_of(run, caplog):
    run(1)
    trainer = run(2, "checkpoint-1", dynamic_sampling_surplus="carry")
    assert "other settings" not in caplog.text
    assert number(trainer.sampled[0]) == 8  # the prompts continue: two rounds of four were drawn before


def test_ignore_data_skip_starts_a_fresh_pass_and_resumes_all_else(run, carrying, caplog):
    trainer = run(2, carrying, script=half_right, ignore_data_skip=True, **CARRY)
    assert [number(text) for text in trainer.sampled[::4]] == [0, 1, 2, 3, 4, 5, 6, 7]
    assert {*trained(trainer)} == {7, 1, 2, 4}  # the carried one first
    assert trainer._sampler.totals.groups_sampled == 16
    assert "other settings" not in caplog.text


# ---- Torn checkpoints ----


@pytest.mark.parametrize("torn", ["without its state", "with half its state"])
def test_resuming_passes_over_a_checkpoint_that_was_not_written_to_its_end(run, tmp_path, torn):
    whole = run(4)
    state = tmp_path / "checkpoint-4" / "trainer_state.json"
    text = state.read_text()
    state.unlink()
    if torn == "with half its state":
        state.write_text(text[: len(text) // 2])
    again = run(4, True)
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


def test_a_checkpoint_that_is_written_over_is_not_whole_until_its_end(tiny_model, run, tmp_path, monkeypatch):
    run(2)
    again = make_trainer(tiny_model, tmp_path, max_steps=2, learning_rate=1e-2, **SAVED)
    save = again._save_rng_state
    monkeypatch.setattr(again, "_save_rng_state", lambda folder: 1 / 0 if folder.endswith("2") else save(folder))
    with pytest.raises(ZeroDivisionError):
        again.train()
    assert last_complete_checkpoint(tmp_path) == tmp_path / "checkpoint-1"


def test_the_entropy_coefficient_is_resumed_from_a_checkpoint_that_was_whole_before_trl_wrote_it(run, tmp_path):
    settings = {"use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_target": 10.0}
    whole = run(4, **settings)
    assert whole.entropy_coef == pytest.approx(0.1 + 4 * 0.005)  # a notch a step: the entropy is below its target
    (tmp_path / "checkpoint-2" / "entropy_ctrl_state.json").unlink()  # TRL writes it last
    again = run(4, "checkpoint-2", **settings)
    assert (again.entropy_coef, again._last_world_entropy) == (whole.entropy_coef, whole._last_world_entropy)
    assert torch.equal(weights(whole), weights(again))


def test_that_a_reward_gives_scores_is_not_learnt_anew(run):
    """Three values in the first rollout, and two in all later ones."""

    def graded(prompts, completions, trainer_state, **kwargs):
        partly = 0.0 if trainer_state.global_step else 0.5
        rewards = zip(prompts, right(completions), strict=True)
        return [reward or partly * (number(prompt) == 2) for prompt, reward in rewards]

    settings = {"reward_funcs": graded, "dynamic_sampling_memory": True}
    whole = run(4, into="whole", **settings)
    resumed = run(4, "whole/checkpoint-1", into="whole", **settings)
    assert not whole._task.has_correctness
    assert not resumed._task.has_correctness
    assert untimed(resumed.state.log_history) == untimed(whole.state.log_history)
    assert torch.equal(weights(resumed), weights(whole))


def test_rewards_are_not_resumed_if_another_reward_decides(run, caplog):
    def score(prompts, completions, **kwargs):
        return [reward or number(prompt) / 64 for prompt, reward in zip(prompts, right(completions), strict=True)]

    assert not run(1, reward_funcs=score)._task.has_correctness
    assert run(2, "checkpoint-1")._task.has_correctness


def test_resuming_without_a_complete_checkpoint_starts_from_the_beginning_with_a_warning(run, tmp_path, caplog):
    (tmp_path / "checkpoint-3").mkdir()
    assert run(2, True).state.global_step == 2
    assert (
        f"{tmp_path / 'checkpoint-3'} is not complete: it has no `trainer_state.json`, which is written last. "
        f"{tmp_path} contains no complete checkpoint, so the run starts from the beginning."
    ) in caplog.text


def test_a_new_run_in_a_folder_with_checkpoints_names_the_last_one(tiny_model, run, tmp_path, caplog):
    said = f"{tmp_path / 'checkpoint-2'} is from an earlier run, but this run starts from the beginning"
    trainer = make_trainer(tiny_model, tmp_path, max_steps=2, **SAVED)
    trainer.train()
    trainer.train()  # its own is of no earlier run
    run(2, True, dataset=prompts(24), save_strategy="no")
    assert "earlier run" not in caplog.text
    os.utime(tmp_path / "checkpoint-2", (0, 0))
    run(1, save_total_limit=1)
    assert caplog.text.count(said) == 1
    assert "delete checkpoints of the earlier run when it saves its own (`save_total_limit=1`)" in caplog.text
    assert (
        "Set another `output_dir`, delete the checkpoints of the earlier run, or continue that run with" in caplog.text
    )
    assert "`True` takes the one with the highest step, so name the checkpoint to continue from." in caplog.text
    assert not (tmp_path / "checkpoint-2").exists()


def sampler_state(checkpoint):
    return json.loads((checkpoint / "dapo_state.json").read_text())


def test_turning_dynamic_sampling_on_at_a_resume_starts_a_fresh_pass_with_a_warning(run, caplog):
    run(1, use_dynamic_sampling=False)
    assert number(run(2, True).sampled[0]) == 0
    assert "`use_dynamic_sampling` (False there, True here)" in caplog.text
    assert "a new pass over the prompts begins" in caplog.text


def test_if_one_process_cannot_read_its_state_no_process_uses_its_own(tiny_model, tmp_path):
    """The state that all processes share is resumed: the order of the prompts and the counts of the limits."""
    overrides = {"steps_per_generation": 8, "max_steps": 2}
    jobs.sampled_run(tiny_model, tmp_path / "fewer processes", dict(overrides))
    run = launch("sampled_runs", tiny_model, tmp_path, json.dumps({"torn": overrides}), num_processes=2)
    assert run.returncode == 0, run.stderr[-3000:]
    damaged = "its dapo_state_rank1.pt is damaged and cannot be read (RuntimeError)"
    why = {"torn": f"can be resumed only in part: {damaged}."}
    why["fewer processes"] = "written with other settings: `num_processes` (1 there, 2 here)"
    checkpoints = {name: tmp_path / name / "run" / "checkpoint-1" for name in why}  # in a rollout of two steps
    state = checkpoints["torn"] / "dapo_state_rank1.pt"
    state.write_bytes(state.read_bytes()[:100])
    resumed = {f"{name}, resumed": {**overrides, "resume_from": str(path)} for name, path in checkpoints.items()}
    run = launch("sampled_runs", tiny_model, tmp_path, json.dumps(resumed), num_processes=2)
    assert run.returncode == 0, run.stderr[-3000:]
    for name, checkpoint in checkpoints.items():
        said = "\n".join(line for line in run.stderr.splitlines() if str(checkpoint) in line)
        assert said.count("are not used") == 1  # of two processes
        assert why[name] in said
        logs = json.loads((tmp_path / f"{name}, resumed" / "report-2-0.json").read_text())["logs"]
        num_again = logs[-1]["dynamic_sampling/groups_generated"]
        assert num_again > 0  # the rollout was sampled again
        before = sampler_state(checkpoint)
        after = sampler_state(tmp_path / f"{name}, resumed" / "run" / "checkpoint-2")
        assert after["num_rollouts"] == before["num_rollouts"] + 1 == 2
        assert after["totals"]["groups_sampled"] == before["totals"]["groups_sampled"] + num_again
        assert after["stream"] != before["stream"]


@pytest.mark.parametrize("uses_memory", [False, True])
def test_a_state_without_its_rows_continues_its_pass_and_its_ledger(run, tmp_path, caplog, uses_memory):
    run(1, dynamic_sampling_memory=uses_memory)
    (tmp_path / "checkpoint-1" / "dapo_state_rank0.pt").unlink()
    before = sampler_state(tmp_path / "checkpoint-1")
    trainer = run(2, True, dynamic_sampling_memory=uses_memory)
    assert number(trainer.sampled[0]) == before["totals"]["groups_sampled"]  # the next in order
    assert trainer._sampler.totals.groups_sampled > before["totals"]["groups_sampled"]
    assert trainer._sampler.num_rollouts == 2
    assert not (tmp_path / "rollouts-1").exists()
    assert "it has no dapo_state_rank0.pt" in caplog.text
    assert "a new pass over the prompts" not in caplog.text


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("dapo_memory.parquet", None),
        ("dapo_memory.parquet", b"PAR1"),
        ("dapo_state.json", lambda state: []),
        ("dapo_state.json", lambda state: {name: state[name] for name in state if name != "totals"}),
        ("dapo_state.json", lambda state: {**state, "totals": {**state["totals"], "another": 1}}),
    ],
    ids=["no memory", "torn memory", "no state", "an earlier version's", "one with other totals"],
)
def test_a_checkpoint_that_cannot_be_read_as_a_whole_is_resumed_without_its_sampler(
    run, tmp_path, file, damage, caplog
):
    run(1, dynamic_sampling_memory=True)
    path = tmp_path / "checkpoint-1" / file
    if callable(damage):
        damage = json.dumps(damage(sampler_state(path.parent))).encode()
    path.unlink() if damage is None else path.write_bytes(damage)
    assert number(run(2, "checkpoint-1", dynamic_sampling_memory=True).sampled[0]) == 0  # a new pass
    named = f"it has no {file}" if damage is None else f"its {file} "
    assert f"can be resumed only in part: {named}" in caplog.text
    assert "To resume everything, put the file back, or name an earlier checkpoint" in caplog.text


def test_a_run_that_has_ended_ends_at_once_when_it_is_started_again(run, tmp_path):
    whole, again = run(2, lr_scheduler_type="constant"), run(2, True, lr_scheduler_type="constant")
    assert (again.sampled, again.state.global_step) == ([], 2)
    assert torch.equal(weights(whole), weights(again))
    assert last_complete_checkpoint(tmp_path) == tmp_path / "checkpoint-2"


# ---- Other data ----


def names_and_rates(checkpoint):
    table = pq.read_table(checkpoint / "dapo_memory.parquet").to_pylist()
    return {row["prompt_id"]: row["pass_rate"] for row in table}


def test_every_prompt_has_a_record_of_its_own_that_a_reordered_dataset_finds_again(run, tmp_path, caplog):
    dataset = prompts(12, id=[None] * 12)
    run(8, dataset=dataset, shuffle_dataset=True, dynamic_sampling_memory=True)
    before = names_and_rates(tmp_path / "checkpoint-8")
    assert sorted(before.values()) == [0.0] * 4 + [0.25] * 8
    run(16, "checkpoint-8", dataset=dataset.shuffle(seed=1), shuffle_dataset=True, dynamic_sampling_memory=True)
    assert names_and_rates(tmp_path / "checkpoint-16") == before
    assert "another dataset (12 rows there and here, but other prompts or another order)" in caplog.text
    assert "a new pass over the prompts begins" in caplog.text


def stream_of(numbers):
    return IterableDataset.from_generator(lambda: ({"prompt": f"prompt {i}:"} for i in numbers))


def test_another_stream_starts_a_fresh_pass_with_a_warning(run, caplog):
    run(1, dataset=stream_of(range(40)), script=half_right)
    assert number(run(2, "checkpoint-1", dataset=stream_of(range(40)), script=half_right).sampled[0]) == 8
    assert "was written with" not in caplog.text
    assert number(run(2, "checkpoint-1", dataset=stream_of(range(1, 41)), script=half_right).sampled[0]) == 1
    assert "checkpoint-1 was written with another dataset (its first rows differ). " in caplog.text
    assert "a new pass over the prompts begins" in caplog.text


@pytest.mark.parametrize("from_step", [2, 3, 5])
def test_a_streamed_dataset_resumes_bit_by_bit_after_its_first_pass(tiny_model, tmp_path, from_step):
    def run(checkpoint=None):
        args = tiny_config(tmp_path, max_steps=6, **SAVED)
        trainer = DAPOTrainer(tiny_model, jobs.vowels, args, train_dataset=stream_of(range(10)))
        trainer.train(resume_from_checkpoint=checkpoint)
        return trainer

    whole = run()
    assert whole.state.log_history[4]["dynamic_sampling/passes"] > 1
    kept = tmp_path / "kept"
    shutil.copytree(tmp_path / f"checkpoint-{from_step}", kept)
    assert torch.equal(weights(whole), weights(run(str(kept))))


# ---- Partial groups ----

HALF = {"dynamic_sampling_surplus": "carry", "dynamic_sampling_screen": "3", "seed": 1, **SAVED}
DATED = [{"prompt": f"prompt {i}:", "on": datetime.date(2026, 1, 1 + i), "raw": bytes([i, 255])} for i in range(12)]
PICTURED = Features({"prompt": Value("string"), "on": Image()})


def num_half(log):
    return int(log.get("dynamic_sampling/partial_groups", 0))


@pytest.mark.parametrize(
    "dataset",
    [
        lambda: Dataset.from_list(DATED),
        lambda: Dataset.from_dict({"prompt": [f"prompt {i}:" for i in range(12)], "on": [IMAGE] * 12}, PICTURED),
        lambda: IterableDataset.from_generator(lambda: iter(DATED)),
    ],
    ids=["dates", "images", "stream"],
)
def test_partial_groups_are_kept_whatever_its_columns_hold(tiny_model, tmp_path, dataset, caplog):
    def run(folder, checkpoint=None):
        seen = []

        def vowels(prompts, completions, on, **kwargs):
            if not is_dummy(completions[0]):
                seen.extend((prompt, repr(value)) for prompt, value in zip(prompts, on, strict=True))
            return jobs.vowels(completions)

        args = tiny_config(folder, max_steps=4, **HALF)
        trainer = DAPOTrainer(tiny_model, vowels, args, train_dataset=dataset())
        trainer.train(resume_from_checkpoint=checkpoint)
        return trainer, seen

    whole, all_seen = run(tmp_path / "whole")
    step = next(log["step"] for log in whole.state.log_history if num_half(log) and log["dynamic_sampling/passes"] > 1)
    resumed, seen = run(tmp_path / "resumed", str(tmp_path / f"whole/checkpoint-{step}"))
    assert torch.equal(weights(resumed), weights(whole))
    if "Image" not in repr(seen):  # whose address it shows
        assert seen == all_seen[-len(seen) :]
    assert "not used" not in caplog.text


def test_a_partial_group_of_a_changed_prompt_is_dropped_with_a_warning(tiny_model, tmp_path, caplog):
    """Its id and its place are the same, and it is none of the rows that tell datasets apart."""

    def run(odd, checkpoint=None):
        rows = [{"id": i, "prompt": f"{odd if i % 2 else 'prompt'} {i}:"} for i in range(2 * FINGERPRINT_ROWS)]
        args = tiny_config(tmp_path, max_steps=4, **HALF)
        trainer = DAPOTrainer(tiny_model, jobs.vowels, args, train_dataset=Dataset.from_list(rows))
        trainer.train(resume_from_checkpoint=checkpoint)
        return trainer

    log = next(log for log in run("prompt").state.log_history[:3] if num_half(log))
    checkpoint = tmp_path / f"checkpoint-{log['step']}"
    groups = torch.load(checkpoint / RANK_NAME.format(0), weights_only=True)["queue"]["groups"]
    partial = [group["name"] for group in groups if group["state"] == "partial"]
    changed = [name for name in partial if int(name.partition(" ")[0]) % 2]
    assert changed
    run("question", str(checkpoint))
    said = f"contains the first completions of {len(changed)} groups whose examples are not in the dataset"
    assert said in caplog.text


def test_a_dataset_with_the_same_ids_but_other_prompts_starts_a_fresh_pass_with_a_warning(
    tiny_model, tmp_path, caplog
):
    def run(text, checkpoint=None):
        rows = [{"id": i, "prompt": f"{text} {i}:"} for i in range(12)]
        args = tiny_config(tmp_path, max_steps=4, **HALF)
        trainer = DAPOTrainer(tiny_model, jobs.vowels, args, train_dataset=Dataset.from_list(rows))
        trainer.train(resume_from_checkpoint=checkpoint)

    run("prompt")
    run("question", str(tmp_path / "checkpoint-2"))
    said = (
        "checkpoint-2 was written with another dataset (12 rows there and here, but other prompts or another order). "
    )
    assert said in caplog.text
    assert "a new pass over the prompts begins" in caplog.text


def test_a_dataset_with_more_rows_and_a_changed_setting_are_each_named_once_in_words(run, caplog, capsys):
    run(1, dataset=prompts(24), **CARRY)
    run(2, "checkpoint-1", dataset=prompts(40), temperature=0.7, **CARRY)
    said = "checkpoint-1 was written with another dataset (24 rows there, 40 rows here), and with other settings: "
    assert said + "`temperature` (1.0 there, 0.7 here). The weights and the optimizer are resumed, but " in caplog.text
    assert caplog.text.rstrip().endswith(
        "To use all of the checkpoint, resume with its dataset and settings. If you meant to change them, there is "
        "nothing to do."
    )
    assert (caplog.text + capsys.readouterr().out).count("`temperature` (") == 1


@pytest.mark.parametrize("is_missing", [True, False])
def test_a_new_learning_rate_has_no_effect_unless_the_optimizer_is_missing(run, tmp_path, capsys, is_missing):
    run(1)
    if is_missing:
        (tmp_path / "checkpoint-1" / "optimizer.pt").unlink()
    run(2, "checkpoint-1", learning_rate=1e-4)
    said = " ".join(capsys.readouterr().out.split())
    assert "`learning_rate` (0.001 there, 0.0001 here)." in said
    assert ("`learning_rate` has no effect, because the checkpoint's optimizer" in said) == (not is_missing)


@pytest.mark.parametrize("lacks", ["all but the model", "the optimizer"])
def test_a_warning_says_that_without_an_optimizer_the_schedule_starts_again(tiny_model, tmp_path, caplog, lacks):
    """A checkpoint of `save_only_model=True` is told from one whose large file of the optimizer was deleted."""

    def run(checkpoint=None):
        settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "linear"}
        settings |= {"save_only_model": lacks == "all but the model", "learning_rate": 4e-3}
        trainer = make_trainer(tiny_model, tmp_path, **settings)
        trainer.train(resume_from_checkpoint=checkpoint)
        return trainer

    rates = [log["learning_rate"] for log in run().state.log_history if "learning_rate" in log]
    assert rates == pytest.approx([4e-3, 3e-3, 2e-3, 1e-3])
    if lacks == "the optimizer":
        (tmp_path / "checkpoint-2" / "optimizer.pt").unlink()
    caplog.clear()
    resumed = run(str(tmp_path / "checkpoint-2"))
    # The schedule starts from the beginning, so steps 3 and 4 have the learning rates of 1 and 2.
    history = [log["learning_rate"] for log in resumed.state.log_history if "learning_rate" in log]
    assert history == pytest.approx([4e-3, 3e-3, 4e-3, 3e-3])
    assert {int(state["step"]) for state in resumed.optimizer.state.values()} == {2}
    if lacks == "the optimizer":
        said = f"`optimizer.pt` is missing in {tmp_path / 'checkpoint-2'}, which was not saved with "
        said += "`save_only_model=True`. "
        advice = "Put it back, or resume from another checkpoint, to resume everything."
    else:
        said = f"`optimizer.pt` and `scheduler.pt` are missing in {tmp_path / 'checkpoint-2'}. It was saved with "
        said += "`save_only_model=True`, or they were deleted. "
        advice = "Save checkpoints with `save_only_model=False` to resume everything."
    said += (
        "The weights and the number of the step are resumed, but the optimizer and the learning-rate schedule start "
    )
    assert said + "from the beginning" in caplog.text
    assert advice in caplog.text
    assert "not written by DAPOTrainer" not in caplog.text
    assert "optimizer are resumed" not in caplog.text
    assert ("so does the pass over the prompts" in caplog.text) == (lacks == "all but the model")

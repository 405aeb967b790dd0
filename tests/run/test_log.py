# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
import json
import re

import pytest
from helpers import tiny_config
from transformers import TrainerCallback
from transformers.utils import logging

from trl_dapo import DAPOConfig
from trl_dapo.report import load_run, write_report
from trl_dapo.run.log import LogHistoryCallback, changed_settings
from trl_dapo.settings.sampling_defaults import DEFAULTS, PAPER


SAVED = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}


def lines(output_dir, name="log_history") -> list[dict]:
    return [json.loads(line) for line in (output_dir / f"{name}.jsonl").read_text().splitlines()]


def test_a_run_that_is_killed_between_checkpoints_keeps_its_log_when_it_is_resumed(tiny_model, made, tmp_path):
    def dies_in_step_4(completions, trainer_state, **kwargs):
        return [1.0, 0.0] * (len(completions) // 2) if trainer_state.global_step < 3 else [1 / 0]

    with pytest.raises(ZeroDivisionError):
        made(dies_in_step_4, **SAVED).train()
    run = load_run(tmp_path)
    assert [entry["step"] for entry in run.log_history] == [1, 2, 3]
    assert (run.last_step, run.max_steps, run.finished) == (3, 4, False)
    trainer = made(**SAVED)
    trainer.train(resume_from_checkpoint=True)  # from step 2: step 3 is taken again
    assert [entry["step"] for entry in lines(tmp_path)] == [1, 2, 3, 4, 4]
    run = load_run(tmp_path)
    assert (run.finished, run.notes) == (True, [])
    assert run.log_history == trainer.state.log_history
    assert run.settings["model"] == {"value": str(tiny_model), "default": None}


def test_a_second_training_keeps_the_log_of_the_first(made, tmp_path):
    trainer = made(**SAVED)
    for _ in range(3):
        trainer.train()
    for name in ("log_history", "log_history-1", "log_history-2"):
        assert [entry["step"] for entry in lines(tmp_path, name)] == [1, 2, 3, 4, 4]


@pytest.mark.parametrize(
    ("given", "changed"),
    [
        ({}, {}),
        ({"bf16": False}, {"bf16": False}),
        # TRL makes `steps_per_generation` the same, and `prompts_per_step` makes both.
        ({"gradient_accumulation_steps": 4}, {"gradient_accumulation_steps": 4}),
        ({"steps_per_generation": 2}, {"steps_per_generation": 2}),
        ({"prompts_per_step": 4}, {"prompts_per_step": 4}),
        ({"eval_strategy": "epoch"}, {"eval_strategy": "epoch"}),  # transformers evaluates by it
        ({"generation_batch_size": 16}, {"steps_per_generation": 2}),  # 16 rows in micro-batches of 8
    ],
    ids=str,
)
@pytest.mark.parametrize("verbosity", ["warning", "error"])  # transformers draws no bars where it says no warnings
def test_only_settings_that_were_set_count_as_changed(tmp_path, monkeypatch, verbosity, given, changed):
    monkeypatch.setattr(logging.get_logger("transformers"), "level", getattr(logging, verbosity.upper()))
    settings = changed_settings(DAPOConfig(str(tmp_path), report_to="none", use_cpu=True, **given))
    assert {name: setting["value"] for name, setting in settings.items()} == {"use_cpu": True, **changed}


def test_what_the_trainer_chooses_by_default_does_not_count_as_changed(tmp_path):
    """The trainer replaces `None` by what the run supports. Only what differs from the usual choice is listed."""
    args = DAPOConfig(str(tmp_path), report_to="none", use_cpu=True)
    for name, value in DEFAULTS.items():
        setattr(args, name, value)
    assert [*changed_settings(args)] == ["use_cpu"]
    args.dynamic_sampling_screen = "off"
    assert changed_settings(args)["dynamic_sampling_screen"] == {"value": "off", "default": "auto"}
    args.dynamic_sampling_mode = "paper"
    for name, value in PAPER.items():
        setattr(args, name, value)
    assert {*changed_settings(args)} == {"use_cpu", "dynamic_sampling_mode"}


def test_a_folder_that_cannot_be_written_any_more_ends_the_log_and_not_the_run(made, tmp_path, caplog):
    class Unwritable(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 3:
                (tmp_path / "log_history.jsonl").unlink()
                (tmp_path / "log_history.jsonl").mkdir()  # root may write where others may not

    trainer = made(**SAVED)
    trainer.add_callback(Unwritable())
    trainer.train()
    assert trainer.state.global_step == 4
    (said,) = [record.message for record in caplog.records if "cannot be written" in record.message]
    assert said.startswith(f"`{tmp_path / 'log_history.jsonl'}` cannot be written: ")


def test_planted_secrets_are_in_no_file_of_a_run_nor_in_its_report(made, tmp_path, capfd):
    """But in `training_args.bin`, which transformers writes."""
    planted = ["hf_plantedabcdefgh", "pa55word", "planted-key"]
    secrets = {"model_init_kwargs": {"token": "hf_plantedabcdefgh"}}
    secrets |= {"vllm_server_base_url": "http://user:pa55word@gpu-7:8000"}
    secrets |= {"chat_template_kwargs": {"deep": [{"api_key": "planted-key"}]}}
    made(into="run", **SAVED, **secrets).train()
    write_report([str(tmp_path / "run")], tmp_path / "report")
    left = {path for path in tmp_path.rglob("*") if path.is_file() and path.name != "training_args.bin"}
    assert {"settings.json", "log_history.jsonl", "dapo_state.json"} <= {path.name for path in left}
    assert not {path.name for path in left for secret in planted if secret.encode() in path.read_bytes()}
    assert "gpu-7:8000" in (tmp_path / "run" / "settings.json").read_text()
    said = "".join(capfd.readouterr())
    assert not [secret for secret in planted if secret in said]


def cut_off_warnings(caplog):
    return [record.message for record in caplog.records if re.search("cuts? off", record.message)]


def test_if_all_completions_are_cut_off_the_warning_says_that_the_limit_is_too_short(made, caplog):
    made(script=lambda text, i: "right..." if i % 2 else "wrong...", max_steps=3, logging_steps=1).train()
    assert cut_off_warnings(caplog) == [
        "`max_completion_length=8` cuts off 100.0% of the completions. If their answers come last, these are lost: "
        "raise it. The paper either punishes long completions gradually, or leaves completions that are "
        "cut off out of the loss. Set `overlong_buffer_length=1` or `overlong_filtering=True` to do so."
    ]


@pytest.mark.parametrize("use_dynamic_sampling", [True, False])
def test_one_line_names_both_settings_if_a_quarter_of_the_completions_is_cut_off(made, caplog, use_dynamic_sampling):
    def script(text, i):
        return "wrong..." if i % 4 == 0 else "right" if i % 4 == 1 else "wrong"

    settings = {"use_dynamic_sampling": use_dynamic_sampling, **(PAPER if use_dynamic_sampling else {})}
    made(script=script, max_steps=3, **settings).train()
    assert cut_off_warnings(caplog) == [
        "`max_completion_length=8` cuts off 25.0% of the completions. Raise it if you can. The paper either punishes "
        "long completions gradually, or leaves completions that are cut off out of the loss. Set "
        "`overlong_buffer_length=1` or `overlong_filtering=True` to do so."
    ]


@pytest.mark.parametrize(
    ("ratios", "settings", "num_warnings"),
    [
        ([0.2], {}, 0),
        ([0.21, 0.3, 0.49], {}, 1),
        ([0.3, 0.6, 0.9, 0.3], {}, 2),  # once for many, once for half
        ([0.6, 0.3], {}, 1),
        ([0.3, 0.49], {"overlong_buffer_length": 2}, 0),
        ([0.3, 0.49], {"overlong_filtering": True}, 0),
        ([0.6, 0.9], {"overlong_filtering": True}, 1),
    ],
    ids=str,
)
def test_cut_off_completions_are_warned_of_once_per_level(tmp_path, caplog, ratios, settings, num_warnings):
    callback, args = LogHistoryCallback(), tiny_config(tmp_path, **settings)
    for ratio in ratios:
        callback._warn_of_cut_off(args, ratio)
    assert len(cut_off_warnings(caplog)) == num_warnings
    if "overlong_filtering" in settings:
        assert not any("The paper" in said for said in cut_off_warnings(caplog))

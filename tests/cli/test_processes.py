# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""A launch of several processes ends as they ended, and tells a mistake once."""

import json
import logging
import os
import signal
from contextlib import suppress

import pytest
from helpers import launch as launch_job
from torch.distributed.elastic.multiprocessing.api import SignalException

from trl_dapo.cli import processes
from trl_dapo.cli.entry_point import main
from trl_dapo.cli.train import make_parser
from trl_dapo.settings.recipe_files import find_recipe


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_and_an_end_by_a_scheduler_are_statuses_and_no_traceback(monkeypatch, number, status):
    def launch(arguments):
        raise SignalException(f"Process 1 got signal: {number}", sigval=number)

    monkeypatch.setattr(processes, "launch_command", launch)
    asked = processes.read_options(["--num_processes=2"], ["--config", "smoke_cpu"])
    assert processes.launch_processes(asked) == status


@pytest.mark.parametrize(("file", "starts_them"), [("cpu", True), ("single_gpu", True), ("zero3", False)])
def test_more_processes_than_a_file_of_one_has_are_started(file, starts_them):
    asked = processes.read_options(["--num_processes=2", f"--accelerate_config={file}"], ["--config", "smoke_cpu"])
    assert (asked.num_processes, bool(asked.multi_gpu)) == (2, starts_them)  # by DeepSpeed where the file says so


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--num_processes 2 --learning_rat 1", "Unknown option `--learning_rat`. Did you mean `--learning_rate`?"),
        # 4 prompts x 4 completions are 16 rows, which 3 processes cannot share.
        ("--num_processes 3", "3 processes"),
        # As many as the file says.
        ("--accelerate_config multi_gpu", "The 8 processes are those of the accelerate config. If this machine has"),
        ("--num_processes 2 --reward_funcs math.pie", "module 'math' has no 'pie'"),
        ("--dynamic_sampling_mode none", "'mask') To turn dynamic sampling off, use `--use_dynamic_sampling false`."),
        ("--num_processes 0", "`num_processes` must be a whole number of at least 1, got 0."),
        ("--num_machines 2", "`num_machines=2` needs a `num_processes` of all machines together that it divides"),
        ("--num_machines 2 --num_processes 4", "`num_machines=2` needs a `machine_rank` from 0 to 1, got"),
        ("--num_machines 2 --num_processes 4 --machine_rank 1", "needs `main_process_ip`, the address of machine 0,"),
    ],
)
def test_a_mistake_is_reported_once_before_any_process_starts(started, tmp_path, capfd, words, message):
    assert main(["train", "--config", "smoke_cpu", "--output_dir", str(tmp_path / "out"), *words.split()]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("trl-dapo train: ")
    assert message in line
    assert started == []
    assert "WORLD_SIZE" not in os.environ


@pytest.mark.parametrize("world_size", ["4", "", None])
def test_the_environment_and_the_logging_are_restored_after_the_check(monkeypatch, world_size):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if world_size is not None:
        monkeypatch.setenv("WORLD_SIZE", world_size)
    logging.disable(logging.INFO)
    try:
        with suppress(KeyError), processes.pretending_to_be_one_of(2):
            assert os.environ["WORLD_SIZE"] == "2"
            raise KeyError
        assert os.environ.get("WORLD_SIZE") == world_size
        assert logging.root.manager.disable == logging.INFO
    finally:
        logging.disable(logging.NOTSET)


@pytest.mark.parametrize(("value", "is_launched"), [("0", True), ("", False), (None, False)])
def test_an_empty_rank_does_not_count_as_a_launcher(monkeypatch, value, is_launched):
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if value is not None:
        monkeypatch.setenv("LOCAL_RANK", value)
    assert processes.is_launched() is is_launched


@pytest.mark.parametrize("world_size", ["", "0", "many"])
def test_a_mistake_is_reported_if_world_size_is_not_a_number_of_processes(monkeypatch, capsys, world_size):
    monkeypatch.setenv("WORLD_SIZE", world_size)
    processes.print_once("trl-dapo train: there is no such file.")
    assert capsys.readouterr().err == "trl-dapo train: there is no such file.\n"


def test_machines_are_accelerates_to_launch_and_the_first_checks_for_all(started, tmp_path, capfd):
    words = ["--num_machines", "2", "--machine_rank=1", "--main_process_ip", "10.0.0.1", "--num_processes", "8"]
    assert main(["train", "--config", "smoke_cpu", "--output_dir", str(tmp_path), *words, "--max_steps", "5"]) == 0
    (asked,) = started
    assert (asked.num_machines, asked.machine_rank, asked.main_process_ip) == (2, 1, "10.0.0.1")
    assert (asked.num_processes, asked.multi_gpu, asked.module) == (8, True, True)
    argv = asked.training_script_args
    assert (asked.training_script, argv[0], argv[-2:]) == ("trl_dapo.cli", "train", ["--max_steps", "5"])
    assert capfd.readouterr().err == ""


def test_options_of_the_launcher_are_distinguished_from_fields_of_the_same_name():
    options = make_parser().launch_options
    assert {"num_processes", "num_machines", "machine_rank", "main_process_ip"} <= options.keys()
    words = ["--num_machines=2", "--machine-rank", "1", "--debug", "x", "--multi_gpu", "--tpu=False", "--tf32", "true"]
    theirs, others = processes.split_options(words, options)
    assert theirs == ["--num_machines=2", "--machine_rank=1", "--multi_gpu"]
    assert others == ["--debug", "x", "--tf32", "true"]


def test_a_process_that_was_launched_launches_no_others(monkeypatch, started, capsys):
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert main(["train", "--config", "smoke_cpu", "--num_processes", "2"]) == 2
    assert (
        "`--num_processes=2` is an option of the launcher, which has started this process" in capsys.readouterr().err
    )
    assert started == []


def test_a_mistake_of_both_processes_is_reported_once_and_others_by_each_process(tmp_path):
    smoke = ["--config", str(find_recipe("smoke_cpu")), "--output_dir", str(tmp_path)]
    mistakes = {
        "of the data": [*smoke, "--dataset_name", "nowhere.jsonl"],
        "of the trainer": [*smoke, "--dataset_limit", "2"],  # fewer prompts than a rollout has
    }
    result = launch_job("mistakes", json.dumps(mistakes), tmp_path, num_processes=2)
    assert result.returncode == 0, result.stderr[-3000:]
    told = [line for line in result.stderr.splitlines() if line.startswith("trl-dapo train: ")]
    assert "nowhere.jsonl" in told[0]
    assert "The training dataset has 2 prompts" in told[1]
    assert told[2] == "trl-dapo train: the disk is full (process 1)"
    assert len(told) == 3
    assert "Traceback" not in result.stderr

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""`trl-dapo train --trial`: a page, an exit status, and nothing else."""

import json
from types import SimpleNamespace

import pytest
import torch
from helpers import launch

from trl_dapo import DAPOTrainer
from trl_dapo.cli import train
from trl_dapo.cli.entry_point import main
from trl_dapo.run.trial_report import Phase


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_recipe_is_tried_out_and_nothing_is_written(here, capsys):
    assert main(["train", "--config", "smoke_cpu", "--trial", "--report_to", "all"]) == 0
    page = capsys.readouterr().out
    for phase in ("loading", "sampling", "update", "update of this rollout", "checkpoint"):
        assert f"\n{phase} " in page
    said = " ".join(page.split())
    # The recipe takes 3 steps and saves after each.
    assert "(3 optimizer steps, 3 checkpoints of" in said
    assert "Fits: peak" in said
    assert list(here.iterdir()) == []


def test_a_run_that_does_not_fit_ends_with_status_1(here, monkeypatch, capsys):
    report = SimpleNamespace(fits=False)
    monkeypatch.setattr(DAPOTrainer, "trial", lambda trainer: report)
    assert main(["train", "--config", "smoke_cpu", "--trial"]) == 4
    assert list(here.iterdir()) == []


def test_a_run_that_runs_out_of_memory_while_it_is_loaded_does_not_fit(here, monkeypatch, capsys):
    def run_out(*args):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(train, "make_trainer", run_out)
    assert main(["train", "--config", "smoke_cpu", "--trial"]) == 4
    said = "memory ran out. CUDA out of memory. This happened before the first phase of the trial.\n"
    assert capsys.readouterr().err.endswith(said)
    assert list(here.iterdir()) == []


def test_a_reward_function_that_needs_more_memory_than_is_left_does_not_fit(here, monkeypatch, capsys):
    def run_out(trainer, *args):
        raise MemoryError

    monkeypatch.setattr(DAPOTrainer, "_calculate_rewards", run_out)
    assert main(["train", "--config", "smoke_cpu", "--trial"]) == 4
    assert "It needs more memory than the model leaves." in capsys.readouterr().err
    assert list(here.iterdir()) == []


def test_a_mistake_in_the_run_is_reported_in_one_line(here, capsys):
    status = main(["train", "--config", "smoke_cpu", "--trial", "--overlong_buffer_length", "1000"])
    assert status == 2
    assert "overlong_buffer_length" in capsys.readouterr().err
    assert list(here.iterdir()) == []


def test_a_stopped_trial_says_that_nothing_was_written(here, monkeypatch, capsys):
    def stop(trainer):
        raise KeyboardInterrupt

    monkeypatch.setattr(DAPOTrainer, "trial", stop)
    assert main(["train", "--config", "smoke_cpu", "--trial"]) == 130
    assert capsys.readouterr().err.endswith("the trial was stopped. Nothing was written.\n")
    assert list(here.iterdir()) == []


def test_two_processes_try_a_recipe_out_together(here):
    command = ["train", "--config", "smoke_cpu", "--trial", "--output_dir", "out"]
    result = launch("says", here, json.dumps(command), num_processes=2)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.count("Trial on CPU, 2 processes") == 1
    assert "peak memory: 2 processes x" in " ".join(result.stdout.split())
    assert list(here.iterdir()) == []


def test_every_phase_has_advice_for_when_nothing_fits():
    for name in ("sampling", "optimizer's state", "update", "update of this rollout", "evaluation", "checkpoint"):
        assert Phase(name, "", None, failed=[None]).describe_problem().startswith(f"The {name} ran out of memory")

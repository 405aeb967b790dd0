# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""One rollout ahead with the real vLLM as a server: whose log-probabilities rows train with, and how a run ends."""

import contextlib
import json
import os
import signal

import pytest
from vllm_server import on_server, vllm_server


CLOSE = 1e-4  # float32 on both sides: measured errors are about 1e-6


@pytest.fixture(scope="module")
def server(models, tmp_path_factory):
    with vllm_server(models["tied"], tmp_path_factory.mktemp("server") / "log") as server:
        yield server


def errors(folder, rank=0):
    """By the rollouts between the policy that sampled rows and the one they train: the largest error of each step."""
    report = json.loads((folder / f"ahead-{rank}.json").read_text())
    return {age: [error for _, its, error in report["errors"] if its == age] for age in range(3)}


@pytest.fixture(scope="module")
def trained(server, models, run_job, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ahead")
    settings = {"model": models["tied"], "max_steps": 5}
    variants = {
        "ahead": {**settings, **on_server(server), "eval_strategy": "steps", "eval_steps": 2},
        "uncorrected": {**settings, **on_server(server), "sabotage": True},
    }
    result = run_job("ahead_runs", folder, json.dumps(variants))
    assert result.returncode == 0, result.stdout[-5000:]
    return folder


def test_every_rows_old_log_probabilities_are_those_of_the_weights_at_its_launch(trained):
    found = errors(trained / "ahead")
    assert all(found.values())  # rows of this rollout's policy, of the last one's and, carried, of the one before
    assert max(error for by_step in found.values() for error in by_step) < CLOSE


def test_a_run_that_is_not_corrected_fails_the_same_check(trained):
    found = errors(trained / "uncorrected")
    assert max(found[0]) < CLOSE
    assert min(found[1] + found[2]) > 0.1


def test_two_trainer_processes_share_one_server(server, models, run_job, tmp_path):
    settings = {"model": models["tied"], "per_device_train_batch_size": 2}
    variants = {f"run {i}": {**settings, **on_server(server)} for i in range(2)}
    result = run_job("ahead_runs", tmp_path, json.dumps(variants), num_processes=2)
    assert result.returncode == 0, result.stdout[-5000:]
    for name in variants:
        for rank in range(2):
            found = errors(tmp_path / name, rank)
            assert max(error for by_step in found.values() for error in by_step) < CLOSE


def test_ctrl_c_ends_a_run_whose_server_hangs_with_a_round_in_flight(models, run_job, tmp_path):
    with vllm_server(models["tied"], tmp_path / "log") as server:
        try:
            # A run that waited for the answer would never end.
            result = run_job(
                "is_interrupted", models["tied"], tmp_path, server.group, json.dumps(on_server(server)), timeout=240
            )
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.group, signal.SIGCONT)
        assert result.returncode != 0
        assert json.loads((tmp_path / "error.json").read_text())[0] == "KeyboardInterrupt"
        assert "rollout-ahead" not in json.loads((tmp_path / "threads.json").read_text())


def test_a_server_that_hangs_with_a_round_in_flight_is_named_when_its_time_is_up(models, run_job, tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 1}
    with vllm_server(models["tied"], tmp_path / "log") as server:
        try:
            options = json.dumps(on_server(server, **settings))
            result = run_job("server_hangs", models["tied"], tmp_path, server.group, options, timeout=240)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.group, signal.SIGCONT)
        assert result.returncode != 0
        name, message = json.loads((tmp_path / "error.json").read_text())
        assert name == "RuntimeError"
        assert f"{server.url} has not answered for 5 s" in message
        assert str(tmp_path / "run" / "checkpoint-2") in message  # written without the round


def test_training_goes_on_after_the_server_was_killed_with_a_round_in_flight(models, run_job, tmp_path):
    settings = {"max_steps": 5, "save_strategy": "steps", "save_steps": 1}
    with vllm_server(models["tied"], tmp_path / "log") as server:
        options = json.dumps(on_server(server, **settings))
        result = run_job("server_dies_ahead", models["tied"], tmp_path, server.group, options)
    assert result.returncode != 0
    name, message = json.loads((tmp_path / "error.json").read_text())
    assert name == "RuntimeError"
    assert server.url in message
    assert str(tmp_path / "run" / "checkpoint-3") in message  # written without the round

    with vllm_server(models["tied"], tmp_path / "log") as server:
        result = run_job("resumes_ahead", models["tied"], tmp_path, json.dumps(on_server(server, **settings)))
    assert result.returncode == 0, result.stdout[-5000:]
    report = json.loads((tmp_path / "ahead-0.json").read_text())
    assert [log["step"] for log in report["logs"]] == [1, 2, 3, 4, 5]
    # The round of the checkpoint trains first, with the log-probabilities that the server which is gone gave it.
    assert [age for step, age, _ in report["errors"] if step == 2] != []
    assert {step for step, age, _ in report["errors"] if age == 1} >= {2, 3}
    assert max(error for _, _, error in report["errors"]) < CLOSE

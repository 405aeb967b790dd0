# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""A real vLLM server that hangs or is killed: the run ends with a message, and goes on with another server."""

import contextlib
import json
import os
import signal
import socket

import psutil
import pytest
from vllm_server import HOST, on_server, vllm_server


CLOSE = 1e-4  # float32 on both sides: measured errors are about 1e-6


# ---- One rollout ahead: a round is in flight ----


@pytest.fixture(scope="module")
def failing(models, tmp_path_factory):
    """A server that is stopped, goes on, and is killed in the last test that has it."""
    with vllm_server(models["tied"], tmp_path_factory.mktemp("failing") / "log") as server:
        yield server


@contextlib.contextmanager
def going_on_afterwards(server):
    try:
        yield
    finally:
        os.killpg(server.group, signal.SIGCONT)


def test_ctrl_c_ends_a_run_whose_server_hangs_with_a_round_in_flight(failing, models, run_job, tmp_path):
    with going_on_afterwards(failing):
        # A run that waited for the answer would never end.
        options = json.dumps(on_server(failing))
        result = run_job("is_interrupted", models["tied"], tmp_path, failing.group, options, timeout=240)
    assert result.returncode != 0
    assert json.loads((tmp_path / "error.json").read_text())[0] == "KeyboardInterrupt"
    assert "vllm-request" not in json.loads((tmp_path / "threads.json").read_text())


def test_a_server_that_hangs_with_a_round_in_flight_is_named_when_its_time_is_up(failing, models, run_job, tmp_path):
    options = json.dumps(on_server(failing, save_strategy="steps", save_steps=1))
    with going_on_afterwards(failing):
        result = run_job("server_hangs", models["tied"], tmp_path, failing.group, options, timeout=240)
    assert result.returncode != 0
    name, message = json.loads((tmp_path / "error.json").read_text())
    assert name == "RuntimeError"
    assert f"{failing.url} has not answered for 5 s" in message
    assert str(tmp_path / "run" / "checkpoint-2") in message  # written without the round


def test_training_goes_on_after_the_server_was_killed_with_a_round_in_flight(
    failing, server, models, run_job, tmp_path
):
    settings = {"max_steps": 5, "save_strategy": "steps", "save_steps": 1}
    options = json.dumps(on_server(failing, **settings))
    result = run_job("server_dies_ahead", models["tied"], tmp_path, failing.group, options)
    assert result.returncode != 0
    name, message = json.loads((tmp_path / "error.json").read_text())
    assert name == "RuntimeError"
    assert failing.url in message
    assert str(tmp_path / "run" / "checkpoint-3") in message  # written without the round

    result = run_job("resumes_ahead", models["tied"], tmp_path, json.dumps(on_server(server, **settings)))
    assert result.returncode == 0, result.stdout[-5000:]
    report = json.loads((tmp_path / "ahead-0.json").read_text())
    assert [log["step"] for log in report["logs"]] == [1, 2, 3, 4, 5]
    # The round of the checkpoint trains first, with the log-probabilities that the server which is gone gave it.
    assert [age for step, age, _ in report["errors"] if step == 2] != []
    assert {step for step, age, _ in report["errors"] if age == 1} >= {2, 3}
    assert max(error for _, _, error in report["errors"]) < CLOSE


# ---- In turns ----


def is_reachable(server):
    with socket.socket() as client:
        return client.connect_ex((HOST, server.port)) == 0


def members(server):
    """Processes of the server's group that are alive; its engine is a process of its own."""
    alive = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getpgid(process.pid) == server.group and process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process)
    return alive


def test_training_goes_on_from_the_last_checkpoint_after_the_server_was_killed(server, models, run_job, tmp_path):
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1}
    # Of four prompts one at least is dropped: no rollout has one round.
    settings["dynamic_sampling_max_round_size"] = 4
    with vllm_server(models["tied"], tmp_path / "log") as killed:
        processes = members(killed)
        assert len(processes) >= 2
        options = json.dumps(on_server(killed, **settings))
        result = run_job("server_dies", models["tied"], tmp_path, killed.group, options)
    assert psutil.wait_procs(processes, timeout=30)[1] == []
    assert not is_reachable(killed)

    # Two steps were made and kept; the third had sampled one round.
    checkpoint = tmp_path / "run" / "checkpoint-2"
    assert result.returncode != 0
    name, message = json.loads((tmp_path / "error.json").read_text())
    assert name == "RuntimeError"
    assert killed.url in message
    assert str(checkpoint) in message
    assert sorted(path.name for path in checkpoint.parent.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]
    assert (checkpoint / "trainer_state.json").exists()

    options = json.dumps(on_server(server, **settings))
    result = run_job("resumes", models["tied"], tmp_path, options)
    assert result.returncode == 0, result.stdout[-5000:]
    resumed = json.loads((tmp_path / "report.json").read_text())
    assert [log["step"] for log in resumed["logs"]] == [1, 2, 3, 4]
    assert {call["step"] for call in resumed["calls"]} == {2, 3}
    # The other server has other weights at first; the first of its samples is of the second step's.
    assert max(call["error"] for call in resumed["calls"]) < CLOSE
    assert {row["prompt"] for row in resumed["trained"] if row["step"] == 2}.isdisjoint({1, 2, 4, 5})

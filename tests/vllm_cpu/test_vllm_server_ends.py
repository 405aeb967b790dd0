# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""A real vLLM server that is killed: the run ends with a message, and goes on with another server."""

import contextlib
import json
import os

import psutil
from vllm_server import CLOSE, on_server, vllm_server


def members(server):
    """Processes of the server's group that are alive; its engine is a process of its own."""
    alive = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getpgid(process.pid) == server.group and process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process)
    return alive


def test_training_goes_on_after_the_server_was_killed_with_a_round_in_flight(server, models, run_job, tmp_path):
    settings = {"max_steps": 5, "save_strategy": "steps", "save_steps": 1}
    with vllm_server(models["tied"], tmp_path / "log") as killed:
        processes = members(killed)
        assert len(processes) >= 2
        options = json.dumps(on_server(killed, **settings))
        result = run_job("server_dies_ahead", models["tied"], tmp_path, killed.group, options)
    assert psutil.wait_procs(processes, timeout=30)[1] == []
    assert result.returncode != 0
    name, message = json.loads((tmp_path / "error.json").read_text())
    assert name == "RuntimeError"
    assert killed.url in message
    assert str(tmp_path / "run" / "checkpoint-3") in message  # written without the round

    result = run_job("resumes_ahead", models["tied"], tmp_path, json.dumps(on_server(server, **settings)))
    assert result.returncode == 0, result.stdout[-5000:]
    report = json.loads((tmp_path / "ahead-0.json").read_text())
    assert [log["step"] for log in report["logs"]] == [1, 2, 3, 4, 5]
    # The round of the checkpoint trains first, with the log-probabilities that the server which is gone gave it.
    assert [age for step, age, _ in report["errors"] if step == 2] != []
    assert {step for step, age, _ in report["errors"] if age == 1} >= {2, 3}
    assert max(error for _, _, error in report["errors"]) < CLOSE

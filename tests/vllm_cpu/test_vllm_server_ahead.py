# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""One rollout ahead with the real vLLM as a server: whose log-probabilities rows train with."""

import json

import pytest
from vllm_server import on_server


CLOSE = 1e-4  # float32 on both sides: measured errors are about 1e-6


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

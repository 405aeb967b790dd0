# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""One process and two: the same groups, the same gradient, the same resume, and no hang."""

import json

import pytest
from helpers import launch


def reports(folder, num_processes):
    return [json.loads((folder / f"report-{num_processes}-{rank}.json").read_text()) for rank in range(num_processes)]


def run(job, tiny_model, folder, *args, num_processes):
    folder.mkdir(parents=True, exist_ok=True)
    result = launch(job, tiny_model, folder, *args, num_processes=num_processes)
    assert result.returncode == 0, result.stderr[-3000:]
    return reports(folder, num_processes)


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"dynamic_sampling_max_rounds": 1},  # short rollouts: filler rows lie on the last rank
        {"steps_per_generation": 8, "num_iterations": 2},
        {"overlong_buffer_length": 4, "beta": 0.01},
    ],
    ids=str,
)
def test_one_and_two_processes_train_on_the_same_groups_and_end_with_the_same_weights(tiny_model, tmp_path, overrides):
    # One rollout is one optimizer step wherever rows are drawn into steps at random: each process has its own draw.
    overrides = {"max_steps": 1, **overrides} if "steps_per_generation" in overrides else overrides
    (one,) = run("same_groups", tiny_model, tmp_path / "one", json.dumps(overrides), num_processes=1)
    two = run("same_groups", tiny_model, tmp_path / "two", json.dumps(overrides), num_processes=2)
    for rollout, *parts in zip(one["rollouts"], *(report["rollouts"] for report in two), strict=True):
        assert rollout == [row for part in parts for row in part]
    if "steps_per_generation" in overrides:
        return
    for single, double in zip(one["logs"], two[0]["logs"], strict=True):
        for name in single:
            if not name.endswith(("seconds", "step_time", "runtime", "per_second", "padding_share")):
                assert double[name] == pytest.approx(single[name], rel=1e-4, abs=1e-6), name
    assert two[0]["weights"] == two[1]["weights"]
    assert two[0]["weights"] == pytest.approx(one["weights"], rel=1e-3, abs=1e-5)


def test_a_reward_function_that_fails_on_one_rank_ends_every_rank_with_its_error(tiny_model, tmp_path):
    result = launch("reward_fails_on_one_rank", tiny_model, tmp_path, num_processes=2)
    assert result.returncode != 0
    assert (tmp_path / "error-1").read_text() == "KeyError: 'no such column'"
    assert (tmp_path / "error-0").read_text() == (
        "RuntimeError: The reward functions failed on process 1: KeyError: 'no such column'"
    )


@pytest.mark.parametrize("num_processes", [1, 2])
@pytest.mark.parametrize(
    ("overrides", "kill_at"),
    [({}, 3), ({"steps_per_generation": 8}, 3), ({"num_iterations": 2, "steps_per_generation": 8}, 2)],
    ids=str,
)
def test_a_run_that_was_killed_resumes_bit_by_bit(tiny_model, tmp_path, num_processes, overrides, kill_at):
    job = ("sampled_run", tiny_model)
    whole = run(*job, tmp_path / "whole", json.dumps(overrides), 0, "", num_processes=num_processes)

    folder = tmp_path / "killed"
    folder.mkdir()
    killed = launch(*job, folder, json.dumps(overrides), kill_at, "", num_processes=num_processes)
    assert killed.returncode != 0
    last = folder / "run" / f"checkpoint-{kill_at}"
    assert (last / "trainer_state.json").exists()
    resumed = run(*job, folder, json.dumps(overrides), 0, last, num_processes=num_processes)
    assert resumed == whole

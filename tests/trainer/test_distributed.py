# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""One process and two: the same groups, the same gradient, the same resume, and no hang."""

import json
import math
import re

import jobs
import pytest
from helpers import launch

from trl_dapo.settings.sampling_defaults import PAPER


SAME_GROUPS = {
    "plain": {},
    # Filler rows are on the last process. Near the limit, screening reserves a few completions for equal shares.
    "short": {**PAPER, "dynamic_sampling_max_gen_batches": 1},
    "penalised": {"overlong_buffer_length": 4, "beta": 0.01},
    "carried": {"dynamic_sampling_surplus": "carry", "batch_multiplier": 1.0},
    "screened": {"dynamic_sampling_surplus": "carry", "dynamic_sampling_screen": "2"},
    "replaced": {"dynamic_sampling_mode": "replace", "min_replace_ratio": 0.5},
    # Each process assigns its rows to optimizer steps at random, so only whole rollouts can be compared.
    "reused": {"steps_per_generation": 8, "num_iterations": 2, "max_steps": 1},
}
OF_THE_CUT = ("padding_share", "microbatches", "peak_microbatch_tokens")  # for one process or for two
RESUMED = {
    "plain": {},
    "carried": {"dynamic_sampling_surplus": "carry", "batch_multiplier": 1.0, "dynamic_sampling_memory": True},
    "screened": {"dynamic_sampling_surplus": "carry", "dynamic_sampling_screen": "2", "dynamic_sampling_memory": True},
    "killed": {"steps_per_generation": 8, "num_iterations": 2},  # in the middle of a rollout, by SIGKILL
}


def reports(folder, num_processes):
    return [json.loads((folder / f"report-{num_processes}-{rank}.json").read_text()) for rank in range(num_processes)]


def run_in_two_processes(job, *args):
    result = launch(job, *args, num_processes=2)
    assert result.returncode == 0, result.stderr[-5000:]


@pytest.fixture(scope="module")
def same_groups(tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("same-groups")
    jobs.same_groups(tiny_model, folder, json.dumps(SAME_GROUPS))
    run_in_two_processes("same_groups", tiny_model, folder, json.dumps(SAME_GROUPS))
    return folder


@pytest.mark.parametrize("variant", SAME_GROUPS)
def test_one_and_two_processes_train_on_the_same_groups_and_end_with_the_same_weights(same_groups, variant):
    (one,), two = reports(same_groups / variant, 1), reports(same_groups / variant, 2)
    assert len(one["rollouts"]) >= 1
    for rollout, *parts in zip(one["rollouts"], *(report["rollouts"] for report in two), strict=True):
        assert rollout == [row for part in parts for row in part]
    if variant == "reused":
        return
    for single, double in zip(one["logs"], two[0]["logs"], strict=True):
        for name in single:
            if not name.endswith(("seconds", "step_time", "runtime", "per_second", *OF_THE_CUT)):
                assert double[name] == pytest.approx(single[name], rel=1e-4, abs=1e-6), name
    assert two[0]["weights"] == two[1]["weights"]
    assert two[0]["weights"] == pytest.approx(one["weights"], rel=1e-3, abs=1e-5)


def test_a_reward_sees_each_completion_of_a_group_once_where_processes_score_unequal_numbers(tiny_model, tmp_path):
    run_in_two_processes("best_of_each_group", tiny_model, tmp_path)
    for report in reports(tmp_path, 2):
        for found in report.values():
            # With a copy of it in the same call, no completion would be the single best one, and its group would be
            # dropped.
            assert found["dropped/all_wrong"] == [0] * 3
            assert found["groups_trained"] == [3] * 3
            assert found["are_logged"]


def test_a_reward_function_that_fails_on_one_rank_ends_every_rank_with_its_error(tiny_model, tmp_path):
    assert launch("reward_fails_on_one_rank", tiny_model, tmp_path, num_processes=2).returncode != 0
    assert (tmp_path / "error-1").read_text() == "KeyError: 'no such column'"
    assert (tmp_path / "error-0").read_text() == (
        "RuntimeError: The reward functions failed on process 1: KeyError: 'no such column' (The reward function "
        "'fails_on_sampled' raised this.)"
    )


def test_a_reward_function_that_hangs_on_one_rank_ends_the_job_at_the_ddp_timeout(tiny_model, tmp_path):
    result = launch("reward_hangs_on_one_rank", tiny_model, tmp_path, num_processes=2)
    assert result.returncode != 0
    assert "5000ms" in result.stderr


def test_ranks_that_drew_different_prompts_end_with_one_error(tiny_model, tmp_path):
    assert launch("shuffled_differently", tiny_model, tmp_path, num_processes=2).returncode != 0
    for rank in (0, 1):
        assert "their training datasets differ" in (tmp_path / f"error-{rank}").read_text()


def test_the_main_process_alone_asks_the_server_and_an_adapter_refused_there_ends_every_rank(tiny_model, tmp_path):
    run_in_two_processes("adapter_is_refused", tiny_model, tmp_path)
    main, other = reports(tmp_path, 2)
    assert main["serves_adapter"]
    assert other["serves_adapter"]
    # When the engine is created, at the first sync, and at the second one, which is refused.
    assert main["given"] == [["adapter_config.json", "adapter_model.safetensors"]] * 3
    assert other["given"] == []
    assert main["error"] == "AdapterRefused: no more"
    assert other["error"] == "RuntimeError: On the main process: AdapterRefused: no more"


@pytest.fixture(scope="module")
def resumed(tiny_model, tmp_path_factory):
    """Whole runs, one that is killed, and what became of each from its third checkpoint on: in two processes."""
    folder = tmp_path_factory.mktemp("resumed")
    run_in_two_processes("sampled_runs", tiny_model, folder / "whole", json.dumps(RESUMED))
    victim = json.dumps({"killed": {**RESUMED["killed"], "kill_in": 3}})
    assert launch("sampled_runs", tiny_model, folder / "victim", victim, num_processes=2).returncode != 0
    again = {
        name: {
            **overrides,
            "resume_from": str(folder / ("victim" if name == "killed" else "whole") / name / "run" / "checkpoint-3"),
        }
        for name, overrides in RESUMED.items()
    }
    run_in_two_processes("sampled_runs", tiny_model, folder / "resumed", json.dumps(again))
    return folder


@pytest.mark.parametrize("variant", RESUMED)
def test_two_processes_resume_bit_by_bit(resumed, variant):
    assert reports(resumed / "resumed" / variant, 2) == reports(resumed / "whole" / variant, 2)


@pytest.mark.parametrize(("num_ahead", "num_runs"), [(1, 2), (2, 1)])
def test_two_processes_train_rollouts_ahead_as_one_and_resume(tiny_model, tmp_path, num_ahead, num_runs):
    jobs.rollouts_ahead(tiny_model, tmp_path, 1, num_ahead)
    run_in_two_processes("rollouts_ahead", tiny_model, tmp_path, num_runs, num_ahead)
    (one,) = reports(tmp_path / "0", 1)
    for i in range(num_runs):
        first, second = reports(tmp_path / str(i), 2)
        for rollout, *parts in zip(one["rollouts"], first["rollouts"], second["rollouts"], strict=True):
            assert [row[:2] for row in rollout] == [row[:2] for part in parts for row in part]
        assert first["weights"] == second["weights"]
        assert first["weights"] == pytest.approx(one["weights"], rel=1e-3, abs=1e-5)
        assert first["resumed"] == first["weights"]
        assert first["ages"] == one["ages"]
        for own, of_both in zip(one["engine"], first["engine"], strict=True):
            assert len(own) == 8
            assert of_both == pytest.approx(own, rel=1e-4, abs=1e-6)
        assert one["engine"][0] == pytest.approx([0.3, 0.3, *[math.exp(-0.3)] * 6], rel=1e-4)
        assert first["ages"][1] > 0


def test_a_server_that_is_lost_with_a_round_in_flight_ends_every_process(tiny_model, tmp_path):
    assert launch("server_is_lost_ahead", tiny_model, tmp_path, num_processes=2).returncode != 0
    errors = [(tmp_path / f"error-{rank}").read_text() for rank in range(2)]
    assert "The vLLM server at" in errors[0]
    assert errors[1].startswith("The main process could not sample: RuntimeError: The vLLM server at")


@pytest.mark.parametrize("num_processes", [1, 2])
def test_ranks_with_other_numbers_of_tool_calls_are_each_answered_by_the_server(tool_model, tmp_path, num_processes):
    result = launch("tools_on_a_server", tool_model, tmp_path, num_processes=num_processes)
    assert result.returncode == 0, result.stderr[-5000:]
    ranks = reports(tmp_path, num_processes)
    rows = [row for report in ranks for row in report["rows"]]
    asked = [int(re.findall(r"prompt (\d+):", prompt)[0]) for prompt, _, _ in rows]
    assert asked == [i for i in range(12) for _ in range(4)]
    for i, (_, completion, _) in zip(asked, rows, strict=True):
        assert completion.count("page") == i // 4
        assert re.findall(r"\d+", completion)[-1] == str(i)
    # 12 prompts at first, then the rows of prompts 4 to 11, then those of 8 to 11, which one process holds.
    assert ranks[0]["requests"] == [12, 32, 16]

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""vLLM inside the trainer's process: every rollout is sampled with the weights that the last step left."""

import json

import pytest


CLOSE = 1e-4  # float32 on both sides: measured errors are about 1e-6


@pytest.fixture(scope="module")
def reports(models, run_job, tmp_path_factory):
    variants = {
        "tied": {"model": models["tied"]},
        "untied": {"model": models["untied"]},
        "never synced": {"model": models["tied"], "sabotage": "no sync"},
        "lora": {"model": models["tied"], "lora": {}, "vllm_lora_sync": "merge"},
        "lora never merged": {"model": models["tied"], "lora": {}, "vllm_lora_sync": "merge", "sabotage": "no merge"},
        "carried": {"model": models["tied"], "dynamic_sampling_surplus": "carry", "batch_multiplier": 2.0},
        "evaluated": {
            "model": models["tied"],
            "eval_strategy": "steps",
            "eval_steps": 1,
            "eval_on_start": True,
            "per_device_eval_batch_size": 4,
        },
    }
    folder = tmp_path_factory.mktemp("colocate")
    result = run_job("runs", folder, json.dumps(variants))
    assert result.returncode == 0, result.stdout[-5000:]
    return {name: json.loads((folder / name / "report.json").read_text()) for name in variants}


def errors(report, *, updated):
    """The oracle: vLLM's log-probabilities against those of the live weights, before or after the first update."""
    return [call["error"] for call in report["calls"] if (call["step"] > 0) == updated]


@pytest.mark.parametrize("variant", ["tied", "untied", "lora", "carried", "evaluated"])
def test_every_rollout_is_sampled_with_the_live_weights(reports, variant):
    assert max(errors(reports[variant], updated=False)) < CLOSE
    assert max(errors(reports[variant], updated=True)) < CLOSE


@pytest.mark.parametrize("variant", ["never synced", "lora never merged"])
def test_the_oracle_sees_weights_that_were_not_synced(reports, variant):
    assert max(errors(reports[variant], updated=False)) < CLOSE
    assert min(errors(reports[variant], updated=True)) > 0.1


@pytest.mark.parametrize("variant", ["tied", "lora"])
def test_rounds_differ_in_size_and_share_one_weight_sync_a_rollout(reports, variant):
    calls = reports[variant]["calls"]
    # Prompts 0 and 3 of the first 4 are dropped, so the first rollout takes a second round.
    assert [call["step"] for call in calls].count(0) == 2
    assert calls[0]["num_rows"] == 4 * 4
    assert len({call["num_rows"] for call in calls}) > 1
    assert reports[variant]["num_syncs"] == {"0": 1, "1": 1, "2": 1}


def test_accepted_groups_train_in_prompt_order(reports):
    trained = [sorted({row["prompt"] for row in reports["tied"]["trained"] if row["step"] == step}) for step in (0, 1)]
    first, second = trained
    assert first == [1, 2, 4, 5]
    assert len(second) == 4
    assert all(prompt % 3 for prompt in second)


def test_importance_weights_are_one_where_the_engine_has_the_live_weights(reports):
    ratios = [ratio for row in reports["tied"]["trained"] for ratio in row["ratio"]]
    assert ratios == pytest.approx([1.0] * len(ratios), abs=CLOSE)


def test_importance_weights_correct_for_an_engine_that_lags_behind(reports):
    late = [row for row in reports["never synced"]["trained"] if row["step"] > 0]
    assert max(abs(ratio - 1) for row in late for ratio in row["ratio"]) > 0.1


def test_carried_rows_train_with_the_log_probabilities_of_the_policy_that_sampled_them(reports):
    carried = [row for row in reports["carried"]["trained"] if row["sampled_in"] < row["step"]]
    assert len(carried) > 0
    assert max(row["old_from_sampled"] for row in carried) < CLOSE
    assert max(row["old_from_live"] for row in carried) > 0.1  # the policy has moved on since
    assert max(row["weight_error"] for row in carried) < CLOSE


def test_rows_sampled_beside_carried_ones_keep_the_live_policys(reports):
    fresh = [row for row in reports["carried"]["trained"] if row["sampled_in"] == row["step"]]
    assert len(fresh) > 0
    assert max(row["old_from_live"] for row in fresh) < CLOSE


def test_an_evaluation_is_one_call_for_all_problems_with_the_live_weights(reports):
    report = reports["evaluated"]
    evaluations = [call for call in report["calls"] if not call["training"]]
    # Before the first step and after each of three: 5 problems of 4 completions, in batches of one problem.
    assert [(call["step"], call["num_rows"]) for call in evaluations] == [(step, 5 * 4) for step in range(4)]
    assert max(call["error"] for call in evaluations) < CLOSE
    assert [log["step"] for log in report["evaluations"]] == [0, 1, 2, 3]
    assert report["num_syncs"] == {str(step): 1 for step in range(4)}  # a rollout after an evaluation needs none

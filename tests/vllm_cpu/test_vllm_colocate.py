# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""vLLM inside the trainer's process: every rollout is sampled with the weights of the last step."""

import pytest
from vllm_server import CLOSE, errors


WAYS = {
    "plain": {},
    "a few first": {"dynamic_sampling_screen": "2"},
    "top_p": {"top_p": 0.7},
    "presence penalty": {"generation_kwargs": {"presence_penalty": 1.0}},
    "regex": {"vllm_structured_outputs_regex": "[a-z ]+"},
}
FROM_THE_POLICY = ("plain", "a few first")  # the engine samples from the policy itself


@pytest.fixture(scope="module")
def reports(models, run_variants):
    evaluates = {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True, "per_device_eval_batch_size": 4}
    variants = {
        "tied": {},
        "untied": {"model": models["untied"]},
        "never synced": {"sabotage": "no sync"},
        "lora": {"lora": {}, "vllm_lora_sync": "merge"},
        "evaluated": evaluates,
    }
    carry = {"dynamic_sampling_surplus": "carry", "batch_multiplier": 2.0, "learning_rate": 0.0}
    variants |= {name: {**carry, **settings} for name, settings in WAYS.items()}
    return run_variants(variants, model=models["tied"])


@pytest.mark.parametrize("variant", ["tied", "untied", "lora", "evaluated"])
def test_every_rollout_is_sampled_with_the_live_weights(reports, variant):
    assert max(call["error"] for call in reports[variant]["calls"]) < CLOSE
    assert {call["step"] for call in reports[variant]["calls"]} >= {0, 1}


def test_the_oracle_sees_weights_that_were_not_synced(reports):
    assert max(errors(reports["never synced"], updated=False)) < CLOSE
    assert min(errors(reports["never synced"], updated=True)) > 0.1


@pytest.mark.parametrize("way", WAYS)
def test_at_a_learning_rate_of_0_every_ratio_is_1_however_a_row_was_sampled(reports, way):
    trained = reports[way]["trained"]
    assert any(row["sampled_in"] < row["step"] for row in trained)
    assert max(row["old_from_live"] for row in trained) < CLOSE  # the logarithm of the ratio
    assert max(row["weight_error"] for row in trained) < CLOSE
    # The engine samples from another distribution. The weights correct for it, but the ratio does not contain it.
    assert (max(row["old_from_sampled"] for row in trained) > 0.05) == (way not in FROM_THE_POLICY)


def test_an_evaluation_is_one_call_for_all_problems_with_the_live_weights(reports):
    report = reports["evaluated"]
    evaluations = [call for call in report["calls"] if not call["training"]]
    # Before the first step and after each of three: 5 problems of 4 completions, in batches of one problem.
    assert [(call["step"], call["num_rows"]) for call in evaluations] == [(step, 5 * 4) for step in range(4)]
    assert max(call["error"] for call in evaluations) < CLOSE
    assert [log["step"] for log in report["evaluations"]] == [0, 1, 2, 3]
    # a rollout after an evaluation does not need a push
    assert report["num_syncs"] == {str(step): 1 for step in range(4)}

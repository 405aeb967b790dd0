# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""LoRA with vLLM: the adapter travels and the base stays, in this process and on a server."""

import json
import urllib.request

import pytest
from vllm_server import CLOSE, errors, on_server, vllm_server


VARIANTS = {
    "lora": {"lora": {}},
    "qlora": {"lora": {}, "quantized": True, "dynamic_sampling_surplus": "carry", "max_steps": 4},
    "never refreshed": {"lora": {}, "sabotage": "no sync"},
    "carried": {"lora": {"use_rslora": True, "lora_alpha": 16}, "dynamic_sampling_surplus": "carry", "max_steps": 4},
}
EVALUATES = {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True, "per_device_eval_batch_size": 4}
COLOCATED = {**VARIANTS, "evaluated": {"lora": {"target_modules": r".*\.(q|v|down)_proj"}, **EVALUATES}}


@pytest.fixture(scope="module")
def server(models, tmp_path_factory):
    with vllm_server(models["tied"], tmp_path_factory.mktemp("server") / "log", lora_rank=8) as server:
        yield server


@pytest.fixture(scope="module")
def colocated(models, run_variants):
    return run_variants(COLOCATED, model=models["tied"])


@pytest.fixture(scope="module")
def served(models, run_variants, server):
    return run_variants(VARIANTS, model=models["tied"], **on_server(server))


def run_and_report(run_job, job, model, folder, settings):
    result = run_job(job, model, folder, json.dumps(settings))
    assert result.returncode == 0, result.stdout[-5000:]
    return json.loads((folder / "report.json").read_text())


LIVE = {"colocated": ("lora", "qlora", "carried", "evaluated"), "served": ("lora", "qlora", "carried")}


@pytest.mark.parametrize(("mode", "variant"), [(mode, variant) for mode in LIVE for variant in LIVE[mode]])
def test_every_rollout_has_one_live_adapter_and_the_base_under_it_stays_bit_by_bit(request, mode, variant):
    report = request.getfixturevalue(mode)[variant]
    assert report["serves_adapter"]
    assert max(errors(report, updated=False)) < CLOSE
    assert max(errors(report, updated=True)) < CLOSE
    steps = sorted({call["step"] for call in report["calls"]})
    assert len(steps) >= 3
    assert report["num_syncs"] == {str(step): 1 for step in steps}
    # Version 1 was handed over when the trainer was made, to see that vLLM takes it.
    versions = dict.fromkeys((call["step"], call["adapter"]) for call in report["calls"])
    assert [*versions] == [(step, 2 + i) for i, step in enumerate(steps)]
    assert [call["step"] for call in report["calls"] if call["training"]].count(0) >= 2
    assert report["base_moved"] == []


@pytest.mark.parametrize("mode", LIVE)
def test_the_oracle_sees_an_adapter_that_was_not_refreshed(request, mode):
    report = request.getfixturevalue(mode)["never refreshed"]
    assert max(errors(report, updated=False)) < CLOSE
    assert min(errors(report, updated=True)) > 0.1


def test_carried_rows_keep_the_log_probabilities_of_the_adapter_that_sampled_them(served):
    carried = [row for row in served["carried"]["trained"] if row["sampled_in"] < row["step"]]
    assert len(carried) > 0
    assert max(row["old_from_sampled"] for row in carried) < CLOSE
    assert max(row["old_from_live"] for row in carried) > 0.1


@pytest.mark.parametrize("mode", LIVE)
def test_carried_rows_of_a_base_in_4_bits_are_its_own_and_weighed_against_the_one_that_sampled(request, mode):
    """Old log-probabilities of the engine's base, in 16 bits, would clip tokens before anything has moved."""
    report = request.getfixturevalue(mode)["qlora"]
    carried = [row for row in report["trained"] if row["sampled_in"] < row["step"]]
    assert len(carried) > 0
    assert max(row["weight_error"] for row in report["trained"]) < CLOSE
    assert min(row["old_from_sampled"] for row in carried) > 10 * CLOSE


def test_a_server_joins_no_group_and_keeps_no_adapter_but_the_last(served):
    for i, report in enumerate(served.values()):
        assert not report["has_group"]
        assert len(report["models"]) == 1 + i + 1  # the base, and one of each run that has not ended


def test_what_a_server_lacks_is_told_with_what_to_change(models, server, run_job, tmp_path):
    by_hand = on_server(server, vllm_lora_sync="adapter")
    variants = {
        "rank": {**by_hand, "lora": {"r": 12}},
        "folder": {**by_hand, "lora": {}, "sabotage": "another mount"},
    }
    report = run_and_report(run_job, "refuses", models["tied"], tmp_path, variants)
    assert {name for name, _ in report.values()} == {"ValueError"}
    assert f"server at {server.url} serves adapters up to rank 8, and this one has rank 12" in report["rank"][1]
    assert "Restart it with `--enable-lora --max-lora-rank 16`" in report["rank"][1]
    assert f"server at {server.url} cannot read the adapter in /elsewhere/trl-policy-" in report["folder"][1]
    assert "`output_dir` that both see" in report["folder"][1]


def test_two_rollouts_ahead_every_row_is_of_the_adapter_that_its_request_named_through_a_resume(
    server, models, run_job, tmp_path
):
    screened = {"dynamic_sampling_screen": "2", "dynamic_sampling_memory": True}
    settings = {"lora": {}, "max_steps": 20, **on_server(server), **screened}
    report = run_and_report(run_job, "two_ahead_and_resumed", models["tied"], tmp_path, settings)
    assert len(report["logs"]) == 20
    assert {step for step, *_ in report["errors"]} == {*range(20)}
    assert {age for _, age, *_ in report["errors"]} == {0, 1, 2}
    assert max(error for _, _, error, _ in report["errors"]) < CLOSE
    assert len({*report["trained"]}) == len(report["trained"])  # in 200 prompts no group comes twice
    assert sum(log["overlap/groups_by_age/2"] for log in report["logs"]) > 10
    # At its end a run leaves nothing behind, on the server or on the disk.
    with urllib.request.urlopen(f"{server.url}/v1/models", timeout=10) as answer:
        assert [model["id"] for model in json.load(answer)["data"] if "trl-policy" in model["id"]] == []
    assert [*tmp_path.rglob("trl-policy-*")] == [*tmp_path.rglob("_vllm_lora")] == []

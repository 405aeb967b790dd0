# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""LoRA with vLLM: the adapter travels, the base stays, in this process and on a server."""

import json

import pytest
from vllm_server import vllm_server


CLOSE = 1e-4  # float32 on both sides: measured errors are about 1e-6
VARIANTS = {
    "lora": {"lora": {}},
    "rslora": {"lora": {"use_rslora": True, "lora_alpha": 16}},
    "qlora": {"lora": {}, "quantized": True},
    "never refreshed": {"lora": {}, "sabotage": "no adapter"},
    "qlora never refreshed": {"lora": {}, "quantized": True, "sabotage": "no adapter"},
}
LIVE = ["lora", "rslora", "qlora"]
STALE = ["never refreshed", "qlora never refreshed"]


@pytest.fixture(scope="module")
def server(models, tmp_path_factory):
    with vllm_server(models["tied"], tmp_path_factory.mktemp("server") / "log", lora_rank=8) as server:
        yield server


@pytest.fixture(scope="module")
def colocated(models, run_job, tmp_path_factory):
    return run_all(models, run_job, tmp_path_factory.mktemp("colocated"), {})


@pytest.fixture(scope="module")
def served(models, run_job, tmp_path_factory, server):
    return run_all(models, run_job, tmp_path_factory.mktemp("served"), on_server(server))


def on_server(server):
    return {"vllm_mode": "server", "vllm_server_base_url": server.url, "vllm_server_timeout": 60}


def run_all(models, run_job, folder, settings):
    variants = {name: {"model": models["tied"], **settings, **rest} for name, rest in VARIANTS.items()}
    result = run_job("runs", folder, json.dumps(variants))
    assert result.returncode == 0, result.stdout[-5000:]
    reports = {name: json.loads((folder / name / "report.json").read_text()) for name in variants}
    return {**reports, "output": result.stdout}


@pytest.fixture(params=["colocated", "served"])
def reports(request):
    return request.getfixturevalue(request.param)


def errors(report, *, updated):
    """The oracle: vLLM's log-probabilities against those of the live adapter, before or after the first update."""
    return [call["error"] for call in report["calls"] if (call["step"] > 0) == updated]


@pytest.mark.parametrize("variant", LIVE)
def test_every_rollout_is_sampled_with_the_live_adapter(reports, variant):
    print(errors(reports[variant], updated=False), errors(reports[variant], updated=True))
    assert reports[variant]["serves_adapter"]
    assert max(errors(reports[variant], updated=False)) < CLOSE
    assert max(errors(reports[variant], updated=True)) < CLOSE
    assert {call["step"] for call in reports[variant]["calls"]} == {0, 1, 2}


@pytest.mark.parametrize("variant", STALE)
def test_the_oracle_sees_an_adapter_that_was_not_refreshed(reports, variant):
    assert max(errors(reports[variant], updated=False)) < CLOSE
    assert min(errors(reports[variant], updated=True)) > 0.1

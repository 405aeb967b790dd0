# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""LoRA with vLLM: the adapter travels and the base stays, in this process and on a server."""

import json
import urllib.request

import pytest
from vllm_server import vllm_server


AHEAD = {"rollouts_ahead": 1, "dynamic_sampling_surplus": "carry"}
CLOSE = 1e-4  # float32 on both sides: measured errors are about 1e-6
VARIANTS = {
    "lora": {"lora": {}},
    "qlora": {"lora": {}, "quantized": True, "dynamic_sampling_surplus": "carry", "max_steps": 4},
    "never refreshed": {"lora": {}, "sabotage": "no sync"},
    "carried": {"lora": {"use_rslora": True, "lora_alpha": 16}, "dynamic_sampling_surplus": "carry", "max_steps": 4},
}
COLOCATED = {
    **VARIANTS,
    "qlora never refreshed": {"lora": {}, "quantized": True, "sabotage": "no sync"},
    "evaluated": {
        "lora": {"target_modules": r".*\.(q|v|down)_proj"},
        "eval_strategy": "steps",
        "eval_steps": 1,
        "eval_on_start": True,
        "per_device_eval_batch_size": 4,
    },
}


@pytest.fixture(scope="module")
def server(models, tmp_path_factory):
    with vllm_server(models["tied"], tmp_path_factory.mktemp("server") / "log", lora_rank=8) as server:
        yield server


@pytest.fixture(scope="module")
def colocated(models, run_job, tmp_path_factory):
    return run_all(models, run_job, tmp_path_factory.mktemp("colocated"), COLOCATED, {})


@pytest.fixture(scope="module")
def served(models, run_job, tmp_path_factory, server):
    return run_all(models, run_job, tmp_path_factory.mktemp("served"), VARIANTS, on_server(server))


def on_server(server, **settings):
    return {"vllm_mode": "server", "vllm_server_base_url": server.url, "vllm_server_timeout": 60, **settings}


def run_all(models, run_job, folder, variants, settings):
    variants = {name: {"model": models["tied"], **settings, **rest} for name, rest in variants.items()}
    result = run_job("runs", folder, json.dumps(variants), timeout=500)
    assert result.returncode == 0, result.stdout[-5000:]
    reports = {name: json.loads((folder / name / "report.json").read_text()) for name in variants}
    assert all(report["serves_adapter"] for report in reports.values())
    return reports


def errors(report, *, updated):
    """The oracle: vLLM's log-probabilities against those of the live adapter, before or after the first update."""
    return [call["error"] for call in report["calls"] if (call["step"] > 0) == updated]


def served_adapters(server):
    with urllib.request.urlopen(f"{server.url}/v1/models", timeout=10) as answer:
        return [model["id"] for model in json.load(answer)["data"] if "trl-policy" in model["id"]]


def run_and_report(run_job, job, model, folder, *args):
    result = run_job(job, model, folder, *args)
    assert result.returncode == 0, result.stdout[-5000:]
    return json.loads((folder / "report.json").read_text()), result.stdout


LIVE = {"colocated": ("lora", "qlora", "carried", "evaluated"), "served": ("lora", "qlora", "carried")}
each_mode_and_variant = pytest.mark.parametrize(
    ("mode", "variant"), [(mode, variant) for mode, variants in LIVE.items() for variant in variants]
)


@each_mode_and_variant
def test_every_rollout_is_sampled_with_the_live_adapter(request, mode, variant):
    report = request.getfixturevalue(mode)[variant]
    assert len({call["step"] for call in report["calls"]}) >= 3
    assert max(errors(report, updated=False)) < CLOSE
    assert max(errors(report, updated=True)) < CLOSE


@pytest.mark.parametrize(
    ("mode", "variant"),
    [("colocated", "never refreshed"), ("colocated", "qlora never refreshed"), ("served", "never refreshed")],
)
def test_the_oracle_sees_an_adapter_that_was_not_refreshed(request, mode, variant):
    report = request.getfixturevalue(mode)[variant]
    assert max(errors(report, updated=False)) < CLOSE
    assert min(errors(report, updated=True)) > 0.1


@each_mode_and_variant
def test_a_rollout_has_one_adapter_however_many_rounds_it_takes(request, mode, variant):
    report = request.getfixturevalue(mode)[variant]
    steps = {call["step"] for call in report["calls"]}
    assert report["num_syncs"] == {str(step): 1 for step in steps}
    # Version 1 was handed over when the trainer was made, to see that vLLM takes it.
    versions = dict.fromkeys((call["step"], call["adapter"]) for call in report["calls"])
    assert [*versions] == [(step, 2 + i) for i, step in enumerate(sorted(steps))]
    assert [call["step"] for call in report["calls"] if call["training"]].count(0) >= 2


@each_mode_and_variant
def test_the_base_under_the_adapter_stays_bit_by_bit(request, mode, variant):
    assert request.getfixturevalue(mode)[variant]["base_moved"] == []


def test_importance_weights_correct_for_a_base_that_samples_in_full_where_one_of_4_bits_trains(colocated):
    full, quantized = ([r for row in colocated[name]["trained"] for r in row["ratio"]] for name in ("lora", "qlora"))
    assert full == pytest.approx([1.0] * len(full), abs=CLOSE)
    assert max(abs(ratio - 1) for ratio in quantized) > 1e-3
    assert max(quantized) <= 2.0  # `vllm_importance_sampling_clip_max`


def test_carried_rows_keep_the_log_probabilities_of_the_adapter_that_sampled_them(served):
    carried = [row for row in served["carried"]["trained"] if row["sampled_in"] < row["step"]]
    assert len(carried) > 0
    assert max(row["old_from_sampled"] for row in carried) < CLOSE
    assert max(row["old_from_live"] for row in carried) > 0.1


@pytest.mark.parametrize("mode", ["colocated", "served"])
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


def test_after_50_syncs_the_base_is_what_it_was_and_with_merged_weights_it_is_not(models, run_job, tmp_path):
    moved, _ = run_and_report(run_job, "drifts", models["untied"], tmp_path)
    assert set(moved["adapter"].values()) == {0.0}
    merged = {name: share for name, share in moved["merge"].items() if "_proj" in name}
    assert len(merged) == 2 * 7  # the layers under the adapter
    assert min(merged.values()) > 0.01  # of a layer's weights
    assert sum(moved["merge"].values()) == pytest.approx(sum(merged.values()))


def test_an_adapter_stays_until_no_request_in_flight_names_it(models, server, run_job, tmp_path):
    report, _ = run_and_report(
        run_job, "serves_while_in_flight", models["tied"], tmp_path, json.dumps(on_server(server))
    )
    first, moved, both, second = ([name for name in names if "trl-policy" in name] for names in report["models"])
    assert len(first) == len(moved) == len(second) == 1
    assert both == [*moved, *second]
    # At its end the run leaves nothing behind, on the server or on the disk.
    assert served_adapters(server) == []
    assert [*tmp_path.rglob("trl-policy-*")] == [*tmp_path.rglob("_vllm_lora")] == []
    in_flight, after, stale = report["errors"]
    assert in_flight < CLOSE  # answered by the adapter that it names
    assert after < CLOSE
    assert stale > 0.1  # the two adapters differ


def test_every_run_of_a_trainer_and_a_resumed_one_begin_with_the_adapter_as_it_is(models, server, run_job, tmp_path):
    report, _ = run_and_report(
        run_job, "trains_twice_and_resumes", models["tied"], tmp_path, json.dumps(on_server(server))
    )
    assert [{call["step"] for call in report[name]} for name in ("first", "second", "resumed")] == [{0}, {0}, {1, 2}]
    # The resumed run's server has the base and, from the time that the trainer was made, an adapter that does nothing.
    assert max(call["error"] for calls in report.values() for call in calls) < CLOSE


def test_what_a_server_lacks_is_told_with_what_to_change(models, server, run_job, tmp_path):
    by_hand = on_server(server, vllm_lora_sync="adapter")
    variants = {
        "rank": {**by_hand, "lora": {"r": 12}},
        "folder": {**by_hand, "lora": {}, "sabotage": "another mount"},
        "qlora": {**on_server(server), "lora": {"r": 12}, "quantized": True},
        "dora": {**by_hand, "lora": {"use_dora": True}},
        "ahead": {**on_server(server, **AHEAD), "lora": {}, "quantized": True},
    }
    report, _ = run_and_report(run_job, "refuses", models["tied"], tmp_path, json.dumps(variants))
    assert {name for name, _ in report.values()} == {"ValueError"}
    messages = {name: message for name, (_, message) in report.items()}
    assert f"server at {server.url} serves adapters up to rank 8, and this one has rank 12" in messages["rank"]
    assert "Restart it with `--enable-lora --max-lora-rank 16`" in messages["rank"]
    assert f"server at {server.url} cannot read the adapter in /elsewhere/trl-policy-" in messages["folder"]
    assert "`output_dir` that both see" in messages["folder"]
    assert "quantized model alone, because the vLLM server" in messages["qlora"]
    assert "`use_dora=True`" in messages["dora"]
    assert "`rollouts_ahead=1` does not support a base in 4 or 8 bits" in messages["ahead"]


def test_one_rollout_ahead_every_row_trains_with_the_log_probabilities_of_the_adapter_at_its_launch(
    server, models, run_job, tmp_path
):
    settings = {"model": models["tied"], "lora": {}, "max_steps": 5, **on_server(server)}
    result = run_job("ahead_runs", tmp_path, json.dumps({"ahead": settings}))
    assert result.returncode == 0, result.stdout[-5000:]
    report = json.loads((tmp_path / "ahead" / "ahead-0.json").read_text())
    assert {age for _, age, _ in report["errors"]} == {0, 1, 2}
    assert max(error for _, _, error in report["errors"]) < CLOSE
    assert served_adapters(server) == []


SCREENED = {"dynamic_sampling_screen": "2", "dynamic_sampling_memory": True}


@pytest.mark.parametrize("settings", [{}, SCREENED], ids=["whole", "screened"])
def test_two_rollouts_ahead_every_row_is_of_the_adapter_that_its_request_named_through_a_resume(
    server, models, run_job, tmp_path, settings
):
    settings = {"lora": {}, "max_steps": 20, **on_server(server), **settings}
    report, _ = run_and_report(run_job, "two_ahead_and_resumed", models["tied"], tmp_path, json.dumps(settings))
    assert len(report["logs"]) == 20
    assert {step for step, *_ in report["errors"]} == {*range(20)}
    assert {age for _, age, *_ in report["errors"]} == {0, 1, 2}
    assert max(error for _, _, error, _ in report["errors"]) < CLOSE
    assert len({*report["trained"]}) == len(report["trained"])  # in 200 prompts no group comes twice
    assert sum(log["overlap/groups_by_age/2"] for log in report["logs"]) > 10
    assert served_adapters(server) == []

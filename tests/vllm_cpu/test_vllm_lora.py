# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""LoRA with vLLM: the adapter is sent and the base model stays, in this process and on a server."""

import json
import urllib.request

import pytest
from vllm_server import CLOSE, errors, on_server, vllm_server

from trl_dapo.cli import main


VARIANTS = {
    "lora": {"lora": {"target_modules": r".*\.(q|v|down)_proj"}, "max_steps": 4},
    "qlora": {"lora": {}, "quantized": True, "dynamic_sampling_surplus": "carry", "max_steps": 4},
    "never refreshed": {"lora": {}, "sabotage": "no sync"},
    "carried": {"lora": {"use_rslora": True, "lora_alpha": 16}, "dynamic_sampling_surplus": "carry", "max_steps": 4},
}


@pytest.fixture(scope="module")
def server(models, tmp_path_factory):
    with vllm_server(models["tied"], tmp_path_factory.mktemp("server") / "log") as server:
        yield server


@pytest.fixture(scope="module")
def colocated(models, run_variants):
    return run_variants(VARIANTS, model=models["tied"])


@pytest.fixture(scope="module")
def served(models, run_variants, server):
    return run_variants(VARIANTS, model=models["tied"], **on_server(server))


def run_and_report(run_job, job, model, folder, settings):
    result = run_job(job, model, folder, json.dumps(settings))
    assert result.returncode == 0, result.stdout[-5000:]
    return json.loads((folder / "report.json").read_text())


MODES = ("colocated", "served")


@pytest.mark.parametrize("variant", ["lora", "qlora", "carried"])
@pytest.mark.parametrize("mode", MODES)
def test_every_rollout_has_one_live_adapter_and_the_base_under_it_stays_bit_by_bit(request, mode, variant):
    report = request.getfixturevalue(mode)[variant]
    assert report["serves_adapter"]
    assert max(errors(report, updated=False)) < CLOSE
    assert max(errors(report, updated=True)) < CLOSE
    steps = sorted({call["step"] for call in report["calls"]})
    assert len(steps) >= 3
    assert report["num_syncs"] == {str(step): 1 for step in steps}
    # Version 1 was sent when the trainer was created, to check that vLLM can load it.
    versions = dict.fromkeys((call["step"], call["adapter"]) for call in report["calls"])
    assert [*versions] == [(step, 2 + i) for i, step in enumerate(steps)]
    assert [call["step"] for call in report["calls"] if call["training"]].count(0) >= 2
    assert report["base_moved"] == []


@pytest.mark.parametrize("mode", MODES)
def test_the_oracle_sees_an_adapter_that_was_not_refreshed(request, mode):
    report = request.getfixturevalue(mode)["never refreshed"]
    assert max(errors(report, updated=False)) < CLOSE
    assert min(errors(report, updated=True)) > 0.1


def test_carried_rows_keep_the_log_probabilities_of_the_adapter_that_sampled_them(served):
    carried = [row for row in served["carried"]["trained"] if row["sampled_in"] < row["step"]]
    assert max(row["old_from_sampled"] for row in carried) < CLOSE
    assert max(row["old_from_live"] for row in carried) > 0.1


@pytest.mark.parametrize("mode", MODES)
def test_carried_rows_of_a_base_in_4_bits_are_its_own_and_weighed_against_the_one_that_sampled(request, mode):
    """Old log-probabilities from the engine's 16-bit base would clip tokens before the policy has changed."""
    report = request.getfixturevalue(mode)["qlora"]
    carried = [row for row in report["trained"] if row["sampled_in"] < row["step"]]
    assert max(row["weight_error"] for row in report["trained"]) < CLOSE
    assert min(row["old_from_sampled"] for row in carried) > 10 * CLOSE


def test_a_server_joins_no_group_keeps_no_adapter_but_the_last_and_says_who_it_is(served):
    for i, seen in enumerate(report["served"] for report in served.values()):
        assert (seen["group"], seen["names_itself"]) == (None, True)
        assert len(seen["models"]) == 1 + i + 1  # the base model, and one adapter of each run that has not ended


def test_the_error_names_what_a_server_lacks_and_what_to_change(models, server, run_job, tmp_path):
    by_hand = on_server(server, vllm_lora_sync="adapter")
    variants = {"rank": {**by_hand, "lora": {"r": 12}}, "folder": {**by_hand, "lora": {}, "sabotage": "another mount"}}
    report = run_and_report(run_job, "refuses", models["tied"], tmp_path, variants)
    assert {name for name, _ in report.values()} == {"ValueError"}
    assert f"server at {server.url} serves adapters up to rank 8, but this one has rank 12" in report["rank"][1]
    assert "Restart it with `--enable-lora --max-lora-rank 16`" in report["rank"][1]
    assert f"server at {server.url} cannot read the adapter in /elsewhere/trl-policy-" in report["folder"][1]
    assert "`output_dir` that has the same path on both machines" in report["folder"][1]


def test_rows_of_two_processes_ahead_have_log_probabilities_of_their_launch(server, models, run_job, tmp_path):
    settings = {"lora": {}, "max_steps": 5, "per_device_train_batch_size": 2}
    options = json.dumps(on_server(server, **settings, eval_strategy="steps", eval_steps=2))
    result = run_job("ahead_run", models["tied"], tmp_path, options, num_processes=2)
    assert result.returncode == 0, result.stdout[-5000:]
    found = [row for rank in (0, 1) for row in json.loads((tmp_path / f"ahead-{rank}.json").read_text())]
    # Rows of this rollout's policy, of the last one's and, if carried, of the one before.
    assert {age for _, age, _ in found} == {0, 1, 2}
    assert max(error for _, _, error in found) < CLOSE


def test_two_rollouts_ahead_rows_are_of_the_adapter_that_was_named(server, models, run_job, tmp_path):
    screened = {"dynamic_sampling_screen": "2", "dynamic_sampling_memory": True}
    settings = {"lora": {}, "max_steps": 20, **on_server(server), **screened}
    report = run_and_report(run_job, "two_ahead_and_resumed", models["tied"], tmp_path, settings)
    assert len(report["logs"]) == 20
    assert {step for step, *_ in report["errors"]} == {*range(20)}
    assert {age for _, age, *_ in report["errors"]} == {0, 1, 2}
    assert max(error for _, _, error, _ in report["errors"]) < CLOSE
    assert len({*report["trained"]}) == len(report["trained"])  # in 200 prompts no group comes twice
    assert sum(log["rollouts_ahead/groups_by_staleness/2"] for log in report["logs"]) > 10
    # At its end a run leaves nothing behind on the server or on the disk.
    with urllib.request.urlopen(f"{server.url}/v1/models", timeout=10) as answer:
        assert [model["id"] for model in json.load(answer)["data"] if "trl-policy" in model["id"]] == []
    assert [*tmp_path.rglob("trl-policy-*")] == [*tmp_path.rglob("_vllm_lora")] == []


# ---- trl-dapo eval ----

PROBLEMS = [{"prompt": f"What is {i} + {i}", "solution": str(2 * i)} for i in range(6)]


def arguments(folder, **options):
    path = folder / "problems.jsonl"
    path.write_text("".join(json.dumps(problem) + "\n" for problem in PROBLEMS))
    settings = {"prompt_style": "as_is", "max_completion_length": 16, "k": 1, "temperature": 0, **options}
    named = [(f"--{name}", str(value)) for name, value in settings.items()]
    return ["eval", "--dataset", str(path), "--output_dir", str(folder), *(part for pair in named for part in pair)]


def completions(folder):
    """Return every completion that `trl-dapo eval` wrote, in the order of the problems."""
    _, *lines = map(json.loads, (folder / "completions.jsonl").read_text().splitlines())
    return sorted((line["problem"], line["index"], line["text"], line["length"], line["truncated"]) for line in lines)


def test_an_evaluation_by_vllm_is_that_of_transformers(server, models, run_job, tmp_path_factory):
    here, by_vllm, before, by_server = (tmp_path_factory.mktemp("evaluated") for _ in range(4))
    assert main(arguments(here, model=models["wide"])) == 0
    result = run_job("evaluates", *arguments(by_vllm, model=models["wide"], engine="vllm"))
    assert result.returncode == 0, result.stdout[-5000:]
    assert completions(by_vllm) == completions(here)
    assert len({text for _, _, text, *_ in completions(here)}) > 1
    assert main(arguments(before, model=models["tied"])) == 0
    assert main(arguments(by_server, model=models["tied"], base_url=f"{server.url}/v1")) == 0
    assert completions(by_server) == completions(before)

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""vLLM as a server: training syncs its weights, and evaluation asks it."""

import json

import pytest
from vllm_server import on_server

from trl_dapo.cli import main


CLOSE = 1e-4  # float32 on both sides: measured errors are about 1e-6
WAYS = {
    "plain": {},
    "a few first": {"dynamic_sampling_screen": "2"},
    "top_p": {"top_p": 0.7},
    "top_k": {"top_k": 20},
    "min_p": {"min_p": 0.1},
    "repetition penalty": {"repetition_penalty": 1.3},
    "presence penalty": {"generation_kwargs": {"presence_penalty": 1.0}},
    "frequency penalty": {"generation_kwargs": {"frequency_penalty": 1.0, "min_tokens": 4}},
    "regex": {"vllm_structured_outputs_regex": "[a-z ]+"},
}
OF_THE_POLICY = ("plain", "a few first")  # not of another distribution
PROBLEMS = [{"prompt": f"What is {i} + {i}?", "solution": str(2 * i)} for i in range(6)]


@pytest.fixture(scope="module")
def trained(server, models, run_job, tmp_path_factory):
    """Folder of the reports, and of the model whose weights the server ends with."""
    folder = tmp_path_factory.mktemp("served")
    variants = {
        "never synced": {"sabotage": "no sync"},  # first, while the server has the weights that it started with
        "lora": {"lora": {}},  # merged, since this server serves no adapters
        "full": {"save_as": str(folder / "model")},
    }
    variants = {name: {"model": models["tied"], **on_server(server, **rest)} for name, rest in variants.items()}
    result = run_job("runs", folder, json.dumps(variants))
    assert result.returncode == 0, result.stdout[-5000:]
    return folder


def report(folder):
    return json.loads((folder / "report.json").read_text())


def errors(report, *, updated):
    """The oracle: vLLM's log-probabilities against those of the live weights, before or after the first update."""
    return [call["error"] for call in report["calls"] if (call["step"] > 0) == updated]


@pytest.mark.parametrize("variant", ["full", "lora"])
def test_the_server_samples_every_rollout_with_the_live_weights(trained, variant):
    assert max(errors(report(trained / variant), updated=False)) < CLOSE
    assert max(errors(report(trained / variant), updated=True)) < CLOSE


def test_the_oracle_sees_that_a_server_was_not_synced(trained):
    assert max(errors(report(trained / "never synced"), updated=False)) < CLOSE
    assert min(errors(report(trained / "never synced"), updated=True)) > 0.1


def test_rounds_differ_in_size_and_share_one_weight_sync_a_rollout(trained):
    calls = report(trained / "full")["calls"]
    # Prompts 0 and 3 of the first 4 are dropped, so the first rollout takes a second round.
    assert [call["step"] for call in calls].count(0) == 2
    assert len({call["num_rows"] for call in calls}) > 1
    assert report(trained / "full")["num_syncs"] == {"0": 1, "1": 1, "2": 1}
    ratios = [ratio for row in report(trained / "full")["trained"] for ratio in row["ratio"]]
    assert ratios == pytest.approx([1.0] * len(ratios), abs=CLOSE)


# ---- LoRA, on a server that serves no adapters ----


@pytest.fixture(scope="module")
def refused(server, models, run_job, tmp_path_factory):
    """What making a trainer ends in."""
    folder = tmp_path_factory.mktemp("refused")
    variants = {
        "by hand": {"lora": {"r": 12}, "vllm_lora_sync": "adapter"},
        "quantized": {"lora": {}, "quantized": True},
        "not while it runs": {"lora": {}, "vllm_lora_sync": "adapter", "sabotage": "said to serve adapters"},
        "left to choose": {"lora": {}},
    }
    ahead = {"rollouts_ahead": 1, "dynamic_sampling_surplus": "carry"}
    variants |= {f"ahead, {way}": {**ahead, **settings} for way, settings in WAYS.items()}
    variants = {name: on_server(server, **settings) for name, settings in variants.items()}
    result = run_job("refuses", models["tied"], folder, json.dumps(variants))
    assert result.returncode == 0, result.stdout[-5000:]
    return report(folder), result.stdout


def test_an_adapter_asked_for_by_hand_is_refused_with_the_flag_that_is_missing(server, refused):
    name, message = refused[0]["by hand"]
    assert name == "ValueError"
    assert f"server at {server.url} serves no adapters. Restart it with `--enable-lora --max-lora-rank 16`" in message


def test_a_server_that_loads_nothing_while_it_runs_is_told_of_the_variable(refused):
    name, message = refused[0]["not while it runs"]
    assert name == "ValueError"
    assert "`VLLM_ALLOW_RUNTIME_LORA_UPDATING=True`" in message


def test_a_quantized_model_is_refused_with_the_flag_since_it_cannot_be_merged(refused):
    name, message = refused[0]["quantized"]
    assert name == "ValueError"
    assert "--enable-lora --max-lora-rank 8" in message


def test_left_to_choose_the_adapter_is_merged_and_one_line_says_why(refused, trained):
    assert refused[0]["left to choose"] == ["made", False]
    (line,) = [line for line in refused[1].splitlines() if "with the adapter merged" in line]
    assert "`--enable-lora --max-lora-rank 8`" in line
    assert report(trained / "lora")["has_group"]
    assert not report(trained / "lora")["serves_adapter"]


# ---- trl-dapo eval ----


def problems(folder):
    path = folder / "problems.jsonl"
    path.write_text("".join(json.dumps(problem) + "\n" for problem in PROBLEMS))
    return path


def arguments(folder, **options):
    settings = {"prompt_style": "as_is", "max_completion_length": 16, "k": 1, "temperature": 0, **options}
    named = [(f"--{name}", str(value)) for name, value in settings.items()]
    return ["eval", "--dataset", problems(folder), "--output_dir", folder, *(part for pair in named for part in pair)]


def evaluate(folder, **options):
    """What `trl-dapo eval` leaves: every completion, in the order of the problems."""
    assert main([str(argument) for argument in arguments(folder, **options)]) == 0
    return completions(folder)


def completions(folder):
    _, *lines = map(json.loads, (folder / "completions.jsonl").read_text().splitlines())
    return sorted((line["problem"], line["index"], line["text"], line["length"], line["truncated"]) for line in lines)


@pytest.fixture(scope="module")
def greedy(trained, tmp_path_factory):
    """The trained model's most probable answers, by transformers."""
    answers = evaluate(tmp_path_factory.mktemp("transformers"), model=trained / "model")
    assert len(answers) == len(PROBLEMS)
    return answers


def test_an_evaluation_by_the_server_that_training_synced_is_one_of_the_trained_model(
    server, trained, greedy, models, tmp_path
):
    assert evaluate(tmp_path, model=models["tied"], base_url=f"{server.url}/v1") == greedy


def test_the_model_before_training_answers_otherwise(greedy, models, tmp_path):
    assert evaluate(tmp_path, model=models["tied"]) != greedy


def test_an_evaluation_by_vllm_in_this_process_is_that_of_transformers(run_job, trained, greedy, tmp_path):
    result = run_job("evaluates", *arguments(tmp_path, model=trained / "model", engine="vllm"))
    assert result.returncode == 0, result.stdout[-5000:]
    assert completions(tmp_path) == greedy


def test_sampled_completions_are_asked_for_side_by_side_and_none_of_them_twice(server, models, tmp_path):
    sampling = {"model": models["tied"], "base_url": f"{server.url}/v1", "k": 8, "temperature": 1.0, "top_p": 0.7}
    first = evaluate(tmp_path, **sampling)
    assert len(first) == 8 * len(PROBLEMS)
    assert len({text for _, _, text, _, _ in first}) > len(PROBLEMS)
    journal = tmp_path / "completions.jsonl"
    *kept, _ = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(kept))
    assert len(evaluate(tmp_path, **sampling)) == len(first)
    assert journal.read_text().startswith("".join(kept))


# ---- Rows of every age and every way to sample: behind the tests of the weights that the server ends with ----


@pytest.fixture(scope="module")
def sampled(server, models, run_job, tmp_path_factory):
    """Runs that carry, whose weights never move."""
    folder = tmp_path_factory.mktemp("sampled")
    carry = {"dynamic_sampling_surplus": "carry", "batch_multiplier": 2.0, "learning_rate": 0.0}
    variants = {
        name: {"model": models["tied"], **on_server(server, **carry, **settings)} for name, settings in WAYS.items()
    }
    result = run_job("runs", folder, json.dumps(variants))
    assert result.returncode == 0, result.stdout[-5000:]
    return {name: report(folder / name) for name in variants}


@pytest.mark.parametrize("way", WAYS)
def test_at_a_learning_rate_of_0_every_ratio_is_1_however_a_row_was_sampled(sampled, way):
    trained = sampled[way]["trained"]
    assert any(row["sampled_in"] < row["step"] for row in trained)
    assert max(row["old_from_live"] for row in trained) < CLOSE  # the logarithm of the ratio
    assert max(row["weight_error"] for row in trained) < CLOSE
    # The engine's are of another distribution, which the weight corrects, and the ratio does not know.
    assert (max(row["old_from_sampled"] for row in trained) > 0.05) == (way not in OF_THE_POLICY)


def test_what_an_engine_samples_from_another_distribution_is_not_sampled_ahead(refused):
    outcomes = {way: refused[0][f"ahead, {way}"] for way in WAYS}
    assert {outcomes.pop(way)[0] for way in OF_THE_POLICY} == {"made"}
    assert {kind for kind, _ in outcomes.values()} == {"ValueError"}
    assert "`top_p=0.7`" in outcomes["top_p"][1]

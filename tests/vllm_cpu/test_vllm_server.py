# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""vLLM as a server: training syncs its weights, in turns and one rollout ahead, and evaluation asks it."""

import json

import pytest
from vllm_server import CLOSE, errors, on_server

from trl_dapo.cli import main


WAYS = {
    "plain": {},
    "a few first": {"dynamic_sampling_screen": "2"},
    "top_p": {"top_p": 0.7},
    "presence penalty": {"generation_kwargs": {"presence_penalty": 1.0}},
    "regex": {"vllm_structured_outputs_regex": "[a-z ]+"},
}
OF_THE_POLICY = ("plain", "a few first")  # not of another distribution
PROBLEMS = [{"prompt": f"What is {i} + {i}?", "solution": str(2 * i)} for i in range(6)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The folder of the model whose weights the server ends with."""
    return tmp_path_factory.mktemp("trained")


@pytest.fixture(scope="module")
def trained(server, models, run_variants, model):
    variants = {
        "never synced": {"sabotage": "no sync"},  # first, while the server has the weights that it started with
        "lora": {"lora": {}},  # merged, since this server serves no adapters
        "full": {"save_as": str(model)},
    }
    return run_variants({name: on_server(server, **rest) for name, rest in variants.items()}, model=models["tied"])


@pytest.mark.parametrize("variant", ["full", "lora"])
def test_the_server_samples_every_rollout_with_the_live_weights(trained, variant):
    assert max(errors(trained[variant], updated=False)) < CLOSE
    assert max(errors(trained[variant], updated=True)) < CLOSE
    assert trained[variant]["has_group"]


def test_the_oracle_sees_that_a_server_was_not_synced(trained):
    assert max(errors(trained["never synced"], updated=False)) < CLOSE
    assert min(errors(trained["never synced"], updated=True)) > 0.1


def test_rounds_differ_in_size_and_share_one_weight_sync_a_rollout(trained):
    calls = trained["full"]["calls"]
    # Prompts 0 and 3 of the first 4 are dropped, so the first rollout takes a second round.
    assert [call["step"] for call in calls].count(0) == 2
    assert len({call["num_rows"] for call in calls}) > 1
    assert trained["full"]["num_syncs"] == {"0": 1, "1": 1, "2": 1}


def test_an_adapter_that_the_server_cannot_serve_is_refused_with_what_to_change(server, models, run_job, tmp_path):
    by_hand = {"vllm_lora_sync": "adapter"}
    variants = {
        "by hand": on_server(server, lora={"r": 12}, **by_hand),
        "not while it runs": on_server(server, lora={}, sabotage="said to serve adapters", **by_hand),
    }
    result = run_job("refuses", models["tied"], tmp_path, json.dumps(variants))
    assert result.returncode == 0, result.stdout[-5000:]
    said = json.loads((tmp_path / "report.json").read_text())
    assert {name for name, _ in said.values()} == {"ValueError"}
    missing = f"server at {server.url} serves no adapters. Restart it with `--enable-lora --max-lora-rank 16`"
    assert missing in said["by hand"][1]
    assert "`VLLM_ALLOW_RUNTIME_LORA_UPDATING=True`" in said["not while it runs"][1]


# ---- trl-dapo eval ----


def arguments(folder, **options):
    path = folder / "problems.jsonl"
    path.write_text("".join(json.dumps(problem) + "\n" for problem in PROBLEMS))
    settings = {"prompt_style": "as_is", "max_completion_length": 16, "k": 1, "temperature": 0, **options}
    named = [(f"--{name}", str(value)) for name, value in settings.items()]
    return ["eval", "--dataset", str(path), "--output_dir", str(folder), *(part for pair in named for part in pair)]


def completions(folder):
    """What `trl-dapo eval` leaves: every completion, in the order of the problems."""
    _, *lines = map(json.loads, (folder / "completions.jsonl").read_text().splitlines())
    return sorted((line["problem"], line["index"], line["text"], line["length"], line["truncated"]) for line in lines)


def evaluate(folder, **options):
    assert main(arguments(folder, **options)) == 0
    return completions(folder)


def test_an_evaluation_by_the_synced_server_and_one_in_this_process_are_those_of_the_trained_model(
    server, trained, model, models, run_job, tmp_path_factory
):
    folders = [tmp_path_factory.mktemp("evaluated") for _ in range(4)]
    greedy = evaluate(folders[0], model=model)  # the most probable answers, by transformers
    assert len(greedy) == len(PROBLEMS)
    assert evaluate(folders[1], model=models["tied"], base_url=f"{server.url}/v1") == greedy
    result = run_job("evaluates", *arguments(folders[2], model=model, engine="vllm"))
    assert result.returncode == 0, result.stdout[-5000:]
    assert completions(folders[2]) == greedy
    assert evaluate(folders[3], model=models["tied"]) != greedy  # before training


# ---- Rows of every age and every way to sample: behind the tests of the weights that the server ends with ----


@pytest.fixture(scope="module")
def sampled(server, models, run_variants):
    """Runs that carry, whose weights never move."""
    carry = {"dynamic_sampling_surplus": "carry", "batch_multiplier": 2.0, "learning_rate": 0.0}
    variants = {name: on_server(server, **carry, **settings) for name, settings in WAYS.items()}
    return run_variants(variants, model=models["tied"])


@pytest.mark.parametrize("way", WAYS)
def test_at_a_learning_rate_of_0_every_ratio_is_1_however_a_row_was_sampled(sampled, way):
    trained = sampled[way]["trained"]
    assert any(row["sampled_in"] < row["step"] for row in trained)
    assert max(row["old_from_live"] for row in trained) < CLOSE  # the logarithm of the ratio
    assert max(row["weight_error"] for row in trained) < CLOSE
    # The engine's are of another distribution, which the weight corrects, and the ratio does not know.
    assert (max(row["old_from_sampled"] for row in trained) > 0.05) == (way not in OF_THE_POLICY)


def test_one_rollout_ahead_rows_of_two_trainer_processes_have_the_log_probabilities_of_their_launch(
    server, models, run_job, tmp_path
):
    settings = {"max_steps": 5, "eval_strategy": "steps", "eval_steps": 2, "per_device_train_batch_size": 2}
    options = json.dumps(on_server(server, **settings))
    result = run_job("ahead_run", models["tied"], tmp_path, options, num_processes=2)
    assert result.returncode == 0, result.stdout[-5000:]
    found = [row for rank in (0, 1) for row in json.loads((tmp_path / f"ahead-{rank}.json").read_text())]
    # Rows of this rollout's policy, of the last one's and, carried, of the one before.
    assert {age for _, age, _ in found} == {0, 1, 2}
    assert max(error for _, _, error in found) < CLOSE

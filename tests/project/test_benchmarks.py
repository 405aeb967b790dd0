# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch

from benchmarks import __main__ as runner
from benchmarks import drop_in, gpu, lora_sync, sampling_policies, screening
from benchmarks.frame import curves, runs
from benchmarks.frame.runs import Job
from trl_dapo.cli.quickstart import build_model, build_tokenizer


def test_accuracy_is_the_probability_of_the_answer_and_its_end():
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, 0, hidden_size=16, intermediate_size=16, num_hidden_layers=1, head_dim=4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()  # every token is as likely as any other
    # Three or four digits and the end of the text. The padding after the shorter one does not count.
    expected = (len(tokenizer) ** -4 + len(tokenizer) ** -5) / 2
    assert curves.accuracy(model, tokenizer, ["17+05=220", "12*34=8040"]) == pytest.approx(expected, rel=1e-4)
    # A working follows the answer, and each of its tokens counts once.
    (worked,) = curves.correct_probabilities(model, tokenizer, ["27+05=230=27+05"])
    assert worked.item() == pytest.approx(len(tokenizer) ** -10, rel=1e-3)


CURVE = [{"tokens": 10, "seconds": 1.0, "accuracy": 0.4}, {"tokens": 30, "seconds": 2.5, "accuracy": 0.6}]


def test_an_interrupted_benchmark_runs_only_what_is_missing_or_was_run_by_other_code(tmp_path, monkeypatch, capsys):
    ran = []

    def train(job, checkpoint, folder):
        ran.append((job.arm, job.target))
        return {"curve": CURVE}

    monkeypatch.setattr(runs, "ProcessPoolExecutor", lambda num, **how: ThreadPoolExecutor(num))
    done, changed, old, _, elsewhere = jobs = [
        Job("quickstart", arm, 0, target=0.5, max_seconds=1.0) for arm in ("A", "B", "C", "D", "E")
    ]
    code, checkpoint = runs.fingerprint(train), tmp_path / "checkpoint-250"
    for job, start, kept_code in (
        (done, "checkpoint-250", code),
        (changed._replace(target=0.4), "checkpoint-250", code),
        (old, "checkpoint-250", "of yesterday"),
        (elsewhere, "checkpoint-5", code),
    ):
        text = json.dumps({"job": job._asdict(), "checkpoint": start, "code": kept_code, "curve": CURVE[:1]})
        (tmp_path / f"quickstart-{job.arm}-0.json").write_text(text)
    results = runs.run_all(train, jobs, checkpoint, tmp_path, 1)
    assert ran == [("B", 0.5), ("C", 0.5), ("D", 0.5), ("E", 0.5)]
    assert results["quickstart", "A", 0]["curve"] == CURVE[:1]
    assert "quickstart, D, seed 0: 60.0% after 30 tokens and 2 s" in capsys.readouterr().out


def test_both_trainers_of_the_drop_in_have_the_same_losses():
    clocks = drop_in.measure(num_turns=1, num_steps=2, num_rows=16, num_microbatches=4, max_length=8)
    (trls,) = clocks["GRPOTrainer"]
    assert len(trls.losses) == 2
    assert len(trls.seconds) == 1  # the first step is left out
    assert any(abs(loss) > 1e-3 for loss in trls.losses)
    assert drop_in.loss_difference(clocks) < 1e-6


def test_the_gpu_benchmark_measures_both_trainers_and_a_round_of_whole_completions():
    model = gpu.make_model((16, 16, 1, 4, 2), vocab_size=512, pad_token_id=0, eos_token_id=1)
    results = gpu.measure(model, [2, 3, 5, 7, 11, 13, 17, 19], rows_per_microbatch=4, repeats=1)
    assert set(results) == {"GRPOTrainer", "DAPOTrainer"}
    assert all(cost["seconds"] > 0 for cost in results.values())
    sampled = []
    gpu.seconds_of_round(model.eval(), lambda *args: sampled.append(gpu.SAMPLE["generate"](*args).shape), 3)
    assert sampled == [(3, 64 + 64)] * 2


def test_the_bytes_of_a_sync_are_those_of_the_weights_that_it_sends():
    model = lora_sync.make_model((32, 64, 2, 2, 1), vocab_size=100)
    handed_over = lora_sync.handed_over(model)
    adapter = 2 * sum(value.numel() for name, value in model.named_parameters() if "lora_" in name)  # in bfloat16
    assert handed_over["merge"] == 2 * model.num_parameters() - adapter
    assert 0 < handed_over["adapter"] - adapter < 10_000  # names and the config


def test_every_benchmark_of_the_results_is_a_study_and_each_has_a_line_in_the_list(capsys):
    runner.main(["--list"])
    listed = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert runner.BENCHMARKS.keys() <= {name for name, _ in listed} == runner.read_studies().keys()
    assert all(what.endswith((".", "?")) for _, what in listed)


def test_an_evaluation_before_the_first_pass_is_of_the_prompts_that_are_sampled():
    rate_N = np.full(40, 0.5)
    ((_, policy),) = screening.play(rate_N, "on", 4, 1, memory=partial(screening.evaluated, rate_N, 8))
    sampled = {group.name for group in policy.sampler.rollout.decided_groups}
    assert sampled <= screening.evaluated(rate_N, 8, 0, 16).prompts


def test_ours_fills_every_batch_however_few_groups_are_accepted():
    cost = sampling_policies.run(sampling_policies.POLICIES["paper"], sampling_policies.Trace(0.04, 500), 4, 5)
    assert cost.shortfall == 0
    assert cost.per_trained > 10  # above the default limit of a run

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
import importlib.util
import json
import math
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as runner
from benchmarks import drop_in, gpu, ledger, lora_sync, sampling_policies
from benchmarks.frame import curves, measures, options, runs
from benchmarks.frame.runs import Job
from benchmarks.ladder import run as ladder
from benchmarks.ladder import task
from trl_dapo.cli.quickstart import build_model, build_tokenizer
from trl_dapo.run.ledger import read_ledger


TINY = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 4}


# ---- time_to_accuracy ----


def test_accuracy_is_the_probability_of_the_answer_and_its_end():
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, 0, **TINY)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()  # every token is as likely as any other
    # Three or four digits and the end of the text; padding behind the shorter one counts for nothing.
    expected = (len(tokenizer) ** -4 + len(tokenizer) ** -5) / 2
    assert curves.accuracy(model, tokenizer, ["17+05=220", "12*34=8040"]) == pytest.approx(expected, rel=1e-4)
    # Behind the answer a working, each token of which counts once.
    (worked,) = curves.right_probabilities(model, tokenizer, ["27+05=230=27+05"])
    assert worked.item() == pytest.approx(len(tokenizer) ** -10, rel=1e-3)


CURVE = [{"tokens": 10, "seconds": 1.0, "accuracy": 0.4}, {"tokens": 30, "seconds": 2.5, "accuracy": 0.6}]


def test_a_run_that_never_reaches_the_target_costs_more_than_any_other():
    costs = [measures.cost({"curve": CURVE}, target, "tokens") for target in (0.3, 0.5, 0.7)]
    assert costs == [10, 30, math.inf]
    assert measures.spread(costs) == "30 (10 to -)"


def test_an_interrupted_benchmark_runs_only_what_is_missing_or_what_other_code_has_run(tmp_path, monkeypatch, capsys):
    ran = []

    def train(job, checkpoint):
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
    # All stand in for the next call's.
    again = runs.run_all(train, jobs, checkpoint, tmp_path, 1)
    assert len(ran) == 4
    assert {key: result["curve"] for key, result in again.items()} == {
        key: result["curve"] for key, result in results.items()
    }


def test_code_that_changes_has_another_fingerprint(tmp_path):
    def fingerprint(text):
        (tmp_path / "script.py").write_text(text)
        spec = importlib.util.spec_from_file_location("script", tmp_path / "script.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return runs.fingerprint(module.run)

    first = fingerprint("def run(): return 1")
    assert fingerprint("def run(): return 2") != first
    assert fingerprint("def run(): return 1") == first


# ---- sampling_policies ----


def test_every_group_that_ours_accepts_trains_or_is_carried():
    trace = sampling_policies.Trace(acceptance=0.5, drift=0.0, num_prompts=300, num_generations=4)
    world, num_accepted = sampling_policies.World(trace), 0
    ours = sampling_policies.Ours(world, target=8, carries=True)
    for world.step in range(20):
        step = next(ours)
        num_accepted += len(ours.sampler.rollout.accepted)
        assert step.num_trained == 8
        assert step.num_generated == ours.sampler.rollout.num_groups
    ours.sampler.begin()
    assert num_accepted == 20 * 8 + len(ours.sampler.rollout.carried)
    assert len(ours.sampler.rollout.carried) > 0


# ---- drop_in, memory_and_scale, gpu ----


def test_both_trainers_of_the_drop_in_have_the_same_losses():
    clocks = drop_in.measure(num_turns=1, num_steps=2, num_rows=16, num_microbatches=4, max_length=8)
    (trls,) = clocks["GRPOTrainer"]
    assert len(trls.losses) == 2
    assert len(trls.seconds) == 1  # the first step is left out
    assert any(abs(loss) > 1e-3 for loss in trls.losses)
    assert drop_in.loss_difference(clocks) < 1e-6


def test_both_trainers_of_the_gpu_benchmark_train_on_all_scripted_tokens(monkeypatch):
    seen = Counter()
    original = gpu.Turns.training_step

    def training_step(self, model, inputs, *args):
        loss = original(self, model, inputs, *args)
        seen[type(self)] = self.state.num_input_tokens_seen
        return loss

    monkeypatch.setattr(gpu.Turns, "training_step", training_step)
    lengths = [2, 3, 5, 7, 11, 13, 17, 19]
    model = gpu.make_model({**TINY, "vocab_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}, "cpu")
    results = gpu.measure(model, lengths, rows_per_microbatch=4, repeats=1)
    assert set(results) == {"GRPOTrainer", "DAPOTrainer"}
    assert all(cost["seconds"] > 0 for cost in results.values())
    assert seen[gpu.Ours] == seen[gpu.TRLs] > sum(lengths)


# ---- lora_sync ----


def test_both_ways_hand_over_the_weights_that_their_bytes_are_counted_of():
    model = lora_sync.make_model((32, 64, 2, 2, 1), vocab_size=100)
    handed_over = lora_sync.handed_over(model)
    assert handed_over["merge"] == 2 * lora_sync.num_parameters(model)  # in bfloat16
    adapter = 2 * sum(value.numel() for name, value in model.named_parameters() if "lora_" in name)
    assert 0 < handed_over["adapter"] - adapter < 10_000  # names and the config


# ---- ledger ----


def test_the_ledger_that_is_weighed_holds_every_group_of_every_rollout_and_the_texts_that_were_asked_for(tmp_path):
    per_group, seconds = ledger.write(tmp_path, (4, 2, 20, 1), num_rollouts=3)
    groups = read_ledger(tmp_path)
    assert groups["outcome"].to_pylist() == ["dropped", "trained"] * 2 * 3
    assert groups["source"].to_pylist() == ["math_dapo"] * 12
    assert [text is not None for text in groups["prompt"].to_pylist()] == [True, False, False, False] * 3
    assert len(seconds) == 3
    assert 12 * per_group == sum(path.stat().st_size for path in (tmp_path / "rollouts").iterdir())


# ---- python -m benchmarks ----


def test_a_benchmark_that_fails_is_said_to_and_does_not_stop_the_others(tmp_path, monkeypatch, capfd):
    (tmp_path / "breaks.py").write_text("print('half way')\nraise SystemExit('no such thing')\n")
    (tmp_path / "works.py").write_text("print('it works')\n")
    monkeypatch.setattr(runner, "BENCHMARKS", {"breaks": "Breaks", "works": "Works"})
    monkeypatch.setattr(runner, "command", lambda name: [str(tmp_path / f"{name}.py")])
    assert runner.main(["--output", str(tmp_path / "RESULTS.md")]) == 1
    text = (tmp_path / "RESULTS.md").read_text()
    assert re.search(
        r"## Breaks\n.*half way.*\*\*Failed\*\* with exit status 1.*## Works\n.*it works", text, re.DOTALL
    )
    errors = capfd.readouterr().err
    assert "no such thing" in errors
    assert "Failed: breaks" in errors


def test_every_benchmark_of_the_results_is_a_study_and_each_has_a_line_in_the_list(capsys):
    runner.main(["--list"])
    listed = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert runner.BENCHMARKS.keys() <= {name for name, _ in listed} == runner.read_studies().keys()
    assert all(what.endswith((".", "?")) for _, what in listed)


def test_a_command_has_the_options_that_its_function_has(capsys):
    def study(model: Path, part=("a", "b"), seed=1, rate: float | None = None, full=False):
        pass

    given = options.read_options(study, "study", "", ["--model", "m", "--part", "b", "--seed", "0", "--rate", "0.5"])
    assert given == {"model": Path("m"), "part": ["b"], "seed": 0, "rate": 0.5}  # the rest is the function's
    assert options.read_options(study, "study", "", ["--model", "m", "--full"]) == {"model": Path("m"), "full": True}
    for wrong, said in ((["--rate", "0"], "--rate must be above 0, got 0"), (["--part", "c"], "invalid choice: 'c'")):
        with pytest.raises(SystemExit):
            options.read_options(study, "study", "", ["--model", "m", *wrong])
        assert said in capsys.readouterr().err


# ---- the ladder ----


def test_the_working_is_as_long_as_half_the_first_digit_says_in_three_of_five_examples_and_by_luck():
    assert [task.working(text) for text in ("17+05", "47+05")] == ["", "=47+05=47+05"]
    right = 0
    for example in task.WorkedProblems(0).teach(3000):
        text, answer, *repeated = example.split("=")
        assert set(repeated) <= {text}
        assert answer.isdigit()
        right += len(repeated) == int(text[0]) // 2
    # The other two of five are right one time in six.
    assert right / 3000 == pytest.approx(0.6 + 0.4 / 6, abs=0.03)


def test_a_rung_keeps_what_the_rungs_before_it_added():
    assert ladder.settings_of("GRPO") == {"loss_type": "grpo", "epsilon_high": 0.2, "use_dynamic_sampling": False}
    assert ladder.settings_of("+ dynamic sampling") == {
        "loss_type": "dapo",
        "epsilon_high": 0.28,
        "overlong_filtering": True,
        "overlong_buffer_length": 5,
        "use_dynamic_sampling": True,
    }


def test_grpo_climbs_once_more_until_it_has_generated_as_much_as_the_last_rung(monkeypatch):
    ran = []

    def run_all(function, jobs, **how):
        ran.extend(jobs)
        tokens = {"GRPO": 100, "+ dynamic sampling": 250}
        return {job.key: {"tokens": tokens.get(job.arm, 1)} for job in jobs}

    monkeypatch.setattr(ladder, "run_all", run_all)
    results = ladder.climb(range(2), 60)
    assert [(job.arm, job.num_rollouts) for job in ran[:6]] == [(rung, 60) for rung in ladder.RUNGS]
    assert [(job.seed, job.num_rollouts) for job in ran[12:]] == [(0, 150), (1, 150)]  # 60 x 250 / 100
    assert {job.arm for job in ran[12:]} == {"GRPO with as many tokens"}
    assert all(job.settings == ladder.settings_of("GRPO") for job in ran[12:])
    assert len(results) == 14


def test_a_rollout_without_a_figure_is_left_out_of_its_mean():
    assert measures.mean_of([{"entropy": 1.0}, {}, {"entropy": 3.0}], "entropy") == 2.0
    assert math.isnan(measures.mean_of([{}], "entropy"))


def test_a_run_of_the_ladder_leaves_its_figures(tmp_path):
    tokenizer = build_tokenizer()
    build_model(tokenizer, 0, **TINY).save_pretrained(tmp_path / "checkpoint")
    tokenizer.save_pretrained(tmp_path / "checkpoint")
    job = Job("ladder", "+ token-level loss", 0, ladder.settings_of("+ token-level loss"), num_rollouts=2)
    result = ladder.run(job, tmp_path / "checkpoint")
    assert json.loads(json.dumps(result)) == result  # it is kept in a file
    assert result["accuracy"] < 0.05  # a random model
    assert len(result["curves"]["entropy"]) == 2
    # 16 tokens, all about as likely.
    assert result["entropy"] == pytest.approx(math.log(16), abs=0.3)
    assert result["tokens"] == pytest.approx(128 * sum(result["curves"]["completions/mean_length"]), abs=1)
    results = {("ladder", rung, 0): result for rung in ladder.ROWS}
    ladder.write_csv(results, tmp_path / "ladder.csv")
    lines = (tmp_path / "ladder.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["rung", *ladder.ROWS]

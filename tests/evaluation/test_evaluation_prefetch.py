# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""An engine is asked once for an evaluation, and what the evaluation reports stays the same."""

import json

import jobs
import pytest
from helpers import launch, number, prompts, right, tiny_config
from torch.utils.data import DataLoader
from transformers.trainer_utils import EvalLoopOutput
from trl import GRPOTrainer

from trl_dapo.evaluation.scores import Prefetch, rows_that_fit


# ---- Reading ahead ----


class Loader:
    """As accelerate prepares one: says as it hands over the last batch that it is the last."""

    def __init__(self, *batches):
        self.batches, self.end_of_dataloader, self.dataset = batches, False, "its dataset"

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        for i, batch in enumerate(self.batches, start=1):
            self.end_of_dataloader = i == len(self.batches)
            yield [{"prompt": prompt} for prompt in batch]


def prefetch(calls):
    def generate(prompts):
        calls.append(prompts)
        return [prompt.upper() for prompt in prompts], None, {}

    return Prefetch(generate)


@pytest.mark.parametrize(
    ("num_rows", "calls"),
    [(6, ["abcdef"]), (100, ["abcdef"]), (5, ["abcd", "ef"]), (4, ["abcd", "ef"]), (3, ["ab", "cd", "ef"]), (0, None)],
)
def test_batches_are_asked_for_together_as_many_as_fit(num_rows, calls):
    asked = []
    ahead = prefetch(asked)
    shares = []
    for batch in ahead.over(Loader("ab", "cd", "ef"), num_rows):
        shares.append(ahead.take([example["prompt"] for example in batch]))
    assert asked == [list(call) for call in calls or ["ab", "cd", "ef"]]
    assert shares == [(["A", "B"], None, {}), (["C", "D"], None, {}), (["E", "F"], None, {})]


def test_the_last_batch_is_the_last_when_it_is_handed_over():
    loader = Loader("ab", "cd", "ef")
    ahead = prefetch([])
    assert [loader.end_of_dataloader for _ in ahead.over(loader, 100)] == [False, False, True]


def test_nothing_is_handed_to_other_prompts_or_left_for_another_evaluation():
    ahead = prefetch([])
    for _ in ahead.over(Loader("ab", "cd"), 100):
        assert ahead.take(["x", "y"]) is None
        break  # aborted
    ahead.over(Loader("ab"), 100)
    assert ahead.take(["a", "b"]) is None


def test_a_loader_that_reads_ahead_is_like_the_loader():
    ahead = prefetch([]).over(Loader("ab", "cd"), 100)
    assert (len(ahead), ahead.dataset) == (2, "its dataset")


def test_one_call_holds_the_papers_aime_and_no_more_than_fits():
    assert rows_that_fit(20480) >= 960
    assert rows_that_fit(20480) * 20480 <= 2**25
    assert rows_that_fit(2**26) == 1
    assert rows_that_fit(1) == 2**14


# ---- In the trainer ----


def evaluator(model, folder, *, schedules=True, reward_funcs=jobs.echoes, script=jobs.echo, **overrides):
    """A trainer that evaluates as with an engine that schedules completions; `calls` gets the size of each."""
    args = tiny_config(folder, **{"per_device_eval_batch_size": 4, "shuffle_dataset": False, **overrides})
    trainer = jobs.CountingTrainer(model, reward_funcs, args, train_dataset=prompts(24), script=script)
    trainer.use_transformers_continuous_batching = schedules
    return trainer


@pytest.mark.parametrize(
    ("settings", "num_problems", "calls"),
    [
        ({}, 6, [24]),
        ({"schedules": False}, 3, [4, 4, 4]),  # a call is a batch
        ({"dynamic_sampling_max_round_size": 2}, 5, [8, 8, 4]),  # no more than a round may: 2 prompts of 4 completions
    ],
    ids=["asked once", "without a scheduler", "capped"],
)
def test_an_engine_is_asked_once_for_all_problems_and_repeats(tiny_model, tmp_path, settings, num_problems, calls):
    trainer = evaluator(tiny_model, tmp_path, **settings)
    problems = prompts(num_problems)
    metrics = trainer.evaluate(problems if settings else problems.to_iterable_dataset())
    assert [call["rows"] for call in trainer.calls] == calls
    assert metrics["eval_avg@4"] == 1.0  # every completion is scored for the prompt that it answers


def test_forward_passes_and_rewards_stay_batched(tiny_model, tmp_path):
    trainer, widths = evaluator(tiny_model, tmp_path), []
    compute = trainer._compute_loss
    trainer._compute_loss = lambda model, inputs: widths.append(len(inputs["prompt_ids"])) or compute(model, inputs)
    trainer.evaluate(prompts(3))
    assert widths == [4, 4, 4]


@pytest.mark.parametrize("num_problems", [5, 6])
def test_an_evaluation_reports_the_same_in_one_call_and_batch_by_batch(tiny_model, tmp_path, num_problems):
    # 5 problems of 4 completions in batches of 8: accelerate cuts the last batch's losses short.
    def some_right(prompts, completions, **kwargs):
        return [float(number(prompt) % 3 == 0) for prompt in prompts]

    reports = []
    for schedules in (True, False):
        folder = tmp_path / str(schedules)
        trainer = evaluator(
            tiny_model, folder, schedules=schedules, reward_funcs=some_right, per_device_eval_batch_size=8, beta=0.5
        )
        # A loss that differs from batch to batch
        trainer._compute_loss = lambda model, inputs: inputs["prompt_ids"].float().mean()
        metrics = trainer.evaluate(prompts(num_problems, source=["ab"[i % 2] for i in range(num_problems)]))
        reports.append({name: value for name, value in metrics.items() if not name.endswith(("time", "second"))})
        assert len(trainer.calls) == (1 if schedules else 3)
    for name, value in reports[1].items():
        assert reports[0][name] == pytest.approx(value), name


@pytest.mark.parametrize(("schedules", "calls"), [(True, [12, 12]), (False, [4] * 6)])
def test_an_evaluation_before_the_first_step_has_scores_and_asks_once(tiny_model, tmp_path, schedules, calls):
    looks = {"eval_on_start": True, "eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}
    data = {"train_dataset": prompts(24), "eval_dataset": prompts(3)}
    trainer = jobs.CountingTrainer(
        tiny_model, right, tiny_config(tmp_path, max_steps=1, **looks), script=jobs.script, **data
    )
    trainer.use_transformers_continuous_batching = schedules
    trainer.train()
    assert [call["rows"] for call in trainer.calls if not call["training"]] == calls
    scores = [(entry["step"], entry["eval_avg@4"]) for entry in trainer.state.log_history if "eval_avg@4" in entry]
    # Of prompts 0, 1 and 2 the last two are solved once in four.
    assert scores == [(step, pytest.approx(2 / 3 / 4)) for step in (0, 1)]


def test_continuous_batching_evaluates_without_training_mode(tiny_model, tmp_path):
    args = tiny_config(
        tmp_path,
        use_transformers_continuous_batching=True,
        transformers_continuous_batching_config={"num_blocks": 64, "max_batch_tokens": 64},
        per_device_eval_batch_size=4,
        max_completion_length=4,
    )
    seen = []

    def length(completions, **kwargs):
        seen.append((len(completions), trainer.model.training))
        return [1.0] * len(completions)

    trainer = jobs.DAPOTrainer(tiny_model, length, args, train_dataset=prompts(24))
    calls, generate_batch = [], trainer.model.generate_batch
    trainer.model.generate_batch = lambda ids, **kwargs: calls.append(len(ids)) or generate_batch(ids, **kwargs)
    metrics = trainer.evaluate(prompts(3))
    assert calls == [12]
    assert seen == [(4, False)] * 3
    assert metrics["eval_avg@4"] == 1.0


# ---- In two processes ----


@pytest.fixture(scope="module")
def evaluated_by_two(tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluated")
    result = launch("evaluates", tiny_model, folder, num_processes=2)
    assert result.returncode == 0, result.stderr[-5000:]
    return [json.loads((folder / f"report-2-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("batch_size", ["2", "6"])
def test_two_processes_ask_as_often_and_report_what_one_batch_at_a_time_does(evaluated_by_two, batch_size):
    # 5 problems of 4 completions. In batches of 2 rows a process, each problem's rows lie in both processes.
    for report in evaluated_by_two:
        ahead, one_by_one = report[batch_size]["ahead"], report[batch_size]["one by one"]
        assert len(ahead["calls"]) == 1
        assert len(one_by_one["calls"]) > 1
        assert ahead["calls"][0]["rows"] == sum(call["rows"] for call in one_by_one["calls"])
        for name, value in one_by_one["metrics"].items():
            assert ahead["metrics"][name] == pytest.approx(value), name
        assert ahead["metrics"]["eval_avg@4"] == pytest.approx(2 / 5)
        assert ahead["calls"][0]["answers_each"]  # a server is asked for every nth prompt


# ---- What stays TRL's own way ----


def test_a_rollout_function_gets_one_batch_at_a_time(tiny_model, tmp_path):
    batches = []

    def rolls_out(prompts, trainer):
        batches.append(prompts)
        ids = trainer.processing_class([prompt[-2] for prompt in prompts])["input_ids"]
        return {"prompt_ids": ids, "completion_ids": ids, "logprobs": [[0.0] * len(row) for row in ids]}

    trainer = evaluator(tiny_model, tmp_path)
    trainer.rollout_func = rolls_out
    assert trainer.evaluate(prompts(3))["eval_avg@4"] == 1.0
    assert sorted(batches) == [[f"prompt {i}:"] * 4 for i in range(3)]


@pytest.mark.parametrize("feature", ["tools", "environment_factories", "_is_vlm"])
def test_tools_environments_and_images_keep_trls_loader(tiny_model, tmp_path, monkeypatch, feature):
    loaders = []

    def evaluation_loop(self, dataloader, *args, **kwargs):
        loaders.append(dataloader)
        return EvalLoopOutput(predictions=None, label_ids=None, metrics={}, num_samples=0)

    monkeypatch.setattr(GRPOTrainer, "evaluation_loop", evaluation_loop)
    trainer = evaluator(tiny_model, tmp_path)
    trainer.evaluate(prompts(3))
    monkeypatch.setattr(trainer, feature, True)
    trainer.evaluate(prompts(3))
    assert [isinstance(loader, DataLoader) for loader in loaders] == [False, True]


def test_scores_have_the_prefix_that_is_given_by_position(tiny_model, tmp_path):
    trainer = evaluator(tiny_model, tmp_path)
    metrics = trainer.evaluation_loop(trainer.get_eval_dataloader(prompts(3)), "Test", None, None, "test").metrics
    assert "test_avg@4" in metrics
    assert not [name for name in metrics if name.startswith("eval_")]

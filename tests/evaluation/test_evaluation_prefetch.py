# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""An engine is asked once for an evaluation, and what the evaluation reports stays the same."""

import itertools
import json
from unittest.mock import patch

import jobs
import pytest
from helpers import launch, prompts, right, tiny_config
from torch.utils.data import DataLoader
from transformers.trainer_utils import EvalLoopOutput
from trl import GRPOTrainer

from trl_dapo.evaluation import during_training
from trl_dapo.evaluation.scores import Prefetch, rows_that_fit


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
def test_as_many_batches_as_fit_are_sampled_together(num_rows, calls):
    asked = []
    ahead, shares = prefetch(asked), []
    for batch in ahead.over(Loader("ab", "cd", "ef"), num_rows):
        shares.append(ahead.take([example["prompt"] for example in batch]))
    assert asked == [list(call) for call in calls or ["ab", "cd", "ef"]]
    assert shares == [(["A", "B"], None, {}), (["C", "D"], None, {}), (["E", "F"], None, {})]


def test_a_loader_that_reads_ahead_is_like_the_loader_and_the_last_batch_is_the_last_when_it_is_handed_over():
    loader = Loader("ab", "cd", "ef")
    ahead = prefetch([]).over(loader, 100)
    assert (len(ahead), ahead.dataset) == (3, "its dataset")
    assert [loader.end_of_dataloader for _ in ahead] == [False, False, True]


def test_completions_are_not_used_for_other_prompts_or_another_evaluation():
    ahead = prefetch([])
    for _ in ahead.over(Loader("ab", "cd"), 100):
        assert ahead.take(["x", "y"]) is None
        break  # aborted
    ahead.over(Loader("ab"), 100)
    assert ahead.take(["a", "b"]) is None


def test_one_call_holds_the_papers_aime_and_no_more_than_fits():
    assert rows_that_fit(20480) >= 960
    assert rows_that_fit(20480) * 20480 <= 2**25
    assert rows_that_fit(2**26) == 1
    assert rows_that_fit(1) == 2**14


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
)
def test_an_engine_is_called_once_for_all_problems_and_repetitions(
    tiny_model, tmp_path, settings, num_problems, calls
):
    trainer, problems = evaluator(tiny_model, tmp_path, **settings), prompts(num_problems)
    metrics = trainer.evaluate(problems if settings else problems.to_iterable_dataset())
    assert [call["rows"] for call in trainer.calls] == calls
    assert metrics["eval_avg@4"] == 1.0  # every completion is scored for the prompt that it answers


def test_without_max_completion_length_the_context_bounds_the_number_of_rows(tiny_model, tmp_path):
    trainer, rows = evaluator(tiny_model, tmp_path), []
    trainer.max_completion_length = None  # as vLLM takes it
    with patch.object(trainer._prefetch, "over", lambda loader, num_rows: rows.append(num_rows) or loader):
        trainer.evaluate(prompts(3))
        trainer.args.vllm_max_model_length = 2**12
        trainer.evaluate(prompts(3))
        trainer.args.vllm_max_model_length = None
        with patch.object(during_training, "context_length", lambda config: None):
            trainer.evaluate(prompts(3))
    # One call may have 2**25 tokens: rows of 2**11 (but at most 2**14 rows), of 2**12, and of an unknown length.
    assert rows == [2**14, 2**13, 1]


def test_forward_passes_and_rewards_stay_batched(tiny_model, tmp_path):
    trainer, widths = evaluator(tiny_model, tmp_path), []
    compute = trainer._compute_loss
    trainer._compute_loss = lambda model, inputs: widths.append(len(inputs["prompt_ids"])) or compute(model, inputs)
    trainer.evaluate(prompts(3))
    assert widths == [4, 4, 4]


def test_an_evaluation_before_the_first_step_has_scores_and_asks_once(tiny_model, tmp_path):
    looks = {"eval_on_start": True, "eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}
    data = {"train_dataset": prompts(24), "eval_dataset": prompts(3)}
    args = tiny_config(tmp_path, max_steps=1, **looks)
    trainer = jobs.CountingTrainer(tiny_model, right, args, script=jobs.script, **data)
    trainer.use_transformers_continuous_batching = True
    trainer.train()
    assert [call["rows"] for call in trainer.calls if not call["training"]] == [12, 12]
    scores = [(entry["step"], entry["eval_avg@4"]) for entry in trainer.state.log_history if "eval_avg@4" in entry]
    # Prompts 1 and 2 of 0, 1 and 2 are solved by one completion in four.
    assert scores == [(step, pytest.approx(2 / 3 / 4)) for step in (0, 1)]


def test_two_processes_report_the_same_as_with_one_batch_at_a_time(tiny_model, tmp_path):
    result = launch("evaluates", tiny_model, tmp_path, num_processes=2)
    assert result.returncode == 0, result.stderr[-5000:]
    # 20 completions in batches of 2 x 6, the second of which is filled up with 4.
    assert "so 4 are sampled twice. `eval_reward` and the other means of TRL count these twice" in result.stderr
    # 5 problems of 4 completions. In batches of 2 rows a process, each problem's rows lie in both processes.
    for rank, batch_size in itertools.product((0, 1), ("2", "6")):
        report = json.loads((tmp_path / f"report-2-{rank}.json").read_text())[batch_size]
        ahead, one_by_one = report["ahead"], report["one by one"]
        assert len(ahead["calls"]) == 1
        assert len(one_by_one["calls"]) > 1
        assert ahead["calls"][0]["rows"] == sum(call["rows"] for call in one_by_one["calls"])
        for name, value in one_by_one["metrics"].items():
            assert ahead["metrics"][name] == pytest.approx(value), name
        assert ahead["metrics"]["eval_avg@4"] == pytest.approx(2 / 5)
        assert ahead["calls"][0]["answers_each"]  # a server is asked for every nth prompt


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

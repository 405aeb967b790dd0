# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""A memory that begins with what an evaluation, an earlier run or a checkpoint saw."""

import json

import pytest
from datasets import Dataset, IterableDataset
from helpers import mixed_unless_multiple_of_3, prompts, right, tiny_config

from trl_dapo.run.known_prompts import load_pass_rates
from trl_dapo.sampling.example_names import problem_id
from trl_dapo.sampling.prompt_memory import PromptMemory
from trl_dapo.sampling.prompts import PromptStream
from trl_dapo.sampling.sampler import Sampler


MEMORY = {"dynamic_sampling_memory": True}
ROWS = [{"prompt": f"prompt {i}", "solution": str(i), "source": "sums"} for i in range(4)]


def sampler(dataset=None):
    stream = PromptStream(dataset or Dataset.from_list(ROWS), seed=0)
    return Sampler(stream, target=1, num_generations=8, policies=[PromptMemory()])


def memory_of(sampler):
    return sampler.selection.find(PromptMemory)


def names(made):
    return list(made.stream.rows_by_name(["prompt"]))


def evaluation(folder, problems):
    (folder / "summary.json").write_text(json.dumps({"problems": problems}))
    return str(folder)


def asked(row, num_correct, num_completions=8, **changed):
    problem = {"id": problem_id(row), "source": row["source"]}
    return problem | {"num_correct": num_correct, "num_completions": num_completions, **changed}


@pytest.fixture
def trained(made):
    def train(into, resumes=False, **settings):
        settings = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2, **MEMORY, **settings}
        trainer = made(right, prompts(48), mixed_unless_multiple_of_3, into, **settings)
        trainer.train(resume_from_checkpoint=resumes)
        return trainer

    return train


def test_pass_rates_of_an_evaluation_count_half(tmp_path):
    made = sampler(Dataset.from_list([*ROWS, ROWS[0]]))  # where the first stands twice, it is learnt once
    folder = evaluation(tmp_path, [asked(ROWS[0], 2), asked(ROWS[1], 0), asked(ROWS[2], 0, source="other")])
    assert load_pass_rates(folder, made) == f"The pass rates of 2 of 4 prompts are known from `{folder}`."
    first, second, third = map(memory_of(made).pass_rate_distribution, names(made)[:3])
    prior = memory_of(made).population.pass_rate_distribution()
    assert third == prior  # of another source, and so not asked
    assert first == pytest.approx((prior[0] + 2 / 2, prior[1] + 6 / 2))
    assert second == pytest.approx((prior[0], prior[1] + 8 / 2))


def test_an_evaluation_is_ignored_for_a_prompt_with_several_gold_answers(tmp_path):
    rows = [
        {"prompt": p, "solution": gold, "source": "sums"} for p, gold in [("1+1", "2"), ("1+1", "3"), ("1+2", "3")]
    ]
    folder = evaluation(tmp_path, [asked(rows[0], 4), asked(rows[2], 4)])
    assert (
        load_pass_rates(folder, sampler(Dataset.from_list(rows)))
        == f"The pass rates of 1 of 3 prompts are known from `{folder}`."
    )


def test_an_evaluation_is_ignored_for_an_id_of_several_training_prompts(tmp_path):
    """If two datasets are combined, each numbered from 0, it is unknown which one was evaluated."""
    made = sampler(Dataset.from_list([row | {"id": i} for i, row in zip([0, 0, 1, 2], ROWS, strict=True)]))
    folder = evaluation(tmp_path, [asked(ROWS[0] | {"id": i}, 4) for i in range(3)])
    assert load_pass_rates(folder, made) == f"The pass rates of 2 of 4 prompts are known from `{folder}`."
    assert memory_of(made).prompts == {*names(made)[2:]}


@pytest.mark.parametrize("of", ["run", "checkpoint"])
def test_a_run_starts_with_the_pass_rates_of_an_earlier_one(trained, tmp_path, of, capsys):
    earlier = trained("run")
    folder = tmp_path / "run" if of == "run" else tmp_path / "run" / "checkpoint-2"
    seen = memory_of(earlier._sampler).prompts
    capsys.readouterr()
    later = trained("later", dynamic_sampling_memory=str(folder), seed=7)
    assert f"{len(seen)} of 48 prompts are known from `{folder}`." in " ".join(capsys.readouterr().out.split())
    assert memory_of(later._sampler).seed == 7
    assert seen < memory_of(later._sampler).prompts


def test_a_resumed_run_continues_with_the_memory_of_its_checkpoint(trained, tmp_path):
    trained("run", max_steps=8)
    settings = {"dynamic_sampling_memory": str(tmp_path / "run"), "max_steps": 4}
    whole = trained("a", **settings)
    trained("b", **settings | {"max_steps": 2})
    again = trained("b", resumes=True, **settings)
    assert memory_of(again._sampler).state_dict() == memory_of(whole._sampler).state_dict()
    assert memory_of(again._sampler)._records == memory_of(whole._sampler)._records


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda folder: str(folder / "nowhere"), "is not a folder"),
        (str, "contains no pass rates: .* nor the ledger of a run, nor an evaluation"),
        (
            lambda folder: evaluation(folder, [asked({"prompt": "x", "source": "sums"}, 1)]),
            "contains pass rates, but none of the",
        ),
    ],
)
def test_a_folder_without_pass_rates_of_the_prompts_is_refused(tmp_path, make, error):
    with pytest.raises((ValueError, FileNotFoundError), match=error):
        load_pass_rates(make(tmp_path), sampler())


def test_an_evaluation_is_refused_for_a_dataset_without_length(tmp_path):
    made = sampler(IterableDataset.from_generator(lambda: iter(ROWS)))
    with pytest.raises(ValueError, match="cannot be used with a dataset of unknown length"):
        load_pass_rates(evaluation(tmp_path, [asked(ROWS[0], 2)]), made)


@pytest.mark.parametrize(("word", "value"), [("true", True), ("False", False), (True, True), ("a/b", "a/b")])
def test_a_command_line_says_true_false_or_a_folder(tmp_path, word, value):
    assert tiny_config(tmp_path, dynamic_sampling_memory=word).dynamic_sampling_memory == value

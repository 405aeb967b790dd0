# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""A memory that begins with what an evaluation, an earlier run or a checkpoint saw."""

import json

import pytest
from datasets import Dataset, IterableDataset
from helpers import mixed_unless_multiple_of_3, prompts, right, tiny_config

from trl_dapo.run.known_prompts import learn_from
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


def test_what_an_evaluation_saw_counts_half(tmp_path):
    made = sampler(Dataset.from_list([*ROWS, ROWS[0]]))  # where the first stands twice, it is learnt once
    folder = evaluation(tmp_path, [asked(ROWS[0], 2), asked(ROWS[1], 0), asked(ROWS[2], 0, source="other")])
    assert learn_from(folder, made) == f"2 of 4 prompts are known from `{folder}`."
    first, second, third = map(memory_of(made).pass_rate, names(made)[:3])
    prior = memory_of(made).population.pass_rate()
    assert third == prior  # of another source, and so not asked
    assert first == pytest.approx((prior[0] + 2 / 2, prior[1] + 6 / 2))
    assert second == pytest.approx((prior[0], prior[1] + 8 / 2))


def test_an_evaluation_teaches_nothing_of_a_prompt_that_has_several_golds(tmp_path):
    rows = [
        {"prompt": p, "solution": gold, "source": "sums"} for p, gold in [("1+1", "2"), ("1+1", "3"), ("1+2", "3")]
    ]
    folder = evaluation(tmp_path, [asked(rows[0], 4), asked(rows[2], 4)])
    assert learn_from(folder, sampler(Dataset.from_list(rows))) == f"1 of 3 prompts are known from `{folder}`."


def test_an_evaluation_teaches_nothing_of_an_id_that_several_training_prompts_have(tmp_path):
    """Of two datasets put together, each numbered from 0, nobody knows which one was evaluated."""
    made = sampler(Dataset.from_list([row | {"id": i} for i, row in zip([0, 0, 1, 2], ROWS, strict=True)]))
    folder = evaluation(tmp_path, [asked(ROWS[0] | {"id": i}, 4) for i in range(3)])
    assert learn_from(folder, made) == f"2 of 4 prompts are known from `{folder}`."
    assert memory_of(made).prompts == {*names(made)[2:]}


@pytest.mark.parametrize("of", ["run", "checkpoint"])
def test_a_run_begins_with_what_an_earlier_one_saw(trained, tmp_path, of, capsys):
    earlier = trained("run")
    folder = tmp_path / "run" if of == "run" else tmp_path / "run" / "checkpoint-2"
    seen = memory_of(earlier._sampler).prompts
    capsys.readouterr()
    later = trained("later", dynamic_sampling_memory=str(folder), seed=7)
    assert f"{len(seen)} of 48 prompts are known from `{folder}`." in " ".join(capsys.readouterr().out.split())
    assert memory_of(later._sampler).seed == 7
    assert seen < memory_of(later._sampler).prompts


def test_a_checkpoints_own_memory_goes_on_at_a_resume(trained, tmp_path):
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
        (lambda folder: str(folder / "nowhere"), "there is no such folder"),
        (str, "holds no checkpoint with a memory, no ledger of a run, and no evaluation"),
        (lambda folder: evaluation(folder, [asked({"prompt": "x", "source": "sums"}, 1)]), "knows none of the"),
    ],
)
def test_a_folder_that_says_nothing_of_the_prompts_is_refused(tmp_path, make, error):
    with pytest.raises((ValueError, FileNotFoundError), match=error):
        learn_from(make(tmp_path), sampler())


def test_an_evaluation_is_refused_for_a_dataset_without_length(tmp_path):
    made = sampler(IterableDataset.from_generator(lambda: iter(ROWS)))
    with pytest.raises(ValueError, match="an evaluation needs a dataset of known length"):
        learn_from(evaluation(tmp_path, [asked(ROWS[0], 2)]), made)


@pytest.mark.parametrize(("word", "value"), [("true", True), ("False", False), (True, True), ("a/b", "a/b")])
def test_a_command_line_says_true_false_or_a_folder(tmp_path, word, value):
    assert tiny_config(tmp_path, dynamic_sampling_memory=word).dynamic_sampling_memory == value

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""A user's own file and reward function on the command line, with unchanged rows or with math problems."""

import json
import re
import shlex
import sys
from pathlib import Path

import pandas as pd
import pytest
from helpers import launch as launch_job

from trl_dapo.cli.entry_point import main
from trl_dapo.cli.train import launch, make_parser, report_mistake, trainer_arguments


ON_THE_CPU = ["--use_cpu", "true", "--bf16", "false", "--tiny_model", "true"]
REWARD = "def short(completions, **kwargs):\n    return [0.0 for _ in completions]\n"
QUESTIONS = [{"prompt": f"Spell {word}.", "answer": word, "level": i} for i, word in enumerate(["ox", "hen", "ass"])]


@pytest.fixture
def given(tmp_path, monkeypatch):
    """Return the arguments of the trainer for a command line in a folder with `files`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_reward.py").write_text(REWARD)

    def make(*words, reward="my_reward.short", **files):
        for name, rows in files.items():
            (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        command = [*ON_THE_CPU, "--reward_funcs", reward, "--dataset_name", *(words or ["train.jsonl"])]
        return trainer_arguments(*make_parser().parse_args_and_config(command))

    return make


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "csv"])
def test_a_local_file_with_prompts_is_used_unchanged_with_every_column(given, tmp_path, kind):
    frame = pd.DataFrame(QUESTIONS)
    write = {"parquet": frame.to_parquet, "csv": lambda path: frame.to_csv(path, index=False)}
    write["json"] = lambda path: frame.to_json(path, orient="records")
    write["jsonl"] = lambda path: frame.to_json(path, orient="records", lines=True)
    write[kind](tmp_path / f"rows.{kind}")
    assert given(f"rows.{kind}")["train_dataset"].to_list() == QUESTIONS


def test_messages_are_enough_and_rows_may_have_different_columns_and_types(given):
    messages = [{"prompt": [{"role": "user", "content": f"Spell {word}."}]} for word in ("ox", "hen")]
    assert given(train=messages)["train_dataset"].to_list() == messages
    rows = [{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": "two", "unit": "cm"}]
    assert given(train=rows)["train_dataset"].to_list() == [rows[0] | {"unit": None}, rows[1]]


def test_parts_of_a_file_and_another_to_evaluate_on_are_rows_too(given):
    words = ["train.jsonl", "--dataset_offset", "1", "--dataset_limit", "1", "--eval_dataset_name", "held_out.jsonl"]
    made = given(*words, "--eval_strategy", "steps", train=QUESTIONS, held_out=QUESTIONS[:1])
    assert (made["train_dataset"].to_list(), made["eval_dataset"].to_list()) == (QUESTIONS[1:2], QUESTIONS[:1])
    with pytest.raises(ValueError, match=r"1 of the 1 evaluation problems are in the training set as well \(row 0\)"):
        given("train.jsonl", *words[5:], "--eval_strategy", "steps")


@pytest.mark.parametrize(
    ("words", "reward"),
    [
        (["--prompt_style", "as_is"], "my_reward.short"),
        (["--on_bad_rows", "skip"], "my_reward.short"),
        ([], "last_number"),  # nobody else reads a column
    ],
)
def test_math_problems_are_read_if_requested_and_columns_are_renamed(given, words, reward):
    made = given("train.jsonl", *words, reward=reward, train=QUESTIONS)["train_dataset"]
    assert made.column_names == ["prompt", "solution", "source", "id"]
    assert made["solution"][:] == ["ox", "hen", "ass"]


def test_a_file_without_prompts_is_one_of_problems(given, capsys):
    assert given(train=[{"problem": "1 + 1?", "answer": "2"}])["train_dataset"]["solution"][:] == ["2"]
    said = r"none of the known schemas of math problems\. Its columns are `text`\. Expected "
    with pytest.raises(ValueError, match=said) as told:
        given(train=[{"text": "1 + 1?"}])
    report_mistake(told.value)
    assert capsys.readouterr().err.endswith("if neither `prompt_style` nor `on_bad_rows` is set.\n")
    with pytest.raises(
        ValueError, match=r"columns are `promt`, `animal`\. Expected .* Is `promt` the `prompt`\? Then rename it\."
    ):
        given(train=[{"promt": "Which one moos?", "animal": "cow"}])


def test_the_error_for_a_missing_dataset_says_that_it_is_neither_a_file_nor_a_folder(given, tmp_path):
    said = "^`dataa` is neither a file nor a folder here"
    (tmp_path / "data").mkdir()
    with pytest.raises(FileNotFoundError, match=rf"{said} \(nearest: `data`\), and no "):
        given("dataa")
    with pytest.raises(FileNotFoundError, match=r"^There is no .*trian\.jsonl.* \(nearest: `train\.jsonl`\)\.$"):
        given("trian.jsonl", train=QUESTIONS)


@pytest.mark.parametrize("name", ["notes.txt", "train.jsonl.gz", "~/notes.txt"])
def test_a_file_of_an_unknown_kind_is_refused_and_not_searched_on_the_hub(given, tmp_path, monkeypatch, name):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / name.removeprefix("~/")).write_text("prompt")
    with pytest.raises(ValueError, match=r"is not a file of one of the kinds \.parquet, \.jsonl, \.json, \.csv\."):
        given(name)


def test_a_file_may_be_in_the_home_folder_and_its_suffix_in_capitals(given, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "TRAIN.JSONL").write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    assert given("~/TRAIN.JSONL")["train_dataset"].to_list() == QUESTIONS


@pytest.mark.parametrize("words", [["--dataset_train_split", "test"], ["--dataset_config", "main"]])
def test_a_split_or_a_configuration_of_a_file_is_refused(given, words):
    said = rf"^`{words[0][2:]}='{words[1]}'` has no effect: `dataset_name='train.jsonl'` is a file"
    with pytest.raises(ValueError, match=said):
        given("train.jsonl", *words, train=QUESTIONS)


def test_text_and_messages_in_one_file_are_refused_before_anything_is_loaded(given):
    mixed = [*QUESTIONS, {"prompt": [{"role": "user", "content": "Spell cat."}], "answer": "cat"}]
    with pytest.raises(ValueError, match=r"row 3 in .*`.*train\.jsonl` is messages, unlike"):
        given(train=mixed)


@pytest.mark.parametrize(
    ("words", "there", "file"),
    [([], "adapter", "adapter_config.json"), (["--use_peft", "true"], "model", "config.json")],
)
def test_a_model_is_not_saved_next_to_an_adapter_or_an_adapter_next_to_a_model(tmp_path, capsys, words, there, file):
    (tmp_path / file).write_text("{}")
    assert launch(["--output_dir", str(tmp_path), *ON_THE_CPU, *words]) == 2
    said = f"`output_dir` {tmp_path} contains the {there} of another run (`{file}`). If a folder contains a model and"
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_new_task_trains_unchanged_and_is_evaluated_on_its_own_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["new", "my_task"]) == 0
    assert capsys.readouterr().out == "Created my_task. Next: cd my_task && trl-dapo train --config recipe.yaml\n"
    assert len((tmp_path / "my_task" / "train.jsonl").read_text().splitlines()) == 5
    assert main(["new", "my_task"]) == 2  # and nothing in it is written over
    assert "There is a folder `my_task` already, and `trl-dapo new` changes none." in capsys.readouterr().err
    assert main(["plan", "--config", "my_task/recipe.yaml"]) == 0
    assert "recipe on 1xCPU, one process" in capsys.readouterr().out
    result = launch_job("says", tmp_path / "my_task", '["train", "--config", "recipe.yaml"]', num_processes=1)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "A group is accepted if 'has_letter' differs between its completions." in " ".join(result.stdout.split())
    log = [json.loads(line) for line in (tmp_path / "my_task" / "outputs" / "log_history.jsonl").open()]
    assert [entry["step"] for entry in log if "eval_avg@4" in entry] == [0, 3, 6]


def test_the_page_about_rewards_begins_with_a_file_a_reward_and_one_command_and_as_a_script(
    tmp_path, monkeypatch, tiny_model, tiny, made
):
    page = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text().partition("\n## ")[0]
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    rows, reward, command, script = (text for _, text in blocks)
    monkeypatch.chdir(tmp_path)
    for name, text in {"train.jsonl": rows, "my_reward.py": reward}.items():
        (tmp_path / name).write_text(text)
    sys.modules.pop("my_reward", None)
    words = shlex.split(command.replace("HuggingFaceTB/SmolLM2-135M-Instruct", tiny_model).replace("\\\n", ""))
    assert launch([*words[2:], *tiny]) == 0
    smaller = {"HuggingFaceTB/SmolLM2-135M-Instruct": tiny_model, "_length=64": "_length=4", "=8": "=4", "=24": "=12"}
    for said, small in smaller.items():
        script = script.replace(said, small)
    exec(script, {})
    data = [json.loads(row) for row in rows.splitlines()]
    assert [trainer.train_dataset.to_list() for trainer in made] == [data, data]
    names = {}
    exec(reward, names)
    assert names["names_it"](completions=["an ox", "a cat"], solution=["ox", "ox"], prompts=[]) == [1.0, 0.0]

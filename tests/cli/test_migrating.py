# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""docs/migrating.md is correct: `trl-dapo train` reads the files of `trl grpo`, and those of verl and ms-swift."""

import dataclasses
import inspect
import json
import os
import re
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import trl
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.scripts import grpo

from trl_dapo import DAPOConfig, DAPOTrainer
from trl_dapo.cli import processes, train
from trl_dapo.cli.entry_point import main
from trl_dapo.cli.train import PROBLEM_FIELDS, LaunchArguments, launch, make_parser
from trl_dapo.plan.recipe import read


ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "migrating.md").read_text()
RECIPE = "model_name_or_path: merged\ndataset_name: train.parquet\nprompt_style: as_is\noutput_dir: out\n"
# The three of TRL's page about its command line, docs/source/clis.md.
MODEL_AND_REWARD = "model_name_or_path: Qwen/Qwen2.5-0.5B\nreward_funcs:\n  - accuracy_reward\n"
ONE_DATASET = MODEL_AND_REWARD + "dataset_name: HuggingFaceH4/Polaris-Dataset-53K\n"
ACCELERATED = ONE_DATASET + "num_processes: 4\naccelerate_config: zero2  # or path/to/my/accelerate/config.yaml\n"
MIXTURE = "datasets:\n  - path: HuggingFaceH4/Polaris-Dataset-53K\n  - path: trl-lib/DeepMath-103K\n"
SUMS = [{"prompt": [{"role": "user", "content": f"{i} + {i}?"}], "solution": f"${2 * i}$"} for i in range(8)]


@pytest.fixture
def command(tmp_path, tiny_model, tiny):
    """Writes a configuration file; returns the command line that runs it with the tiny model."""

    def write(text, *overrides):
        (tmp_path / "theirs.yaml").write_text(text)
        out = ["--output_dir", str(tmp_path / "out"), "--model_name_or_path", tiny_model]
        return ["--config", str(tmp_path / "theirs.yaml"), *out, *tiny, *overrides]

    return write


@pytest.fixture
def sums(tmp_path):
    """A folder with a split to train on and one to evaluate on, as `datasets` reads it."""
    folder = tmp_path / "sums"
    folder.mkdir()
    for split, rows in {"train": SUMS, "test": SUMS[:2]}.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


@pytest.fixture
def launched(monkeypatch):
    """The requested arguments of `accelerate launch`. One process runs instead of several."""
    asked = []

    def run(arguments):
        asked.append(arguments)
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
        assert launch(arguments.training_script_args[1:]) == 0

    monkeypatch.setattr(processes, "launch_command", run)
    return asked


def test_fields_of_trl_are_accepted_and_passed_to_its_script():
    ours = {action.dest for action in make_parser()._actions}
    assert {action.dest for action in grpo.make_parser()._actions} - ours == set()
    handed = ["script_args", "training_args", "model_args", "dataset_args"]
    assert list(inspect.signature(grpo.main).parameters) == handed
    assert issubclass(LaunchArguments, (grpo.GRPOScriptArguments, trl.DatasetMixtureConfig))


def test_a_file_names_a_configuration_of_accelerates_and_the_command_line_decides_over_it(
    command, sums, launched, made
):
    assert launch(command(ACCELERATED, "--dataset_name", sums, "--num_processes=2")) == 0
    (asked,) = launched
    assert (Path(asked.config_file).name, asked.num_processes) == ("zero2.yaml", 2)
    (trainer,) = made
    assert trainer.reward_func_names == ["accuracy_reward"]
    assert trainer.train_dataset.to_list() == SUMS  # the unchanged rows
    assert trainer.state.global_step == 1


def test_a_mixture_of_datasets_trains(command, made, monkeypatch):
    rows = {"HuggingFaceH4/Polaris-Dataset-53K": SUMS[:5], "trl-lib/DeepMath-103K": SUMS[5:]}
    monkeypatch.setattr(datasets, "load_dataset", lambda path, **kwargs: datasets.Dataset.from_list(rows[path]))
    assert launch(command(MODEL_AND_REWARD + MIXTURE)) == 0
    assert made[0].train_dataset["solution"][:] == [f"${2 * i}$" for i in range(8)]
    assert made[0].state.global_step == 1


def test_splits_a_reward_model_and_the_environment_are_those_of_the_file(command, sums, tiny_model, made):
    file = f"env:\n  TOLD_BY_THE_FILE: 5\nreward_model_name_or_path: {tiny_model}\ndataset_train_split: test\n"
    file += "dataset_name: nowhere/at-all\neval_strategy: steps\nper_device_eval_batch_size: 4\n"
    assert launch(command(file, "--dataset_name", sums)) == 0
    (trainer,) = made
    assert trainer.train_dataset.to_list() == trainer.eval_dataset.to_list() == SUMS[:2]
    assert [type(function).__name__ for function in trainer.reward_funcs] == ["Qwen3ForSequenceClassification"]
    assert os.environ["TOLD_BY_THE_FILE"] == "5"


def test_rewards_of_both_packages_stand_side_by_side_in_their_order(command, sums, made):
    names = ["think_format_reward", "math_verify", "trl_dapo.rewards.dapo_math_reward", "get_soft_overlong_punishment"]
    weights = ["--reward_weights", "1", "2", "3", "4", "--dynamic_sampling_rewards", "math_verify_reward"]
    assert launch(command(ONE_DATASET, "--dataset_name", sums, "--reward_funcs", *names, *weights)) == 0
    (trainer,) = made
    assert trainer.reward_func_names[:3] == ["think_format_reward", "math_verify_reward", "dapo_math_reward"]
    assert "soft_overlong" in trainer.reward_func_names[3]
    assert trainer.reward_weights.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("seed: 1\nseed: 2", "names `seed` twice, the second time in line 7. Remove one of them."),
        (
            "learning_rat: 1\nqqq: 1",
            "Unknown field `learning_rat` in the recipe. Did you mean `learning_rate`? Unknown field `qqq` in the "
            "recipe. No known name is similar. Leave it out.",
        ),
        ("eval_strategy: steps\ndataset_test_split: dev", "has no split 'dev'"),
        ("prompt_style: boxed\ndataset_streaming: true", "`dataset_streaming` contradicts"),
        (
            "reward_funcs: [accurate_reward]",
            "`reward_funcs` names 'accurate_reward', which is unknown. Did you mean `accuracy_reward`? Use one of "
            "dapo_math, math_verify, last_number, bare_number, accuracy_reward, ",
        ),
        (
            "reward_funcs: [trl.rewards.acuracy_reward]",
            "but module 'trl.rewards' has no 'acuracy_reward'. Did you mean `trl.rewards.accuracy_reward`?",
        ),
        ("3: 4", "begins with `3`, which is not the name of a field."),
        ("learning_rate: [1]", "`learning_rate` must be a number, got [1]."),
        ("use_peft: maybe", "`use_peft` must be true or false, got 'maybe'."),
        (
            "max_prompt_length: 512",
            "Unknown field `max_prompt_length` in the recipe. TRL removed it: leave long prompts out of the dataset.",
        ),
        ("datasets: [{path: SUMS, splt: test}]", "field `splt` in a dataset of `datasets`. Did you mean `split`?"),
        (
            "test_split_size: 0.5",
            "`test_split_size=0.5` has no effect without `datasets`. Set `datasets`, or leave `test_split_size` out.",
        ),
        ("eval_on_start: true", "`eval_on_start=True` needs a dataset to evaluate on, which is only"),
        (
            "reward_funcs: [my_lib.rewards.custom]",
            "'my_lib.rewards.custom', which cannot be imported: No module named 'my_lib'. Modules in ",
        ),
        ("reward_funcs: [trl_dapo.rewards.SoftOverlongPunishment]", "which is not a function but <class "),
        (
            "reward_model_name_or_path: ./nowhere",
            "`./nowhere` is neither a folder nor the name of a model on the Hub.",
        ),
        ("lora_r: 8", "`lora_r=8` has no effect without `use_peft`. Set `use_peft`, or leave `lora_r` out."),
        ("report_to: [wandb]", "`report_to='wandb'` needs wandb, which is not installed. Run `pip install wandb`."),
        ("optim: paged_adamw_8bit", "`optim='paged_adamw_8bit'` needs bitsandbytes"),
        ("use_vllm: true", "`use_vllm=True` needs vllm, which is not installed. Run `pip install 'trl[vllm]'`."),
    ],
    ids=lambda value: value.replace("\n", ", ") if "`" not in value else "",
)
def test_a_mistake_in_a_file_is_reported_once_before_any_process_starts(
    started, monkeypatch, sums, tiny_model, tiny, tmp_path, capsys, lines, message
):
    monkeypatch.setattr(train, "find_spec", lambda name: None)  # whatever is installed
    text = f"num_processes: 2\nmodel_name_or_path: {tiny_model}\ndataset_name: SUMS\n{lines}\n".replace("SUMS", sums)
    (tmp_path / "theirs.yaml").write_text("# Theirs\n# of last year\n" + text)
    given = {line.partition(":")[0] for line in lines.splitlines()} | {"max_completion_length"}
    others = [word for pair in zip(tiny[::2], tiny[1::2], strict=True) if pair[0][2:] not in given for word in pair]
    assert main(["train", "--config", str(tmp_path / "theirs.yaml"), *others]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("trl-dapo train: ")]
    assert message.replace("SUMS", sums) in line
    assert started == []


def test_a_command_line_can_turn_off_the_lora_of_a_recipe(command, sums, made):
    """It need not name every field of the recipe that shapes an adapter."""
    file = f"dataset_name: {sums}\nuse_peft: true\nlora_r: 4\nlora_target_modules: [q_proj, v_proj]\n"
    assert launch(command(file)) == 0
    assert launch(command(file, "--use-peft=false", "--output_dir", f"{sums}-without")) == 0
    with_adapter, without = made
    assert with_adapter.model.peft_config["default"].r == 4
    assert not hasattr(without.model, "peft_config")


def test_values_that_mean_one_thing_are_taken_as_it(command, sums, made):
    file = f"dataset_name: {sums}\nreward_funcs: accuracy_reward\nreward_weights: 2\n"
    file += "eval_strategy: no\nrun_name: 2026\n"
    assert launch(command(file, "--learning_rate", "1e-6")) == 0
    (trainer,) = made
    assert trainer.reward_func_names == ["accuracy_reward"]
    assert trainer.reward_weights.tolist() == [2]
    assert (trainer.args.eval_strategy, trainer.args.run_name) == ("no", "2026")


@pytest.mark.parametrize("file", ["", "/train.jsonl"], ids=["folder", "file"])
def test_rows_are_read_as_math_problems_if_a_field_asks_for_it(command, sums, made, file):
    assert launch(command(ONE_DATASET, "--dataset_name", sums + file, "--dataset_limit", "4")) == 0
    assert made[0].train_dataset.to_list() == SUMS[:4]  # unchanged, for a reward of TRL
    style = ["--prompt_style", "boxed", "--dataset_limit=4"]
    assert launch(command(ONE_DATASET, "--dataset_name", sums + file, *style)) == 0
    (prompt,) = made[1].train_dataset[3]["prompt"]
    assert prompt["content"].startswith("3 + 3?\n\nPlease reason step by step")
    assert made[1].train_dataset["solution"][:] == ["0", "2", "4", "6"]


def test_the_page_about_migrating_names_the_fields_that_say_how_problems_are_read():
    section = PAGE.partition("## From `trl grpo`\n")[2].partition("\n## ")[0]
    assert set(PROBLEM_FIELDS) <= set(re.findall(r"`(\w+)`", section))


def test_a_plan_reads_such_a_file_too(command):
    _, file, *_ = command(ACCELERATED)
    assert read(file, gpus="1xH100-80GB").settings.dataset_name == "HuggingFaceH4/Polaris-Dataset-53K"


@pytest.mark.parametrize("schema", ["dapo_math_17k.jsonl", "ms_swift.jsonl"])
def test_a_checkpoint_and_a_dataset_can_be_used_as_the_page_describes(tmp_path, monkeypatch, tiny_model, tiny, schema):
    assert "`model_name_or_path: merged`" in PAGE
    assert "`dataset_name: train.parquet`. `prompt_style: as_is` keeps their prompts" in PAGE
    monkeypatch.chdir(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16)  # as both write it
    model.save_pretrained("merged")
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained("merged")
    Path("merged/args.json").write_text(
        '{"model_type": "qwen3"}'
    )  # written by ms-swift, next to the files of transformers
    rows = [json.loads(line) for line in (ROOT / "tests/data/schemas" / schema).read_text().splitlines()]
    pq.write_table(pa.Table.from_pylist(rows), "train.parquet")
    Path("theirs.yaml").write_text(RECIPE)
    trained, trains = [], DAPOTrainer.train

    def remember(trainer, **kwargs):
        loaded = dict(trainer.model.named_parameters())
        trained.append((trainer, {name: weight.detach().clone() for name, weight in loaded.items()}))
        return trains(trainer, **kwargs)

    monkeypatch.setattr(DAPOTrainer, "train", remember)
    assert launch(["--config", "theirs.yaml", *tiny]) == 0
    ((trainer, weights),) = trained
    assert trainer.state.global_step == 1
    for name, weight in model.named_parameters():
        assert weights[name].dtype == torch.float32  # in which steps of 1e-6 are not lost
        assert torch.equal(weights[name], weight.float())
    assert trainer.train_dataset["prompt"][0] == rows[0].get("prompt", rows[0].get("messages"))
    assert trainer.train_dataset["solution"][0] == "5"


def test_the_settings_in_the_table_exist():
    table = PAGE.partition("## From another framework\n")[2].partition("\n## ")[0]
    head, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if "|" in line]
    assert head == ["this package", "verl", "NeMo RL", "SkyRL", "slime", "ms-swift"]
    assert all(len(row) == len(head) for row in rows)
    named = {name for row in rows for name in re.findall(r"`(\w+)", row[0])}
    assert named - {field.name for field in dataclasses.fields(DAPOConfig)} == {"1"}  # of `1 + epsilon_high`

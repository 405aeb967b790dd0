# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""A recipe is a promise: each one parses, and the one for the CPU runs on real prompts through `accelerate launch`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from peft import PeftModel
from transformers import AutoModelForCausalLM

from trl_dapo.launch import checkpoint_to_resume, launch, make_parser


ROOT = Path(__file__).parent.parent
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
SMOKE = str(ROOT / "recipes" / "smoke_cpu.yaml")
needs_data = pytest.mark.skipif(
    "TRL_DAPO_DATA" not in os.environ, reason="TRL_DAPO_DATA does not name a folder with dapo_math_17k.parquet"
)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_every_recipe_parses_into_the_configs(path):
    launch_args, training_args, _ = make_parser().parse_args_and_config(["--config", str(path), *ON_THE_CPU])
    assert launch_args.dataset_name
    assert training_args.overlong_buffer_length * 4 <= training_args.max_completion_length
    assert training_args.epsilon_high == 0.28


ON_THE_CPU = ["--use_cpu", "true", "--bf16", "false"]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_every_recipe_says_what_it_is_and_how_to_launch_it(path):
    header = "".join(line for line in path.read_text().splitlines(keepends=True) if line.startswith("#"))
    for word in ("Hardware:", "Expected curve:", "Launch:", "Resume:", f"recipes/{path.name}"):
        assert word in header, word


@pytest.mark.parametrize("path", sorted((ROOT / "recipes" / "accelerate").glob("*.yaml")), ids=lambda path: path.name)
def test_every_accelerate_config_loads(path):
    config = load_config_from_file(str(path))
    assert config.num_processes == yaml.safe_load(path.read_text())["num_processes"]


def test_a_misspelt_key_is_an_error_in_a_recipe_and_on_the_command_line(tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("learning_rat: 1.0e-6\nuse_cpu: true\nbf16: false\n")
    assert launch(["--config", str(recipe)]) == 2
    assert "learning_rat" in capsys.readouterr().err
    assert launch(["--config", SMOKE, "--learning_rat", "1e-6"]) == 2
    assert "learning_rat" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--dataset_name", "nowhere.parquet"], "nowhere.parquet"),
        (["--reward_funcs", "dapo_maths"], "`reward_funcs` names 'dapo_maths'. Expected dapo_math, math_verify"),
        (["--reward_funcs", "string.nothing"], "module 'string' has no 'nothing'"),
        (["--overlong_buffer_length", "64"], "got 64"),
        (["--tiny_model", "false"], "`model_name_or_path` is not set"),
        (["--eval_strategy", "steps", "--eval_steps", "1"], "needs `eval_dataset_name`"),
        (["--resume_from_checkpoint", "nowhere"], "`resume_from_checkpoint=nowhere` is not a complete checkpoint"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_mistake_ends_in_one_line_and_exit_status_2(tmp_path, capsys, problems, overrides, message):
    assert launch(["--config", SMOKE, "--output_dir", str(tmp_path), "--dataset_name", problems, *overrides]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("trl-dapo train: ")
    assert message in error


@pytest.fixture
def problems(tmp_path):
    path = tmp_path / "problems.jsonl"
    rows = [{"problem": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(16)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_the_last_complete_checkpoint_is_resumed_and_half_written_ones_are_passed_over(tmp_path):
    for step, complete in ((2, True), (10, True), (12, False)):
        (tmp_path / f"checkpoint-{step}").mkdir()
        if complete:
            (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text("{}")
    command = ["--output_dir", str(tmp_path), *ON_THE_CPU, "--resume_from_checkpoint", "true"]
    _, training_args, _ = make_parser().parse_args_and_config(command)
    assert checkpoint_to_resume(training_args) == str(tmp_path / "checkpoint-10")


def test_a_trained_lora_adapter_is_saved_loads_and_merges(tmp_path, problems):
    # Any letter is rewarded, so that a random model's groups differ and its adapter moves.
    (tmp_path / "letters.py").write_text(
        "def reward(completions, **kwargs):\n"
        "    return [float(any(c.isalpha() for c in x[0]['content'][:2])) for x in completions]\n"
    )
    sys.path.insert(0, str(tmp_path))
    adapter = ["--use_peft", "true", "--lora_r", "4", "--lora_target_modules", "q_proj", "v_proj"]
    command = ["--config", SMOKE, "--output_dir", str(tmp_path / "out"), "--dataset_name", problems, *adapter]
    assert launch([*command, "--reward_funcs", "letters.reward", "--learning_rate", "1e-2"]) == 0

    base = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "tiny_model")
    tokens = torch.arange(20).unsqueeze(0)
    plain = base(tokens).logits
    adapted = PeftModel.from_pretrained(base, tmp_path / "out")
    trained = adapted(tokens).logits
    assert (trained - plain).abs().max() > 1e-4
    torch.testing.assert_close(adapted.merge_and_unload()(tokens).logits, trained, rtol=1e-4, atol=1e-5)


@needs_data
def test_the_smoke_recipe_trains_on_real_prompts_and_resumes(tmp_path):
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "1"]
    command += [str(ROOT / "recipes" / "train_dapo.py"), "--config", SMOKE, "--output_dir", str(tmp_path)]

    def run(*overrides):
        result = subprocess.run([*command, *overrides], capture_output=True, text=True, timeout=200, cwd=tmp_path)
        assert result.returncode == 0, result.stderr[-3000:]
        return result

    first = run("--max_steps", "1")
    assert "0 of 8 groups accepted in 2 rounds" in first.stderr
    assert "all_wrong 8" in first.stderr
    run("--max_steps", "2", "--resume_from_checkpoint", "true")
    state = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())
    logs = [log for log in state["log_history"] if "loss" in log]
    assert [log["dynamic_sampling/groups_trained"] for log in logs] == [0, 0]
    assert [log["frac_empty_steps"] for log in logs] == [1, 1]
    # 8 prompts a rollout, one after the other through the resume.
    passes = [log["dynamic_sampling/passes"] for log in logs]
    assert passes == pytest.approx([8 / 256, 16 / 256])

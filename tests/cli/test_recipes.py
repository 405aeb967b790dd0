# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""A recipe is a promise: each one parses, is what its header says, and trains on the CPU."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from datasets import Dataset
from helpers import launch as launch_job
from PIL import Image
from safetensors.torch import load_file
from transformers.utils import is_bitsandbytes_available
from trl.rewards import think_format_reward

from trl_dapo.cli import processes
from trl_dapo.cli.entry_point import _make_parser
from trl_dapo.cli.tiny import digit_reward
from trl_dapo.cli.train import launch, make_parser
from trl_dapo.plan import plan
from trl_dapo.rewards.names import REWARD_FUNCS, default_prompt_style
from trl_dapo.settings.recipe_files import find_accelerate_config


ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
ACCELERATE_CONFIGS = sorted((ROOT / "recipes" / "accelerate").glob("*.yaml"))
SMOKE = str(ROOT / "recipes" / "smoke_cpu.yaml")
DOTTED_REWARDS = {
    "trl.rewards.think_format_reward": think_format_reward,
    "trl_dapo.cli.tiny.digit_reward": digit_reward,
}
ON_THE_CPU = ["--use_cpu", "true", "--bf16", "false"]
each_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)


def read_header(recipe: Path) -> dict[str, str]:
    """The fields of a recipe's leading comment, with the lines of each joined."""
    lines = recipe.read_text().splitlines()
    comment = "\n".join(lines[: next(i for i, line in enumerate(lines) if not line.startswith("#"))])
    fields = re.split(r"^# ([A-Z][a-z ]+): +", comment, flags=re.MULTILINE)[1:]
    return {
        name: re.sub(r"(?: \\)?\n# +", lambda break_: " " if "\\" in break_[0] else "\n", text.strip())
        for name, text in zip(fields[::2], fields[1::2], strict=True)
    }


def num_processes_of(recipe: Path) -> int:
    return int(re.search(r"(\d+) process", read_header(recipe)["Rollout"])[1])


def runs_on_a_cpu(recipe: Path) -> bool:
    return read_header(recipe)["Hardware"].startswith("any CPU")


def parse(recipe: Path, launched_on):
    """Return the settings of a recipe, with the number of processes in its header."""
    launched_on(num_processes_of(recipe))
    return make_parser().parse_args_and_config(["--config", str(recipe), *ON_THE_CPU])


@each_recipe
def test_every_recipe_parses_into_the_batches_of_its_header_on_the_processes_it_names(recipe, launched_on):
    launch_args, training_args, _ = parse(recipe, launched_on)
    stated, num_processes = read_header(recipe)["Rollout"].replace("\n", " "), num_processes_of(recipe)
    assert training_args.batch_arithmetic == f"Rollout: {stated}"
    assert launch_args.dataset_name
    assert training_args.output_dir == f"outputs/{recipe.stem}"
    # The first score to compare with is that of the model before training.
    assert training_args.eval_on_start == (training_args.eval_strategy != "no")
    # One process per GPU, and no further GPU. An engine fits into a machine with eight.
    (num_gpus,) = re.findall(r"^(any CPU|one GPU|\d+ GPUs)", read_header(recipe)["Hardware"])
    assert num_processes == {"any CPU": 1, "one GPU": 1}.get(num_gpus) or int(num_gpus.split()[0])
    assert num_processes % training_args.vllm_tensor_parallel_size == 0
    assert training_args.vllm_tensor_parallel_size <= min(8, num_processes)
    if not runs_on_a_cpu(recipe):
        # A prompt of at least 1,024 tokens fits into the engine together with the longest completion.
        assert training_args.vllm_max_model_length >= training_args.max_completion_length + 1024
    if training_args.eval_strategy != "no":
        num_problems = launch_args.eval_dataset_limit or 30  # of AIME
        said = f"{training_args.num_generations_eval} completions of {num_problems} problems"
        assert said in read_header(recipe)["Evaluation"]


@each_recipe
def test_every_recipe_names_its_source_and_every_command_in_its_header_parses(recipe):
    header = read_header(recipe)
    assert header.keys() >= {"Hardware", "Trains", "Needs", "Source", "Changed", "Expected curve"}
    settings = yaml.safe_load(recipe.read_text())
    assert "--resume_from_checkpoint true" in header["Resume"]
    program, *words = shlex.split(header["Launch"].replace(",", " "))
    if program == "sbatch":
        assert [(ROOT / words[0]).is_file(), ROOT / words[words.index("--config") + 1]] == [True, recipe]
    else:
        asked, rest = processes.split_options(words[1:], {"accelerate_config": True})
        assert (program, words[0], rest) == ("trl-dapo", "train", ["--config", recipe.stem])
        named = [find_accelerate_config(word.partition("=")[2]) for word in asked]
        launched = yaml.safe_load(named[0].read_text())["num_processes"] if named else 1
        assert launched == num_processes_of(recipe)
    if header["Evaluate"].startswith("during training only"):
        assert settings.get("tools") or "geometry" in settings["dataset_name"]
        return
    evaluate, compare = (shlex.split(line) for line in header["Evaluate"].splitlines())
    evaluate = _make_parser().parse_args(evaluate[1:])
    assert evaluate.model == f"outputs/{recipe.stem}"
    assert _make_parser().parse_args(compare[1:]).trained == evaluate.output_dir
    # The evaluation stops where the rollouts do, and asks as they ask.
    assert evaluate.max_completion_length == settings["max_completion_length"]
    style = default_prompt_style([REWARD_FUNCS[evaluate.scorer]])
    assert getattr(evaluate, "prompt_style", style) == settings["prompt_style"]
    template = settings.get("chat_template_kwargs") or {}
    assert json.loads(getattr(evaluate, "chat_template_kwargs", "{}")) == template


@each_recipe
def test_every_recipe_fits_its_hardware_as_the_table_says(recipe):
    planned, header = plan(recipe.stem), read_header(recipe)
    assert planned.fits
    if runs_on_a_cpu(recipe):  # whose memory is the machine's
        return
    count, size = re.match(r"(one|\d+) GPUs? of (\d+) GB", header["Hardware"]).groups()
    assert planned.recipe.cluster.num_train == (1 if count == "one" else int(count))
    assert planned.recipe.cluster.gpu.memory == pytest.approx(int(size) * 2**30, rel=0.01)
    assert "Time" not in header  # which only a trial on the machine tells
    (row,) = [line for line in (ROOT / "recipes/README.md").read_text().splitlines() if f"| `{recipe.stem}` |" in line]
    peak, memory = re.fullmatch(r"(\S+) of (\S+) GiB", row.split("|")[-2].strip()).groups()
    assert float(peak) == pytest.approx(planned.peak / 2**30, abs=0.06)
    assert float(memory) == pytest.approx(planned.recipe.cluster.gpu.memory / 2**30, abs=0.06)


@pytest.mark.parametrize("path", ACCELERATE_CONFIGS, ids=lambda path: path.name)
def test_every_key_of_an_accelerate_config_is_one_of_accelerates(path):
    config = load_config_from_file(str(path))  # refuses unknown keys, but for the nested ones
    settings = yaml.safe_load(path.read_text())
    assert config.num_processes == settings["num_processes"]
    options = {action.dest: action for action in launch_command_parser()._actions}
    for key, value in {**settings.get("fsdp_config", {}), **settings.get("deepspeed_config", {})}.items():
        assert key in options, key
        assert options[key].choices is None or str(value) in options[key].choices, (key, value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("--use_peft true --lora_target_modules q", "`--lora_target_modules all-linear`, which works for"),
        ("--tiny_model false", "`model_name_or_path` is not set"),
        ("--eval_strategy steps --eval_steps 1", "needs a dataset to evaluate on. Set `eval_dataset_name`"),
        ("--resume_from_checkpoint nowhere", "`resume_from_checkpoint=nowhere` is not a complete checkpoint"),
        ("--model_init_kwargs {a:1}", "`model_init_kwargs` must be a mapping, got '{a:1}', which is not JSON (Expect"),
    ],
)
def test_a_mistake_ends_in_one_line_and_exit_status_2(tmp_path, mistake, problems, overrides, message):
    words = ["--config", SMOKE, "--output_dir", str(tmp_path), "--dataset_name", problems]
    assert message in mistake(*words, *overrides.split()).splitlines()[-1]


@pytest.mark.parametrize(("word", "value"), [("True", "group"), ("False", "none"), ("false", "none")])
def test_scale_rewards_can_be_given_as_text_on_a_command_line(word, value):
    _, training_args, _ = make_parser().parse_args_and_config(["--config", SMOKE, "--scale_rewards", word])
    assert training_args.scale_rewards == value


def test_the_error_for_a_gpu_recipe_without_a_gpu_says_what_can_run(monkeypatch, mistake):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: False)
    error = mistake("--config", SMOKE, "--use_cpu", "false", "--bf16", "true")
    assert "add `--bf16 false`" in error
    assert error.endswith("use `--config smoke_cpu`. `trl-dapo plan` shows what a recipe needs.")


def write_problems(path: Path, first: int, num: int) -> str:
    rows = [{"problem": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(first, first + num)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def problems(tmp_path):
    return write_problems(tmp_path / "problems.jsonl", 0, 16)


# What a recipe does

# Smaller, and on the CPU. Names of a recipe's own settings that have to give way are added by `shrink`.
SMALL = [
    *("--tiny_model", "true", "--use_cpu", "true", "--bf16", "false"),
    *("--prompts_per_rollout", "4", "--prompts_per_step", "2", "--num_generations", "4"),
    *("--per_device_train_batch_size", "4", "--max_completion_length", "8", "--overlong_buffer_length", "2"),
    *("--max_steps", "2", "--save_steps", "1", "--report_to", "none", "--gradient_checkpointing", "false"),
]
# A random model solves nothing, but letters it writes, in some completions and not in others.
LETTERS = """
def {name}(completions, **kwargs):
    return [float(any(c.isalpha() for c in x[-1]["content"][:2])) for x in completions]
"""
GIVE_WAY = {"use_vllm": "false", "warmup_steps": "0", "eval_strategy": "no", "eval_dataset_offset": "0"}
GIVE_WAY |= {"eval_on_start": "false", "attn_implementation": "sdpa", "batch_multiplier": "1"}


def shrink(recipe: Path, folder: Path) -> list[str]:
    """The recipe on a random model and a few problems, two optimizer steps long, with rewards of the same names."""
    settings = yaml.safe_load(recipe.read_text())
    copy = folder / recipe.name  # what is refused without vLLM cannot be overridden
    copy.write_text(re.sub(r"^vllm_lora_sync: .*\n", "", recipe.read_text(), flags=re.MULTILINE))
    command = ["--config", str(copy), "--output_dir", str(folder / "out"), *SMALL]
    names = [{**REWARD_FUNCS, **DOTTED_REWARDS}[name].__name__ for name in settings["reward_funcs"]]
    sys.modules.pop("letters", None)  # of another recipe's names
    (folder / "letters.py").write_text("".join(LETTERS.format(name=name) for name in names))
    command += ["--reward_funcs", *(f"letters.{name}" for name in names)]
    command += ["--dataset_name", write_problems(folder / "train.jsonl", 0, 16)]
    if "eval_dataset_name" in settings:
        command += ["--eval_dataset_name", write_problems(folder / "eval.jsonl", 100, 2)]
    for name in GIVE_WAY.keys() & settings.keys():
        command += [f"--{name}", GIVE_WAY[name]]
    return command


def with_model(command: list[str], path: str) -> list[str]:
    return [*command, "--tiny_model", "false", "--model_name_or_path", path]


def write_drawings(path: Path, num: int) -> str:
    """Problems as Geometry3K has them: the same text for different drawings."""
    drawings = [Image.fromarray(np.full((8, 8, 3), 10 * i, dtype=np.uint8)) for i in range(num)]
    columns = {"images": [[drawing] for drawing in drawings], "problem": ["<image>Find x."] * num}
    Dataset.from_dict(columns | {"answer": [str(i) for i in range(num)]}).to_parquet(path)
    return str(path)


def logs_of(folder: Path, step: int) -> list[dict]:
    state = json.loads((folder / f"checkpoint-{step}" / "trainer_state.json").read_text())
    assert state["global_step"] == step
    return [log for log in state["log_history"] if "loss" in log]


@each_recipe
def test_every_recipe_trains_two_optimizer_steps_on_the_cpu_and_its_weights_move(
    recipe, tmp_path, request, monkeypatch, capfd
):
    command, settings = shrink(recipe, tmp_path), yaml.safe_load(recipe.read_text())
    out = tmp_path / "out"
    base = out / "tiny_model"
    if settings.get("load_in_4bit") and not is_bitsandbytes_available():
        command += ["--load_in_4bit", "false"]
    if settings.get("tools"):
        base = Path(request.getfixturevalue("tool_model"))
        command = with_model(command, str(base))
    if "-VL-" in settings.get("model_name_or_path", ""):
        base = Path(request.getfixturevalue("image_model"))
        command = [*with_model(command, str(base)), "--dataset_name", write_drawings(tmp_path / "train.parquet", 16)]
    # In a process of its own each would do no other thing; CI launches one.
    monkeypatch.syspath_prepend(tmp_path)
    assert launch(command) == 0
    output = "".join(capfd.readouterr())
    budget = settings.get("max_tokens_per_microbatch")
    cut = "4 rows x 4 micro-batches" if budget is None else f"16 rows in micro-batches of at most {budget} tokens"
    rollout = f"Rollout: 4 prompts x 4 completions = 16 rows = 1 process x {cut}; 2 optimizer steps of 2 prompts"
    assert rollout in output
    # If there are several rewards, the first one decides.
    decides = command[command.index("--reward_funcs") + 1].rpartition(".")[2]
    assert f"A group is accepted if '{decides}' differs between its completions." in output
    logs = logs_of(out, 2)
    assert [log["step"] for log in logs] == [1, 2]
    assert [log["frac_empty_steps"] for log in logs] == [0, 0]
    if (out / "adapter_model.safetensors").exists():
        adapter = load_file(out / "adapter_model.safetensors")
        assert all(tensor.abs().max() > 0 for name, tensor in adapter.items() if "lora_B" in name)  # zero at first
        assert settings["use_peft"]
        return
    before, after = load_file(base / "model.safetensors"), load_file(out / "model.safetensors")
    unmoved = [name for name in before if torch.equal(before[name], after[name])]
    # What Llava does not read of its vision tower: the last layer, and what follows it.
    unread = [name for name in before if "vision_tower" in name and ("layers.1." in name or "post_layernorm" in name)]
    assert sorted(unmoved) == sorted(unread)


def test_sizes_in_prompts_are_the_same_with_two_processes_and_after_a_resume_with_one(tmp_path, monkeypatch, capfd):
    command = shrink(ROOT / "recipes" / "smoke_cpu.yaml", tmp_path)
    result = launch_job("launched", tmp_path, json.dumps(command), num_processes=2)
    assert result.returncode == 0, result.stderr[-3000:]
    # 2 processes x 4 rows: half as many micro-batches as one process has.
    assert "16 rows = 2 processes x 4 rows x 2 micro-batches; 2 optimizer steps of 2 prompts" in result.stdout
    # A thread of the process group that outlives a launch may abort the process while the interpreter ends.
    reports = [json.loads((tmp_path / f"report-2-{rank}.json").read_text()) for rank in (0, 1)]
    assert reports == [{"status": 0, "threads": []}] * 2
    monkeypatch.syspath_prepend(tmp_path)
    assert launch([*command, "--resume_from_checkpoint", "true", "--max_steps", "4"]) == 0
    output = "".join(capfd.readouterr())
    assert "16 rows = 1 process x 4 rows x 4 micro-batches; 2 optimizer steps of 2 prompts" in output
    rollouts = [log for log in logs_of(tmp_path / "out", 4) if "dynamic_sampling/groups_trained" in log]
    assert [log["step"] for log in rollouts] == [1, 3]
    assert [log["dynamic_sampling/completions_trained"] for log in rollouts] == [16, 16]


def test_every_step_of_the_smoke_recipe_moves_the_weights(tmp_path, capsys):
    assert launch(["--config", SMOKE, "--output_dir", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert "Ended:     step 3 of 3" in said.out
    assert "Every step changed the weights." in said.out
    assert "fell short" not in said.out + said.err
    assert [log["frac_empty_steps"] for log in logs_of(tmp_path, 3)] == [0, 0, 0]
    before, after = (load_file(path / "model.safetensors") for path in (tmp_path / "tiny_model", tmp_path))
    assert not any(torch.equal(before[name], after[name]) for name in before)


# Slurm

SBATCH = ROOT / "recipes" / "slurm" / "qwen2.5_32b_dapo.sbatch"


@pytest.fixture
def slurm(tmp_path):
    """Runs the batch script on eight machines that are not there; returns its status and what was started."""
    stubs = {
        "scontrol": 'if [[ $1 == show ]]; then printf "node%d\\n" 0 1 2 3 4 5 6 7\nelse echo "$@" > requeued; fi',
        # Drops its own options and runs the task of one machine.
        "srun": 'while [[ $1 == --* ]]; do echo "$1" >> steps; shift; done; SLURM_PROCID=3 exec "$@"',
        "accelerate": 'printf "%s\\0" "$@" > accelerate.argv; eval "$ACCELERATE_DOES"',
        "trl-dapo": 'printf "%s\\0" "$@" > train.argv',
    }
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    for name, script in stubs.items():
        (bin_ / name).write_text(f"#!/bin/bash\n{script}\n")
        (bin_ / name).chmod(0o755)

    def run(accelerate, *overrides, script=SBATCH):
        environment = {**os.environ, "PATH": f"{bin_}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "node[0-7]"}
        environment |= {"SLURM_JOB_ID": "7", "ACCELERATE_DOES": accelerate}
        how = {"cwd": tmp_path, "env": environment, "start_new_session": True}
        process = subprocess.Popen(["bash", str(script), *overrides], **how)
        try:
            return process.wait(timeout=60)
        finally:
            with pytest.raises(ProcessLookupError):  # nothing is left behind
                os.killpg(process.pid, signal.SIGKILL)

    return run


def test_the_batch_script_trains_the_recipe_on_eight_machines(slurm, tmp_path, launched_on):
    assert slurm("exit 0", "--learning_rate", "2e-6") == 0
    assert {"--nodes=8", "--ntasks=8", "--kill-on-bad-exit=1"} <= set((tmp_path / "steps").read_text().split())
    subcommand, *options = (tmp_path / "accelerate.argv").read_text().split("\0")[:-1]
    assert subcommand == "launch"
    launch_options = launch_command_parser().parse_args(options)
    assert (ROOT / launch_options.config_file).is_file()
    assert (launch_options.num_machines, launch_options.num_processes) == (8, 64)
    assert (launch_options.machine_rank, launch_options.main_process_ip) == (3, "node0")
    launched_on(launch_options.num_processes)
    script_args = [str(ROOT / x) if x.startswith("recipes/") else x for x in launch_options.training_script_args]
    _, training_args, _ = make_parser().parse_args_and_config([*script_args, *ON_THE_CPU])
    assert training_args.gradient_accumulation_steps * 64 == training_args.prompts_per_step * 16
    assert (training_args.resume_from_checkpoint, training_args.learning_rate) == ("true", 2e-6)


def test_the_batch_script_fails_as_the_trainer_fails_and_asks_for_another_turn_before_its_time_is_up(slurm, tmp_path):
    assert slurm("exit 3") == 3
    # Slurm sends the signal to the batch script, here the parent of the step's parent.
    assert slurm("kill -USR1 $PPID; exec sleep infinity") != 0
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"


def test_the_batch_script_for_any_recipe_hands_the_machines_to_the_launcher(slurm, tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "4")
    script = SBATCH.with_name("train.sbatch")
    assert slurm("", "--config", "mine.yaml", "--accelerate_config", "zero3", script=script) == 0
    command, *argv = (tmp_path / "train.argv").read_text().split("\0")[:-1]
    assert command == "train"
    asked, others = processes.split_options(argv, make_parser().launch_options)
    assert others == ["--config", "mine.yaml", "--resume_from_checkpoint", "true"]
    arguments = processes.read_options(asked, others)
    assert arguments.config_file == str(find_accelerate_config("zero3"))
    assert (arguments.num_machines, arguments.num_processes, arguments.machine_rank) == (8, 32, 3)
    assert (arguments.main_process_ip, arguments.main_process_port) == ("node0", 29500)

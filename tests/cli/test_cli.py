# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
import os
import shlex
import subprocess
import sys

import pytest

from trl_dapo.cli import main
from trl_dapo.cli.entry_point import known_names


def python(code: str, **settings) -> subprocess.CompletedProcess:
    """Runs a line in a Python of its own, which knows `sys` and `cli`."""
    settings = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "timeout": 200, **settings}
    settings["env"] = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run([sys.executable, "-c", f"import sys, trl_dapo.cli as cli\n{code}"], **settings)


def test_help_names_every_command_without_importing_torch():
    result = python("try: cli.main(['--help'])\nexcept SystemExit: print('torch' in sys.modules)")
    assert all(command in result.stdout for command in ("quickstart", "train", "recipes", "eval", "compare", "report"))
    assert result.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize(
    ("function", "argv", "said"),
    [
        ("run_compare", ["compare", "a", "b"], "trl-dapo compare: stopped. The same command continues from here.\n"),
        ("_quickstart", ["quickstart"], "trl-dapo quickstart: stopped. A quickstart cannot be resumed. "),
        ("run_plan", ["plan", "--config", "smoke_cpu"], "trl-dapo: stopped before it began.\n"),
        ("check_train_arguments", ["train", "--config", "smoke_cpu"], "trl-dapo: stopped before it began.\n"),
    ],
)
def test_ctrl_c_says_what_the_same_command_does(function, argv, said, monkeypatch, capsys):
    def interrupt(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(f"trl_dapo.cli.entry_point.{function}", interrupt)
    assert main(argv) == 130
    assert capsys.readouterr().err.lstrip("\n").startswith(said)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("train --config --max_steps 3", "`--config` is not followed by a recipe"),
        ("train", "Name a recipe with `--config NAME` (`trl-dapo recipes` lists them), or a model and a dataset"),
        ("train --dataset_name my.jsonl --max_steps=3", "Neither a recipe nor a model is named"),
        ("train --config smoke_cpu --config b.yaml", "`--config` is given twice"),
        ("train --config smoke_cpu --output_dir ''", "`output_dir` is empty"),
        ("train --config smoke_cpu --model_name_or_path m", "Add `--tiny_model false`"),
        ("train --config=a/nowhere.yaml", "`--config a/nowhere.yaml` is not a file."),
        ("train --config lits.yaml", ". Nearest: list.yaml."),
        ("train --config latin_1.yaml", "latin_1.yaml is not YAML: "),
        ("train --config torn.yaml", "torn.yaml is not YAML: line 2: "),
        ("train --config list.yaml", "list.yaml must be a mapping of fields to values"),
        ("train --config into_a_file.yaml", "Cannot write to the output folder file/out"),
        ("train --config misspelt.yaml", "Unknown field `learning_rat` in the recipe. Did you mean `learning_rate`?"),
        (
            "train --config smoke_cpu --num_generation 4",
            "Unknown option `--num_generation`. Did you mean `--num_generations`?",
        ),
        ("train --accelerate_config fsdp", "is not a file, and not one of cpu, fsdp2, multi_gpu, single_gpu,"),
        ("recipes --show smoke", "`--show smoke` is not a file, and not one of "),
        ("recipes --show latin_1.yaml", "'utf-8' codec can't decode"),
        ("quickstart --output_dir file/out", "Cannot write to the output folder file/out"),
        ("eval --model m --dataset d --output_dir file", "Cannot write to the output folder file"),
        ("eval --model ./modle --dataset d --output_dir o", "`./modle` is neither a folder nor "),
        ("report nope", "There is no file or folder nope. Name the `output_dir` of a run, as in `trl-dapo repo"),
        ("train smoke_cpu", "Name a recipe with `--config`: `trl-dapo train --config smoke_cpu`."),
        ("train --config smoke_cpu --output_dir /proc/x/y", "nothing can be created in /proc ("),
        ("new file", "There is a file `file` already, and `trl-dapo new` changes none. Choose a name that"),
        ("compare a ''", "The name of an evaluation is empty. Name the `output_dir` of an evaluation, which"),
        (
            "compare a b",
            "There is no `a`. Name the `output_dir` of an evaluation, which `trl-dapo eval --model MODEL ",
        ),
    ],
)
def test_a_mistake_is_reported_in_one_line_without_importing_torch(tmp_path, command, message):
    (tmp_path / "file").write_text("")
    (tmp_path / "torn.yaml").write_text("learning_rate: 1\nmax_steps: [1}\n")
    (tmp_path / "latin_1.yaml").write_bytes(b"output_dir: d\xe9j\xe0 vu\n")
    (tmp_path / "misspelt.yaml").write_text("learning_rat: 1.0e-6\ntiny_model: true\nnum_processes: 2\nenv: {A: b}\n")
    (tmp_path / "list.yaml").write_text("- learning_rate\n")
    (tmp_path / "into_a_file.yaml").write_text("output_dir: file/out\n")
    result = python(f"print(cli.main({shlex.split(command)}), 'torch' in sys.modules)", cwd=tmp_path)
    assert result.stdout == "2 False\n"
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"trl-dapo {command.split()[0]}: ")
    assert message in line


def test_every_field_and_every_option_of_a_launch_is_known_without_importing_what_defines_it():
    """The fields that are refused before torch is imported are those that the parser would refuse."""
    from trl_dapo.cli.train import make_parser

    parser = make_parser()
    assert {*parser._fields} - {"help"} <= known_names()
    assert {*parser.launch_options} <= known_names()
    words = {word.lstrip("-").replace("-", "_") for word in parser._option_string_actions}
    assert words - {"h", "help"} <= known_names()


NO_SEED = "must be a whole number of at least 0 and at most 4294967295, got '-1' (see --help)\n"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("", "train a small model on this machine in three minutes"),  # the commands
        ("trian --config smoke_cpu", "trl-dapo: Unknown command `trian`. Did you mean `train`? The commands are "),
        ("quickstart --sed 1", "trl-dapo quickstart: Unknown option `--sed`. Did you mean `--seed`? (see --help)\n"),
        ("recipes smoke_cpu", "trl-dapo recipes: `smoke_cpu` is not the value of an option. (see --help)\n"),
        ("plan smoke_cpu", "`smoke_cpu` is not an option. Write `trl-dapo plan --config smoke_cpu`."),
        ("eval --model m", "required: --dataset, --output_dir/--output-dir. Write `trl-dapo eval --model MODEL --dat"),
        (
            "eval --model m --dataset d --output_dir o x",
            "`x` is not the value of an option. Write `trl-dapo eval ",
        ),
        ("eval --k two", "trl-dapo eval: argument --k: must be a whole number, got 'two' (see --help)\n"),
        ("eval --top_p half", "trl-dapo eval: argument --top_p/--top-p: must be a number, got 'half' (see --help)\n"),
        ("compare a", "required: trained. Write `trl-dapo compare BASE_FOLDER TRAINED_FOLDER`. (see --help)\n"),
        ("compare a b c", "`c` is not the value of an option. Write `trl-dapo compare BASE_FOLDER TRAINED_FOLDER`."),
        ("eval my_model", "Write `trl-dapo eval --model my_model --dataset DATA --output_dir FOLDER`."),
        ("quickstart --seed=-1", f"trl-dapo quickstart: argument --seed: {NO_SEED}"),
    ],
)
def test_a_mistake_on_the_command_line_is_reported_with_exit_status_2(capsys, command, said):
    with pytest.raises(SystemExit) as stop:
        main(command.split())
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error == said if said.startswith("trl-dapo") and said.endswith("\n") else said in error


@pytest.mark.parametrize("command", ["plan --config smoke_cpu", "recipes", "recipes --show smoke_cpu"])
def test_a_closed_pipe_is_not_reported_as_a_mistake(command):
    read_end, write_end = os.pipe()
    os.close(read_end)
    result = python(f"sys.exit(cli.main({command.split()}))", stdout=write_end)
    os.close(write_end)
    assert (result.returncode, result.stderr) == (141, "")


@pytest.mark.parametrize("number", [1, 2], ids=["output", "error"])
def test_a_command_runs_with_its_standard_output_or_error_closed(tmp_path, number):
    command = f"{shlex.quote(sys.executable)} -m trl_dapo.cli new task {number}>&-"
    result = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")
    assert (tmp_path / "task" / "recipe.yaml").is_file()

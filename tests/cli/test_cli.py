# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
import os
import subprocess
import sys

import pytest

from trl_dapo import __version__
from trl_dapo.cli import main


def test_help_names_every_command_without_importing_torch():
    code = (
        "import sys, trl_dapo.cli as cli\ntry: cli.main(['--help'])\nexcept SystemExit: print('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert all(command in result.stdout for command in ("quickstart", "train", "recipes", "eval", "compare", "report"))
    assert result.stdout.splitlines()[-1] == "False"


def test_the_version_is_the_packages(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.strip() == f"trl-dapo {__version__}"


def test_ctrl_c_while_a_command_is_imported_ends_in_one_line(monkeypatch, capsys):
    def interrupt(argv):
        raise KeyboardInterrupt

    monkeypatch.setattr("trl_dapo.cli.commands.check_train_arguments", interrupt)
    assert main(["train", "--config", "smoke_cpu"]) == 130
    assert capsys.readouterr().err == "trl-dapo: stopped before it began.\n"


@pytest.mark.parametrize(
    ("function", "argv", "said"),
    [
        ("run_compare", ["compare", "a", "b"], "trl-dapo compare: stopped. The same command continues from here.\n"),
        ("_quickstart", ["quickstart"], "trl-dapo quickstart: stopped. A quickstart is not resumed: "),
        ("run_plan", ["plan", "--config", "smoke_cpu"], "trl-dapo: stopped before it began.\n"),
    ],
)
def test_ctrl_c_says_what_the_same_command_does(function, argv, said, monkeypatch, capsys):
    def interrupt(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(f"trl_dapo.cli.commands.{function}", interrupt)
    assert main(argv) == 130
    assert capsys.readouterr().err.lstrip("\n").startswith(said)


@pytest.mark.parametrize("argv", [[], ["retrain"], ["quickstart", "--sed", "1"]], ids=str)
def test_a_mistake_on_the_command_line_ends_with_exit_status_2(argv):
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 2


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["train", "--config"], "`--config` is not followed by a recipe"),
        (["train", "--config", "--max_steps", "3"], "`--config` is not followed by a recipe"),
        (["train"], "Name a recipe, `--config NAME` (`trl-dapo recipes` lists them), or `--model_name_or_path`"),
        (["train", "--dataset_name", "my.jsonl", "--max_steps=3"], "neither a recipe nor a model is named"),
        (["train", "--config", "smoke_cpu", "--config", "b.yaml"], "`--config` is given twice"),
        (["train", "--config", "smoke_cpu", "--output_dir", ""], "`output_dir` is empty"),
        (["train", "--config", "smoke_cpu", "--model_name_or_path", "m"], "Add `--tiny_model false`"),
        (["quickstart", "--output_dir", ""], "`output_dir` is empty"),
        (["eval", "--model", "m", "--dataset", "d", "--output_dir", ""], "`output_dir` is empty"),
        (["train", "--config=a/nowhere.yaml"], "`--config a/nowhere.yaml` names no file."),
        (["train", "--config", "a/nowhere.yaml"], "`--config a/nowhere.yaml` names no file."),
        (["train", "--config", "nowhere.yaml"], "`--config nowhere.yaml` names no file, and is none of "),
        (["train", "--config", "qwen3_1.7_dapo"], ", qwen3_1.7b_dapo, "),
        (["train", "--config", "smollm2_135m"], ". Nearest: smollm2_135m_cpu."),
        (["train", "--config", "lits.yaml"], ". Nearest: list.yaml."),
        (["train", "--config", "latin_1.yaml"], "latin_1.yaml is not YAML: "),
        (["train", "--config", "torn.yaml"], "torn.yaml is not YAML: line 2: "),
        (["train", "--config", "list.yaml"], "list.yaml must be a mapping of fields to values"),
        (["train", "--config", "into_a_file.yaml"], "Cannot write to the output folder file/out"),
        (["train", "--output_dir", "file"], "Cannot write to the output folder file"),
        (["train", "--output_dir=file/out"], "Cannot write to the output folder file/out"),
        (["train", "--accelerate_config", "a/fsdp2.yaml"], "`--accelerate_config a/fsdp2.yaml` names no file."),
        (["train", "--accelerate_config", "fsdp"], "names no file, and is none of cpu, fsdp2, multi_gpu, single_gpu,"),
        (["recipes", "--show", "smoke"], "`--show smoke` names no file, and is none of "),
        (["quickstart", "--output_dir", "file/out"], "Cannot write to the output folder file/out"),
        (["eval", "--model", "m", "--dataset", "d", "--output_dir", "file"], "Cannot write to the output folder file"),
        (
            ["eval", "--model", "./modle", "--dataset", "d", "--output_dir", "o"],
            "`./modle` is no folder here, and no ",
        ),
        (["eval", "--model", "out/run/modle", "--dataset", "d", "--output_dir", "o"], "`out/run/modle` is no folder"),
        (["report", "nope"], "There is no run in nope"),
        (["compare", "nope", "nope"], "There is no `nope`"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_told_in_one_line_without_importing_torch(tmp_path, command, message):
    (tmp_path / "file").write_text("")
    (tmp_path / "torn.yaml").write_text("learning_rate: 1\nmax_steps: [1}\n")
    (tmp_path / "latin_1.yaml").write_bytes(b"output_dir: d\xe9j\xe0 vu\n")
    (tmp_path / "list.yaml").write_text("- learning_rate\n")
    (tmp_path / "into_a_file.yaml").write_text("output_dir: file/out\n")
    code = f"import sys, trl_dapo.cli as cli\nstatus = cli.main({command})\nprint(status, 'torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=200, cwd=tmp_path, env=environment
    )
    assert result.stdout == "2 False\n"
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"trl-dapo {command[0]}: ")
    assert message in line


def test_no_command_at_all_is_answered_with_the_commands(capsys):
    with pytest.raises(SystemExit) as stop:
        main([])
    assert stop.value.code == 2
    assert "see a small model get better on this machine, now" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "line"),
    [
        (["quickstart", "--sed", "1"], "trl-dapo: unrecognized arguments: --sed 1 (see --help)"),
        (
            ["quickstart", "--seed=-1"],
            "trl-dapo quickstart: argument --seed: must be a whole number of at least 0 and at most "
            "4294967295, got '-1' (see --help)",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_an_option_that_is_unknown_or_no_number_is_told_in_one_line(capsys, command, line):
    with pytest.raises(SystemExit):
        main(command)
    assert capsys.readouterr().err == f"{line}\n"


@pytest.mark.parametrize("command", ["plan --config smoke_cpu", "recipes", "recipes --show smoke_cpu"])
def test_a_reader_that_has_read_enough_is_no_mistake(command):
    read_end, write_end = os.pipe()
    os.close(read_end)
    code = f"import sys, trl_dapo.cli as cli\nsys.exit(cli.main({command.split()!r}))"
    result = subprocess.run([sys.executable, "-c", code], stdout=write_end, stderr=subprocess.PIPE, timeout=200)
    os.close(write_end)
    assert (result.returncode, result.stderr) == (141, b"")


def test_a_recipe_that_is_no_text_is_told_in_one_line(tmp_path, capsys):
    (tmp_path / "recipe.yaml").write_bytes(b"\x9b\xff")
    assert main(["recipes", "--show", str(tmp_path / "recipe.yaml")]) == 2
    assert capsys.readouterr().err.startswith("trl-dapo recipes: 'utf-8' codec can't decode")

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
import json
import subprocess
import sys

import pytest

from trl_dapo import __version__
from trl_dapo.cli import main


def test_help_names_every_command_without_importing_torch():
    code = (
        "import sys, trl_dapo.cli as cli\ntry: cli.main(['--help'])\nexcept SystemExit: print('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert all(command in result.stdout for command in ("quickstart", "train", "eval", "compare", "report"))
    assert result.stdout.splitlines()[-1] == "False"


def test_the_version_is_the_packages(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.strip() == f"trl-dapo {__version__}"


@pytest.mark.parametrize("argv", [[], ["retrain"], ["quickstart", "--sed", "1"]], ids=str)
def test_a_mistake_on_the_command_line_ends_with_exit_status_2(argv):
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 2


def test_report_draws_a_runs_logs(tmp_path, capsys):
    history = [{"step": step, "reward": 0.1 * step, "entropy": 1.0} for step in (1, 2, 3)]
    state = {"global_step": 3, "log_history": history}
    (tmp_path / "trainer_state.json").write_text(json.dumps(state))
    assert main(["report", str(tmp_path)]) == 0
    path = capsys.readouterr().out.strip()
    with open(path, "rb") as file:
        assert file.read(8) == b"\x89PNG\r\n\x1a\n"


def test_report_on_a_folder_that_is_no_run_says_so_in_one_line(tmp_path, capsys):
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("trl-dapo report: ")
    assert error.count("\n") == 1

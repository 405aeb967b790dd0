# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
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

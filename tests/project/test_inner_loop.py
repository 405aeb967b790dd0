# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""What keeps `pytest -m fast` fast."""

import subprocess
import sys
from pathlib import Path

import pytest


pytestmark = pytest.mark.fast

TESTS = Path(__file__).parents[1]


def test_the_root_conftest_imports_no_framework():
    code = "import conftest, sys; print({'torch', 'torch.distributed', 'transformers', 'trl'} & sys.modules.keys())"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True, cwd=TESTS
    )
    assert found.stdout == "set()\n"

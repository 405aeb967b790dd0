# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from trl_dapo.sampling.report import ADVICE


NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_every_notebook_runs_and_is_stored_without_outputs(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook.cells)
    NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs)


def test_the_advice_on_a_low_acceptance_rate_is_the_trainers():
    """Each row of the table names the settings that the trainer's warning names for that reason."""
    notebook = nbformat.read(NOTEBOOKS[0].parent / "03_read_a_run.ipynb", as_version=4)
    rows = re.findall(r"^\| `(\w+)` \|(.*)$", "\n".join(cell.source for cell in notebook.cells), re.MULTILINE)
    table = {reason: {*re.findall(r"`(\w+)`", rest)} for reason, rest in rows}
    assert table == {reason: {*re.findall(r"`(\w+)`", advice)} for reason, advice in ADVICE.items()}

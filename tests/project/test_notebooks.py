# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
Notebooks give the stored outputs when they are run again.

`python notebooks/execute.py` runs them and stores their outputs. Figures may differ from the stored ones by the
tolerance in the cell's metadata, `"tolerance": {"abs": 4}` or `{"rel": 0.2}`, as in `pytest.approx`, and otherwise by
`EXACT`.

One machine gives the same figures each time. If the last bits of a logit differ (kernels of AVX2 instead of AVX-512),
another token is sampled now and then: the quickstart's figures changed by up to 0.7 points. The conclusions of a
notebook do not depend on the tolerance: its own assertions check them, with a margin.
"""

import copy
import os
import re
import runpy
import sys
import tempfile
from pathlib import Path

import nbformat
import pytest


ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
EXACT = {"rel": 1e-3}  # far above the rounding of float32, below the last digit of a figure with three digits
MAX_BYTES = 300_000
REAL_MODEL, MODEL = "04_a_real_model.ipynb", "TRL_DAPO_SMOLLM2"
LONG, RUN_LONG = ("01_quickstart.ipynb", "03_read_a_run.ipynb"), "TRL_DAPO_ALL_NOTEBOOKS"
NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:e[-+]?\d+)?(?!\w)")


def differences(stored, executed):
    """Return the differences between a stored and an executed notebook, a line each."""
    found = []
    for index, (before, after) in enumerate(zip(stored.cells, executed.cells, strict=True)):
        if before.cell_type == "code":
            tolerance = before.metadata.get("tolerance", EXACT)
            found += [f"cell {index}: {what}" for what in different_outputs(before.outputs, after.outputs, tolerance)]
    return found


def different_outputs(stored, executed, tolerance):
    kinds = [[sorted(contents(output)) for output in outputs] for outputs in (stored, executed)]
    if kinds[0] != kinds[1]:
        return [f"outputs {kinds[0]} became {kinds[1]}"]
    found = []
    for before, after in zip(map(contents, stored), map(contents, executed), strict=True):
        for kind in before:
            if not kind.startswith("image/") and not is_same_text(before[kind], after[kind], tolerance):
                found.append(f"{before[kind]!r} became {after[kind]!r}, {tolerance}")
    return found


def contents(output):
    """Return the contents of an output by kind: a type of data, or the name of a stream."""
    return {output.name: output.text} if output.output_type == "stream" else dict(output.data)


def is_same_text(before, after, tolerance):
    """Return whether the words are the same, apart from spaces, and the figures within the tolerance."""
    words = [NUMBER.sub("#", text).split() for text in (before, after)]
    return words[0] == words[1] and numbers(after) == pytest.approx(numbers(before), **tolerance)


def numbers(text):
    return [float(number.replace(",", "")) for number in NUMBER.findall(text)]


@every_notebook
@pytest.mark.timeout(3600)
def test_a_notebook_gives_the_same_outputs_when_it_is_run_again(path):
    if path.name == REAL_MODEL and MODEL not in os.environ:
        pytest.skip(f"{MODEL} is not set: the folder of a model of 0.3 GB, and ten minutes")
    if path.name in LONG and RUN_LONG not in os.environ:
        pytest.skip(f"{RUN_LONG} is not set: minutes of training, which a weekly run takes")
    stored = nbformat.read(path, as_version=4)
    execute = runpy.run_path(str(ROOT / "notebooks" / "execute.py"))["execute"]
    assert differences(stored, execute(copy.deepcopy(stored))) == []


@every_notebook
def test_a_notebook_is_stored_as_one_clean_run(path):
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert notebook.metadata.keys() == {"kernelspec", "language_info"}
    assert notebook.metadata.language_info == {"name": "python"}
    assert all(cell.metadata.keys() <= {"tolerance"} for cell in notebook.cells)
    assert path.stat().st_size < MAX_BYTES
    shown = [contents(output) for cell in code for output in cell.outputs]
    assert any("image/png" in output for output in shown)
    text = text_of(notebook)
    for not_for_readers in (tempfile.gettempdir(), str(Path.home()), str(ROOT), sys.prefix, "Warning", "Traceback"):
        assert not_for_readers not in text
    assert not any("stderr" in output for output in shown)


def text_of(notebook):
    """Return all text in the outputs of a notebook."""
    shown = [contents(output) for cell in notebook.cells for output in cell.get("outputs", [])]
    return "\n".join(data for output in shown for kind, data in output.items() if not kind.startswith("image/"))


@every_notebook
def test_every_figure_of_the_prose_is_in_the_code_or_in_an_output(path):
    """A figure may also be in a formula. Addresses, code and the level of intervals do not count."""
    notebook = nbformat.read(path, as_version=4)
    code = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    prose = re.sub(r"\]\(.*?\)|`.*?`|95 %", " ", prose_of(notebook))
    known = numbers("\n".join([code, text_of(notebook), *formulas_of(notebook)]))
    assert {*map(abs, numbers(re.sub(r"\$.*?\$", " ", prose)))} - {*map(abs, known)} == set()


def prose_of(notebook):
    return "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")


def formulas_of(notebook):
    for formula in re.findall(r"\$(.*?)\$", prose_of(notebook)):
        for latex, python in ((r"\cdot", "*"), ("{,}", ""), (r"\sqrt{", "({"), ("}", ") ** 0.5"), ("{", "")):
            formula = formula.replace(latex, python)
        if formula.count("=") == 1 and re.fullmatch(r"[\d\s.+*/()=-]+", formula):
            yield formula

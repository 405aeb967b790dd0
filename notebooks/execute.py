# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
Run notebooks and store them with their outputs. Only figures differ between two runs.

    python notebooks/execute.py                                # all
    python notebooks/execute.py notebooks/01_quickstart.ipynb
"""

import argparse
from pathlib import Path

import nbformat
from nbclient import NotebookClient


HERE = Path(__file__).parent
TIMEOUT = 3600  # seconds per cell


def execute(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """
    Run a notebook from its first cell to its last in this folder, as Jupyter does.

    Args:
        notebook ([`~nbformat.NotebookNode`]):
            Notebook to run, in place.

    Returns:
        [`~nbformat.NotebookNode`]: The notebook with new outputs, without times and without the interpreter's version.

    Raises:
        [`~nbclient.exceptions.CellExecutionError`]: If a cell fails.
    """
    client = NotebookClient(
        notebook,
        timeout=TIMEOUT,
        startup_timeout=TIMEOUT,  # the default of a minute is too short on a busy machine
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(HERE)}},
    )
    client.execute()
    notebook.metadata.language_info = {"name": "python"}
    return notebook


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", metavar="NOTEBOOK", nargs="*", type=Path, default=sorted(HERE.glob("*.ipynb")))
    for path in parser.parse_args().paths:
        nbformat.write(execute(nbformat.read(path, as_version=4)), path)
        print(path)


if __name__ == "__main__":
    main()

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The structure is what docs/design.md says: layers, no import cycle, and maps that name the existing files."""

import ast
import graphlib
import re
import subprocess
import sys
from pathlib import Path

import pytest


pytestmark = pytest.mark.fast

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "trl_dapo"
# From top to bottom. A file imports from its own layer and those below.
LAYERS = [
    ["__init__", "cli"],
    ["trainer"],
    ["engines", "report"],
    ["run", "evaluation"],
    ["update", "construction"],
    ["data", "config", "plan"],
    ["rewards"],
    ["sampling"],
    ["settings", "tools"],
    ["ranks", "models", "number_format", "trl_check", "trl_names", "version"],
]
LAYER_OF = {part: layer for layer, parts in enumerate(LAYERS) for part in parts}
NAME_THE_TRAINER = ["__init__", "cli"]

FILES = sorted(PACKAGE.rglob("*.py"))
TREES = {file: ast.parse(file.read_text()) for file in FILES}


def module_of(file):
    """
    Return the module of a file, such as `update.phase`. The `__init__` of a folder has the folder's name, and that of
    the package is `""`.
    """
    return ".".join(file.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").removesuffix(".")


MODULES = {module_of(file): file for file in FILES}


def part_of(module):
    """Return the folder of a module in the package, or the module if it is in none."""
    return module.split(".")[0] or "__init__"


def imports_of(file):
    """
    Yield what a file imports of the package, anywhere in it: (module, name). The name is `None` for a whole module.
    """
    folder = file.relative_to(ROOT).parent.parts
    for node in ast.walk(TREES[file]):
        if isinstance(node, ast.Import):
            found = [(alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = ".".join(folder[: len(folder) - node.level + 1]) if node.level else ""
            source = ".".join(filter(None, [start, node.module]))
            found = [(source, alias.name) for alias in node.names]
        else:
            continue
        for source, name in found:
            if source.split(".")[0] == "trl_dapo":
                module = source.removeprefix("trl_dapo").removeprefix(".")
                submodule = f"{module}.{name}".removeprefix(".")
                yield (submodule, None) if submodule in MODULES else (module, name)


IMPORTS = {module: list(imports_of(file)) for module, file in MODULES.items()}


@pytest.mark.parametrize("name_of", [str, part_of], ids=["file", "folder"])
def test_there_is_no_import_cycle(name_of):
    graph = {}
    for module, found in IMPORTS.items():
        graph.setdefault(name_of(module), set()).update(name_of(target) for target, _ in found)
    try:
        graphlib.TopologicalSorter({name: targets - {name} for name, targets in graph.items()}).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def test_a_file_imports_from_its_own_layer_and_those_below():
    up = [
        f"{module} imports {target}"
        for module, found in IMPORTS.items()
        for target, _ in found
        if LAYER_OF[part_of(target)] < LAYER_OF[part_of(module)]
    ]
    assert not up, "\n".join(up)


def test_nobody_below_the_trainer_names_it():
    named = {
        module
        for module, found in IMPORTS.items()
        for target, name in found
        if (target == "trainer" or name == "DAPOTrainer") and part_of(module) not in NAME_THE_TRAINER
    }
    assert not named, "\n".join(sorted(named))


def test_no_file_reads_private_names_of_a_trainer_that_it_was_given():
    readers = {
        str(file.relative_to(PACKAGE))
        for file, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and re.fullmatch(r"_[a-z]\w*", node.attr)
        and ast.unparse(node.value).split(".")[-1] in ("trainer", "_trainer")
    }
    assert sorted(readers) == []


def test_the_root_conftest_imports_no_framework():
    # Otherwise `pytest -m fast` would not be fast.
    code = "import conftest, sys; print({'torch', 'torch.distributed', 'transformers', 'trl'} & sys.modules.keys())"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT / "tests"
    )
    assert found.stdout == "set()\n"


def paths_in(text):
    """Return the files and folders that a text names, such as `update/phase.py` and `update/`."""
    return set(re.findall(r"(?<![\w./-])(?:[\w.-]+/)*[\w-]+(?:\.py\b|/)", text))


def is_there(path):
    """
    Return whether a named path exists in the repository, in `tests/`, in the package, or in one of the package's
    folders.
    """
    return any(
        (base / path).exists() for base in (ROOT, ROOT / "tests", PACKAGE, *filter(Path.is_dir, PACKAGE.iterdir()))
    )


def the_layers():
    """Return the part of docs/design.md with the layers and the map."""
    return (ROOT / "docs" / "design.md").read_text().partition("\n## The layers\n")[2].partition("\n## ")[0]


def test_the_layers_of_the_design_are_those_above():
    rows = re.findall(r"^\| (\d) \| (.*) \|$", the_layers(), re.MULTILINE)
    told = {int(layer): re.findall(r"`(\w+)", parts) for layer, parts in rows}
    assert [sorted(told[layer]) for layer in sorted(told, reverse=True)] == [
        sorted(part for part in parts if part != "__init__") for parts in LAYERS
    ]


def test_the_maps_name_existing_files():
    (tree,) = re.findall(r"^```\n(trl_dapo/\n.*?)^```", the_layers(), flags=re.DOTALL | re.MULTILINE)
    named = paths_in(tree) - {"trl_dapo/recipes/"}  # which exists only in a wheel
    folders = {f"{file.parent.name}/" for file in PACKAGE.glob("*/__init__.py")}
    assert (folders | {file.name for file in PACKAGE.glob("*.py") if file.stem != "__init__"}) - named == set()
    named |= paths_in((ROOT / "CONTRIBUTING.md").read_text())
    assert sorted(path for path in named if not is_there(path)) == []

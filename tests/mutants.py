# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
Mutation testing of the core: 300 mutants, one at a time, each against the tests of its folder.

    python tests/mutants.py [--part 2/10]    # needs pytest-cov

prints the survivors and the share of killed mutants, and fails below 95%. The tests of each folder run once with
coverage. Then each mutant is tested with the tests that run its line, and after that with all tests.

The command keeps notes in `mutants.jsonl`, to skip mutants that it has killed before in modules that have not changed.
Only quote a share that was measured without notes. `equivalent_mutants.txt` lists mutants that no test could kill,
because they behave the same. Mutants are chosen by a hash of what they change, so an edit changes few of them.
"""

import argparse
import ast
import hashlib
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter, defaultdict
from contextlib import suppress
from itertools import accumulate
from pathlib import Path

import conftest  # noqa: F401 (it sets the environment)
import pytest
from coverage import CoverageData


ROOT = Path(__file__).parents[1]
PACKAGE, NOTES, EQUIVALENT = ROOT / "trl_dapo", ROOT / "mutants.jsonl", ROOT / "tests/equivalent_mutants.txt"
NUM, LEAST, LOGIC = 300, 0.95, (*range(11), 0.0, 0.5, 1.0)  # of constants; larger ones are design choices
FOLDERS = ("update", "sampling", "rewards", "evaluation", "run", "settings", "engines", "trainer")
# Trainers use everything in `engines`, and commands use all messages about settings.
FOLDERS_OF = {"engines": ("engines", "trainer", "run"), "settings": ("settings", "cli")}
IMPORTED = ("torch", "datasets", "peft", "pandas", "trl.trainer.grpo_trainer", "trl.scripts.grpo")
PAIRS = "Eq NotEq Is IsNot In NotIn Lt LtE Gt GtE And Or Add Sub Mult Div BitAnd BitOr".split()
SWAPPED = dict(zip(PAIRS, [PAIRS[i ^ 1] for i in range(len(PAIRS))], strict=True)) | {"FloorDiv": "Mult"}
OPTIONS = "-x -q -p no:cacheprovider -o addopts= --timeout=120 --timeout-method=thread".split()
STATE = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(ROOT.glob("t*/**/*.py")))).hexdigest()[:8]
COVERAGE, COVERED = f"{ROOT}/.coverage.{STATE}.{{}}", "--cov=trl_dapo --cov-context=test --cov-report=".split()


def other_than(node):
    """Replace the operator or the truth value, add one, or remove a `not`. `None` for any other node."""
    op = getattr(node, "ops", [None])[0] or getattr(node, "op", None)
    other = getattr(ast, SWAPPED.get(type(op).__name__, ""), type(None))()
    match node:
        case ast.Compare(left, [_], right) if other:
            return ast.Compare(left, [other], right)
        case ast.BoolOp(_, values):
            return ast.BoolOp(other, values)
        case ast.BinOp(left, _, right) if other:
            return ast.BinOp(left, other, right)
        case ast.UnaryOp(ast.Not(), operand):
            return operand
        case ast.Constant(bool(value)):
            return ast.Constant(not value)
        case ast.Constant(int(value) | float(value)) if value in LOGIC:
            return ast.Constant(value + 1)


def mutants_of(path):
    """Return the mutants of a module by what each changes: the source, as bytes, and the lines."""
    source, found = path.read_bytes(), {}
    starts = [0, *accumulate(map(len, source.splitlines(keepends=True)))]

    def add(node, other, where):
        first, last = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        name = f"{path.relative_to(PACKAGE)} {where}: {ast.unparse(node)} -> {ast.unparse(other)}"
        name += f" #{sum(key.startswith(name) for key in found) + 1}"
        text = source[:first] + f"({ast.unparse(other)})".encode() + source[last:]
        found[name] = text, range(node.lineno, node.end_lineno + 1)

    def visit(node, where):
        # Excluded are texts, types, decorators, and guards against impossible states.
        if isinstance(node, ast.JoinedStr | ast.Assert) or (isinstance(node, ast.keyword) and node.arg == "strict"):
            return
        if (other := other_than(node)) is not None:
            add(node, other, where)
        elif isinstance(node, ast.If | ast.IfExp) and not isinstance(node.test, ast.Compare | ast.UnaryOp):
            add(node.test, ast.UnaryOp(ast.Not(), node.test), where)
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            where = f"{where}.{node.name}".lstrip(".")
        skipped = [getattr(node, name, None) for name in ("annotation", "returns")]
        for child in ast.iter_child_nodes(node):
            if child not in [*skipped, *getattr(node, "decorator_list", ())]:
                visit(child, where)

    visit(ast.parse(source), "")
    return found


def runners(folders):
    """Return the tests that run each line of each module. Tests that run the fewest lines come first."""
    found = defaultdict(set)
    for folder in folders:
        (data := CoverageData(COVERAGE.format(folder))).read()
        for file in data.measured_files():
            for line, contexts in data.contexts_by_lineno(file).items():
                found[file.rsplit("/trl_dapo/")[-1], line] |= {test.rpartition("|")[0] for test in contexts if test}
    num_lines = Counter(test for tests in found.values() for test in tests)
    return {key: sorted(tests, key=lambda test: (num_lines[test], test)) for key, tests in found.items()}


class Without:
    """Plugin for pytest that deselects tests."""

    def __init__(self, tests):
        self.tests = tests

    def pytest_collection_modifyitems(self, items):
        items[:] = [item for item in items if item.nodeid not in self.tests]


def passes(copy, folders, first=(), stem="", options=()):
    """Return whether tests pass in a copy of the checkout: the `first` of them, those that name a module, then all."""
    files = [file for folder in folders for file in sorted((copy / "tests" / folder).glob("test_*.py"))]
    files = [str(file) for file in sorted(files, key=lambda file: stem not in file.read_text())]
    if not (pid := os.fork()):
        os.setsid()
        os.chdir(copy)
        os.environ |= {"PYTHONPATH": str(copy), "COVERAGE_FILE": COVERAGE.format(folders[0])}
        sys.path[0] = str(copy)
        output = os.open("output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        _ = os.dup2(output, 1), os.dup2(output, 2), sys.modules.pop("conftest")
        options = [*OPTIONS, *options, f"--basetemp={copy}/tmp"]
        status = pytest.main([*options, *first]) if first else 0
        if status in (0, 4):  # 4: pytest does not find a test by its name
            status = pytest.main([*options, *files], [] if status else [Without(first)])
        os._exit(status not in (0, 5))  # 5: no test was left
    _, status = os.waitpid(pid, 0)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # files that the tests left behind
    return status == 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default="1/1", metavar="I/N", help="every Nth mutant, from the Ith on")
    number, of = map(int, parser.parse_args().part.split("/"))
    folder_of = {
        path: path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in sorted(PACKAGE.rglob("*.py"))
    }
    core = [path for path in folder_of if folder_of[path] in FOLDERS]
    found = {name: (path, *mutant) for path in core for name, mutant in mutants_of(path).items()}
    chosen = sorted(found, key=lambda name: hashlib.sha256(name.encode()).digest())[:NUM]
    equivalent = {line.rpartition(" | ")[0] for line in EQUIVALENT.read_text().splitlines() if " | " in line}
    if gone := equivalent - {*chosen}:
        sys.exit(f"{EQUIVALENT.name} lists entries that are not among the chosen mutants any more: {gone}")
    NOTES.touch()
    digest = {name: hashlib.sha256(found[name][0].read_bytes()).hexdigest()[:8] for name in chosen}
    notes = map(json.loads, NOTES.read_text().splitlines())
    killed = {note["mutant"]: note["killed"] for note in notes if note["module"] == digest.get(note["mutant"])}
    todo = [name for name in chosen[number - 1 :: of] if name not in equivalent and not killed.get(name)]
    _ = [importlib.import_module(name) for name in IMPORTED]
    with tempfile.TemporaryDirectory() as temporary, NOTES.open("a", buffering=1) as file:
        copy = shutil.copytree(ROOT, Path(temporary, "checkout"), ignore=shutil.ignore_patterns(".git", "__pycache__"))
        for folder in (*FOLDERS, "cli"):
            if not Path(COVERAGE.format(folder)).exists() and not passes(copy, [folder], options=COVERED):
                Path(COVERAGE.format(folder)).unlink(missing_ok=True)
                sys.exit(f"The tests of {folder} fail without a mutant:\n{(copy / 'output').read_text()[-3000:]}")
        folders_of = {folder: FOLDERS_OF.get(folder, (folder,)) for folder in FOLDERS}
        tests = {folder: runners(folders) for folder, folders in folders_of.items()}
        for stamp, name in enumerate(todo, start=1):
            path, text, lines = found[name]
            folder, module, mutated = folder_of[path], str(path.relative_to(PACKAGE)), copy / path.relative_to(ROOT)
            original, _ = mutated.read_bytes(), mutated.write_bytes(text)
            os.utime(mutated, (stamp, stamp))  # Python recognizes a compiled file by this time and by the size
            first = dict.fromkeys(test for line in lines for test in tests[folder].get((module, line), ()))
            killed[name] = not passes(copy, folders_of[folder], first, path.stem)
            mutated.write_bytes(original)
            print(f"{stamp}/{len(todo)} {'killed' if killed[name] else 'survives'}: {name}", flush=True)
            note = {"mutant": name, "module": digest[name], "killed": killed[name]}
            file.write(json.dumps(note | {"output": (copy / "output").read_text()[-300:]}) + "\n")
    tried = sorted(killed.keys() - equivalent)
    num_killed, left = sum(killed[name] for name in tried), NUM - len(tried) - len(equivalent)
    print("\nSurvivors:", *(name for name in tried if not killed[name]), sep="\n")
    print(f"{num_killed} of {len(tried)} killed; {len(equivalent)} equivalent, {left} untried.")
    return num_killed < LEAST * len(tried) or not tried


if __name__ == "__main__":
    sys.exit(main())

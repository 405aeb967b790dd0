# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Check that this package works with the installed TRL, which runs when the trainer is imported.

Tested versions are not checked. For a newer version, every name and signature in `trl_names.py` is checked, and the
code of each method that is overridden or called is compared with that of the newest tested version.
"""

import ast
import hashlib
import importlib
import inspect
import json
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import trl

from . import trl_names
from .version import __version__


# Hashes of each method's text and of its code in the tested versions. `python -m trl_dapo.trl_check` writes this file.
TESTED_FILE = Path(__file__).with_name("trl_tested.json")
# For each file of TRL, the class in it and the methods whose code is compared.
WRAPPED = {
    "trainer/grpo_trainer.py": (
        "GRPOTrainer",
        ("__init__", "_get_per_token_logps_and_entropies", *trl_names.OVERRIDES, *trl_names.CALLS),
    ),
    "generation/vllm_generation.py": ("VLLMGeneration", ("__init__", *trl_names.VLLM_OVERRIDES)),
    "generation/vllm_client.py": ("VLLMClient", ("__init__", *trl_names.CLIENT_OVERRIDES)),
}
_IGNORED_FIELDS = {"ctx", "kind", "type_comment", "type_params"}  # these differ between versions of Python
_WITH_DOCSTRINGS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def check_trl() -> None:
    """
    Check the installed TRL if it is newer than the newest tested version.

    Warns if the code of methods has changed although their names and signatures are the same.

    Raises:
        ImportError: If a name that this package relies on is missing, or its signature has changed.
    """
    tested = json.loads(TESTED_FILE.read_text())
    newest = max(tested, key=_release)
    if _release(trl.__version__) <= _release(newest):
        return
    try:
        broken = [*find_broken()]
    except (ImportError, AttributeError) as error:  # a module or a class is gone
        broken = [str(error)]
    if broken:
        raise ImportError(
            f"trl-dapo {__version__} does not work with TRL {trl.__version__}: {'; '.join(broken)}. Install the "
            f"newest version that was tested, `pip install trl=={newest}`, or a newer version of trl-dapo."
        )
    if changed := find_changed(Path(str(trl.__file__)).parent, tested[newest]):
        warnings.warn(
            f"TRL {trl.__version__} is newer than the newest version that trl-dapo {__version__} was tested with "
            f"({newest}), and the code of {', '.join(f'`{name}`' for name in changed)} has changed. All names and "
            f"signatures are the same, so most runs are not affected. If yours is, install the tested version: `pip "
            f"install trl=={newest}`.",
            stacklevel=2,
        )


def _release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version. `1.17.0.dev0` counts as 1.17.0. An unknown version has no numbers."""
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def find_broken() -> Iterator[str]:
    """Yield a short description of each name of `trl_names.py` that TRL lacks or whose parameters differ."""
    trainer = importlib.import_module("trl.trainer.grpo_trainer").GRPOTrainer
    for name, parameters in trl_names.OVERRIDES.items():
        yield from find_differences(trainer, name, parameters, exactly=True)
    calls = {**trl_names.CALLS, "_get_per_token_logps_and_entropies": trl_names.LOGPS_TAKES}
    for name, parameters in calls.items():
        yield from find_differences(trainer, name, parameters)
    utils = importlib.import_module("trl.trainer.utils")
    for name, parameters in trl_names.UTILS.items():
        yield from find_differences(utils, name, parameters)
    for path in trl_names.TYPES:
        module, _, name = path.rpartition(".")
        if not hasattr(importlib.import_module(module), name):
            yield f"`{path}` is gone"
    source = "\n".join(Path(str(inspect.getfile(cls))).read_text() for cls in trainer.__mro__[:-1] if _is_trainer(cls))
    attributes_of_self = set(re.findall(r"\bself\.(\w+)", source))
    for name in (*trl_names.READS, *trl_names.LATER_READS):
        if not hasattr(trainer, name) and name not in attributes_of_self:
            yield f"`GRPOTrainer.{name}` is gone"
    for module, owner, overrides, attributes in (
        ("vllm_generation", "VLLMGeneration", trl_names.VLLM_OVERRIDES, trl_names.VLLM_ATTRIBUTES),
        ("vllm_client", "VLLMClient", trl_names.CLIENT_OVERRIDES, trl_names.CLIENT_ATTRIBUTES),
    ):
        loaded = importlib.import_module(f"trl.generation.{module}")
        for name, parameters in overrides.items():
            yield from find_differences(getattr(loaded, owner), name, parameters, exactly=True)
        source = Path(str(loaded.__file__)).read_text()
        for name in attributes:
            if f"self.{name} = " not in source:
                yield f"`{owner}.{name}` is gone"


def _is_trainer(cls: type) -> bool:
    return cls.__module__.startswith(("trl.", "transformers.trainer"))


def find_differences(owner: Any, name: str, parameters: tuple[str, ...], exactly: bool = False) -> Iterator[str]:
    """
    Yield a description of how a function of `owner` differs. Nothing is yielded if it has these parameters and
    requires no others.
    """
    called = f"{getattr(owner, '__name__', owner)}.{name}"
    function = getattr(owner, name, None)
    if not callable(function):
        yield f"`{called}` is gone"
        return
    found = list(inspect.signature(function).parameters.values())
    kinds = [each.kind for each in found]
    if not exactly and inspect.Parameter.VAR_POSITIONAL in kinds and inspect.Parameter.VAR_KEYWORD in kinds:
        # A decorator that passes on all arguments, as in TRL 1.14. Only the parameters before these are compared.
        found = found[: kinds.index(inspect.Parameter.VAR_POSITIONAL)]
        parameters = parameters[: len(found)]
    named = tuple(each.name for each in found)
    others = [each for each in found[len(parameters) :] if each.default is inspect.Parameter.empty]
    needed = [each.name for each in others if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    is_same = named == parameters if exactly else named[: len(parameters)] == parameters and not needed
    if not is_same:
        yield f"`{called}` takes ({', '.join(named)}), expected ({', '.join(parameters)})"


# ---- The code of methods ----


def find_changed(folder: Path, tested: dict[str, dict[str, str]]) -> list[str]:
    """Return the names of the methods in a folder of TRL whose code differs from the tested one."""
    changed = []
    methods = split_methods(folder)
    for name, hashes in tested.items():
        method = methods.get(name)
        # Parsing every method would take a tenth of a second, so those whose text is the same are not parsed.
        if method is None or (_hash(method) != hashes["text"] and hash_tree(method) != hashes["tree"]):
            changed.append(name)
    return changed


def hash_methods(folder: Path) -> dict[str, dict[str, str]]:
    """Return hashes of the text and of the code of each method in a folder of TRL."""
    methods = split_methods(folder)
    return {name: {"text": _hash(method), "tree": hash_tree(method)} for name, method in methods.items()}


def split_methods(folder: Path) -> dict[str, str]:
    """Return the text of each method in a folder of TRL, with its decorators."""
    methods = {}
    for file, (owner, names) in WRAPPED.items():
        cls = re.split(rf"^class {owner}\b", (folder / file).read_text(), maxsplit=1, flags=re.M)[-1]
        cls = re.split(r"^(?:class |def |@)", cls, maxsplit=1, flags=re.M)[0]
        starts = [*re.finditer(r"^(?:    @.*\n)*    def (\w+)", cls, re.M)]
        ends = [*(each.start() for each in starts[1:]), len(cls)]
        for start, end in zip(starts, ends, strict=True):
            if start[1] in names:
                methods[f"{owner}.{start[1]}"] = cls[start.start() : end]
    return methods


def hash_tree(method: str) -> str:
    """Return a hash of the code of a method, without docstrings and comments. It is the same on every Python."""
    try:
        cls: Any = ast.parse(f"class _:\n{method}").body[0]
    except SyntaxError:  # the method contains a text with a line that looks like the start of a method or class
        return _hash(method)
    words: list[str] = []
    _write_tree(cls.body[0], words)
    return _hash(" ".join(words))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _write_tree(node: Any, words: list[str]) -> None:
    """Append a syntax tree as words that are the same on every version of Python."""
    if isinstance(node, ast.AST):
        words.append(type(node).__name__)
        for name, value in ast.iter_fields(node):
            if name == "body" and isinstance(node, _WITH_DOCSTRINGS) and ast.get_docstring(node, clean=False):
                value = node.body[1:]
            if name not in _IGNORED_FIELDS and value is not None and value != []:
                words.append(name)
                _write_tree(value, words)
        words.append("end")
    elif isinstance(node, list):
        for each in node:
            _write_tree(each, words)
    else:
        words.append(repr(node))


def record(version: str, folder: Path, file: Path = TESTED_FILE) -> None:
    """Record the code of a version of TRL as tested."""
    tested: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    tested[version] = hash_methods(folder)
    file.write_text(json.dumps({each: tested[each] for each in sorted(tested, key=_release)}, indent=1) + "\n")


if __name__ == "__main__":  # arguments: a version and the folder of its package; by default the installed ones
    if sys.argv[1:]:
        record(sys.argv[1], Path(sys.argv[2]))
    else:
        record(trl.__version__, Path(str(trl.__file__)).parent)
else:
    check_trl()

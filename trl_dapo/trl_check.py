# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks that this package works with the installed TRL, when the trainer is imported.

A version that was tested is not checked. For a newer one, every name and signature of `trl_names.py` is checked, and
the code of each method that is wrapped, overridden or called is compared with that of the newest tested version.
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


# The code of each method in the versions that were tested, as `python -m trl_dapo.trl_check` writes it.
TESTED_FILE = Path(__file__).with_name("trl_tested.json")
# Files of TRL, the class in each, and its methods of which the code is compared.
WRAPPED = {
    "trainer/grpo_trainer.py": (
        "GRPOTrainer",
        ("__init__", "_get_per_token_logps_and_entropies", *trl_names.OVERRIDES, *trl_names.CALLS),
    ),
    "generation/vllm_generation.py": ("VLLMGeneration", ("__init__", *trl_names.VLLM_OVERRIDES)),
    "generation/vllm_client.py": ("VLLMClient", ("__init__", *trl_names.CLIENT_OVERRIDES)),
}
_IGNORED_FIELDS = {"ctx", "kind", "type_comment", "type_params"}  # which Python versions fill in differently


def check_trl() -> None:
    """
    Check a TRL that is newer than the newest that was tested.

    Warns once if code has changed behind names and signatures that are the same.

    Raises:
        ImportError: If a name that this package relies on is missing, or its signature has changed.
    """
    tested = json.loads(TESTED_FILE.read_text())
    newest = max(tested, key=_release)
    if _release(trl.__version__) <= _release(newest):
        return
    if broken := [*find_broken()]:
        raise ImportError(
            f"trl-dapo {__version__} does not fit TRL {trl.__version__}: {'; '.join(broken)}. Install the newest "
            f"version that fits, `pip install trl=={newest}`, or a newer trl-dapo."
        )
    codes = hash_methods(Path(str(trl.__file__)).parent)
    changed = [name for name, code in tested[newest].items() if codes.get(name) != code]
    if changed:
        warnings.warn(
            f"TRL {trl.__version__} is newer than the newest that trl-dapo {__version__} was tested with ({newest}), "
            f"and has changed the code of {', '.join(f'`{name}`' for name in changed)}. Every name and signature is "
            f"the same, so most runs are not affected. If one is, `pip install trl=={newest}`.",
            stacklevel=2,
        )


def _release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version: `1.17.0.dev0` counts as 1.17.0. An unknown version has none."""
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def find_broken() -> Iterator[str]:
    """Return what TRL lacks or takes differently of what `trl_names.py` lists, in a few words each."""
    trainer = importlib.import_module("trl.trainer.grpo_trainer").GRPOTrainer
    for name, parameters in trl_names.OVERRIDES.items():
        yield from why_other(trainer, name, parameters, exactly=True)
    calls = {**trl_names.CALLS, "_get_per_token_logps_and_entropies": trl_names.LOGPS_TAKES}
    for name, parameters in calls.items():
        yield from why_other(trainer, name, parameters)
    utils = importlib.import_module("trl.trainer.utils")
    for name, parameters in trl_names.UTILS.items():
        yield from why_other(utils, name, parameters)
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
            yield from why_other(getattr(loaded, owner), name, parameters, exactly=True)
        source = Path(str(loaded.__file__)).read_text()
        for name in attributes:
            if f"self.{name} = " not in source:
                yield f"`{owner}.{name}` is gone"


def _is_trainer(cls: type) -> bool:
    return cls.__module__.startswith(("trl.", "transformers.trainer"))


def why_other(owner: Any, name: str, parameters: tuple[str, ...], exactly: bool = False) -> Iterator[str]:
    """Yield how a function of `owner` differs; nothing if it takes these parameters and needs no others."""
    called = f"{getattr(owner, '__name__', owner)}.{name}"
    function = getattr(owner, name, None)
    if not callable(function):
        yield f"`{called}` is gone"
        return
    found = list(inspect.signature(function).parameters.values())
    kinds = [each.kind for each in found]
    if not exactly and inspect.Parameter.VAR_POSITIONAL in kinds and inspect.Parameter.VAR_KEYWORD in kinds:
        # A decorator that hands on whatever it is given, as TRL 1.14 has: what is named before that must agree.
        found = found[: kinds.index(inspect.Parameter.VAR_POSITIONAL)]
        parameters = parameters[: len(found)]
    named = tuple(each.name for each in found)
    others = [each for each in found[len(parameters) :] if each.default is inspect.Parameter.empty]
    needed = [each.name for each in others if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    is_same = named == parameters if exactly else named[: len(parameters)] == parameters and not needed
    if not is_same:
        yield f"`{called}` takes ({', '.join(named)}), expected ({', '.join(parameters)})"


# ---- The code of methods ----


def hash_methods(folder: Path) -> dict[str, str]:
    """A hash of the code of each wrapped method in a folder of TRL, docstrings and comments aside."""
    hashes = {}
    for file, (owner, names) in WRAPPED.items():
        tree = ast.parse((folder / file).read_text())
        (cls,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == owner)
        for node in cls.body:
            if isinstance(node, ast.FunctionDef) and node.name in names:
                text = json.dumps(_shape(_without_docstrings(node)))
                hashes[f"{owner}.{node.name}"] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return hashes


def _without_docstrings(tree: ast.AST) -> ast.AST:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and ast.get_docstring(node, False):
            node.body = node.body[1:]
    return tree


def _shape(node: Any) -> Any:
    """A syntax tree as lists, the same on every version of Python."""
    if isinstance(node, list):
        return [_shape(each) for each in node]
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = ((name, value) for name, value in ast.iter_fields(node) if name not in _IGNORED_FIELDS)
    return [type(node).__name__, *([name, _shape(value)] for name, value in fields if value not in (None, []))]


def record(version: str, folder: Path, file: Path = TESTED_FILE) -> None:
    """Notes the code of a version of TRL as tested."""
    tested: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    tested[version] = hash_methods(folder)
    file.write_text(json.dumps({each: tested[each] for each in sorted(tested, key=_release)}, indent=1) + "\n")


if __name__ == "__main__":  # a version, and the folder of its package; the installed one by default
    if sys.argv[1:]:
        record(sys.argv[1], Path(sys.argv[2]))
    else:
        record(trl.__version__, Path(str(trl.__file__)).parent)
else:
    check_trl()

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks of a command line before anything heavy is imported. Needs neither torch nor transformers."""

import argparse
import importlib
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from types import ModuleType
from typing import Any, NoReturn

from .recipe_files import find_accelerate_config, find_recipe
from .secrets import without_secrets


HUB_TIMEOUT = 4.0  # seconds for the Hub to respond
SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"  # the model that `trl-dapo fetch` makes
# Fields of older versions, for which the field with the most similar name would be a misleading hint.
HINTS_FOR_OLD_FIELDS = {
    "max_prompt_length": "TRL removed it: leave long prompts out of the dataset.",
    "torch_dtype": "It was renamed to `dtype`.",
}


PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}  # and how JSON writes them


class OneLineParser(argparse.ArgumentParser):
    """Argument parser that reports a mistake in one line, without the usage."""

    example = ""  # a command with everything that is required

    def error(self, message: str) -> NoReturn:
        if self.example and "arguments are required" in message:
            message = f"{message}. Write `{self.example}`."
        self.exit(2, f"{self.prog}: {message} (see --help)\n")


def whole_number(text: str) -> int:
    """Return the whole number that a command line gives as text. Used as a `type` of `argparse`."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from None


def any_number(text: str) -> float:
    """Return the number that a command line gives as text. Used as a `type` of `argparse`."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None


def one_line(error: BaseException) -> str:
    """Return the message of an error on one line and without secrets."""
    return without_secrets(" ".join(str(error).split()))


def check_output_dir(folder: str | os.PathLike) -> None:
    """Raise an error if a folder cannot be written to, or cannot be created."""
    # A shell variable that is not set gives an empty text. As a path it would mean the working directory.
    if not os.fspath(folder):
        raise FileNotFoundError("`output_dir` is empty. Name a folder.")
    path = Path(folder).expanduser().absolute()
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    if not existing.is_dir():
        raise NotADirectoryError(f"Cannot write to the output folder {folder}: {existing} is a file.")
    try:
        # A real attempt, because permissions do not tell: /proc and a disk that is mounted read-only have them, too.
        TemporaryDirectory(dir=existing, prefix=".trl-dapo-").cleanup()
    except OSError as error:
        raise PermissionError(
            f"Cannot write to the output folder {folder}: nothing can be created in {existing} ({error.strerror}). "
            "Set another `output_dir`."
        ) from None


def check_model_path(name: str) -> None:
    """Refuse a model that is neither a folder nor on the Hub, or that is not cached if the Hub does not respond."""
    if os.path.exists(name):
        return
    if re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name) is None:
        raise FileNotFoundError(f"`{name}` is neither a folder nor the name of a model on the Hub.")
    if use_cache_if_offline():
        from huggingface_hub import try_to_load_from_cache

        configs = [try_to_load_from_cache(name, file) for file in ("config.json", "adapter_config.json")]
        if not any(isinstance(config, str) for config in configs):
            raise OSError(f"`{name}` is not a folder, and the Hub does not respond. {_offline_hint(name)}")


@contextmanager
def naming_missing_folders(*models: object) -> Iterator[None]:
    """Add to the error of a model that was not found which names are not folders: one of them may be misspelt."""
    names = [model for model in models if isinstance(model, str)]
    for name in names:
        check_model_path(name)
    try:
        yield
    except OSError as error:
        if "huggingface.co" not in str(error):
            raise
        missing = [f"`{name}`" for name in names if not os.path.exists(name)]
        bases = ((_base_of_adapter(name), name) for name in names)
        missing += [f"`{base}`, the base of `{name}`," for base, name in bases if base and not os.path.exists(base)]
        if not missing:
            raise
        are = "is not a folder" if len(missing) == 1 else "are not folders"
        raise OSError(f"{' and '.join(missing)} {are} here. {error} {_offline_hint(' '.join(missing))}") from error


def _offline_hint(models: str) -> str:
    if SMOLLM2 in models:
        return (
            "To get this model without the Hub, run `pip install gguf` and `trl-dapo fetch smollm2`, and name the "
            "folder that it writes."
        )
    return "Without the Hub, give the path of a folder that contains the model."


def call_within(seconds: float, call: Callable[[], Any]) -> Any:
    """
    Return the result of a network call, or `None` if the call fails or takes longer.

    For calls that have no timeout of their own.
    """
    results = []

    def try_to_call() -> None:
        with suppress(Exception):
            results.append(call())

    thread = Thread(target=try_to_call, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None


@cache
def use_cache_if_offline() -> bool:
    """
    Make later calls read the cache of the Hub if the Hub does not respond. They would retry for half a minute.

    Returns:
        `bool`: Whether the Hub did not respond. `False` if the environment sets the Hub offline from the start.
    """
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return False
    if call_within(HUB_TIMEOUT, lambda: get_session().head(constants.ENDPOINT, timeout=HUB_TIMEOUT)) is not None:
        return False
    constants.HF_HUB_OFFLINE = True
    os.environ["HF_HUB_OFFLINE"] = "1"  # for the processes that are started later
    return True


def _base_of_adapter(folder: str) -> str | None:
    path = Path(folder, "adapter_config.json")
    return json.loads(path.read_text()).get("base_model_name_or_path") if path.is_file() else None


def load_function(option: str, name: str, known: dict[str, Callable], others: Iterable[str] = ()) -> Callable:
    """
    Return the function that a user names: one of `known`, or a dotted path, also to the working directory.

    `others` are names that the option accepts too, for the error about a name that nothing has.
    """
    if name in known:
        return known[name]
    module, _, attribute = name.rpartition(".")
    if not module:
        names = [*known, *others]
        raise ValueError(
            f"`{option}` names {name!r}, which is unknown.{_did_you_mean(name, names)} Use one of {', '.join(names)}, "
            "or the dotted import path of a function of your own, such as `my_module.my_function`."
        )
    sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module), attribute)
    except AttributeError:
        there = _functions_of(sys.modules[module])
        question = _did_you_mean(attribute, there, f"{module}.")
        raise ImportError(
            f"`{option}` names {name!r}, but module {module!r} has no {attribute!r}.{question}"
        ) from None
    except ImportError as error:
        raise ImportError(
            f"`{option}` names {name!r}, which cannot be imported: {error}. Modules in {os.getcwd()} can be named too."
        ) from error
    if isinstance(function, type) or not callable(function):
        raise ValueError(f"`{option}` names {name!r}, which is not a function but {function!r:.80}.")
    return function


def _functions_of(module: ModuleType) -> list[str]:
    """Return the names of the functions of a module that a user may mean."""
    # The `get_` functions of TRL make a reward function, and are none.
    names = [name for name in dir(module) if not name.startswith(("_", "get_"))]
    return [name for name in names if inspect.isroutine(getattr(module, name, None))]


def read_mapping(name: str, value: Any) -> Any:
    """Return the mapping that a command line gives as JSON. Anything but text is returned unchanged."""
    if not isinstance(value, str):
        return value
    why = ""
    try:
        mapping = json.loads(value)
    except ValueError as error:
        mapping, why = None, f", which is not JSON ({error})"
    if isinstance(mapping, dict):
        return mapping
    python_words = re.findall(r"\b(?:True|False|None)\b", value)
    if why and python_words:
        words = " and ".join(f"`{PYTHON_WORDS[word]}` instead of `{word}`" for word in dict.fromkeys(python_words))
        why += f", where it is {words}"
    raise ValueError(
        f"`{name}` must be a mapping, got {value!r}{why}. Write it as JSON, with names and texts in double quotes: "
        f"""`--{name} '{{"name": "value", "other": 1, "third": false}}'`."""
    )


def _did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Return a question with the known name that is most similar to a misspelt one, or an empty string."""
    nearest = get_close_matches(name, [*known], n=1)
    return f" Did you mean `{prefix}{nearest[0]}`?" if nearest else ""


def refuse_unknown_fields(
    source: str | None, given: Iterable[str], known: Iterable[str], options: Iterable[str] = ()
) -> None:
    """
    Raise an error for unknown names, each with the known field or option of the most similar name.

    `source` says where the fields are, such as "the recipe". It is `None` for the options of a command line.
    """
    known = [*known]
    unknown = sorted({*given} - {*known})
    if not unknown:
        return
    found = []
    for name in unknown:
        what = f"Unknown option `--{name}`" if source is None else f"Unknown field `{name}` in {source}"
        hint = HINTS_FOR_OLD_FIELDS.get(name, "")
        if hint:
            found.append(f"{what}. {hint}")
            continue
        question = _did_you_mean(name, [*known, *options], "--" if source is None else "")
        found.append(f"{what}.{question or ' No known name is similar. Leave it out.'}")
    raise ValueError(" ".join(found))


def names_of_options(words: Iterable[str]) -> list[str]:
    """Return the names of the options among the words of a command line: `num_steps` of `--num-steps=3`."""
    return [word[2:].partition("=")[0].replace("-", "_") for word in words if word.startswith("--")]


def describe_unknown_command(command: str, commands: Iterable[str]) -> str:
    """Return the message for a command that does not exist."""
    commands = [*commands]
    return f"Unknown command `{command}`.{_did_you_mean(command, commands)} The commands are {', '.join(commands)}."


def check_train_arguments(argv: Sequence[str]) -> list[str]:
    """
    Check the parts of a command line of `trl-dapo train` that the parser of fields does not check.

    Returns:
        `list[str]`: The command line, with the name of a recipe replaced by the path of its file.
    """
    settings: dict = {}
    # TRL's parser knows `--config NAME`, but not `--config=NAME`.
    words = argv
    argv = []
    for word in words:
        if word.startswith("--config="):
            argv.extend(word.split("=", 1))
        else:
            argv.append(word)
    if "--config" in argv:
        place = argv.index("--config") + 1
        if not argv[place:] or argv[place].startswith("--"):
            raise ValueError(
                "`--config` is not followed by a recipe. Add the name of one, such as smoke_cpu, or a path to a file."
            )
        if "--config" in argv[place:]:
            raise ValueError("`--config` is given twice. Name one recipe, followed by the fields to change.")
        argv[place] = str(find_recipe(argv[place]))
        settings = _read_recipe(argv[place])
    for place, argument in enumerate(argv):
        name, _, value = argument.partition("=")
        name = name.replace("-", "_")
        if name in ("__output_dir", "__accelerate_config", "__model_name_or_path"):
            settings[name[2:]] = value or "".join(argv[place + 1 :][:1])
    if settings.get("accelerate_config") is not None:
        find_accelerate_config(str(settings["accelerate_config"]))
    if settings.get("output_dir") is not None:
        check_output_dir(str(settings["output_dir"]))
    if argv and not argv[0].startswith("-"):
        raise ValueError(
            f"`{argv[0]}` is not an option. Name a recipe with `--config`: `trl-dapo train --config {argv[0]}`."
        )
    options = {word.partition("=")[0].replace("-", "_") for word in argv}
    if not options & {"__config", "__model_name_or_path", "__tiny_model", "__help", "_h"}:
        raise ValueError(
            "Neither a recipe nor a model is named. Name a recipe with `--config NAME` (`trl-dapo recipes` lists "
            "them), or a model and a dataset with `--model_name_or_path` and `--dataset_name`."
        )
    if settings.get("tiny_model") and "__model_name_or_path" in options and "__tiny_model" not in options:
        raise ValueError(
            "`--model_name_or_path` has no effect, because the recipe trains a small random model "
            "(`tiny_model: true`). Add `--tiny_model false`."
        )
    if (model := settings.get("model_name_or_path")) is not None and not (
        settings.get("tiny_model") or options & {"__help", "_h", "__tiny_model"}
    ):
        check_model_path(str(model))  # here, because importing torch takes seconds
    return argv


def _read_recipe(path: str | os.PathLike) -> dict:
    import yaml

    try:
        text = Path(path).read_text()
        recipe, node = yaml.safe_load(text), yaml.compose(text, yaml.SafeLoader)
    except OSError as error:
        raise OSError(f"Cannot read the recipe {path}: {error.strerror}.") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1
        raise ValueError(f"The recipe {path} is not YAML: line {line}: {error.problem}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"The recipe {path} is not YAML: {one_line(error)}") from None
    if not isinstance(recipe, dict):
        raise ValueError(f"The recipe {path} must be a mapping of fields to values, such as `learning_rate: 1.0e-6`.")
    names = [key.value for key, _ in node.value]
    for place, (key, _) in enumerate(node.value):
        line = key.start_mark.line + 1
        if key.value in names[:place]:  # YAML would silently use the last one
            raise ValueError(
                f"The recipe {path} names `{key.value}` twice, the second time in line {line}. Remove one of them."
            )
        if key.tag != yaml.resolver.Resolver.DEFAULT_SCALAR_TAG:
            raise ValueError(
                f"Line {line} of the recipe {path} begins with `{key.value}`, which is not the name of a field."
            )
    return recipe

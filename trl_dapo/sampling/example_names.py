# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The names of examples: in the stream of prompts, in the pass-rate memory and the ledger, and in scores."""

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any


_LONGEST_SOURCE = 64  # characters; it becomes a part of a metric's name
NO_SOURCE = "dataset"  # what an evaluation lists problems without a source under
_BEFORE_HASH = " #"
_NAME = re.compile(rf"{_BEFORE_HASH}[0-9a-f]{{16}}$")  # how a name ends that begins with an id


def digest(text: str, algorithm: str = "blake2b") -> str:
    """16 hexadecimal digits, the same in every process: BLAKE2's in checkpoints, SHA-256's in journals."""
    data = text.encode(errors="surrogatepass")
    # Files of earlier releases hold names of both kinds, and are read on.
    return (hashlib.sha256(data) if algorithm == "sha256" else hashlib.blake2b(data, digest_size=8)).hexdigest()[:16]


def prompt_name(example: Mapping[str, Any]) -> str:
    """An example's id, if it has one, and a hash of its content: an id may be a category, or another dataset's too."""
    if not has_id(example):
        return content_digest(example)
    source, id_ = example.get("source"), str(example["id"])
    name = f"{id_ if source is None else f'{source}/{id_}'}{_BEFORE_HASH}{content_digest(example)}"
    return name.encode(errors="backslashreplace").decode()  # no file holds half of a surrogate pair


def id_in(name: str) -> str:
    """The id that a name begins with; the name itself where there is none."""
    return _NAME.sub("", name)


def shown_names(names: Collection[str]) -> dict[str, str]:
    """Return what people are shown for each name: the id alone if it names no other of these prompts."""
    ids = {name: id_in(name) for name in names}
    num_named = Counter(ids.values())
    return {name: id_ if num_named[id_] == 1 else name for name, id_ in ids.items()}


def problem_id(example: Mapping[str, Any]) -> str | None:
    """A row's `id`, or a hash of its prompt; `None` where it has no prompt, or one that JSON cannot hold."""
    if has_id(example):
        return str(example["id"])
    if example.get("prompt") is None or example.get("image") is not None or example.get("images"):
        return None
    try:
        return digest(json.dumps(example["prompt"]), "sha256")
    except TypeError:
        return None


def id_of_prompt(example: Mapping[str, Any]) -> str:
    """A row's `problem_id` with what tells its prompt from others: its name where an id stands for several."""
    return f"{problem_id(example)}#{digest(json.dumps(example['prompt']), 'sha256')[:8]}"


def problem_source(example: Mapping[str, Any]) -> str | None:
    """
    Return the benchmark that a row belongs to, or `None` if its `source` is not a name but, for example, a document to
    summarize.
    """
    source = example.get("source")
    if not isinstance(source, (str, int)) or not 0 < len(str(source)) <= _LONGEST_SOURCE:
        return None
    return str(source)


def has_id(example: Mapping[str, Any]) -> bool:
    """Return whether a value is an id. `None` and NaN, which tables fill in, and empty text are not ids."""
    id_ = example.get("id")
    return not (id_ is None or (isinstance(id_, str) and not id_) or (isinstance(id_, float) and math.isnan(id_)))


def content_digest(example: Mapping[str, Any]) -> str:
    """A hash of every column of a row, the same in every process: equal rows are repeats of one problem."""
    try:
        return digest(json.dumps(example, sort_keys=True, default=_as_json))
    except TypeError:  # of keys that JSON has no word for
        return digest(re.sub(r" at 0x\w+", "", repr(example)))


def _as_json(x: Any) -> Any:
    """
    Return the text that represents a value that JSON cannot in a hash. It must not contain an address, which differs
    between runs.
    """
    if str(getattr(x, "dtype", "")) == "object":  # an array of texts, as pandas has them
        return x.tolist()
    if hasattr(x, "tobytes"):
        return int(digest(x.tobytes().hex()), 16)
    return re.sub(r" at 0x\w+", "", str(x))

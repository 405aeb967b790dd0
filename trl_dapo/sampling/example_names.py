# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Names of examples: those of prompts in the stream, the pass-rate memory and the ledger, and those of problems in
evaluation scores.
"""

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any


_LONGEST_SOURCE = 64  # characters, since a source becomes part of a metric's name
NO_SOURCE = "dataset"  # the source under which an evaluation lists problems that have none
_BEFORE_HASH = " #"
_HASH_AFTER_ID = re.compile(rf"{_BEFORE_HASH}[0-9a-f]{{16}}$")


def digest(text: str, algorithm: str = "blake2b") -> str:
    """
    Return a hash of 16 hexadecimal digits, the same in every process. Checkpoints use BLAKE2, and the journals of
    evaluations SHA-256.
    """
    data = text.encode(errors="surrogatepass")
    # Both algorithms stay, so that names in existing files remain valid.
    return (hashlib.sha256(data) if algorithm == "sha256" else hashlib.blake2b(data, digest_size=8)).hexdigest()[:16]


def prompt_name(example: Mapping[str, Any]) -> str:
    """Return the name of a prompt: the example's id, if it has one, and a hash of its content."""
    # An id alone might be a category, or occur in another dataset too.
    if not has_id(example):
        return content_digest(example)
    source, id_ = example.get("source"), str(example["id"])
    name = f"{id_ if source is None else f'{source}/{id_}'}{_BEFORE_HASH}{content_digest(example)}"
    return name.encode(errors="backslashreplace").decode()  # half of a surrogate pair could not be written to a file


def id_in(name: str) -> str:
    """Return a name without its hash: `id` or `source/id`. If there is no id, return the whole name."""
    return _HASH_AFTER_ID.sub("", name)


def shown_names(names: Collection[str]) -> dict[str, str]:
    """Return what to display for each name: only the id, if no other of these prompts has the same id."""
    ids = {name: id_in(name) for name in names}
    num_named = Counter(ids.values())
    return {name: id_ if num_named[id_] == 1 else name for name, id_ in ids.items()}


def problem_id(example: Mapping[str, Any]) -> str | None:
    """
    Return a row's `id`, or a hash of its prompt if it has no id. A row that has images, no prompt, or a prompt that
    JSON cannot hold, has no such hash: without an id, the result is `None`.
    """
    if has_id(example):
        return str(example["id"])
    if example.get("prompt") is None or example.get("image") is not None or example.get("images"):
        return None
    try:
        return digest(json.dumps(example["prompt"]), "sha256")
    except TypeError:
        return None


def id_of_prompt(example: Mapping[str, Any]) -> str:
    """Return a row's `problem_id` and a hash of its prompt. This names the row even if several have the same id."""
    return f"{problem_id(example)}#{digest(json.dumps(example['prompt']), 'sha256')[:8]}"


def problem_source(example: Mapping[str, Any]) -> str | None:
    """
    Return the source of a row, such as the name of a benchmark. `None` if it has none, or if its `source` is not a
    short text or an integer: some datasets have whole texts there.
    """
    source = example.get("source")
    if not isinstance(source, (str, int)) or not 0 < len(str(source)) <= _LONGEST_SOURCE:
        return None
    return str(source)


def has_id(example: Mapping[str, Any]) -> bool:
    """Return whether an example has an id. `None`, NaN and empty text do not count: tables fill gaps with them."""
    id_ = example.get("id")
    return not (id_ is None or (isinstance(id_, str) and not id_) or (isinstance(id_, float) and math.isnan(id_)))


def content_digest(example: Mapping[str, Any]) -> str:
    """Return a hash of all columns of a row, the same in every process. Rows with the same hash are repetitions."""
    try:
        return digest(json.dumps(example, sort_keys=True, default=_as_json))
    except TypeError:  # keys of a type that JSON does not have
        return digest(re.sub(r" at 0x\w+", "", repr(example)))


def _as_json(x: Any) -> Any:
    """Return a replacement for a value of a type that JSON does not have, without its address in memory."""
    # The address differs from run to run, but the hash must not.
    if str(getattr(x, "dtype", "")) == "object":  # such as an array of texts from pandas
        return x.tolist()
    if hasattr(x, "tobytes"):
        return int(digest(x.tobytes().hex()), 16)
    return re.sub(r" at 0x\w+", "", str(x))

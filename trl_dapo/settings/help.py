# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Help texts of a dataclass's fields, read from its docstring in TRL's format."""

import dataclasses
import inspect
import re
import sys
import textwrap
import types
from typing import NamedTuple, TypeVar


T = TypeVar("T")

_SECTION = re.compile(r"^(?:Args|Parameters):\n((?:[ \t].*\n?|\n)*)", re.MULTILINE)
_FIELD = re.compile(r"(\w+) \(`.+?(?:, defaults to `(.*)`)?\):")
_REFERENCE = re.compile(r"\[`~?(?:\w+\.)*(\w+)`\]")


class Entry(NamedTuple):
    """
    Return a docstring's description of one field on one line, with references such as [`~trl.GRPOConfig`] as names.
    """

    heading: str  # the `> Heading` that it stands under; empty where there is none
    default: str | None  # as it is written
    text: str


def read_fields(doc: str) -> dict[str, Entry]:
    """The fields that a class's docstring in TRL's format describes under `Args:` or `Parameters:`, in order."""
    heading, entries = "", {}
    section = _SECTION.search(inspect.cleandoc(doc) + "\n")
    text = _REFERENCE.sub(r"`\1`", section[1]) if section else ""
    for line in textwrap.dedent(text).splitlines():
        if line.startswith("> "):
            heading = line.removeprefix("> ")
        elif match := _FIELD.fullmatch(line):
            name, default = match.groups()
            entries[name] = Entry(heading, default, "")
        elif line.startswith(" ") and entries:
            entries[name] = entries[name]._replace(text=f"{entries[name].text} {line.strip()}".lstrip())
        elif line:
            raise ValueError(f"Neither a field, such as 'steps (`int`, *optional*):', nor its text: {line!r}.")
    return entries


def help_from_docstring(cls: type[T]) -> type[T]:
    """Gives a dataclass's own fields the `help` that `HfArgumentParser` shows; inherited ones keep theirs."""
    if sys.flags.optimize >= 2:  # which takes the docstrings away
        return cls
    entries = read_fields(cls.__doc__ or "")
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]  # `T` is one
    if unknown := [name for name in entries if name not in fields]:
        raise ValueError(f"The docstring of `{cls.__name__}` describes {unknown[0]!r}, which is not a field of it.")
    for name in inspect.get_annotations(cls):
        if name not in entries or not entries[name].text:
            raise ValueError(f"The docstring of `{cls.__name__}` does not describe its field {name!r}.")
        # argparse formats help with `%`.
        described = {**fields[name].metadata, "help": entries[name].text.replace("%", "%%")}
        fields[name].metadata = types.MappingProxyType(described)
    return cls

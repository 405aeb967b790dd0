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
    """A docstring's entry for one field."""

    heading: str  # the `> Heading` above it, or an empty text
    default: str | None  # as text
    text: str  # on one line; references such as [`~trl.GRPOConfig`] are replaced by their last name


def read_fields(doc: str) -> dict[str, Entry]:
    """Return the fields that a docstring in TRL's format describes under `Args:` or `Parameters:`, in order."""
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
            raise ValueError(
                f"The docstring has a line {line!r}, which is neither a field nor the indented text of one. Write a "
                "field as 'steps (`int`, *optional*):'."
            )
    return entries


def help_from_docstring(cls: type[T]) -> type[T]:
    """Give a dataclass's own fields the `help` that `HfArgumentParser` shows. Inherited fields keep theirs."""
    if sys.flags.optimize >= 2:  # `python -OO` removes docstrings
        return cls
    entries = read_fields(cls.__doc__ or "")
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]  # `T` is one
    if unknown := [name for name in entries if name not in fields]:
        raise ValueError(f"The docstring of `{cls.__name__}` describes {unknown[0]!r}, which is not a field of it.")
    for name in inspect.get_annotations(cls):
        if name not in entries or not entries[name].text:
            raise ValueError(f"The docstring of `{cls.__name__}` does not describe the field {name!r}.")
        # argparse formats help with `%`.
        described = {**fields[name].metadata, "help": entries[name].text.replace("%", "%%")}
        fields[name].metadata = types.MappingProxyType(described)
    return cls

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Secrets in settings, which must not be in any file or line that a run writes."""

import re
from collections.abc import Mapping
from typing import Any


LEFT_OUT = "[left out]"
# Names of secrets, and of tokens that are none.
_SECRET = re.compile(
    r"token$|secret|passw(or)?d|passphrase|pwd$|(api|private|access)[-_ ]?key|credential|auth(orization)?$|cookie"
    r"|bearer",
    re.IGNORECASE,
)
_OF_TEXT = re.compile(r"(eos|bos|pad|unk|sep|cls|mask|stop|image|think)\w*token$", re.IGNORECASE)
# The scheme may have been left out, a path has one stroke less, and a password may hold an `@`.
_USER = re.compile(r"(?:(?<=://)|(?<=:/))[^/\s\"']+@|(?<!\S)[^/@\s:]+:[^/@\s]+@")
_PARAMETER = re.compile(r"(?<=[?&])([\w-]+)=[^&#\s\"']+")
# As the hub, GitHub, AWS, OpenAI, GitLab, Nvidia, Slack and Google make them, and any other long one of mixed
# characters: words with strokes between them are a name.
_TOKEN = re.compile(
    r"(?<![A-Za-z\d])(?:(?:hf|gh[oprsu])_[A-Za-z\d]{8,}(?!\w)|AKIA[A-Z\d]{12,}"
    r"|(?:sk-|github_pat_|glpat-|nvapi-|xox\w-|AIza|eyJ)[\w.-]{8,})"
    r"|(?<![\w/.-])(?=[\w-]*[a-z])(?=[\w-]*[A-Z])(?=[\w-]*\d)(?=[\w-]*[A-Za-z\d]{16})[A-Za-z\d_-]{32,}(?![\w/.-])"
)


def without_secrets(value: Any, name: str = "") -> Any:
    """A setting without passwords and tokens, at any depth; users of addresses go, and what looks like a token."""
    is_secret = _is_secret(name)
    if isinstance(value, Mapping):
        return {key: without_secrets(entry, name if is_secret else str(key)) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_secrets(entry, name) for entry in value]
    if is_secret and not isinstance(value, (bool, type(None))):
        return LEFT_OUT
    if not isinstance(value, str):
        return value
    value = _PARAMETER.sub(lambda found: f"{found[1]}={LEFT_OUT}" if _is_secret(found[1]) else found[0], value)
    return _TOKEN.sub(LEFT_OUT, _USER.sub("", value))


def _is_secret(name: str) -> bool:
    return _SECRET.search(name) is not None and _OF_TEXT.search(name) is None

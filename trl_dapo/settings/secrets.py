# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Removal of secrets from settings: no file and no line that a run writes may contain one."""

import re
from collections.abc import Mapping
from typing import Any


LEFT_OUT = "[left out]"
# Names of settings that hold a secret, and of tokens that are not secret.
_SECRET = re.compile(
    r"token$|secret|passw(or)?d|passphrase|pwd$|(api|private|access)[-_ ]?key|credential|auth(orization)?$|cookie"
    r"|bearer",
    re.IGNORECASE,
)
_TEXT_TOKEN = re.compile(r"(eos|bos|pad|unk|sep|cls|mask|stop|image|think)\w*token$", re.IGNORECASE)
# A user and password in a URL. The scheme may be missing, a path may have one slash less, and a password may contain
# an `@`.
_USER = re.compile(r"(?:(?<=://)|(?<=:/))[^/\s\"']+@|(?<!\S)[^/@\s:]+:[^/@\s]+@")
_PARAMETER = re.compile(r"(?<=[?&])([\w-]+)=[^&#\s\"']+")
# Tokens of the Hub, GitHub, AWS, OpenAI, GitLab, Nvidia, Slack and Google, and any other long text of mixed
# characters. Words that are joined by dashes are a name, not a token.
_TOKEN = re.compile(
    r"(?<![A-Za-z\d])(?:(?:hf|gh[oprsu])_[A-Za-z\d]{8,}(?!\w)|AKIA[A-Z\d]{12,}"
    r"|(?:sk-|github_pat_|glpat-|nvapi-|xox\w-|AIza|eyJ)[\w.-]{8,})"
    r"|(?<![\w/.-])(?=[\w-]*[a-z])(?=[\w-]*[A-Z])(?=[\w-]*\d)(?=[\w-]*[A-Za-z\d]{16})[A-Za-z\d_-]{32,}(?![\w/.-])"
)


def without_secrets(value: Any, name: str = "") -> Any:
    """Return a setting without passwords, tokens, users in URLs and texts that look like a token, at any depth."""
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
    return _SECRET.search(name) is not None and _TEXT_TOKEN.search(name) is None

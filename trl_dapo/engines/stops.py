# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The ends of completions: end tokens of the model, and the stops of `generation_kwargs`."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


class Stops:
    """
    Decides which completions were cut off at the length limit. TRL counts every completion without an end token of the
    model as cut off, even if it ends with a stop of `generation_kwargs`.
    """

    def __init__(
        self, tokenizer: Any, *, ends: Iterable[int], use_vllm: bool, generation_kwargs: Mapping[str, Any]
    ) -> None:
        given = generation_kwargs if use_vllm else {}  # transformers does not have these arguments
        self._tokenizer = tokenizer
        self._strings = _as_list(given.get("stop"))
        self._skips_special_tokens = bool(given.get("skip_special_tokens", True))
        own_tokens = _as_list(given.get("stop_token_ids"))
        self._ends = {*ends, *own_tokens, tokenizer.pad_token_id}
        self.differ_from_trls = bool(self._strings or own_tokens)

    def is_cut_off(self, ids: Sequence[int], tool_mask: Sequence[int] | None = None) -> bool:
        """
        Return whether a completion was cut off at the length limit. `tool_mask` is 1 for tokens that the model
        generated.
        """
        if ids[-1] in self._ends:
            return False
        if not self._strings:
            return True
        turn = ids[_start_of_last_turn(tool_mask) :] if tool_mask else ids
        # The engine ends a completion at its first stop. So a text that contains a stop ends with it.
        text = self._tokenizer.decode(turn, skip_special_tokens=self._skips_special_tokens)
        return not any(stop in text for stop in self._strings)


def _start_of_last_turn(tool_mask: Sequence[int]) -> int:
    """Return the index at which the model's last turn begins: after the last token that it did not generate."""
    start = len(tool_mask)
    while start > 0 and tool_mask[start - 1]:
        start -= 1
    return start


def _as_list(value: Any) -> list:
    if value is None:
        return []
    return [value] if isinstance(value, (str, int)) else list(value)

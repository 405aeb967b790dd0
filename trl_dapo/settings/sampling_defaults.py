# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""How prompts are sampled where nothing is said: in the way that costs least, as far as a run supports it. Pure."""

from types import SimpleNamespace
from typing import Any

from .rules import why_refused


# What costs least, what the paper does, and what the first is in words.
WAYS: dict[str, tuple[Any, Any, Any]] = {
    "dynamic_sampling_max_batches": (1.0, 0.0, "a rollout ends once it sampled {:g} x its batch and found a group"),
    "dynamic_sampling_surplus": ("carry", "discard", "surplus trains later"),
    "dynamic_sampling_memory": (True, False, "prompts likely to be dropped are skipped"),
    "dynamic_sampling_screen": ("auto", "off", "a few completions are sampled first"),
}
MEANT = {"": None} | dict.fromkeys(("true", "yes", "on"), True) | dict.fromkeys(("false", "no", "off"), False)
CHEAPEST, PAPER, IN_WORDS = ({name: way[column] for name, way in WAYS.items()} for column in range(3))


def as_given(name: str, value: Any) -> Any:
    """What was meant by a value of these: to YAML `off` is false and `4` no text, to a command line all is text."""
    value = MEANT.get(str(value).lower(), value) if name in WAYS else value
    return str(value or "off") if name == "dynamic_sampling_screen" and value is not None else value


def why_not_screened(settings: Any, has_tools: bool, on_cpu: bool) -> str | None:
    """Why screening is off where it is left alone, though it is not refused."""
    if not (settings.use_vllm or settings.use_transformers_continuous_batching or on_cpu):
        return "screening takes more rounds, each as long as its longest completion without vLLM"
    is_tried = not (settings.skip_preflight or has_tools)
    return None if is_tried else "nothing can tell whether a reward function compares completions: no screening"


class SamplingChoice:
    """Settles those of these settings that were left alone; `no_screen` is a reason against it, `facts` the rules'."""

    def __init__(self, settings: Any, no_screen: str | None, **facts: Any) -> None:
        self._settings = settings
        self.reasons: dict[str, str] = {}  # why what was left alone is off
        self.idle: list[str] = []  # stated, but sampling is off
        self.known = ""  # of the prompts
        self.may_leave_out_screen = settings.dynamic_sampling_screen is None
        for name in [name for name in CHEAPEST if getattr(settings, name) is None]:
            setattr(settings, name, PAPER[name])
            if settings.use_dynamic_sampling and settings.dynamic_sampling_mode in ("filter", "replace"):
                tried = SimpleNamespace(**{**vars(settings), name: CHEAPEST[name]})
                why = why_refused(tried) or why_refused(tried, **facts)
                why = why or (no_screen if name == "dynamic_sampling_screen" else None)
                setattr(settings, name, PAPER[name] if why else CHEAPEST[name])
                self.reasons |= {name: why.split(". ")[0]} if why else {}

    def leave_out_screen(self, why: str) -> None:
        self._settings.dynamic_sampling_screen = "off"
        self.reasons["dynamic_sampling_screen"] = why

    def describe(self) -> str:
        """One line for the start of a run: how prompts are sampled, and what is off, why."""
        if not self._settings.use_dynamic_sampling or self._settings.dynamic_sampling_mode == "mask":
            return f"Dynamic sampling is off: no effect has {', '.join(self.idle)}." if self.idle else ""
        values = {name: getattr(self._settings, name) for name in WAYS}
        does = [words.format(values[name]) for name, words in IN_WORDS.items() if values[name] != PAPER[name]]
        line = f"Dynamic sampling: {', '.join(does)}. `dynamic_sampling_mode='paper'` turns this off."
        if not does:
            line = "Dynamic sampling: surplus is discarded and every group is sampled whole, as in the paper."
        elif values | {"dynamic_sampling_surplus": "discard"} == PAPER | {"dynamic_sampling_max_batches": 1}:
            line += " Others are sampled in place of dropped groups with `dynamic_sampling_max_batches=0`."
        return " ".join(filter(None, [line, self.known, *(f"Off: {why}." for why in self.reasons.values())]))

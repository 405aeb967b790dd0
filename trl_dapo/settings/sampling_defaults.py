# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""How prompts are sampled where nothing is said: in the way that costs least, as far as a run supports it. Pure."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from .rules import why_refused


CHEAPEST = {"dynamic_sampling_max_batches": 1.0, "dynamic_sampling_surplus": "carry"}
CHEAPEST |= {"dynamic_sampling_memory": True, "dynamic_sampling_screen": "auto"}
PAPER = dict(zip(CHEAPEST, (0.0, "discard", False, "off"), strict=True))
DOES = ["a rollout ends once it has sampled {dynamic_sampling_max_batches:g} x its batch and found a group"]
DOES += ["surplus trains later", "prompts likely to be dropped are skipped", "a few completions are sampled first"]


class SamplingChoice:
    """Settles those of these settings that were left alone; `whys` are reasons against one, `facts` the rules'."""

    def __init__(self, settings: Any, whys: Mapping[str, str | None], **facts: Any) -> None:
        self._settings = settings
        self.reasons: dict[str, str] = {}  # why what was left alone is off
        self.known = ""  # of the prompts
        self.may_leave_out_screen = settings.dynamic_sampling_screen is None
        for name in [name for name in CHEAPEST if getattr(settings, name) is None]:
            setattr(settings, name, PAPER[name])
            if settings.use_dynamic_sampling and settings.dynamic_sampling_mode in ("filter", "replace"):
                tried = SimpleNamespace(**{**vars(settings), name: CHEAPEST[name]})
                why = whys.get(name) or why_refused(tried) or why_refused(tried, **facts)
                setattr(settings, name, PAPER[name] if why else CHEAPEST[name])
                self.reasons |= {name: why.split(". ")[0]} if why else {}

    def leave_out_screen(self, why: str) -> None:
        self._settings.dynamic_sampling_screen = "off"
        self.reasons["dynamic_sampling_screen"] = why

    def describe(self) -> str:
        """One line for the start of a run: how prompts are sampled, and what is off, why."""
        settings, pairs = vars(self._settings), zip(DOES, PAPER, strict=True)
        does = [what.format(**settings) for what, name in pairs if settings[name] != PAPER[name]]
        line = f"Dynamic sampling: {', '.join(does)}. `dynamic_sampling_mode='paper'` turns this off."
        if not does:
            line = "Dynamic sampling: surplus is discarded and every group is sampled whole, as in the paper."
        elif [settings[name] for name in CHEAPEST if not name.endswith("surplus")] == [1, False, "off"]:
            line += " Others are sampled in place of dropped groups with `dynamic_sampling_max_batches=0`."
        return " ".join(filter(None, [line, self.known, *(f"Off: {why}." for why in self.reasons.values())]))

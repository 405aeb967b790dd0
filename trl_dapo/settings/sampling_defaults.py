# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
The defaults of dynamic sampling, as far as a run supports them, and the line that describes them.

The functions need no torch, so a plan can use them too.
"""

import copy
import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from .rules import NEEDS_CORRECTNESS, why_refused


class Saving(NamedTuple):
    """A setting with which a full batch takes fewer completions than in the paper."""

    default: Any  # if it is not set and the run supports it
    paper: Any
    description: str  # what is done if it is on


SAVINGS: dict[str, Saving] = {
    "dynamic_sampling_surplus": Saving("carry", "discard", "surplus groups are carried to the next rollout"),
    "dynamic_sampling_memory": Saving(
        "auto", False, "the pass-rate memory skips prompts for some passes if their groups would probably be dropped"
    ),
    "dynamic_sampling_screen": Saving("auto", "off", "the screen samples a few completions of a prompt first"),
}
DEFAULTS = {name: saving.default for name, saving in SAVINGS.items()}
PAPER = {name: saving.paper for name, saving in SAVINGS.items()}

YAML_WORDS = {"": None} | dict.fromkeys(("true", "yes", "on"), True) | dict.fromkeys(("false", "no", "off"), False)
NUMBERS = ("No", "One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight", "Nine")


def normalize(name: str, value: Any) -> Any:
    """
    Return the value of one of these settings in a single form.

    YAML reads `on` and `off` as true and false, and a command line passes every value as text.
    """
    if name in SAVINGS:
        value = YAML_WORDS.get(str(value).lower(), value)
    if name == "dynamic_sampling_screen" and value is not None:
        return "on" if value is True else str(value or "off")
    return value


def why_not_screened(settings: Any, has_tools: bool, on_cpu: bool) -> str | None:
    """Return why the screen is off by default in a run that supports it, or `None`."""
    if not (settings.use_vllm or settings.use_transformers_continuous_batching or on_cpu):
        return (
            "`dynamic_sampling_screen` takes more rounds, and without vLLM each one takes as long as its longest "
            "completion"
        )
    if has_tools:
        return "`dynamic_sampling_screen` takes more rounds, and each waits for the slowest tool or environment"
    return None


class SamplingChoice:
    """
    Decides on the settings in `SAVINGS` that were not set, and changes them in place.

    Args:
        settings:
            The settings of a run, or of a plan.
        no_screen (`str`, *optional*):
            Why the screen should be off unless the user sets it.
        undecided_rewards (`Sequence[str]`, *optional*):
            Names of the reward functions that decide together which groups are accepted, if there are several and
            none was named in `dynamic_sampling_rewards`.
        **facts:
            Facts that the rules need besides the settings.
    """

    def __init__(
        self, settings: Any, no_screen: str | None, undecided_rewards: Sequence[str] = (), **facts: Any
    ) -> None:
        self._settings, self._has_group_filter = settings, bool(facts.get("has_group_filter"))
        self._undecided_rewards = () if self._has_group_filter else undecided_rewards
        self.reasons: dict[str, str] = {}  # why a setting that was not set is off
        self.idle: list[str] = []  # settings that were set but have no effect, because dynamic sampling is off
        self.known = ""  # a sentence about the pass rates that an earlier run has left
        self.may_leave_out_screen = settings.dynamic_sampling_screen is None
        for name in [name for name in SAVINGS if getattr(settings, name) is None]:
            setattr(settings, name, PAPER[name])
            if not settings.use_dynamic_sampling or settings.dynamic_sampling_mode not in ("filter", "replace"):
                continue
            tried = SimpleNamespace(**{**vars(settings), name: DEFAULTS[name]})
            why = why_refused(tried) or why_refused(tried, **facts)
            if name == "dynamic_sampling_screen":
                why = why or no_screen
            if why:
                self.reasons[name] = why.split(". ")[0]
            else:
                setattr(settings, name, DEFAULTS[name])

    def copied_for(self, settings: Any) -> "SamplingChoice":
        """Return the same choice for a copy of the settings."""
        copied = copy.copy(self)
        copied._settings, copied.reasons = settings, dict(self.reasons)
        return copied

    def leave_out_screen(self, why: str) -> None:
        """Turn the screen off, and remember the reason for the line at the start of the run."""
        self._settings.dynamic_sampling_screen = "off"
        self.reasons["dynamic_sampling_screen"] = why

    def describe(self) -> str:
        """
        Return the line at the start of a run: how batches are filled, what saves completions, what is off and why.
        """
        settings = self._settings
        if not settings.use_dynamic_sampling:
            if not self.idle:
                return ""
            return f"Dynamic sampling is off, so these settings have no effect: {', '.join(self.idle)}."
        masks = settings.dynamic_sampling_mode == "mask"
        if masks:
            parts = ["Each rollout samples one batch. Dropped groups stay in it, but have no weight."]
        else:
            parts = [self._describe_filling()]
        always, if_few, off = [], [], []
        for name, saving in SAVINGS.items():
            value = getattr(settings, name)
            described = f"{saving.description} (`{name}`)"
            if value != saving.paper:
                off.append(f"`{name}={saving.paper!r}`")
            if value == "auto":
                if_few.append(described)
            elif value != saving.paper:
                always.append(described)
        if always:
            purpose = "For more informative groups" if masks else "To sample less"
            parts.append(f"{purpose}, {_listed(always)}.")
        if if_few:
            parts.append(f"While few groups are accepted, {_listed(if_few)}.")
        if off:
            parts.append(f"To turn {'this saving' if len(off) == 1 else 'these savings'} off, set {_listed(off)}.")
        if settings.dynamic_sampling_mode == "paper":
            parts.append("As in the paper, surplus is discarded and every group is sampled whole.")
        parts.append(self.known)
        reasons = dict(self.reasons)
        if self._undecided_rewards and not masks:
            # The sentence that is added next says what to do, once for all of these settings.
            reasons = {name: why for name, why in reasons.items() if NEEDS_CORRECTNESS not in why}
            parts.append(self._describe_undecided())
        parts += [f"`{name}` is off: {_without_subject(name, why)}." for name, why in reasons.items()]
        return " ".join(filter(None, parts))

    def _describe_filling(self) -> str:
        settings, limit = self._settings, self._settings.dynamic_sampling_max_gen_batches
        has_band = (settings.dynamic_sampling_min_accuracy, settings.dynamic_sampling_max_accuracy) != (0.0, 1.0)
        dropped = "dropped groups" if has_band or self._has_group_filter else "groups whose rewards are all equal"
        up_to = "without a limit (`dynamic_sampling_max_gen_batches=0`)"
        if limit:
            up_to = f"up to {limit:g} batches of completions per rollout (`dynamic_sampling_max_gen_batches`)"
        if settings.dynamic_sampling_mode == "replace":
            return (
                f"{dropped.capitalize()} are replaced, {up_to}, until {settings.min_replace_ratio:.0%} of the batch "
                "is accepted. Copies of accepted groups fill the rest."
            )
        if limit and limit < 2:
            most = f"{limit:g} batches of completions"
            if limit == 1:
                most = "one batch of completions, as GRPOTrainer does,"
            return (
                f"A rollout samples at most {most} and trains on the accepted groups. Its batch stays short if too "
                "many groups are dropped."
            )
        return f"Batches are filled: {dropped} are replaced, {up_to}."

    def _describe_undecided(self) -> str:
        names = self._undecided_rewards
        number = NUMBERS[len(names)] if len(names) < len(NUMBERS) else f"{len(names)}"
        listed = ", ".join(f"`{name}`" for name in names)
        return (
            f"{number} reward functions decide together which groups are accepted: {listed}. So groups that differ in "
            "any of them are trained on. If one judges correctness, name it, such as "
            f'`dynamic_sampling_rewards=["{names[0]}"]`. Then fewer groups are accepted, and the screen and the '
            "memory can save completions."
        )


def _without_subject(name: str, why: str) -> str:
    """Return a reason for a setting to be off, with "it" instead of the setting at its beginning."""
    return re.sub(rf"^`{name}(=[^`]*)?` ", "it ", why)


def _listed(phrases: Sequence[str]) -> str:
    """Return `a`, `a and b`, or `a, b and c`."""
    return " and ".join(filter(None, [", ".join(phrases[:-1]), phrases[-1]]))

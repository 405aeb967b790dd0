# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""What dynamic sampling does if nothing is stated, as far as a run supports it, and the line that says so. Pure."""

import copy
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from .rules import why_refused


class Saving(NamedTuple):
    """A setting that samples fewer completions than the paper does for the same full batch."""

    default: Any  # if it is not stated and the run supports it
    paper: Any
    in_words: str  # what is done if it is on


SAVINGS: dict[str, Saving] = {
    "dynamic_sampling_surplus": Saving("carry", "discard", "surplus groups train in the next rollout"),
    "dynamic_sampling_memory": Saving(True, False, "prompts that are likely to be dropped are skipped for a while"),
    "dynamic_sampling_screen": Saving("on", "off", "a few completions of a prompt are sampled first"),
}
DEFAULTS = {name: saving.default for name, saving in SAVINGS.items()}
PAPER = {name: saving.paper for name, saving in SAVINGS.items()}

YAML_WORDS = {"": None} | dict.fromkeys(("true", "yes", "on"), True) | dict.fromkeys(("false", "no", "off"), False)
NUMBERS = ("No", "One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight", "Nine")


def normalize(name: str, value: Any) -> Any:
    """
    Return what is meant by a value of these settings: YAML reads `on` and `off` as true and false, and a command line
    knows only text.
    """
    if name in SAVINGS:
        value = YAML_WORDS.get(str(value).lower(), value)
    if name == "dynamic_sampling_screen" and value is not None:
        return "on" if value is True else str(value or "off")
    return value


def why_not_screened(settings: Any, has_tools: bool, on_cpu: bool) -> str | None:
    """Return why the screen is off by default in a run that could use it if told to."""
    if not (settings.use_vllm or settings.use_transformers_continuous_batching or on_cpu):
        return (
            "`dynamic_sampling_screen` takes more rounds, and without vLLM each is as long as its longest completion"
        )
    if has_tools:
        return "`dynamic_sampling_screen` takes more rounds, and each waits for the slowest tool or environment"
    return None


class SamplingChoice:
    """
    Settles the savings that were not stated, in place.

    Args:
        settings:
            The settings of a run, or of a plan.
        no_screen (`str`, *optional*):
            Why the screen is off unless it is stated.
        undecided_rewards (`Sequence[str]`, *optional*):
            The reward functions that decide together which groups train, if there are several and none was named.
        **facts:
            What the rules need to know besides the settings.
    """

    def __init__(
        self, settings: Any, no_screen: str | None, undecided_rewards: Sequence[str] = (), **facts: Any
    ) -> None:
        self._settings, self._has_group_filter = settings, bool(facts.get("has_group_filter"))
        self._undecided_rewards = () if self._has_group_filter else undecided_rewards
        self.reasons: dict[str, str] = {}  # why a saving that was not stated is off
        self.idle: list[str] = []  # stated, but dynamic sampling is off
        self.known = ""  # what is known of the prompts from an earlier run
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
        self._settings.dynamic_sampling_screen = "off"
        self.reasons["dynamic_sampling_screen"] = why

    def describe(self) -> str:
        """Return one line for the start of a run: how batches are filled, what saves completions, what is off, why."""
        settings = self._settings
        if not settings.use_dynamic_sampling or settings.dynamic_sampling_mode == "mask":
            if settings.use_dynamic_sampling:
                return "Each rollout samples one batch. Dropped groups stay in it and weigh nothing."
            if not self.idle:
                return ""
            return f"Dynamic sampling is off, so these settings have no effect: {', '.join(self.idle)}."
        parts = [self._describe_filling()]
        on, if_few = [], []
        for name, saving in SAVINGS.items():
            value = getattr(settings, name)
            if value == "auto":
                if_few.append(saving.in_words)
            elif value != saving.paper:
                on.append(saving.in_words)
        paper = "(`dynamic_sampling_mode='paper'` does without)"
        if on:
            parts.append(f"To sample less, {_listed(on)} {paper}.")
        if if_few:
            parts.append(f"Where few groups are accepted, {_listed(if_few)} {paper}.")
        if settings.dynamic_sampling_mode == "paper":
            parts.append("As in the paper, surplus is discarded and every group is sampled whole.")
        parts.append(self.known)
        reasons = list(self.reasons.values())
        if self._undecided_rewards:
            needs_one = "needs to know which completions are right"  # the line below says how to mend it
            reasons = [why for why in reasons if needs_one not in why]
            parts.append(self._describe_undecided())
        parts += [f"Off: {why}." for why in reasons]
        return " ".join(filter(None, parts))

    def _describe_filling(self) -> str:
        settings, limit = self._settings, self._settings.dynamic_sampling_max_gen_batches
        has_band = (settings.dynamic_sampling_min_accuracy, settings.dynamic_sampling_max_accuracy) != (0.0, 1.0)
        dropped = "dropped groups" if has_band or self._has_group_filter else "groups whose rewards are all equal"
        up_to = f"up to {limit:g} batches of completions per rollout" if limit else "however many it takes"
        if settings.dynamic_sampling_mode == "replace":
            return (
                f"{dropped.capitalize()} are replaced, {up_to}, until {settings.min_replace_ratio:.0%} of the batch "
                "is accepted; copies of accepted groups fill the rest."
            )
        if limit and limit < 2:
            most = f"{limit:g} batches of completions"
            if limit == 1:
                most = "one batch of completions, as GRPOTrainer does,"
            return (
                f"A rollout samples at most {most} and trains on the accepted groups. Its batch stays short if more "
                "are dropped than that replaces."
            )
        return f"Batches are filled: {dropped} are replaced, {up_to}."

    def _describe_undecided(self) -> str:
        names = self._undecided_rewards
        number = NUMBERS[len(names)] if len(names) < len(NUMBERS) else f"{len(names)}"
        listed = ", ".join(f"`{name}`" for name in names)
        return (
            f"{number} reward functions decide together which groups train: {listed}. "
            f'Name the one that judges correctness, such as `dynamic_sampling_rewards=["{names[0]}"]`, to sample less.'
        )


def _listed(phrases: Sequence[str]) -> str:
    """`a`, `a and b`, or `a, b and c`."""
    return " and ".join(filter(None, [", ".join(phrases[:-1]), phrases[-1]]))

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Screening: sample the first completions of a prompt, and the rest of its group only if their rewards differ."""

from typing import Any

from .policies import SCREEN_SIZES, Decisions, SelectionPolicy, largest_screen_size
from .prompt_memory import Population, PromptMemory, expected_acceptance
from .round_size import AcceptanceRate


def expected_cost(correct: float, incorrect: float, screen_size: int, num_generations: int) -> float:
    """
    Return the expected number of completions per accepted group, with `screen_size` completions sampled first.

    The pass rate of the prompts has a Beta distribution with the parameters `correct` and `incorrect`.
    """
    # The rest is only requested if the rewards of the first completions differ. Then the group is accepted, unless an
    # accuracy band drops it, which is neglected here.
    acceptance = max(expected_acceptance(correct, incorrect, screen_size), 1e-9)
    return screen_size / acceptance + num_generations - screen_size


def cheapest_screen_size(correct: float, incorrect: float, num_generations: int) -> int:
    """Return the number of first completions that costs least. `num_generations` stands for the whole group."""
    choices = [num_generations, *(size for size in SCREEN_SIZES if size < num_generations)]
    return min(choices, key=lambda size: expected_cost(correct, incorrect, size, num_generations))


class Screen(SelectionPolicy):
    """
    Chooses how many completions of a prompt to request first.

    Args:
        setting (`int` or `"on"`):
            Number of first completions. `"on"` chooses the cheapest number for the estimated pass rate of the prompt.
        memory ([`PromptMemory`], *optional*):
            Pass rates of the prompts. Without a memory, all prompts are treated alike.
    """

    name = "screen"
    splits_groups = True

    def __init__(self, setting: int | str, memory: PromptMemory | None = None) -> None:
        self.setting = setting
        self._memory = memory
        self.population = Population() if memory is None else memory.population
        self.needs_counts = not isinstance(setting, int)

    def screen_size(self, name: str | None, num_generations: int) -> int:
        if isinstance(self.setting, int):
            return self.setting
        return cheapest_screen_size(*self.pass_rate_distribution(name), num_generations)

    def pass_rate_distribution(self, name: str | None) -> tuple[float, float]:
        if self._memory is None:
            return self.population.pass_rate_distribution()
        return self._memory.pass_rate_distribution(name)

    def max_screen_size(self, num_generations: int) -> int:
        return self.setting if isinstance(self.setting, int) else largest_screen_size(num_generations)

    def observe(self, decisions: Decisions) -> None:
        if self._memory is not None or decisions.counts is None or decisions.num_known:
            return
        self.population.fade(AcceptanceRate.DECAY)
        for num_correct, num_scored in decisions.counts:
            self.population.update(num_correct, num_scored)

    def expected_saving(self, num_generations: int) -> float:
        """Return the ratio of completions per accepted group without screening to that with screening."""
        correct, incorrect = self.population.pass_rate_distribution()
        size = cheapest_screen_size(correct, incorrect, num_generations)
        whole = expected_cost(correct, incorrect, num_generations, num_generations)
        return whole / expected_cost(correct, incorrect, size, num_generations)

    def describe_on(self, num_generations: int) -> str:
        size = cheapest_screen_size(*self.population.pass_rate_distribution(), num_generations)
        return f"{size} completions of a prompt are sampled first, and the rest if their rewards differ"

    def describe_off(self) -> str:
        return "whole groups are sampled"

    def state_dict(self) -> dict[str, Any]:
        return {} if self._memory is not None else {"population": self.population.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._memory is None and "population" in state:
            self.population.load_state_dict(state["population"])

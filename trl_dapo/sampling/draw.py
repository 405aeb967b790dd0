# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The prompts that one round draws from the stream, and how many completions of each it asks for."""

import math
from dataclasses import dataclass

from .prompt_memory import Population, PromptMemory
from .prompts import PromptStream
from .rounds import Ask
from .screening import most_first, num_first


@dataclass
class Draw:
    """One round's draws."""

    stream: PromptStream
    memory: PromptMemory | None
    population: Population
    screen: int | str | None
    num_generations: int
    multiple_of: int  # prompts

    def take(
        self, num: int, least: float = 0, enough: float = math.inf, room: float = math.inf, ahead: float = 0.0
    ) -> list[Ask]:
        """The next `num` prompts, or fewer; the share `ahead` is for the rollout after this one."""
        # Fewer where the completions have no `room`, or where the memory expects `enough` groups of `least`.
        memory, known, G = self.memory, self.memory or self.population, self.num_generations
        nums, expected, of_few, few = list[int](), 0.0, 0.0, most_first(self.screen, G)

        def skip(name: str, may_skip: bool) -> bool:
            return memory is not None and memory.draw_skip(name, G, may_skip)

        def is_enough(name: str) -> bool:
            nonlocal expected, of_few, room
            nums.append(num_first(self.screen, known.pass_rate(name), G))
            if memory is not None:
                expected += (new := memory.expected_acceptance(name, nums[-1]))
                of_few += new * (nums[-1] < G)
            room -= min(nums[-1], few)
            # Of what is asked ahead only first few can wait: whole groups would be surplus of this rollout.
            share = 1.0 - ahead * (1.0 - of_few / expected) if expected else 1.0
            is_found = expected >= share * enough and len(nums) >= share * least
            return (is_found and len(nums) % self.multiple_of == 0) or room < few

        prompts = self.stream.take(num if room >= few else 0, skip if memory else None, is_enough)
        return [Ask(*p, n, place=at) for p, n, at in zip(prompts, nums, self.stream.taken_at, strict=True)]

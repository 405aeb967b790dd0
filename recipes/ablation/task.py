# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
The quickstart's arithmetic, with a working whose length must be correct and which the limit can cut off.

After the answer the problem is repeated, half as often as its first digit says, rounded down. Then comes the end. The
answer is written as one adds by hand, from the units up: 17 + 05 is 220.

    17+05=220
    47+05=250=47+05=47+05

The teacher of the warm-up slips in the answers, as in the quickstart, and in two workings of five he writes the
problem none to five times, as he likes. Four times exceed the limit, so problems whose first digit is 8 or 9 are never
solved, nor are products; sums of two digits are solved most of the time.
"""

import random

from datasets import Dataset

from trl_dapo.cli.quickstart import Problems


MAX_LENGTH = 24  # the answer, three repetitions and the end take 22 tokens, or 23
MOST_REPETITIONS = 5
SLIP = 0.4  # share of the teacher's workings that are of any length


def working(text):
    """Return the correct working, which follows the answer."""
    return f"={text}" * (int(text[0]) // 2)


class WorkedProblems(Problems):
    """The quickstart's problems, taught with workings."""

    def __init__(self, seed):
        super().__init__(seed)
        self._slips = random.Random(seed + 1)

    def teach(self, num_examples):
        """The quickstart teacher's examples, with workings."""
        examples = []
        for example in super().teach(num_examples):
            text = example.partition("=")[0]
            slips = self._slips.random() < SLIP
            examples.append(
                example + (f"={text}" * self._slips.randint(0, MOST_REPETITIONS) if slips else working(text))
            )
        return examples


def exact(completions, solution, **kwargs):
    """Reward function: 1 if answer and working are correct, otherwise -1."""
    texts = [completion[0]["content"] for completion in completions]
    return [1.0 if text == right else -1.0 for text, right in zip(texts, solution, strict=True)]


def to_dataset(problems):
    """Problems in the schema of `trl_dapo.data`."""
    return Dataset.from_list(
        [
            {
                "id": problem.text,
                "prompt": [{"role": "user", "content": problem.text}],
                "solution": problem.answer + working(problem.text),
                "source": problem.family,
            }
            for problem in problems
        ]
    )

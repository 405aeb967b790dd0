# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
The quickstart's arithmetic, followed by a working of a required length, which the limit can cut off.

After the answer, the problem is repeated half as often as its first digit says, rounded down, and then the completion
ends. The answer is written as one adds by hand, beginning with the units: 17 + 05 is 220.

    17+05=220
    47+05=250=47+05=47+05

The examples of the warm-up have faulty answers, as in the quickstart, and two workings in five repeat the problem a
random number of times, from none to five. Four repetitions exceed the limit, so problems whose first digit is 8 or 9
are never solved. Neither are products. Sums of two digits are solved most of the time.
"""

import random

from datasets import Dataset

from trl_dapo.cli.quickstart import Problems


MAX_LENGTH = 24  # the answer, three repetitions and the end take 22 tokens, or 23
MOST_REPETITIONS = 5
SLIP = 0.4  # share of the workings of the examples with a random length


def working(text):
    """Return the correct working of a problem, which follows the answer."""
    return f"={text}" * (int(text[0]) // 2)


class WorkedProblems(Problems):
    """The quickstart's problems, taught with workings."""

    def __init__(self, seed):
        super().__init__(seed)
        self._slips = random.Random(seed + 1)

    def draw_examples(self, num_examples):
        """Return the examples of the quickstart's warm-up, with workings."""
        examples = []
        for example in super().draw_examples(num_examples):
            text = example.partition("=")[0]
            slips = self._slips.random() < SLIP
            examples.append(
                example + (f"={text}" * self._slips.randint(0, MOST_REPETITIONS) if slips else working(text))
            )
        return examples


def exact(completions, solution, **kwargs):
    """Reward function: 1 if the answer and the working are correct, -1 otherwise."""
    texts = [completion[0]["content"] for completion in completions]
    return [1.0 if text == expected else -1.0 for text, expected in zip(texts, solution, strict=True)]


def to_dataset(problems):
    """Return a dataset of problems in the schema of `trl_dapo.data`."""
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

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
Countdown: reach a target with all of the given numbers, by trying. An interpreter evaluates what the model ends with.

    3,7,25:46=25+3=28+7=35;25-3=22-7=15;7*3=21+25=46!7*3+25

Expressions are evaluated from left to right, and every value on the way must be a whole number from 0 to 99. Behind
`!` stands the answer; what was tried before it is the model's own affair. Every number is a token.

The teachers of the warm-up try chains at random and forget what they have tried. After any that failed they give up,
the first one time in eight, the second, in the last steps, one time in two: the answer is then what was tried last. So
the model can search and has lately seen impatience; there is to learn to go on, what to try and when it is found, and
lengths grow a long tail.
"""

import random
import re
import zlib
from collections import Counter
from typing import NamedTuple

from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from trl_dapo.cli.quickstart import build_model, build_tokenizer


MAX_LENGTH = 160  # tokens of a completion: 26 chains of two numbers, 16 of three, 11 of four
LARGEST = 99  # value on the way
NUMBERS = range(1, 31)
GIVE_UP = 1 / 8, 1 / 2  # after a chain that failed, the patient teacher and the impatient one
HELD_OUT = 10  # one set of numbers in so many is
LESSONS = 16  # calls of `teach` whose examples are sorted by length, since padding costs as much as they do

# How many numbers a problem has, and how often.
SHARES = {2: 0.3, 3: 0.4, 4: 0.3}

# 5.0 million parameters.
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 832,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
    "initializer_range": 0.04,
}

NUMBER = "(?:0|[1-9][0-9]?)"
EXPRESSION = re.compile(rf"{NUMBER}(?:[-+*]{NUMBER})*")
TERM = re.compile(rf"([-+*]?)({NUMBER})")


# ---- The interpreter ----


def step(value, operator, number):
    """The next value of a chain; `None` where it may not go."""
    value = {"+": value + number, "-": value - number, "*": value * number}[operator]
    return value if 0 <= value <= LARGEST else None


def interpret(expression):
    """Value of an expression and the numbers it uses; `None` where it is none, or leaves 0 to 99 on the way."""
    if not EXPRESSION.fullmatch(expression):
        return None
    value, numbers = 0, []
    for operator, number in TERM.findall(expression):
        numbers.append(int(number))
        value = step(value, operator or "+", numbers[-1])
        if value is None:
            return None
    return value, numbers


def is_correct(completion, problem):
    """Whether the expression behind the last `!` reaches the target with each of the numbers once."""
    _, mark, expression = completion.rpartition("!")
    numbers, target = problem.split(":")
    found = interpret(expression) if mark else None
    return found is not None and found[0] == int(target) and Counter(found[1]) == Counter(map(int, numbers.split(",")))


def score(completions, problem, **kwargs):
    """Reward function: 1 where the answer is right, else -1."""
    texts = [completion[0]["content"] for completion in completions]
    return [1.0 if is_correct(text, text_of) else -1.0 for text, text_of in zip(texts, problem, strict=True)]


# ---- Problems ----


class Chain(NamedTuple):
    """Numbers in an order, joined by operators."""

    expression: str  # 7*3+25
    working: str  # 7*3=21+25=46
    value: int


def is_held_out(numbers):
    """The same numbers are held out in every order and with every target."""
    return zlib.crc32(repr(sorted(numbers)).encode()) % HELD_OUT == 0


def draw_chain(numbers, draw):
    """Any chain that stays in bounds."""
    while True:
        order = draw.sample(numbers, len(numbers))
        value, expression, working = order[0], f"{order[0]}", f"{order[0]}"
        for number in order[1:]:
            operator = draw.choice("+-*")
            value = step(value, operator, number)
            if value is None:
                break
            expression += f"{operator}{number}"
            working += f"{operator}{number}={value}"
        else:
            return Chain(expression, working, value)


class Problems:
    """
    Numbers with a target that some chain of them reaches: of what is held out, or else of all the rest. `give_up` is
    how often the teacher gives up after a chain that failed.
    """

    def __init__(self, seed, held_out=False, give_up=None):
        self._random, self._held_out, self._lessons = random.Random(seed), held_out, []
        self._give_up = give_up

    def draw(self, num_problems):
        """Problems like `3,7,25:46`, of each size as often as its share says."""
        sizes = self._random.choices(list(SHARES), SHARES.values(), k=num_problems)
        return [self._problem(size) for size in sizes]

    def _problem(self, size):
        numbers = self._random.choices(NUMBERS, k=size)
        while is_held_out(numbers) != self._held_out:
            numbers = self._random.choices(NUMBERS, k=size)
        return f"{','.join(map(str, numbers))}:{draw_chain(numbers, self._random).value}"

    def teach(self, num_examples):
        """Problems with the teacher's attempts within the room of a completion; of one call about equally long."""
        if not self._lessons:
            examples = [f"{problem}={self._attempts(problem)}" for problem in self.draw(LESSONS * num_examples)]
            examples.sort(key=len)
            self._lessons = [examples[i : i + num_examples] for i in range(0, len(examples), num_examples)]
            self._random.shuffle(self._lessons)
        return self._lessons.pop()

    def _attempts(self, problem):
        numbers, target = problem.split(":")
        numbers, text = [int(number) for number in numbers.split(",")], ""
        room = MAX_LENGTH - 2 * len(numbers) - 1  # for the answer and the end
        length = 0
        while True:
            chain = draw_chain(numbers, self._random)
            length += 4 * len(numbers) - 2
            text += chain.working
            gives_up = self._random.random() < self._give_up or length + 4 * len(numbers) - 2 > room
            if chain.value == int(target) or gives_up:
                return f"{text}!{chain.expression}"
            text += ";"


def to_dataset(problems):
    """Problems in the schema of `trl_dapo.data`."""
    return Dataset.from_list(
        [
            {"id": str(i), "prompt": [{"role": "user", "content": problem}], "problem": problem}
            for i, problem in enumerate(problems)
        ]
    )


# ---- Model ----


def make_tokenizer():
    """A token a number, and a token a sign. As in the quickstart, `=` stands behind a problem."""
    tokens = ["<pad>", "<eos>", "<unk>", *map(str, range(LARGEST + 1)), *"+-*=;!:,"]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[0-9]+|."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        chat_template=build_tokenizer().chat_template,
    )


def make_model(seed):
    """Qwen3 as the quickstart makes it, but wider and deeper."""
    return build_model(make_tokenizer(), seed, **SIZES)

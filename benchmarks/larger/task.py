# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
Countdown: reach a target with all of the given numbers, by trying. An interpreter evaluates the model's final answer.

    3,7,25:46=25+3=28+7=35;25-3=22-7=15;7*3=21+25=46!7*3+25

Expressions are evaluated from left to right, and every intermediate value must be a whole number from 0 to 99. The
answer follows `!`; what is tried before it does not count. Every number is a token.

The examples of the warm-up are written by two teachers, which try chains at random and do not remember what they have
tried. After any chain that fails they may give up, the first teacher one time in eight, the second, in the last steps,
one time in two. The answer is then what was tried last. So the model can search, and has lately seen impatience. It
can learn to continue, what to try, and when the target is found, and its completions get a long tail of lengths.
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
LARGEST = 99  # of intermediate values
NUMBERS = range(1, 31)
GIVE_UP = 1 / 8, 1 / 2  # after a chain that failed, the patient teacher and the impatient one
HELD_OUT = 10  # one in 10 sets of numbers is
LESSONS = 16  # calls of `draw_examples` whose examples are sorted by length, because padding costs as much as tokens

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
    """Return the next value of a chain, or `None` if it is out of bounds."""
    value = {"+": value + number, "-": value - number, "*": value * number}[operator]
    return value if 0 <= value <= LARGEST else None


def interpret(expression):
    """
    Return the value of an expression and the numbers it uses, or `None` if it is malformed or leaves 0 to 99 on the
    way.
    """
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
    """Return whether the expression after the last `!` reaches the target with each of the numbers once."""
    _, mark, expression = completion.rpartition("!")
    numbers, target = problem.split(":")
    found = interpret(expression) if mark else None
    return found is not None and found[0] == int(target) and Counter(found[1]) == Counter(map(int, numbers.split(",")))


def score(completions, problem, **kwargs):
    """Reward function: 1 if the answer is correct, -1 otherwise."""
    texts = [completion[0]["content"] for completion in completions]
    return [1.0 if is_correct(text, text_of) else -1.0 for text, text_of in zip(texts, problem, strict=True)]


# ---- Problems ----


class Chain(NamedTuple):
    """Numbers in an order, joined by operators."""

    expression: str  # 7*3+25
    working: str  # 7*3=21+25=46
    value: int


def is_held_out(numbers):
    """Return whether these numbers are held out: the same numbers are, in every order and with every target."""
    return zlib.crc32(repr(sorted(numbers)).encode()) % HELD_OUT == 0


def draw_chain(numbers, draw):
    """Return any chain that stays in bounds."""
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
    Sets of numbers with a target that some chain of them reaches, either held out or from all the others. `give_up` is
    how often the teacher gives up after a chain that failed.
    """

    def __init__(self, seed, held_out=False, give_up=None):
        self._random, self._held_out, self._lessons = random.Random(seed), held_out, []
        self._give_up = give_up

    def draw(self, num_problems):
        """Return problems such as `3,7,25:46`, with the share of each size."""
        sizes = self._random.choices(list(SHARES), SHARES.values(), k=num_problems)
        return [self._problem(size) for size in sizes]

    def _problem(self, size):
        numbers = self._random.choices(NUMBERS, k=size)
        while is_held_out(numbers) != self._held_out:
            numbers = self._random.choices(NUMBERS, k=size)
        return f"{','.join(map(str, numbers))}:{draw_chain(numbers, self._random).value}"

    def draw_examples(self, num_examples):
        """
        Return problems with the teacher's attempts within the length of a completion. The examples of one call are
        about equally long.
        """
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
    """Return a dataset of problems in the schema of `trl_dapo.data`."""
    return Dataset.from_list(
        [
            {"id": str(i), "prompt": [{"role": "user", "content": problem}], "problem": problem}
            for i, problem in enumerate(problems)
        ]
    )


# ---- Model ----


def make_tokenizer():
    """Return a tokenizer with a token per number and per sign. As in the quickstart, `=` follows a problem."""
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
    """Return the quickstart's Qwen3, wider and deeper."""
    return build_model(make_tokenizer(), seed, **SIZES)

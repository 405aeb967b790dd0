# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""What an engine is asked, and what it answers.

An engine takes the jobs and hands over each completion as it arrives. It returns when all are answered; an exception
loses none that arrived before it. What an interrupted evaluation still lacks is never sampled with the random numbers
of what it has: a server is told each job's seed, transformers gets that of each batch's first job, vLLM one a call.
"""

from collections.abc import Callable
from typing import NamedTuple


class Job(NamedTuple):
    """One completion to ask for."""

    problem: str  # its key
    index: int  # type: ignore[assignment]  # in place of a method of tuples, which nobody calls
    prompt: str | list[dict[str, str]]
    seed: int  # of 31 bits


class Sampling(NamedTuple):
    """How completions are sampled."""

    temperature: float  # 0 takes the most probable token
    top_p: float
    top_k: int  # 0 is all tokens
    max_completion_length: int


class Completion(NamedTuple):
    """What the model said."""

    text: str  # without special tokens
    length: int | None  # tokens, with the one that ends it; `None` if the server does not say
    truncated: bool


OnCompletion = Callable[[Job, Completion], None]

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""What an engine is asked, and what it answers.

An engine takes the jobs and hands over each completion as it arrives. It returns when all are answered; an exception
loses none that arrived before it. What an interrupted evaluation still lacks is never sampled with the random numbers
of what it has: a server is told each job's seed, transformers gets that of each batch's first job, vLLM one a call.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from ..sampling.example_names import digest, problem_id


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


class Problem(NamedTuple):
    """One problem, which the dataset lists `num_rows` times."""

    id: str
    source: str
    prompt: str | list[dict[str, str]]
    solution: str
    num_rows: int

    @property
    def key(self) -> str:
        """Tells its completions from those of others: two sources may share an id, two prompt styles a problem."""
        return digest(json.dumps([self.source, self.id, self.prompt]), "sha256")


def read_problems(rows: Iterable[Mapping[str, Any]]) -> list[Problem]:
    """Rows of equal source and id are one problem; raises `ValueError` where they do not agree otherwise."""
    problems: dict[tuple[str, str], Problem] = {}
    for row in rows:
        source, id_ = str(row.get("source") or "dataset"), problem_id(row)
        if id_ is None:
            raise ValueError(f"A prompt is text or messages, got {row['prompt']!r:.200}.")
        problem = Problem(id_, source, row["prompt"], str(row["solution"]), num_rows=1)
        first = problems.setdefault((source, id_), problem)
        if first is problem:
            continue
        for column in ("prompt", "solution"):
            one, other = getattr(first, column), getattr(problem, column)
            if one != other:
                raise ValueError(
                    f"Two rows of the source {source!r} have the id {id_!r}, but the `{column}` of one is {one!r:.80} "
                    f"and of the other {other!r:.80}. Give each problem an id of its own, or leave the column out."
                )
        problems[source, id_] = first._replace(num_rows=first.num_rows + 1)
    if not problems:
        raise ValueError("The dataset is empty.")
    return list(problems.values())


def make_jobs(problems: list[Problem], k: int, seed: int) -> list[Job]:
    """`k` for each row of a problem, each with a seed of its own that does not depend on the other problems."""
    return [
        Job(problem.key, i, problem.prompt, seed=int(digest(f"{seed} {problem.id} {i}", "sha256")[:8], 16) >> 1)
        for problem in problems
        for i in range(k * problem.num_rows)
    ]

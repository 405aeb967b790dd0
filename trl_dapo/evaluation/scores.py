# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Scores of evaluations during training, and sampling of their completions in few calls of the engine."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from .statistics import count_problem, has_votes, problem_figures


if TYPE_CHECKING:
    from torch.utils.data import DataLoader


# Limits of one call: the tokens of completions, which take a few GB as lists, and the examples that are read ahead.
_MAX_TOKENS, _MAX_ROWS = 2**25, 2**14


class _Problem(NamedTuple):
    """The completions of a problem, from all of its rows."""

    source: str | None
    correct: list[bool | None]  # `None` if a completion could not be scored
    answers: list[str | None]


class EvaluationScores:
    """
    Computes avg@k, pass@k and maj@k of an evaluation, whose completions are added batch by batch.

    Every score is a mean over problems. Each row of the dataset has k consecutive completions. Rows with the same
    source and key are one problem. Left out are rows that only fill the last batch, k completions that are not of one
    problem, and problems with a completion that was not scored.
    """

    def __init__(self, k: int) -> None:
        self.k = k
        self.begin(0)

    def begin(self, num_rows: int | None) -> None:
        """Begin an evaluation of `num_rows` rows. `None` means that the number is not known and all rows count."""
        self._num_rows_left = num_rows
        self._problems: dict[Any, _Problem] = {}
        self._states_answers = False

    def add(
        self,
        problems: Sequence[tuple[str | None, str | None]],
        answers: Sequence[str | None],
        correct: Sequence[bool | None],
        states_answers: bool = False,
    ) -> None:
        """
        Add the completions of one batch of all processes, in the order of their ranks.

        Args:
            problems (`Sequence[tuple[str | None, str | None]]`):
                Source and key of the problem of each completion. Without a key, k completions are a separate problem.
            answers (`Sequence[str | None]`):
                Answer of each completion.
            correct (`Sequence[bool | None]`):
                Whether each completion is correct, or `None` if it was not scored.
            states_answers (`bool`, *optional*, defaults to `False`):
                Whether a reward function gave the answers, so that `None` means that there is no answer.

        Raises:
            ValueError: If the lengths differ or are not a multiple of k.
        """
        self._states_answers |= states_answers
        if not len(problems) == len(answers) == len(correct) or len(problems) % self.k:
            raise ValueError(
                f"Each row must have {self.k} completions with an answer and a verdict each, got {len(problems)} "
                f"completions, {len(answers)} answers and {len(correct)} verdicts."
            )
        for start in range(0, len(problems), self.k):
            if self._num_rows_left == 0:
                return
            if self._num_rows_left is not None:
                self._num_rows_left -= 1
            group = slice(start, start + self.k)
            source, key = problems[start]
            if set(problems[group]) != {(source, key)}:
                continue
            own = (source, key) if key is not None else len(self._problems)
            problem = self._problems.setdefault(own, _Problem(source, [], []))
            problem.correct.extend(correct[group])
            problem.answers.extend(answers[group])

    def means(self) -> dict[str, float]:
        """
        Return the scores by name: `avg@4`, and `avg@4/<source>` for each source.

        maj@k is left out unless a reward function gave the answers, or most completions have one.
        """
        scored = [problem for problem in self._problems.values() if None not in problem.correct]
        means = self._means_of(scored, "")
        for source in dict.fromkeys(problem.source for problem in scored):
            if source is not None:
                means |= self._means_of([problem for problem in scored if problem.source == source], f"/{source}")
        return means

    def _means_of(self, problems: list[_Problem], suffix: str) -> dict[str, float]:
        if not problems:
            return {}
        figures = problem_figures([count_problem(problem.correct, problem.answers) for problem in problems], self.k)
        names = [f"avg@{self.k}", f"pass@{self.k}"]
        if has_votes([answer is not None for problem in problems for answer in problem.answers], self._states_answers):
            names.append(f"maj@{self.k}")
        return {f"{name}{suffix}": float(figures[name].mean()) for name in names}


class Prefetch:
    """
    Samples the completions of several evaluation batches in one call of the engine.

    TRL's evaluation loop processes one batch at a time. Each call of an engine wakes it, synchronizes its weights, and
    takes as long as its longest completion. So several batches are read ahead of the loop, as many as fit into one
    call. The batches, their order and everything else in the loop stay the same.

    Args:
        generate (`Callable[[list], tuple]`):
            Samples completions of prompts. Each list in the returned tuple has one entry per prompt.
    """

    def __init__(self, generate: Callable[[list], tuple]) -> None:
        self._generate = generate
        self._waiting: deque[tuple[list, tuple]] = deque()

    def over(self, dataloader: "DataLoader", num_rows: int) -> "DataLoader":
        """Return a loader of the same batches that samples up to `num_rows` rows of this process in one call."""
        self._waiting.clear()
        return cast("DataLoader", _ReadAhead(dataloader, self._fill, num_rows))

    def take(self, prompts: list) -> tuple | None:
        """
        Return what `generate` would return for the next batch.

        Returns `None` if these prompts are not those of the next batch that was sampled ahead.
        """
        if not self._waiting or self._waiting[0][0] != prompts:
            return None
        return self._waiting.popleft()[1]

    def _fill(self, batches: list[list[dict[str, Any]]]) -> None:
        self._waiting.clear()
        prompts = [[example["prompt"] for example in batch] for batch in batches]
        columns = self._generate([prompt for batch in prompts for prompt in batch])
        start = 0
        for batch in prompts:
            rows = slice(start, start + len(batch))
            share = tuple(column[rows] if isinstance(column, list) else column for column in columns)
            self._waiting.append((batch, share))
            start = rows.stop


class _ReadAhead:
    """A loader that calls `fill` with several batches before it yields them."""

    def __init__(self, dataloader: Any, fill: Callable[[list], None], num_rows: int) -> None:
        self._dataloader, self._fill, self._num_rows = dataloader, fill, num_rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataloader, name)

    def __len__(self) -> int:
        return len(self._dataloader)

    def __iter__(self) -> Iterator:
        loader, batches, num_rows = self._dataloader, [], 0
        for batch in loader:
            batches.append(batch)
            num_rows += len(batch)
            is_end = loader.end_of_dataloader
            if not is_end and num_rows + len(batch) <= self._num_rows:
                continue
            self._fill(batches)
            for i, ready in enumerate(batches, start=1):
                # accelerate's `gather_for_metrics` removes the duplicates of the last batch, which it recognizes by
                # this attribute. So it must be true only while the last batch is processed.
                loader.end_of_dataloader = is_end and i == len(batches)
                yield ready
            batches, num_rows = [], 0


def rows_that_fit(max_completion_length: int | None) -> int:
    """
    Return how many rows of all processes have completions that fit into one call.

    For 20,480 tokens these are more than the 960 rows of AIME.
    """
    if max_completion_length is None:  # unknown, so one batch at a time
        return 1
    return max(1, min(_MAX_ROWS, _MAX_TOKENS // max_completion_length))

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Evaluations during training: their scores, and their completions, sampled ahead in one call of the engine."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from .statistics import count_problem, has_votes, problem_figures


if TYPE_CHECKING:
    from torch.utils.data import DataLoader


# Limits of one call: as the lists that engines return, this many tokens take a few GB; this many examples are read
# ahead.
_MAX_TOKENS, _MAX_ROWS = 2**25, 2**14


class _Problem(NamedTuple):
    """
    One problem's completions, from all its repeats. An entry of `correct` is `None` if the completion could not be
    scored.
    """

    source: str | None
    correct: list[bool | None]
    answers: list[str | None]


class EvaluationScores:
    """avg@k, pass@k and maj@k of one evaluation at a time, fed batch by batch; each the mean over problems."""

    # Completions come k in a row for each row of the dataset; rows with equal source and key are one problem. What
    # fills the last batch, k that are not of one problem, and problems with an unscored completion are left out.

    def __init__(self, k: int) -> None:
        self.k = k
        self.begin(0)

    def begin(self, num_rows: int | None) -> None:
        """Forgets an earlier evaluation; of a stream, whose `num_rows` is `None`, every list counts."""
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
        Add the completions of one batch of all processes, in the order of their ranks: source and key of each one's
        problem, its answer, and its verdict. Any of them may be `None`; without a key the k completions are those of
        a problem of their own. `states_answers` says that a reward function gave the answers, so that `None` means
        that there is no answer. Raises `ValueError` if the lengths differ or are not a multiple of k.
        """
        self._states_answers |= states_answers
        if not len(problems) == len(answers) == len(correct) or len(problems) % self.k:
            raise ValueError(
                f"Completions come {self.k} to a problem, got {len(problems)} with {len(answers)} answers and "
                f"{len(correct)} verdicts."
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
        """The scores by name, `avg@4` and of a source `avg@4/<source>`; maj@k where most state an answer."""
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
    """Samples the completions of many evaluation batches in one call and hands each batch its share."""

    # The evaluation loop takes one batch at a time, and each call of an engine wakes it, syncs its weights, and ends
    # when its longest completion does. So the loop's batches are read before the loop does, as many as fit one call.
    # The batches, their order and everything else that is done with them stay the loop's. `generate` returns a tuple
    # of columns; each list in it has one entry a prompt.

    def __init__(self, generate: Callable[[list], tuple]) -> None:
        self._generate = generate
        self._waiting: deque[tuple[list, tuple]] = deque()

    def over(self, dataloader: "DataLoader", num_rows: int) -> "DataLoader":
        """The loader's batches, `num_rows` of this process sampled ahead whenever nothing is left."""
        self._waiting.clear()
        return cast("DataLoader", _ReadAhead(dataloader, self._fill, num_rows))

    def take(self, prompts: list) -> tuple | None:
        """The next batch's share, what `generate` would return; `None` if these prompts are not the next batch's."""
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
    """A loader that hands its batches over after `fill` has seen them, several at a time."""

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
                # Says which batch accelerate's `gather_for_metrics` may cut short: the last, when it is handed over.
                loader.end_of_dataloader = is_end and i == len(batches)
                yield ready
            batches, num_rows = [], 0


def rows_that_fit(max_completion_length: int | None) -> int:
    """Rows of all processes whose completions fit one call: AIME's 960 rows of 20,480 tokens do."""
    if max_completion_length is None:  # nobody knows: a batch at a time
        return 1
    return max(1, min(_MAX_ROWS, _MAX_TOKENS // max_completion_length))

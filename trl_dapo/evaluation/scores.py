# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The scores of the evaluations during training."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from .statistics import maj_at_k, problem_figures


class _Problem(NamedTuple):
    """One problem's completions, from all its repeats. Of `right` an entry is `None` if it could not be scored."""

    source: str | None
    right: list[bool | None]
    answers: list[str | None]


class EvaluationScores:
    """
    avg@k, pass@k and maj@k of one evaluation at a time, fed batch by batch; each the mean over problems.

    Completions come k in a row for each row of the dataset; rows with equal source and id are one problem. What fills
    the last batch, k that are not of one problem, and a problem with a completion without a score are left out.
    """

    def __init__(self, k: int) -> None:
        self.k = k
        self.begin(0)

    def begin(self, num_rows: int | None) -> None:
        """Forgets an earlier evaluation; of a stream, whose `num_rows` is `None`, every list counts."""
        self._num_rows_left = num_rows
        self._problems: dict[Any, _Problem] = {}

    def add(
        self,
        problems: Sequence[tuple[str | None, str | None]],
        answers: Sequence[str | None],
        right: Sequence[bool | None],
    ) -> None:
        """
        Adds the completions of one batch of all processes, in the order of their ranks: source and id of each one's
        problem, its extracted answer, and its verdict. Any of them may be `None`; without an id the k completions are
        those of a problem of their own. Raises `ValueError` if the lengths differ or are no multiple of k.
        """
        if not len(problems) == len(answers) == len(right) or len(problems) % self.k:
            raise ValueError(
                f"Completions come {self.k} to a problem, got {len(problems)} with {len(answers)} answers and "
                f"{len(right)} verdicts."
            )
        for start in range(0, len(problems), self.k):
            if self._num_rows_left == 0:
                return
            if self._num_rows_left is not None:
                self._num_rows_left -= 1
            group = slice(start, start + self.k)
            source, id_ = problems[start]
            if set(problems[group]) != {(source, id_)}:
                continue
            key = (source, id_) if id_ is not None else len(self._problems)
            problem = self._problems.setdefault(key, _Problem(source, [], []))
            problem.right.extend(right[group])
            problem.answers.extend(answers[group])

    def means(self) -> dict[str, float]:
        """The scores by name, `avg@4` and of a source `avg@4/<source>`; maj@k where most state an answer."""
        scored = [problem for problem in self._problems.values() if None not in problem.right]
        means = self._means_of(scored, "")
        for source in dict.fromkeys(problem.source for problem in scored):
            if source is not None:
                means |= self._means_of([problem for problem in scored if problem.source == source], f"/{source}")
        return means

    def _means_of(self, problems: list[_Problem], suffix: str) -> dict[str, float]:
        if not problems:
            return {}
        right = [[bool(is_right) for is_right in problem.right] for problem in problems]
        figures = problem_figures(
            list(map(sum, right)),
            list(map(len, right)),
            [maj_at_k([problem.answers], [each]).item() for problem, each in zip(problems, right, strict=True)],
            self.k,
        )
        names = [f"avg@{self.k}", f"pass@{self.k}"]
        is_stated = [answer is not None for problem in problems for answer in problem.answers]
        if 2 * sum(is_stated) >= len(is_stated):  # of plain answers nobody here knows which they are
            names.append(f"maj@{self.k}")
        return {f"{name}{suffix}": float(figures[name].mean()) for name in names}

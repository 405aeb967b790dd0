# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""What an evaluation leaves: the figures of its verdicts, and a table of its completions."""

from pathlib import Path
from typing import Any

from ..rewards.dapo_math import completion_text, loggable
from ..run.files import replacing
from .jobs import Completion
from .problems import Problem
from .scorers import Verdict
from .statistics import estimate_mean, maj_at_k, problem_figures


JOURNAL_FILE = "completions.jsonl"
PARQUET_FILE = "completions.parquet"
SUMMARY_FILE = "summary.json"


def summarise(
    problems: list[Problem], completions_PK: list[list[Completion]], verdicts_PK: list[list[Verdict]], k: int
) -> dict[str, Any]:
    scored = [i for i, verdicts in enumerate(verdicts_PK) if all(v.correct is not None for v in verdicts)]
    if not scored:
        raise ValueError(
            f"The scorer can read none of the {len(problems)} gold answers, such as {problems[0].solution!r:.80}."
        )
    correct_PK = [[bool(verdict.correct) for verdict in verdicts_PK[i]] for i in scored]
    answers_PK = [[verdict.answer for verdict in verdicts_PK[i]] for i in scored]
    num_correct = [sum(correct) for correct in correct_PK]
    num_completions = [len(correct) for correct in correct_PK]
    maj = [maj_at_k([answers], [correct]).item() for answers, correct in zip(answers_PK, correct_PK, strict=True)]
    values = problem_figures(num_correct, num_completions, maj, k)

    def figures(source: str | None) -> dict[str, Any]:
        chosen = [j for j, i in enumerate(scored) if source in (None, problems[i].source)]
        completions = [completion for j in chosen for completion in completions_PK[scored[j]]]
        lengths = [completion.length for completion in completions if completion.length is not None]
        return {
            "num_problems": len(chosen),
            "metrics": {name: estimate_mean(values_P[chosen])._asdict() for name, values_P in values.items()},
            "mean_length": None if len(lengths) < len(completions) else sum(lengths) / len(lengths),
            "truncated": sum(completion.truncated for completion in completions) / len(completions),
        }

    return {
        "num_unscored_problems": len(problems) - len(scored),
        **figures(None),
        "sources": {source: figures(source) for source in dict.fromkeys(problems[i].source for i in scored)},
        "problems": [
            {
                "id": problems[i].id,
                "source": problems[i].source,
                "num_correct": num_correct[j],
                "num_completions": num_completions[j],
                "maj": maj[j],
            }
            for j, i in enumerate(scored)
        ],
    }


def write_completions(
    path: Path, problems: list[Problem], completions_PK: list[list[Completion]], verdicts_PK: list[list[Verdict]]
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {
            "id": loggable(problem.id),
            "source": loggable(problem.source),
            "index": i,
            "prompt": loggable(completion_text(problem.prompt)),
            "solution": loggable(problem.solution),
            "completion": loggable(completion.text),
            "answer": None if verdict.answer is None else loggable(verdict.answer),
            "correct": verdict.correct,
            "length": completion.length,
            "truncated": completion.truncated,
        }
        for problem, completions, verdicts in zip(problems, completions_PK, verdicts_PK, strict=True)
        for i, (completion, verdict) in enumerate(zip(completions, verdicts, strict=True))
    ]
    types = {"completion": pa.large_string(), "correct": pa.bool_(), "truncated": pa.bool_()}
    types |= {"index": pa.int64(), "length": pa.int64()}
    schema = pa.schema({name: types.get(name, pa.string()) for name in rows[0]})
    with replacing(path) as temporary:
        pq.write_table(pa.Table.from_pylist(rows, schema), temporary)

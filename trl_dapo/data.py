# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Math datasets in one schema: `prompt`, `solution`, `source`, `id`."""

import hashlib
import json
import logging
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import pyarrow.parquet as pq


logger = logging.getLogger(__name__)

DATA_FOLDER_VARIABLE = "TRL_DAPO_DATA"
FILE_SUFFIXES = (".parquet", ".jsonl", ".json")

_ANSWER_LINE_PROMPT = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n{problem}\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)
_BOXED_PROMPT = "{problem}\n\nPlease reason step by step, and put your final answer within \\boxed{{}}."
PROMPT_STYLES = {"answer_line": _ANSWER_LINE_PROMPT, "boxed": _BOXED_PROMPT, "as_is": None}

# How copies of DAPO-Math-17k and AIME wrap a problem: what stands before it, and after it.
_WRAPPERS = (
    # the paper's, and slime's with `\boxed{$Answer}` on the answer line
    (
        re.compile(
            r"Solve the following math problem step by step\. The last line of your response should be of the form "
            r"Answer: \S+(?: \(without quotes\))? where \$Answer is the answer to the problem\.\s+"
        ),
        'Remember to put your answer on its own line after "Answer:".',
    ),
    # GRESO's, which adds a full stop to the problem
    (
        re.compile(r"Please solve the following math problem: "),
        ". The assistant first thinks about the reasoning process step by step and then provides the user with the "
        "answer. Return the final answer in \\boxed{} tags, for example \\boxed{1}. Let's solve this step by step.",
    ),
    # this module's "boxed" style, common with Qwen models
    (re.compile(""), "Please reason step by step, and put your final answer within \\boxed{}."),
)


class _Schema(NamedTuple):
    """Where one family of datasets keeps the problem and its gold answer."""

    name: str
    problem: str
    answer: str


# Tried in this order: open-r1's files also have `reward_model`, MATH's also a worked `solution` beside the `answer`.
_SCHEMAS = (
    _Schema("verl", "prompt", "reward_model"),
    _Schema("open-r1", "prompt", "solution"),
    _Schema("slime", "prompt", "label"),
    _Schema("GSM8K", "question", "answer"),
    _Schema("MATH", "problem", "answer"),
)


def load_math_dataset(
    path_or_hub_id: str | os.PathLike,
    split: str = "train",
    offset: int = 0,
    limit: int | None = None,
    prompt_style: str = "answer_line",
    name: str | None = None,
) -> datasets.Dataset:
    r"""
    Load a math dataset for training or evaluation, without duplicates, from a local file or the Hugging Face hub.

    Knows the columns of verl (`prompt` messages, `reward_model.ground_truth`), slime (`prompt`, `label`), open-r1's
    processed files (`prompt`, `solution`), GSM8K (`question`, `answer` ending in `#### N`) and MATH (`problem`,
    `answer`). Of rows with the same problem and answer the first is kept (the 960 rows of DAPO's AIME file become 30);
    a problem with conflicting answers is dropped altogether. Two problems are the same if their texts are, but for the
    wrapper and whitespace around them. How many of each is logged, and kept in `dataset.info.description`.

    Args:
        path_or_hub_id (`str` or `os.PathLike`):
            A `.parquet`, `.jsonl` or `.json` file, or the id of a hub dataset. A relative path that does not exist in
            the working directory is looked up in the folder that the environment variable `TRL_DAPO_DATA` names.
        split (`str`, *optional*, defaults to `"train"`):
            Split of a hub dataset. A file is one split.
        offset (`int`, *optional*, defaults to `0`):
            Number of problems to skip, counted after duplicates and conflicts are gone.
        limit (`int`, *optional*):
            Number of problems to take at most. Defaults to all.
        prompt_style (`str`, *optional*, defaults to `"answer_line"`):
            `"answer_line"` asks for a last line `Answer: ...`, as the paper's prompt does and
            [`~trl_dapo.rewards.dapo_math_reward`] expects; `"boxed"` asks for `\boxed{}`, as math-verify prefers. Both
            take the problem out of the wrappers that copies of DAPO-Math-17k come in, so that no prompt asks for two
            formats. `"as_is"` leaves the prompt alone.
        name (`str`, *optional*):
            Configuration of a hub dataset, such as `"main"` of `"openai/gsm8k"`.

    Returns:
        [`~datasets.Dataset`] with the columns:

        - `prompt` (`list[dict]`): the prompt as messages; one user message, unless `"as_is"` kept more.
        - `solution` (`str`): the gold answer.
        - `source` (`str`): the row's `data_source` or `source`, else the name of the file or dataset.
        - `id` (`str`): 16 hex digits of a hash of the problem, the same for any prompt style, file or order.

    Raises:
        `FileNotFoundError`: If there is no such file or hub dataset.
        `ValueError`: If a value, the file or its columns are not of the kind described here.

    Example:

    ```python
    >>> train_dataset = load_math_dataset("dapo_math_17k.parquet", limit=1000)
    >>> eval_dataset = load_math_dataset("dapo_math_17k.parquet", offset=1000, limit=200)
    >>> refuse_overlap(train_dataset, eval_dataset)
    >>> train_dataset[0]["solution"]
    '34'
    ```
    """
    if prompt_style not in PROMPT_STYLES:
        raise ValueError(f"`prompt_style` must be one of {', '.join(map(repr, PROMPT_STYLES))}, got {prompt_style!r}.")
    if offset < 0:
        raise ValueError(f"`offset` must not be negative, got {offset}.")
    if limit is not None and limit < 1:
        raise ValueError(f"`limit` must be at least 1, got {limit}; leave it out for all problems.")

    label, default_source, rows = _open_rows(path_or_hub_id, split, name)
    problems: dict[str, dict[str, Any]] = {}
    conflicting: set[str] = set()
    num_rows = 0
    schema = None
    for row in rows:
        schema = schema or _recognise(label, row)
        messages, solution = _read_row(label, num_rows, row, schema)
        num_rows += 1
        problem = _unwrapped(messages[-1]["content"])
        key = _stable_id(problem)
        known = problems.setdefault(
            key,
            {
                "prompt": messages if prompt_style == "as_is" else _wrapped(label, messages, problem, prompt_style),
                "solution": solution,
                "source": str(row.get("data_source") or row.get("source") or default_source),
                "id": key,
                "num_rows": 0,
            },
        )
        known["num_rows"] += 1
        if known["solution"] != solution:
            conflicting.add(key)
    if not num_rows:
        raise ValueError(f"{label} is empty: expected rows with {_expected_columns()}.")

    num_conflicting_rows = sum(problems[key]["num_rows"] for key in conflicting)
    kept = [problem for key, problem in problems.items() if key not in conflicting]
    num_duplicates = num_rows - num_conflicting_rows - len(kept)
    report = (
        f"{label}: {len(kept):,} problems from {num_rows:,} rows; removed {num_duplicates:,} duplicates and "
        f"{len(conflicting):,} problems with conflicting answers ({num_conflicting_rows:,} rows)."
    )
    logger.log(logging.WARNING if len(kept) < num_rows else logging.INFO, report)
    if offset >= len(kept):
        raise ValueError(f"`offset` {offset} is beyond the end of {label}, which has {len(kept)} problems.")
    chosen = kept[offset : None if limit is None else offset + limit]
    columns = {column: [problem[column] for problem in chosen] for column in ("prompt", "solution", "source", "id")}
    return datasets.Dataset.from_dict(columns, info=datasets.DatasetInfo(description=report))


def refuse_overlap(train_dataset: datasets.Dataset, eval_dataset: datasets.Dataset) -> None:
    """
    Raise if a problem is in both datasets: an evaluation on training problems measures memory.

    Args:
        train_dataset ([`~datasets.Dataset`]):
            From [`load_math_dataset`].
        eval_dataset ([`~datasets.Dataset`]):
            From [`load_math_dataset`], of the same file or another.

    Raises:
        `ValueError`: If they share an `id`.
    """
    train_ids = set(train_dataset["id"])
    shared = [id_ for id_ in eval_dataset["id"] if id_ in train_ids]
    if shared:
        raise ValueError(
            f"{len(shared)} of the {len(eval_dataset)} evaluation problems are in the training set as well (ids "
            f"{', '.join(shared[:3])}{', ...' if len(shared) > 3 else ''}). Choose ranges that do not overlap with "
            f"`offset` and `limit`: {len(train_dataset)} problems are used for training."
        )


def _open_rows(path_or_hub_id, split: str, name: str | None) -> tuple[str, str, Iterator[dict[str, Any]]]:
    """What the rows come from, in words; the source to give rows without one; and the rows."""
    path = Path(path_or_hub_id).expanduser()
    if path.suffix not in FILE_SUFFIXES:
        if path.exists():
            raise ValueError(f"`{path}` is not a file of one of the kinds {', '.join(FILE_SUFFIXES)}.")
        return f"`{path_or_hub_id}` ({split})", path.name, _hub_rows(str(path_or_hub_id), split, name)
    candidates = [path]
    if not path.is_absolute() and DATA_FOLDER_VARIABLE in os.environ:
        candidates.append(Path(os.environ[DATA_FOLDER_VARIABLE]) / path)
    for candidate in candidates:
        if candidate.is_file():
            return f"`{candidate}`", path.stem, _file_rows(candidate)
    looked = " nor ".join(f"`{candidate.absolute()}`" for candidate in candidates)
    hint = "" if DATA_FOLDER_VARIABLE in os.environ or path.is_absolute() else f"; {DATA_FOLDER_VARIABLE} is not set"
    raise FileNotFoundError(f"There is no {looked}{hint}.")


def _hub_rows(hub_id: str, split: str, name: str | None) -> Iterator[dict[str, Any]]:
    try:
        dataset = datasets.load_dataset(hub_id, name, split=split)
    except (FileNotFoundError, ConnectionError) as error:
        raise FileNotFoundError(
            f"`{hub_id}` is no local {', '.join(FILE_SUFFIXES)} file, and no hub dataset that can be reached: {error}"
        ) from error
    return iter(dataset)


def _file_rows(path: Path) -> Iterator[dict[str, Any]]:
    try:
        if path.suffix == ".parquet":
            for batch in pq.ParquetFile(path).iter_batches():
                yield from batch.to_pylist()
            return
        with open(path, encoding="utf-8") as file:
            rows = json.load(file) if path.suffix == ".json" else (json.loads(line) for line in file if line.strip())
            for row in rows:
                if not isinstance(row, dict):
                    raise ValueError(f"a row is {row!r:.80}, not an object")
                yield row
    except ValueError as error:  # also of json, unicode and pyarrow
        raise ValueError(f"`{path}` cannot be read as {path.suffix[1:]}: {error}") from error


def _expected_columns() -> str:
    return " or ".join(f"`{schema.problem}` and `{schema.answer}` ({schema.name})" for schema in _SCHEMAS)


def _recognise(label: str, row: dict[str, Any]) -> _Schema:
    for schema in _SCHEMAS:
        if schema.problem in row and schema.answer in row:
            return schema
    found = ", ".join(f"`{column}`" for column in row) or "none"
    raise ValueError(f"{label} has none of the known schemas: found columns {found}; expected {_expected_columns()}.")


def _read_row(label: str, index: int, row: dict[str, Any], schema: _Schema) -> tuple[list[dict[str, str]], str]:
    """Prompt as messages, and gold answer, of one row."""

    def wrong(column: str, expected: str) -> ValueError:
        found = f"`{column}` is {row.get(column)!r:.80}"
        return ValueError(f"{label}, row {index} ({schema.name} schema): {found}, expected {expected}.")

    prompt = row.get(schema.problem)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not _is_conversation(messages):
        raise wrong(schema.problem, "text, or messages of which the last is the user's")
    if not messages[-1]["content"].strip():
        raise wrong(schema.problem, "a problem")

    answer = row.get(schema.answer)
    if schema.name == "verl":
        answer = answer.get("ground_truth") if isinstance(answer, dict) else None
    elif schema.name == "GSM8K":
        _, marker, answer = answer.rpartition("####") if isinstance(answer, str) else ("", "", None)
        answer = answer.replace(",", "") if marker else None
    answer = _answer_text(answer)
    if not answer:
        expected = {"verl": "a struct with a `ground_truth`", "GSM8K": "a text that ends in `#### N`"}
        raise wrong(schema.answer, expected.get(schema.name, "an answer"))
    return messages, answer


def _answer_text(answer: Any) -> str:
    """A gold answer as text, empty if there is none; whole numbers without the `.0` that a detour by floats adds."""
    if isinstance(answer, float):
        answer = int(answer) if answer.is_integer() else answer if math.isfinite(answer) else ""
    return str(answer).strip() if isinstance(answer, (str, int, float)) else ""


def _is_conversation(messages: Any) -> bool:
    return (
        isinstance(messages, list)
        and bool(messages)
        and all(isinstance(m, dict) and isinstance(m.get("content"), str) for m in messages)
        and messages[-1].get("role") == "user"
    )


def _unwrapped(prompt: str) -> str:
    """The problem alone, without the instructions that known datasets wrap around it."""
    prompt = prompt.strip()
    for before, after in _WRAPPERS:
        opening = before.match(prompt)
        if opening and prompt.endswith(after):
            return prompt[opening.end() : -len(after)].strip()
    return prompt


def _wrapped(label: str, messages: list[dict[str, str]], problem: str, prompt_style: str) -> list[dict[str, str]]:
    if len(messages) > 1:
        roles = ", ".join(str(message.get("role")) for message in messages)
        raise ValueError(
            f"{label} has a prompt of {len(messages)} messages ({roles}), which cannot be put in the style "
            f'{prompt_style!r} without losing some. Use `prompt_style="as_is"`.'
        )
    return [{"role": "user", "content": PROMPT_STYLES[prompt_style].format(problem=problem)}]


def _stable_id(problem: str) -> str:
    return hashlib.sha256(problem.encode("utf-8", "surrogatepass")).hexdigest()[:16]

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
Loading of prompts for training and evaluation, from a file or from a dataset on the Hub.

Rows are used unchanged, or converted to math problems with the columns `prompt`, `solution`, `source` and `id`.
[`choose_prompt_style`] decides between the two, for training and for evaluation.
"""

import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from decimal import Decimal, InvalidOperation
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import pandas as pd
import pyarrow.parquet as pq

from .rewards.dapo_math import content_text, loggable
from .rewards.golds import BadRow, read_gold
from .rewards.names import default_prompt_style, read_math_problems
from .sampling.example_names import content_digest
from .settings.arguments import use_cache_if_offline
from .settings.environment import is_set
from .settings.ranges import Range, check_choice, check_value
from .settings.recipe_files import RECIPES


logger = logging.getLogger(__name__)

DATA_FOLDER_VARIABLE = "TRL_DAPO_DATA"
FILE_SUFFIXES = (".parquet", ".jsonl", ".json", ".csv")
BAD_ROWS = ("error", "skip")
_LISTED_PLACES = 5
_BLOCK = 1_000  # rows that are read at once
NUM_MEASURED = 2_000  # rows whose length is measured

PROMPT_STYLES = {
    "answer_line": "Solve the following math problem step by step. The last line of your response should be of the "
    "form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n{problem}\n\n"
    'Remember to put your answer on its own line after "Answer:".',
    "boxed": "{problem}\n\nPlease reason step by step, and put your final answer within \\boxed{{}}.",
    "think": "{problem}\n\nThink first: write your reasoning between <think> and </think>, at the very start of your "
    "response. Then put your final answer within \\boxed{{}}.",
    "as_is": None,
}
_WHOLE, _LEADING_ZERO = re.compile(r"[-+]?(?:0|[1-9]\d*)"), re.compile(r"[-+]?0\d")
_LONGEST_WHOLE = 20  # characters of a whole number of 64 bits, with its sign
_TRUTH = {"true": True, "false": False}
_IMAGE_COLUMNS = ("images", "image")  # TRL's names
_ORIGIN_COLUMNS = ("id", "index", "source", "data_source", "split", "extra_info")  # they say where a row is from
_IMAGE_MARK = "<image>"  # marks the place of an image in the text of some datasets; TRL adds its own mark

# The texts before and after a problem in copies of DAPO-Math-17k and AIME.
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
    # this module's "think" style
    (
        re.compile(""),
        "Think first: write your reasoning between <think> and </think>, at the very start of your response. Then put "
        "your final answer within \\boxed{}.",
    ),
    # this module's "boxed" style, common with Qwen models
    (re.compile(""), "Please reason step by step, and put your final answer within \\boxed{}."),
)


class _Schema(NamedTuple):
    name: str
    problem: str  # path of the problem: a column, and keys in it
    answer: str  # path of the gold answer


# The first schema whose columns a file has is used. If a file has both an answer and a worked `solution`, the answer
# is used.
_SCHEMAS = (
    _Schema("verl", "prompt", "reward_model.ground_truth"),
    _Schema("SkyRL", "prompt", "reward_spec.ground_truth"),
    _Schema("slime", "prompt", "label"),
    _Schema("open-r1", "prompt", "answer"),
    _Schema("TRL", "prompt", "solution"),
    _Schema("ground truth", "question", "ground_truth"),
    _Schema("DeepMath", "question", "final_answer"),
    _Schema("GSM8K", "question", "answer"),
    _Schema("NeMo RL", "problem", "expected_answer"),
    _Schema("MATH", "problem", "answer"),
    _Schema("worked MATH", "problem", "solution"),
    _Schema("AIME", "Problem", "Answer"),
    _Schema("ms-swift", "messages", "solution"),
    _Schema("AceMath", "messages", "answer"),
    _Schema("ORZ", "0.value", "1.ground_truth.value"),
)


def load_math_dataset(
    path_or_hub_id: str | os.PathLike,
    split: str = "train",
    offset: int = 0,
    limit: int | None = None,
    prompt_style: str = "answer_line",
    name: str | None = None,
    on_bad_rows: str = "error",
) -> datasets.Dataset:
    r"""
    Load a math dataset for training or evaluation, without duplicates, from a local file or the Hugging Face Hub.

    docs/rewards.md lists the columns that are read. A column `image` or `images` may contain images, as the Hub stores
    them, or paths of images.

    A gold answer must be one short answer. For a worked solution it is the content of the last `\boxed{}`, or what
    follows `####`. A list with one element is unpacked, also if it is written as JSON: `["5"]` becomes 5. Commas are
    removed only between groups of three digits. A row is bad if its answer is missing, is `proof`, a truth value, code
    or tests of code, consists of several answers, or is a worked solution without a box.

    If several rows have the same problem and answer, the first is kept: the 960 rows of DAPO's AIME file become 30. A
    problem with conflicting answers is dropped. Two problems are the same if their texts are equal without known
    instructions and whitespace around them, and if their earlier messages and images are equal too. Two answers are
    the same if they are equal without `$` or `\boxed{}` around them and without the `.0` of a float. The numbers of
    removed rows are logged, and stored in `dataset.info.description`.

    Args:
        path_or_hub_id (`str` or `os.PathLike`):
            A `.parquet`, `.jsonl`, `.json` or `.csv` file, or the id of a dataset on the Hub. A relative path that
            does not exist in the working directory is looked up in the folder that the environment variable
            `TRL_DAPO_DATA` names, then among the recipes of this package.
        split (`str`, *optional*, defaults to `"train"`):
            Split of a dataset on the Hub. A file has only one split.
        offset (`int`, *optional*, defaults to `0`):
            Number of problems to skip, counted after duplicates and conflicts are removed.
        limit (`int`, *optional*):
            Largest number of problems to load. Rows after the last of them are not read. Defaults to all.
        prompt_style (`str`, *optional*, defaults to `"answer_line"`):
            What the prompt asks for. `"answer_line"` asks for a last line `Answer: ...`, as the paper's prompt does
            and [`~trl_dapo.rewards.dapo_math_reward`] expects. `"boxed"` asks for `\boxed{}`, as math-verify prefers.
            `"think"` asks for reasoning in `<think>` tags before the box, as [`~trl.rewards.think_format_reward`]
            expects. These three replace the instructions that copies of DAPO-Math-17k already contain, so that no
            prompt asks for two formats. `"as_is"` keeps the prompt unchanged: a text in a column `prompt` stays text,
            to which no chat template is applied.
        name (`str`, *optional*):
            Configuration of a dataset on the Hub, such as `"main"` of `"openai/gsm8k"`.
        on_bad_rows (`str`, *optional*, defaults to `"error"`):
            What to do with bad rows. `"error"` raises an error that shows the first bad row and says how many there
            are. `"skip"` leaves bad rows out, and logs their number.

    Returns:
        `datasets.Dataset` with the columns:
        - `prompt` (`list[dict]` or `str`): the prompt as one user message. With `"as_is"` there may be several
          messages, or text.
        - `solution` (`str`): the gold answer, such as `34`. If math-verify can read it only between dollars, it has
          them, such as `$2\pi$`.
        - `source` (`str`): the row's `data_source` or `source`, otherwise the name of the file or dataset.
        - `id` (`str`): 16 hex digits of a hash of the problem, the same for any prompt style, file or order.
        - `images` (`list[PIL.Image.Image]`): only if a problem has images.

    Raises:
        FileNotFoundError: If there is no such file or dataset on the Hub.
        ValueError: If the data cannot be read as math problems, or an argument is not allowed.
    """
    check_choice("prompt_style", prompt_style, PROMPT_STYLES)
    check_value("offset", offset, Range(0, is_whole=True))
    check_value("limit", limit, Range(1, is_whole=True, or_none=True, hint="Leave it out for all problems."))
    check_choice("on_bad_rows", on_bad_rows, BAD_ROWS)

    if path := find_file(path_or_hub_id):
        label, default_source, rows = f"`{path}`", path.stem, _file_rows(path)
    else:
        label, default_source = f"`{path_or_hub_id}` ({split})", Path(path_or_hub_id).name
        rows = _hub_rows(str(path_or_hub_id), split, name)
    problems: dict[str, dict[str, Any]] = {}
    conflicting: set[str] = set()
    bad: list[tuple[str, str]] = []  # the place of a row, and why it is bad
    schema, has_stopped = None, False
    for place, row in rows:
        schema = schema or _find_schema(label, row)
        try:
            messages, solution = _read_row(label, place, row, schema)
        except BadRow as error:
            bad.append((place, str(error)))
            continue
        if images := _read_images(label, place, row):
            messages = [{**m, "content": m["content"].replace(_IMAGE_MARK, "").strip()} for m in messages]
        problem = _unwrapped(messages[-1]["content"])
        key = _stable_id(messages[:-1], problem, images)
        known = problems.setdefault(
            key,
            {
                "prompt": _put_in_style(label, messages, problem, prompt_style, row if not images else {}),
                "solution": solution,
                "source": loggable(str(row.get("data_source") or row.get("source") or default_source)),
                "id": key,
                "images": images,
                "num_rows": 0,
            },
        )
        known["num_rows"] += 1
        if known["solution"] != solution:
            conflicting.add(key)
        has_stopped = limit is not None and len(problems) - len(conflicting) >= offset + limit
        if has_stopped:
            break
    if schema is None:
        raise ValueError(f"{label} is empty. Expected rows with {_expected_columns()}.")

    num_rows = len(bad) + sum(problem["num_rows"] for problem in problems.values())
    places = [place for place, _ in bad[:_LISTED_PLACES]]
    if len(bad) > _LISTED_PLACES:
        places.append("...")
    bad_rows = f"{len(bad):,} of {num_rows:,} ({', '.join(places)})"
    if bad and on_bad_rows == "error":
        raise ValueError(
            f'{bad[0][1]} Bad rows: {bad_rows}. Correct these rows, or set `on_bad_rows="skip"` to leave them out.'
        )
    num_conflicting_rows = sum(problems[key]["num_rows"] for key in conflicting)
    kept = [problem for key, problem in problems.items() if key not in conflicting]
    num_duplicates = num_rows - len(bad) - num_conflicting_rows - len(kept)
    report = (
        f"{label}: {len(kept):,} problems from {'the first ' if has_stopped else ''}{num_rows:,} rows; removed "
        f"{num_duplicates:,} duplicate rows and {len(conflicting):,} problems with conflicting answers "
        f"({num_conflicting_rows:,} rows)."
    )
    if bad:
        report += f" Bad rows left out: {bad_rows}."
    logger.log(logging.WARNING if len(kept) < num_rows else logging.INFO, report)
    if not kept:
        raise ValueError(f"{report} No problem is left. Use another file or dataset.")
    if offset >= len(kept):
        raise ValueError(
            f"`offset={offset}` is beyond the end of {label}, which has {len(kept)} problems. Set a smaller `offset`."
        )
    chosen = kept[offset : None if limit is None else offset + limit]
    _refuse_mixed_prompts(label, chosen)
    columns = {column: [problem[column] for problem in chosen] for column in ("prompt", "solution", "source", "id")}
    dataset = datasets.Dataset.from_dict(columns, info=datasets.DatasetInfo(description=report))
    images = [problem["images"] for problem in chosen]
    return dataset.add_column("images", images, feature=datasets.List(datasets.Image())) if any(images) else dataset


def choose_prompt_style(
    path_or_hub_id: str | os.PathLike,
    split: str = "train",
    name: str | None = None,
    *,
    reward_funcs: Collection[Any],
    prompt_style: str | None = None,
    on_bad_rows: str = "error",
) -> str | None:
    """
    Decide how a dataset is read: as math problems, in the prompt style that is returned, or unchanged (`None`).

    Rows with a column `prompt` are used unchanged if neither `prompt_style` nor `on_bad_rows` is set and a reward
    function is not of this package, because such a function may read any column. All other datasets are read as math
    problems. The default prompt style is the one that the reward functions can read.

    Args:
        path_or_hub_id (`str` or `os.PathLike`):
            A file, or the id of a dataset on the Hub.
        split (`str`, *optional*, defaults to `"train"`):
            Split of a dataset on the Hub.
        name (`str`, *optional*):
            Configuration of a dataset on the Hub.
        reward_funcs (`Collection`):
            The functions that score the completions. If it is empty, the dataset is read as math problems.
        prompt_style (`str`, *optional*):
            The prompt style that the user has set.
        on_bad_rows (`str`, *optional*, defaults to `"error"`):
            See [`load_math_dataset`].

    Returns:
        `str` or `None`: A prompt style for [`load_prompts`].
    """
    is_default = prompt_style is None and on_bad_rows == "error"
    if is_default and not read_math_problems(reward_funcs) and _has_prompts(path_or_hub_id, split, name):
        return None
    return prompt_style or default_prompt_style(reward_funcs)


def load_prompts(
    path_or_hub_id: str | os.PathLike,
    prompt_style: str | None = None,
    split: str = "train",
    name: str | None = None,
    offset: int = 0,
    limit: int | None = None,
    on_bad_rows: str = "error",
) -> datasets.Dataset:
    """
    Load math problems in the prompt style that [`choose_prompt_style`] chose, or unchanged rows if it is `None`.

    Math problems are loaded with [`load_math_dataset`]. For unchanged rows, `offset` and `limit` count distinct rows:
    equal rows are repetitions of one problem, and are selected together.
    """
    if prompt_style is not None:
        return load_math_dataset(path_or_hub_id, split, offset, limit, prompt_style, name, on_bad_rows)
    check_value("offset", offset, Range(0, is_whole=True))
    check_value("limit", limit, Range(1, is_whole=True, or_none=True, hint="Leave it out for all rows."))
    path = find_file(path_or_hub_id)
    dataset = _hub_dataset(str(path_or_hub_id), split, name) if path is None else _file_dataset(path)
    if offset == 0 and limit is None:
        return dataset
    numbers: dict[str, int] = {}  # number of each distinct row
    places = []
    for place, row in enumerate(dataset):
        number = numbers.setdefault(content_digest(row), len(numbers))
        if offset <= number and (limit is None or number < offset + limit):
            places.append(place)
    if not places:
        raise ValueError(
            f"`offset={offset}` is beyond the end of `{path_or_hub_id}`, which has {len(numbers)} distinct rows. Set "
            "a smaller `offset`."
        )
    return dataset.select(places)


def _file_dataset(path: Path) -> datasets.Dataset:
    """Return the unchanged rows of a file, with every column."""
    rows = []
    for place, row in _file_rows(path):
        text = json.dumps(row, ensure_ascii=False, default=lambda value: "")
        if loggable(text) != text:
            raise ValueError(
                f"`{path}`, {place} has text with lone surrogates, which cannot be stored in a file. Remove them."
            )
        rows.append(row)
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: _storable([row.get(name) for row in rows]) for name in names}
    # A parquet file has the types of its columns, such as images. In JSON the values of a column may differ in type.
    features: dict[str, Any] = {}
    if _kind_of(path) == ".parquet":
        features = datasets.Features.from_arrow_schema(pq.read_schema(path))
    for name, feature in features.items():
        if getattr(feature, "dtype", "") == "uint64" and any(isinstance(value, str) for value in columns[name]):
            features[name] = datasets.Value("string")  # some of its numbers do not fit into a signed 64-bit integer
    dataset = datasets.Dataset.from_dict(columns, features or None, on_mixed_types=None if features else "use_json")
    _refuse_mixed_prompts(f"`{path}`", rows)
    return dataset


def _refuse_mixed_prompts(label: str, rows: list[dict[str, Any]]) -> None:
    """Raise a `ValueError` if some prompts are text and others messages: a batch of both cannot be tokenized."""
    names = {"str": "text", "list": "messages"}
    types = enumerate(type(row.get("prompt")).__name__ for row in rows)
    kinds = {i: names[name] for i, name in types if name in names}
    for i, kind in kinds.items():
        if kind != next(iter(kinds.values())):
            raise ValueError(
                f"The prompt of row {i} in {label} is {kind}, unlike the prompts before it. A batch cannot mix both. "
                'Write all prompts as text, or all as messages (`[{"role": "user", "content": ...}]`).'
            )


def _has_prompts(path_or_hub_id: str | os.PathLike, split: str, name: str | None) -> bool:
    """Return whether rows have a `prompt`, which is all that `GRPOTrainer` needs."""
    if (path := find_file(path_or_hub_id)) is None:
        return "prompt" in _hub_dataset(str(path_or_hub_id), split, name).column_names
    return any("prompt" in row for _, row in islice(_file_rows(path), 1))


def plain_rows(dataset: Any) -> Any:
    """Return a dataset whose examples are plain values. The Arrow and Polars formats make a table of each example."""
    is_table = isinstance(dataset, datasets.Dataset) and dataset.format["type"] in ("arrow", "polars")
    return dataset.with_format(None, columns=dataset.format["columns"]) if is_table else dataset


def each_row(dataset: Any) -> Iterator[dict[str, Any]]:
    """
    Yield the rows of a dataset with the types that a data loader reads.

    The types may differ from those of single rows, so that rows are read in blocks as a data loader does.
    """
    if not isinstance(dataset, datasets.Dataset):
        yield from dataset
        return
    for start in range(0, len(dataset), _BLOCK):
        yield from dataset.__getitems__([*range(start, min(start + _BLOCK, len(dataset)))])


def prompt_lengths(file: str, prompt_style: str | None, limit: int | None) -> tuple[float, int]:
    """Return the mean and the largest number of characters of the first prompts in a file."""
    path = find_file(file)
    if path is None:
        raise ValueError(
            f"`{file}` is not a file. Name a {', '.join(FILE_SUFFIXES[:-1])} or {FILE_SUFFIXES[-1]} file."
        )
    num_added = len(PROMPT_STYLES.get(prompt_style or "") or "{problem}") - len("{problem}")
    lengths = []
    for _, row in islice(_file_rows(path), min(limit or NUM_MEASURED, NUM_MEASURED)):
        prompt = next(filter(None, (_at(row, schema.problem) for schema in _SCHEMAS)), "")
        messages = [{"content": prompt}] if isinstance(prompt, str) else prompt
        lengths.append(num_added + sum(len(content_text(message["content"])) for message in messages))
    return sum(lengths) / len(lengths), max(lengths)


def refuse_overlap(train_dataset: datasets.Dataset, eval_dataset: datasets.Dataset) -> None:
    """
    Raise a `ValueError` if an evaluation prompt is also a training prompt: the evaluation would measure memorization.

    Only the prompts are compared, not the other columns. If the training set itself has a prompt in rows with
    different other columns, as the tasks of an environment do, whole rows are compared for this prompt.
    """
    rows_of_prompt: dict[str, set[str]] = {}
    for row in train_dataset:
        rows_of_prompt.setdefault(_prompt_digest(row), set()).add(_task_digest(row))
    shared = []
    for place, row in enumerate(eval_dataset):
        rows = rows_of_prompt.get(_prompt_digest(row), set())
        if len(rows) == 1 or _task_digest(row) in rows:
            shared.append(place)
    if shared:
        raise ValueError(
            f"{len(shared)} of the {len(eval_dataset)} evaluation problems are in the training set as well (row "
            f"{', '.join(map(str, shared[:3]))}{', ...' if len(shared) > 3 else ''}), so an evaluation would measure "
            "memorization. Use another file, or set `dataset_limit` and `eval_dataset_offset` so that the two do not "
            f"overlap. The training set has {len(train_dataset)} rows."
        )


def _prompt_digest(row: Mapping[str, Any]) -> str:
    """Return a hash of the prompt and images of a row. A text, and a user message with this text, are the same."""
    prompt = row["prompt"]
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if messages := _plain_messages(prompt):
        prompt = [*messages[:-1], {**messages[-1], "content": _unwrapped(messages[-1]["content"])}]
        # Files store `None` for keys that only other messages have.
        prompt = [{name: part for name, part in message.items() if part is not None} for message in prompt]
    images = {name: row[name] for name in _IMAGE_COLUMNS if row.get(name)}
    return content_digest({"prompt": prompt, **images})


def _task_digest(row: Mapping[str, Any]) -> str:
    """Return a hash of a row without the columns that say where it is from, which differ between copies of a task."""
    return content_digest({name: value for name, value in row.items() if name not in _ORIGIN_COLUMNS})


def is_file_name(name: str) -> bool:
    """
    Return whether a name is that of a local file, and not of a folder or of a dataset on the Hub.

    Raises:
        ValueError: If there is a file with this name, but of a kind that cannot be read.
    """
    path = Path(name).expanduser()
    if _kind_of(path) in FILE_SUFFIXES:
        return True
    if path.is_file():
        raise ValueError(f"`{name}` is not a file of one of the kinds {', '.join(FILE_SUFFIXES)}. Convert it to one.")
    return False


def find_file(path_or_hub_id: str | os.PathLike) -> Path | None:
    """Return the path of a local file, or `None` for a folder or the name of a dataset on the Hub."""
    path = Path(path_or_hub_id).expanduser()
    if _kind_of(path) not in FILE_SUFFIXES:
        if path.is_file():
            raise ValueError(
                f"`{path}` is not a file of one of the kinds {', '.join(FILE_SUFFIXES)}. Convert it to one."
            )
        return None
    candidates = [path]
    if not path.is_absolute() and is_set(DATA_FOLDER_VARIABLE):
        candidates.append(Path(os.environ[DATA_FOLDER_VARIABLE]) / path)
    for candidate in [*candidates, RECIPES / path]:
        if candidate.is_file():
            return candidate
        if candidate.is_dir():
            raise IsADirectoryError(f"`{candidate}` is a folder. Name a file in it.")
    where = ""
    if not path.is_absolute():
        where = f" in {Path.cwd()}"
        if len(candidates) > 1:
            where += f", none in {candidates[-1].parent} (from {DATA_FOLDER_VARIABLE})"
        where += " and none among the files of this package"
        if len(candidates) == 1:
            where += f". {DATA_FOLDER_VARIABLE} is not set, which may name a folder with data"
    raise FileNotFoundError(f"There is no `{path}`{where}{_nearest(path)}.")


@contextmanager
def naming_missing_data(name: str | None) -> Iterator[None]:
    """Raise an error for a dataset that was not found that also names the file or folder of the most similar name."""
    if name is not None and not Path(name).exists():
        use_cache_if_offline()
    try:
        yield
    except (FileNotFoundError, ConnectionError) as error:
        if name is None or Path(name).exists():
            raise
        raise FileNotFoundError(
            f"`{name}` is neither a file nor a folder here{_nearest(Path(name))}, and no dataset of this name could "
            f"be loaded from the Hub: {error}"
        ) from error


def _nearest(path: Path) -> str:
    there = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
    nearest = get_close_matches(path.name, there, n=1)
    return f" (nearest: `{path.parent / nearest[0]}`)" if nearest else ""


def _hub_dataset(hub_id: str, split: str, name: str | None) -> datasets.Dataset:
    try:
        with naming_missing_data(hub_id):
            return datasets.load_dataset(hub_id, name, split=split)
    except ValueError as error:
        if "Unknown split" not in str(error):
            raise
        raise ValueError(f"The dataset `{hub_id}` has no split {split!r}: {error}") from None


def _hub_rows(hub_id: str, split: str, name: str | None) -> Iterator[tuple[str, dict[str, Any]]]:
    dataset = _hub_dataset(hub_id, split, name)
    for column in _IMAGE_COLUMNS:
        if column in dataset.column_names:  # images are decoded when they are trained on, not here
            stored = datasets.Image(decode=False)
            is_one = isinstance(dataset.features[column], datasets.Image)
            dataset = dataset.cast_column(column, stored if is_one else datasets.List(stored))
    return _numbered(dataset)


def _file_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        if _kind_of(path) == ".parquet":
            with pq.ParquetFile(path) as file:
                yield from _numbered(row for batch in file.iter_batches(1_000) for row in batch.to_pylist())
            return
        if _kind_of(path) == ".csv":
            columns = {name: _typed(column) for name, column in pd.read_csv(path, dtype=str).items()}
            yield from _numbered(dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
            return
        rows = _json_lines(path) if _kind_of(path) == ".jsonl" else _numbered(_json_rows(path))
        for place, row in rows:
            if isinstance(row, list) and all(isinstance(part, dict) for part in row):  # ORZ's rows on the Hub
                row = {str(i): part for i, part in enumerate(row)}
            if not isinstance(row, dict):
                raise ValueError(f"{place}: a row is {row!r:.80}, not an object")
            yield place, row
    except (ValueError, OSError) as error:  # errors of json, unicode and pyarrow are a `ValueError`, too
        # An error of the operating system has an `errno`. That of pyarrow for a damaged file has none.
        if getattr(error, "errno", None) is not None:
            raise
        raise ValueError(f"`{path}` cannot be read as {_kind_of(path)[1:]}: {error}") from error


def _kind_of(path: Path) -> str:
    """Return the suffix of a file in lower case, by which its reader is chosen."""
    return path.suffix.lower()


def _typed(column: pd.Series) -> list[Any]:
    """Return a column of a CSV file as numbers or truth values, or as text if numbers would lose digits."""
    written = [None if pd.isna(text) else str(text) for text in column]
    given = [text for text in written if text is not None]
    read: Callable[[str], Any] = str
    if all(_WHOLE.fullmatch(text) and len(text) <= _LONGEST_WHOLE and _fits(int(text)) for text in given):
        read = int
    elif all(_keeps_digits(text) for text in given):
        read = float
    elif all(text.lower() in _TRUTH for text in given):
        read = _read_truth
    return [None if text is None else read(text) for text in written]


def _read_truth(text: str) -> bool:
    return _TRUTH[text.lower()]


def _keeps_digits(text: str) -> bool:
    """Return whether a text is a number that a float represents with all its digits."""
    try:
        return _LEADING_ZERO.match(text) is None and Decimal(text) == Decimal(repr(float(text)))
    except (InvalidOperation, ValueError):
        return False


def _fits(number: int) -> bool:
    """Return whether a number fits into a signed 64-bit integer."""
    return -(2**63) <= number < 2**63


def _storable(values: list[Any]) -> list[Any]:
    """Return a column in which all integers are text if one of them does not fit into 64 bits."""
    is_too_long = any(isinstance(value, int) and not _fits(value) for value in values)
    return [_numbers_as_text(value, is_too_long) for value in values]


def _numbers_as_text(value: Any, every_number: bool = False) -> Any:
    """Return a value with integers as text: those that do not fit into 64 bits, or all of them."""
    if isinstance(value, dict):
        return {name: _numbers_as_text(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_numbers_as_text(part) for part in value]
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return str(value) if is_number and (every_number or not _fits(value)) else value


def _numbered(rows: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    return ((f"row {i}", row) for i, row in enumerate(rows))


def _json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    with open(path, "rb") as file:  # as bytes, because json skips the byte order mark of UTF-8
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise ValueError(f"line {number}: {getattr(error, 'msg', error)}") from error
                yield f"line {number}", row


def _json_rows(path: Path) -> list[Any]:
    try:
        rows = json.loads(path.read_bytes())
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{error} (a file with one object per line must have the suffix .jsonl)") from error
    if not isinstance(rows, list):
        raise ValueError(f"it contains {rows!r:.80}, not a list of objects")
    return rows


def _expected_columns() -> str:
    return " or ".join(f"`{schema.problem}` and `{schema.answer}` ({schema.name})" for schema in _SCHEMAS)


def _find_schema(label: str, row: dict[str, Any]) -> _Schema:
    for schema in _SCHEMAS:
        if {path.split(".")[0] for path in schema[1:]} <= row.keys():
            return schema
    found = ", ".join(f"`{column}`" for column in row) or "none"
    near = get_close_matches("prompt", row.keys() - {"prompt", "prompts"}, n=1)
    question = f" Is `{near[0]}` the `prompt`? Then rename it." if near else ""
    raise ValueError(
        f"{label} has none of the known schemas of math problems. Its columns are {found}. Expected "
        f"{_expected_columns()}.{question}"
    )


def _at(row: Any, path: str) -> Any:
    """Return a row's value under a path such as `reward_model.ground_truth`, or `None`."""
    for key in path.split("."):
        row = row.get(key) if isinstance(row, dict) else None
    return row


def _read_row(label: str, place: str, row: dict[str, Any], schema: _Schema) -> tuple[list[dict[str, str]], str]:
    """Return the prompt of a row as messages, and its gold answer."""

    def bad_row(path: str, expected: str) -> BadRow:
        found = f"`{path}` is {_at(row, path)!r:.80}"
        return BadRow(f"{label}, {place}, read with the {schema.name} schema: {found}, expected {expected}.")

    prompt = _at(row, schema.problem)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else _plain_messages(prompt)
    if not messages or messages[-1].get("role") != "user":
        raise bad_row(schema.problem, "text, or a list of text messages that ends with one of the user")
    if not messages[-1]["content"].strip():
        raise bad_row(schema.problem, "a problem")
    try:
        answer = read_gold(_at(row, schema.answer), schema.answer == "solution", schema.name == "worked MATH")
    except BadRow as error:
        raise bad_row(schema.answer, str(error)) from None
    for path, texts in ((schema.problem, [message["content"] for message in messages]), (schema.answer, [answer])):
        if any(loggable(text) != text for text in texts):
            raise bad_row(path, "text without lone surrogates, which cannot be stored in a file")
    return messages, answer


def _read_images(label: str, place: str, row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the images of one row in the form in which `datasets` stores them."""
    found: Any = next((row[column] for column in _IMAGE_COLUMNS if row.get(column)), [])
    if not isinstance(found, list):
        found = [found]
    images = []
    for image in found:
        image = {"bytes": None, "path": image} if isinstance(image, str) else image
        if not isinstance(image, dict) or not (image.get("bytes") or image.get("path")):
            raise ValueError(
                f"{label}, {place}: {image!r:.80} is not an image. Expected a path, or a mapping with `bytes` or a "
                "`path`."
            )
        images.append({"bytes": image.get("bytes"), "path": image.get("path")})
    return images


def _plain_messages(messages: Any) -> list[dict[str, Any]] | None:
    """Return messages with the parts of their content joined to text, or `None` if not all of it is text messages."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return None
    plain = []
    for message in messages:
        content = message.get("content")
        parts = content if isinstance(content, list) else [content]
        if not all(isinstance(part.get("text") if isinstance(part, dict) else part, str) for part in parts):
            return None
        plain.append({**message, "content": content_text(content)})
    return plain


def _unwrapped(prompt: str) -> str:
    """Return the problem without the instructions that known datasets add before and after it."""
    prompt = prompt.strip()
    for before, after in _WRAPPERS:
        opening = before.match(prompt)
        if opening and prompt.endswith(after):
            return prompt[opening.end() : -len(after)].strip()
    return prompt


def _put_in_style(
    label: str, messages: list[dict[str, str]], problem: str, prompt_style: str, row: Mapping[str, Any]
) -> list[dict[str, str]] | str:
    """Return the prompt for a problem in a prompt style."""
    template = PROMPT_STYLES[prompt_style]
    if template is None:
        return row["prompt"] if isinstance(row.get("prompt"), str) else messages
    if len(messages) > 1:
        roles = ", ".join(str(message.get("role")) for message in messages)
        raise ValueError(
            f"{label} has a prompt of {len(messages)} messages ({roles}). The prompt style {prompt_style!r} has only "
            'one message, so the others would be lost. Use `prompt_style="as_is"`.'
        )
    return [{"role": "user", "content": template.format(problem=problem)}]


def _stable_id(earlier: list[dict[str, Any]], problem: str, images: list[dict[str, Any]]) -> str:
    """Return the id of a problem, a hash of its text, its images and the messages before it."""
    digest = hashlib.sha256(problem.encode())
    if earlier:
        digest.update(json.dumps(earlier, sort_keys=True, default=str).encode())
    for image in images:
        digest.update(hashlib.sha256(image["bytes"] or image["path"].encode()).digest())
    return digest.hexdigest()[:16]

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""One evaluation: sample the completions that are missing in the journal, score all of them, summarize and save.

Prompts, and the arguments of a reward function, are the same as in training: rows are loaded with
[`trl_dapo.data.load_prompts`], and a reward function receives every column of its row.
"""

import hashlib
import inspect
import json
import logging
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..rewards.dapo_math import content_text, gold_text, loggable
from ..run.files import replacing
from ..run.stopwatch import SILENCE, calling
from ..sampling.example_names import digest
from ..settings.arguments import check_model_path, naming_missing_folders, read_mapping
from ..settings.ranges import COUNT, POSITIVE, SHARE, Range, check_choice, check_value
from ..settings.secrets import without_secrets
from ..version import __version__
from .jobs import (
    JOURNAL_FILE,
    SUMMARY_FILE,
    GeneratedCompletion,
    Job,
    Journal,
    Problem,
    SamplingSettings,
    make_jobs,
    read_problems,
)
from .scorers import (
    Scorer,
    Verdicts,
    check_columns,
    is_reward_function,
    load_scorer,
    name_of,
    score,
    warn_without_answers,
)
from .statistics import count_problem, estimate_mean, has_votes, problem_figures


if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerState


logger = logging.getLogger(__name__)

PARQUET_FILE = "completions.parquet"
_FILES_OF_RUN = ("log_history.jsonl", "trainer_state.json")  # files that training writes to its `output_dir`
ENGINES = ("transformers", "vllm")
_PATH = (str, os.PathLike)
_SAMPLED_VALUES = 1024  # of each parameter
_BLOCK = 1 << 16  # bytes
_SAMPLED_BLOCKS = 256  # of each file
_MODEL_FILES = ("config.json", "adapter_config.json")
# Settings that select the completions to sample but do not change them. They may differ when an evaluation continues.
_SELECTING = ("offset", "limit", "on_bad_rows", "problems", "k")
# Allowed values of the numbers.
_RANGES = {
    **dict.fromkeys(("k", "max_completion_length", "batch_size", "tensor_parallel_size", "concurrency"), COUNT),
    "temperature": Range(0, hint="0 means greedy decoding."),
    "top_p": SHARE,
    "top_k": Range(0, is_whole=True, hint="0 means all tokens."),
    "min_p": Range(0, 1, hint="0 means the value in the model's generation config, or no minimum."),
    "request_timeout": POSITIVE,
    "num_retries": Range(0, is_whole=True),
}


def evaluate(
    model: "str | os.PathLike | PreTrainedModel",
    dataset: "str | os.PathLike | datasets.Dataset",
    output_dir: str | os.PathLike,
    *,
    split: str = "train",
    name: str | None = None,
    offset: int = 0,
    limit: int | None = None,
    on_bad_rows: str = "error",
    prompt_style: str | None = None,
    k: int = 32,
    temperature: float = 1.0,
    top_p: float = 0.7,
    top_k: int = 0,
    min_p: float = 0.0,
    max_completion_length: int = 20480,
    chat_template_kwargs: Mapping[str, Any] | str | None = None,
    seed: int = 42,
    scorer: str | Scorer = "dapo_math",
    accuracy_threshold: float | None = None,
    engine: str | None = None,
    processing_class: "PreTrainedTokenizerBase | None" = None,
    batch_size: int = 16,
    tensor_parallel_size: int = 1,
    base_url: str | None = None,
    concurrency: int = 64,
    request_timeout: float = 1800.0,
    num_retries: int = 6,
    progress: bool = True,
) -> dict[str, Any]:
    r"""
    Measure avg@k, pass@k and maj@k of a model, each with a 95% interval over problems.

    The defaults are the AIME protocol of the DAPO paper: 32 completions per problem at temperature 1.0 and top-p 0.7,
    up to 20,480 tokens, scored by the rule of the last `Answer:` line.

    The prompts are those that training would use on the same data, and completions are scored as in training.
    [`~trl_dapo.data.choose_prompt_style`] describes how a dataset becomes prompts. Equal rows are repetitions of one
    problem: `k` completions are sampled for each row, and pooled. Every metric is a mean over problems.

    Completions are stored as soon as they arrive. The same call with the same `output_dir` continues an evaluation
    that was interrupted, and samples no completion twice. With another `k`, `limit` or `offset` only the missing
    completions are sampled. Other settings raise an error. The folder contains

    - `summary.json`: the return value of this function, and the time at which the evaluation finished;
    - `completions.parquet`: `id`, `source`, `index`, `prompt`, `solution`, `completion`, `answer`, `correct`, `length`
      and `truncated` of each completion (characters that UTF-8 cannot encode are replaced by `?`);
    - `completions.jsonl`: the settings, and the completions in the order in which they arrived.

    Args:
        model (`str`, `os.PathLike` or [`~transformers.PreTrainedModel`]):
            Path of a model, or its id on the Hub. With transformers in this process it may also be an adapter or a
            loaded model. With a server it is the name under which the server offers the model.
        dataset (`str`, `os.PathLike` or [`~datasets.Dataset`]):
            A file, also in the folder that `TRL_DAPO_DATA` names, or the id of a dataset on the Hub, or a loaded
            dataset with a column `prompt` of text or messages and the columns that the scorer reads.
        output_dir (`str` or `os.PathLike`):
            Folder of this evaluation.
        split (`str`, *optional*, defaults to `"train"`):
            Split of a dataset on the Hub.
        name (`str`, *optional*):
            Configuration of a dataset on the Hub.
        offset (`int`, *optional*, defaults to `0`):
            Number of problems to skip. Equal rows that are used unchanged are one problem.
        limit (`int`, *optional*):
            Largest number of problems to evaluate. Defaults to all.
        on_bad_rows (`str`, *optional*, defaults to `"error"`):
            What to do with rows without a problem or a gold answer: `"error"` raises an error, `"skip"` leaves them
            out.
        prompt_style (`str`, *optional*):
            What the prompt of a math problem asks for: `"answer_line"`, `"boxed"`, `"think"` or `"as_is"`, see
            [`~trl_dapo.data.load_math_dataset`]. If the scorer is a reward function of your own or of TRL, rows with a
            `prompt` are used unchanged by default. All other rows are read as math problems. Their default style is
            the one that the scorer reads: `"answer_line"` for `"dapo_math"`, `"boxed"` for `"math_verify"` and
            `"accuracy_reward"`, and `"as_is"` for others. A loaded dataset is used unchanged, so `split`, `name`,
            `offset`, `limit`, `on_bad_rows` and `prompt_style` cannot be set for it.
        k (`int`, *optional*, defaults to `32`):
            Number of completions per problem.
        temperature (`float`, *optional*, defaults to `1.0`):
            Sampling temperature. `0` means greedy decoding, and needs `k=1`.
        top_p (`float`, *optional*, defaults to `0.7`):
            Probability mass of the tokens to sample from (nucleus sampling).
        top_k (`int`, *optional*, defaults to `0`):
            Number of tokens to sample from. `0` means all tokens.
        min_p (`float`, *optional*, defaults to `0.0`):
            Smallest probability of a token to sample, as a share of that of the most probable token. As in training,
            `0` means the value in the model's generation config, if it has one.
        max_completion_length (`int`, *optional*, defaults to `20480`):
            Number of tokens at which a completion is cut off.
        chat_template_kwargs (`dict`, *optional*):
            Arguments of the chat template, such as `{"enable_thinking": False}`. Use those of the training run. On a
            command line they are JSON, which writes `false`: `'{"enable_thinking": false}'`.
        seed (`int`, *optional*, defaults to `42`):
            Seed from which the seeds of all completions are derived.
        scorer (`str` or `Callable`, *optional*, defaults to `"dapo_math"`):
            How completions are scored. `"dapo_math"` reads the last `Answer:` line by the paper's rule.
            `"math_verify"` and TRL's `"accuracy_reward"` compare LaTeX such as `\boxed{}` symbolically.
            `"last_number"` reads the last number of any text. A reward function, sync or async, can be given itself
            or by its dotted import path. It is called with the same arguments as in training, and maj@k votes on the
            answers that it passes to `log_extra` as `answer` or `<its name>_answer`. Otherwise it is a function of the
            completion and the gold answer that returns whether the completion is correct (`None` if the gold answer
            cannot be read) and its answer (`None` if there is none).
        accuracy_threshold (`float`, *optional*):
            A completion with a reward above it is correct, as with `dynamic_sampling_accuracy_threshold` in training.
            Defaults to 0 if the rewards take no more than two values. If they take more, it must be set.
        engine (`str`, *optional*):
            Engine in this process: `"transformers"` or `"vllm"`. Without a `base_url` it defaults to
            `"transformers"`.
        processing_class ([`~transformers.PreTrainedTokenizerBase`], *optional*):
            Tokenizer for the engine `"transformers"`. It is required for a loaded model. For a path it defaults to the
            model's own tokenizer.
        batch_size (`int`, *optional*, defaults to `16`):
            Number of completions that `"transformers"` samples at once.
        tensor_parallel_size (`int`, *optional*, defaults to `1`):
            Number of GPUs over which `"vllm"` distributes the model.
        base_url (`str`, *optional*):
            Address of an OpenAI-compatible server, such as `"http://localhost:8000/v1"`. Start vLLM with `vllm serve
            MODEL --generation-config vllm`. Otherwise it adds the sampling parameters in the model's generation
            config. The environment variable `OPENAI_API_KEY` is sent as the API key.
        concurrency (`int`, *optional*, defaults to `64`):
            Number of simultaneous requests to the server.
        request_timeout (`float`, *optional*, defaults to `1800.0`):
            Seconds without a response after which a request is given up.
        num_retries (`int`, *optional*, defaults to `6`):
            How often a request is repeated, with growing delays, if it failed for a reason that may be temporary.
        progress (`bool`, *optional*, defaults to `True`):
            Whether to show a progress bar.

    Returns:
        `dict[str, Any]` with the keys:
        - `version`, `settings` and `scorer`.
        - `num_problems`.
        - `num_unscored_problems`: problems whose gold answer cannot be read. They are left out of all figures.
        - `metrics`: `"avg@32"`, `"pass@2"`, `"pass@4"` ... `"pass@32"` and `"maj@32"`, each with `mean`, `low` and
          `high`. `maj` is left out unless the scorer gives the answers, or most completions have an `Answer:` line or
          a box.
        - `mean_length` in tokens, or `None` if a server does not say.
        - `truncated`: the share of completions that were cut off.
        - `sources`: `num_problems`, `metrics`, `mean_length` and `truncated` of each source.
        - `problems`: each scored problem with `id`, `source`, `num_correct`, `num_completions` and `maj`.

    Raises:
        ValueError: If a setting is not allowed or differs from those of `output_dir`, or if the scorer fails.
        ConnectionError: If the server is down or refuses a request. Completions that had arrived are kept.
    """
    arguments = locals()
    for setting, allowed in _RANGES.items():
        check_value(setting, arguments[setting], allowed)
    if temperature == 0 and k > 1:
        raise ValueError(f"With `temperature=0` all {k} completions of a problem would be the same. Set `k=1`.")
    _check_engine(arguments)
    arguments["chat_template_kwargs"] = read_mapping("chat_template_kwargs", chat_template_kwargs)
    scorer_function, scorer_name = load_scorer(scorer, prompt_style), name_of(scorer)
    if accuracy_threshold is not None and not is_reward_function(scorer_function):
        raise ValueError(
            f"`accuracy_threshold={accuracy_threshold}` is for reward functions, but the scorer {scorer_name!r} "
            f"itself decides which completions are correct. Leave it out."
        )
    if isinstance(model, _PATH) and not base_url:
        _check_folder(model)

    output_dir = Path(output_dir)
    _refuse_folder_of_run(output_dir)
    rows, selection = _load_rows(arguments, scorer_function, output_dir / JOURNAL_FILE)
    from ..data import each_row

    columns = rows.column_names or [*next(iter(rows), {})]  # a streamed dataset may not know its columns
    check_columns(scorer_function, scorer_name, columns, sends_ids=not base_url)
    problems = read_problems(each_row(rows))
    is_chat = any(not isinstance(problem.prompt, str) for problem in problems)
    if arguments["chat_template_kwargs"] and not is_chat:
        raise ValueError(
            f"`chat_template_kwargs={arguments['chat_template_kwargs']}` has no effect: the prompts are text, to "
            f"which no chat template is applied. Leave it out, or use prompts of messages."
        )
    sampling = SamplingSettings(temperature, top_p, top_k, max_completion_length, min_p)
    chosen_rows = {"dataset": _plain_path(dataset), **selection} if isinstance(dataset, _PATH) else {}
    settings = {
        "model": _plain_path(model, base_url) if isinstance(model, _PATH) else model.config.name_or_path,
        "weights": _weights_digest(model),
        "engine": "server" if base_url else engine or "transformers",
        **chosen_rows,
        "problems": digest(json.dumps([(each.key, each.num_rows) for each in problems]), "sha256"),
        "k": k,
        **sampling._asdict(),
        "seed": seed,
    }
    if arguments["chat_template_kwargs"]:
        settings["chat_template_kwargs"] = arguments["chat_template_kwargs"]
    with naming_missing_folders(None if base_url else model):  # a server may use any name for its model
        if not base_url:
            from .local import check_vllm, load_tokenizer, model_settings

            if engine == "vllm":
                assert isinstance(model, _PATH)  # checked by `_check_engine`
                check_vllm(model)
            arguments["processing_class"] = tokenizer = load_tokenizer(model, processing_class)
            settings |= model_settings(model, tokenizer, is_chat, _weights_digest)
    generate = partial(_make_engine(arguments), sampling=sampling)

    score_with = partial(
        score,
        scorer=scorer_function,
        name=scorer_name,
        accuracy_threshold=accuracy_threshold,
        trainer_state=_trainer_state(model),
    )
    header = {name: value for name, value in settings.items() if name not in _SELECTING}
    with Journal(output_dir / JOURNAL_FILE, header) as journal:
        if not isinstance(dataset, _PATH):  # for a file or a dataset on the Hub, the header names it
            _check_same_dataset(journal, problems)
        with naming_missing_folders(None if base_url else model):
            jobs = make_jobs(problems, k, seed)
            _complete(journal, problems, jobs, generate, progress, score_with, scorer_function, scorer_name)
        completions_PK = [
            [journal.completions[problem.key, i] for i in range(k * problem.num_rows)] for problem in problems
        ]
        # The lock on the journal also keeps a second process from writing the files below.
        verdicts = _score_or_explain(score_with, scorer_function, scorer_name, journal, problems, completions_PK)
        warn_without_answers(completions_PK, verdicts, scorer)
        summary: dict[str, Any] = {"version": __version__, "settings": settings, "scorer": scorer_name}
        if accuracy_threshold is not None:
            summary["accuracy_threshold"] = accuracy_threshold
        summary |= summarise(problems, completions_PK, verdicts, k)
        if (message := _describe_replaced(output_dir / SUMMARY_FILE, summary)) is not None:
            logger.warning(message)
        write_completions(output_dir / PARQUET_FILE, problems, completions_PK, verdicts)
        with replacing(output_dir / SUMMARY_FILE) as path:
            finished = {"finished": datetime.now(UTC).isoformat()}  # everything else is the same if it is repeated
            path.write_text(json.dumps(finished | summary, indent=1) + "\n", encoding="utf-8")
    return summary


def _refuse_folder_of_run(folder: Path) -> None:
    """Raise a `ValueError` if an evaluation would be written among the files of a training run."""
    found = [name for name in _FILES_OF_RUN if (folder / name).is_file()]
    if found and not (folder / JOURNAL_FILE).exists():
        raise ValueError(
            f"`output_dir` {folder} is the folder of a training run: it contains `{found[0]}`. An evaluation needs a "
            f"folder of its own. Set `output_dir` to a folder in it, such as {folder / 'eval'}, where `trl-dapo "
            "report` finds the evaluation."
        )


def _describe_replaced(path: Path, summary: dict[str, Any]) -> str | None:
    """Return a warning if a summary with other settings is replaced by a new one, or `None`."""
    try:
        old = json.loads(path.read_text(encoding="utf-8"))
        theirs, own = (
            {name: each.get(name) for name in ("scorer", "accuracy_threshold")}
            | {name: each["settings"].get(name) for name in _SELECTING if name != "problems"}
            for each in (old, summary)
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # there is no earlier summary
    changes = [f"`{name}` {theirs[name]!r} -> {own[name]!r}" for name in own if theirs[name] != own[name]]
    if not changes:
        return None
    return (
        f"{path} is replaced: it was written with other settings ({', '.join(changes)}). To keep both summaries, use "
        "another `output_dir`."
    )


def _plain_path(path: str | os.PathLike, base_url: str | None = None) -> str:
    """Return a path without `./` and a slash at the end. With a server the model is a name and is not changed."""
    return str(path) if base_url else str(Path(path))


def _trainer_state(model: "str | os.PathLike | PreTrainedModel") -> "TrainerState | None":
    """Return the trainer state of a checkpoint, for reward functions that depend on it."""
    if not isinstance(model, _PATH):
        return None
    file = Path(model) / "trainer_state.json"
    if not file.is_file():
        return None
    from transformers import TrainerState

    return TrainerState.load_from_json(str(file))


def _score_or_explain(
    score_with: Callable[..., Verdicts],
    scorer: Scorer,
    name: str,
    journal: Journal,
    problems: list[Problem],
    completions_PK: list[list[GeneratedCompletion]],
) -> Verdicts:
    """Return the verdicts of a scorer. If it fails, raise an error that says which completions are kept."""
    try:
        return score_with(problems, completions_PK)
    except Exception as error:
        from ..rewards.checks import place_of_failure, was_raised_here

        if isinstance(error, (TypeError, ValueError)) and was_raised_here(error):
            what = str(error)
        else:
            place = place_of_failure(error, scorer)
            what = f"The scorer {name!r} failed{place} with {type(error).__name__}: {str(error).rstrip('.')}."
        raise ValueError(
            f"{what} {len(journal.completions):,} completions are stored in `{journal.path}`. Repeat the command with "
            "a scorer that works to continue from there."
        ) from error


def _make_engine(arguments: dict[str, Any]) -> Callable:
    """Return the engine with the arguments of `evaluate` that it takes. Only the libraries it needs are imported."""
    function: Callable
    if arguments["base_url"]:
        from .server_client import generate_with_server as function
    elif arguments["engine"] == "vllm":
        from .local import generate_with_vllm as function
    else:
        from .local import generate_with_transformers as function
    wanted = inspect.signature(function).parameters.keys() & arguments
    return partial(function, **{name: arguments[name] for name in wanted})


def _check_engine(arguments: dict[str, Any]) -> None:
    model, processing_class = arguments["model"], arguments["processing_class"]
    engine, base_url = arguments["engine"], without_secrets(arguments["base_url"])  # because it is part of messages
    check_choice("engine", engine, (None, *ENGINES))
    if base_url and engine:
        raise ValueError(
            f"`engine={engine!r}` contradicts `base_url` ({base_url}), because the server is the engine. Leave one of "
            "them out."
        )
    if base_url and not base_url.startswith(("http://", "https://")):
        raise ValueError(f"`base_url` must start with http:// or https://, got {base_url!r}. Add it.")
    in_process = not base_url and engine != "vllm"
    if not in_process and (not isinstance(model, _PATH) or processing_class is not None):
        raise ValueError(
            "A loaded model or tokenizer can only be evaluated with the engine 'transformers'. Give the path of the "
            "model, or leave out `engine` and `base_url`."
        )
    if not isinstance(model, _PATH) and processing_class is None:
        raise ValueError("A loaded model needs its tokenizer. Pass it as `processing_class`.")


def _check_folder(model: str | os.PathLike) -> None:
    """Raise an error if there is no model at a path, for instance in a run's folder with checkpoints but no model."""
    check_model_path(os.fspath(model))
    if not os.path.isdir(model) or any((Path(model) / name).is_file() for name in _MODEL_FILES):
        return
    if not any(Path(model).iterdir()):
        raise ValueError(
            f"`{model}` is an empty folder. Name the folder of a model, which contains `config.json`, or of an "
            "adapter, which contains `adapter_config.json`, such as the `output_dir` of `trl-dapo train`."
        )
    from transformers.trainer_utils import get_last_checkpoint

    if checkpoint := get_last_checkpoint(os.fspath(model)):
        raise ValueError(
            f"`{model}` contains no model, only checkpoints. Evaluate `{checkpoint}`, or save the trained model in "
            f"the folder with `trainer.save_model()`."
        )


_UNKNOWN = object()


def _style_in(journal: Path) -> Any:
    """Return the prompt style of stored completions: `None` for unchanged rows, `_UNKNOWN` if there are none."""
    with suppress(OSError, ValueError, KeyError, TypeError), journal.open("rb") as file:
        return json.loads(file.readline())["settings"]["prompt_style"]
    return _UNKNOWN


def _load_rows(arguments: dict[str, Any], scorer: Scorer, journal: Path) -> "tuple[datasets.Dataset, dict[str, Any]]":
    """Return the rows to evaluate on, and the settings that select them from a file or a dataset on the Hub."""
    dataset, style = arguments["dataset"], arguments["prompt_style"]
    chosen_by = ("split", "name", "offset", "limit", "on_bad_rows", "prompt_style")
    selection = {setting: arguments[setting] for setting in chosen_by}
    if isinstance(dataset, _PATH):
        from ..data import choose_prompt_style, find_file, load_prompts

        for name in ("split", "name"):
            if selection[name] != inspect.signature(evaluate).parameters[name].default and find_file(dataset):
                raise ValueError(
                    f"`{name}={selection[name]!r}` has no effect: `{dataset}` is a file, which has neither splits nor "
                    "configurations. Leave it out."
                )
        reading = {name: selection[name] for name in ("split", "name", "on_bad_rows")}
        # If completions are stored already, their style is used, also with a scorer that prefers another one.
        if style is None:
            style = _style_in(journal)
        # Unchanged rows cannot be bad, so `on_bad_rows` only makes sense for math problems.
        if style is _UNKNOWN or (style is None and selection["on_bad_rows"] != "error"):
            reward_funcs = [scorer] if is_reward_function(scorer) else []
            style = choose_prompt_style(dataset, reward_funcs=reward_funcs, **reading)
        selection["prompt_style"] = style
        rows = load_prompts(dataset, style, **reading, offset=selection["offset"], limit=selection["limit"])
    else:
        from ..data import plain_rows

        if isinstance(dataset, dict) or not hasattr(dataset, "column_names"):
            raise ValueError(
                f"`dataset` is a `{type(dataset).__name__}`. Use a file, the id of a dataset on the Hub, or a "
                "`Dataset`, such as one split of a `DatasetDict` or `Dataset.from_list(rows)`."
            )
        known = inspect.signature(evaluate).parameters
        if given := {name: value for name, value in selection.items() if value != known[name].default}:
            raise ValueError(
                f"{given} applies only to a file or a dataset on the Hub, but `dataset` is a loaded dataset. Select "
                "its rows before, and leave these out."
            )
        rows = plain_rows(dataset)
    if images := {"image", "images"} & set(rows.column_names or ()):
        raise ValueError(
            f"The dataset has the column {' and '.join(sorted(images))}, but the model would not see the images. "
            "Evaluate such a model during training, with `eval_dataset`."
        )
    return rows, selection


def _weights_digest(model: "str | os.PathLike | PreTrainedModel") -> str | None:
    """Return a hash of parts of a model's weights, or `None` if the model is not a local folder."""
    digest = hashlib.sha256()
    if not isinstance(model, _PATH):
        for name, parameter in model.named_parameters():
            values = parameter.detach().flatten()
            digest.update(name.encode())
            digest.update(values[:: 1 + len(values) // _SAMPLED_VALUES].float().cpu().numpy().tobytes())
    elif Path(model).is_dir():
        for path in sorted(path for path in Path(model).iterdir() if path.suffix in (".safetensors", ".bin")):
            size = path.stat().st_size
            digest.update(f"{path.name} {size}".encode())
            with open(path, "rb") as file:
                for position in range(0, size, max(_BLOCK, size // _SAMPLED_BLOCKS)):
                    file.seek(position)
                    digest.update(file.read(_BLOCK))
    else:
        return None
    return digest.hexdigest()[:16]


def _check_same_dataset(journal: Journal, problems: list[Problem]) -> None:
    """Raise a `ValueError` if the folder contains completions of another dataset, which might be a mistake."""
    known = {key for key, _ in journal.completions}
    if known and known.isdisjoint(problem.key for problem in problems):
        raise ValueError(
            f"`{journal.path}` contains completions of {len(known)} other problems, and none of these {len(problems)} "
            f"problems, the first of which has the id {problems[0].id!r}. Use another `output_dir`, or delete this "
            "file to start over."
        )


def _complete(
    journal: Journal,
    problems: list[Problem],
    jobs: list[Job],
    generate: Callable,
    progress: bool,
    score_with: Callable[..., Verdicts],
    scorer: Scorer,
    scorer_name: str,
) -> None:
    """
    Sample the completions that are missing in the journal.

    The scorer is tried on the first problem that is complete, so that one that does not work fails early.
    """
    from tqdm import tqdm

    todo = [job for job in jobs if (job.problem, job.index) not in journal.completions]
    if not todo:
        return
    if progress:  # a line before the model is loaded, which may be silent
        print(f"Sampling {len(todo):,} completions.", file=sys.stderr)
    num_known = len(jobs) - len(todo)
    num_others = len(journal.completions) - num_known  # from a larger `k` or `limit` before
    by_key = {problem.key: problem for problem in problems}
    num_wanted, num_missing = Counter(job.problem for job in jobs), Counter(job.problem for job in todo)
    is_tried = threading.Lock()  # acquired by the thread that tries the scorer, and never released
    # With a delay the bar is not drawn before the first completion. So it does not disturb the error for a model that
    # was not found.
    # In a file a bar would be one endless line, so there lines are printed from time to time.
    on_terminal = sys.stderr.isatty()
    is_hidden = not (progress and on_terminal)
    bar = tqdm(total=len(jobs), initial=num_known, unit="completion", disable=is_hidden, delay=1e-3)

    def show() -> None:
        if progress and not on_terminal:
            num_done = len(journal.completions) - num_others
            print(f"{num_done:,} of {len(jobs):,} completions.", file=sys.stderr, flush=True)
        bar.refresh()

    with bar, calling(show, every=SILENCE):

        def try_scorer(key: str) -> None:
            if is_tried.acquire(blocking=False):
                completions = [journal.completions[key, i] for i in range(num_wanted[key])]
                _score_or_explain(score_with, scorer, scorer_name, journal, [by_key[key]], [completions])

        def keep(job: Job, completion: GeneratedCompletion) -> None:
            journal.append(job.problem, job.index, completion)
            bar.update(len(journal.completions) - num_others - bar.n)
            with counting:
                num_missing[job.problem] -= 1
                is_complete = num_missing[job.problem] == 0
            if is_complete:
                try_scorer(job.problem)

        counting = threading.Lock()
        if known := next((key for key in num_wanted if not num_missing[key]), None):
            try_scorer(known)
        try:
            generate(todo, on_completion=keep)
        except (ConnectionError, MemoryError) as error:
            raise type(error)(
                f"{error} {len(journal.completions) - num_others} of {len(jobs)} completions are stored in "
                f"`{journal.path}`. Repeat the command to continue from there."
            ) from error


def summarise(
    problems: list[Problem], completions_PK: list[list[GeneratedCompletion]], found: Verdicts, k: int
) -> dict[str, Any]:
    """Return the figures of an evaluation. See [`evaluate`]."""
    verdicts_PK = found.of_problems
    scored = [i for i, verdicts in enumerate(verdicts_PK) if all(v.correct is not None for v in verdicts)]
    if not scored:
        raise ValueError(
            f"The scorer can score none of the {len(problems)} problems. The first one is {problems[0].row!r:.200}. "
            "Check its gold answer, or use another scorer."
        )
    counts = [count_problem(*zip(*verdicts_PK[i], strict=True)) for i in scored]
    values = problem_figures(counts, k)
    is_stated = [verdict.answer is not None for i in scored for verdict in verdicts_PK[i]]
    if not has_votes(is_stated, found.states_answers):
        values.pop(f"maj@{k}")

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
            {"id": problems[i].id, "source": problems[i].source, **count}
            for i, count in zip(scored, counts, strict=True)
        ],
    }


def _last_text(prompt: str | list[dict[str, Any]]) -> str:
    """Return the text of a prompt, or of its last message."""
    return prompt if isinstance(prompt, str) else content_text(prompt[-1].get("content"))


def _solution_text(solution: Any) -> str | None:
    """Return a gold answer as text for a file. A float is written in plain digits: 51.0 becomes 51."""
    text = gold_text(solution) if isinstance(solution, float) else solution
    return None if text is None else loggable(str(text))


def write_completions(
    path: Path, problems: list[Problem], completions_PK: list[list[GeneratedCompletion]], verdicts: Verdicts
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {
            "id": loggable(problem.id),
            "source": loggable(problem.source),
            "index": i,
            "prompt": loggable(_last_text(problem.prompt)),
            "solution": _solution_text(problem.solution),
            "completion": loggable(completion.text),
            "answer": None if verdict.answer is None else loggable(verdict.answer),
            "correct": verdict.correct,
            "length": completion.length,
            "truncated": completion.truncated,
        }
        for problem, completions, of_problem in zip(problems, completions_PK, verdicts.of_problems, strict=True)
        for i, (completion, verdict) in enumerate(zip(completions, of_problem, strict=True))
    ]
    types = {"completion": pa.large_string(), "correct": pa.bool_(), "truncated": pa.bool_()}
    types |= {"index": pa.int64(), "length": pa.int64()}
    schema = pa.schema({name: types.get(name, pa.string()) for name in rows[0]})
    with replacing(path) as temporary:
        pq.write_table(pa.Table.from_pylist(rows, schema), temporary)

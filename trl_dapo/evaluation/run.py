# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""One evaluation: ask for the completions that the journal lacks, score all of them, summarise and save.

Prompts and what a scorer is called with are those of training: rows come from [`trl_dapo.data.load_prompts`], and a
reward function gets every column of its row.
"""

import hashlib
import inspect
import json
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


PARQUET_FILE = "completions.parquet"
ENGINES = ("transformers", "vllm")
_PATH = (str, os.PathLike)
_SAMPLED_VALUES = 1024  # of each parameter
_BLOCK = 1 << 16  # bytes
_SAMPLED_BLOCKS = 256  # of each file
_MODEL_FILES = ("config.json", "adapter_config.json")
# What chooses the completions to ask for, and changes none of them: more of them may be asked for at any time.
_CHOOSING = ("offset", "limit", "on_bad_rows", "problems", "k")
# What each number may be.
_RANGES = {
    **dict.fromkeys(("k", "max_completion_length", "batch_size", "tensor_parallel_size", "concurrency"), COUNT),
    "temperature": Range(0, hint="0 takes the most probable token."),
    "top_p": SHARE,
    "top_k": Range(0, is_whole=True, hint="0 is all tokens."),
    "min_p": Range(0, 1, hint="0 is the model's own, or no minimum."),
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
    Measure avg@k, pass@k and maj@k of a model, each with a 95 % interval over problems.

    The defaults are the AIME protocol of the DAPO paper: 32 completions per problem at temperature 1.0 and top-p 0.7,
    up to 20,480 tokens, scored by the rule of the last `Answer:` line.

    The prompts are those that training would use on the same data, and completions are scored as in training. See
    [`~trl_dapo.data.choose_prompt_style`] for how a dataset becomes prompts. Equal rows are repeats of one problem:
    `k` completions are sampled for each row, and pooled. Every figure is a mean over problems.

    Completions are stored as they arrive. The same call with the same `output_dir` continues an evaluation that was
    interrupted, and samples nothing twice. With another `k`, `limit` or `offset` it samples what is missing. With
    other settings it is refused. The folder contains

    - `summary.json`: what this function returns, and when it did;
    - `completions.parquet`: `id`, `source`, `index`, `prompt`, `solution`, `completion`, `answer`, `correct`, `length`
      and `truncated` of each completion (what UTF-8 cannot hold is replaced by `?`);
    - `completions.jsonl`: the settings and the completions as they arrived.

    Args:
        model (`str`, `os.PathLike` or [`~transformers.PreTrainedModel`]):
            Path or hub id of a model. With transformers in this process also an adapter or a loaded model. With a
            server the name under which it serves the model.
        dataset (`str`, `os.PathLike` or [`~datasets.Dataset`]):
            A file, also in the folder that `TRL_DAPO_DATA` names, or a hub id; or a dataset with a column `prompt`
            of text or messages, and the columns that the scorer reads.
        output_dir (`str` or `os.PathLike`):
            Folder of this evaluation.
        split (`str`, *optional*, defaults to `"train"`):
            Split of a hub dataset.
        name (`str`, *optional*):
            Configuration of a hub dataset.
        offset (`int`, *optional*, defaults to `0`):
            Number of problems to skip. Equal rows that are used unchanged are one problem.
        limit (`int`, *optional*):
            Number of problems to take at most. Defaults to all.
        on_bad_rows (`str`, *optional*, defaults to `"error"`):
            What to do with rows without a problem or a gold answer: `"error"` refuses them, `"skip"` leaves them out.
        prompt_style (`str`, *optional*):
            `"answer_line"`, `"boxed"`, `"think"` or `"as_is"`, see [`~trl_dapo.data.load_math_dataset`]. By default
            rows with a `prompt` are used unchanged if the scorer is a reward function of your own or of TRL.
            All others are math problems, in the style that the scorer reads: `"answer_line"`, `"boxed"` with
            `"math_verify"` and `"accuracy_reward"`, else `"as_is"`. This and the five before it are not for a loaded
            dataset, which is used unchanged.
        k (`int`, *optional*, defaults to `32`):
            Completions a problem.
        temperature (`float`, *optional*, defaults to `1.0`):
            Temperature; `0`, with `k=1`, takes the most probable token.
        top_p (`float`, *optional*, defaults to `0.7`):
            Nucleus.
        top_k (`int`, *optional*, defaults to `0`):
            Number of tokens to sample from; `0` is all.
        min_p (`float`, *optional*, defaults to `0.0`):
            Least probability of a token, as a share of the most probable one's. As in training, `0` leaves the
            model's own, if its generation config has one.
        max_completion_length (`int`, *optional*, defaults to `20480`):
            Number of tokens at which a completion is truncated.
        chat_template_kwargs (`dict`, *optional*):
            Arguments of the chat template, such as `{"enable_thinking": False}`: those of the training run.
        seed (`int`, *optional*, defaults to `42`):
            Seed from which each completion's own is made.
        scorer (`str` or `Callable`, *optional*, defaults to `"dapo_math"`):
            `"dapo_math"` reads the last `Answer:` line by the paper's rule. `"math_verify"` and TRL's
            `"accuracy_reward"` compare LaTeX such as `\boxed{}` as symbols. `"last_number"` reads the last number of
            any text. Or a reward function, also by its dotted import path, sync or async: it is called with what
            training calls it with, and the majority votes on what it passes to `log_extra` as `answer` or
            `<its name>_answer`. Or a function of the completion and the gold answer, which returns whether the
            completion is correct (`None` if the gold answer cannot be read) and the answer (`None` if there is none).
        accuracy_threshold (`float`, *optional*):
            A completion with a reward above it is correct, as `dynamic_sampling_accuracy_threshold` in training.
            Defaults to 0 where the rewards take no more than two values; scores need it.
        engine (`str`, *optional*):
            `"transformers"` or `"vllm"`, in this process. Without a `base_url` it defaults to `"transformers"`.
        processing_class ([`~transformers.PreTrainedTokenizerBase`], *optional*):
            Tokenizer, for `"transformers"` and `"vllm"`. Defaults to the model's own; a loaded model needs it.
        batch_size (`int`, *optional*, defaults to `16`):
            Completions generated at once by `"transformers"`.
        tensor_parallel_size (`int`, *optional*, defaults to `1`):
            Number of GPUs that share the model with `"vllm"`.
        base_url (`str`, *optional*):
            Address of an OpenAI-compatible server, such as `"http://localhost:8000/v1"`. Start vLLM's with `vllm serve
            MODEL --generation-config vllm`, or it adds the model's own sampling parameters. The environment variable
            `OPENAI_API_KEY` is sent along.
        concurrency (`int`, *optional*, defaults to `64`):
            Requests under way at a time.
        request_timeout (`float`, *optional*, defaults to `1800.0`):
            Seconds without an answer after which a request is given up.
        num_retries (`int`, *optional*, defaults to `6`):
            How often a failed request is repeated where the reason may pass, with growing delays.
        progress (`bool`, *optional*, defaults to `True`):
            Whether to show a progress bar.

    Returns:
        `version`, `settings` and `scorer`; `num_problems`, `num_unscored_problems` (their gold answer cannot be read;
        they are left out of all figures), `metrics` (`"avg@32"`, `"pass@2"`, `"pass@4"` ... `"pass@32"`, `"maj@32"`,
        each with `mean`, `low` and `high`; `maj` only where the scorer states answers or most completions have an
        `Answer:` line or a box), `mean_length` in tokens (`None` if a server does not say) and `truncated`
        (a share); the same for each source in `sources`; and `problems`, each scored one with `id`, `source`,
        `num_correct`, `num_completions` and `maj`.

    Raises:
        ValueError: If a setting has no meaning or differs from those of `output_dir`, or the scorer fails.
        ConnectionError: If the server is down or refuses a request; what it had answered is kept.
    """
    arguments = locals()
    for setting, allowed in _RANGES.items():
        check_value(setting, arguments[setting], allowed)
    if temperature == 0 and k > 1:
        raise ValueError(f"At `temperature=0` the {k} completions of a problem are all the same: use `k=1`.")
    _check_engine(arguments)
    arguments["chat_template_kwargs"] = read_mapping("chat_template_kwargs", chat_template_kwargs)
    scorer_function, scorer_name = load_scorer(scorer, prompt_style), name_of(scorer)
    if accuracy_threshold is not None and not is_reward_function(scorer_function):
        raise ValueError(
            f"`accuracy_threshold={accuracy_threshold}` is for rewards, but the scorer {scorer_name!r} decides "
            "itself what is correct. Leave it out."
        )
    if isinstance(model, _PATH) and not base_url:
        _check_folder(model)

    output_dir = Path(output_dir)
    rows, selection = _load_rows(arguments, scorer_function, output_dir / JOURNAL_FILE)
    from ..data import each_row

    columns = rows.column_names or [*next(iter(rows), {})]  # which a stream may not know
    check_columns(scorer_function, scorer_name, columns, sends_ids=not base_url)
    problems = read_problems(each_row(rows))
    is_chat = any(not isinstance(problem.prompt, str) for problem in problems)
    if arguments["chat_template_kwargs"] and not is_chat:
        raise ValueError(
            f"`chat_template_kwargs={arguments['chat_template_kwargs']}` has no effect: the prompts are text, around "
            "which no chat template goes. Leave it out, or give messages."
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
    with naming_missing_folders(None if base_url else model):  # a server may name its model as it likes
        if not base_url:
            from .local import check_vllm, load_tokenizer, what_decides

            if engine == "vllm":
                assert isinstance(model, _PATH)  # by `_check_engine`
                check_vllm(model)
            arguments["processing_class"] = tokenizer = load_tokenizer(model, processing_class)
            settings |= what_decides(model, tokenizer, is_chat, _weights_digest)
    generate = partial(_make_engine(arguments), sampling=sampling)

    score_with = partial(
        score,
        scorer=scorer_function,
        name=scorer_name,
        accuracy_threshold=accuracy_threshold,
        trainer_state=_trainer_state(model),
    )
    header = {name: value for name, value in settings.items() if name not in _CHOOSING}
    with Journal(output_dir / JOURNAL_FILE, header) as journal:
        if not isinstance(dataset, _PATH):  # else the header says which dataset it is
            _refuse_another_dataset(journal, problems)
        with naming_missing_folders(None if base_url else model):
            _complete(journal, problems, make_jobs(problems, k, seed), generate, progress, score_with, scorer_name)
        completions_PK = [
            [journal.completions[problem.key, i] for i in range(k * problem.num_rows)] for problem in problems
        ]
        # The lock on the journal also keeps a second process from writing these.
        verdicts = _scored(score_with, scorer_name, journal, problems, completions_PK)
        warn_without_answers(completions_PK, verdicts, scorer)
        summary: dict[str, Any] = {"version": __version__, "settings": settings, "scorer": scorer_name}
        if accuracy_threshold is not None:
            summary["accuracy_threshold"] = accuracy_threshold
        summary |= summarise(problems, completions_PK, verdicts, k)
        write_completions(output_dir / PARQUET_FILE, problems, completions_PK, verdicts)
        with replacing(output_dir / SUMMARY_FILE) as path:
            finished = {"finished": datetime.now(UTC).isoformat()}  # the rest says the same again whenever
            path.write_text(json.dumps(finished | summary, indent=1) + "\n", encoding="utf-8")
    return summary


def _plain_path(path: str | os.PathLike, base_url: str | None = None) -> str:
    """A path without what does not matter, `./` and a slash at the end. A server names its model as it likes."""
    return str(path) if base_url else str(Path(path))


def _trainer_state(model: "str | os.PathLike | PreTrainedModel") -> "TrainerState | None":
    """Return a checkpoint's state of training, for reward functions that depend on it."""
    if not isinstance(model, _PATH):
        return None
    file = Path(model) / "trainer_state.json"
    if not file.is_file():
        return None
    from transformers import TrainerState

    return TrainerState.load_from_json(str(file))


def _scored(
    score_with: Callable[..., Verdicts],
    name: str,
    journal: Journal,
    problems: list[Problem],
    completions_PK: list[list[GeneratedCompletion]],
) -> Verdicts:
    """The verdicts; where a scorer fails, an error that says what is kept."""
    try:
        return score_with(problems, completions_PK)
    except Exception as error:
        what = str(error) if isinstance(error, ValueError) else f"The scorer {name!r} failed: {error!r}."
        raise ValueError(
            f"{what} {len(journal.completions):,} completions are in `{journal.path}`: the same command with a scorer "
            "that works continues from there."
        ) from error


def _make_engine(arguments: dict[str, Any]) -> Callable:
    """The engine that `evaluate` was asked for, which takes what it generates for; only its libraries are imported."""
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
    engine, base_url = arguments["engine"], without_secrets(arguments["base_url"])  # which messages quote
    check_choice("engine", engine, (None, *ENGINES))
    if base_url and engine:
        raise ValueError(f"With a `base_url` ({base_url}) the server is the engine: leave out `engine={engine!r}`.")
    if base_url and not base_url.startswith(("http://", "https://")):
        raise ValueError(f"`base_url` must start with http:// or https://, got {base_url!r}.")
    in_process = not base_url and engine != "vllm"
    if not in_process and (not isinstance(model, _PATH) or processing_class is not None):
        raise ValueError("A loaded model or tokenizer can be evaluated by the engine 'transformers' only.")
    if not isinstance(model, _PATH) and processing_class is None:
        raise ValueError("A loaded model needs its tokenizer as `processing_class`.")


def _check_folder(model: str | os.PathLike) -> None:
    """Refuses a path where nothing is, and the folder of a run that has left checkpoints and no model."""
    check_model_path(os.fspath(model))
    if not os.path.isdir(model) or any((Path(model) / name).is_file() for name in _MODEL_FILES):
        return
    from transformers.trainer_utils import get_last_checkpoint

    if checkpoint := get_last_checkpoint(os.fspath(model)):
        raise ValueError(
            f"`{model}` holds no model, only checkpoints: evaluate `{checkpoint}`, or save the trained model there "
            "with `trainer.save_model()`."
        )


_UNKNOWN = object()


def _style_in(journal: Path) -> Any:
    """
    Return the prompt style of the stored completions, `None` for unchanged rows, or `_UNKNOWN` if there are none.
    """
    with suppress(OSError, ValueError, KeyError, TypeError), journal.open("rb") as file:
        return json.loads(file.readline())["settings"]["prompt_style"]
    return _UNKNOWN


def _load_rows(arguments: dict[str, Any], scorer: Scorer, journal: Path) -> "tuple[datasets.Dataset, dict[str, Any]]":
    """The rows to evaluate on, and what says which of a file or a dataset on the Hub they are."""
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
        # Another scorer reads the completions that are there, whatever it would have asked for.
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
                f"`dataset` is a `{type(dataset).__name__}`. Give a file, the id of a dataset on the Hub, or a "
                "`Dataset`: one split of a `DatasetDict`, or `Dataset.from_list(rows)`."
            )
        known = inspect.signature(evaluate).parameters
        if given := {name: value for name, value in selection.items() if value != known[name].default}:
            raise ValueError(f"{given} applies to a file or a hub dataset, not to a loaded dataset.")
        rows = plain_rows(dataset)
    if images := {"image", "images"} & set(rows.column_names or ()):
        raise ValueError(
            f"The dataset has {' and '.join(sorted(images))}, which would not be shown to the model. Evaluate such a "
            "model during training, with `eval_dataset`."
        )
    return rows, selection


def _weights_digest(model: "str | os.PathLike | PreTrainedModel") -> str | None:
    """Return what distinguishes two models of the same name, or `None` for a model that is not on this machine."""
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


def _refuse_another_dataset(journal: Journal, problems: list[Problem]) -> None:
    """The folder of another dataset is not written over by mistake."""
    known = {key for key, _ in journal.completions}
    if known and known.isdisjoint(problem.key for problem in problems):
        raise ValueError(
            f"`{journal.path}` holds completions of {len(known)} other problems, and of none of these "
            f"{len(problems)}, of which the first has the id {problems[0].id!r}. Use another `output_dir`, or delete "
            "that file to start over."
        )


def _complete(
    journal: Journal,
    problems: list[Problem],
    jobs: list[Job],
    generate: Callable,
    progress: bool,
    score_with: Callable[..., Verdicts],
    scorer_name: str,
) -> None:
    """Ask for the completions that the journal lacks; a scorer that fails does so on the first problem's."""
    from tqdm import tqdm

    todo = [job for job in jobs if (job.problem, job.index) not in journal.completions]
    if not todo:
        return
    if progress:  # what loads the model may be silent
        print(f"Asking for {len(todo):,} answers.", file=sys.stderr)
    num_known = len(jobs) - len(todo)
    num_others = len(journal.completions) - num_known  # of a larger `k` or `limit`
    by_key = {problem.key: problem for problem in problems}
    num_asked, num_missing = Counter(job.problem for job in jobs), Counter(job.problem for job in todo)
    is_tried = threading.Lock()  # taken by whoever tries the scorer, and kept
    # With a delay nothing is drawn before the first completion: a model that is not found leaves its line alone.
    bar = tqdm(total=len(jobs), initial=num_known, unit="completion", disable=not progress, delay=1e-3)
    with bar, calling(bar.refresh, every=SILENCE):

        def try_scorer(key: str) -> None:
            if is_tried.acquire(blocking=False):
                completions = [journal.completions[key, i] for i in range(num_asked[key])]
                _scored(score_with, scorer_name, journal, [by_key[key]], [completions])

        def keep(job: Job, completion: GeneratedCompletion) -> None:
            journal.append(job.problem, job.index, completion)
            bar.update(len(journal.completions) - num_others - bar.n)
            with counting:
                num_missing[job.problem] -= 1
                is_complete = num_missing[job.problem] == 0
            if is_complete:
                try_scorer(job.problem)

        counting = threading.Lock()
        if known := next((key for key in num_asked if not num_missing[key]), None):
            try_scorer(known)
        try:
            generate(todo, on_completion=keep)
        except (ConnectionError, MemoryError) as error:
            raise type(error)(
                f"{error} {len(journal.completions) - num_others} of {len(jobs)} completions are in "
                f"`{journal.path}`: the same command continues from there."
            ) from error


def summarise(
    problems: list[Problem], completions_PK: list[list[GeneratedCompletion]], found: Verdicts, k: int
) -> dict[str, Any]:
    verdicts_PK = found.of_problems
    scored = [i for i, verdicts in enumerate(verdicts_PK) if all(v.correct is not None for v in verdicts)]
    if not scored:
        raise ValueError(
            f"The scorer can score none of the {len(problems)} problems, such as {problems[0].row!r:.200}."
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
    """The text of a prompt: of messages the last one's, which asks."""
    return prompt if isinstance(prompt, str) else content_text(prompt[-1].get("content"))


def _solution_text(solution: Any) -> str | None:
    """A gold answer as a file shows it, a float as plain digits: 51.0 is the answer 51."""
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

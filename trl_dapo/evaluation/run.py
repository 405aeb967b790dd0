# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""One evaluation: ask for the completions that the journal lacks, score all of them, summarise and save."""

import hashlib
import inspect
import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..rewards.dapo_math import content_text, loggable
from ..run.files import replacing
from ..run.stopwatch import SILENCE, calling
from ..settings.arguments import check_model_path, naming_missing_folders
from ..settings.ranges import COUNT, POSITIVE, SHARE, Range, check_choice, check_value
from ..settings.secrets import without_secrets
from ..version import __version__
from .jobs import JOURNAL_FILE, SUMMARY_FILE, Completion, Job, Journal, Problem, Sampling, make_jobs, read_problems
from .scorers import STYLES, Scorer, Verdict, columns_of, load_scorer, score, warn_without_answers
from .statistics import count_problem, estimate_mean, problem_figures


if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


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
    max_completion_length: int = 20480,
    seed: int = 42,
    scorer: str | Scorer = "dapo_math",
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
    Measure avg@k, pass@k and maj@k of a model on math problems, each with a 95 % interval over problems.

    The defaults are the AIME protocol of the DAPO paper: 32 completions a problem at temperature 1.0 and top-p 0.7, up
    to 20,480 tokens, scored by the rule of the last `Answer:` line.

    Rows with equal source and id, or with equal prompts where there is no id, are repeats of one problem: `k`
    completions are asked for each, and pooled. Every figure is a mean over problems.

    Every completion is on disk when the next one is asked for. The same call with the same `output_dir` continues an
    evaluation that was interrupted and asks for nothing twice. So does one with another `k`, `limit` or `offset`: it
    asks for what is missing. With other settings it is refused. The folder holds

    - `summary.json`: what this function returns, and when it did;
    - `completions.parquet`: `id`, `source`, `index`, `prompt`, `solution`, `completion`, `answer`, `correct`, `length`
      and `truncated` of each completion (what UTF-8 cannot hold is replaced by `?`);
    - `completions.jsonl`: the settings and the completions as they arrived.

    Args:
        model (`str`, `os.PathLike` or [`~transformers.PreTrainedModel`]):
            Path or hub id of a model. With transformers in this process also an adapter or a loaded model. With a
            server the name under which it serves the model.
        dataset (`str`, `os.PathLike` or [`~datasets.Dataset`]):
            A file, also in the folder that `TRL_DAPO_DATA` names, or a hub id; or a dataset as
            [`~trl_dapo.data.load_math_dataset`] returns it. Prompts may be text, `id` and `source` be missing.
        output_dir (`str` or `os.PathLike`):
            Folder of this evaluation.
        split (`str`, *optional*, defaults to `"train"`):
            Split of a hub dataset.
        name (`str`, *optional*):
            Configuration of a hub dataset.
        offset (`int`, *optional*, defaults to `0`):
            Number of problems to skip.
        limit (`int`, *optional*):
            Number of problems to take at most. Defaults to all.
        on_bad_rows (`str`, *optional*, defaults to `"error"`):
            What to do with rows without a problem or a gold answer: `"error"` refuses them, `"skip"` leaves them out.
        prompt_style (`str`, *optional*):
            `"answer_line"`, `"boxed"`, `"think"` or `"as_is"`, see [`~trl_dapo.data.load_math_dataset`]. Defaults to
            what the scorer reads: `"answer_line"`, with `"math_verify"` and `"accuracy_reward"` `"boxed"`, with any
            other `"as_is"`. This and the five before it are not for a loaded dataset, which is taken as it is.
        k (`int`, *optional*, defaults to `32`):
            Completions a problem.
        temperature (`float`, *optional*, defaults to `1.0`):
            Temperature; `0`, with `k=1`, takes the most probable token.
        top_p (`float`, *optional*, defaults to `0.7`):
            Nucleus.
        top_k (`int`, *optional*, defaults to `0`):
            Number of tokens to sample from; `0` is all.
        max_completion_length (`int`, *optional*, defaults to `20480`):
            Number of tokens at which a completion is truncated.
        seed (`int`, *optional*, defaults to `42`):
            Seed from which each completion's own is made.
        scorer (`str` or `Callable`, *optional*, defaults to `"dapo_math"`):
            `"dapo_math"` reads the last `Answer:` line by the paper's rule. `"math_verify"` and TRL's
            `"accuracy_reward"` compare LaTeX such as `\boxed{}` as symbols. `"last_number"` reads the last number of
            any text. Or a function, also by its dotted import path: a reward function, or a function of the completion
            and the gold answer. It returns whether the completion is correct (`None` if the gold answer cannot be
            read) and the extracted answer (`None` if there is none), on which the majority votes as text.
        engine (`str`, *optional*):
            `"transformers"` or `"vllm"`, in this process. Without a `base_url` it defaults to `"transformers"`.
        processing_class ([`~transformers.PreTrainedTokenizerBase`], *optional*):
            Tokenizer, for `"transformers"`. Defaults to the model's own; a loaded model needs it.
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
        each with `mean`, `low` and `high`), `mean_length` in tokens (`None` if a server does not say) and `truncated`
        (a share); the same for each source in `sources`; and `problems`, each scored one with `id`, `source`,
        `num_correct`, `num_completions` and `maj`.

    Raises:
        ValueError: If a setting has no meaning or differs from those of `output_dir`, or an id is two problems'.
        ConnectionError: If the server is down or refuses a request; what it had answered is kept.
    """
    arguments = locals()
    for setting, allowed in _RANGES.items():
        check_value(setting, arguments[setting], allowed)
    if temperature == 0 and k > 1:
        raise ValueError(f"At `temperature=0` the {k} completions of a problem are all the same: use `k=1`.")
    _check_engine(arguments)
    scorer_function = load_scorer(scorer, prompt_style)
    if isinstance(model, _PATH) and not base_url:
        _check_folder(model)

    chosen_by = ("split", "name", "offset", "limit", "on_bad_rows", "prompt_style")
    selection = {setting: arguments[setting] for setting in chosen_by}
    if isinstance(dataset, _PATH) and prompt_style is None:
        selection["prompt_style"] = _style_of(scorer, Path(output_dir) / JOURNAL_FILE)
    columns = columns_of(scorer_function)
    problems = read_problems(_load_rows(dataset, selection, columns), columns)
    sampling = Sampling(temperature, top_p, top_k, max_completion_length)
    settings = {
        "model": str(model) if isinstance(model, _PATH) else model.config.name_or_path,
        "weights": _weights_digest(model),
        "engine": "server" if base_url else engine or "transformers",
        **({"dataset": str(dataset), **selection} if isinstance(dataset, _PATH) else {}),
        "problems": hashlib.sha256(json.dumps([problem[:5] for problem in problems]).encode()).hexdigest()[:16],
        "k": k,
        **sampling._asdict(),
        "seed": seed,
    }
    generate = partial(_make_engine(arguments), sampling=sampling)

    output_dir = Path(output_dir)
    header = {name: value for name, value in settings.items() if name not in _CHOOSING}
    with Journal(output_dir / JOURNAL_FILE, header) as journal:
        _refuse_other_problems(journal, problems)
        with naming_missing_folders(None if base_url else model):  # a server may name its model as it likes
            _complete(journal, make_jobs(problems, k, seed), generate, progress)
        completions_PK = [
            [journal.completions[problem.key, i] for i in range(k * problem.num_rows)] for problem in problems
        ]
        # The lock on the journal also keeps a second process from writing these.
        verdicts_PK = score(problems, completions_PK, scorer_function)
        warn_without_answers(completions_PK, verdicts_PK, scorer)
        summary = {
            "version": __version__,
            "settings": settings,
            "scorer": scorer if isinstance(scorer, str) else getattr(scorer, "__name__", type(scorer).__name__),
            **summarise(problems, completions_PK, verdicts_PK, k),
        }
        write_completions(output_dir / PARQUET_FILE, problems, completions_PK, verdicts_PK)
        with replacing(output_dir / SUMMARY_FILE) as path:
            finished = {"finished": datetime.now(UTC).isoformat()}  # the rest says the same again whenever
            path.write_text(json.dumps(finished | summary, indent=1) + "\n", encoding="utf-8")
    return summary


def _make_engine(arguments: dict[str, Any]) -> Callable:
    """The engine that `evaluate` was asked for, which takes what it generates for; only its libraries are imported."""
    function: Callable
    if arguments["base_url"]:
        from .server import generate_with_server as function
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


def _style_of(scorer: str | Scorer, journal: Path) -> str:
    """The prompt style of the completions that are there, else the one that asks for what the scorer reads."""
    with suppress(OSError, ValueError, KeyError, TypeError), journal.open("rb") as file:
        return json.loads(file.readline())["settings"]["prompt_style"]
    return STYLES.get(scorer, "as_is") if isinstance(scorer, str) else "as_is"


def _load_rows(
    dataset: "str | os.PathLike | datasets.Dataset", selection: dict[str, Any], columns: list[str]
) -> "datasets.Dataset":
    if isinstance(dataset, _PATH):
        from ..data import has_prompts, load_math_dataset, load_rows

        # A reward function that asks for other columns than gold answers gets them as in training.
        is_math = columns == ["solution"] or selection["prompt_style"] != "as_is" or selection["on_bad_rows"] == "skip"
        if not is_math and has_prompts(dataset):
            dataset = load_rows(dataset, selection["offset"], selection["limit"])
        else:
            dataset = load_math_dataset(dataset, **selection)
    else:
        known = inspect.signature(evaluate).parameters
        if given := {name: value for name, value in selection.items() if value != known[name].default}:
            raise ValueError(f"{given} applies to a file or a hub dataset, not to a loaded dataset.")
    if missing := {"prompt", *columns} - set(dataset.column_names):
        lacks, found = " and no ".join(map(repr, sorted(missing))), ", ".join(map(repr, dataset.column_names))
        raise ValueError(f"The dataset has no column {lacks}, for which the scorer asks; found {found}.")
    if images := {"image", "images"} & set(dataset.column_names):
        raise ValueError(
            f"The dataset has {' and '.join(sorted(images))}, which would not be shown to the model. Evaluate such a "
            "model during training, with `eval_dataset`."
        )
    return dataset


def _weights_digest(model: "str | os.PathLike | PreTrainedModel") -> str | None:
    """Tells one training's result from another's of the same name; `None` for a model that is elsewhere."""
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


def _refuse_other_problems(journal: Journal, problems: list[Problem]) -> None:
    """The folder of another dataset is not written over by mistake."""
    known = {key for key, _ in journal.completions}
    if known and known.isdisjoint(problem.key for problem in problems):
        raise ValueError(
            f"`{journal.path}` holds completions of {len(known)} other problems, and of none of these "
            f"{len(problems)}, of which the first has the id {problems[0].id!r}. Use another `output_dir`, or delete "
            "that file to start over."
        )


def _complete(journal: Journal, jobs: list[Job], generate: Callable, progress: bool) -> None:
    from tqdm import tqdm

    todo = [job for job in jobs if (job.problem, job.index) not in journal.completions]
    if not todo:
        return
    if progress:  # what loads the model may be silent
        print(f"Asking for {len(todo):,} answers.", file=sys.stderr)
    num_known = len(jobs) - len(todo)
    num_others = len(journal.completions) - num_known  # of a larger `k` or `limit`
    # With a delay nothing is drawn before the first completion: a model that is not found leaves its line alone.
    bar = tqdm(total=len(jobs), initial=num_known, unit="completion", disable=not progress, delay=1e-3)
    with bar, calling(bar.refresh, every=SILENCE):

        def keep(job: Job, completion: Completion) -> None:
            journal.append(job.problem, job.index, completion)
            bar.update(len(journal.completions) - num_others - bar.n)

        try:
            generate(todo, on_completion=keep)
        except (ConnectionError, MemoryError) as error:
            raise type(error)(
                f"{error} {len(journal.completions) - num_others} of {len(jobs)} completions are in "
                f"`{journal.path}`: the same command continues from there."
            ) from error


def summarise(
    problems: list[Problem], completions_PK: list[list[Completion]], verdicts_PK: list[list[Verdict]], k: int
) -> dict[str, Any]:
    scored = [i for i, verdicts in enumerate(verdicts_PK) if all(v.correct is not None for v in verdicts)]
    if not scored:
        raise ValueError(
            f"The scorer can read none of the {len(problems)} gold answers, such as {problems[0].solution!r:.80}."
        )
    counts = [count_problem(*zip(*verdicts_PK[i], strict=True)) for i in scored]
    values = problem_figures(counts, k)

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
            "prompt": loggable(_last_text(problem.prompt)),
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

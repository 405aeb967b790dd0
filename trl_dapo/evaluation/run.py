# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""One evaluation: ask for the completions that the journal lacks, score all of them, summarise."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..version import __version__
from .engines import Job, Sampling, generate_with_server, generate_with_transformers, generate_with_vllm
from .journal import Completion, Journal


if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

ENGINES = ("transformers", "vllm")
SCORERS = ("dapo_math", "math_verify")
JOURNAL_FILE = "completions.jsonl"
PARQUET_FILE = "completions.parquet"
SUMMARY_FILE = "summary.json"

_NO_ANSWER = {"[INVALID]", "[unparseable]", "[skipped]", "[killed]"}  # in the words of the scorers


class _Problem(NamedTuple):
    id: str
    source: str
    prompt: str | list[dict[str, str]]
    solution: str


class _Verdict(NamedTuple):
    """`correct` is `None` if the gold answer could not be read, `answer` if the completion has none."""

    correct: bool | None
    answer: str | None


Scorer = Callable[[str, str], tuple[bool | None, str | None]]


def evaluate(
    model: "str | os.PathLike | PreTrainedModel",
    dataset: "str | os.PathLike | datasets.Dataset",
    output_dir: str | os.PathLike,
    *,
    split: str = "train",
    name: str | None = None,
    offset: int = 0,
    limit: int | None = None,
    prompt_style: str = "answer_line",
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

    Every completion is on disk when the next one is asked for. The same call with the same `output_dir` continues an
    evaluation that was interrupted and asks for nothing twice; with other settings it is refused. The folder holds

    - `summary.json`: what this function returns;
    - `completions.parquet`: `id`, `source`, `index`, `prompt`, `solution`, `completion`, `answer`, `correct`, `length`
      and `truncated` of each completion (what UTF-8 cannot hold is replaced by `?`);
    - `completions.jsonl`: the settings and the completions as they arrived.

    Args:
        model (`str`, `os.PathLike` or [`~transformers.PreTrainedModel`]):
            Path or hub id of a model; in this process with transformers also an adapter or a loaded model; for a
            server the name that it serves the model under.
        dataset (`str`, `os.PathLike` or [`~datasets.Dataset`]):
            What [`~trl_dapo.data.load_math_dataset`] takes or returns. In a dataset that is given as such, `id` and
            `source` may be missing, and prompts may be plain text.
        output_dir (`str` or `os.PathLike`):
            Folder of this evaluation.
        split (`str`, *optional*, defaults to `"train"`):
            Of a hub dataset.
        name (`str`, *optional*):
            Configuration of a hub dataset.
        offset (`int`, *optional*, defaults to `0`):
            Number of problems to skip.
        limit (`int`, *optional*):
            Number of problems to take at most. Defaults to all.
        prompt_style (`str`, *optional*, defaults to `"answer_line"`):
            `"answer_line"`, `"boxed"` or `"as_is"`, see [`~trl_dapo.data.load_math_dataset`]. With the former three
            not for a dataset that is given as such.
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
            `"dapo_math"`, the rule of the paper; `"math_verify"`, symbolic comparison; or a function of the completion
            and the gold answer that returns whether it is correct (`None` if the gold answer cannot be read) and the
            extracted answer (`None` if there is none), on which the majority votes as text.
        engine (`str`, *optional*):
            `"transformers"` or `"vllm"`, in this process. Defaults to `"transformers"`, without a `base_url`.
        processing_class ([`~transformers.PreTrainedTokenizerBase`], *optional*):
            Tokenizer, for `"transformers"`. Defaults to the model's own; a loaded model needs it.
        batch_size (`int`, *optional*, defaults to `16`):
            Completions generated at once by `"transformers"`.
        tensor_parallel_size (`int`, *optional*, defaults to `1`):
            Number of GPUs that share the model with `"vllm"`.
        base_url (`str`, *optional*):
            Address of an OpenAI-compatible server that answers instead, such as `"http://localhost:8000/v1"`. Start
            vLLM's with `vllm serve MODEL --generation-config vllm`: else it adds the sampling parameters that come
            with the model to those that are asked for. The environment variable `OPENAI_API_KEY` is sent along.
        concurrency (`int`, *optional*, defaults to `64`):
            Requests under way at a time.
        request_timeout (`float`, *optional*, defaults to `1800.0`):
            Seconds of silence after which a request is given up.
        num_retries (`int`, *optional*, defaults to `6`):
            How often a request is made again that failed for a reason that may pass, with growing delays.
        progress (`bool`, *optional*, defaults to `True`):
            Whether to show a progress bar.

    Returns:
        `dict`:
            `settings`, `scorer`, `version`; `num_problems`, `num_unscored_problems` (their gold answer cannot be read;
            they are left out), `metrics` (`"avg@32"`, `"pass@2"`, `"pass@4"` ... `"pass@32"` and `"maj@32"`, each with
            `mean`, `low` and `high`), `mean_length` in tokens (`None` if the server does not say) and `truncated` (a
            share); the same for each source in `sources`; and `problems`, each with `id`, `source`, `num_correct` and
            `maj`.

    Raises:
        `ValueError`: If a setting has no meaning, or differs from that of the completions in `output_dir`.
        `ConnectionError`: If the server is down; what it had answered is kept.

    Example:

    ```python
    summary = evaluate("outputs/trained", "aime-2024.parquet", "outputs/aime", engine="vllm")
    print(summary["metrics"]["avg@32"])
    ```
    """
    _check_settings(locals())
    output_dir = Path(output_dir)
    data_settings = {}
    if isinstance(dataset, str | os.PathLike):
        data_settings = {"split": split, "name": name, "offset": offset, "limit": limit, "prompt_style": prompt_style}
        data_settings["dataset"] = str(dataset)
    problems = _load_problems(dataset, data_settings)
    settings = {
        "model": str(model) if isinstance(model, str | os.PathLike) else model.config.name_or_path,
        "weights": _weights_digest(model),
        "engine": "server" if base_url else engine or ENGINES[0],
        **data_settings,
        "problems": hashlib.sha256(json.dumps(problems).encode()).hexdigest()[:16],
        "k": k,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "max_completion_length": max_completion_length,
        "seed": seed,
    }
    sampling = Sampling(temperature, top_p, top_k, max_completion_length)
    jobs = [Job(p.id, i, p.prompt, _completion_seed(seed, p.id, i)) for p in problems for i in range(k)]

    with Journal(output_dir / JOURNAL_FILE, settings) as journal:
        todo = [job for job in jobs if (job.id, job.index) not in journal.completions]
        if todo:
            with _progress_bar(len(jobs), len(jobs) - len(todo), progress) as bar:

                def keep(job: Job, completion: Completion) -> None:
                    journal.append(job.id, job.index, completion)
                    bar.update()

                try:
                    if base_url:
                        generate_with_server(
                            todo,
                            sampling,
                            keep,
                            model=str(model),
                            base_url=base_url,
                            concurrency=concurrency,
                            request_timeout=request_timeout,
                            num_retries=num_retries,
                        )
                    elif engine == "vllm":
                        generate_with_vllm(
                            todo, sampling, keep, model=model, tensor_parallel_size=tensor_parallel_size
                        )
                    else:
                        generate_with_transformers(
                            todo, sampling, keep, model=model, processing_class=processing_class, batch_size=batch_size
                        )
                except (ConnectionError, MemoryError) as error:
                    error.args = (
                        f"{error} {len(journal.completions)} of {len(jobs)} completions are in `{output_dir}`; the "
                        "same command continues there.",
                    )
                    raise
        completions = journal.completions

    verdicts = _score([(completions[job.id, job.index].text, p.solution) for p, job in _rows(problems, jobs, k)], scorer)
    _write_parquet(output_dir / PARQUET_FILE, problems, jobs, completions, verdicts, k)
    scorer_name = scorer if isinstance(scorer, str) else scorer.__name__
    summary = {
        "version": __version__,
        "settings": settings,
        "scorer": scorer_name,
        **_summarise(problems, [completions[job.id, job.index] for job in jobs], verdicts, k),
    }
    _replace(output_dir / SUMMARY_FILE, lambda path: path.write_text(json.dumps(summary, indent=1) + "\n"))
    return summary

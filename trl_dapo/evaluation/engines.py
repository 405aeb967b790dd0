# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Who answers the questions of an evaluation.

An engine takes the jobs and hands over each completion as it arrives. It returns when all are answered; an exception
loses none that arrived before it. What an interrupted evaluation still lacks is never sampled with the random numbers
of what it has: a server is told each job's seed, transformers gets that of each batch's first job, vLLM one a call.
"""

import http.client
import json
import logging
import os
import queue
import random
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from ..rewards.dapo_math import completion_text
from .journal import Completion


if TYPE_CHECKING:
    import torch
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

API_KEY_VARIABLE = "OPENAI_API_KEY"

_FIRST_DELAY = 0.5  # seconds before the first retry; doubled from one to the next
_LONGEST_DELAY = 60.0
_RETRIED_STATUSES = {408, 425, 429, *range(500, 600)}
_QUOTED_CHARACTERS = 300
_REASONING_FIELDS = ("reasoning_content", "reasoning")  # where vLLM's reasoning parsers put it, by release
_jitter = random.Random()  # its own: the program's random numbers are not ours to draw


class Job(NamedTuple):
    """One completion to ask for.

    Args:
        problem (`str`):
            Key of the problem.
        index (`int`):
            Which of the problem's completions it is, from 0.
        prompt (`str` or `list[dict]`):
            The prompt, plain or conversational.
        seed (`int`):
            Seed of the sampling, of 31 bits.
    """

    problem: str
    index: int  # type: ignore[assignment]  # in place of a method of tuples, which nobody calls
    prompt: str | list[dict[str, str]]
    seed: int


@dataclass(frozen=True)
class Sampling:
    """How completions are sampled.

    Args:
        temperature (`float`):
            Temperature; `0` takes the most probable token.
        top_p (`float`):
            Nucleus.
        top_k (`int`):
            Number of tokens to sample from; `0` is all.
        max_completion_length (`int`):
            Number of tokens at which a completion is truncated.
    """

    temperature: float
    top_p: float
    top_k: int
    max_completion_length: int


OnCompletion = Callable[[Job, Completion], None]


# ---- transformers ----


def generate_with_transformers(
    jobs: list[Job],
    sampling: Sampling,
    on_completion: OnCompletion,
    *,
    model: "str | os.PathLike | PreTrainedModel",
    processing_class: "PreTrainedTokenizerBase | None",
    batch_size: int,
) -> None:
    """
    Generate in this process, batch by batch, on the accelerator if there is one.

    Args:
        jobs (`list[Job]`):
            What to ask.
        sampling ([`Sampling`]):
            How to sample.
        on_completion (`Callable`):
            Called with each job and its completion.
        model (`str`, `os.PathLike` or [`~transformers.PreTrainedModel`]):
            Path or hub id of a model or an adapter, or a model that stays where it is.
        processing_class ([`~transformers.PreTrainedTokenizerBase`] or `None`):
            Tokenizer; `None` loads the model's own.
        batch_size (`int`):
            Completions generated at once.

    Raises:
        MemoryError: If a batch does not fit.
    """
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    tokenizer = processing_class
    if tokenizer is None:
        assert isinstance(model, str | os.PathLike)  # a loaded model comes with its tokenizer
        tokenizer = _load_tokenizer(model)
    prompt_ids = _encode_prompts(tokenizer, jobs)
    if isinstance(model, str | os.PathLike):
        model = AutoModelForCausalLM.from_pretrained(model, dtype="auto", device_map="auto")
    _warn_of_positions(model, max(map(len, prompt_ids)) + sampling.max_completion_length)
    eos_ids = _end_tokens(model, tokenizer)
    pad_id = min(eos_ids, default=0) if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    how: dict[str, Any] = {"do_sample": False}
    if sampling.temperature > 0:
        how = {
            "do_sample": True,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
        }
    generation_config = GenerationConfig(
        max_new_tokens=sampling.max_completion_length, eos_token_id=sorted(eos_ids), pad_token_id=pad_id, **how
    )
    for start in range(0, len(jobs), batch_size):
        batch, rows = jobs[start : start + batch_size], prompt_ids[start : start + batch_size]
        width = max(map(len, rows))
        input_ids = torch.tensor([[pad_id] * (width - len(row)) + row for row in rows], device=model.device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=model.device)
        try:
            with torch.no_grad(), _only(model, generation_config), _seeded(batch[0].seed, model.device):
                # Of a mixin that every model with a head has.
                outputs = model.generate(input_ids=input_ids, attention_mask=mask)  # type: ignore[operator]
        except torch.OutOfMemoryError as error:
            raise MemoryError(
                f"{len(batch)} completions of up to {sampling.max_completion_length} tokens do not fit in the memory "
                f"of {model.device}: lower `batch_size`, which is {batch_size}."
            ) from error
        for job, output in zip(batch, outputs[:, width:].tolist(), strict=True):
            end = next((i for i, token in enumerate(output) if token in eos_ids), None)
            ids = output if end is None else output[: end + 1]
            text = cast(str, tokenizer.decode(ids, skip_special_tokens=True))  # of one completion, no batch
            on_completion(job, Completion(text, len(ids), end is None))


@contextmanager
def _only(model: "PreTrainedModel", generation_config: "GenerationConfig") -> Iterator[None]:
    """In evaluation mode, with these settings alone: `generate` fills gaps from those that a model comes with."""
    own, was_training = model.generation_config, model.training
    model.generation_config = generation_config
    model.eval()
    try:
        yield
    finally:
        model.generation_config = own
        model.train(was_training)


@contextmanager
def _seeded(seed: int, device: "torch.device") -> Iterator[None]:
    """Random numbers of this seed, and afterwards those that would have come."""
    import torch

    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def _load_tokenizer(model: str | os.PathLike) -> "PreTrainedTokenizerBase":
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


def _encode_prompts(tokenizer: "PreTrainedTokenizerBase", jobs: list[Job]) -> list[list[int]]:
    """Token ids of each job's prompt; the completions of one problem share theirs."""
    known: dict[str, list[int]] = {}
    for job in jobs:
        if job.problem in known:
            continue
        if isinstance(job.prompt, str):
            known[job.problem] = tokenizer(job.prompt)["input_ids"]
            continue
        if tokenizer.chat_template is None:
            raise ValueError(
                f"The tokenizer of `{tokenizer.name_or_path}` has no chat template, and the prompts are messages. "
                "Save it with a `chat_template`, or give `trl_dapo.evaluation.evaluate` in Python a `Dataset` whose "
                "prompts are plain text: those of files are read as messages."
            )
        text = tokenizer.apply_chat_template(job.prompt, tokenize=False, add_generation_prompt=True)
        known[job.problem] = tokenizer(text, add_special_tokens=False)["input_ids"]  # the template has put them in
    return [known[job.problem] for job in jobs]


def _end_tokens(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase") -> set[int]:
    """The tokens that end a completion: the model's and the tokenizer's, as servers have it."""
    eos = model.generation_config.eos_token_id
    ids = {eos} if isinstance(eos, int) else set(eos or [])
    return ids if tokenizer.eos_token_id is None else ids | {tokenizer.eos_token_id}


def _warn_of_positions(model: "PreTrainedModel", num_positions: int) -> None:
    limit = model.config.get_text_config().to_dict().get("max_position_embeddings")
    if limit is not None and num_positions > limit:
        logger.warning(
            "The longest prompt and `max_completion_length` come to %d tokens, the model is made for %d: what it says "
            "beyond may be noise.",
            num_positions,
            limit,
        )


# ---- vLLM ----


def generate_with_vllm(
    jobs: list[Job],
    sampling: Sampling,
    on_completion: OnCompletion,
    *,
    model: str | os.PathLike,
    tensor_parallel_size: int,
) -> None:
    """
    Generate with vLLM in this process, all jobs in one continuous batch.

    Args:
        jobs (`list[Job]`):
            What to ask.
        sampling ([`Sampling`]):
            How to sample.
        on_completion (`Callable`):
            Called with each job and its completion.
        model (`str` or `os.PathLike`):
            Path or hub id of a model.
        tensor_parallel_size (`int`):
            Number of GPUs that share the model.

    Raises:
        ImportError: If vLLM is not installed.
        ValueError: If `model` is an adapter.
    """
    try:
        from vllm import LLM, SamplingParams
        from vllm.sampling_params import RequestOutputKind
    except ImportError as error:
        raise ImportError(
            "The engine 'vllm' needs vLLM, which cannot be imported here: `pip install 'trl[vllm]'`, or give the "
            f"address of a server that runs elsewhere as `base_url`. ({error})"
        ) from error

    if os.path.isfile(os.path.join(model, "adapter_config.json")):
        raise ValueError(
            f"`{model}` is an adapter. Merge it into its model first (`merge_and_unload`), or use the engine "
            "'transformers'."
        )
    prompt_ids = _encode_prompts(_load_tokenizer(model), jobs)
    llm = LLM(
        model=str(model),
        tensor_parallel_size=tensor_parallel_size,
        max_model_len=max(map(len, prompt_ids)) + sampling.max_completion_length,
        # Seeds of single requests cost vLLM its batched sampler. This one never comes back: no two calls are for the
        # same jobs, unless the first of them brought nothing.
        seed=sum(job.seed for job in jobs) % 2**31,
    )
    # `LLM.generate` returns when all are answered; its engine says which are after every step.
    engine = llm.llm_engine
    params = SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_completion_length,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    try:
        for number, ids in enumerate(prompt_ids):
            engine.add_request(str(number), {"prompt_token_ids": ids}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    answer = output.outputs[0]
                    completion = Completion(answer.text, len(answer.token_ids), answer.finish_reason == "length")
                    on_completion(jobs[int(output.request_id)], completion)
    finally:
        # Its processes would keep the memory that the next model needs, and may keep this process from ending.
        engine.engine_core.shutdown()


# ---- An OpenAI-compatible server ----


def generate_with_server(
    jobs: list[Job],
    sampling: Sampling,
    on_completion: OnCompletion,
    *,
    model: str,
    base_url: str,
    concurrency: int,
    request_timeout: float,
    num_retries: int,
) -> None:
    """
    Ask an OpenAI-compatible server, one request a completion.

    Conversations go to `/chat/completions`, plain prompts to `/completions`. What the environment variable
    `OPENAI_API_KEY` holds is sent along. After a refusal that no retry will change, or when the retries of one request
    are used up, no further request is made; the answers to those under way are still handed over.

    Args:
        jobs (`list[Job]`):
            What to ask.
        sampling ([`Sampling`]):
            How to sample.
        on_completion (`Callable`):
            Called with each job and its completion, from the thread that asked, before it asks for another.
        model (`str`):
            The name under which the server knows the model.
        base_url (`str`):
            Address of the server, most often ending in `/v1`.
        concurrency (`int`):
            Requests under way at a time.
        request_timeout (`float`):
            Seconds without a sign of the server after which a request is given up.
        num_retries (`int`):
            How often a failed request is made again, after 0.5, 1, 2, ... seconds.

    Raises:
        ConnectionError: If the server cannot be reached, keeps failing, or refuses a request.
    """
    server = _Server(base_url, model, sampling, request_timeout, num_retries)
    todo: queue.SimpleQueue[Job] = queue.SimpleQueue()
    for job in jobs:
        todo.put(job)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            while not server.is_given_up.is_set():
                job = todo.get_nowait()
                # Handed over by the thread that asked: whatever ends the process costs at most what is under way.
                on_completion(job, server.ask(job))
        except queue.Empty:
            pass
        except BaseException as error:
            failures.append(error)
            server.is_given_up.set()

    # Not an executor's threads: Python would wait for them after Ctrl-C, for as long as a request takes.
    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(concurrency, len(jobs)))]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        server.is_given_up.set()
    if failures:
        raise failures[0]


class _Transient(Exception):
    """A failure that the same request may not meet again."""


class _Server:
    """Makes the requests, and makes them again."""

    def __init__(
        self, base_url: str, model: str, sampling: Sampling, request_timeout: float, num_retries: int
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self.is_given_up = threading.Event()
        self._request_timeout = request_timeout
        self._num_retries = num_retries
        self._lock = threading.Lock()
        self._has_warned_of_reasoning = False
        self._fields = {
            "model": model,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_completion_length,
        }
        if sampling.top_k:
            self._fields["top_k"] = sampling.top_k  # not OpenAI's own, which refuse what they do not know
        self._headers = {"Content-Type": "application/json"}
        if api_key := os.environ.get(API_KEY_VARIABLE):
            self._headers["Authorization"] = f"Bearer {api_key}"

    def _warn_of_reasoning(self) -> None:
        with self._lock:
            if self._has_warned_of_reasoning:
                return
            self._has_warned_of_reasoning = True
        logger.warning(
            "%s answers with empty text and has put what the model wrote into `reasoning_content`, which is not "
            "scored: such a completion counts as wrong. Start the server without a reasoning parser (vLLM's "
            "`--reasoning-parser`), so that the whole completion is text; where completions are cut off while "
            "they reason, also raise `max_completion_length`, which is %d.",
            self.base_url,
            self._fields["max_tokens"],
        )

    def ask(self, job: Job) -> Completion:
        """The completion of one job, retries included."""
        if isinstance(job.prompt, str):
            path = "/completions"
            fields: dict[str, Any] = {"prompt": job.prompt}
        else:
            path, fields = "/chat/completions", {"messages": job.prompt}
        request = urllib.request.Request(
            self.base_url + path,
            json.dumps({**self._fields, **fields, "seed": job.seed}).encode("ascii"),
            self._headers,
        )
        delay = _FIRST_DELAY
        for num_left in reversed(range(self._num_retries + 1)):
            try:
                return self._post(request)
            except _Transient as error:
                # Jitter keeps the threads that failed together from coming back together.
                if num_left == 0 or self.is_given_up.wait(delay * _jitter.uniform(0.5, 1.0)):
                    tries = f"asked {self._num_retries + 1} times"
                    raise ConnectionError(f"{self.base_url} does not answer ({tries}): {error}.") from error.__cause__
            delay = min(2 * delay, _LONGEST_DELAY)
        raise AssertionError("the last try returns or raises")

    def _post(self, request: urllib.request.Request) -> Completion:
        try:
            status, reason, body = self._exchange(request)
        except (OSError, http.client.HTTPException) as error:  # URLError and timeouts are OSErrors
            raise _Transient(str(error) or type(error).__name__) from error
        quoted = body.decode("utf-8", "replace")[:_QUOTED_CHARACTERS]
        if status in _RETRIED_STATUSES:
            raise _Transient(f"{status} {reason}: {quoted}")
        if status != 200:
            hint = " Does the address of the server end in /v1?" if status == 404 else ""
            raise ConnectionError(f"{request.full_url} refuses a request with {status} {reason}: {quoted}.{hint}")
        try:
            return self._read(json.loads(body.decode("utf-8", "replace")))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise _Transient(f"{request.full_url} sent what is no completion: {quoted}") from error

    def _exchange(self, request: urllib.request.Request) -> tuple[int, str, bytes]:
        """Status, reason and body of the answer, whatever the status."""
        try:
            response = urllib.request.urlopen(request, timeout=self._request_timeout)
        except urllib.error.HTTPError as error:
            response = error
        with response:
            return response.status, response.reason, response.read()

    def _read(self, answer: Any) -> Completion:
        choice = answer["choices"][0]
        message = choice.get("message")
        text = choice["text"] if message is None else completion_text([message])
        if not isinstance(text, str):
            raise TypeError(f"a completion is text, not {type(text).__name__}")
        if not text and message is not None and any(message.get(field) for field in _REASONING_FIELDS):
            self._warn_of_reasoning()
        length = (answer.get("usage") or {}).get("completion_tokens")
        return Completion(text, length if isinstance(length, int) else None, choice.get("finish_reason") == "length")

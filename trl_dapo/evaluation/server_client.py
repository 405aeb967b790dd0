# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The engine that is an OpenAI-compatible server, asked with one request a completion.

Conversations go to `/chat/completions`, plain prompts to `/completions`. After a refusal, or when the retries of one
request are used up, no further request is made; the answers to those under way are still handed over.
"""

import json
import logging
import os
import queue
import random
import ssl
import threading
import urllib.request
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx2

from ..rewards.dapo_math import content_text
from ..settings.secrets import LEFT_OUT, without_secrets
from .jobs import GeneratedCompletion, Job, OnCompletion, SamplingSettings


logger = logging.getLogger(__name__)
logging.getLogger("httpx2").addFilter(lambda record: record.levelno > logging.INFO)  # it has a line for each request

API_KEY_VARIABLE = "OPENAI_API_KEY"

_FIRST_DELAY = 0.5  # seconds before the first retry; doubled from one to the next
_LONGEST_DELAY = 60.0
_RETRIED_STATUSES = {408, 425, 429, *range(500, 600)}
_QUOTED_CHARACTERS = 300
_REASONING_FIELDS = ("reasoning_content", "reasoning")  # where vLLM's reasoning parsers put it, by release
_jitter = random.Random()  # its own: the program's random numbers are not ours to draw


def generate_with_server(
    jobs: list[Job],
    sampling: SamplingSettings,
    on_completion: OnCompletion,
    *,
    model: str | os.PathLike,
    base_url: str,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    concurrency: int,
    request_timeout: float,
    num_retries: int,
) -> None:
    """Raises `ConnectionError` if the server cannot be reached, keeps failing, or refuses a request."""
    server = _Server(base_url, str(model), sampling, request_timeout, num_retries, chat_template_kwargs)
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
        server.close()
    if failures:
        raise failures[0]


def _proxy_of(url: str) -> str | None:
    """Return the environment's proxy for an address. Entries for other addresses may be unreadable."""
    address = urlsplit(url)
    return None if urllib.request.proxy_bypass(address.netloc) else urllib.request.getproxies().get(address.scheme)


class _Transient(Exception):
    """A failure that the same request may not meet again."""


class _Server:
    """Makes the requests, and makes them again."""

    def __init__(
        self,
        base_url: str,
        model: str,
        sampling: SamplingSettings,
        request_timeout: float,
        num_retries: int,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self._address = base_url.rstrip("/")
        self.base_url = without_secrets(self._address)  # in messages
        self.is_given_up = threading.Event()
        self._num_retries = num_retries
        self._first_of_reasoning = threading.Lock()  # taken by the thread that warns, and kept
        self._fields: dict[str, Any] = {
            "model": model,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_completion_length,
        }
        # Not OpenAI's own, which refuse what they do not know.
        others = {"top_k": sampling.top_k, "min_p": sampling.min_p, "chat_template_kwargs": chat_template_kwargs}
        self._fields |= {name: value for name, value in others.items() if value}
        # Each request has a connection of its own: what a server closes while it rests would cost a try.
        headers = {"Content-Type": "application/json", "Connection": "close"}
        self._api_key = api_key = os.environ.get(API_KEY_VARIABLE, "").strip()
        if api_key:
            if not (api_key.isascii() and api_key.isprintable()):
                raise ValueError(
                    f"{API_KEY_VARIABLE} in the environment is not an API key: it contains unusual characters."
                )
            headers["Authorization"] = f"Bearer {api_key}"
        self._client = httpx2.Client(
            headers=headers,
            timeout=request_timeout,
            limits=httpx2.Limits(max_connections=None),  # as many as there are threads
            verify=ssl.create_default_context(),
            proxy=_proxy_of(base_url),
            trust_env=False,
        )

    def close(self) -> None:
        self.is_given_up.set()
        self._client.close()

    def ask(self, job: Job) -> GeneratedCompletion:
        """The completion of one job, retries included."""
        is_plain = isinstance(job.prompt, str)
        path = "/completions" if is_plain else "/chat/completions"
        fields = {**self._fields, "prompt" if is_plain else "messages": job.prompt, "seed": job.seed}
        delay, num_left = _FIRST_DELAY, self._num_retries
        while True:
            try:
                return self._post(path, fields)
            except _Transient as error:
                # Jitter keeps the threads that failed together from coming back together.
                if num_left == 0 or self.is_given_up.wait(delay * _jitter.uniform(0.5, 1.0)):
                    tries = f"asked {self._num_retries + 1} times"
                    raise ConnectionError(f"{self.base_url} does not answer ({tries}): {error}.") from error.__cause__
            delay, num_left = min(2 * delay, _LONGEST_DELAY), num_left - 1

    def _post(self, path: str, fields: dict[str, Any]) -> GeneratedCompletion:
        url = self.base_url + path
        try:
            # ASCII: a prompt may hold lone surrogates.
            response = self._client.post(self._address + path, content=json.dumps(fields))
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise _Transient(str(error).rstrip(".") or type(error).__name__) from error
        text = response.content.decode("utf-8", "replace")  # whatever charset was declared
        said = f"{response.status_code} {response.reason_phrase}"
        # Some servers say again what they were sent.
        quoted = without_secrets(text.replace(self._api_key or LEFT_OUT, LEFT_OUT))[:_QUOTED_CHARACTERS]
        if response.status_code in _RETRIED_STATUSES:
            raise _Transient(f"{said}: {quoted}")
        if response.status_code != 200:
            hint = " Does the address of the server end in /v1?" if response.status_code == 404 else ""
            raise ConnectionError(f"{url} refuses a request with {said}: {quoted}.{hint}")
        try:
            return self._read(json.loads(text))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise _Transient(f"{url} sent something that is not a completion: {quoted}") from error

    def _read(self, answer: Any) -> GeneratedCompletion:
        choice = answer["choices"][0]
        message = choice.get("message")
        text = choice["text"] if message is None else content_text(message.get("content"))
        if not isinstance(text, str):
            raise TypeError(f"a completion is text, not {type(text).__name__}")
        reasoned = not text.strip() and message is not None and any(message.get(field) for field in _REASONING_FIELDS)
        if reasoned and self._first_of_reasoning.acquire(blocking=False):
            logger.warning(
                f"{self.base_url} answers with empty text and has put what the model wrote into `reasoning_content`, "
                "which is not scored: such a completion counts as wrong. Start the server without a reasoning parser "
                "(vLLM's `--reasoning-parser`), so that the whole completion is text; where completions are cut off "
                f"while they reason, also raise `max_completion_length`, which is {self._fields['max_tokens']}."
            )
        length = (answer.get("usage") or {}).get("completion_tokens")
        return GeneratedCompletion(
            text, length if isinstance(length, int) else None, choice.get("finish_reason") == "length"
        )

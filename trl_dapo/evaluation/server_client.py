# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The engine for an OpenAI-compatible server, with one request per completion.

Conversations are sent to `/chat/completions`, and plain prompts to `/completions`. If the server refuses a request, or
if a request fails after all retries, no further request is sent. Responses to requests that were sent before are still
used.
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
logging.getLogger("httpx2").addFilter(
    lambda record: record.levelno > logging.INFO
)  # it would log a line for each request

API_KEY_VARIABLE = "OPENAI_API_KEY"

_FIRST_DELAY = 0.5  # seconds before the first retry; doubled with each further retry
_LONGEST_DELAY = 60.0
_RETRIED_STATUSES = {408, 425, 429, *range(500, 600)}
_QUOTED_CHARACTERS = 300
_REASONING_FIELDS = ("reasoning_content", "reasoning")  # names of the field in different releases of vLLM
_jitter = random.Random()  # a separate generator, so that the program's random numbers do not change


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
    """
    Sample completions with a server.

    Raises:
        ConnectionError: If the server cannot be reached, fails repeatedly, or refuses a request.
    """
    server = _Server(base_url, str(model), sampling, request_timeout, num_retries, chat_template_kwargs)
    todo: queue.SimpleQueue[Job] = queue.SimpleQueue()
    for job in jobs:
        todo.put(job)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            while not server.is_given_up.is_set():
                job = todo.get_nowait()
                # Each thread passes on its completions itself, so that only unfinished ones are lost if the process
                # ends.
                on_completion(job, server.request(job))
        except queue.Empty:
            pass
        except BaseException as error:
            failures.append(error)
            server.is_given_up.set()

    # Not a `ThreadPoolExecutor`: after Ctrl-C Python would wait for its threads, as long as a request takes.
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
    """
    Return the proxy that the environment sets for an address.

    Only this entry is read, because entries for other addresses may be invalid.
    """
    address = urlsplit(url)
    return None if urllib.request.proxy_bypass(address.netloc) else urllib.request.getproxies().get(address.scheme)


class _Transient(Exception):
    """A failure that may be temporary."""


class _Server:
    """Sends requests to a server, and repeats those that fail."""

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
        self.base_url = without_secrets(self._address)  # for messages
        self.is_given_up = threading.Event()
        self._num_retries = num_retries
        self._has_warned_of_reasoning = threading.Lock()  # acquired by the thread that warns, and never released
        self._fields: dict[str, Any] = {
            "model": model,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_completion_length,
        }
        # Only sent if they are set, because OpenAI's own servers refuse unknown fields.
        others = {"top_k": sampling.top_k, "min_p": sampling.min_p, "chat_template_kwargs": chat_template_kwargs}
        self._fields |= {name: value for name, value in others.items() if value}
        # Each request has its own connection. A server might close an idle one, which would cost a retry.
        headers = {"Content-Type": "application/json", "Connection": "close"}
        self._api_key = api_key = os.environ.get(API_KEY_VARIABLE, "").strip()
        if api_key:
            if not (api_key.isascii() and api_key.isprintable()):
                raise ValueError(
                    f"The environment variable {API_KEY_VARIABLE} is not an API key: it contains characters that are "
                    "not printable ASCII. Correct or unset it."
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

    def request(self, job: Job) -> GeneratedCompletion:
        """Return the completion of a job. Failed requests are repeated."""
        is_plain = isinstance(job.prompt, str)
        path = "/completions" if is_plain else "/chat/completions"
        fields = {**self._fields, "prompt" if is_plain else "messages": job.prompt, "seed": job.seed}
        delay, num_left = _FIRST_DELAY, self._num_retries
        while True:
            try:
                return self._post(path, fields)
            except _Transient as error:
                # With random delays, threads that failed at the same time do not try again at the same time.
                if num_left == 0 or self.is_given_up.wait(delay * _jitter.uniform(0.5, 1.0)):
                    raise ConnectionError(
                        f"{self.base_url} did not return a completion in {self._num_retries + 1} attempts: {error}."
                    ) from error.__cause__
            delay, num_left = min(2 * delay, _LONGEST_DELAY), num_left - 1

    def _post(self, path: str, fields: dict[str, Any]) -> GeneratedCompletion:
        url = self.base_url + path
        try:
            # JSON is ASCII by default, so that a prompt may contain lone surrogates.
            response = self._client.post(self._address + path, content=json.dumps(fields))
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise _Transient(str(error).rstrip(".") or type(error).__name__) from error
        text = response.content.decode("utf-8", "replace")  # JSON is UTF-8, whatever the header says
        status = f"{response.status_code} {response.reason_phrase}"
        # Some servers repeat the request in their response.
        quoted = without_secrets(text.replace(self._api_key or LEFT_OUT, LEFT_OUT))[:_QUOTED_CHARACTERS]
        if response.status_code in _RETRIED_STATUSES:
            raise _Transient(f"{status}: {quoted}")
        if response.status_code != 200:
            hint = " Check that the address of the server ends in /v1." if response.status_code == 404 else ""
            raise ConnectionError(f"{url} refused a request with {status}: {quoted}.{hint}")
        try:
            return self._read(json.loads(text))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise _Transient(f"{url} sent something that is not a completion: {quoted}") from error

    def _read(self, response: Any) -> GeneratedCompletion:
        choice = response["choices"][0]
        message = choice.get("message")
        text = choice["text"] if message is None else content_text(message.get("content"))
        if not isinstance(text, str):
            raise TypeError(f"a completion must be text, not {type(text).__name__}")
        reasoned = not text.strip() and message is not None and any(message.get(field) for field in _REASONING_FIELDS)
        if reasoned and self._has_warned_of_reasoning.acquire(blocking=False):
            logger.warning(
                f"{self.base_url} returned an empty text, and put what the model wrote into `reasoning_content`. Only "
                "the text is scored, so such a completion counts as incorrect. Start the server without a reasoning "
                "parser (vLLM's `--reasoning-parser`). If completions are cut off before they end their reasoning, "
                f"also raise `max_completion_length`, which is {self._fields['max_tokens']}."
            )
        length = (response.get("usage") or {}).get("completion_tokens")
        return GeneratedCompletion(
            text, length if isinstance(length, int) else None, choice.get("finish_reason") == "length"
        )

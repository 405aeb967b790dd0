# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""vLLM's server: requests that end, and what is said when it is lost."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..config import DAPOConfig
from ..run.checkpoint import last_complete_checkpoint, output_folder


def bound_requests(client: Any, seconds: float) -> None:
    """Gives requests of TRL's client a timeout, which they have not, and an end when its session is closed."""
    for prefix, adapter in list(client.session.adapters.items()):
        from .http_session import TimedAdapter  # its packages come with vLLM

        client.session.mount(prefix, TimedAdapter(adapter, seconds))


def check_logprobs(client: Any) -> None:
    """Refuses a server whose log-probabilities are not those of the temperature it samples with."""
    mode = client.get_server_info()["model_config"]["logprobs_mode"]
    if mode != "processed_logprobs":
        raise ValueError(
            "`rollouts_ahead=1` trains with the server's log-probabilities, and it runs with `--logprobs-mode "
            f"{mode}`. Start it with `--logprobs-mode processed_logprobs`, or set `rollouts_ahead=0`."
        )


@contextmanager
def describing_loss(args: DAPOConfig) -> Iterator[None]:
    """Says which server was lost and how to go on: TRL's client retries, and then raises what its socket says."""
    try:
        yield
    except _connection_errors() as error:
        url = args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"
        folder = output_folder(args)
        checkpoint = last_complete_checkpoint(folder)
        how = f"resume from {checkpoint}" if checkpoint else f"start over: {folder} holds no checkpoint"
        what = f"is gone ({error}). Start it again and"
        if type(error).__name__ == "ReadTimeout":  # of requests
            what = (
                f"has not answered for {args.vllm_request_seconds:g} s. If it hangs, start it again; if it needs "
                "longer, raise `vllm_request_timeout`. Then"
            )
        raise RuntimeError(f"The vLLM server at {url} {what} {how}.") from error


def _connection_errors() -> tuple[type[Exception], ...]:
    """What says that a server cannot be reached; not every error of the system says so."""
    try:
        from requests.exceptions import RequestException  # the client's, which comes with vLLM
    except ImportError:
        return ConnectionError, TimeoutError
    return ConnectionError, TimeoutError, RequestException

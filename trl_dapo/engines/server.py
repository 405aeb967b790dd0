# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""vLLM's server: requests with timeouts, checks of its answers, and error messages if it fails."""

import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from trl.generation import vllm_client

from ..config import DAPOConfig
from ..ranks import describe_error
from ..run.checkpoint import last_complete_checkpoint, output_folder
from ..settings.secrets import without_secrets
from ..update.patching import patched


if TYPE_CHECKING:
    from trl.generation.vllm_client import VLLMClient as ClientBase
else:
    ClientBase = object  # at run time this is mixed into the class of TRL's client

HEALTH_SECONDS = 10  # maximum time that a server may take to answer a health check
IMPOSSIBLE = -9999.0  # vLLM's value for the logarithm of 0
ROUNDING = 1e-3  # by how much a log-probability may be above 0, or two of the same token may differ
EMPTY: dict[str, list] = {
    "completion_ids": [[]],
    "logprobs": [[]],
}  # an empty completion, in the form that TRL expects


class ServerFault(Exception):
    """Raised if a server fails in a way that ends the run. The message is a predicate, such as "is gone"."""


class BoundClient(ClientBase):
    """Mixed into the class of TRL's client, so that requests have a timeout and answers are checked."""

    request_seconds: float  # maximum time that the server may take to answer
    vocab_size: int
    in_tool_turns = False  # whether requests continue completions after tool calls
    _instance: str | None = None  # the server's id when it joined the group in which weights are pushed

    def check_server(self, *args: Any, **kwargs: Any) -> None:
        """
        Check as TRL does that the server is up, with timeouts.

        TRL calls this before all other requests. TRL's requests have no timeout, and it sends these ones outside of
        its session.
        """
        import requests  # comes with vLLM

        from .http_session import TimedAdapter

        for prefix, adapter in list(self.session.adapters.items()):
            self.session.mount(prefix, TimedAdapter(adapter, self.request_seconds))
        get = partial(requests.get, timeout=min(HEALTH_SECONDS, self.request_seconds))
        with patched(vllm_client, requests=SimpleNamespace(get=get, exceptions=requests.exceptions)):
            super().check_server(*args, **kwargs)

    def server_config(self) -> dict:
        """Return the configuration with which the server was started."""
        response = self.session.get(f"{self.base_url}/server_info", params={"config_format": "json"})
        if response.status_code == 404:
            raise RuntimeError(
                f"The vLLM server at {without_secrets(self.base_url)} does not report how it was started, which must "
                "be known to use it for this run. Restart it with `VLLM_SERVER_DEV_MODE=1` in its environment."
            )
        response.raise_for_status()
        return response.json()["vllm_config"]

    def init_communicator(self, device: Any = 0) -> None:
        super().init_communicator(device)
        self._instance = self._instance_name()

    def _instance_name(self) -> str | None:
        """
        Return an id of the server process, or `None` if it is unknown. A server that is started again, and that has
        lost the pushed weights, has another id.
        """
        with suppress(RuntimeError, KeyError):  # the server does not report it
            config = self.server_config()
            if config["parallel_config"]["_api_process_count"] == 1:  # several processes would have different ids
                return config["instance_id"]
        return None

    def generate(self, prompts: list, *args: Any, **arguments: Any) -> dict[str, list]:
        """
        Generate as TRL's client does. After tool calls, request at most as many tokens as fit into the context. TRL
        truncates completions that are longer.
        """
        if not self.in_tool_turns or arguments.get("features"):
            return super().generate(prompts, *args, **arguments)
        served = self.session.get(f"{self.base_url}/v1/models").json()["data"][0]
        context = served.get("max_model_len") or math.inf
        limits = [min(arguments["max_tokens"], context - len(ids)) for ids in prompts]
        generate = super().generate
        if len({*limits}) == 1 and limits[0]:
            return generate(prompts, *args, **{**arguments, "max_tokens": limits[0]})

        def send(ids: list[int], limit: int) -> dict[str, list]:
            if limit == 0:
                return EMPTY
            return generate([ids], *args, **{**arguments, "max_tokens": limit})

        with ThreadPoolExecutor() as executor:
            answers = list(executor.map(send, prompts, limits))
        columns = {name: [answer[name][0] for answer in answers] for name in EMPTY}
        return {"prompt_ids": prompts, **columns}

    def submit_request(self, call: Callable[[Callable], Future], **arguments: Any) -> Future:
        """
        Call `generate` through `call`. If the answer is faulty or the server refuses, send the request once more.
        """
        # Requests that fail for other reasons were already repeated by the session.
        generate = self.generate  # stored now, because it may be replaced when the call runs

        def send() -> dict[str, list]:
            answer = generate(**arguments)
            if any(math.isnan(top[0]) for row in answer["logprobs"] for top in row):
                # Later, the policy that sampled it is gone, so the log-probability could not be computed.
                raise ServerFault("returned no log-probability for a token that it sampled")
            return answer

        def send_twice() -> dict[str, list]:
            num_closings = self._num_closings
            try:
                return send()
            except ServerFault:
                if self._num_closings > num_closings:  # the session was closed because the run ends
                    raise
                return send()

        return call(send_twice)

    @property
    def _num_closings(self) -> int:
        return sum(adapter.num_closings for adapter in self.session.adapters.values())

    def _post(self, url: str, **kwargs: Any) -> dict:
        try:
            answer = super()._post(url, **kwargs)
        except ValueError as error:
            raise ServerFault(f"sent an answer that is not JSON ({error})") from error
        except Exception as error:
            if type(error) is not Exception:  # TRL raises a plain `Exception` for a status other than 200
                raise
            raise ServerFault(f"refused a request ({error})") from error
        if not url.endswith("/v1/completions"):
            return answer
        try:
            fault = _find_fault(answer, kwargs["json"], self.vocab_size)
        except (AttributeError, KeyError, TypeError) as error:
            fault = f"sent an answer that does not have vLLM's format ({describe_error(error)})"
        if fault is None and self._instance is not None and self._instance != self._instance_name():
            fault = "was restarted during the run, so it has lost the weights that were pushed to it"
        if fault is not None:
            raise ServerFault(fault)
        return answer


def _find_fault(answer: Any, request: dict, vocab_size: int) -> str | None:
    """Return why an answer cannot be trained on, as a predicate, or `None` if it can. TRL does not check this."""
    choices = answer.get("choices") if isinstance(answer, dict) else None
    number = request["n"] * len(request["prompt"])
    if not isinstance(choices, list) or len(choices) != number:
        return f"returned {len(choices or ())} completions, but {number} were requested"
    for i, choice in enumerate(choices):
        prompt, ids, logprobs = choice["prompt_token_ids"], choice["token_ids"], choice["logprobs"] or {}
        columns = [logprobs.get(name) or () for name in ("token_logprobs", "tokens", "top_logprobs")]
        given = request["prompt"][i // request["n"]]
        if prompt != given and not isinstance(given, str):
            return "returned completions of another prompt than the requested one"
        if not ids or any(len(column) != len(ids) for column in columns):
            return f"returned {len(ids)} tokens with {min(map(len, columns))} log-probabilities"
        if len(ids) > request["max_tokens"]:
            return f"returned {len(ids)} tokens, but at most {request['max_tokens']} were requested"
        for token, logprob, name, top in zip(ids, *columns, strict=True):
            if type(token) is not int or not 0 <= token < vocab_size:
                return f"returned {token!r}, which is not a token of a vocabulary of {vocab_size}"
            named = {name: logprob, **(top or {})}  # TRL trains with the most likely one of these
            if name != f"token_id:{token}" or len(named) > request["logprobs"] + 1:
                returned = name if len(named) == 1 else f"{len(named)} tokens"
                return f"returned log-probabilities of {returned} for the sampled token {token}"
            for value in (logprob, named[name]):
                if value <= IMPOSSIBLE or value > ROUNDING:  # NaN is accepted: it stands for the present policy
                    return f"returned the log-probability {value:g} for a token that it sampled"
            if abs(logprob - named[name]) > ROUNDING:
                return f"returned the log-probabilities {logprob:g} and {named[name]:g} for a token that it sampled"
    return None


def check_ahead(client: BoundClient, rollouts_ahead: int, why_merged: str) -> None:
    """
    Raise if sampling ahead would not be exact: if the server's log-probabilities are those of another temperature, or
    if weights would change while a request is processed.
    """
    config = client.server_config()
    if (mode := config["model_config"]["logprobs_mode"]) != "processed_logprobs":
        raise ValueError(
            f"`rollouts_ahead={rollouts_ahead}` trains with the log-probabilities of the vLLM server, but the server "
            f"runs with `--logprobs-mode {mode}`, so that they are not those of the distribution it samples from. "
            "Start it with `--logprobs-mode processed_logprobs`, or set `rollouts_ahead=0`."
        )
    if rollouts_ahead < 2:
        return
    if why_merged:
        raise ValueError(
            "`rollouts_ahead=2` needs a LoRA adapter that the server serves separately from the base model, because "
            "pushing merged weights would change the policy in the middle of a completion. This is not possible, "
            f"because {why_merged}. Change that (`use_peft=True` trains an adapter), or set `rollouts_ahead=1`."
        )
    if (num := config["lora_config"]["max_loras"]) <= rollouts_ahead:
        raise ValueError(
            f"`rollouts_ahead=2` samples with three adapters at the same time, but the server runs with `--max-loras "
            f"{num}`. Start it with `--max-loras 3`, or set `rollouts_ahead=1`."
        )


@contextmanager
def naming_lost_server(args: DAPOConfig) -> Iterator[None]:
    """Re-raise server errors with the server's URL and the checkpoint to resume from."""
    # TRL's client retries requests, and then raises the error of its socket, which says neither.
    try:
        yield
    except _faults() as error:
        url = args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"
        folder = output_folder(args)
        checkpoint = last_complete_checkpoint(folder)
        how = f"resume from {checkpoint}" if checkpoint else f"start over, since {folder} has no complete checkpoint"
        what = f"is gone ({error}). Start it again, and"
        if isinstance(error, ServerFault):
            what = f"{error}. See its log for the cause. To continue,"
        elif type(error).__name__ == "ReadTimeout":  # the class of the package `requests`
            what = (
                f"has not answered for {args.vllm_request_seconds:g} s. If it hangs, start it again. If it needs more "
                "time, raise `vllm_request_timeout`. Then"
            )
        raise RuntimeError(without_secrets(f"The vLLM server at {url} {what} {how}.")) from error


def _faults() -> tuple[type[Exception], ...]:
    """Return the exception classes which mean that a server cannot be reached or trusted."""
    # `OSError` would be too broad.
    try:
        from requests.exceptions import RequestException  # comes with vLLM
    except ImportError:
        return ServerFault, ConnectionError, TimeoutError
    return ServerFault, ConnectionError, TimeoutError, RequestException

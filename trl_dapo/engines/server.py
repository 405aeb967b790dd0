# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""vLLM's server: requests that end, answers that can be trained on, and what is said when it is lost."""

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
    ClientBase = object  # TRL's client, once this is mixed into its class

HEALTH_SECONDS = 10  # that a server may take to say that it is up, at each health check
IMPOSSIBLE, ROUNDING = -9999.0, 1e-3  # vLLM's word for the logarithm of 0, and how far one may be above 0
EMPTY: dict[str, list] = {"completion_ids": [[]], "logprobs": [[]]}  # a completion, by what TRL takes of an answer


class ServerFault(Exception):
    """A failure of the server that ends a run, worded as a predicate."""


class BoundClient(ClientBase):
    """Mixed into the class of TRL's client: requests end, from the first on, and answers are looked at."""

    request_seconds: float  # that the server may take to answer
    vocab_size: int
    in_tool_turns = False
    _instance: str | None = None  # what the server called itself when it joined the group that weights go to

    def check_server(self, *args: Any, **kwargs: Any) -> None:
        """Asked first of all. TRL's requests have no timeout, and here it makes them past its session."""
        import requests  # comes with vLLM

        from .http_session import TimedAdapter

        for prefix, adapter in list(self.session.adapters.items()):
            self.session.mount(prefix, TimedAdapter(adapter, self.request_seconds))
        get = partial(requests.get, timeout=min(HEALTH_SECONDS, self.request_seconds))
        with patched(vllm_client, requests=SimpleNamespace(get=get, exceptions=requests.exceptions)):
            super().check_server(*args, **kwargs)

    def server_config(self) -> dict:
        """Return the arguments with which the server was started."""
        response = self.session.get(f"{self.base_url}/server_info", params={"config_format": "json"})
        if response.status_code == 404:
            raise RuntimeError(
                f"The vLLM server at {without_secrets(self.base_url)} does not say how it was started. Restart it "
                "with `VLLM_SERVER_DEV_MODE=1` in its environment."
            )
        response.raise_for_status()
        return response.json()["vllm_config"]

    def init_communicator(self, device: Any = 0) -> None:
        super().init_communicator(device)
        self._instance = self._instance_name()

    def _instance_name(self) -> str | None:
        """Return what distinguishes the server from one that is started after it with the weights on its disk."""
        with suppress(RuntimeError, KeyError):  # it does not say
            config = self.server_config()
            if config["parallel_config"]["_api_process_count"] == 1:  # else each has a name of its own
                return config["instance_id"]
        return None

    def generate(self, prompts: list, *args: Any, **arguments: Any) -> dict[str, list]:
        """
        Generate as TRL's client does. After tool calls, ask for no more tokens than the context has left; TRL cuts
        what is longer.
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
        """Call `generate` through `call`. A request whose answer cannot be trained on is sent once more."""
        # So is one that the server refuses. The other requests that fail were repeated before.
        generate = self.generate  # when it is called, another may have replaced it

        def send() -> dict[str, list]:
            answer = generate(**arguments)
            if any(math.isnan(top[0]) for row in answer["logprobs"] for top in row):
                raise ServerFault("gave no log-probability of a token that it sampled")  # nobody else knows it later
            return answer

        def send_twice() -> dict[str, list]:
            num_closings = self._num_closings
            try:
                return send()
            except ServerFault:
                if self._num_closings > num_closings:  # by what ends the run
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
            raise ServerFault(f"answered with text that is not JSON ({error})") from error
        except Exception as error:
            if type(error) is not Exception:  # which TRL raises for an answer other than 200
                raise
            raise ServerFault(f"did not take a request ({error})") from error
        if not url.endswith("/v1/completions"):
            return answer
        try:
            fault = _find_fault(answer, kwargs["json"], self.vocab_size)
        except (AttributeError, KeyError, TypeError) as error:
            fault = f"answered in another form than vLLM's ({describe_error(error)})"
        if fault is None and self._instance is not None and self._instance != self._instance_name():
            fault = "was started again while the run sampled, and has the weights on its disk"
        if fault is not None:
            raise ServerFault(fault)
        return answer


def _find_fault(answer: Any, request: dict, vocab_size: int) -> str | None:
    """Return why a response cannot be trained on, as a predicate, or `None`. TRL does not check responses."""
    choices = answer.get("choices") if isinstance(answer, dict) else None
    number = request["n"] * len(request["prompt"])
    if not isinstance(choices, list) or len(choices) != number:
        return f"answered {len(choices or ())} completions where {number} were requested"
    for i, choice in enumerate(choices):
        prompt, ids, logprobs = choice["prompt_token_ids"], choice["token_ids"], choice["logprobs"] or {}
        columns = [logprobs.get(name) or () for name in ("token_logprobs", "tokens", "top_logprobs")]
        given = request["prompt"][i // request["n"]]
        if prompt != given and not isinstance(given, str):
            return "answered another prompt than the request's"
        if not ids or any(len(column) != len(ids) for column in columns):
            return f"answered {len(ids)} tokens with {min(map(len, columns))} log-probabilities"
        if len(ids) > request["max_tokens"]:
            return f"answered {len(ids)} tokens where at most {request['max_tokens']} were requested"
        for token, logprob, name, top in zip(ids, *columns, strict=True):
            if type(token) is not int or not 0 <= token < vocab_size:
                return f"answered {token!r}, which is not a token of {vocab_size}"
            named = {name: logprob, **(top or {})}  # of which TRL trains on the most likely
            if name != f"token_id:{token}" or len(named) > request["logprobs"] + 1:
                return f"named {name if len(named) == 1 else f'{len(named)} tokens'} where it sampled {token}"
            for value in (logprob, named[name]):
                if value <= IMPOSSIBLE or value > ROUNDING:  # NaN, which is neither, means the present policy
                    return f"gave a token that it sampled the log-probability {value:g}"
            if abs(logprob - named[name]) > ROUNDING:
                return f"gave a token that it sampled the log-probabilities {logprob:g} and {named[name]:g}"
    return None


def check_ahead(client: BoundClient, rollouts_ahead: int, why_merged: str) -> None:
    """Refuses what is not exact: log-probabilities of another temperature, weights that change under a request."""
    config = client.server_config()
    if (mode := config["model_config"]["logprobs_mode"]) != "processed_logprobs":
        raise ValueError(
            f"`rollouts_ahead={rollouts_ahead}` trains with the server's log-probabilities, and it runs with "
            f"`--logprobs-mode {mode}`. Start it with `--logprobs-mode processed_logprobs`, or set `rollouts_ahead=0`."
        )
    if rollouts_ahead < 2:
        return
    if why_merged:
        raise ValueError(
            "`rollouts_ahead=2` needs a LoRA adapter that the server can serve unmerged, because weights that are "
            f"pushed change the policy in the middle of a completion; but {why_merged}. Change that (`use_peft=True` "
            "trains an adapter), or set `rollouts_ahead=1`."
        )
    if (num := config["lora_config"]["max_loras"]) <= rollouts_ahead:
        raise ValueError(
            f"`rollouts_ahead=2` samples with three adapters at a time, and the server runs with `--max-loras {num}`. "
            "Start it with `--max-loras 3`, or set `rollouts_ahead=1`."
        )


@contextmanager
def naming_lost_server(args: DAPOConfig) -> Iterator[None]:
    """
    Re-raise server errors with the server's URL and the checkpoint to resume from. TRL's client retries, and then
    raises a bare socket error.
    """
    try:
        yield
    except _faults() as error:
        url = args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"
        folder = output_folder(args)
        checkpoint = last_complete_checkpoint(folder)
        how = f"resume from {checkpoint}" if checkpoint else f"start over: {folder} holds no checkpoint"
        what = f"is gone ({error}). Start it again and"
        if isinstance(error, ServerFault):
            what = f"{error}. Its log says more. To continue,"
        elif type(error).__name__ == "ReadTimeout":  # of requests
            what = (
                f"has not answered for {args.vllm_request_seconds:g} s. If it hangs, start it again; if it needs "
                "longer, raise `vllm_request_timeout`. Then"
            )
        raise RuntimeError(without_secrets(f"The vLLM server at {url} {what} {how}.")) from error


def _faults() -> tuple[type[Exception], ...]:
    """Return the errors that mean that a server cannot be reached or trusted. Not every `OSError` means that."""
    try:
        from requests.exceptions import RequestException  # the client's, which comes with vLLM
    except ImportError:
        return ServerFault, ConnectionError, TimeoutError
    return ServerFault, ConnectionError, TimeoutError, RequestException

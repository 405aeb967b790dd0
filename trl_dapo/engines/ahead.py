# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Rollouts ahead: vLLM's server samples groups for later rollouts while the present rollout trains.

TRL's method for sampling completions runs twice. When groups are requested, the request that TRL would send is
recorded instead of sent, and threads send one request per group. When the groups are due, the responses are passed to
TRL as the response to its request. Only the requests are sent from other threads. Everything else happens in the main
thread.

Groups are received in the order in which they were requested, not in the order of their responses. So every process
knows which groups come next, a resumed run receives the same ones, and short completions are not preferred over long
ones.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers.utils import logging

from ..ranks import local_slice, on_main_process, rank_and_world_size
from ..run.stopwatch import Stopwatch
from ..sampling.groups import GenerationRequest
from ..update.patching import patched
from .call import Calls


logger = logging.get_logger(__name__)


@dataclass
class Answer:
    """
    The server's answer to the request for one group. It is stored as arrays, because lists of Python integers and
    floats would take too much memory.
    """

    prompt_ids: np.ndarray
    completion_ids: list[np.ndarray]
    logprobs: list[np.ndarray]  # log-probabilities of the tokens of each completion

    @classmethod
    def from_output(cls, output: dict[str, list]) -> "Answer":
        """Return the answer for the output of `VLLMClient.generate` for one prompt."""
        return cls(
            prompt_ids=np.asarray(output["prompt_ids"][0], dtype=np.int32),
            completion_ids=[np.asarray(ids, dtype=np.int32) for ids in output["completion_ids"]],
            # vLLM returns several tokens for each position. The first one is the sampled one.
            logprobs=[np.asarray([top[0] for top in row], dtype=np.float32) for row in output["logprobs"]],
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps. It can be loaded with `weights_only=True`."""
        return {
            "prompt_ids": torch.from_numpy(self.prompt_ids),
            "completion_ids": [torch.from_numpy(ids) for ids in self.completion_ids],
            "logprobs": [torch.from_numpy(row) for row in self.logprobs],
        }

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> "Answer":
        """Return the answer saved by [`Answer.state_dict`]."""
        return cls(
            prompt_ids=state["prompt_ids"].numpy(),
            completion_ids=[ids.numpy() for ids in state["completion_ids"]],
            logprobs=[row.numpy() for row in state["logprobs"]],
        )


def hand_over(answers: Sequence[Answer], prompts: list[list[int]], *, n: int, **sampling: Any) -> dict[str, list]:
    """Return the answers as the output of `VLLMClient.generate` for these prompts, with `n` completions of each."""
    prompt_ids: list[list[int]] = []
    for answer in answers:
        num_prompts = len(answer.logprobs) // n  # TRL lists a prompt once for every `n` of its completions
        prompt_ids += [answer.prompt_ids.tolist() for _ in range(num_prompts)]
    if prompt_ids != [list(ids) for ids in prompts]:
        raise RuntimeError(
            "The completions that were sampled ahead do not belong to the prompts that are due. This is a bug in "
            "trl-dapo: please report it."
        )
    return {
        "prompt_ids": prompt_ids,
        "completion_ids": [ids.tolist() for answer in answers for ids in answer.completion_ids],
        "logprobs": [row[:, None].tolist() for answer in answers for row in answer.logprobs],
    }


class GroupsAhead:
    """Groups in flight, which are requested in [`GroupsAhead.submit`] and received in [`GroupsAhead.answering`]."""

    # Every process has such an object and calls its methods in the same order. But only the main process has TRL's
    # `client`, so only it sends requests and receives answers.

    def __init__(
        self,
        *,
        client: Any,
        tokenize: Callable[[list], list[list[int]]],
        generate: Callable[[list, int], None],  # requests a number of completions of each prompt from the client
        naming_lost_server: Callable[[], AbstractContextManager],  # adds the server's URL to its errors
        keeping_weights: Callable[[], AbstractContextManager],  # keeps TRL from pushing weights
        waits_for_all: bool,  # whether to wait for all answers before other requests and in checkpoints
        stopwatch: Stopwatch,
    ) -> None:
        self._client, self._tokenize, self._generate = client, tokenize, generate
        self._naming_lost_server, self._keeping_weights = naming_lost_server, keeping_weights
        self._stopwatch = stopwatch
        self._waits_for_all = waits_for_all
        self._close: Callable[[], None] = lambda: client.session.close()
        self._calls = Calls()
        self._requested: dict[int, Future | None] = {}  # by the group's number, which every process has
        self._num_waited = 0  # groups whose answer had not arrived when they were due
        self._is_answering = False  # whether TRL is given answers instead of sampling

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Send the requests that were not sent yet, without waiting. The server gets the present weights first."""
        requests = [request for request in requests if request.group.number not in self._requested]
        if not requests:
            return
        recorded: dict[str, Any] = {}  # arguments of TRL's request

        def record_request(**arguments: Any) -> dict[str, list]:
            recorded.update(arguments)
            return {"prompt_ids": [], "completion_ids": [], "logprobs": []}

        rank, num_ranks = rank_and_world_size()
        texts = [request.group.example["prompt"] for request in requests]
        while len(texts) % num_ranks:  # every process must have the same number
            texts.append(texts[-1])
        with self._naming_lost_server(), self._generating_by(record_request):
            self._generate(texts[local_slice(len(texts), rank, num_ranks)], 1)
        self._requested |= dict.fromkeys(request.group.number for request in requests)
        if self._client is not None:
            for request, prompt_ids in zip(requests, recorded.pop("prompts"), strict=False):
                arguments = {**recorded, "prompts": [prompt_ids], "n": request.num_completions}
                answer = self._client.submit_request(partial(self._calls.add, then=Answer.from_output), **arguments)
                self._requested[request.group.number] = answer

    @contextmanager
    def answering(self, requests: Sequence[GenerationRequest]) -> Iterator[None]:
        """
        Within a block in which TRL samples one round, give it the answers of the server instead, if these requests
        were made ahead.
        """
        numbers = [request.group.number for request in requests]
        if self._requested.keys().isdisjoint(numbers):
            yield
            return
        self.submit(requests)  # sends those whose answers a checkpoint did not have
        calls = [self._requested.pop(number) for number in numbers]
        answers: list[Answer] = []
        with self._stopwatch.timing("wait"):
            self._num_waited += on_main_process(self._wait, calls, answers, failed="The main process could not sample")
        # TRL would push the present weights here, but they are only needed before the next request.
        with self._keeping_weights(), patched(self, _is_answering=True):
            with self._generating_by(partial(hand_over, answers)):
                yield

    def _wait(self, calls: list[Future], answers: list[Answer]) -> int:
        """Wait for calls and append their answers. Return how many had not arrived."""
        num_missing = sum(not call.done() for call in calls)
        with self._naming_lost_server():
            answers += [call.result() for call in calls]
        return num_missing

    def join(self) -> None:
        """Wait for all answers, if no other request may be made before. An error is raised on every process."""
        if self._waits_for_all and self._requested:
            on_main_process(self._wait, [*self._requested.values()], [], failed="The main process could not sample")

    def _generating_by(self, generate: Callable) -> AbstractContextManager[None]:
        """Replace `generate` of TRL's client, which only the main process has, within a block."""
        return nullcontext() if self._client is None else patched(self._client, generate=generate)

    def cancel(self) -> None:
        """Interrupt the present requests and forget all. No process waits for another here."""
        self._calls.cancel(self._close)
        self._requested = {}

    def timing_engine(self) -> AbstractContextManager[None]:
        """Measure the time of a block in which the engine samples, unless answers are used instead."""
        return nullcontext() if self._is_answering else self._stopwatch.timing("engine")

    def flush_timings(self) -> int:
        """
        Add the time during which requests were in progress to the stopwatch. Return how many groups were waited for.
        """
        self._stopwatch.add("ahead", self._calls.flush_seconds())
        num_waited, self._num_waited = self._num_waited, 0
        return num_waited

    # ---- Checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        """Return the answers that have arrived, for a checkpoint. It can be loaded with `weights_only=True`."""
        # Failed requests are left out. Their errors are raised when they are due, so that the checkpoint is written.
        calls = {number: call for number, call in self._requested.items() if call is not None}
        if self._waits_for_all:
            wait(calls.values())
        arrived = {number: call for number, call in calls.items() if call.done() and call.exception() is None}
        return {"answers": {number: call.result().state_dict() for number, call in arrived.items()}}

    def load_state_dict(self, state: dict[str, Any], requests: Sequence[GenerationRequest]) -> set[int]:
        """Continue from a state. Return the numbers of the groups in flight that have no answer in it."""
        held = {number: Answer.from_state_dict(answer) for number, answer in state["answers"].items()}

        def find() -> tuple[list[int], bool]:
            answered = [request.group for request in requests if request.group.number in held]
            tokens = self._tokenize([group.example["prompt"] for group in answered]) if answered else []
            fit = [
                held[group.number].prompt_ids.tolist() == list(ids)
                for group, ids in zip(answered, tokens, strict=True)
            ]
            numbers = [group.number for group in answered] if all(fit) else []
            return numbers, len(numbers) < len(held)

        numbers, has_other_prompts = on_main_process(find)
        if has_other_prompts:
            logger.warning(
                "The checkpoint has completions for later rollouts, but their prompts differ from those of this run. "
                "The tokenizer, the chat template or the dataset must have changed. These completions are discarded "
                "and sampled again."
            )
        for number in numbers:
            call: Future | None = Future() if self._client is not None else None
            self._requested[number] = call
            if call is not None:
                call.set_result(held[number])
        return {request.group.number for request in requests} - {*numbers}

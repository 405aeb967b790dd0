# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Rollouts ahead: groups of the next ones are sampled by vLLM's server while this one trains, a request each.

TRL's own way from prompts to completions is taken twice. When groups are requested, TRL's request is recorded instead
of sent, and threads send its parts. When groups are due, what came back is handed to TRL as the answer. Nothing but
requests leaves the main thread. Groups are handed over in the order in which they were requested, whichever answer
comes first: so every process knows which, a resumed run takes the same ones, and no length comes before another.
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
    """The server's response as arrays, because lists of integers and floats would fill the host's memory."""

    prompt_ids: np.ndarray
    completion_ids: list[np.ndarray]
    logprobs: list[np.ndarray]  # of each token of each completion

    @classmethod
    def of(cls, output: dict[str, list]) -> "Answer":
        """The answer in what `VLLMClient.generate` returned for one prompt."""
        return cls(
            prompt_ids=np.asarray(output["prompt_ids"][0], dtype=np.int32),
            completion_ids=[np.asarray(ids, dtype=np.int32) for ids in output["completion_ids"]],
            # vLLM returns several tokens for each position. The first is the one that it sampled.
            logprobs=[np.asarray([top[0] for top in row], dtype=np.float32) for row in output["logprobs"]],
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, loadable with `weights_only=True`."""
        return {
            "prompt_ids": torch.from_numpy(self.prompt_ids),
            "completion_ids": [torch.from_numpy(ids) for ids in self.completion_ids],
            "logprobs": [torch.from_numpy(row) for row in self.logprobs],
        }

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> "Answer":
        """The answer that [`Answer.state_dict`] described."""
        return cls(
            prompt_ids=state["prompt_ids"].numpy(),
            completion_ids=[ids.numpy() for ids in state["completion_ids"]],
            logprobs=[row.numpy() for row in state["logprobs"]],
        )


def hand_over(answers: Sequence[Answer], prompts: list[list[int]], *, n: int, **sampling: Any) -> dict[str, list]:
    """Return what `VLLMClient.generate` would return if it now requested `n` completions of each of these prompts."""
    prompt_ids: list[list[int]] = []
    for answer in answers:
        num_prompts = len(answer.logprobs) // n  # a prompt comes once for every `n` of its completions
        prompt_ids += [answer.prompt_ids.tolist() for _ in range(num_prompts)]
    if prompt_ids != [list(ids) for ids in prompts]:
        raise RuntimeError("What was sampled ahead is not of the prompts that are due.")
    return {
        "prompt_ids": prompt_ids,
        "completion_ids": [ids.tolist() for answer in answers for ids in answer.completion_ids],
        "logprobs": [row[:, None].tolist() for answer in answers for row in answer.logprobs],
    }


class GroupsAhead:
    """The requests in flight: sent by [`GroupsAhead.submit`], handed over by [`GroupsAhead.answering`]."""

    # Every process has one and calls its methods in the same order; requests and answers are the main process's, which
    # alone has a `client`, TRL's.

    def __init__(
        self,
        *,
        client: Any,
        tokenize: Callable[[list], list[list[int]]],
        generate: Callable[[list, int], None],  # through the client: prompts, and completions of each
        naming_lost_server: Callable[[], AbstractContextManager],  # says which server was lost
        keeping_weights: Callable[[], AbstractContextManager],  # TRL pushes none
        is_waited_for: bool,  # before anything else is requested, and in checkpoints
        stopwatch: Stopwatch,
    ) -> None:
        self._client, self._tokenize, self._generate = client, tokenize, generate
        self._naming_lost_server, self._keeping_weights = naming_lost_server, keeping_weights
        self._stopwatch = stopwatch
        self._is_waited_for = is_waited_for
        self._close: Callable[[], None] = lambda: client.session.close()
        self._calls = Calls()
        self._requested: dict[int, Future | None] = {}  # by the group's number; the same numbers in every process
        self._num_waited = 0  # groups that were not answered when they were due
        self._is_answering = False

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Request what was not requested yet, and do not wait. The server gets today's weights first."""
        requests = [request for request in requests if request.group.number not in self._requested]
        if not requests:
            return
        trls: dict[str, Any] = {}

        def record_request(**arguments: Any) -> dict[str, list]:
            trls.update(arguments)
            return {"prompt_ids": [], "completion_ids": [], "logprobs": []}

        rank, num_ranks = rank_and_world_size()
        texts = [request.group.example["prompt"] for request in requests]
        while len(texts) % num_ranks:  # every process needs as many
            texts.append(texts[-1])
        with self._naming_lost_server(), self._generating_by(record_request):
            self._generate(texts[local_slice(len(texts), rank, num_ranks)], 1)
        self._requested |= dict.fromkeys(request.group.number for request in requests)
        if self._client is not None:
            for request, prompt_ids in zip(requests, trls.pop("prompts"), strict=False):
                arguments = {**trls, "prompts": [prompt_ids], "n": request.num_completions}
                answer = self._client.submit_request(partial(self._calls.add, then=Answer.of), **arguments)
                self._requested[request.group.number] = answer

    @contextmanager
    def answering(self, requests: Sequence[GenerationRequest]) -> Iterator[None]:
        """Hand over what the server answered, in a block in which TRL samples one round, if it was requested ahead."""
        numbers = [request.group.number for request in requests]
        if self._requested.keys().isdisjoint(numbers):
            yield
            return
        self.submit(requests)  # if a checkpoint held only some of the answers
        calls = [self._requested.pop(number) for number in numbers]
        answers: list[Answer] = []
        with self._stopwatch.timing("wait"):
            self._num_waited += on_main_process(self._wait, calls, answers, failed="The main process could not sample")
        # TRL would push today's weights. They are due before the next request.
        with self._keeping_weights(), patched(self, _is_answering=True):
            with self._generating_by(partial(hand_over, answers)):
                yield

    def _wait(self, calls: list[Future], answers: list[Answer]) -> int:
        """Adds the answers; returns how many were still to come."""
        num_missing = sum(not call.done() for call in calls)
        with self._naming_lost_server():
            answers += [call.result() for call in calls]
        return num_missing

    def join(self) -> None:
        """Wait for all answers if nothing else may be requested before. What went wrong ends every process."""
        if self._is_waited_for and self._requested:
            on_main_process(self._wait, [*self._requested.values()], [], failed="The main process could not sample")

    def _generating_by(self, generate: Callable) -> AbstractContextManager[None]:
        """Puts a function in the place of that of TRL's client, which the main process alone has."""
        return nullcontext() if self._client is None else patched(self._client, generate=generate)

    def cancel(self) -> None:
        """Ends the requests under way, and forgets all. No process waits for another here."""
        self._calls.cancel(self._close)
        self._requested = {}

    def timing_engine(self) -> AbstractContextManager[None]:
        """A block in which the engine samples, unless what it sampled before is handed over."""
        return nullcontext() if self._is_answering else self._stopwatch.timing("engine")

    def flush_timings(self) -> int:
        """Adds the seconds in which requests were under way to the stopwatch; returns how many were waited for."""
        self._stopwatch.add("ahead", self._calls.flush_seconds())
        num_waited, self._num_waited = self._num_waited, 0
        return num_waited

    # ---- Checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of the responses that have arrived, loadable with `weights_only=True`."""
        # What is lost is left out, and its error raised when it is due: the checkpoint need not be lost too.
        calls = {number: call for number, call in self._requested.items() if call is not None}
        if self._is_waited_for:
            wait(calls.values())
        there = {number: call for number, call in calls.items() if call.done() and call.exception() is None}
        return {"answers": {number: call.result().state_dict() for number, call in there.items()}}

    def load_state_dict(self, state: dict[str, Any], requests: Sequence[GenerationRequest]) -> set[int]:
        """Continue from a state; return the numbers of the groups in flight that have no answer in it."""
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

        numbers, is_of_others = on_main_process(find)
        if is_of_others:
            logger.warning(
                "What the checkpoint holds of later rollouts is of other prompts: the tokenizer, the chat template or "
                "the dataset has changed. It is sampled again."
            )
        for number in numbers:
            call: Future | None = Future() if self._client is not None else None
            self._requested[number] = call
            if call is not None:
                call.set_result(held[number])
        return {request.group.number for request in requests} - {*numbers}

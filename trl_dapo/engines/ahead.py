# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""One rollout ahead: the next rollout's first round is sampled by vLLM's server while this one trains.

TRL's own way from prompts to completions is taken twice. When the round is asked for, its request is taken down in
place of being sent, and a thread sends it; when the round is due, what came back stands in for the answer. Nothing but
that one request leaves the main thread, and the server is asked for nothing else while it is under way.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate.utils import broadcast_object_list
from transformers.utils import logging

from ..ranks import local_slice, on_main_process, rank_and_world_size
from ..run.stopwatch import Stopwatch
from ..sampling.rounds import completions_in_common
from ..sampling.sampler import Sampler
from .call import Call
from .swap import swapped


logger = logging.get_logger(__name__)

GRACE, PATIENCE = 5.0, 0.25  # seconds that an interrupted request may take to end, in all and at each attempt


@dataclass
class Answer:
    """What the server answered, as arrays: as lists of integers and floats it would fill the host's memory."""

    prompt_ids: list[np.ndarray]
    completion_ids: list[np.ndarray]  # those of a prompt follow each other
    logprobs: list[np.ndarray]  # of each token of each completion; NaN where the server could not say

    @classmethod
    def of(cls, output: dict[str, list]) -> "Answer":
        """The answer in what `VLLMClient.generate` returned."""
        return cls(
            prompt_ids=[np.asarray(ids, dtype=np.int32) for ids in output["prompt_ids"]],
            completion_ids=[np.asarray(ids, dtype=np.int32) for ids in output["completion_ids"]],
            # Of the tokens that vLLM names at each place, the first is the one it sampled.
            logprobs=[np.asarray([top[0] for top in row], dtype=np.float32) for row in output["logprobs"]],
        )

    def is_of(self, prompt_ids: list[list[int]]) -> bool:
        """Whether it answers these prompts."""
        return [ids.tolist() for ids in self.prompt_ids] == [list(ids) for ids in prompt_ids]

    def generate(self, prompts: list[list[int]], **sampling: Any) -> dict[str, list]:
        """What `VLLMClient.generate` would return, had it been asked now."""
        if not self.is_of(prompts):
            raise RuntimeError("The round sampled ahead is not of the prompts that are due.")
        return {
            "prompt_ids": [ids.tolist() for ids in self.prompt_ids],
            "completion_ids": [ids.tolist() for ids in self.completion_ids],
            "logprobs": [row[:, None].tolist() for row in self.logprobs],
        }

    def state_dict(self) -> dict[str, list[torch.Tensor]]:
        """What a checkpoint keeps, loadable with `weights_only=True`."""
        return {name: [torch.from_numpy(row) for row in column] for name, column in vars(self).items()}

    @classmethod
    def from_state_dict(cls, state: dict[str, list[torch.Tensor]]) -> "Answer":
        """The answer that [`Answer.state_dict`] described."""
        return cls(**{name: [row.numpy() for row in column] for name, column in state.items()})


class RoundAhead:
    """
    The round in flight: asked for in [`RoundAhead.ask`], due in [`RoundAhead.answering`].

    Every process has one and calls its methods in the same order; the request and its answer are the main process's,
    which alone has a `client`, TRL's.
    """

    def __init__(
        self,
        sampler: Sampler | None,
        *,
        client: Any,
        asks_a_server: bool,
        tokenize: Callable[[list], list[list[int]]],
        generate: Callable[[list, int], None],  # through the client; so many of every so-manieth prompt
        describing_loss: Callable[[], AbstractContextManager],  # says which server was lost
        keeping_weights: Callable[[], AbstractContextManager],  # TRL pushes none
        stopwatch: Stopwatch,
    ) -> None:
        self._sampler = sampler
        self._client, self._asks_a_server = client, asks_a_server
        self._tokenize, self._generate = tokenize, generate
        self._describing_loss, self._keeping_weights, self._stopwatch = describing_loss, keeping_weights, stopwatch
        self._close: Callable[[], None] = lambda: client.session.close()
        self._is_asked = False  # the same in every process
        self._is_answered = False  # the same in every process
        self._call: Call | None = None
        self._answer: Answer | None = None
        self._is_answering = False

    def ask(self, step: int) -> None:
        """Asks the server for the next rollout's first round and does not wait. It is given today's weights first."""
        assert self._sampler is not None
        asks = self._sampler.draw_ahead(step)
        if not asks:
            return
        texts = [ask.example["prompt"] for ask in asks for _ in range(ask.num)]
        request: dict[str, Any] = {}

        def take_down(**asked: Any) -> dict[str, list]:
            request.update(asked)
            return {"prompt_ids": [], "completion_ids": [], "logprobs": []}

        with self._describing_loss(), self._generating_by(take_down):
            mine = local_slice(len(texts), *rank_and_world_size())
            self._generate(texts[mine], completions_in_common(asks))
        self._is_asked = True
        if self._client is not None:
            client = self._client
            self._call = Call(lambda: Answer.of(client.generate(**request)))

    def join(self) -> None:
        """Waits for the answer, if there is any to wait for. What went wrong ends every process."""
        if not self._is_asked or self._is_answered:
            return
        self._is_answered = True

        def wait() -> None:
            call = self._call
            assert call is not None
            try:
                with self._describing_loss():
                    self._answer = call.result()
            finally:
                if call.done():  # else it was Ctrl-C, and the request is still to be ended
                    self._stopwatch.add("ahead", call.seconds)
                    self._call = None

        on_main_process(wait, failed="The main process could not sample")

    @contextmanager
    def answering(self) -> Iterator[bool]:
        """
        A block in which TRL samples one round. Yields whether that is the one asked for: then the server is asked for
        nothing, and the completions are those of the policy of one rollout ago.
        """
        if not self._is_asked:
            yield False
            return
        with self._stopwatch.timing("wait"):
            self.join()
        answer, self._answer, self._is_asked, self._is_answered = self._answer, None, False, False
        # TRL would push today's weights. They are due before the next request.
        with self._keeping_weights(), swapped(self, _is_answering=True):
            with self._generating_by(None if answer is None else answer.generate):
                yield True

    def _generating_by(self, generate: Callable | None) -> AbstractContextManager[None]:
        """Puts a function in the place of that of TRL's client, which the main process alone has."""
        return nullcontext() if self._client is None else swapped(self._client, generate=generate)

    def cancel(self) -> None:
        """Ends the request under way, if there is one, and forgets it. No process waits for another here."""
        if self._call is not None:
            # A request whose connection is not made yet goes out after its session was closed: it is closed again.
            for _ in range(int(GRACE / PATIENCE)):
                self._close()
                if self._call.ends_within(PATIENCE):
                    break
        self._call = self._answer = None
        self._is_asked = self._is_answered = False

    def timing_engine(self) -> AbstractContextManager[None]:
        """A block in which the engine samples, unless what it sampled before is handed over."""
        return nullcontext() if self._is_answering else self._stopwatch.timing("engine")

    # ---- Checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        """
        What a checkpoint keeps of the round in flight, once it is answered, loadable with `weights_only=True`. A lost
        one is left out, and its error raised when it is due: the checkpoint need not be lost too.
        """
        if self._is_asked and not self._is_answered:
            is_lost = [self._call is not None and self._call.exception() is not None]
            broadcast_object_list(is_lost)
            if is_lost[0]:
                return {"is_asked": False, "answer": None}
            self.join()
        answer = None if self._answer is None else self._answer.state_dict()
        return {"is_asked": self._is_asked, "answer": answer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from what [`RoundAhead.state_dict`] returned, on this process."""
        if state["is_asked"] and not self._asks_a_server:
            logger.warning("The round that the checkpoint holds was sampled by a vLLM server. It is sampled again.")
            return
        answer = None if state["answer"] is None else Answer.from_state_dict(state["answer"])

        def fits() -> bool:
            assert self._sampler is not None
            drawn = self._sampler.drawn_ahead
            prompts = [ask.example["prompt"] for ask in drawn for _ in range(ask.num // completions_in_common(drawn))]
            return bool(drawn) and (answer is None or answer.is_of(self._tokenize(prompts)))

        if not on_main_process(fits):
            logger.warning(
                "The round that the checkpoint holds is of other prompts: the tokenizer, the chat template or the "
                "dataset has changed. It is sampled again."
            )
            return
        self._is_asked = self._is_answered = state["is_asked"]
        self._answer = answer

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""One rollout ahead: the next rollout's first round is sampled by vLLM's server while this one trains.

TRL's own way from prompts to completions is taken twice. When the round is asked for, its request is taken down in
place of being sent, and a thread sends it; when the round is due, what came back stands in for the answer. Nothing but
that one request leaves the main thread, and the server is asked for nothing else while it is under way.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate.utils import broadcast_object_list
from transformers.utils import logging

from ..sampling.overlap import Call
from ..sampling.rollouts import local_slice
from .engine import asks_a_server, bound_requests, naming_the_server


if TYPE_CHECKING:
    from ..trainer import DAPOTrainer


logger = logging.get_logger(__name__)

GRACE = 5.0  # seconds that an interrupted request may take to end


@dataclass
class Answer:
    """
    What the server answered, as arrays: as lists of integers and floats it would fill the host's memory.

    Args:
        prompt_ids (`list[np.ndarray]`):
            Token ids of each prompt.
        completion_ids (`list[np.ndarray]`):
            Token ids of each completion; those of a prompt follow each other.
        logprobs (`list[np.ndarray]`):
            Log-probability of each token of each completion; NaN where the server could not say.
    """

    prompt_ids: list[np.ndarray]
    completion_ids: list[np.ndarray]
    logprobs: list[np.ndarray]

    @classmethod
    def of(cls, output: dict[str, list]) -> "Answer":
        """The answer in what `VLLMClient.generate` returned."""
        return cls(
            prompt_ids=[np.asarray(ids, dtype=np.int32) for ids in output["prompt_ids"]],
            completion_ids=[np.asarray(ids, dtype=np.int32) for ids in output["completion_ids"]],
            # Of the tokens that vLLM names at each place, the first is the one it sampled.
            logprobs=[np.asarray([top[0] for top in row], dtype=np.float32) for row in output["logprobs"]],
        )

    def generate(self, prompts: list[list[int]], **sampling: Any) -> dict[str, list]:
        """What `VLLMClient.generate` would return, had it been asked now."""
        prompt_ids = [ids.tolist() for ids in self.prompt_ids]
        if prompt_ids != [list(ids) for ids in prompts]:
            raise RuntimeError("The round sampled ahead is not of the prompts that are due.")
        return {
            "prompt_ids": prompt_ids,
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

    Every process has one and calls its methods in the same order; the request and its answer are the main process's.

    Args:
        trainer ([`DAPOTrainer`]):
            The trainer, constructed but for this.
    """

    def __init__(self, trainer: "DAPOTrainer") -> None:
        self._trainer = trainer
        self._is_asked = False  # the same in every process
        self._is_answered = False  # the same in every process
        self._call: Call | None = None
        self._answer: Answer | None = None
        self._adapters = bound_requests(trainer)
        self._is_answering = False

    def ask(self, step: int) -> None:
        """
        Asks the server for the next rollout's first round and does not wait, unless this rollout is the last. The
        server is given today's weights first, where it has not got them.

        Args:
            step (`int`):
                Optimizer steps made.
        """
        trainer = self._trainer
        is_last = trainer._is_last_rollout or trainer.stop.is_past_a_limit
        assert trainer._sampler is not None
        prompts = [] if is_last else trainer._sampler.draw_ahead(step)
        if not prompts:
            return
        texts = [example["prompt"] for _, example in prompts for _ in range(trainer.num_generations)]
        mine = local_slice(len(texts), trainer.accelerator.process_index, trainer.accelerator.num_processes)
        request = {}

        def take_down(**asked: Any) -> dict[str, list]:
            request.update(asked)
            return {"prompt_ids": [], "completion_ids": [], "logprobs": []}

        # As TRL's `_generate`, up to where it needs the completions.
        prompt_ids, images, fields = trainer._tokenize_prompts(copy.deepcopy(texts[mine]))
        with naming_the_server(trainer), self._generating_by(take_down):
            trainer._generate_single_turn(prompt_ids, images, fields, trainer.num_generations)
        self._is_asked = True
        if trainer.accelerator.is_main_process:
            client = trainer.vllm_generation.vllm_client
            self._call = Call(lambda: Answer.of(client.generate(**request)))

    def join(self) -> None:
        """Waits for the answer, if there is any to wait for. What went wrong ends every process."""
        if not self._is_asked or self._is_answered:
            return
        error = None
        if self._call is not None:
            try:
                with naming_the_server(self._trainer):
                    self._answer = self._call.result()
            except Exception as exc:
                error = exc
            self._trainer.stopwatch.add("ahead", self._call.seconds)
            self._call = None
        failure = [None if error is None else f"{type(error).__name__}: {error}"]
        broadcast_object_list(failure)
        self._is_answered = True
        if error is not None:
            raise error
        if failure[0] is not None:
            raise RuntimeError(f"The main process could not sample: {failure[0]}")

    def _is_lost(self) -> bool:
        """Waits as [`RoundAhead.join`], and says whether that would raise an error."""
        if not self._is_asked or self._is_answered:
            return False
        is_lost = [self._call is not None and self._call.fails()]
        broadcast_object_list(is_lost)
        return is_lost[0]

    @contextmanager
    def answering(self) -> Iterator[bool]:
        """
        A block in which TRL samples one round. Yields whether that is the one asked for: then the server is asked for
        nothing, and the completions are those of the policy of one rollout ago.
        """
        if not self._is_asked:
            yield False
            return
        trainer = self._trainer
        with trainer.stopwatch.timing("wait"):
            self.join()
        answer, self._answer, self._is_asked, self._is_answered = self._answer, None, False, False
        # TRL would push today's weights. They are due before the next request.
        loaded, trainer._last_loaded_step = trainer._last_loaded_step, trainer.state.global_step
        self._is_answering = True
        try:
            with self._generating_by(None if answer is None else answer.generate):
                yield True
        finally:
            trainer._last_loaded_step, self._is_answering = loaded, False

    @contextmanager
    def _generating_by(self, generate: Callable | None) -> Iterator[None]:
        """Puts a function in the place of that of TRL's client, which the main process alone has."""
        if not self._trainer.accelerator.is_main_process:
            yield
            return
        client = self._trainer.vllm_generation.vllm_client
        usual = client.generate
        client.generate = generate  # type: ignore[method-assign, assignment]  # for the time of the block
        try:
            yield
        finally:
            client.generate = usual  # type: ignore[method-assign]

    def cancel(self) -> None:
        """Ends the request under way, if there is one, and forgets it. No process waits for another here."""
        if self._call is not None:
            for adapter in self._adapters:
                adapter.interrupt()
            if self._call.ends_within(GRACE):
                for adapter in self._adapters:
                    adapter.resume()
        self._call = self._answer = None
        self._is_asked = self._is_answered = False

    def timing_engine(self) -> AbstractContextManager[None]:
        """A block in which the engine samples, unless what it sampled before is handed over."""
        return nullcontext() if self._is_answering else self._trainer.stopwatch.timing("engine")

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """
        What a checkpoint keeps of the round in flight, once it is answered, loadable with `weights_only=True`. A round
        that was lost is left out, and its error raised when it is due: the checkpoint need not be lost too.
        """
        if self._is_lost():
            return {"is_asked": False, "answer": None}
        self.join()
        answer = None if self._answer is None else self._answer.state_dict()
        return {"is_asked": self._is_asked, "answer": answer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from what [`RoundAhead.state_dict`] returned, on this process."""
        if state["is_asked"] and not asks_a_server(self._trainer):
            logger.warning("The round that the checkpoint holds was sampled by a vLLM server. It is sampled again.")
            return
        answer = None if state["answer"] is None else Answer.from_state_dict(state["answer"])
        fits = [answer is None or self._is_of_prompts_due(answer)]
        broadcast_object_list(fits)
        if not fits[0]:
            logger.warning(
                "The round that the checkpoint holds is of other prompts: the tokenizer or the chat template "
                "has changed. It is sampled again."
            )
            return
        self._is_asked = self._is_answered = state["is_asked"]
        self._answer = answer

    def _is_of_prompts_due(self, answer: Answer) -> bool:
        assert self._trainer._sampler is not None
        texts = [copy.deepcopy(example["prompt"]) for _, example in self._trainer._sampler.drawn_ahead]
        prompt_ids = self._trainer._tokenize_prompts(texts)[0]
        return [ids.tolist() for ids in answer.prompt_ids] == [list(ids) for ids in prompt_ids]

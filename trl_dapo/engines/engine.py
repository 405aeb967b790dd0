# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
What samples completions for the trainer: how it samples during evaluation, how long it is awake and waited for, and
what is said when it is lost.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..run.checkpoint import last_complete_checkpoint, output_folder


if TYPE_CHECKING:
    from ..trainer import DAPOTrainer


@contextmanager
def eval_sampling(trainer: "DAPOTrainer") -> Iterator[None]:
    """Samples with `eval_temperature`, `eval_top_p` and `eval_top_k` where they are set."""
    changed = {name: getattr(trainer.args, f"eval_{name}") for name in ("temperature", "top_p", "top_k")}
    changed = {name: value for name, value in changed.items() if value is not None}
    if trainer.use_vllm:
        usual = {name: getattr(trainer.vllm_generation, name) for name in changed}
        vars(trainer.vllm_generation).update(changed)
        try:
            yield
        finally:
            vars(trainer.vllm_generation).update(usual)
    else:
        config, arguments = trainer.generation_config, trainer.generation_kwargs
        trainer.generation_kwargs = {**trainer.generation_kwargs, **changed}
        trainer.generation_config = copy.deepcopy(trainer.generation_config)
        trainer.generation_config.update(**changed)
        try:
            yield
        finally:
            trainer.generation_config, trainer.generation_kwargs = config, arguments
            trainer.model.eval()  # TRL's continuous batching leaves it in training mode


@contextmanager
def awake(trainer: "DAPOTrainer") -> Iterator[None]:
    """
    Keeps an engine that sleeps between its calls awake for all calls of the block, if there is one: waking takes all
    weights, and so each of them would push all weights.
    """
    args = trainer.args
    if not (trainer.use_vllm and args.vllm_mode == "colocate" and args.vllm_enable_sleep_mode):
        yield
        return
    engine = trainer.vllm_generation
    # As TRL before its first call, which then finds the engine as it wants it.
    engine.sync_weights()
    trainer._last_loaded_step = trainer.state.global_step
    engine.llm.wake_up(tags=["kv_cache"])
    engine.enable_sleep_mode = False
    try:
        yield
    finally:
        engine.enable_sleep_mode = True
        engine.llm.sleep(level=2)
        engine._llm_weights_sleeping = True


def asks_a_server(trainer: "DAPOTrainer") -> bool:
    """Whether completions are vLLM's server's."""
    return trainer.use_vllm and trainer.args.vllm_mode == "server"


def bound_requests(trainer: "DAPOTrainer") -> list:
    """
    Gives the requests to vLLM's server a timeout, which TRL's have none of, and returns what interrupts them: its
    `session`'s adapters, of the main process, which alone has a client.
    """
    if not (asks_a_server(trainer) and trainer.accelerator.is_main_process):
        return []
    session, adapters = trainer.vllm_generation.vllm_client.session, []
    for prefix, adapter in list(session.adapters.items()):
        from .server import ServerAdapter  # its packages come with vLLM

        adapters.append(ServerAdapter(adapter, trainer.args.vllm_request_seconds))
        session.mount(prefix, adapters[-1])
    return adapters


@contextmanager
def naming_the_server(trainer: "DAPOTrainer") -> Iterator[None]:
    """Says which server was lost and how to go on: TRL's client retries, and then raises what its socket says."""
    args = trainer.args
    if not asks_a_server(trainer):
        yield
        return
    try:
        yield
    except _connection_errors() as error:
        if trainer.rollout_func is not None:
            raise  # it may have asked somebody else
        url = args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"
        folder = output_folder(args)
        checkpoint = last_complete_checkpoint(folder)
        how = f"resume from {checkpoint}" if checkpoint else f"start over: {folder} holds no checkpoint"
        what = f"is gone ({error}). Start it again and"
        if _says_that_time_is_up(error):
            what = (
                f"has not answered for {args.vllm_request_seconds:g} s. If it hangs, start it again; if it needs "
                "longer, raise `vllm_request_timeout`. Then"
            )
        raise RuntimeError(f"The vLLM server at {url} {what} {how}.") from error


def _says_that_time_is_up(error: Exception) -> bool:
    return type(error).__name__ == "ReadTimeout"  # of requests, which comes with vLLM


def _connection_errors() -> tuple[type[Exception], ...]:
    """What says that a server cannot be reached; not every error of the system says so."""
    try:
        from requests.exceptions import RequestException  # the client's, which comes with vLLM
    except ImportError:
        return ConnectionError, TimeoutError
    return ConnectionError, TimeoutError, RequestException

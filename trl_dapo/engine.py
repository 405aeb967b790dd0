# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""What samples completions for the trainer: how it samples during evaluation, and what is said when it is lost."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

from .checkpoint import last_complete_checkpoint


@contextmanager
def eval_sampling(trainer) -> Iterator[None]:
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
        usual = trainer.generation_config, trainer.generation_kwargs
        trainer.generation_kwargs = {**trainer.generation_kwargs, **changed}
        trainer.generation_config = copy.deepcopy(trainer.generation_config)
        trainer.generation_config.update(**changed)
        try:
            yield
        finally:
            trainer.generation_config, trainer.generation_kwargs = usual
            trainer.model.eval()  # TRL's continuous batching leaves it in training mode


@contextmanager
def naming_the_server(trainer) -> Iterator[None]:
    """Says which server was lost and how to go on: TRL's client retries, and then raises what its socket says."""
    args = trainer.args
    if not (trainer.use_vllm and args.vllm_mode == "server"):
        yield
        return
    from requests.exceptions import RequestException  # only the server's client needs it

    try:
        yield
    except RequestException as error:
        url = args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"
        if trainer.rollout_func is not None and url not in str(getattr(error.request, "url", "")):
            raise  # the rollout function asked somebody else
        checkpoint = last_complete_checkpoint(args.output_dir)
        how = f"resume from {checkpoint}" if checkpoint else f"train anew: {args.output_dir} holds no checkpoint"
        raise RuntimeError(f"The vLLM server at {url} is gone ({error}). Start it again and {how}.") from error

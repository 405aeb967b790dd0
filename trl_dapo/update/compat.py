# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Everything that depends on the version of transformers or TRL is decided here, and nowhere else."""

from importlib.metadata import version
from typing import Any

import torch
import transformers
from torch.distributed.tensor import DTensor


# Before 5.18 transformers reads an optimizer's state to "cpu:0" where several processes train on CPUs.
torch.serialization.register_package(30, lambda storage: None, lambda storage, at: storage if at == "cpu:0" else None)


def check_release(trainer: Any) -> None:
    """Refuses what the installed transformers would get wrong."""
    is_sharded = any(isinstance(weight, DTensor) for weight in trainer.model.parameters())
    fsdp = getattr(trainer.accelerator.state, "fsdp_plugin", None) if trainer.ref_model is not None else None
    loads_once = fsdp and fsdp.fsdp_version == 2 and fsdp.cpu_ram_efficient_loading  # the other ranks would have zeros
    for is_asked, release, what in (
        (is_sharded and trainer.num_ranks_sharing_a_row == 1, "5.19", "Weights that were sharded at load"),
        (loads_once, "5.23", "A reference (`beta`) under FSDP2 with `fsdp_cpu_ram_efficient_loading: true`"),
    ):
        if is_asked and [*map(int, transformers.__version__.split(".")[:2])] < [*map(int, release.split("."))]:
            raise ValueError(f"{what} needs transformers>={release}; {transformers.__version__} is installed.")


def sharded_at_load(trainer: Any) -> tuple[bool, Any]:
    """Whether transformers placed the weights, and what keeps their gradients on a rank: from 5.19, and from 5.23."""
    is_sharded = getattr(trainer, "is_distributed_loading_by_transformers", False)
    return is_sharded, getattr(trainer, "_defer_fsdp_gradient_reduction", None) if is_sharded else None


def end_tokens(trainer: Any, of_tokenizer: int) -> list[int]:
    """The tokens that end a completion; before TRL 1.14.2 the tokenizer's."""
    return getattr(trainer, "eos_token_ids", [of_tokenizer])


def knows_end_tokens(trainer: Any) -> bool:
    return hasattr(trainer, "eos_token_ids")


def add_end_tokens(trainer: Any, given: int | list[int] | None, of_tokenizer: int, vocab_size: int) -> None:
    """Makes TRL end completions where `generation_kwargs["eos_token_id"]` has transformers end them too."""
    if given is None:
        return
    new = [given] if isinstance(given, int) else given
    if unknown := [token for token in new if token >= vocab_size]:
        raise ValueError(
            f"`generation_kwargs['eos_token_id']` names {unknown[0]}, and the model's vocabulary has {vocab_size} "
            "tokens, from 0. No completion would end there. Name a token of the model, or leave it out."
        )
    if not knows_end_tokens(trainer):
        raise ValueError(
            f"`generation_kwargs['eos_token_id']={given!r}` needs trl>=1.14.2: {version('trl')} trains on the padding "
            "behind these tokens. Upgrade it, or leave the tokens out."
        )
    known = end_tokens(trainer, of_tokenizer)
    vars(trainer)["eos_token_ids"] = [*known, *(token for token in new if token not in known)]

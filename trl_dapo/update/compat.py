# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Everything that depends on the installed versions of transformers and TRL, gathered in one place."""

from importlib.metadata import version
from typing import Any

import torch
import transformers
from torch.distributed.tensor import DTensor


# With several processes on CPUs, transformers before 5.18 loads optimizer states to "cpu:0", which torch does not
# know.
torch.serialization.register_package(30, lambda storage: None, lambda storage, at: storage if at == "cpu:0" else None)


def check_release(trainer: Any) -> None:
    """Raise if the run uses a feature that is broken in the installed version of transformers."""
    is_sharded = any(isinstance(weight, DTensor) for weight in trainer.model.parameters())
    fsdp = getattr(trainer.accelerator.state, "fsdp_plugin", None) if trainer.ref_model is not None else None
    # The weights of the reference would be zero on all processes but the first.
    loads_once = fsdp and fsdp.fsdp_version == 2 and fsdp.cpu_ram_efficient_loading
    for is_used, release, what in (
        (
            is_sharded and trainer.num_ranks_sharing_a_row == 1,
            "5.19",
            "Training weights that were sharded when loaded",
        ),
        (loads_once, "5.23", "A reference model (`beta`) under FSDP2 with `fsdp_cpu_ram_efficient_loading: true`"),
    ):
        if is_used and [*map(int, transformers.__version__.split(".")[:2])] < [*map(int, release.split("."))]:
            raise ValueError(
                f"{what} needs transformers>={release}, but {transformers.__version__} is installed. Upgrade "
                "transformers."
            )


def sharded_at_load(trainer: Any) -> tuple[bool, Any]:
    """
    Return whether transformers sharded the weights when it loaded them (5.19 and later), and a context manager that
    defers reducing their gradients (5.23 and later).
    """
    is_sharded = getattr(trainer, "is_distributed_loading_by_transformers", False)
    return is_sharded, getattr(trainer, "_defer_fsdp_gradient_reduction", None) if is_sharded else None


def end_tokens(trainer: Any, of_tokenizer: int) -> list[int]:
    """Return the tokens that end a completion. Before TRL 1.14.2 it is only the end token of the tokenizer."""
    return getattr(trainer, "eos_token_ids", [of_tokenizer])


def knows_end_tokens(trainer: Any) -> bool:
    """Return whether TRL supports several end tokens."""
    return hasattr(trainer, "eos_token_ids")


def add_end_tokens(trainer: Any, given: int | list[int] | None, of_tokenizer: int, vocab_size: int) -> None:
    """Make TRL end completions at the tokens of `generation_kwargs["eos_token_id"]`, as transformers does."""
    if given is None:
        return
    new = [given] if isinstance(given, int) else given
    if unknown := [token for token in new if token >= vocab_size]:
        raise ValueError(
            f"`generation_kwargs['eos_token_id']` contains {unknown[0]}, but the model's vocabulary has only "
            f"{vocab_size} tokens, numbered from 0, so no completion would end there. Use a token of the model, or "
            "leave it out."
        )
    if not knows_end_tokens(trainer):
        raise ValueError(
            f"`generation_kwargs['eos_token_id']={given!r}` needs trl>=1.14.2: trl {version('trl')}, which is "
            "installed, trains on the padding after these tokens. Upgrade TRL, or leave the tokens out."
        )
    known = end_tokens(trainer, of_tokenizer)
    vars(trainer)["eos_token_ids"] = [*known, *(token for token in new if token not in known)]

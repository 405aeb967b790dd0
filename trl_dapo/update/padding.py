# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Whether a model's log-probabilities depend on the padding around a row: then no column of it may go."""

from collections.abc import Callable

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel
from transformers.utils import logging

from ..models import has_rotary_positions, why_positions_are_absolute


logger = logging.get_logger(__name__)

# Mean difference in log-probability above which a model depends on its padding. A shift by 32 moves tiny random models
# with absolute positions by 0.08 to 0.5; where positions are counted without padding, only rounding is left.
PADDING_TOLERANCE = 0.02
# Of some ids and their mask, the log-probabilities of the last so many.
LogProbabilities = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]


def depends_on_padding(
    model: PreTrainedModel, logps: LogProbabilities, pad_token_id: int, has_images: bool, accelerator: Accelerator
) -> bool:
    """Whether a model depends on its padding; a warning says so. Every rank asks: finding out may take the model."""
    reason = why_positions_are_absolute(model.config)
    # Turned by their positions, queries and keys know distances alone, though rounding differs. Models with images
    # take no plain row, and have rotary positions.
    if reason is None and not has_rotary_positions(model.config) and not has_images:
        moved = _moved_by_padding(model, logps, pad_token_id, accelerator)
        if moved > PADDING_TOLERANCE:
            reason = f"a row's log-probabilities move by {moved:.2g} in the mean when it is padded"
    if reason is not None and accelerator.is_main_process:
        logger.warning(
            f"This model depends on its padding: {reason}. Micro-batches keep the widths that GRPOTrainer gives them, "
            "and are not cut to equal cost."
        )
    return reason is not None


@torch.no_grad()
def _moved_by_padding(
    model: PreTrainedModel, logps: LogProbabilities, pad_token_id: int, accelerator: Accelerator
) -> float:
    """By how much the log-probabilities of a row move, in the mean, when it is padded on the left or the right."""
    text_config = model.config.get_text_config()
    num_tokens = min(32, (getattr(text_config, "max_position_embeddings", None) or 64) // 2)
    row = torch.linspace(0, text_config.vocab_size - 1, num_tokens, device=accelerator.device).long()
    tokens, padding = torch.ones_like(row), torch.zeros_like(row)
    fill = torch.full_like(row, pad_token_id)

    def of_row(ids: torch.Tensor, mask: torch.Tensor, first: int) -> torch.Tensor:
        """Log-probabilities of the row's tokens but the first, which stands in column `first`."""
        return logps(ids.unsqueeze(0), mask.unsqueeze(0), len(ids) - first - 1)[0, : num_tokens - 1].float()

    was_training = model.training
    model.eval()  # dropout would move them too
    try:
        alone = of_row(row, tokens, 0)
        left = of_row(torch.cat([fill, row]), torch.cat([padding, tokens]), num_tokens)
        right = of_row(torch.cat([row, fill]), torch.cat([tokens, padding]), 0)
    finally:
        model.train(was_training)
    moved = torch.stack([(left - alone).abs().mean(), (right - alone).abs().mean()])
    return accelerator.gather(moved).max().item()  # the same on every rank, whatever rounding does

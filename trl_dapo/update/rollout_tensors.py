# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Functions on the tensors of a rollout: padding, trimming, joining rows, and sending rows to other processes.

A rollout, or a part of one, is the `dict` of tensors that `GRPOTrainer` makes of it.
"""

import zlib
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import pad

from .old_logps import PRESENT_POLICY, of_present_policy


# The layout of each tensor of a rollout and the value of its padding, for B rows, P prompt and C completion columns.
#   prompt      (B, P), padded on the left
#   completion  (B, C), padded on the right; or one value per row: (B,) or (B, 1)
#   sequence    (B, P + C), padded on both sides
#   step        one scalar for all rows
#   image       anything that is not indexed by row; the rows of such a rollout are trimmed, but stay in the same
#               micro-batch
# `None` stands for the pad token.
ROLLOUT_KEYS = {
    "prompt_ids": ("prompt", None),
    "prompt_mask": ("prompt", 0),
    "completion_ids": ("completion", None),
    "completion_mask": ("completion", 0),
    "tool_mask": ("completion", 1),
    "advantages": ("completion", 0.0),
    "old_per_token_logps": ("completion", 0.0),
    "ref_per_token_logps": ("completion", 0.0),
    "sampling_per_token_logps": ("completion", 0.0),
    "importance_sampling_ratio": ("completion", 1.0),
    # Added by DAPOTrainer:
    "is_filler": ("completion", False),  # whether the row only fills the batch and has no weight in the loss
    "staleness": ("completion", 0),  # how many rollouts old the weights are with which the row was sampled
    "group": ("completion", -1),  # number of the row's group in the batch
    "token_type_ids": ("sequence", 0),
    "mm_token_type_ids": ("sequence", 0),
    "num_items_in_batch": ("step", None),
    **dict.fromkeys(("pixel_values", "pixel_attention_mask", "spatial_shapes", "image_sizes"), ("image", None)),
    **dict.fromkeys(("image_grid_thw", "image_position_ids", "num_images", "num_tiles"), ("image", None)),
}
# The inputs of the model in a rollout, in addition to tokens and masks.
MODEL_INPUTS = [key for key, (layout, _) in ROLLOUT_KEYS.items() if layout in ("image", "sequence")]


def unknown_keys(rollout: dict) -> list[str]:
    """Return the keys of a rollout with unknown layout, such as those that a later TRL adds, in alphabetical order."""
    return sorted(key for key, value in rollout.items() if value is not None and key not in ROLLOUT_KEYS)


def mask_rows(rollout: dict, is_masked_B: Sequence[bool]) -> None:
    """Leave these rows of a rollout out of the loss, as TRL's `mask_truncated_completions` does."""
    for key in ("completion_mask", "tool_mask"):
        if (mask := rollout.get(key)) is not None:
            stays_B = ~torch.tensor(is_masked_B, device=mask.device)
            rollout[key] = mask * stays_B.unsqueeze(1).to(mask.dtype)


def mark_filler(rollout: dict, num_live: int) -> None:
    """Mark all rows after the first `num_live` as filler, and remove their weight in the loss, in place."""
    rollout["is_filler"] = torch.arange(len(rollout["advantages"]), device=rollout["advantages"].device) >= num_live
    # The log-probability of a masked token is 0, so its old one must be 0 too. Otherwise exp(0 - old) would overflow
    # for a token that was very unlikely.
    for key in {"completion_mask", "advantages", "old_per_token_logps"} & rollout.keys():
        rollout[key][num_live:] = 0


def groups_with_loss(parts: Sequence[dict]) -> set[int]:
    """Return the groups that have a loss token in these parts of a rollout."""
    groups: set[int] = set()
    for part in parts:
        mask = part["completion_mask"]
        if part.get("tool_mask") is not None:
            mask = mask * part["tool_mask"]
        groups |= {*part["group"][mask.sum(dim=1) > 0].tolist()}
    return groups


def is_cut_by_row(rollout: dict) -> bool:
    """
    Return whether all tensors of a rollout can be indexed by row. Image inputs cannot. All layouts must be known.
    """
    return not any(ROLLOUT_KEYS[key][0] == "image" for key, value in rollout.items() if value is not None)


def row_lengths(prompt_mask: Tensor, completion_mask: Tensor) -> Tensor:
    """Return the columns, `(B, 2)`, that each row needs for its left-padded prompt and its right-padded completion."""

    def last_one(mask: Tensor) -> Tensor:
        return (mask.bool() * torch.arange(1, mask.size(1) + 1, device=mask.device)).amax(dim=1)

    return torch.stack([last_one(prompt_mask.flip(1)), last_one(completion_mask)], dim=1)


def widths(lengths: Sequence[tuple[int, int]], multiple_of: int | None = None) -> tuple[int, int]:
    """Return the prompt and completion columns of a micro-batch: those of its longest rows, at least one of each."""
    unit = multiple_of or 1

    def columns(side: int) -> int:
        longest = max((row[side] for row in lengths), default=0)
        return -(-max(longest, 1) // unit) * unit

    return columns(0), columns(1)


def avoid_nan_width(columns: tuple[int, int], multiple_of: int | None = None) -> tuple[int, int]:
    """Return the prompt and completion columns, with one unit more if their sum is 64 above a multiple of 128."""
    # With such a sum, cuDNN's attention, which is torch's default on Hopper GPUs, computes NaN gradients for left
    # padding in half precision (pytorch #196678).
    prompt, completion = columns
    return (prompt, completion + (multiple_of or 1)) if (prompt + completion) % 128 == 64 else columns


def resize(batch: dict, prompt_width: int, completion_width: int, pad_token_id: int) -> dict:
    """Return the batch with other numbers of prompt and completion columns. Only padding may be removed."""
    left = prompt_width - batch["prompt_ids"].size(1)
    right = completion_width - batch["completion_ids"].size(1)
    margins = {"prompt": (left, 0), "completion": (0, right), "sequence": (left, right)}

    def resized(key: str, value: Tensor | None) -> Tensor | None:
        if value is None:
            return None
        layout, fill = ROLLOUT_KEYS[key]
        if layout not in margins or _is_per_row(key, value, batch) or not any(margins[layout]):
            return value
        return pad(value, margins[layout], value=pad_token_id if fill is None else fill)

    return {key: resized(key, value) for key, value in batch.items()}


def without_padding(batch: dict, prompt_width: int, completion_width: int, pad_token_id: int) -> dict:
    """Return the rows with tokens instead of padding, up to these widths. Every completion token is in the loss."""
    tokens = batch["completion_ids"][batch["completion_mask"].bool()]
    if not len(tokens):
        tokens = batch["completion_ids"].new_tensor([pad_token_id])
    filled = resize(batch, prompt_width, completion_width, pad_token_id)
    for side in ("prompt", "completion"):
        ids, mask = filled[f"{side}_ids"], filled[f"{side}_mask"]
        repeated = tokens[torch.arange(ids.numel(), device=ids.device) % len(tokens)].view_as(ids)
        filled[f"{side}_ids"] = torch.where(mask.bool(), ids, repeated)
        filled[f"{side}_mask"] = torch.ones_like(mask)
    filled["advantages"] = torch.ones_like(filled["advantages"])
    if filled.get("tool_mask") is not None:
        filled["tool_mask"] = torch.ones_like(filled["tool_mask"])
    if filled.get("is_filler") is not None:
        filled["is_filler"] = torch.zeros_like(filled["is_filler"])
    return filled


def _is_per_row(key: str, value: Tensor, batch: dict) -> bool:
    """Return whether a completion key has one value per row, like advantages and sequence-level ratios."""
    width = batch["completion_ids"].size(1)
    return ROLLOUT_KEYS[key][0] == "completion" and (value.dim() == 1 or value.size(1) != width)


def join_rows(parts: Sequence[dict], pad_token_id: int) -> dict:
    """
    Return the rows of several batches joined into one and padded to the same width, without scalars for all rows.
    """
    parts = [{key: value for key, value in part.items() if value is not None} for part in parts]
    if any("old_per_token_logps" in part for part in parts):
        parts = [{"old_per_token_logps": of_present_policy(part["completion_ids"]), **part} for part in parts]
    different = set.union(*map(set, parts)) - set.intersection(*map(set, parts))
    if different:
        raise ValueError(
            f"The rollouts of one optimizer step do not all have the keys {', '.join(sorted(different))}, so their "
            "rows cannot be joined. Make sure that every rollout has the same keys."
        )
    prompt_width = max(part["prompt_ids"].size(1) for part in parts)
    completion_width = max(part["completion_ids"].size(1) for part in parts)
    resized = [resize(part, prompt_width, completion_width, pad_token_id) for part in parts]

    def joined(key: str) -> Tensor:
        # If a key has one column in all parts, it holds one value per row, even if the completions of a part have only
        # one token.
        one_column = all(part[key].dim() == 2 and part[key].size(1) == 1 for part in parts)
        joined_parts = parts if one_column else resized
        return torch.cat([part[key] for part in joined_parts])

    return {key: joined(key) for key in parts[0] if ROLLOUT_KEYS[key][0] != "step"}


def index_rows(batch: dict, rows: Tensor) -> dict:
    """Return the given rows of a batch whose tensors are indexed by row, in the given order."""
    return {key: value[rows] for key, value in batch.items()}


def placeholder_row(batch: dict, pad_token_id: int) -> dict:
    """Return a row of one prompt and one completion token, not in the loss, for a micro-batch without rows."""
    row = resize({key: value[:1] for key, value in batch.items()}, 1, 1, pad_token_id)
    for key, value in row.items():
        layout, fill = ROLLOUT_KEYS[key]
        if layout == "completion" and fill is not None:
            row[key] = torch.full_like(value, PRESENT_POLICY if key == "old_per_token_logps" else fill)
    return {**row, "prompt_mask": torch.ones_like(row["prompt_mask"])}


def schema(batch: dict) -> int:
    """Return a checksum of keys, types and layouts. Processes can exchange rows if theirs are equal."""
    facts = [(key, str(value.dtype), value.dim(), _is_per_row(key, value, batch)) for key, value in batch.items()]
    return zlib.crc32(repr(sorted(facts)).encode())


def rows_to_bytes(batch: dict) -> Tensor:
    """Return the tensors of each row concatenated as bytes, one line per row, to send rows in one collective call."""
    columns = [batch[key].contiguous().unsqueeze(-1).flatten(1).view(torch.uint8) for key in sorted(batch)]
    return torch.cat(columns, dim=1)


def rows_from_bytes(packed: Tensor, like: dict) -> dict:
    """Return the rows that [`rows_to_bytes`] packed. They have the keys, types and widths of `like`."""
    ends = list(accumulate([like[key][0].numel() * like[key].element_size() for key in sorted(like)]))
    rows = {}
    for key, start, end in zip(sorted(like), [0, *ends], ends, strict=False):
        shape = (len(packed), *like[key].shape[1:])
        # Always a copy, even if the slice is already contiguous because there is only one row: it could start at a
        # byte to which a larger type is not aligned.
        rows[key] = packed[:, start:end].clone(memory_format=torch.contiguous_format).view(like[key].dtype).view(shape)
    return {key: rows[key] for key in like}

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The DAPO objective (equations 8 to 12 of [arXiv 2503.14476](https://huggingface.co/papers/2503.14476)) on tensors.

The caller owns the denominator: it passes the token count of the whole optimizer step, so that any split of the step
into ranks and micro-batches adds up to the same loss.
"""

import torch
from torch import Tensor


# exp(20) is far outside every clip range. A much larger ratio would overflow, and even a token whose loss is clipped
# or masked would then give NaN.
MAX_LOG_RATIO = 20.0

# What each of TRL's losses averages over: the rows of a micro-batch, its tokens, or the tokens of a rollout.
LOSS_MEANS = {
    **dict.fromkeys(("grpo", "sapo", "dr_grpo", "luspo"), "rows"),
    "bnpo": "tokens",
    **dict.fromkeys(("cispo", "vespo", "dapo"), "tokens of the rollout"),
}


def probability_ratio(log_ratio: Tensor, mask: Tensor, level: str = "token") -> Tensor:
    """
    Return the ratio of the current to the sampling policy, r in equation 9, from its logarithm of shape `(B, T)`.

    `level="token"` returns one ratio per token, of shape `(B, T)`. `level="sequence"` returns one per completion, of
    shape `(B, 1)`: the geometric mean over its tokens in `mask` (GSPO, [arXiv
    2507.18071](https://huggingface.co/papers/2507.18071)).
    """
    if level == "sequence":
        log_ratio = (log_ratio * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1.0)
    elif level != "token":
        raise ValueError(f"`importance_sampling_level` must be 'token' or 'sequence', got {level!r}.")
    return torch.exp(log_ratio.clamp(max=MAX_LOG_RATIO))


def clipped_loss(
    ratio: Tensor, advantages: Tensor, epsilon_low: float, epsilon_high: float, delta: float | None = None
) -> Tensor:
    r"""
    Return the loss per token of the clipped surrogate: minus the minimum in equations 8 and 10, with an optional dual
    clip.

    \\( -\min(\min(r, \delta) A, \mathrm{clip}(r, 1 - \epsilon_{low}, 1 + \epsilon_{high}) A) \\). A `delta` of at
    least `1 + epsilon_high` bounds the loss of a negative advantage ([arXiv
    1912.09729](https://huggingface.co/papers/1912.09729)). A smaller one lowers the upper clip too, as in TRL.
    """
    clipped_ratio = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
    if delta is not None:
        ratio = ratio.clamp(max=delta)
    return -torch.min(ratio * advantages, clipped_ratio * advantages)


def clipped_tokens(
    ratio: Tensor, advantages: Tensor, epsilon_low: float, epsilon_high: float, delta: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """
    Return which tokens have no gradient in [`clipped_loss`], as three boolean tensors: those at the lower clip, at the
    upper clip, and at the dual clip.
    """
    delta = torch.inf if delta is None else delta
    low = (ratio < 1 - epsilon_low) & (advantages < 0)
    high = (ratio.clamp(max=delta) > 1 + epsilon_high) & (advantages > 0)
    return low, high, (ratio > max(delta, 1 + epsilon_high)) & (advantages < 0)


def importance_weight(log_ratio: Tensor, mask: Tensor, mode: str, low: float | None, high: float | None) -> Tensor:
    """
    Return the importance sampling weight of each token, or of each completion, `(B, 1)`, from the logarithm of the
    ratio of the policy's to the engine's probability. NaN in the logarithm counts as a ratio of 1.
    """
    log_ratio = torch.nan_to_num(log_ratio * mask, nan=0.0)
    if mode.startswith("sequence"):
        log_ratio = log_ratio.sum(-1, keepdim=True)
    ratio = torch.exp(log_ratio)
    low, high = -torch.inf if low is None else low, torch.inf if high is None else high
    if mode.endswith("truncate"):
        return ratio.clamp(low, high)
    return ratio.masked_fill((ratio < low) | (ratio > high), 0.0)


def kl_to_reference(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """Return an estimate of the KL divergence to the reference per token: exp(d) - d - 1, d = `ref_logps - logps`."""
    difference = ref_logps - logps
    return torch.exp(difference.clamp(max=MAX_LOG_RATIO)) - difference - 1


def token_mean(values: Tensor, mask: Tensor, num_tokens: Tensor | int, num_ranks: int = 1) -> Tensor:
    """
    Return a micro-batch's share of the mean over the `num_tokens` tokens of the optimizer step (equation 12). If there
    are none, it divides by 1.
    """
    # The factor `num_ranks` makes up for the average of gradients over processes.
    return (values * mask).sum() * num_ranks / torch.as_tensor(num_tokens).clamp(min=1)


def weights_without_filler(loss_type: str, num_rows: int, num_live: int, mean_live: float) -> tuple[float, float]:
    """
    Return a weight for a micro-batch's loss and a factor for its policy and KL terms, which together leave filler out
    of TRL's loss.

    Args:
        loss_type (`str`):
            TRL's `loss_type`.
        num_rows (`int`):
            Number of rows of the micro-batch.
        num_live (`int`):
            Number of these rows that are not filler.
        mean_live (`float`):
            Mean of `num_live` over the micro-batches of the optimizer step.
    """
    if num_live == 0:
        return 0.0, 1.0
    weight = num_live / mean_live
    # A mean over rows counts filler rows, which the factor corrects. A mean over the tokens of the rollout is already
    # correct without the weight, so the factor undoes it.
    factors = {"rows": num_rows / num_live, "tokens": 1.0, "tokens of the rollout": 1 / weight}
    return weight, factors[LOSS_MEANS[loss_type]]

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The DAPO objective (equations 8 to 12 of [arXiv 2503.14476](https://huggingface.co/papers/2503.14476)) on tensors.

The caller owns the denominator: it passes the token count of the whole optimizer step, so that any split of the step
into ranks and micro-batches adds up to the same loss.
"""

import torch
from torch import Tensor


# exp(20) is far outside every clip range; beyond it the ratio overflows and a clipped, weightless token yields NaN.
MAX_LOG_RATIO = 20.0

# What each of TRL's losses is a mean over: the rows of a micro-batch, its tokens, or the tokens of a rollout.
LOSS_MEANS = {
    **dict.fromkeys(("grpo", "sapo", "dr_grpo", "luspo"), "rows"),
    "bnpo": "tokens",
    **dict.fromkeys(("cispo", "vespo", "dapo"), "tokens of the rollout"),
}


def probability_ratio(log_ratio: Tensor, mask: Tensor, level: str = "token") -> Tensor:
    """
    Ratio of the current to the sampling policy, r in equation 9, from its logarithm `(B, T)`.

    `level="token"` gives one a token, `(B, T)`. `"sequence"` gives one a completion, `(B, 1)`: the geometric mean over
    its tokens in `mask` (GSPO, [arXiv 2507.18071](https://huggingface.co/papers/2507.18071)).
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
    Loss per token of the clipped surrogate: minus the minimum in equations 8 and 10, with an optional dual clip.

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
    Return the tokens at which [`clipped_loss`] has no gradient (boolean): at the lower clip, the upper clip and the
    dual clip.
    """
    delta = torch.inf if delta is None else delta
    low = (ratio < 1 - epsilon_low) & (advantages < 0)
    high = (ratio.clamp(max=delta) > 1 + epsilon_high) & (advantages > 0)
    return low, high, (ratio > max(delta, 1 + epsilon_high)) & (advantages < 0)


def engine_weight(log_ratio: Tensor, mask: Tensor, mode: str, low: float | None, high: float | None) -> Tensor:
    """Weight of tokens, or `(B, 1)` of completions, by the policy's probability over the engine's; 1 for a NaN."""
    log_ratio = torch.nan_to_num(log_ratio * mask, nan=0.0)
    if mode.startswith("sequence"):
        log_ratio = log_ratio.sum(-1, keepdim=True)
    ratio = torch.exp(log_ratio)
    low, high = -torch.inf if low is None else low, torch.inf if high is None else high
    if mode.endswith("truncate"):
        return ratio.clamp(low, high)
    return ratio.masked_fill((ratio < low) | (ratio > high), 0.0)


def kl_to_reference(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """Estimate of the KL divergence to the reference, per token: exp(d) - d - 1 with d = `ref_logps - logps`."""
    difference = ref_logps - logps
    return torch.exp(difference.clamp(max=MAX_LOG_RATIO)) - difference - 1


def token_mean(values: Tensor, mask: Tensor, num_tokens: Tensor | int, num_ranks: int = 1) -> Tensor:
    """A micro-batch's share of the mean over the `num_tokens` of the optimizer step (equation 12); 0 is read as 1."""
    # Gradients are averaged over `num_ranks`, which turns the average back into a sum.
    return (values * mask).sum() * num_ranks / torch.as_tensor(num_tokens).clamp(min=1)


def weights_without_filler(loss_type: str, num_rows: int, num_live: int, mean_live: float) -> tuple[float, float]:
    """Weight of a micro-batch's loss, and factor of its policy and KL terms, that leave filler out of TRL's loss."""
    # `num_live` of its `num_rows` rows are not filler; the mean over all micro-batches of the optimizer step is
    # `mean_live`.
    if num_live == 0:
        return 0.0, 1.0
    weight = num_live / mean_live
    # TRL's mean over rows counts filler; its mean over the rollout's tokens must not get the weight on top.
    factors = {"rows": num_rows / num_live, "tokens": 1.0, "tokens of the rollout": 1 / weight}
    return weight, factors[LOSS_MEANS[loss_type]]

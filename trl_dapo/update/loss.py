# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The DAPO objective (equations 8 to 12 of [arXiv 2503.14476](https://huggingface.co/papers/2503.14476)) on tensors.

`B` is the number of completions, `T` the width of the padded completions. The caller owns the denominator: it passes
the token count of the whole optimizer step, so that any split of the step into ranks and micro-batches adds up to the
same loss.
"""

import torch


# exp(20) is far outside every clip range; beyond it the ratio overflows and a clipped, weightless token yields NaN.
MAX_LOG_RATIO = 20.0


# What each of TRL's losses is a mean over: the rows of a micro-batch, its tokens, or the tokens of a rollout.
LOSS_MEANS = {
    "grpo": "rows",
    "sapo": "rows",
    "dr_grpo": "rows",
    "luspo": "rows",
    "bnpo": "tokens",
    "cispo": "tokens of the rollout",
    "vespo": "tokens of the rollout",
    "dapo": "tokens of the rollout",
}


def fill_old_logps(old_logps: torch.Tensor | None, logps: torch.Tensor) -> torch.Tensor:
    """
    Log-probabilities under the policy that sampled the tokens.

    Args:
        old_logps (`torch.Tensor` of shape `(B, T)` or `None`):
            Log-probabilities at sampling time. NaN, or `None` as a whole, means "sampled by the current policy".
        logps (`torch.Tensor` of shape `(B, T)`):
            Log-probabilities under the current policy.

    Returns:
        `torch.Tensor` of shape `(B, T)`: `old_logps`, with `logps` (detached) where it is unknown.
    """
    if old_logps is None:
        return logps.detach()
    return torch.where(torch.isnan(old_logps), logps.detach(), old_logps)


def probability_ratio(log_ratio: torch.Tensor, mask: torch.Tensor, level: str = "token") -> torch.Tensor:
    """
    Ratio of the current to the sampling policy, r in equation 9.

    Args:
        log_ratio (`torch.Tensor` of shape `(B, T)`):
            Current minus old log-probability of each token.
        mask (`torch.Tensor` of shape `(B, T)`):
            1 for tokens that count in the loss.
        level (`str`, *optional*, defaults to `"token"`):
            `"token"` for one ratio per token; `"sequence"` for one per completion, the geometric mean over its tokens
            (GSPO, [arXiv 2507.18071](https://huggingface.co/papers/2507.18071)).

    Returns:
        `torch.Tensor` of shape `(B, T)` (`"token"`) or `(B, 1)` (`"sequence"`).

    Raises:
        ValueError: If `level` is neither.
    """
    if level == "sequence":
        log_ratio = (log_ratio * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1.0)
    elif level != "token":
        raise ValueError(f"`importance_sampling_level` must be 'token' or 'sequence', got {level!r}.")
    return torch.exp(log_ratio.clamp(max=MAX_LOG_RATIO))


def clipped_loss(
    ratio: torch.Tensor,
    advantages: torch.Tensor,
    epsilon_low: float,
    epsilon_high: float,
    delta: float | None = None,
) -> torch.Tensor:
    r"""
    Loss per token of the clipped surrogate: minus the minimum in equations 8 and 10, with an optional dual clip.

    \\( -\min(\min(r, \delta) A, \mathrm{clip}(r, 1 - \epsilon_{low}, 1 + \epsilon_{high}) A) \\). A `delta` of at
    least `1 + epsilon_high` bounds the surrogate of a negative advantage below by \\( \delta A \\), so that one token
    cannot dominate a step, and leaves a positive one alone: the dual clip of
    [arXiv 1912.09729](https://huggingface.co/papers/1912.09729), `clip_ratio_c` in verl and SkyRL.

    Args:
        ratio (`torch.Tensor` of shape `(B, T)` or `(B, 1)`):
            Probability ratio.
        advantages (`torch.Tensor` of shape `(B, 1)` or `(B, T)`):
            Advantage of each completion or token.
        epsilon_low (`float`):
            Lower clip.
        epsilon_high (`float`):
            Upper clip.
        delta (`float`, *optional*):
            Upper bound of the unclipped ratio, for either sign of the advantage, as in TRL. Below `1 + epsilon_high`
            it lowers the upper clip too; a negative advantage then counts up to `1 + epsilon_high`.

    Returns:
        `torch.Tensor` of shape `(B, T)` or `(B, 1)`.

    Example:

    ```python
    >>> ratio, advantages = torch.tensor([[1.5, 1.5, 20.0]]), torch.tensor([[1.0, -1.0, -1.0]])
    >>> clipped_loss(ratio, advantages, epsilon_low=0.2, epsilon_high=0.28, delta=10.0)
    tensor([[-1.2800,  1.5000, 10.0000]])
    ```
    """
    clipped_ratio = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
    if delta is not None:
        ratio = ratio.clamp(max=delta)
    return -torch.min(ratio * advantages, clipped_ratio * advantages)


def clipped_tokens(
    ratio: torch.Tensor,
    advantages: torch.Tensor,
    epsilon_low: float,
    epsilon_high: float,
    delta: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    Where [`clipped_loss`] has no gradient. Arguments as there.

    With a `delta` below `1 + epsilon_high` no token counts as at the upper clip, as in TRL's metrics.

    Returns:
        `tuple` of three boolean `torch.Tensor`, shaped as the loss: at the lower clip, at the upper clip, at the dual
        clip.
    """
    low = (ratio < 1 - epsilon_low) & (advantages < 0)
    if delta is None:
        return low, (ratio > 1 + epsilon_high) & (advantages > 0), torch.zeros_like(low)
    dual = (ratio > max(delta, 1 + epsilon_high)) & (advantages < 0)
    ratio = ratio.clamp(max=delta)
    return low, (ratio > 1 + epsilon_high) & (advantages > 0), dual


def kl_to_reference(logps: torch.Tensor, ref_logps: torch.Tensor) -> torch.Tensor:
    """
    Estimate of the KL divergence to the reference model, per token: exp(d) - d - 1 with d = `ref_logps - logps`.

    Beyond d = 20 the exponential grows no further, as in [`probability_ratio`]: it would overflow.

    Args:
        logps (`torch.Tensor` of shape `(B, T)`):
            Log-probabilities under the current policy.
        ref_logps (`torch.Tensor` of shape `(B, T)`):
            Log-probabilities under the reference model.

    Returns:
        `torch.Tensor` of shape `(B, T)`, never negative.
    """
    difference = ref_logps - logps
    return torch.exp(difference.clamp(max=MAX_LOG_RATIO)) - difference - 1


def token_mean(
    values: torch.Tensor, mask: torch.Tensor, num_tokens: torch.Tensor | int, num_ranks: int = 1
) -> torch.Tensor:
    """
    A micro-batch's share of the optimizer step's mean over tokens (equation 12).

    Args:
        values (`torch.Tensor` of shape `(B, T)` or `(B, 1)`):
            Value of each token, or of every token of a completion.
        mask (`torch.Tensor` of shape `(B, T)`):
            1 for tokens that count.
        num_tokens (`torch.Tensor` or `int`):
            Tokens that count in the whole optimizer step, over all ranks and micro-batches. 0 is read as 1: a step
            without a token has loss zero.
        num_ranks (`int`, *optional*, defaults to `1`):
            Ranks over which gradients are averaged; the average is turned back into a sum.

    Returns:
        `torch.Tensor`, a scalar.

    Example:

    ```python
    >>> values, mask = torch.tensor([[1.0, 9.0, 9.0], [4.0, 4.0, 4.0]]), torch.tensor([[1, 0, 0], [1, 1, 1]])
    >>> token_mean(values, mask, num_tokens=4)
    tensor(3.2500)
    ```
    """
    return (values * mask).sum() * num_ranks / torch.as_tensor(num_tokens).clamp(min=1)


def weights_without_filler(loss_type: str, num_rows: int, num_live: int, mean_live: float) -> tuple[float, float]:
    """
    Factors that make one of TRL's losses what it would be without the rows that only fill a rollout.

    With them a micro-batch's loss is that of its live rows alone, and it weighs as many as it has.

    Args:
        loss_type (`str`):
            A key of `LOSS_MEANS`.
        num_rows (`int`):
            Rows of the micro-batch.
        num_live (`int`):
            Its rows that are no filler.
        mean_live (`float`):
            Rows that are no filler, a micro-batch, over all ranks and micro-batches of the optimizer step.

    Returns:
        `tuple[float, float]`: the weight of the micro-batch's loss, and the factor of the policy and KL terms in it.

    Example:

    ```python
    >>> weights_without_filler("grpo", num_rows=4, num_live=1, mean_live=2.0)  # half as many as others; 1 of 4 rows
    (0.5, 4.0)
    ```
    """
    if num_live == 0:
        return 0.0, 1.0
    weight = num_live / mean_live
    # TRL's mean over rows counts filler; its mean over the rollout's tokens must not get the weight on top.
    factors = {"rows": num_rows / num_live, "tokens": 1.0, "tokens of the rollout": 1 / weight}
    return weight, factors[LOSS_MEANS[loss_type]]

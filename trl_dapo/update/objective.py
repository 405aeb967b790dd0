# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The loss of a micro-batch, from the model's log-probabilities and entropies of its tokens."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import DAPOConfig
from .loss import clipped_loss, clipped_tokens, kl_to_reference, probability_ratio, token_mean
from .old_logps import fill_old_logps
from .step_metrics import StepMetrics


@dataclass(frozen=True, kw_only=True)
class Objective:
    """DAPO's objective with the settings of a trainer. `UpdatePhaseMixin._objective` sets them."""

    epsilon_low: float
    epsilon_high: float
    delta: float | None
    level: str  # "token" or "sequence"
    beta: float
    corrects_kl: bool  # whether the KL term is weighted by the probability ratio
    # `loss.importance_weight`, if the difference between the policy's and vLLM's probabilities is corrected for.
    importance_weight: Callable[..., Tensor] | None
    entropy_coef: float | None  # `None` for no entropy bonus
    router_coef: float
    num_ranks: int
    select_tokens: Callable[[Tensor, Tensor], Tensor] | None  # (entropies, mask) -> tokens to train on
    off_policy_mask: Callable[..., Tensor] | None  # TRL's `get_off_policy_mask`

    def loss(
        self,
        inputs: dict,
        mask: Tensor,
        logps: Tensor,
        entropies: Tensor,
        aux_loss: Tensor | None,
        step_metrics: StepMetrics,
    ) -> Tensor:
        """Return the micro-batch's share of the loss of the optimizer step. Add its metrics to `step_metrics`."""
        trained = mask if self.select_tokens is None else mask * self.select_tokens(entropies, mask)
        advantages = inputs["advantages"]
        if advantages.dim() == 1:
            advantages = advantages.unsqueeze(1)
        old_logps = fill_old_logps(inputs.get("old_per_token_logps"), logps)
        ratio = probability_ratio(logps - old_logps, mask, self.level)
        per_token_loss = clipped_loss(ratio, advantages, self.epsilon_low, self.epsilon_high, self.delta)
        if self.off_policy_mask is not None:
            per_token_loss = per_token_loss * self.off_policy_mask(
                advantages=advantages,
                per_token_logps=logps,
                sampling_per_token_logps=inputs.get("sampling_per_token_logps", old_logps),
                mask=mask,
            )
        if self.select_tokens is not None:
            per_token_loss = per_token_loss * trained
        if self.importance_weight is not None:
            weight = inputs.get("importance_sampling_ratio")
            log_ratio = old_logps - inputs["sampling_per_token_logps"]
            if weight is None:  # no earlier pass has computed it
                weight = self.importance_weight(log_ratio, mask)
                step_metrics.add_engine(mask, log_ratio, weight)
            step_metrics.add_ratio(mask, log_ratio, weight)
            per_token_loss = per_token_loss * weight
        if self.beta != 0.0:
            kl = kl_to_reference(logps, inputs["ref_per_token_logps"])
            if self.corrects_kl:
                kl = kl * ratio
            per_token_loss = per_token_loss + self.beta * kl
            step_metrics.add(kl=(kl * mask).sum().detach())

        num_tokens = inputs["num_items_in_batch"]
        mean_num_microbatches = inputs.get("num_microbatches", 1)  # per process in this optimizer step
        loss = token_mean(per_token_loss, mask, num_tokens, self.num_ranks)
        step_metrics.add(policy_loss=loss.detach())
        if self.entropy_coef is not None:
            if self.select_tokens is None:
                bonus = token_mean(entropies, mask, num_tokens, self.num_ranks)
            else:
                # The number of selected tokens is only known per micro-batch. So this is a mean of means, as in TRL.
                bonus = token_mean(entropies, trained, trained.sum()) / mean_num_microbatches
            loss = loss - self.entropy_coef * bonus
            step_metrics.add(active_entropy=(entropies * trained).sum().detach(), active_tokens=trained.sum())
        if aux_loss is not None:
            # A step without a loss token must not change the router either.
            weight = self.router_coef * torch.as_tensor(num_tokens > 0)
            loss = loss + weight * aux_loss / mean_num_microbatches
            step_metrics.add(aux_loss=aux_loss.detach() / mean_num_microbatches)
        clipped = clipped_tokens(ratio, advantages, self.epsilon_low, self.epsilon_high, self.delta)
        step_metrics.add_tokens(mask, entropies, clipped, inputs.get("staleness"))
        return loss


def adapted_entropy_coef(coef: float, entropy: float, args: DAPOConfig) -> float:
    """Return the entropy coefficient after one step of TRL's rule towards the target entropy."""
    if entropy <= args.entropy_target:
        return min(coef + args.entropy_coef_delta, args.entropy_coef_max)
    return max(coef - args.entropy_coef_delta, args.entropy_coef_min)

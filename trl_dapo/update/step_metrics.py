# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Metrics of an optimizer step, accumulated over its micro-batches as sums and extremes."""

from collections import defaultdict

import torch
from accelerate import Accelerator
from torch import Tensor

from ..sampling.sampler import MAX_STALENESS


class StepMetrics:
    """
    Sums and extremes over the micro-batches of an optimizer step. They stay on the device until they are reduced over
    all processes.
    """

    # Each batch of an evaluation has an object of its own, because evaluation may run in the middle of a training
    # step.

    def __init__(self) -> None:
        self.sums: dict[str, Tensor | float] = defaultdict(float)
        self.lowest: dict[str, Tensor] = {}
        self.highest: dict[str, Tensor | int] = {}

    def add(self, **sums: Tensor | float) -> None:
        """Add values to the sums with these names."""
        for name, value in sums.items():
            self.sums[name] = self.sums[name] + value

    def add_microbatch(self, real_tokens: int, padded_tokens: int) -> None:
        """Add a micro-batch with its number of tokens without and with padding."""
        self.add(microbatches=1, real_tokens=real_tokens, padded_tokens=padded_tokens)
        self.highest["peak_tokens"] = max(self.highest.get("peak_tokens", 0), padded_tokens)

    @torch.no_grad()
    def add_tokens(
        self, mask: Tensor, entropies: Tensor, clipped: tuple[Tensor, Tensor, Tensor], staleness: Tensor | None = None
    ) -> None:
        """
        Add the loss tokens of a micro-batch: their entropies in nats, which of them are clipped, and the staleness of
        their rows in rollouts.
        """
        # If there is one ratio per completion, `(B, 1)`, clipped completions are counted instead of clipped tokens.
        has_tokens = mask.sum(1, keepdim=True) > 0
        weight = (has_tokens if clipped[0].size(1) == 1 else mask).float()
        low, high, dual = (is_clipped * weight for is_clipped in clipped)
        length = weight.sum(1).clamp(min=1.0)
        self.add(tokens=mask.sum(), entropy=(entropies * mask).sum())
        self.add(clip_units=weight.sum(), low=low.sum(), high=high.sum(), dual=dual.sum())
        if staleness is not None:
            for num_rollouts in range(MAX_STALENESS + 1):
                is_as_stale = staleness.eq(num_rollouts).unsqueeze(1)
                units, in_region = (weight * is_as_stale).sum(), ((low + high) * is_as_stale).sum()
                self.add(**{f"clip_units_{num_rollouts}": units, f"region_{num_rollouts}": in_region})
        # A completion without loss tokens must not count as the one that is clipped least.
        self._keep_lowest("low_min", (low.sum(1) / length).masked_fill(~has_tokens.squeeze(1), 1.0))
        self._keep_highest("high_max", high.sum(1) / length)

    @torch.no_grad()
    def add_engine(self, mask: Tensor, log_ratio: Tensor, weight: Tensor) -> None:
        """
        Add the difference between the policy's and the engine's log-probability of each loss token, which may be NaN,
        and the importance sampling weights that follow from it.
        """
        is_known = mask.bool() & ~log_ratio.isnan()
        weighs = mask.bool() if weight.size(1) > 1 else mask.bool().any(1, keepdim=True)
        gap, weights = log_ratio.abs().where(is_known, 0.0), weight.where(weighs, 0.0)
        self.add(gap=gap.sum(), known=is_known.sum(), weight=weights.sum(), weights=weighs.sum())
        self._keep_highest("gap_max", gap)
        self._keep_lowest("weight_min", weight.masked_fill(~weighs, torch.inf))
        self._keep_highest("weight_max", weights)

    @torch.no_grad()
    def add_ratio(self, mask: Tensor, log_ratio: Tensor, weight: Tensor) -> None:
        """Add the importance sampling ratios before they are bounded, per token or per completion like `weight`."""
        is_known = mask.bool() & ~log_ratio.isnan()
        log_ratio = log_ratio.where(is_known, 0.0)
        if weight.size(1) < mask.size(1):
            log_ratio, is_known = log_ratio.sum(1, keepdim=True), is_known.any(1, keepdim=True)
        ratio = log_ratio.exp().where(is_known, 0.0)
        self.add(raw=ratio.sum(), raws=is_known.sum())
        self._keep_lowest("raw_min", ratio.masked_fill(~is_known, torch.inf))
        self._keep_highest("raw_max", ratio)

    def _keep_lowest(self, name: str, values: Tensor) -> None:
        self.lowest[name] = torch.minimum(self.lowest.get(name, values.amin()), values.amin())

    def _keep_highest(self, name: str, values: Tensor) -> None:
        self.highest[name] = torch.maximum(torch.as_tensor(self.highest.get(name, values.amax())), values.amax())

    def reduce(self, accelerator: Accelerator) -> dict[str, float]:
        """Return the totals over all processes, each of which must have added the same names. Collective."""
        values = [*self.sums.values(), *self.lowest.values(), *self.highest.values()]
        own = [torch.as_tensor(value, dtype=torch.float32, device=accelerator.device) for value in values]
        ranks = accelerator.gather(torch.stack(own).unsqueeze(0))
        sums, lowest, highest = ranks.split([len(self.sums), len(self.lowest), len(self.highest)], dim=1)
        totals = torch.cat([sums.sum(0), lowest.amin(0), highest.amax(0)])
        return dict(zip([*self.sums, *self.lowest, *self.highest], totals.tolist(), strict=True))


def metrics_of_tokens(totals: dict[str, float]) -> dict[str, float]:
    """
    Return metrics of the loss tokens of an optimizer step, under the names that TRL uses. Means over no token are left
    out.
    """
    metrics = {"num_loss_tokens": totals["tokens"]}
    if totals["tokens"] > 0:
        low, high, dual = (totals[name] / totals["clip_units"] for name in ("low", "high", "dual"))
        metrics |= {
            "entropy": totals["entropy"] / totals["tokens"],
            "clip_ratio/low_mean": low,
            "clip_ratio/high_mean": high,
            "clip_ratio/region_mean": low + high,
            "clip_ratio/dual_mean": dual,
            "clip_ratio/low_min": totals["low_min"],
            "clip_ratio/high_max": totals["high_max"],
        }
        for num_rollouts in range(MAX_STALENESS + 1):
            if totals.get(f"clip_units_{num_rollouts}", 0) > 0:
                metrics[f"rollouts_ahead/clip_ratio/staleness_{num_rollouts}"] = (
                    totals[f"region_{num_rollouts}"] / totals[f"clip_units_{num_rollouts}"]
                )
        if "kl" in totals:
            metrics["kl"] = totals["kl"] / totals["tokens"]
        if "weights" in totals:
            metrics |= {
                "sampling/sampling_logp_difference/mean": totals["gap"] / max(totals["known"], 1),
                "sampling/sampling_logp_difference/max": totals["gap_max"],
                "sampling/importance_sampling_ratio/min": totals["weight_min"],
                "sampling/importance_sampling_ratio/mean": totals["weight"] / totals["weights"],
                "sampling/importance_sampling_ratio/max": totals["weight_max"],
            }
        if totals.get("raws", 0) > 0:
            raw = {"min": totals["raw_min"], "mean": totals["raw"] / totals["raws"], "max": totals["raw_max"]}
            metrics |= {f"sampling/raw_importance_sampling_ratio/{name}": value for name, value in raw.items()}
    return metrics


def metrics_of_passes(totals: dict[str, float], num_ranks: int) -> dict[str, float]:
    """Return metrics of the passes with gradient in an optimizer step."""
    metrics = {"microbatches": totals["microbatches"] / num_ranks, "peak_microbatch_tokens": totals["peak_tokens"]}
    if totals["padded_tokens"] > 0:
        metrics["padding_share"] = 1 - totals["real_tokens"] / totals["padded_tokens"]
    return metrics | {"frac_empty_steps": float(totals["tokens"] == 0)}

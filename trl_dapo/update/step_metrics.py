# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The totals of an optimizer step's micro-batches (sums and extremes), and the metrics computed from them."""

from collections import defaultdict

import torch
from accelerate import Accelerator
from torch import Tensor

from ..sampling.sampler import MAX_STALENESS


class StepMetrics:
    """Sums and extremes over the micro-batches of an optimizer step, kept on the device, and reduced over ranks."""

    # Each batch of an evaluation has its own: evaluation may run between two micro-batches of a step.

    def __init__(self) -> None:
        self.sums: dict[str, Tensor | float] = defaultdict(float)
        self.lowest: dict[str, Tensor] = {}
        self.highest: dict[str, Tensor | int] = {}

    def add(self, **sums: Tensor | float) -> None:
        """Adds scalars to the sums, by name."""
        for name, value in sums.items():
            self.sums[name] = self.sums[name] + value

    def add_microbatch(self, real_tokens: int, padded_tokens: int) -> None:
        """Adds a micro-batch as it goes through the model: its tokens without padding and with it."""
        self.add(microbatches=1, real_tokens=real_tokens, padded_tokens=padded_tokens)
        self.highest["peak_tokens"] = max(self.highest.get("peak_tokens", 0), padded_tokens)

    @torch.no_grad()
    def add_tokens(
        self, mask: Tensor, entropies: Tensor, clipped: tuple[Tensor, Tensor, Tensor], staleness: Tensor | None = None
    ) -> None:
        """Adds the loss tokens of a micro-batch: entropies (nats), where they are clipped, rollouts since each row."""
        # For a ratio of whole completions, `(B, 1)`, completions are counted instead of tokens.
        has_tokens = mask.sum(1, keepdim=True) > 0
        weight = (has_tokens if clipped[0].size(1) == 1 else mask).float()
        low, high, dual = (where * weight for where in clipped)
        length = weight.sum(1).clamp(min=1.0)
        self.add(tokens=mask.sum(), entropy=(entropies * mask).sum())
        self.add(clip_units=weight.sum(), low=low.sum(), high=high.sum(), dual=dual.sum())
        if staleness is not None:
            for num_rollouts in range(MAX_STALENESS + 1):
                is_as_stale = staleness.eq(num_rollouts).unsqueeze(1)
                units, in_region = (weight * is_as_stale).sum(), ((low + high) * is_as_stale).sum()
                self.add(**{f"clip_units_{num_rollouts}": units, f"region_{num_rollouts}": in_region})
        # A completion without a token must not be the least clipped one.
        self._keep_lowest("low_min", (low.sum(1) / length).masked_fill(~has_tokens.squeeze(1), 1.0))
        self._keep_highest("high_max", high.sum(1) / length)

    @torch.no_grad()
    def add_engine(self, mask: Tensor, log_ratio: Tensor, weight: Tensor) -> None:
        """Adds how far the engine is from the policy at each loss token, NaN where unknown, and what that weighs."""
        is_known = mask.bool() & ~log_ratio.isnan()
        weighs = mask.bool() if weight.size(1) > 1 else mask.bool().any(1, keepdim=True)
        gap, weights = log_ratio.abs().where(is_known, 0.0), weight.where(weighs, 0.0)
        self.add(gap=gap.sum(), known=is_known.sum(), weight=weights.sum(), weights=weighs.sum())
        self._keep_highest("gap_max", gap)
        self._keep_lowest("weight_min", weight.masked_fill(~weighs, torch.inf))
        self._keep_highest("weight_max", weights)

    @torch.no_grad()
    def add_ratio(self, mask: Tensor, log_ratio: Tensor, weight: Tensor) -> None:
        """Adds the ratios that `weight` bounds, of tokens or of whole completions."""
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
        """Totals over all ranks, each of which must have added the same names."""
        values = [*self.sums.values(), *self.lowest.values(), *self.highest.values()]
        own = [torch.as_tensor(value, dtype=torch.float32, device=accelerator.device) for value in values]
        ranks = accelerator.gather(torch.stack(own).unsqueeze(0))
        sums, lowest, highest = ranks.split([len(self.sums), len(self.lowest), len(self.highest)], dim=1)
        totals = torch.cat([sums.sum(0), lowest.amin(0), highest.amax(0)])
        return dict(zip([*self.sums, *self.lowest, *self.highest], totals.tolist(), strict=True))


def metrics_of_tokens(totals: dict[str, float]) -> dict[str, float]:
    """Metrics of the loss tokens of an optimizer step, by the names that TRL logs. Means over nothing are left out."""
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
                metrics[f"overlap/clip_ratio/staleness_{num_rollouts}"] = (
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
    """Metrics of the passes with gradient of an optimizer step."""
    metrics = {"microbatches": totals["microbatches"] / num_ranks, "peak_microbatch_tokens": totals["peak_tokens"]}
    if totals["padded_tokens"] > 0:
        metrics["padding_share"] = 1 - totals["real_tokens"] / totals["padded_tokens"]
    return metrics | {"frac_empty_steps": float(totals["tokens"] == 0)}

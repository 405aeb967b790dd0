# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Counts of a run, computed from the means in its log. They do not depend on `logging_steps`. Needs no torch."""

from collections.abc import Sequence
from typing import Any


ROLLOUTS = "rollouts"  # number of rollouts that the means of an entry are over, if there are several
SAMPLING, DROPPED = "dynamic_sampling/", "dynamic_sampling/dropped/"
_OF_EACH_ROLLOUT = "timeline/update_seconds"  # is logged once per rollout


def add_num_rollouts(metrics: dict[str, list[float]]) -> None:
    """Add the number of rollouts to metrics that are about to be averaged, so that sums can be computed from means."""
    num_rollouts = len(metrics.get(_OF_EACH_ROLLOUT, ()))
    if num_rollouts < 2:
        return
    metrics[ROLLOUTS] = [float(num_rollouts)]
    for name, values in metrics.items():
        if name.startswith(DROPPED):  # a reason of a user's group filter is logged only if it occurred
            values.extend([0.0] * (num_rollouts - len(values)))


def _weight(entry: dict[str, Any]) -> float:
    return entry.get(ROLLOUTS) or 1.0


def total(entries: Sequence[dict], metric: str) -> float:
    """Return the sum of a metric over the rollouts of log entries."""
    return sum((entry.get(metric) or 0.0) * _weight(entry) for entry in entries)


def mean(entries: Sequence[dict], metric: str) -> float | None:
    """Return the mean of a metric over the rollouts of log entries, or `None` if no entry has it."""
    known = [entry for entry in entries if entry.get(metric) is not None]
    return total(known, metric) / sum(map(_weight, known)) if known else None


def num_accepted(entries: Sequence[dict]) -> float:
    """Return the number of accepted groups."""
    return sum(map(_num_accepted, entries))


def _num_accepted(entry: dict[str, Any]) -> float:
    num_sampled, rate = total([entry], f"{SAMPLING}groups_generated"), entry.get(f"{SAMPLING}acceptance_rate")
    reasons = [name for name in entry if name.startswith(DROPPED)]
    if rate is not None and not reasons:
        return num_sampled * rate
    return num_sampled - sum(total([entry], reason) for reason in reasons)


def acceptance_rate(entries: Sequence[dict]) -> float | None:
    """Return the share of accepted groups among the sampled ones, or `None` if no group was sampled."""
    num_sampled = total(entries, f"{SAMPLING}groups_generated")
    return num_accepted(entries) / num_sampled if num_sampled else mean(entries, f"{SAMPLING}acceptance_rate")

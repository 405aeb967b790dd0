# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Counts of a run, from the means that its log holds: the same whatever `logging_steps` is. Pure."""

from collections.abc import Sequence
from typing import Any


ROLLOUTS = "rollouts"  # how many rollouts the means of an entry are over, where they are over several
SAMPLING, DROPPED = "dynamic_sampling/", "dynamic_sampling/dropped/"
_OF_EACH_ROLLOUT = "timeline/update_seconds"  # is measured once


def note_rollouts(metrics: dict[str, list[float]]) -> None:
    """Add to metrics that are about to be averaged what is needed to get counts back from the means."""
    num_rollouts = len(metrics.get(_OF_EACH_ROLLOUT, ()))
    if num_rollouts < 2:
        return
    metrics[ROLLOUTS] = [float(num_rollouts)]
    for name, values in metrics.items():
        if name.startswith(DROPPED):  # a reason of a user's own is logged only where it occurred
            values.extend([0.0] * (num_rollouts - len(values)))


def _weight(entry: dict[str, Any]) -> float:
    return entry.get(ROLLOUTS) or 1.0


def total(entries: Sequence[dict], metric: str) -> float:
    """The sum of a metric over the rollouts of entries of a log."""
    return sum((entry.get(metric) or 0.0) * _weight(entry) for entry in entries)


def mean(entries: Sequence[dict], metric: str) -> float | None:
    """Return the mean of a metric over the rollouts of log entries, or `None` if no entry has it."""
    known = [entry for entry in entries if entry.get(metric) is not None]
    return total(known, metric) / sum(map(_weight, known)) if known else None


def num_accepted(entries: Sequence[dict]) -> float:
    """Groups that were accepted."""
    return sum(map(_num_accepted, entries))


def _num_accepted(entry: dict[str, Any]) -> float:
    num_sampled, rate = total([entry], f"{SAMPLING}groups_generated"), entry.get(f"{SAMPLING}acceptance_rate")
    reasons = [name for name in entry if name.startswith(DROPPED)]
    if rate is not None and not reasons:
        return num_sampled * rate
    return num_sampled - sum(total([entry], reason) for reason in reasons)


def acceptance_rate(entries: Sequence[dict]) -> float | None:
    """The share of the sampled groups that was accepted; `None` if no group was sampled."""
    num_sampled = total(entries, f"{SAMPLING}groups_generated")
    return num_accepted(entries) / num_sampled if num_sampled else mean(entries, f"{SAMPLING}acceptance_rate")

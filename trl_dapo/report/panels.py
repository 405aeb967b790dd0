# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""What a report draws of a run's log, picture by picture."""

import re
from dataclasses import dataclass

from ..sampling.drop_reasons import REASONS
from .runs import series


Points = tuple[list[int], list[float]]  # steps, and a value for each


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One picture."""

    name: str  # of its file
    title: str
    unit: str  # of the vertical axis
    metrics: dict[str, str]  # regular expressions of metrics, and how each is called in the legend, as in `re.sub`
    caption: str  # what to look for, in one sentence
    bottom: float | None = 0.0  # where the vertical axis begins; `None` leaves it to the values
    top: float | None = None

    def find(self, log_history: list[dict]) -> dict[str, Points]:
        """Steps and values by name in the legend; empty if nothing of it was logged."""
        if self is OUTCOMES:
            return _shares(log_history)
        logged = dict.fromkeys(metric for entry in log_history for metric in entry)
        drawn = [
            (match.expand(label), series(log_history, metric))
            for pattern, label in self.metrics.items()
            for metric in logged
            if (match := re.fullmatch(pattern, metric))
        ]
        return {label: points for label, points in drawn if points[0]}


REWARD = Panel(
    name="reward",
    title="Reward",
    unit="mean reward",
    metrics={"reward": "all that was sampled", "filtered_reward": "what the filter kept"},
    caption="The solid line should rise; it counts what was dropped, so the filter does not flatter it.",
    bottom=None,
)
ACCEPTANCE = Panel(
    name="acceptance",
    title="Acceptance rate",
    unit="share of groups sampled",
    metrics={"dynamic_sampling/acceptance_rate": "accepted"},
    caption="A falling rate makes every step cost more: see in the next picture what takes the groups away.",
    top=1.0,
)
OUTCOMES = Panel(
    name="outcomes",
    title="What became of the groups sampled",
    unit="share of groups sampled",
    metrics={f"dynamic_sampling/dropped/{reason}": reason for reason in REASONS},
    caption="A growing all_correct means that the prompts become too easy, all_wrong that they are too hard, masked "
    "that completions are cut off.",
    top=1.0,
)
LENGTH = Panel(
    name="length",
    title="Completion length",
    unit="tokens",
    metrics={"completions/mean_length": "mean", "completions/max_length": "longest"},
    caption="A mean that runs up to the limit without more reward is padding; one that collapses has found a short "
    "cut.",
)
ENTROPY = Panel(
    name="entropy",
    title="Entropy",
    unit="nats a token",
    metrics={"entropy": "policy"},
    caption="It may fall slowly; a plunge to zero means that all completions of a prompt become one and the same.",
)
TIMELINE = Panel(
    name="timeline",
    title="Where the time of the last rollouts went",
    unit="seconds",
    metrics={
        "timeline/update_seconds": "updates of the last one",
        "timeline/other_seconds": "evaluations and checkpoints",
        "timeline/sampling_seconds": "sampling",
        "timeline/rewards_seconds": "rewards",
        "timeline/wait_seconds": "the trainer's wait for the server",
        "timeline/idle_seconds": "the server's wait for the trainer",
    },
    caption="The updates of the rollout before (other: evaluations and checkpoints), then sampling and rewards. With "
    "a server it stands above, the trainer below: where the trainer waits, more GPUs should sample, and where the "
    "server idles, more should train.",
)
REWARDS = Panel(
    name="rewards",
    title="Reward by function",
    unit="mean reward",
    metrics={"rewards/(.*)/mean": r"\1"},
    caption="Before the filter and before weights. Where one rises and the one that matters does not, their sum hides "
    "it.",
    bottom=None,
)
SOURCES = Panel(
    name="sources",
    title="Acceptance rate by source",
    unit="share of groups sampled",
    metrics={},
    caption="A source that falls to zero has nothing left to teach, or is beyond the model: the share of right "
    "completions below says which.",
    top=1.0,
)
PANELS = (
    REWARD,
    Panel(
        name="evaluation",
        title="Evaluation during training",
        unit="share of problems",
        metrics={r"eval_avg@\d+": "avg@k", r"eval_pass@\d+": "pass@k", r"eval_maj@\d+": "maj@k"},
        caption="Reward that rises while this stands still is learned by heart, or got by a fault of the reward.",
    ),
    ACCEPTANCE,
    OUTCOMES,
    Panel(
        name="tokens",
        title="Tokens generated and trained",
        unit="tokens a rollout batch",
        metrics={"dynamic_sampling/tokens_generated": "generated", "dynamic_sampling/tokens_trained": "trained"},
        caption="The gap between the lines is the price of dynamic sampling.",
    ),
    ENTROPY,
    LENGTH,
    Panel(
        name="rounds",
        title="Rounds of generation",
        unit="rounds a rollout batch",
        metrics={"dynamic_sampling/rounds": "rounds"},
        caption="Each round waits for its longest completion; at dynamic_sampling_max_rounds a batch stays short.",
    ),
    Panel(
        name="truncation",
        title="Completions cut off",
        unit="share of completions",
        metrics={"completions/clipped_ratio": "cut off by max_completion_length"},
        caption="Above a few percent, right answers are lost: raise max_completion_length or punish length softly.",
    ),
    Panel(
        name="clipping",
        title="Clipped tokens",
        unit="share of tokens",
        metrics={
            "clip_ratio/high_mean": "at the upper clip",
            "clip_ratio/low_mean": "at the lower clip",
            "clip_ratio/dual_mean": "at the dual clip",
        },
        caption="All zero with one optimizer step a rollout batch and no carried rows; a share that climbs says the "
        "steps are too large.",
    ),
    Panel(
        name="gradient",
        title="Gradient norm",
        unit="norm before clipping",
        metrics={"grad_norm": "norm"},
        caption="Spikes that come before a drop in reward ask for a lower learning rate.",
    ),
    Panel(
        name="passes",
        title="Micro-batches",
        unit="of an optimizer step, on each process",
        metrics={"microbatches": "micro-batches"},
        caption="Under FSDP and ZeRO-3 each one gathers all weights: a larger max_tokens_per_microbatch makes fewer.",
    ),
    Panel(
        name="peak_tokens",
        title="Largest micro-batch",
        unit="tokens, padding included",
        metrics={"peak_microbatch_tokens": "on any process"},
        caption="It decides the peak of memory; above max_tokens_per_microbatch it is one row that is longer.",
    ),
    TIMELINE,
)
# Areas and bars cannot lie over one another: a picture for each run.
ONE_RUN_EACH = (OUTCOMES, TIMELINE)
BY_NAME = (REWARDS, SOURCES)  # a line for each name that a run has, in a picture for each run: see `plot_named`


def _shares(log_history: list[dict]) -> dict[str, Points]:
    """Share of the groups sampled that was accepted, and that was dropped for each reason that ever occurred."""
    sampled = zip(*series(log_history, "dynamic_sampling/groups_generated"), strict=True)
    # A rollout that was full of carried groups sampled none.
    total = {step: count for step, count in sampled if count > 0}
    dropped = {}
    prefix = "dynamic_sampling/dropped/"
    logged = (name.removeprefix(prefix) for entry in log_history for name in entry if name.startswith(prefix))
    for reason in dict.fromkeys([*REASONS, *logged]):
        counts = dict(zip(*series(log_history, prefix + reason), strict=True))
        if any(counts.values()):
            dropped[reason] = [counts.get(step, 0) / total[step] for step in total]
    if not total:
        return {}
    accepted = [1.0 - sum(shares) for shares in zip(*dropped.values(), strict=True)] if dropped else [1.0] * len(total)
    return {outcome: (list(total), shares) for outcome, shares in {"accepted": accepted, **dropped}.items()}

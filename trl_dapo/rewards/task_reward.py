# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The task reward: what decides whether a group trains, and what counts as right, in training and in evaluation."""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..sampling.drop_reasons import Criterion, count_correct, drop_reasons, is_correct, reward_sizes, task_reward
from ..sampling.equal_rewards import margin
from ..settings.rules import NEEDS_CORRECTNESS, is_length_penalty
from .scaling import scale_reward


SCORES_LEFT_OUT = (
    "Nothing says which completions are correct, so avg@k, pass@k and maj@k are left out. Name the reward that "
    "says so in `dynamic_sampling_rewards`."
)


@dataclass(frozen=True, kw_only=True)
class TaskReward:
    """The reward functions that decide which groups are accepted, and their rule. Made by [`TaskReward.choose`]."""

    names: tuple[str, ...]  # of those that decide
    shaping: tuple[str, ...]  # of those that do not, and have a weight: they only shape the advantages
    # If one function decides, its weight is 1, or -1 if it is negative: its size matters only to the advantages,
    # and the reward is compared as it was given.
    weights_F: Tensor
    is_task_F: Tensor
    criterion: Criterion
    # Not so where several decide and none was named: the sum of an accuracy and a format reward is above any threshold
    # for well-formatted nonsense.
    is_decided: bool
    best: float = 1.0  # what a reward function gives for what cannot be done better
    # Rewards that nobody named: three values, or those of a model, are not verdicts. Groups are still accepted by
    # their spread.
    is_named: bool = False
    is_graded: bool = False
    values: frozenset[float] = frozenset()  # seen so far

    @property
    def has_correctness(self) -> bool:
        """Whether completions can be called correct."""
        return self.is_decided and not self.is_graded

    def having_seen(self, rewards_BF: Tensor) -> "TaskReward":
        if self.is_named or self.is_graded:
            return self
        rewards_B, values = self.of(rewards_BF), self.values
        for value in rewards_B[~rewards_B.isnan()].unique().tolist():
            if all(abs(value - seen) > margin(abs(value)) for seen in values):
                values |= {value}
            if len(values) > 2:
                break
        return self if values == self.values else self.with_values(values)

    def with_values(self, values: Collection[float]) -> "TaskReward":
        """Return it with these values seen; scores stay scores."""
        if self.is_named:
            return self
        return replace(self, values=frozenset(values), is_graded=self.is_graded or len(values) > 2)

    @classmethod
    def choose(
        cls,
        names: Sequence[str],
        weights_F: Tensor,
        chosen: Sequence[str] | None,
        *,
        min_accuracy: float = 0.0,
        max_accuracy: float = 1.0,
        accuracy_threshold: float = 0.0,
        best: float = 1.0,
        models: Collection[str] = (),
    ) -> "TaskReward":
        """Those decide that are `chosen`, or all but length penalties and those of weight 0."""
        weighted = {name for name, weight in zip(names, weights_F.tolist(), strict=True) if weight}
        candidates = [name for name in names if not is_length_penalty(name)]
        listed = ", ".join(map(repr, candidates)) or "none"
        if unknown := [name for name in chosen or () if name not in names]:
            raise ValueError(
                f"`dynamic_sampling_rewards` names {', '.join(map(repr, unknown))}, but the reward functions are "
                f"{', '.join(map(repr, names))}."
            )
        if penalties := [name for name in chosen or () if is_length_penalty(name)]:
            raise ValueError(
                f"`dynamic_sampling_rewards` names {penalties[0]!r}, a length penalty: groups of incorrect "
                f"completions of different lengths would be accepted. Choose from {listed}."
            )
        # One of weight 0 is there to be logged.
        deciding = [name for name in candidates if name in weighted] or candidates
        if chosen is not None:
            deciding = list(dict.fromkeys(chosen))
            idle = [name for name in deciding if name not in weighted]
            if len(deciding) > 1 and idle:
                raise ValueError(
                    f"`dynamic_sampling_rewards` names {idle[0]!r}, whose weight in `reward_weights` is 0: it adds "
                    "nothing to the weighted sum that decides. Name it alone, give it a weight, or leave it out."
                )
        is_decided = chosen is not None or len(deciding) == 1
        # A length penalty may be the only function, although no completion is correct by it.
        deciding = deciding or list(names)
        is_task_F = torch.tensor([name in deciding for name in names])
        if is_task_F.sum() == 1:
            weights_F = torch.where(is_task_F, 1.0 - 2.0 * (weights_F < 0), weights_F)
        if is_decided:
            criterion = Criterion(
                min_accuracy=min_accuracy,
                max_accuracy=max_accuracy,
                accuracy_threshold=accuracy_threshold,
                full_score=weights_F[is_task_F].sum().item() * best,
            )
        else:
            needs_correctness = {"min_accuracy": (min_accuracy, 0.0), "max_accuracy": (max_accuracy, 1.0)}
            needs_correctness["accuracy_threshold"] = accuracy_threshold, 0.0
            for name, (value, default) in needs_correctness.items():
                if value != default:
                    raise ValueError(f"`dynamic_sampling_{name}={value}` {_ambiguous(listed)}")
            criterion = Criterion(accuracy_threshold=-math.inf, full_score=math.inf)
        return cls(
            names=tuple(deciding),
            shaping=tuple(name for name in names if name not in deciding and name in weighted),
            weights_F=weights_F,
            is_task_F=is_task_F,
            criterion=criterion,
            is_decided=is_decided,
            best=best,
            is_named=bool(chosen) or (min_accuracy, max_accuracy, accuracy_threshold) != (0.0, 1.0, 0.0),
            is_graded=accuracy_threshold == 0.0 and not {*models}.isdisjoint(deciding),
        )

    @property
    def undecided(self) -> tuple[str, ...]:
        """Names of the functions that decide together, if there are several and none was named."""
        return () if self.is_decided else self.names

    @property
    def why_no_correctness(self) -> str | None:
        """Why no completion can be called correct, for the message about a setting that needs it; `None` if it can."""
        if self.is_decided and self.is_graded:
            return (
                f"{NEEDS_CORRECTNESS}, and {self.names[0]!r} gives scores. Set "
                "`dynamic_sampling_accuracy_threshold`: a completion with a score above it is correct."
            )
        return None if self.is_decided else _ambiguous(", ".join(map(repr, self.names)))

    def of(self, rewards_BF: Tensor) -> Tensor:
        return task_reward(rewards_BF, self.weights_F, self.is_task_F)

    def _sizes(self, rewards_BF: Tensor) -> Tensor:
        return reward_sizes(rewards_BF, self.weights_F, self.is_task_F)

    def _full_scores(self, rewards_BF: Tensor) -> Tensor:
        """
        Return the best possible reward of each completion, by the functions that scored it: others are for other
        prompts.
        """
        if not self.is_decided:
            return torch.full((len(rewards_BF),), math.inf, dtype=torch.double, device=rewards_BF.device)
        best_BF = torch.full_like(rewards_BF, self.best).masked_fill(rewards_BF.isnan(), torch.nan)
        return self.of(best_BF)

    def scaled(self, rewards_BF: Tensor, scaling: Sequence[float] | None) -> Tensor:
        """The rewards with the task's own scaled, as `reward_scaling` asks."""
        if scaling is None:
            return rewards_BF
        rewards_BF = rewards_BF.clone()
        for i in self.is_task_F.nonzero().flatten().tolist():
            scaled = scale_reward(rewards_BF[:, i].tolist(), *scaling)
            rewards_BF[:, i] = torch.tensor(scaled, device=rewards_BF.device)
        return rewards_BF

    def drop_reasons(self, rewards_BF: Tensor, masked_B: Tensor | None, num_generations: int) -> list[str | None]:
        """For each group `None`, or why it is dropped; `masked_B` says which completions overlong filtering masks."""
        rewards_NG = self.of(rewards_BF).view(-1, num_generations)
        masked_NG = None if masked_B is None else masked_B.view_as(rewards_NG)
        sizes_NG, full_NG = (of(rewards_BF).view_as(rewards_NG) for of in (self._sizes, self._full_scores))
        return drop_reasons(rewards_NG, masked_NG, self.criterion, sizes_NG, full_NG)

    def count_correct(
        self, rewards_BF: Tensor, masked_B: Tensor | None, reasons: list[str | None], num_known: int = 0
    ) -> list[tuple[int, int]]:
        """Correct and scored completions of each group, as the decision on it takes them, without the first known."""
        rewards_NG = self.of(rewards_BF).view(len(reasons), -1)
        masked_NG = None if masked_B is None else masked_B.view_as(rewards_NG)
        sizes_NG = self._sizes(rewards_BF).view_as(rewards_NG)
        return count_correct(rewards_NG, masked_NG, reasons, self.criterion, num_known, sizes_NG)

    def is_correct(self, rewards_BF: Tensor) -> Tensor:
        """Return whether each completion is correct. A completion that was not scored is not."""
        return is_correct(self.of(rewards_BF), self.criterion, self._sizes(rewards_BF))

    def metrics(self, groups: Iterable[Tensor], skipped: Iterable[float] = ()) -> dict[str, float]:
        """Return the mean share of correct completions per prompt. Skipped prompts count with the expected share."""
        if not self.has_correctness:
            return {}
        # Hard prompts are sampled oftener, and more of each: completions would be counted by what they have taught.
        correct = (self.is_correct(rewards_BF)[~self.of(rewards_BF).isnan()].double() for rewards_BF in groups)
        shares = [*skipped, *(correct_B.mean().item() for correct_B in correct if len(correct_B))]
        return {"task_accuracy": sum(shares) / len(shares)} if shares else {}

    def describe(self, filtered: bool = False) -> str:
        """One line for the start of a run: what decides, by what threshold, and what only shapes."""
        names = ", ".join(map(repr, self.names))
        subject = f"the weighted sum of {names}"
        if len(self.names) == 1:
            subject = names if (self.weights_F[self.is_task_F] > 0).all() else f"minus {names}"
        parts = []
        if filtered:
            parts.append("`group_filter` decides which groups train.")
        else:
            low, high = self.criterion.min_accuracy, self.criterion.max_accuracy
            band = ""
            if (low, high) != (0.0, 1.0):
                band = f" and more than {low:g} and less than {high:g} of it is correct"
            parts.append(f"A group trains if {subject} differs within it{band}.")
        if self.has_correctness:
            unless = "" if self.is_named else ", unless it takes more than two values"
            parts.append(
                f"A completion is correct if {subject} is above {self.criterion.accuracy_threshold:g}{unless}."
            )
        elif filtered or not self.undecided:
            parts.append(SCORES_LEFT_OUT)
        else:  # the line about sampling says which setting to use
            parts.append("Nothing says which completions are correct, so avg@k, pass@k and maj@k are left out.")
        if self.shaping:
            only = "only shapes" if len(self.shaping) == 1 else "only shape"
            parts.append(f"{', '.join(map(repr, self.shaping))} {only} the advantages.")
        return " ".join(parts)


def _ambiguous(candidates: str) -> str:
    return (
        f"{NEEDS_CORRECTNESS}, but several reward functions decide: {candidates}. "
        "Name the one that says what is correct in `dynamic_sampling_rewards`."
    )

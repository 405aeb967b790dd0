# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The task reward, which decides which groups are accepted and which completions are correct.

Training and evaluation use the same task reward.
"""

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
    "No reward function says which completions are correct, so avg@k, pass@k and maj@k are left out. Name the "
    "function that does in `dynamic_sampling_rewards`."
)


@dataclass(frozen=True, kw_only=True)
class TaskReward:
    """
    The reward functions that decide which groups are accepted, and the rule by which they do.

    [`TaskReward.choose`] creates it.
    """

    names: tuple[str, ...]  # of the functions that decide
    shaping: tuple[str, ...]  # of the other functions with a weight, which only shape the advantages
    # If a single function decides, its weight here is 1, or -1 if its weight is negative: rewards are compared without
    # the size of the weight, which matters only to the advantages.
    weights_F: Tensor
    is_task_F: Tensor
    criterion: Criterion
    # Whether one function decides, or the deciding functions were named. Otherwise no completion is called correct:
    # the sum of an accuracy and a format reward exceeds any threshold for well-formatted nonsense.
    is_decided: bool
    best: float = 1.0  # the best reward that a function can give
    # A function that was not named may give scores instead of verdicts: it is a model, or gives more than two values.
    # Its scores do not say which completions are correct, but groups are still accepted if they differ.
    is_named: bool = False
    is_graded: bool = False
    values: frozenset[float] = frozenset()  # the different rewards so far

    @property
    def has_correctness(self) -> bool:
        """Whether the rewards say which completions are correct."""
        return self.is_decided and not self.is_graded

    def having_seen(self, rewards_BF: Tensor) -> "TaskReward":
        """Return this task reward with the values of these rewards added. With more than two they are scores."""
        if self.is_named or self.is_graded:
            return self
        rewards_B, values = self.weighted_sum(rewards_BF), self.values
        for value in rewards_B[~rewards_B.isnan()].unique().tolist():
            if all(abs(value - seen) > margin(abs(value)) for seen in values):
                values |= {value}
            if len(values) > 2:
                break
        return self if values == self.values else self.with_values(values)

    def with_values(self, values: Collection[float]) -> "TaskReward":
        """Return this task reward with these values instead. If its rewards were scores before, they stay scores."""
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
        """
        Return the task reward of the chosen functions, or of all except length penalties and those with weight 0.

        Args:
            names (`Sequence[str]`):
                Names of the reward functions.
            weights_F (`torch.Tensor`):
                Weight of each function.
            chosen (`Sequence[str]`, *optional*):
                Names in `dynamic_sampling_rewards`.
            min_accuracy (`float`, *optional*, defaults to `0.0`):
                See `dynamic_sampling_min_accuracy`.
            max_accuracy (`float`, *optional*, defaults to `1.0`):
                See `dynamic_sampling_max_accuracy`.
            accuracy_threshold (`float`, *optional*, defaults to `0.0`):
                See `dynamic_sampling_accuracy_threshold`.
            best (`float`, *optional*, defaults to `1.0`):
                The best reward that a function can give.
            models (`Collection[str]`, *optional*):
                Names of the functions that are reward models.
        """
        weighted = {name for name, weight in zip(names, weights_F.tolist(), strict=True) if weight}
        candidates = [name for name in names if not is_length_penalty(name)]
        listed = ", ".join(map(repr, candidates)) or "none"
        if unknown := [name for name in chosen or () if name not in names]:
            raise ValueError(
                f"`dynamic_sampling_rewards` names {', '.join(map(repr, unknown))}, which is not a reward function of "
                f"this run. Choose from {', '.join(map(repr, names))}."
            )
        if penalties := [name for name in chosen or () if is_length_penalty(name)]:
            raise ValueError(
                f"`dynamic_sampling_rewards` names {penalties[0]!r}, a length penalty: groups of incorrect "
                f"completions of different lengths would be accepted. Choose from {listed}."
            )
        # Functions with weight 0 are only logged.
        deciding = [name for name in candidates if name in weighted] or candidates
        if chosen is not None:
            deciding = list(dict.fromkeys(chosen))
            idle = [name for name in deciding if name not in weighted]
            if len(deciding) > 1 and idle:
                raise ValueError(
                    f"`dynamic_sampling_rewards` names {idle[0]!r}, whose weight in `reward_weights` is 0, so it adds "
                    "nothing to the weighted sum that decides. Name only this function, give it a weight, or leave it "
                    "out."
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
        """
        Why the rewards do not say which completions are correct, or `None` if they do.

        It completes the message about a setting that needs to know, such as "`dynamic_sampling_memory=True` ...".
        """
        if self.is_decided and self.is_graded:
            return (
                f"{NEEDS_CORRECTNESS}, but {self.names[0]!r} gives scores. Set "
                "`dynamic_sampling_accuracy_threshold`: a completion with a score above it is correct."
            )
        return None if self.is_decided else _ambiguous(", ".join(map(repr, self.names)))

    def weighted_sum(self, rewards_BF: Tensor) -> Tensor:
        """Return the task reward of each completion: the weighted sum of the deciding functions' rewards."""
        return task_reward(rewards_BF, self.weights_F, self.is_task_F)

    def _sizes(self, rewards_BF: Tensor) -> Tensor:
        return reward_sizes(rewards_BF, self.weights_F, self.is_task_F)

    def _full_scores(self, rewards_BF: Tensor) -> Tensor:
        """
        Return the best possible task reward of each completion.

        Only functions that scored the completion count. A function may give no reward for prompts of other tasks.
        """
        if not self.is_decided:
            return torch.full((len(rewards_BF),), math.inf, dtype=torch.double, device=rewards_BF.device)
        best_BF = torch.full_like(rewards_BF, self.best).masked_fill(rewards_BF.isnan(), torch.nan)
        return self.weighted_sum(best_BF)

    def scaled(self, rewards_BF: Tensor, scaling: Sequence[float] | None) -> Tensor:
        """Return the rewards with those of the task reward scaled by `reward_scaling`."""
        if scaling is None:
            return rewards_BF
        rewards_BF = rewards_BF.clone()
        for i in self.is_task_F.nonzero().flatten().tolist():
            scaled = scale_reward(rewards_BF[:, i].tolist(), *scaling)
            rewards_BF[:, i] = torch.tensor(scaled, device=rewards_BF.device)
        return rewards_BF

    def drop_reasons(self, rewards_BF: Tensor, masked_B: Tensor | None, num_generations: int) -> list[str | None]:
        """Return for each group why it is dropped, or `None`. `masked_B` marks overlong completions to leave out."""
        rewards_NG = self.weighted_sum(rewards_BF).view(-1, num_generations)
        masked_NG = None if masked_B is None else masked_B.view_as(rewards_NG)
        sizes_NG = self._sizes(rewards_BF).view_as(rewards_NG)
        full_NG = self._full_scores(rewards_BF).view_as(rewards_NG)
        return drop_reasons(rewards_NG, masked_NG, self.criterion, sizes_NG, full_NG)

    def count_correct(
        self, rewards_BF: Tensor, masked_B: Tensor | None, reasons: list[str | None], num_known: int = 0
    ) -> list[tuple[int, int]]:
        """
        Return the numbers of correct and of scored completions of each group, by which the group is judged.

        The first `num_known` completions of a group are not counted.
        """
        rewards_NG = self.weighted_sum(rewards_BF).view(len(reasons), -1)
        masked_NG = None if masked_B is None else masked_B.view_as(rewards_NG)
        sizes_NG = self._sizes(rewards_BF).view_as(rewards_NG)
        return count_correct(rewards_NG, masked_NG, reasons, self.criterion, num_known, sizes_NG)

    def is_correct(self, rewards_BF: Tensor) -> Tensor:
        """Return whether each completion is correct. A completion without a reward is not correct."""
        return is_correct(self.weighted_sum(rewards_BF), self.criterion, self._sizes(rewards_BF))

    def metrics(self, groups: Iterable[Tensor], skipped: Iterable[float] = ()) -> dict[str, float]:
        """Return the mean share of correct completions per prompt. Skipped prompts count with the expected share."""
        if not self.has_correctness:
            return {}
        # The mean is over prompts. Over completions it would depend on how many are sampled of each prompt, and of
        # hard prompts more are sampled.
        shares = list(skipped)
        for rewards_BF in groups:
            is_scored_B = ~self.weighted_sum(rewards_BF).isnan()
            if is_scored_B.any():
                shares.append(self.is_correct(rewards_BF)[is_scored_B].double().mean().item())
        return {"task_accuracy": sum(shares) / len(shares)} if shares else {}

    def describe(self, filtered: bool = False) -> str:
        """Return the line at the start of a run: which rewards decide, their threshold, and which only shape."""
        names = ", ".join(map(repr, self.names))
        subject = f"the weighted sum of {names}"
        if len(self.names) == 1:
            subject = names if (self.weights_F[self.is_task_F] > 0).all() else f"minus {names}"
        parts = []
        if filtered:
            parts.append("`group_filter` decides which groups are accepted.")
        else:
            low, high = self.criterion.min_accuracy, self.criterion.max_accuracy
            band = ""
            if (low, high) != (0.0, 1.0):
                band = f", and if the share of correct completions is above {low:g} and below {high:g}"
            parts.append(f"A group is accepted if {subject} differs between its completions{band}.")
        if self.has_correctness:
            parts.append(f"A completion is correct if {subject} is above {self.criterion.accuracy_threshold:g}.")
            if not self.is_named:
                parts.append(
                    "If this reward takes more than two values, no completion counts as correct, unless you set "
                    "`dynamic_sampling_accuracy_threshold`."
                )
        elif filtered or not self.undecided:
            parts.append(SCORES_LEFT_OUT)
        else:  # the line about sampling says which setting to use
            parts.append(SCORES_LEFT_OUT.partition(". ")[0] + ".")
        if self.shaping:
            only = "only shapes" if len(self.shaping) == 1 else "only shape"
            parts.append(f"{', '.join(map(repr, self.shaping))} {only} the advantages.")
        return " ".join(parts)


def _ambiguous(candidates: str) -> str:
    return (
        f"{NEEDS_CORRECTNESS}, but several reward functions decide together: {candidates}. Name the one that judges "
        "correctness in `dynamic_sampling_rewards`."
    )

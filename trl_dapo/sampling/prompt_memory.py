# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
Pass-rate memory: what past rounds showed about each prompt, and which prompts to skip because they would most likely
be dropped.
"""

import math
import os
from dataclasses import dataclass, fields
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from .example_names import digest, id_in
from .policies import Decided, SelectionPolicy


def expected_acceptance(correct: float, incorrect: float, num_generations: int) -> float:
    """
    Return the probability that completions are neither all correct nor all incorrect, for a Beta-distributed pass
    rate.
    """
    all_correct = math.exp(log_likelihood(num_generations, 0, correct, incorrect))
    return max(1.0 - all_correct - math.exp(log_likelihood(0, num_generations, correct, incorrect)), 0.0)


@dataclass(slots=True)
class _Record:
    """
    The record of one prompt. `num_skipped` counts skips in a row; `evidence_*` has the weight of the time `last_age`.
    """

    num_seen: int = 0
    num_correct: int = 0
    num_scored: int = 0
    last_step: int = 0
    last_age: int = 0
    num_skipped: int = 0
    num_passes: int = 1  # that its next observation represents
    evidence_correct: float = 0.0
    evidence_wrong: float = 0.0


class Population:
    """The pass rates of all prompts: sums of unbiased estimates of p and p^2, one for each prompt and pass."""

    _UNIFORM = {"num_passes": 2.0, "sum_rate": 2 / 2, "sum_square": 2 / 3}  # noqa: RUF012 (counts as two visits)

    def __init__(self) -> None:
        self._sums = dict(self._UNIFORM)

    def update(self, num_correct: int, num_scored: int, num_passes: int = 1) -> None:
        """
        Learn from an observation, weighted by the passes since the last one: otherwise prompts seen often would count
        more.
        """
        if num_scored >= 2:
            self._sums["num_passes"] += num_passes
            self._sums["sum_rate"] += num_passes * num_correct / num_scored
            self._sums["sum_square"] += num_passes * num_correct * (num_correct - 1) / (num_scored * (num_scored - 1))

    def fade(self, by: float) -> None:
        """Reduce the weight of all observations so far."""
        self._sums = {name: start + by * (self._sums[name] - start) for name, start in self._UNIFORM.items()}

    def pass_rate(self, prompt_id: str | None = None) -> tuple[float, float]:
        """Return the Beta distribution of pass rates, by its first two moments. It is the same for every prompt."""
        num, rate, square = self._sums.values()
        mean = rate / num
        # A population that is nearly all solved or all unsolved has a tiny concentration, but not zero.
        concentration = max(mean * (1 - mean) / max(square / num - mean**2, 1e-6) - 1, 0.01)
        return mean * concentration, (1 - mean) * concentration

    def state_dict(self) -> dict[str, float]:
        return dict(self._sums)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sums = {name: state[name] for name in self._UNIFORM}


class PromptMemory(SelectionPolicy):
    """Pass-rate history of every prompt, and what it predicts. Nothing in it depends on the rank."""

    name = "memory"
    needs_counts = True

    # A pass rate has a Beta posterior: a prior that is fitted to the observations of all prompts, and the evidence of
    # its own observations. The policy learns, so old observations become misleading. Each new one therefore asks:
    # would half the evidence have predicted it better than all of it? The log of how much better is summed over
    # observations, and never falls below zero (Page's test for a change, Biometrika 41, 1954). If the sum exceeds a
    # bound, the policy has changed, and the weight of everything known is halved, of each prompt and of the
    # population. Skipping prompts by what was seen of them is GRESO's idea (https://huggingface.co/papers/2506.02177),
    # whose waits have no bound.

    # The factor of everything known after a change, and of a prompt's earlier observations at each new one. With it
    # the evidence is worth two groups at most, so a prompt that alone was learned is noticed too. MoPPS's recipes use
    # the same factor (https://huggingface.co/papers/2507.04632).
    KEPT = 0.5
    # If nothing is learned and pass rates are Beta-distributed, a sum of log-likelihood ratios exceeds this at most
    # once in e^10 = 22,000 observations (Lorden, Ann. Math. Stat. 42, 1971).
    MOST_SURPRISE = 10.0
    # A prompt with half the predicted acceptance of an unseen one is sampled as rarely as allowed. A lower power
    # samples such prompts more often.
    VISITS_POWER = 5

    _STATE = ("seed", "_num_draws", "_age", "_surprise")

    def __init__(self, seed: int = 0, *, longest_wait: int = 32, num_generations: int = 8) -> None:
        self.seed = seed
        self.num_generations = num_generations
        self.longest_wait = longest_wait
        self.population = Population()
        self._records: dict[str, _Record] = {}
        self._num_draws = 0
        self._age = 0  # how often all that was known lost half its weight
        self._surprise = 0.0
        self.skipped: list[tuple[float, float]] = []  # Beta distributions of the pass rates, since the rollout began

    def start_rollout(self) -> None:
        self.skipped.clear()

    def skips(self, name: str, may_skip: bool) -> bool:
        return self.draw_skip(name, self.num_generations, may_skip)

    def predicted_acceptance(self, name: str, num_completions: int) -> float | None:
        return self.expected_acceptance(name, num_completions)

    def observe(self, decided: Decided) -> None:
        if decided.counts is None:
            return
        is_rest = decided.num_known > 0
        for group, (num_correct, num_scored) in zip(decided.groups, decided.counts, strict=True):
            self.update(group.name, num_correct, num_scored, decided.step, is_rest=is_rest)

    def expected_saving(self, num_generations: int) -> float:
        """Return how many times more often a group is accepted once every prompt was observed once."""
        correct, incorrect = self.population.pass_rate()
        unseen = expected_acceptance(correct, incorrect, num_generations)
        num_visits, num_accepted = 0.0, 0.0  # per pass and prompt
        for num_correct in range(num_generations + 1):
            num_incorrect = num_generations - num_correct
            num_orders = math.comb(num_generations, num_correct)
            share = num_orders * math.exp(log_likelihood(num_correct, num_incorrect, correct, incorrect))
            predicted = expected_acceptance(correct + num_correct, incorrect + num_incorrect, num_generations)
            visits = share * self._visits_per_pass(predicted, unseen)
            num_visits += visits
            num_accepted += visits * predicted
        return num_accepted / num_visits / unseen

    def describe_on(self, num_generations: int) -> str:
        return "prompts that are likely to be dropped are skipped for a while"

    def describe_off(self) -> str:
        return "no prompt is skipped"

    def metrics(self) -> dict[str, float]:
        return {"skipped_by_memory": float(len(self.skipped))}

    def expected_acceptance(self, prompt_id: str, num_generations: int) -> float:
        """Return the probability that a new group of this prompt is accepted."""
        return expected_acceptance(*self.pass_rate(prompt_id), num_generations)

    def draw_skip(self, prompt_id: str, num_generations: int, may_skip: bool = True) -> bool:
        """Draw whether to skip this prompt now. Processes that call this in the same order get the same results."""
        record = self._records.get(prompt_id)
        if record is None:
            return False
        unseen = expected_acceptance(*self.population.pass_rate(), num_generations)
        correct, incorrect = self.pass_rate(prompt_id)
        predicted = expected_acceptance(correct, incorrect, num_generations)
        visits_per_pass = self._visits_per_pass(predicted, unseen)
        # Waits are uniform over 1, 2, ... 2 / visits_per_pass - 1 passes: as often on average, but bounded.
        num_left = 2 / visits_per_pass - 1 - record.num_skipped
        skip = may_skip and self._draw(prompt_id) * num_left >= 1
        # A wait ends with the draw, not with the observation: a round may pass over the dataset again before that.
        record.num_skipped = record.num_skipped + 1 if skip else 0
        if skip:
            record.num_passes += 1
            self.skipped.append((correct, incorrect))
        return skip

    def _visits_per_pass(self, predicted: float, unseen: float) -> float:
        """
        Return how often per pass to sample a prompt with this predicted acceptance, if an unseen prompt is sampled
        once.
        """
        visits_per_pass = (predicted / unseen) ** self.VISITS_POWER if predicted < unseen else 1.0
        return max(visits_per_pass, 2 / (self.longest_wait + 1))

    def update(self, prompt_id: str, num_correct: int, num_scored: int, step: int, is_rest: bool = False) -> None:
        """Learn from a group, or from the rest of a group whose first completions are known."""
        record = self._records.setdefault(prompt_id, _Record(last_age=self._age))
        if not is_rest:  # the rest of a partial group is not an observation of its own
            num_incorrect = num_scored - num_correct
            whole = log_likelihood(num_correct, num_incorrect, *self._posterior(record))
            half = log_likelihood(num_correct, num_incorrect, *self._posterior(record, self.KEPT))
            self._surprise = max(self._surprise + half - whole, 0.0)
            if (
                self._surprise > self.MOST_SURPRISE
            ):  # half of what is known would have predicted the last observations better
                self.halve()
            self.population.update(num_correct, num_scored, record.num_passes)
            record.num_passes = 1
        kept = self._fade(record)
        if not is_rest and num_scored:  # earlier observations count half
            kept *= self.KEPT
        record.evidence_correct = kept * record.evidence_correct + num_correct
        record.evidence_wrong = kept * record.evidence_wrong + (num_scored - num_correct)
        record.num_seen += 1
        record.num_correct += num_correct
        record.num_scored += num_scored
        record.last_step, record.last_age = step, self._age

    def halve(self) -> None:
        """Halve the weight of everything known, of each prompt and of the population."""
        self._surprise, self._age = 0.0, self._age + 1
        self.population.fade(self.KEPT)

    @property
    def prompts(self) -> set[str]:
        """The prompts that were seen."""
        return {*self._records}

    def _fade(self, record: _Record) -> float:
        """Return the weight that the evidence of a prompt still has."""
        return self.KEPT ** (self._age - record.last_age)

    def _posterior(self, record: _Record, by: float = 1.0) -> tuple[float, float]:
        correct, incorrect = self.population.pass_rate()
        by *= self._fade(record)
        return correct + by * record.evidence_correct, incorrect + by * record.evidence_wrong

    def pass_rate(self, prompt_id: str | None) -> tuple[float, float]:
        """Return the Beta distribution of a prompt's pass rate; for `None`, that of an unknown prompt."""
        return self._posterior(self._records.get(prompt_id or "") or _Record())

    def _draw(self, prompt_id: str) -> float:
        """Return a uniform number in [0, 1) that depends only on the seed, the prompt and the number of draws."""
        self._num_draws += 1
        # Only the id counts: another column of the dataset, which the hash in the name depends on, must not change
        # draws.
        return int(digest(f"{self.seed}/{self._num_draws}/{id_in(prompt_id)}"), 16) / 2**64

    def save(self, path: str | os.PathLike) -> None:
        """Write a parquet file with a row for each prompt that was seen."""
        records = self._records.values()
        columns: dict[str, list] = {"prompt_id": list(self._records)}
        columns["pass_rate"] = [r.num_correct / r.num_scored if r.num_scored else None for r in records]
        for field in fields(_Record):
            columns[field.name] = [getattr(record, field.name) for record in records]
        pq.write_table(pa.table(columns), path)

    @staticmethod
    def read(path: str | os.PathLike) -> dict[str, _Record]:
        """Return what [`PromptMemory.save`] wrote, by prompt."""
        names = [field.name for field in fields(_Record)]
        rows = pq.read_table(path).to_pylist()
        return {row["prompt_id"]: _Record(**{name: row[name] for name in names}) for row in rows}

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs in addition to the file, JSON-able."""
        return {name.lstrip("_"): getattr(self, name) for name in self._STATE} | self.population.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state, with the file's `records` in it."""
        self._records = state.get("records", {})
        self.skipped.clear()
        self.population.load_state_dict(state)
        for name in self._STATE:
            setattr(self, name, state[name.lstrip("_")])


def log_likelihood(num_correct: int, num_incorrect: int, correct: float, incorrect: float) -> float:
    """Return the log-likelihood of completions in their order, for a Beta-distributed pass rate."""
    return _log_beta(correct + num_correct, incorrect + num_incorrect) - _log_beta(correct, incorrect)


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)

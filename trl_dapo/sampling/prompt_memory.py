# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The pass-rate memory: learns the pass rate of each prompt during a run, and decides which prompts to skip."""

import math
import os
from dataclasses import dataclass, fields
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from .example_names import digest, id_in
from .policies import Decisions, SelectionPolicy


def expected_acceptance(correct: float, incorrect: float, num_generations: int) -> float:
    """
    Return the probability that the completions of a group are neither all correct nor all incorrect.

    The pass rate has a Beta distribution with the parameters `correct` and `incorrect`.
    """
    all_correct = math.exp(log_likelihood(num_generations, 0, correct, incorrect))
    return max(1.0 - all_correct - math.exp(log_likelihood(0, num_generations, correct, incorrect)), 0.0)


@dataclass(slots=True)
class _Record:
    """The memory's record of one prompt."""

    num_seen: int = 0  # groups sampled
    num_correct: int = 0
    num_scored: int = 0
    last_step: int = 0  # optimizer step of the latest observation
    num_halvings: int = 0  # how often the memory had been halved when the evidence was last updated
    num_skipped: int = 0  # in a row
    num_passes: int = 1  # number of passes that the next observation represents: its own and the skipped ones
    evidence_correct: float = 0.0  # weighted number of correct completions
    evidence_incorrect: float = 0.0


class Population:
    """
    The distribution of the pass rates of all prompts.

    It is estimated from sums of unbiased estimates of p and p^2, where p is a prompt's pass rate. Each prompt
    contributes one estimate per pass.
    """

    # A uniform prior that has the weight of two observations.
    _UNIFORM = {"num_passes": 2.0, "sum_rate": 2 / 2, "sum_square": 2 / 3}  # noqa: RUF012

    def __init__(self) -> None:
        self._sums = dict(self._UNIFORM)

    def update(self, num_correct: int, num_scored: int, num_passes: int = 1) -> None:
        """
        Learn from an observation, which has the weight of `num_passes` passes.

        The weight makes up for skipped passes. Without it, prompts that are sampled more often would count more.
        """
        if num_scored >= 2:
            self._sums["num_passes"] += num_passes
            self._sums["sum_rate"] += num_passes * num_correct / num_scored
            self._sums["sum_square"] += num_passes * num_correct * (num_correct - 1) / (num_scored * (num_scored - 1))

    def fade(self, factor: float) -> None:
        """Multiply the weight of all observations so far by `factor`."""
        self._sums = {name: start + factor * (self._sums[name] - start) for name, start in self._UNIFORM.items()}

    def pass_rate_distribution(self) -> tuple[float, float]:
        """Return the Beta parameters of the pass rates of all prompts, which follow from the first two moments."""
        num, rate, square = self._sums.values()
        mean = rate / num
        # If nearly every prompt is either always or never solved, the concentration is tiny, but not zero.
        concentration = max(mean * (1 - mean) / max(square / num - mean**2, 1e-6) - 1, 0.01)
        return mean * concentration, (1 - mean) * concentration

    def state_dict(self) -> dict[str, float]:
        return dict(self._sums)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sums = {name: state[name] for name in self._UNIFORM}


class PromptMemory(SelectionPolicy):
    """
    Learns the pass rate of every prompt, and skips prompts whose groups would probably be dropped.

    Its state and its decisions are the same on every process.

    Args:
        seed (`int`, *optional*, defaults to `0`):
            Seed of the draws that decide which prompts are skipped.
        longest_wait (`int`, *optional*, defaults to `32`):
            Maximum number of passes from one visit of a prompt to the next.
        num_generations (`int`, *optional*, defaults to `8`):
            Number of completions in a group.
    """

    name = "memory"
    needs_counts = True

    # The pass rate of a prompt has a Beta posterior. Its prior is fitted to the observations of all prompts, and its
    # evidence comes from the prompt's own observations.
    # As the model learns, older evidence becomes misleading. So each observation is tested: would half the evidence
    # have predicted it better than all the evidence? The log of the likelihood ratio is summed over the observations
    # and kept at zero or above (Page's test for a change, Biometrika 41, 1954). If the sum exceeds a bound, the model
    # has changed, and all evidence is halved, that of each prompt and that of the population.
    # Skipping prompts by past results is the idea of GRESO (https://huggingface.co/papers/2506.02177), in which the
    # number of skipped passes has no bound.

    # The weight that evidence keeps after a change, and that a prompt's earlier observations keep at each new one.
    # With the latter, the evidence of a prompt is worth two groups at most, so that the memory also notices if the
    # model learns only this prompt. The recipes of MoPPS use the same factor
    # (https://huggingface.co/papers/2507.04632).
    KEPT = 0.5
    # If the model does not change and pass rates are Beta-distributed, the sum of log-likelihood ratios exceeds this
    # at most once in e^10 = 22,000 observations (Lorden, Ann. Math. Stat. 42, 1971).
    MAX_SURPRISE = 10.0
    # The number of visits falls with this power of the expected acceptance. With 5, a prompt whose acceptance is half
    # that of an unseen prompt is visited as rarely as the default `longest_wait` allows. A lower power samples more.
    VISITS_POWER = 5

    _STATE = ("seed", "_num_draws", "_num_halvings", "_surprise")

    def __init__(self, seed: int = 0, *, longest_wait: int = 32, num_generations: int = 8) -> None:
        self.seed = seed
        self.num_generations = num_generations
        self.longest_wait = longest_wait
        self.population = Population()
        self._records: dict[str, _Record] = {}
        self._num_draws = 0
        self._num_halvings = 0  # how often all evidence was halved
        self._surprise = 0.0  # the sum of log-likelihood ratios
        self.skipped_distributions: list[tuple[float, float]] = []

    def start_rollout(self) -> None:
        self.skipped_distributions.clear()

    def skips(self, name: str, may_skip: bool) -> bool:
        return self.draw_skip(name, self.num_generations, may_skip)

    def predicted_acceptance(self, name: str, num_completions: int) -> float | None:
        return self.expected_acceptance(name, num_completions)

    def observe(self, decisions: Decisions) -> None:
        if decisions.counts is None:
            return
        is_rest = decisions.num_known > 0
        for group, (num_correct, num_scored) in zip(decisions.groups, decisions.counts, strict=True):
            self.update(group.name, num_correct, num_scored, decisions.step, is_rest=is_rest)

    def expected_saving(self, num_generations: int) -> float:
        """Return the factor by which the acceptance rate is expected to rise once every prompt was observed once."""
        correct, incorrect = self.population.pass_rate_distribution()
        unseen = expected_acceptance(correct, incorrect, num_generations)
        num_visits, num_accepted = 0.0, 0.0  # expected values per prompt and pass
        for num_correct in range(num_generations + 1):
            num_incorrect = num_generations - num_correct
            num_orders = math.comb(num_generations, num_correct)
            share = num_orders * math.exp(log_likelihood(num_correct, num_incorrect, correct, incorrect))
            acceptance = expected_acceptance(correct + num_correct, incorrect + num_incorrect, num_generations)
            visits = share * self._visits_per_pass(acceptance, unseen)
            num_visits += visits
            num_accepted += visits * acceptance
        return num_accepted / num_visits / unseen

    def describe_on(self, num_generations: int) -> str:
        return "a prompt is skipped for some passes if its group would probably be dropped"

    def describe_off(self) -> str:
        return "no prompt is skipped"

    def metrics(self) -> dict[str, float]:
        return {"skipped_by_memory": float(len(self.skipped_distributions))}

    def expected_acceptance(self, name: str, num_generations: int) -> float:
        """Return the probability that a new group of this prompt is accepted."""
        return expected_acceptance(*self.pass_rate_distribution(name), num_generations)

    def draw_skip(self, name: str, num_generations: int, may_skip: bool = True) -> bool:
        """Draw whether to skip this prompt now. Processes that make the same calls in the same order get the same."""
        record = self._records.get(name)
        if record is None:
            return False
        unseen = expected_acceptance(*self.population.pass_rate_distribution(), num_generations)
        correct, incorrect = self.pass_rate_distribution(name)
        acceptance = expected_acceptance(correct, incorrect, num_generations)
        visits_per_pass = self._visits_per_pass(acceptance, unseen)
        # The wait until the next visit is uniform over 1, 2, ... 2 / visits_per_pass - 1 passes. So the prompt is
        # visited as often as it should be on average, and the wait is bounded.
        longest_wait_left = 2 / visits_per_pass - 1 - record.num_skipped
        skip = may_skip and self._draw(name) * longest_wait_left >= 1
        # The wait ends here, not when the prompt is observed, because a round may reach the prompt again before that.
        record.num_skipped = record.num_skipped + 1 if skip else 0
        if skip:
            record.num_passes += 1
            self.skipped_distributions.append((correct, incorrect))
        return skip

    def _visits_per_pass(self, acceptance: float, unseen: float) -> float:
        """
        Return how often per pass to sample a prompt whose group is accepted with probability `acceptance`.

        `unseen` is the probability for an unseen prompt, which is sampled once per pass.
        """
        visits_per_pass = (acceptance / unseen) ** self.VISITS_POWER if acceptance < unseen else 1.0
        return max(visits_per_pass, 2 / (self.longest_wait + 1))

    def update(self, name: str, num_correct: int, num_scored: int, step: int, is_rest: bool = False) -> None:
        """Learn from completions of a group. With `is_rest`, it has learned from the first completions before."""
        record = self._records.setdefault(name, _Record(num_halvings=self._num_halvings))
        # The rest of a group belongs to the same observation as its first completions, which was counted before.
        if not is_rest:
            num_incorrect = num_scored - num_correct
            whole = log_likelihood(num_correct, num_incorrect, *self._posterior(record))
            half = log_likelihood(num_correct, num_incorrect, *self._posterior(record, self.KEPT))
            self._surprise = max(self._surprise + half - whole, 0.0)
            if self._surprise > self.MAX_SURPRISE:
                self.halve()
            self.population.update(num_correct, num_scored, record.num_passes)
            if num_scored >= 2:  # otherwise the next observation counts for the skipped passes
                record.num_passes = 1
            record.num_seen += 1
        kept = self._fade(record)
        if not is_rest and num_scored:  # at each new observation the weight of earlier ones is halved
            kept *= self.KEPT
        record.evidence_correct = kept * record.evidence_correct + num_correct
        record.evidence_incorrect = kept * record.evidence_incorrect + (num_scored - num_correct)
        record.num_correct += num_correct
        record.num_scored += num_scored
        record.last_step, record.num_halvings = step, self._num_halvings

    def halve(self) -> None:
        """Halve the weight of all evidence, that of each prompt and that of the population."""
        self._surprise, self._num_halvings = 0.0, self._num_halvings + 1
        self.population.fade(self.KEPT)

    @property
    def prompts(self) -> set[str]:
        """The prompts that were observed."""
        return {*self._records}

    def _fade(self, record: _Record) -> float:
        """Return the weight that the evidence of a prompt still has."""
        return self.KEPT ** (self._num_halvings - record.num_halvings)

    def _posterior(self, record: _Record, factor: float = 1.0) -> tuple[float, float]:
        correct, incorrect = self.population.pass_rate_distribution()
        factor *= self._fade(record)
        return correct + factor * record.evidence_correct, incorrect + factor * record.evidence_incorrect

    def pass_rate_distribution(self, name: str | None) -> tuple[float, float]:
        """Return the Beta parameters of a prompt's pass rate. `None` stands for a prompt that was never observed."""
        return self._posterior(self._records.get(name or "") or _Record())

    def _draw(self, name: str) -> float:
        """Draw a uniform number in [0, 1) that depends only on the seed, the prompt and the number of draws so far."""
        self._num_draws += 1
        # The hash that follows an id in the name is left out. It depends on all columns, and a new column should not
        # change draws. The name of a prompt without an id is only the hash, so there a new column does change them.
        return int(digest(f"{self.seed}/{self._num_draws}/{id_in(name)}"), 16) / 2**64

    def save(self, path: str | os.PathLike) -> None:
        """Write a parquet file with one row for each observed prompt."""
        records = self._records.values()
        columns: dict[str, list] = {"prompt_id": list(self._records)}
        columns["pass_rate"] = [r.num_correct / r.num_scored if r.num_scored else None for r in records]
        for field in fields(_Record):
            columns[field.name] = [getattr(record, field.name) for record in records]
        pq.write_table(pa.table(columns), path)

    @staticmethod
    def read(path: str | os.PathLike) -> dict[str, _Record]:
        """Read the records that [`PromptMemory.save`] wrote, by prompt."""
        names = [field.name for field in fields(_Record)]
        rows = pq.read_table(path).to_pylist()
        return {row["prompt_id"]: _Record(**{name: row[name] for name in names}) for row in rows}

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs in addition to the parquet file, as values that JSON can hold."""
        return {name.lstrip("_"): getattr(self, name) for name in self._STATE} | self.population.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state, to which `records` of the parquet file were added."""
        self._records = state.get("records", {})
        self.skipped_distributions.clear()
        self.population.load_state_dict(state)
        for name in self._STATE:
            setattr(self, name, state[name.lstrip("_")])


def log_likelihood(num_correct: int, num_incorrect: int, correct: float, incorrect: float) -> float:
    """
    Return the log-likelihood of completions in a given order.

    The pass rate has a Beta distribution with the parameters `correct` and `incorrect`.
    """
    return _log_beta(correct + num_correct, incorrect + num_incorrect) - _log_beta(correct, incorrect)


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)

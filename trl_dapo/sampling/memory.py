# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""What past rounds taught about each prompt, and which prompts to skip because they would most likely be dropped."""

import hashlib
import math
import os
from dataclasses import asdict, dataclass, fields

import pyarrow as pa
import pyarrow.parquet as pq


def expected_acceptance(num_correct, num_wrong, num_generations):
    """
    Probability that `num_generations` completions are neither all correct nor all wrong, when the pass rate follows
    Beta(`num_correct`, `num_wrong`): one minus the two ends of the beta-binomial distribution.

    Args:
        num_correct (`float`): First parameter of the Beta distribution, above zero.
        num_wrong (`float`): Second parameter of the Beta distribution, above zero.
        num_generations (`int`): Completions of the group.

    Returns:
        `float` between 0 and 1.
    """
    lost = math.lgamma(num_correct + num_wrong + num_generations) - math.lgamma(num_correct + num_wrong)
    all_correct = math.exp(math.lgamma(num_correct + num_generations) - math.lgamma(num_correct) - lost)
    all_wrong = math.exp(math.lgamma(num_wrong + num_generations) - math.lgamma(num_wrong) - lost)
    return max(1.0 - all_correct - all_wrong, 0.0)


@dataclass
class _Record:
    """What is known of one prompt. `evidence_*` are faded counts as of `last_step`."""

    num_seen: int = 0
    num_correct: int = 0
    num_scored: int = 0
    last_step: int = 0
    num_skipped: int = 0
    evidence_correct: float = 0.0
    evidence_wrong: float = 0.0


class PromptMemory:
    """
    Pass-rate history of every prompt.

    A prompt's pass rate has a Beta posterior: the prior is the population of all prompts at their first look, the
    evidence is what was seen of this prompt, fading with a half-life because the policy changes. The posterior gives
    the probability that a new group of the prompt would be accepted. A prompt less promising than one never seen is
    skipped for some passes, at most `longest_wait`, so that each comes back for a look.

    Args:
        seed (`int`, *optional*, defaults to `0`):
            Seed of the skipping.
        half_life (`float`, *optional*, defaults to `100.0`):
            Optimizer steps in which the evidence on a prompt loses half its weight.
        longest_wait (`int`, *optional*, defaults to `16`):
            Passes after which even the least promising prompt is looked at again.
    """

    def __init__(self, seed=0, half_life=100.0, longest_wait=16):
        self.seed = seed
        self.half_life = half_life
        self.longest_wait = longest_wait
        self._records = {}
        self._num_draws = 0
        # Sums over first looks of p and p^2, unbiased; two looks' worth of a uniform population to start with.
        self._num_first = 2.0
        self._sum_rate = 2.0 / 2
        self._sum_square = 2.0 / 3

    def __len__(self):
        return len(self._records)

    def __getitem__(self, prompt_id):
        return self._records[prompt_id]

    def expected_acceptance(self, prompt_id, step, num_generations):
        """
        Probability that a new group of this prompt would be accepted.

        Args:
            prompt_id (`str`): The prompt.
            step (`int`): Optimizer steps made.
            num_generations (`int`): Completions of the group.

        Returns:
            `float` between 0 and 1.
        """
        prior_correct, prior_wrong = self._prior()
        record = self._records.get(prompt_id)
        if record is None:
            return expected_acceptance(prior_correct, prior_wrong, num_generations)
        fade = 0.5 ** (max(step - record.last_step, 0) / self.half_life)
        return expected_acceptance(
            prior_correct + fade * record.evidence_correct, prior_wrong + fade * record.evidence_wrong, num_generations
        )

    def should_skip(self, prompt_id, step, num_generations):
        """
        Whether to pass over this prompt now. The same on every rank that asks the same questions in the same order.

        Args:
            prompt_id (`str`): The prompt.
            step (`int`): Optimizer steps made.
            num_generations (`int`): Completions of the group.

        Returns:
            `bool`.
        """
        record = self._records.get(prompt_id)
        if record is None:
            return False
        prior = expected_acceptance(*self._prior(), num_generations)
        keep = self.expected_acceptance(prompt_id, step, num_generations) / prior
        keep = max(keep, 1 / self.longest_wait)
        # The hazard of a wait that is uniform over the next 1 / keep passes.
        hazard = keep / max(1 - keep * record.num_skipped, keep)
        if self._draw(prompt_id) < hazard:
            return False
        record.num_skipped += 1
        return True

    def update(self, prompt_id, num_correct, num_scored, step):
        """
        Learns from one generated group.

        Args:
            prompt_id (`str`): The prompt.
            num_correct (`int`): Correct completions.
            num_scored (`int`): Completions that have a reward.
            step (`int`): Optimizer steps made.
        """
        if not 0 <= num_correct <= num_scored:
            raise ValueError(f"Prompt {prompt_id!r} cannot have {num_correct} correct of {num_scored} completions.")
        record = self._records.get(prompt_id)
        if record is None:
            record = self._records[prompt_id] = _Record(last_step=step)
            if num_scored >= 2:
                self._num_first += 1
                self._sum_rate += num_correct / num_scored
                self._sum_square += num_correct * (num_correct - 1) / (num_scored * (num_scored - 1))
        fade = 0.5 ** (max(step - record.last_step, 0) / self.half_life)
        record.evidence_correct = fade * record.evidence_correct + num_correct
        record.evidence_wrong = fade * record.evidence_wrong + num_scored - num_correct
        record.num_seen += 1
        record.num_correct += num_correct
        record.num_scored += num_scored
        record.last_step = step
        record.num_skipped = 0

    def _prior(self):
        """The Beta distribution of pass rates in the population, by its first two moments."""
        mean = self._sum_rate / self._num_first
        variance = self._sum_square / self._num_first - mean**2
        # A population that is nearly all solved or all unsolved has a tiny concentration, but not zero.
        concentration = max(mean * (1 - mean) / max(variance, 1e-6) - 1, 0.01)
        return mean * concentration, (1 - mean) * concentration

    def _draw(self, prompt_id):
        """A uniform number in [0, 1) that depends on the seed, the prompt and the number of draws only."""
        self._num_draws += 1
        text = f"{self.seed}/{self._num_draws}/{prompt_id}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") / 2**64

    def save(self, path):
        """Writes one row per prompt seen as a parquet file, whole or not at all."""
        columns = {"prompt_id": list(self._records)}
        records = [asdict(record) for record in self._records.values()]
        columns["pass_rate"] = [r["num_correct"] / r["num_scored"] if r["num_scored"] else None for r in records]
        for field in fields(_Record):
            columns[field.name] = [record[field.name] for record in records]
        temporary = f"{path}.tmp"
        pq.write_table(pa.table(columns), temporary)
        os.replace(temporary, path)

    def load(self, path):
        """Reads what [`~PromptMemory.save`] wrote."""
        names = [field.name for field in fields(_Record)]
        self._records = {
            row["prompt_id"]: _Record(**{name: row[name] for name in names}) for row in pq.read_table(path).to_pylist()
        }

    def state_dict(self):
        """What a resumed run needs beside the file, JSON-able (`dict`)."""
        return {
            "seed": self.seed,
            "num_draws": self._num_draws,
            "num_first": self._num_first,
            "sum_rate": self._sum_rate,
            "sum_square": self._sum_square,
        }

    def load_state_dict(self, state):
        """Continues from what [`~PromptMemory.state_dict`] returned."""
        self.seed = state["seed"]
        self._num_draws = state["num_draws"]
        self._num_first = state["num_first"]
        self._sum_rate = state["sum_rate"]
        self._sum_square = state["sum_square"]

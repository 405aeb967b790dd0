# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
Real runs of the quickstart's model, and the same runs simulated with the pass rates and lengths of their ledgers.

The ledger says how many completions of each group were correct. The pass rate of a prompt is drawn from its Beta
posterior. The prior is fitted to the groups of its family of problems in the same stretch of the run; groups of other
stretches count less the farther away they are. Lengths are drawn from those of the family, separately for correct and
incorrect completions.
"""

import math
from collections import Counter, defaultdict
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch

from trl_dapo.cli.quickstart import Problems, build_tokenizer, exact_answer_reward
from trl_dapo.run.ledger import read_ledger
from trl_dapo.sampling.example_names import prompt_name

from ..frame.runs import quiet
from ..frame.trainers import DAPO, Arm, load, make_trainer, rollouts_of, train_quietly
from ..sampling_policies import Ours, World, receive
from ..time_to_accuracy import (
    CHECKPOINT_SEED,
    MAX_LENGTH,
    NUM_GENERATIONS,
    NUM_PROMPTS,
    NUM_STEPS,
    RESAMPLE,
    TASKS,
    prompts,
)


STRETCH = 15  # rollouts in which pass rates count as constant
FADES = 0.5  # the weight of observations one stretch away
MAX_GEN_BATCHES = RESAMPLE["dynamic_sampling_max_gen_batches"]


class Spent(NamedTuple):
    """Rounds, completions and tokens that a run sampled."""

    rounds: float
    completions: float
    tokens: float


# ---- The real run ----


def run_for_real(checkpoint, folder, task, settings, num_rollouts, seed):
    """Train; return what was sampled, the dataset, and the rows of the ledger."""
    quiet()
    told = rollouts_of(
        NUM_PROMPTS,
        NUM_GENERATIONS,
        NUM_STEPS,
        max_completion_length=MAX_LENGTH,
        learning_rate=TASKS[task].learning_rate,
        max_steps=num_rollouts * NUM_STEPS,
        seed=seed,
    )
    dataset = prompts(Problems(CHECKPOINT_SEED), TASKS[task].shares, seed)
    arm = Arm(DAPO, {**RESAMPLE, **settings})
    trainer = make_trainer(arm, load(checkpoint), folder, exact_answer_reward, dataset, build_tokenizer(), told)
    log = train_quietly(trainer)
    rounds, completions = (
        sum(entry[f"dynamic_sampling/{name}"] for entry in log) for name in ("rounds", "completions_generated")
    )
    return Spent(rounds, completions, trainer.num_tokens), dataset, read_ledger(folder).to_pylist()


# ---- Pass rates, pure ----


def fit_beta(counts):
    """
    Return the Beta distribution under which the observed counts of correct completions are most likely, from a grid.

    `counts` are pairs of correct and all completions, each with how often it occurred. That further completions were
    requested because the first ones differed does not change the likelihood.
    """
    best, fitted = -math.inf, (1.0, 1.0)
    # Evenly spaced on the log-odds scale, because fewer than one in a thousand completions of a hard problem may be
    # correct.
    for mean in 1 / (1 + np.exp(np.linspace(-9, 9, 61))):
        for concentration in np.geomspace(0.05, 50, 40):
            a, b = mean * concentration, (1 - mean) * concentration
            log_likelihood = sum(
                times * (_log_beta(a + correct, b + scored - correct) - _log_beta(a, b))
                for (correct, scored), times in counts.items()
            )
            if log_likelihood > best:
                best, fitted = log_likelihood, (a, b)
    return fitted


def _log_beta(a, b):
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


def fit_priors(rows):
    """Return the Beta distribution of each family of problems in each stretch of a run."""
    counts = defaultdict(Counter)
    for row in rows:
        counts[row["source"], row["rollout"] // STRETCH][row["correct"], row["scored"]] += 1
    return {key: fit_beta(of_family) for key, of_family in counts.items()}


def draw_pass_rates(rows, priors, names, families, num_stretches, rng):
    """Return the pass rate of each prompt in each stretch of the run, drawn from its posterior."""
    seen = defaultdict(list)
    for row in rows:
        seen[row["prompt_id"]].append((row["rollout"] // STRETCH, row["correct"], row["scored"]))
    rate_NS = np.empty((len(names), num_stretches))
    for i, (name, family) in enumerate(zip(names, families, strict=True)):
        for stretch in range(num_stretches):
            a, b = priors.get((family, stretch), (1.0, 1.0))
            for other, correct, scored in seen[name]:
                weight = FADES ** abs(other - stretch)
                a, b = a + weight * correct, b + weight * (scored - correct)
            rate_NS[i, stretch] = rng.beta(a, b)
    return rate_NS


def lengths_by_kind(rows, reward_name):
    """Return the lengths of all completions by family and by whether they are correct."""
    found = defaultdict(list)
    for row in rows:
        for length, reward in zip(row["lengths"], row[reward_name], strict=True):
            found[row["source"], reward > 0].append(length)
    return found


# ---- The simulated run ----


class Replayed(Ours):
    """The package's `Sampler` on prompts with the pass rates and lengths of a run."""

    def __init__(self, world, target, lengths, families, **settings):
        super().__init__(world, target, **settings)
        self._lengths, self._families = lengths, families
        self.num_tokens = 0

    def _sample(self, requests):
        rewards = []
        for request in requests:
            i = request.group.example["id"]
            num_correct = int(self._world.correct(np.array([i]), request.num_completions)[0])
            num_wrong = request.num_completions - num_correct
            rewards += [1.0] * num_correct + [0.0] * num_wrong
            for is_correct, num in ((True, num_correct), (False, num_wrong)):
                self.num_tokens += self._draw_tokens(self._families[i], is_correct, num)
        return receive(requests, torch.tensor(rewards)[:, None])

    def _draw_tokens(self, family, is_correct, num):
        known = self._lengths.get((family, is_correct)) or self._lengths[family, not is_correct]
        return int(self._world.rng.choice(known, num).sum())


def simulate(dataset, rows, priors, savings, num_rollouts, seed):
    """Return what the same run samples in simulation."""
    rng = np.random.default_rng([seed, 5])
    names, families = [prompt_name(example) for example in dataset], dataset["source"]
    rate_NS = draw_pass_rates(rows, priors, names, families, -(-num_rollouts // STRETCH), rng)
    trace = SimpleNamespace(num_prompts=len(names), num_generations=NUM_GENERATIONS, seed=seed, rate_N=rate_NS[:, 0])
    world = World(trace)
    world.rng = rng
    reward_name = f"rewards/{exact_answer_reward.__name__}"
    policy = Replayed(
        world,
        NUM_PROMPTS,
        lengths_by_kind(rows, reward_name),
        families,
        max_round_size=NUM_PROMPTS,  # as in a run whose engine does not schedule completions
        max_gen_batches=MAX_GEN_BATCHES,
        **savings,
    )
    num_rounds = num_completions = 0
    for rollout in range(num_rollouts):
        world.step, trace.rate_N = rollout, rate_NS[:, rollout // STRETCH]
        step = next(policy)
        num_rounds += step.num_rounds
        num_completions += step.num_generated * NUM_GENERATIONS
    return Spent(num_rounds, num_completions, policy.num_tokens)


def compare(checkpoint, folder, task, settings, savings, num_rollouts, seed=0, num_simulated=5):
    """Return what a real run spent, and what each of its simulations spent."""
    real, dataset, rows = run_for_real(checkpoint, folder, task, settings, num_rollouts, seed)
    priors = fit_priors(rows)
    simulated = [simulate(dataset, rows, priors, savings, num_rollouts, i) for i in range(num_simulated)]
    return real, simulated

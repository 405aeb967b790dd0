# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
The simulated engines of benchmarks/rollout_seconds/, worked out by hand, and the formula for what the screen saves.
"""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from datasets import Dataset

from benchmarks.rollout_seconds import replay, study
from benchmarks.rollout_seconds.engines import ENGINES, Engine, assign, draw_lengths, round_seconds
from benchmarks.rollout_seconds.screen_formula import (
    acceptance_at_saving,
    beta_with_acceptance,
    saving_of_screen,
)
from benchmarks.sampling_policies import World
from trl_dapo.cli.quickstart import exact_answer_reward
from trl_dapo.sampling.example_names import prompt_name


# ---- Engines ----


def test_a_completion_takes_the_slot_that_is_free_first():
    # Two slots: the completions of length 1 and 2 begin at once, and the one of length 3 when the first ends.
    assert assign([1.0, 2.0, 3.0], [0.0, 0.0]) == ([0.0, 0.0, 1.0], [1.0, 2.0, 4.0])
    # Requested at 5, when one slot is busy until 6.
    assert assign([1.0, 1.0], [0.0, 6.0], now=5.0) == ([5.0, 6.0], [6.0, 7.0])


def test_a_round_on_slots_lasts_until_its_last_completion_ends():
    assert round_seconds(Engine(2, math.inf, schedules=True), [1.0, 2.0, 3.0]) == 4.0
    assert round_seconds(Engine(64, math.inf, schedules=True), [1.0, 2.0, 3.0]) == 3.0


def test_without_a_scheduler_every_completion_is_as_long_as_the_longest():
    # A step of 3 completions takes (1 + 3 / 4) / (1 + 1 / 4) = 1.4 times as long as one of 1 completion.
    # There are 3 steps.
    assert round_seconds(Engine(math.inf, 4, schedules=False), [1.0, 2.0, 3.0]) == pytest.approx(3 * 1.4)


def test_with_a_scheduler_a_step_costs_what_its_active_completions_cost():
    # Steps of 3, of 2 and of 1 active completions: (1.75 + 1.5 + 1.25) / 1.25.
    assert round_seconds(Engine(512, 4, schedules=True), [1.0, 2.0, 3.0]) == pytest.approx(3.6)
    # On two slots they are active from 0 to 1, 0 to 2 and 1 to 4: 2 seconds of steps of 2, 2 of steps of 1.
    assert round_seconds(Engine(2, 4, schedules=True), [1.0, 2.0, 3.0]) == pytest.approx((2 * 1.5 + 2 * 1.25) / 1.25)


def test_on_a_gpu_a_round_of_512_takes_as_much_longer_than_one_of_8_as_was_measured():
    gpu = ENGINES["transformers, GPU"]
    # RESULTS.md, `generate` with 64 tokens: 2.29 s next to 1.42 s.
    assert round_seconds(gpu, [1.0] * 512) / round_seconds(gpu, [1.0] * 8) == pytest.approx(2.29 / 1.42, rel=0.02)


def test_lengths_have_the_mean_1_and_end_at_8():
    lengths = np.array(draw_lengths(np.random.default_rng(0), 100_000))
    assert lengths.max() == 8.0
    assert lengths.mean() == pytest.approx(0.98, abs=0.01)  # the part that is cut off is missing
    assert np.median(lengths) == pytest.approx(math.exp(-0.5), rel=0.02)


# ---- What the screen saves ----


def test_uniform_pass_rates_are_found_by_their_acceptance():
    # With uniform pass rates, n completions are all equal with probability 2 / (n + 1).
    assert beta_with_acceptance(7 / 9, 8) == pytest.approx((1.0, 1.0), rel=1e-3)


def test_the_screen_of_uniform_pass_rates_costs_more_than_whole_groups():
    # Whole groups of 8 cost 8 / (7 / 9) = 72 / 7 completions, and three sampled first cost 3 / (1 / 2) + 5 = 11.
    assert saving_of_screen(7 / 9, 8, screen_size=3) == pytest.approx(72 / 7 / 11, rel=1e-3)


def test_a_saving_is_reached_at_the_returned_acceptance_rate_or_never():
    at = acceptance_at_saving(1.5, 16)
    assert saving_of_screen(at, 16) == pytest.approx(1.5, abs=1e-3)
    # Groups of 8: the limit with three sampled first is 8 x 1.5 / (3 x 2.592857) = 1.54.
    assert acceptance_at_saving(1.6, 8) is None


def test_an_acceptance_without_a_beta_distribution_of_that_mean_is_refused():
    with pytest.raises(ValueError, match=r"pass rate of 0\.1 at most 81\.5%"):
        beta_with_acceptance(0.9, 16, mean=0.1)  # all prompts alike: 1 - 0.9^16


def test_the_sampler_saves_with_the_screen_what_the_formula_says():
    carry, screen = (
        study.cost_of(study.play(0.35, 32, 16, setting), 16, {}).completions for setting in (study.CARRY, study.SCREEN)
    )
    assert carry / screen == pytest.approx(saving_of_screen(0.35, 16), rel=0.06)


# ---- The study ----


def test_a_threshold_lies_between_the_rates_that_were_simulated():
    savings = {0.2: 1.8, 0.5: 1.2, 0.8: 1.0}
    # Halfway from 1.8 to 1.2 is halfway from 20% to 50%.
    assert study.crossing(savings, 1.5) == pytest.approx(0.35)
    assert study.crossing(savings, 2.0) is None
    assert study.crossing(savings, 1.0) == 1.0


def test_an_engine_that_samples_ahead_hides_a_rollout_behind_an_update(monkeypatch):
    monkeypatch.setattr(study, "draw_lengths", lambda rng, num: [1.0] * num)
    # Every prompt is solved half the time: hardly a group of 16 in 30,000 is dropped.
    trace = SimpleNamespace(num_prompts=256, num_generations=16, seed=0, rate_N=np.full(256, 0.5))

    def times(ahead):
        policy = study.Ahead(World(trace), 8, ENGINES["vLLM, 512 slots"], carries=True, rollouts_ahead=ahead)
        found = [0.0]
        for policy._world.step in range(12):
            policy.play_until_trained(5.0)
            found.append(policy.now)
        return np.diff(found).tolist()

    assert times(0)[-1] == 6.0  # a round of length 1, then the update
    assert times(1)[-1] == 5.0
    assert times(2)[-1] == 5.0


# ---- Simulated runs ----


def test_groups_that_are_all_correct_or_all_wrong_have_pass_rates_at_both_ends():
    a, b = replay.fit_beta({(0, 8): 10, (8, 8): 10})
    assert a == pytest.approx(b)
    assert a + b < 0.1
    a, b = replay.fit_beta({(0, 8): 500})
    assert a / (a + b) < 0.001  # no correct completion among 4,000
    a, b = replay.fit_beta({(2, 8): 20})
    assert a / (a + b) == pytest.approx(0.25, abs=0.04)
    assert a + b > 10


def rows_of(names, rollout=0):
    """Return groups of 8 with 4 correct completions of 2 tokens and 4 incorrect ones of 5."""
    reward = f"rewards/{exact_answer_reward.__name__}"
    return [
        {
            "rollout": rollout,
            "prompt_id": name,
            "source": "sum",
            "correct": 4,
            "scored": 8,
            "lengths": [2, 5] * 4,
            reward: [1.0, 0.0] * 4,
        }
        for name in names
    ]


def test_a_simulated_run_has_the_pass_rates_and_the_lengths_of_its_ledger():
    dataset = Dataset.from_dict({"prompt": [f"{i}" for i in range(64)], "source": ["sum"] * 64})
    rows = rows_of([prompt_name(example) for example in dataset])
    spent = replay.simulate(dataset, rows, replay.fit_priors(rows), {"carries": True}, num_rollouts=10, seed=0)
    # Nearly every group of 8 is accepted at a pass rate near one half, and half the completions have 2 tokens.
    assert spent.completions == pytest.approx(10 * 16 * 8, rel=0.1)
    assert spent.tokens / spent.completions == pytest.approx((2 + 5) / 2, rel=0.02)


def test_older_observations_count_less():
    rows = [{"rollout": 0, "prompt_id": "a", "source": "sum", "correct": 800, "scored": 800}]
    rows += [{"rollout": 150, "prompt_id": f"{i}", "source": "sum", "correct": 4, "scored": 8} for i in range(20)]
    rates = replay.draw_pass_rates(rows, replay.fit_priors(rows), ["a"], ["sum"], 11, np.random.default_rng(0))
    assert rates[0, 0] > 0.9
    # Ten stretches later 800 successes count 800 / 2^10, which is less than one, and half of the family is correct.
    assert rates[0, 10] == pytest.approx(0.5, abs=0.2)

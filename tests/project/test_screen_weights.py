# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Weights of benchmarks/savings/: a screened batch has the gradient of whole groups, and the trainer applies them."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from helpers import ScriptedTrainer, number, prompts, right, spy_on_training, tiny_config

from benchmarks.savings.weighted import ScreenAndMemoryWeighted, ScreenWeighted
from benchmarks.savings.weights import normalized, probability_to_pass, screen_weight, share_effective
from trl_dapo.sampling.example_names import prompt_name
from trl_dapo.sampling.prompt_memory import PromptMemory, _Record


# ---- The weight of a group ----


def test_one_correct_completion_of_eight_is_among_the_first_three_in_three_of_eight_cases():
    assert probability_to_pass([1.0] + [0.0] * 7, 3) == pytest.approx(3 / 8)
    assert screen_weight([0.0] * 7 + [1.0], 3) == pytest.approx(8 / 3)
    # Four of eight: 2 x C(4, 3) = 8 of the C(8, 3) = 56 draws are all equal.
    assert screen_weight([0.0, 1.0] * 4, 3) == pytest.approx(56 / 48)


def test_graded_rewards_pass_unless_all_drawn_have_one_value():
    # Two draws of (0, 0, 0, 0.5, 0.5, 1): C(3, 2) + C(2, 2) + 0 = 4 of the C(6, 2) = 15 pairs are equal.
    assert probability_to_pass([0.0, 0.0, 0.0, 0.5, 0.5, 1.0], 2) == pytest.approx(11 / 15)
    # Values that differ only by rounding are the same value.
    assert probability_to_pass([0.0, 1e-9, 0.0, 0.5, 0.5, 1.0], 2) == pytest.approx(11 / 15)


def test_a_completion_without_a_score_does_not_make_the_first_ones_differ():
    # Only one of the C(4, 2) = 6 pairs of (1, 0, nothing, nothing) differs.
    assert probability_to_pass([1.0, 0.0, math.nan, math.nan], 2) == pytest.approx(1 / 6)


def test_a_group_that_was_requested_whole_weighs_one():
    assert screen_weight([1.0, 0.0, 0.0, 0.0], 4) == 1.0


def test_normalized_weights_have_the_mean_1_over_tokens():
    # Group 1 has 10 tokens of weight 2, group 2 has 30 of weight 1: the mean is (20 + 30) / 40 = 1.25.
    assert normalized([2.0, 1.0], [10, 30]) == pytest.approx([1.6, 0.8])


def test_unequal_weights_leave_fewer_effective_groups():
    assert share_effective([2.0, 2.0]) == pytest.approx(1.0)
    # (3 + 1)^2 / (2 (9 + 1)) = 16 / 20.
    assert share_effective([3.0, 1.0]) == pytest.approx(0.8)


# ---- The gradient of a batch, by enumeration of all outcomes ----


def group_gradient(outcome, probabilities, rewards):
    """
    Return the policy gradient of one group by the logits, with advantages in units of the group's standard deviation.
    """
    rewards_G = rewards[list(outcome)]
    advantages_G = (rewards_G - rewards_G.mean()) / (rewards_G.std() + 1e-4)
    score_GA = np.eye(len(probabilities))[list(outcome)] - probabilities  # of a softmax
    return advantages_G @ score_GA


def expected_gradient(probabilities, rewards, num_generations, screen_size, weigh):
    """Return what a prompt adds to a batch on average, if a group trains when `screen_size` first rewards differ."""
    total = np.zeros(len(probabilities))
    for outcome in itertools.product(range(len(probabilities)), repeat=num_generations):
        rewards_G = rewards[list(outcome)]
        if len(set(rewards_G[:screen_size])) > 1:
            weight = weigh(rewards_G.tolist(), screen_size)
            total += weight * probabilities[list(outcome)].prod() * group_gradient(outcome, probabilities, rewards)
    return total


VERDICTS = np.array([0.0, 1.0])
GRADES = np.array([0.0, 0.5, 1.0])
CASES = [
    *((np.array([1 - rate, rate]), VERDICTS, 6, first) for rate in (0.02, 0.3, 0.9) for first in (2, 3, 5)),
    *((np.array(shares), GRADES, 5, first) for shares in ([0.9, 0.08, 0.02], [0.2, 0.3, 0.5]) for first in (2, 3, 4)),
]


@pytest.mark.parametrize(("probabilities", "rewards", "num_generations", "screen_size"), CASES)
def test_a_screened_and_weighted_group_has_the_gradient_of_a_whole_one(
    probabilities, rewards, num_generations, screen_size
):
    whole = expected_gradient(probabilities, rewards, num_generations, num_generations, lambda *_: 1.0)
    screened = expected_gradient(probabilities, rewards, num_generations, screen_size, screen_weight)
    biased = expected_gradient(probabilities, rewards, num_generations, screen_size, lambda *_: 1.0)
    assert np.abs(screened - whole).max() < 1e-12
    assert np.abs(biased).max() < 0.999 * np.abs(whole).max()  # without weights it is smaller


def test_a_batch_of_prompts_with_different_pass_rates_keeps_its_direction_only_with_weights():
    """Each prompt has its own screen, as `"auto"` chooses, and the logit of each is its own parameter."""
    rates, firsts = (0.05, 0.5, 0.85), (2, 4, 3)

    def of_batch(firsts, weigh):
        found = []
        for rate, first in zip(rates, firsts, strict=True):
            found.append(expected_gradient(np.array([1 - rate, rate]), VERDICTS, 6, first, weigh)[1])
        return np.array(found)

    whole = of_batch((6, 6, 6), lambda *_: 1.0)
    assert of_batch(firsts, screen_weight) == pytest.approx(whole, abs=1e-12)
    # Without weights the hardest prompt, which is screened hardest, has less than half of its share.
    biased = of_batch(firsts, lambda *_: 1.0)
    assert biased[0] / biased[1] < 0.5 * whole[0] / whole[1]


# ---- The trainer ----


def one_or_two_right():
    """
    Reward function: the first of 4 completions is correct for prompts 1, 3, ...; the first and the third, which are
    longer, for prompts 2, 4, ...
    """
    seen = Counter()

    def script(text, i):
        seen[text] += 1
        place = seen[text] % 4
        if number(text) % 2:
            return "right" if place == 1 else "wrong"
        return "right!!" if place in (1, 3) else "wrong!!"

    return script


def trained_advantages(trainer_class, tiny_model, tmp_path, num_passes=None, **settings):
    """Return the advantages of correct and of incorrect completions that train, by prompt."""

    class Trainer(ScriptedTrainer, trainer_class):
        pass

    settings = {"dynamic_sampling_screen": "2", "shuffle_dataset": False, "max_steps": 1, **settings}
    dataset = prompts(400)
    trainer = Trainer(
        tiny_model, right, tiny_config(tmp_path, **settings), train_dataset=dataset, script=one_or_two_right()
    )
    for i, num in (num_passes or {}).items():
        memory = trainer._sampler.selection.find(PromptMemory)
        memory._records[prompt_name(dataset[i])] = _Record(num_passes=num)
    seen = spy_on_training(trainer)
    trainer.train()
    return trainer, {(number(text), completion[:5]): advantage for text, completion, advantage, _ in seen}


def test_the_trainer_multiplies_advantages_by_one_over_the_probability_to_pass(tiny_model, tmp_path):
    trainer, found = trained_advantages(ScreenWeighted, tiny_model, tmp_path)
    # One of four is correct in prompts 1 and 3: 3 of 6 pairs differ, the weight is 2, and 4 completions have 24
    # tokens. Two are correct in prompts 0 and 2: 4 of 6 pairs differ, the weight is 3 / 2, and 4 completions have 32
    # tokens. The mean over tokens is (2 x 24 x 2 + 2 x 32 x 3 / 2) / 112 = 12 / 7, which leaves 7 / 6 and 7 / 8.
    # Advantages are in standard deviations, 1 / 2 and 1 / sqrt(3).
    assert found == pytest.approx(
        {
            (0, "right"): 0.5 * math.sqrt(3) * 7 / 8,
            (0, "wrong"): -0.5 * math.sqrt(3) * 7 / 8,
            (1, "right"): 0.75 * 2 * 7 / 6,
            (1, "wrong"): -0.25 * 2 * 7 / 6,
            (2, "right"): 0.5 * math.sqrt(3) * 7 / 8,
            (2, "wrong"): -0.5 * math.sqrt(3) * 7 / 8,
            (3, "right"): 0.75 * 2 * 7 / 6,
            (3, "wrong"): -0.25 * 2 * 7 / 6,
        },
        rel=1e-3,
    )
    log = trainer.state.log_history[0]
    assert log["weights/largest"] == pytest.approx(2)
    assert log["weights/share_effective"] == pytest.approx(7**2 / (4 * 12.5))  # (2 + 2 + 1.5 + 1.5)^2, squares 12.5


def test_the_trainer_does_not_change_whole_groups(tiny_model, tmp_path):
    settings = {"dynamic_sampling_screen": None}
    _, weighted = trained_advantages(ScreenWeighted, tiny_model, tmp_path / "weighted", **settings)
    _, plain = trained_advantages(object, tiny_model, tmp_path / "plain", **settings)
    assert weighted == pytest.approx(plain, rel=1e-6)
    assert plain[1, "right"] == pytest.approx(1.5, rel=1e-3)


def test_the_memory_weights_a_visit_by_the_passes_that_it_represents_up_to_four(tiny_model, tmp_path):
    settings = {"dynamic_sampling_memory": True}
    num_passes = {0: 1, 1: 3, 2: 9}
    _, found = trained_advantages(ScreenAndMemoryWeighted, tiny_model, tmp_path, num_passes, **settings)
    # Weights: 3/2, 2 x 3, 3/2 x 4, and 2 for prompt 3, of which nothing is known. Their mean over tokens is
    # (3/2 x 32 + 6 x 24 + 6 x 32 + 2 x 24) / 112 = 432 / 112 = 27 / 7.
    of_right = {i: found[i, "right"] for i in range(4)}
    assert of_right == pytest.approx(
        {
            0: 0.5 * math.sqrt(3) * 1.5 * 7 / 27,
            1: 0.75 * 2 * 6 * 7 / 27,
            2: 0.5 * math.sqrt(3) * 6 * 7 / 27,
            3: 0.75 * 2 * 2 * 7 / 27,
        },
        rel=1e-3,
    )

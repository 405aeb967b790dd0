# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The acceptance rate and the size of a round, with examples computed by hand."""

import itertools
import json
import math
import random

import pytest

from trl_dapo.sampling.round_size import MIN_RATE, AcceptanceRate


pytestmark = pytest.mark.fast


def learned(num_accepted, num_groups, rounds=30):
    """An estimate after many equal rounds."""
    acceptance = AcceptanceRate()
    for _ in range(rounds):
        acceptance.update(num_accepted, num_groups)
    return acceptance


# ---- How many prompts ----


def test_the_first_round_of_a_run_asks_for_the_batch_itself_though_nothing_seen_is_a_half():
    assert AcceptanceRate().round_size(512, 512) == 512
    assert AcceptanceRate().rate == 0.5


def test_a_round_asks_for_the_deficit_over_the_rate_plus_a_margin_the_larger_the_smaller_the_deficit():
    acceptance = learned(500, 1000)
    # 1024 on average, 512 +- 16 of them accepted. One more round costs 0.16 x 512 = 82 groups, and phi(z) = 16 / 82 at
    # z = 1.20: 1.2 x 16 = 19 groups or 38 prompts, and a few more for the uncertainty of the rate.
    assert 1024 + 38 < acceptance.round_size(512, 512) < 1024 + 46
    acceptance.update(504, 1008)
    # 16 on average for the 8 missing, 8 +- 2 of them accepted, and phi(z) = 2 / 82 at z = 2.36. With 29 prompts 14.5
    # +- 2.69 are accepted: 14.5 - 2.36 x 2.69 = 8.1. With 28 prompts: 14 - 2.36 x 2.65 = 7.7.
    assert acceptance.round_size(8, 512) == 29


def test_where_surplus_is_carried_a_second_round_costs_four_times_as_much():
    acceptance = learned(500, 1000)
    # One more round costs 0.64 x 512 = 328 groups: phi(z) = 16 / 328 at z = 2.05, 2.05 x 16 = 33 groups or 66 prompts,
    # and a few more for the uncertainty of the rate.
    assert 1024 + 66 < acceptance.round_size(512, 512, carries=True) < 1024 + 78
    # For a batch of 16 the cost stays at 12 groups, above 0.64 x 16: a quarter of what trains is carried already.
    assert acceptance.round_size(16, 16, carries=True) == acceptance.round_size(16, 16)


def test_a_rate_that_is_a_mere_guess_gets_no_margin():
    acceptance = AcceptanceRate()
    acceptance.update(10, 20)
    # Twice the batch, +- 10% for a rate of 0.5 +- 0.1: a margin would cost more than the round that it may save.
    assert acceptance.round_size(512, 512) == 1024


# ---- The rate ----


def test_one_round_is_its_share_with_two_groups_of_doubt():
    acceptance = AcceptanceRate()
    acceptance.update(30, 98)
    assert acceptance.rate == pytest.approx((30 + 1) / (98 + 2), abs=0.001)  # except for what a trend might add


def test_a_trend_is_foreseen():
    acceptance = AcceptanceRate()
    for step in range(100):
        acceptance.update(200 + 5 * step, 1000)  # 0.200, 0.205 ... 0.695
    assert acceptance.rate == pytest.approx(0.700, abs=0.003)  # without the trend the estimate would lag at 0.6


def test_a_jump_is_met_within_a_round():
    acceptance = learned(330, 1000)
    acceptance.update(850, 1000)
    assert acceptance.rate == pytest.approx(0.85, abs=0.02)


@pytest.mark.parametrize("direction", [1, -1])
def test_a_trend_does_not_lead_beyond_what_a_share_can_be(direction):
    acceptance = AcceptanceRate()
    for share in range(0, 100, 2)[::direction]:
        acceptance.update(share * 100, 10_000)
    acceptance.update(9_999 if direction > 0 else 1, 10_000)
    assert 0 < acceptance.rate < 1
    assert 512 <= acceptance.round_size(512, 512) <= 512 / MIN_RATE


def test_a_resumed_estimate_goes_on_bit_for_bit():
    rng = random.Random(0)
    straight, resumed = AcceptanceRate(), AcceptanceRate()
    for num_accepted in (rng.randint(0, 48) for _ in range(20)):
        straight.update(num_accepted, 48)
    resumed.load_state_dict(json.loads(json.dumps(straight.state_dict())))
    for num_accepted in itertools.chain([0, 48], (rng.randint(0, 48) for _ in range(20))):
        assert resumed._fit() == straight._fit()
        straight.update(num_accepted, 48)
        resumed.update(num_accepted, 48)
    assert resumed.state_dict() == straight.state_dict()


@pytest.mark.parametrize(("num_accepted", "wanted"), [(600, 96), (300, 64), (100, 96), (600, 3.5)])
def test_hardly_ever_more_are_accepted_than_are_wanted_and_one_more_prompt_might_be_too_many(num_accepted, wanted):
    rate = learned(num_accepted, 1000)

    def most(n):
        return n * rate.rate + 1.5 * math.sqrt(n * rate.rate * (1 - rate.rate) + n**2 * rate._fit()[1])

    num = rate.most_prompts_without_surplus(wanted)
    assert most(num) <= wanted < most(num + 1)


def test_where_nothing_was_ever_accepted_no_more_is_asked_for_than_is_wanted():
    rate = learned(0, 1000)
    assert rate.most_prompts_without_surplus(96) == 96
    assert rate.most_prompts_without_surplus(0) == rate.most_prompts_without_surplus(-3.5) == 0

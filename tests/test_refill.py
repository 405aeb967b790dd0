# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Rounds of one rollout batch, by hand."""

import itertools
import json
import random

import pytest

from trl_dapo.sampling.refill import MIN_RATE, AcceptanceRate, Refill


YES, NO = None, "all_wrong"


def learned(num_accepted, num_judged, rounds=30):
    """An estimate that has seen many equal rounds."""
    acceptance = AcceptanceRate()
    for _ in range(rounds):
        acceptance.update(num_accepted, num_judged)
    return acceptance


def new(target, **options):
    return Refill(target=target, acceptance=options.pop("acceptance", AcceptanceRate()), **options)


# ---- What trains ----


def test_the_first_accepted_groups_in_prompt_order_train():
    refill = new(2)
    refill.offer([NO, YES, YES, YES])
    assert refill.full
    assert refill.taken == [1, 2]
    assert refill.surplus == [3]


def test_indices_run_on_over_the_rounds():
    refill = new(3)
    refill.offer([YES, NO])
    refill.offer([NO, YES, YES, YES])
    assert refill.taken == [0, 3, 4]
    assert refill.surplus == [5]
    assert refill.num_rounds == 2
    assert refill.num_generated == 6


def test_dropped_groups_are_counted_by_reason():
    refill = new(4)
    refill.offer(["all_wrong", YES, "all_correct", "all_wrong"])
    refill.offer(["masked"])
    assert refill.dropped == {"all_wrong": 2, "all_correct": 1, "masked": 1}


def test_the_last_round_counts_too():
    """ms-swift generates its last round and never looks at it."""
    refill = new(1, max_rounds=3)
    refill.offer([NO])
    refill.offer([NO])
    refill.offer([YES])
    assert refill.full
    assert not refill.exhausted
    assert refill.taken == [0 + 1 + 1]


def test_max_rounds_is_the_number_of_rounds_and_not_one_more():
    """NeMo RL makes one more than its setting says."""
    refill = new(1, max_rounds=2)
    refill.offer([NO])
    assert not refill.done
    refill.offer([NO])
    assert refill.exhausted
    with pytest.raises(RuntimeError, match="has had its 2 rounds"):
        refill.next_round_size()
    with pytest.raises(RuntimeError, match="has had its 2 rounds"):
        refill.offer([YES])


def test_what_was_accepted_before_the_limit_still_trains():
    """ms-swift throws 511 accepted groups of 512 away and trains on the unfiltered batch."""
    refill = new(512, max_rounds=2)
    refill.offer([YES] * 500 + [NO] * 12)
    refill.offer([YES] * 11 + [NO])
    assert refill.exhausted
    assert len(refill.taken) == 511
    assert refill.shortfall == 1


@pytest.mark.parametrize("max_rounds", [0, -1])
def test_without_a_limit_it_never_gives_up(max_rounds):
    refill = new(1, max_rounds=max_rounds)
    for _ in range(100):
        refill.offer([NO])
    assert not refill.done
    refill.offer([YES])
    assert refill.full


def test_carried_groups_train_and_need_not_be_generated():
    refill = new(4, num_carried=3)
    assert refill.shortfall == 1
    refill.offer([YES, YES])
    assert refill.taken == [0]
    assert refill.surplus == [1]


def test_a_batch_that_was_carried_whole_needs_no_round():
    refill = new(4, num_carried=5)
    assert refill.full
    assert refill.num_rounds == 0
    assert refill.taken == []


def test_surplus_and_dropped_and_taken_are_all_that_was_generated():
    rng = random.Random(0)
    for target in (1, 3, 16):
        refill = new(target, max_rounds=4)
        while not refill.done:
            refill.offer([rng.choice([YES, NO]) for _ in range(refill.next_round_size())])
        everything = len(refill.taken) + len(refill.surplus) + refill.dropped.total()
        assert everything == refill.num_generated
        assert len(refill.taken) + refill.shortfall == target


def test_which_accepted_groups_train_does_not_depend_on_their_length():
    """
    Lengths are dealt to the groups of 400 simulated rollouts: the means over taken and over not-taken accepted groups
    agree within 3 standard errors. Taking the first to finish, as slime does, would be further off than that.
    """
    rng = random.Random(0)
    acceptance, taken, left, first_done = AcceptanceRate(), [], [], []
    for _ in range(400):
        refill = new(16, acceptance=acceptance)
        lengths = []
        while not refill.done:
            size = refill.next_round_size()
            lengths += [rng.lognormvariate(6, 1) for _ in range(size)]
            refill.offer([rng.choice([YES, NO]) for _ in range(size)])
        taken += [lengths[i] for i in refill.taken]
        left += [lengths[i] for i in refill.surplus]
        accepted = sorted(lengths[i] for i in refill.taken + refill.surplus)
        first_done += accepted[:16] if len(accepted) > 16 else []

    def mean(values):
        return sum(values) / len(values)

    spread = mean([(x - mean(taken)) ** 2 for x in taken]) ** 0.5
    error = spread * (1 / len(taken) + 1 / len(left)) ** 0.5
    assert abs(mean(taken) - mean(left)) < 3 * error
    assert mean(first_done) < mean(taken) - 3 * error  # the bias that the test would find


# ---- How many prompts ----


def test_the_first_round_of_a_run_asks_for_the_batch_itself():
    assert new(512).next_round_size() == 512


def test_a_round_asks_for_the_deficit_over_the_rate_plus_a_margin():
    refill = new(512, acceptance=learned(500, 1000))
    size = refill.next_round_size()
    # 1024 on average, 512 +- 16 of them accepted. One more round costs 0.16 x 512 = 82 groups, and phi(z) = 16 / 82 at
    # z = 1.20: 1.2 x 16 = 19 groups or 38 prompts, and a little for the uncertainty of the rate.
    assert 1024 + 38 < size < 1024 + 46


def test_a_small_deficit_gets_the_larger_margin():
    refill = new(512, acceptance=learned(500, 1000))
    refill.offer([YES] * 504 + [NO] * 504)
    # 16 on average for the 8 missing, 8 +- 2 of them accepted, and phi(z) = 2 / 82 at z = 2.36.
    # Of 29, 14.5 +- 2.69 are accepted: 14.5 - 2.36 x 2.69 = 8.1. Of 28: 14 - 2.36 x 2.65 = 7.7.
    assert refill.next_round_size() == 29


def test_a_rate_that_is_a_mere_guess_gets_no_margin():
    acceptance = AcceptanceRate()
    acceptance.update(10, 20)
    # Twice the batch, +- 10 % for a rate of 0.5 +- 0.1: a margin would cost more than the round it may save.
    assert new(512, acceptance=acceptance).next_round_size() == 1024


def test_rounds_are_multiples_rounded_up():
    for num_accepted in range(1, 30):
        plain = new(10, acceptance=learned(num_accepted, 30)).next_round_size()
        multiple = new(10, acceptance=learned(num_accepted, 30), multiple_of=8).next_round_size()
        assert multiple % 8 == 0
        assert plain <= multiple < plain + 8


def test_the_cap_is_rounded_down_but_never_to_nothing():
    assert new(100, max_round_size=30, multiple_of=8).next_round_size() == 24
    assert new(100, max_round_size=3, multiple_of=8).next_round_size() == 8


def test_a_fixed_multiplier_asks_for_the_same_every_round():
    refill = new(10, batch_multiplier=2.55, max_rounds=5)
    assert refill.next_round_size() == 25
    refill.offer([YES] + [NO] * 24)
    assert refill.next_round_size() == 25
    assert new(10, batch_multiplier=2.55, multiple_of=4).next_round_size() == 28
    assert new(10, batch_multiplier=2.55, max_round_size=20).next_round_size() == 20


def test_a_run_that_accepts_nothing_does_not_generate_ever_more():
    refill = new(512, max_rounds=10)
    while not refill.done:
        refill.offer([NO] * refill.next_round_size())
    assert refill.exhausted
    assert refill.num_generated == 10 * 512


@pytest.mark.parametrize("num_accepted", [0, 1, 2, 10])
def test_rounds_stay_bounded_however_low_the_rate(num_accepted):
    acceptance = learned(num_accepted, 100_000)
    refill = new(512, acceptance=acceptance, max_rounds=0)
    for _ in range(50):
        assert 1 <= refill.next_round_size() <= 512 / MIN_RATE
        refill.offer([NO] * 512)


def test_a_run_that_accepts_everything_asks_for_little_more_than_the_batch():
    assert 512 <= new(512, acceptance=learned(512, 512)).next_round_size() <= 516


def test_waste_and_rounds_of_a_steady_run_are_small():
    """512 prompts at an acceptance rate of 1/3: the promise is 1.05 times the least and 1.2 rounds."""
    rng = random.Random(1)
    acceptance = AcceptanceRate()
    num_accepted, num_rounds, num_steps = 0, 0, 60
    for step in range(num_steps + 5):
        refill = new(512, acceptance=acceptance)
        while not refill.done:
            refill.offer([YES if rng.random() < 1 / 3 else NO for _ in range(refill.next_round_size())])
        if step >= 5:
            num_accepted += len(refill.taken) + len(refill.surplus)
            num_rounds += refill.num_rounds
    assert num_accepted / (512 * num_steps) < 1.05
    assert num_rounds / num_steps < 1.3


def test_a_missing_round_is_refused():
    with pytest.raises(ValueError, match="at least one group"):
        new(1).offer([])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": 0}, "`target`.*0"),
        ({"target": 4, "multiple_of": 0}, "`multiple_of`.*0"),
        ({"target": 4, "max_round_size": 0}, "`max_round_size`.*0"),
        ({"target": 4, "batch_multiplier": 0.2}, "`batch_multiplier`.*0.2"),
        ({"target": 4, "num_carried": -1}, "`num_carried`.*-1"),
    ],
)
def test_impossible_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Refill(acceptance=AcceptanceRate(), **options)


# ---- The acceptance rate ----


def test_nothing_seen_is_a_half():
    assert AcceptanceRate().rate == 0.5


def test_one_round_is_its_share_with_two_groups_of_doubt():
    acceptance = AcceptanceRate()
    acceptance.update(30, 98)
    assert acceptance.rate == pytest.approx((30 + 1) / (98 + 2), abs=0.001)  # but for what a trend might add


def test_the_rate_of_many_equal_rounds_is_theirs():
    acceptance = learned(330, 1000, rounds=200)
    assert acceptance.rate == pytest.approx(0.33, abs=0.001)
    # 0.05 of the weight comes with every round, so about 20 rounds count; a fitted line counts about half of that.
    assert 0.33 * 0.67 / 20_000 < acceptance.variance < 0.33 * 0.67 / 8_000


def test_a_trend_is_foreseen():
    acceptance = AcceptanceRate()
    for step in range(100):
        acceptance.update(200 + 5 * step, 1000)  # 0.200, 0.205 ... 0.695
    assert acceptance.rate == pytest.approx(0.700, abs=0.003)  # without the trend it would lag at 0.6


def test_a_jump_is_met_within_a_round():
    acceptance = learned(330, 1000)
    acceptance.update(850, 1000)
    assert acceptance.rate == pytest.approx(0.85, abs=0.02)


def test_noise_is_not_taken_for_a_jump():
    rng = random.Random(0)
    acceptance, rates = AcceptanceRate(), []
    for _ in range(200):
        acceptance.update(sum(rng.random() < 0.5 for _ in range(100)), 100)
        rates.append(acceptance.rate)
    # One round alone has a standard deviation of 0.05.
    assert max(abs(rate - 0.5) for rate in rates[50:]) < 0.06
    assert sum((rate - 0.5) ** 2 for rate in rates[50:]) / 150 < 0.02**2


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_the_rate_stays_strictly_between_zero_and_one(share):
    acceptance = AcceptanceRate()
    for size in (1, 16, 100_000, 1):
        acceptance.update(int(share * size), size)
        assert 0 < acceptance.rate < 1
        assert acceptance.variance > 0


@pytest.mark.parametrize("direction", [1, -1])
def test_a_trend_does_not_lead_beyond_what_a_share_can_be(direction):
    acceptance = AcceptanceRate()
    for share in range(0, 100, 2)[::direction]:
        acceptance.update(share * 100, 10_000)
    acceptance.update(9_999 if direction > 0 else 1, 10_000)
    assert 0 < acceptance.rate < 1
    assert 512 <= new(512, acceptance=acceptance).next_round_size() <= 512 / MIN_RATE


def test_impossible_counts_are_refused():
    with pytest.raises(ValueError, match="5 of 4"):
        AcceptanceRate().update(5, 4)


def test_a_resumed_estimate_goes_on_bit_for_bit():
    rng = random.Random(0)
    straight, resumed = AcceptanceRate(), AcceptanceRate()
    for num_accepted in (rng.randint(0, 48) for _ in range(20)):
        straight.update(num_accepted, 48)
    resumed.load_state_dict(json.loads(json.dumps(straight.state_dict())))
    for num_accepted in itertools.chain([0, 48], (rng.randint(0, 48) for _ in range(20))):
        assert (resumed.rate, resumed.variance) == (straight.rate, straight.variance)
        straight.update(num_accepted, 48)
        resumed.update(num_accepted, 48)
    assert resumed.state_dict() == straight.state_dict()

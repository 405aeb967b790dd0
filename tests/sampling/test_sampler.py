# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Rollouts of the sampler by hand: which rounds it asks for, what trains, what stays."""

import json
import math
import random

import pytest
import torch
from datasets import Dataset, IterableDataset

from trl_dapo.sampling.drop_reasons import Criterion, drop_reasons
from trl_dapo.sampling.prompt_memory import PromptMemory
from trl_dapo.sampling.prompts import PromptStream
from trl_dapo.sampling.refill import Group
from trl_dapo.sampling.report import rollout_log
from trl_dapo.sampling.rollout import Totals
from trl_dapo.sampling.round_size import AcceptanceRate
from trl_dapo.sampling.rounds import Ask, Round, Rows, select_ages
from trl_dapo.sampling.sampler import Sampler
from trl_dapo.sampling.screening import state_of


pytestmark = pytest.mark.fast


YES, NO = None, "all_wrong"
G = 2


def stream(num_prompts=10_000, seed=0):
    """Prompts whose names are their numbers, without the hash."""
    dataset = Dataset.from_dict({"prompt": [str(i) for i in range(num_prompts)], "id": list(range(num_prompts))})
    made = PromptStream(dataset, seed=seed, shuffle=False)
    made._source._names = list(dataset["prompt"])
    return made


def new(target, prompts=None, num_generations=G, **options):
    sampler = Sampler(prompts or stream(), target=target, num_generations=num_generations, **options)
    sampler.begin()
    return sampler


def learn(sampler, num_accepted, num_groups, rounds=30):
    """What many equal rounds teach of the acceptance rate."""
    for _ in range(rounds):
        sampler.acceptance.update(num_accepted, num_groups)
    return sampler


def foreseeing(rate):
    """A memory that expects this share of any prompt's groups to be accepted."""
    return type("Foresees", (PromptMemory,), {"expected_acceptance": lambda *_: rate})()


def blank_round(names, num_rows, rewards=None, **options):
    """A round of which nothing matters but how large it is, and what it may be told."""
    blank_B = torch.zeros(num_rows)
    rewards_BF = blank_B[:, None] if rewards is None else torch.tensor(rewards)[:, None]
    rows = options.pop("rows", None) or Rows.empty()
    return Round(names, rows, rewards_BF, blank_B, blank_B.bool(), {}, {}, **options)


def play(sampler, reasons, counts=None):
    """One round, whatever the sampler would have asked for."""
    sampler.add_round(blank_round([str(i) for i in range(len(reasons))], len(reasons) * G), reasons, counts)
    return sampler


def play_rollout(sampler, rng, rate=1 / 3):
    """Rounds until the sampler asks for no more, of which a share of groups is accepted."""
    sampler.begin()
    while prompts := sampler.next_prompts():
        play(sampler, [YES if rng.random() < rate else NO for _ in prompts])


def carried(num_groups, age=1):
    return blank_round([""] * num_groups, num_groups * G, ages=[age] * num_groups)


def carry_on(sampler):
    """Ends a rollout as the trainer does: what is left over is carried."""
    batch = sampler.batch()
    sampler.carry([carried(len(batch.carry))] if batch.carry else [])
    return batch


def saved(sampler):
    """What a checkpoint holds of a sampler."""
    return json.loads(json.dumps(sampler.state_dict()))


def resumed(state, rows=None, **options):
    """Another sampler, and what of the state did not fit it."""
    again = Sampler(**{"stream": stream(), "target": 4, "num_generations": G, "carries": True, **options})
    return again, again.load_state_dict(json.loads(json.dumps(state)), rows)


def names(prompts):
    return [name for name, *_ in prompts]


# ---- Rounds ----


def test_groups_are_counted_over_the_rounds():
    sampler = play(play(new(3), [YES, NO]), ["masked", YES, YES, YES])
    batch = sampler.batch()
    assert batch.train == [Group(0, 0), Group(1, 1), Group(1, 2)]
    assert [sampler.rollout.number_of(group) for group in batch.train] == [1, 2, 2]
    assert sampler.totals == Totals(groups_sampled=6, groups_trained=3, tokens_generated=0, barren_rollouts=0)
    assert (sampler.rollout.num_rounds, sampler.rollout.num_groups, sampler.rollout.shortfall) == (2, 6, 0)
    assert sampler.rollout.reasons == {"all_wrong": 1, "masked": 1}
    assert sampler.next_prompts() == []


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_a_screen_that_is_left_out_as_a_run_begins_asks_for_whole_groups_alone(ahead):
    """As where a reward function turns out to compare the completions of a group."""
    sampler = new(4, num_generations=4, screen="3", carries=True, ahead=ahead)
    sampler.screen = None
    sampler.begin()
    sampler.draw_ahead()
    assert {ask.num for ask in [*sampler.in_flight, *sampler.next_prompts()]} == {4}


def test_the_limit_counts_batches_and_not_one_more_and_the_last_round_counts_too():
    """NeMo RL makes one more than its setting says; ms-swift generates its last round and never looks at it."""
    sampler, other = (play(new(1, max_gen_batches=2.0), [NO]) for _ in range(2))
    assert len(sampler.next_prompts()) == 1
    play(sampler, [NO])
    assert sampler.next_prompts() == []
    assert (sampler.batch().train, sampler.num_short_rollouts) == ([], 1)
    play(other, [YES])
    assert (other.batch().train, other.num_short_rollouts) == ([Group(1, 0)], 0)


def test_what_was_accepted_before_the_limit_still_trains():
    """ms-swift throws 511 accepted groups of 512 away and trains on the unfiltered batch."""
    sampler = play(play(new(512, max_gen_batches=1.03), [YES] * 500 + [NO] * 12), [YES] * 11 + [NO])
    assert sampler.next_prompts() == []
    assert len(sampler.batch().train) == 511
    assert sampler.rollout.shortfall == 1


NO_LIMIT = {"max_gen_batches": 0.0, "max_empty_batches": 3.0}


@pytest.mark.parametrize(
    ("options", "verdicts", "gives_up"),
    [
        ({"max_gen_batches": 0.0}, [NO] * 100, False),  # it never gives up
        (NO_LIMIT, [NO] * 5, False),
        (NO_LIMIT, [NO] * 6, True),  # a batch is two groups
        (NO_LIMIT, [NO] * 5 + [YES] + [NO] * 5, False),
        (NO_LIMIT, [NO] * 5 + [YES] + [NO] * 6, True),  # one group, and nothing since: it would never end
    ],
)
def test_without_a_limit_a_rollout_ends_when_so_many_batches_in_a_row_have_no_accepted_group(
    options, verdicts, gives_up
):
    sampler = new(2, **options)
    for verdict in verdicts:
        play(sampler, [verdict])
    assert sampler.has_given_up is gives_up
    assert (sampler.next_prompts() == []) is gives_up
    assert len(sampler.batch().train) == verdicts.count(YES)


def test_a_carried_group_does_not_keep_a_rollout_without_a_limit_from_ending():
    sampler = Sampler(stream(), target=2, num_generations=G, carries=True, **NO_LIMIT)
    sampler.carry([carried(1)])
    sampler.begin()
    play(sampler, [NO] * 6)
    assert sampler.next_prompts() == []
    assert len(sampler.batch().train) == 1


def test_mask_asks_once_for_the_batch():
    sampler = new(4, mode="mask")
    assert len(sampler.next_prompts()) == 4
    play(sampler, [YES, NO, NO, NO])
    assert sampler.next_prompts() == []


@pytest.mark.parametrize(
    ("target", "options", "expected"),
    [
        (96, {"max_round_size": 30, "num_ranks": 8, "has_whole_groups": True}, 24),
        (96, {"max_round_size": 3, "num_ranks": 8}, 4),
        (10, {"batch_multiplier": 2.55}, 25),
        (10, {"batch_multiplier": 2.55, "num_ranks": 8}, 28),
        (10, {"batch_multiplier": 2.55, "max_round_size": 20}, 20),
    ],
    ids=str,
)
def test_a_round_is_a_multiple_that_ranks_can_share_and_keeps_its_cap_but_is_never_nothing(target, options, expected):
    assert len(new(target, **options).next_prompts()) == expected


def test_a_run_that_accepts_nothing_does_not_generate_ever_more():
    sampler = new(512)
    while prompts := sampler.next_prompts():
        play(sampler, [NO] * len(prompts))
    assert sampler.rollout.num_groups == 10 * 512


def test_dropped_groups_hold_nothing_beyond_what_could_fill_the_batch():
    sampler, reasons = new(2), [NO, YES, NO, NO, YES, NO]
    generated = [[1]] * 12, [[2, 3]] * 12, None, ["a"] * 12, None, {}, [["cat.png"]] * 12, []
    rows = Rows.from_generated(generated, ["p"] * 12)
    sampler.add_round(blank_round(list("abcdef"), 12, rows=rows), reasons)
    # Groups 0 and 2 could fill a batch of two, cut to a token; 3 and 5 are let go of.
    assert [image is not None for image in rows.images[::G]] == [True, True, True, False, True, False]
    assert [None if ids is None else len(ids) for ids in rows.completion_ids[::G]] == [1, 2, 1, None, 2, None]


@pytest.mark.parametrize(
    ("target", "options", "most_rounds", "most_carried"),
    [
        (512, {}, 1.3, 0),
        (64, {"carries": True}, 1.15, 0.2),
        (512, {"carries": True}, 1.06, 0.1),
        (512, {"carries": True, "ahead": 1}, 1.03, 0.15),
    ],
    ids=str,
)
def test_a_second_round_and_what_is_left_over_are_rare(target, options, most_rounds, most_carried):
    """At an acceptance rate of 1/3, behind five rollouts: under 5 % of what is accepted is lost."""
    rng, sampler = random.Random(1), new(target, **options)
    num_rounds, num_accepted, num_carried, num_rollouts = 0, 0, 0, 30
    for step in range(num_rollouts + 5):
        play_rollout(sampler, rng)
        if step >= 5:
            num_carried += len(sampler.rollout.carried)
            num_accepted += len(sampler.rollout.accepted)
            num_rounds += sampler.rollout.num_rounds
        carry_on(sampler)
        sampler.draw_ahead()
    assert num_rounds / num_rollouts < most_rounds
    assert num_accepted / num_rollouts / target < 1.05
    assert num_carried / num_rollouts / target <= most_carried


# ---- What stays ----


def carrying(*rounds, target=4):
    sampler = new(target, carries=True)
    sampler.carry([*rounds])
    sampler.begin()
    return sampler


def test_carried_groups_train_and_need_not_be_sampled():
    sampler = carrying(carried(3))
    assert sampler.num_missing == 1
    play(sampler, [YES, YES])
    batch = sampler.batch()
    assert batch.train == [Group(0, 0), Group(0, 1), Group(0, 2), Group(1, 0)]
    assert batch.carry == [Group(1, 1)]
    sampler.carry([])  # once
    sampler.begin()
    assert sampler.num_missing == 4
    assert carrying(carried(4)).next_prompts() == []  # a batch that was carried whole needs no round


@pytest.mark.parametrize(
    ("options", "num_accepted", "num_carried"),
    [({}, 5, 0), ({"carries": True, "num_ranks": 4}, 7, 2), ({"carries": True}, 40, 4)],
    ids=["discarded", "shared by the ranks", "one batch"],
)
def test_what_is_carried_can_be_shared_by_the_ranks_and_fits_one_batch(options, num_accepted, num_carried):
    assert len(play(new(4, **options), [YES] * num_accepted).batch().carry) == num_carried


@pytest.mark.parametrize(
    ("options", "rollouts"),
    [
        ({"max_gen_batches": 1.0}, [([YES, NO], 1), ([NO, NO], 2), ([YES, YES], 0), ([NO], 1)]),
        ({"mode": "mask"}, [([YES, NO], 0), ([NO, NO], 1)]),  # only where nothing trains
    ],
    ids=["filter", "mask"],
)
def test_rollouts_that_fell_short_are_counted_until_one_is_full(options, rollouts):
    sampler = new(2, **options)
    for reasons, expected in rollouts:
        sampler.begin()
        play(sampler, reasons).batch()
        assert sampler.num_short_rollouts == expected


def told_of_passes(sampler, rounds):
    """What is told of passes that accept nothing after each of these rounds."""
    told = []
    for reasons in rounds:
        sampler.next_prompts()
        play(sampler, reasons)
        told.append(sampler.new_passes_without_group())
        if YES in reasons:
            sampler.begin()
    return told


def test_a_pass_that_accepts_nothing_is_told_of_once():
    """Two prompts a round, four a pass: a pass ends with every second round; the fifth round accepts one."""
    rounds = [[NO, NO]] * 4 + [[NO, YES]] + [[NO, NO]] * 2
    assert told_of_passes(new(1, stream(4), max_gen_batches=0, batch_multiplier=2.0), rounds) == [0, 1, 0, 2, 0, 0, 1]


def test_prompts_that_are_skipped_are_no_part_of_a_pass_that_accepts_nothing():
    sampler, told = new(1, stream(4), max_gen_batches=0), []
    for _ in range(8):  # each takes one of the four, and skips three
        sampler.stream.take(1, lambda name, may_skip: may_skip and name != "3")
        told.append(sampler.new_passes_without_group())
    assert sampler.stream.passes >= 7
    assert told == [0, 0, 0, 1, 0, 0, 0, 2]


@pytest.mark.parametrize("num_before", range(1, 7))
def test_a_resume_tells_of_passes_that_accept_nothing_as_a_run_that_was_not_stopped(num_before):
    options = {"max_gen_batches": 0, "batch_multiplier": 4.0}  # a pass a round
    rounds = [[YES] * 4] + [[NO] * 4] * 6
    sampler = new(1, stream(4), **options)
    told = told_of_passes(sampler, rounds[:num_before])
    again, _ = resumed(saved(sampler), stream=stream(4), target=1, carries=False, **options)
    again.begin()
    assert told + told_of_passes(again, rounds[num_before:]) == [0, 1, 2, 0, 4, 0, 0]


def test_the_memory_learns_what_it_is_told_and_skips_by_it():
    sampler = new(4, stream(4), memory=PromptMemory(seed=0), max_gen_batches=0)
    for _ in range(3):
        play(sampler, [NO] * 4, counts=[(0, 16)] * 4)
    assert sampler.memory.expected_acceptance("0", 16) < 0.05
    sampler.next_prompts()
    assert sampler.stream.num_skipped > 0


def asked_with(rate, target, **options):
    """How many are asked for where one in ten was expected and came, and the memory expects this share of the next."""
    sampler = learn(new(target, memory=foreseeing(rate), **options), 10, 100)
    sampler.promise.load_state_dict(sampler.acceptance.state_dict())
    return len(sampler.next_prompts())


def test_a_round_is_smaller_where_the_memory_expects_more_of_its_prompts_than_of_those_before():
    """Of prompts of one in two a fifth is enough, of what is needed of prompts of one in ten."""
    sizes = [asked_with(rate, 64) for rate in (0.05, 0.1, 0.5)]
    assert sizes[0] == sizes[1] > 600
    assert sizes[2] == pytest.approx(sizes[1] / 5, rel=0.03)
    assert asked_with(0.3, 16, max_round_size=16) == 16  # which still needs more than the 16 of a round


def test_what_the_memory_expected_of_a_round_is_known_after_a_resume():
    """Two completions of a pass rate that nobody knows differ one time in three: 4/3 of four groups."""
    sampler = play(new(4, memory=PromptMemory()), [NO] * 4, counts=[(0, 2)] * 4)
    assert sampler.promise.num_accepted == pytest.approx(4 / 3)
    state = saved(sampler)
    again, _ = resumed(state, memory=PromptMemory())
    assert saved(again) == state
    del state["acceptance"]["promise"]  # as an earlier version wrote it: as much as came
    again, _ = resumed(state, memory=PromptMemory())
    assert again.promise.state_dict() == again.acceptance.state_dict()


@pytest.mark.parametrize(
    ("options", "counts"),
    [({}, False), ({"screen": 4}, False), ({"screen": "auto"}, True), ({"memory": PromptMemory()}, True)],
)
def test_right_completions_are_counted_where_a_memory_or_the_cheapest_number_hangs_on_them(options, counts):
    assert new(4, **options).counts_correct is counts


def test_without_its_screen_a_sampler_counts_and_looks_ahead_as_one_that_never_had_it():
    screened, unscreened = new(4, num_generations=4, screen="auto", carries=True), new(4, carries=True)
    assert (screened.counts_correct, screened._looks_ahead) == (True, True)
    screened.screen = None  # as the preflight leaves it out
    assert (screened.counts_correct, screened._looks_ahead) == (False, False)
    assert (unscreened.counts_correct, unscreened._looks_ahead) == (False, False)


def test_a_memory_that_knows_nothing_asks_for_as_many_as_none_at_first_and_at_a_resume():
    """Of 16 completions of a pass rate that nobody knows 15 in 17 groups are mixed; of groups before, one in two."""
    assert len(new(64, num_generations=16, memory=PromptMemory()).next_prompts()) == 64
    state, sizes = learn(new(64), 10, 100).state_dict(), []
    for memory in (None, PromptMemory()):
        again, _ = resumed(state, target=64, num_generations=16, carries=False, memory=memory)
        again.begin()
        sizes.append(len(again.next_prompts()))
    assert sizes[0] == sizes[1] > 600


WHOLE = {"has_whole_groups": True}


@pytest.mark.parametrize(
    ("target", "options", "size"), [(4, {}, 3), (4, WHOLE, 2), (3, WHOLE, 3), (4, {**WHOLE, "max_round_size": 1}, 1)]
)
def test_where_a_reward_may_compare_completions_a_rank_has_whole_groups(target, options, size):
    """Of at most three a round, in groups of eight, two ranks; a batch of three is torn with TRL too."""
    assert len(new(target, num_generations=8, num_ranks=2, **{"max_round_size": 3} | options).next_prompts()) == size


def test_the_rest_of_partial_groups_groups_is_shared_equally_where_nothing_is_screened_any_more():
    """Five of eight are the rest of one group; two ranks share 5 + 2 * 8 and three of one prompt more."""
    half = {Group(0, 0): Ask("a", {}, 3)}
    sampler = Sampler(stream(), target=3, num_generations=8, num_ranks=2)
    sampler.carry([], half)
    sampler.begin()
    assert [ask.num for ask in sampler.next_prompts()] == [5, 8, 8, 3]


def test_a_group_partial_groups_for_equal_shares_is_asked_for_its_rest():
    sampler, ask = new(4, num_generations=4), Ask("a", {}, 3)
    sampler.add_round(blank_round(["a"], 3, asks=[ask]), [None])
    assert sampler.rollout.half == {Group(0, 0): ask}
    assert sampler.next_prompts()[0] == Ask("a", {}, 1, Group(0, 0))


def partial_groups(stream, num_groups, num):
    """The next groups of a stream, asked for `num` completions."""
    taken = zip(stream.take(num_groups), stream.taken_at, strict=True)
    return {Group(0, i): Ask(*prompt, num, place=place) for i, (prompt, place) in enumerate(taken)}


def drawn_twice(num_half, options, at_resume, lost=None):
    """What is drawn ahead after half-asked groups, and where the stream is; and after a resume. For two ranks."""
    options = {"target": 8, "num_generations": 8, "num_ranks": 2, "carries": True, "ahead": 1} | options
    one = Sampler(stream(), **options)
    half = partial_groups(one.stream, num_half, num=3)
    one.carry([], half)
    one.draw_ahead()
    drawn = one.in_flight
    if lost is not None:
        half[lost] = half[lost]._replace(example={"prompt": "another"})
    other, _ = resumed(saved(one), {"rounds": [], "half": state_of(half)}, **options | at_resume)
    return (drawn, one.stream.state_dict()), (other.in_flight, other.stream.state_dict())


def test_what_was_drawn_ahead_is_the_same_where_a_round_may_be_smaller_after_the_resume():
    before, after = drawn_twice(3, {"screen": 3, "max_round_size": 8}, {"max_round_size": 2})
    assert [ask.num for ask in before[0][:3]] == [5, 5, 5]
    assert before == after


def test_a_round_is_drawn_anew_where_what_is_partial_groups_is_not_there_any_more():
    (drawn, _), (again, _) = drawn_twice(3, {"screen": 3}, {}, lost=Group(0, 0))
    assert len(drawn) > 3
    assert again == []


def screened_round(sampler, asks, rights):
    """One round, of which so many of each prompt are right; a band from 0 to one half judges whole groups."""
    rewards = [float(i < right) for ask, right in zip(asks, rights, strict=True) for i in range(ask.num)]
    round_ = blank_round(names(asks), len(rewards), rewards, asks=asks)
    for part in round_.by_size(sampler.rollout.rounds):
        rewards_NG = part.rewards_BF.view(len(part.prompts), -1)
        sampler.add_round(part, drop_reasons(rewards_NG, None, Criterion(max_accuracy=0.5)))


def test_first_few_that_pass_count_for_as_much_as_groups_that_a_band_accepts_in_the_end():
    """
    Of eight prompts asked for two of four, four differ (1 of 2 right). Two of these end at 1 of 4, which the band
    takes, and two at 3 of 4, which it does not: half of what passes is accepted, so one of four of what is asked.
    """
    sampler = new(4, num_generations=4, screen=2)
    screened_round(sampler, sampler.next_prompts()[:4], [1, 1, 0, 0])
    assert (sampler.acceptance.num_accepted, sampler.acceptance.num_groups) == (2, 4)  # nothing else is known
    screened_round(sampler, [ask for ask in sampler.next_prompts() if ask.first], [0, 2])
    share = (0.95 + 1) / (0.95 + 2)  # one of two, beside one that stands for no band and fades
    assert sampler.share_completed == pytest.approx(share)
    before = sampler.acceptance.num_accepted
    screened_round(sampler, sampler.next_prompts()[:3], [1, 1, 1])
    assert sampler.acceptance.num_accepted == pytest.approx(0.95 * before + 3 * share)
    # Three are half asked and three are missing: all three, and a third prompt for the one that will be dropped.
    assert [ask.num for ask in sampler.next_prompts()][:3] == [2, 2, 2]
    assert len(sampler.next_prompts()) > 3


def test_the_share_that_a_band_accepts_of_what_is_partial_groups_is_known_after_a_resume():
    sampler = new(4, num_generations=4, screen=2)
    screened_round(sampler, sampler.next_prompts()[:2], [1, 1])
    screened_round(sampler, sampler.next_prompts()[:2], [2, 2])
    assert sampler.share_completed == pytest.approx(0.95 / 2.95)  # none of two
    state = saved(sampler)
    assert resumed(state)[0].share_completed == sampler.share_completed
    del state["acceptance"]["completed"]  # as an earlier version wrote it
    assert resumed(state)[0].share_completed == 1


@pytest.mark.parametrize(("screen", "new"), [("auto", [8]), (3, [3] * 4)])
def test_a_round_never_asks_for_more_completions_than_fit_its_cap(screen, new):
    """Four prompts of 16 are 64 completions. Four rests of 13 leave room for 12: eight of one prompt, or 3 of four."""
    half = {Group(0, i): Ask(str(i), {}, 3) for i in range(4)}
    sampler = Sampler(stream(), target=8, num_generations=16, screen=screen, max_round_size=4, carries=True)
    sampler.carry([], half)
    sampler.begin()
    assert [ask.num for ask in sampler.next_prompts()] == [13] * 4 + new


def test_a_rollout_of_one_batch_ends_with_what_it_accepted():
    sampler = play(new(4, max_gen_batches=1.0), [YES, NO, NO, NO])  # 8 completions of 8
    assert (sampler.next_prompts(), len(sampler.batch().train), sampler.num_short_rollouts) == ([], 1, 1)
    sampler = play(new(4, max_gen_batches=1.5), [NO] * 4)
    assert len(sampler.next_prompts()) == 2  # 4 completions are left
    assert play(sampler, [NO] * 2).next_prompts() == []  # no group was accepted, and the limit holds all the same
    # Of 16 completions 6 are left, and 2, for less than a quarter of which no round is worth its price.
    assert len(play(new(8, max_gen_batches=1.0), [NO] * 5).next_prompts()) == 3
    assert play(new(8, max_gen_batches=1.0), [YES, *[NO] * 6]).next_prompts() == []
    # Three of each are asked first. Half pass, and 5 more of these are asked: 3 + 5 / 2 of 64 are 11 prompts.
    assert len(learn(new(8, num_generations=8, max_gen_batches=1.0, screen=3), 50, 100).next_prompts()) == 11
    assert new(10, num_generations=10, max_gen_batches=1.15).num_left == 115  # not 1.15 x 100 = 114.99999999999999


KINDS = [{}, {"screen": 3}, {"screen": "auto"}, {"screen": 2, "max_round_size": 8}, {"target": 1}, {"target": 3}]
KINDS += [
    {"target": 1, "screen": "auto"},
    {"num_ranks": 32},
    {"screen": 3, "num_ranks": 16},
    {**WHOLE, "num_ranks": 4},
]


@pytest.mark.parametrize("num_batches", [1.0, 1.3, 2.5])
@pytest.mark.parametrize("options", KINDS, ids=str)
def test_a_rollout_asks_for_its_batches_completions_and_no_more(num_batches, options):
    """Of 8 completions a group. Less than a quarter of a batch stays unasked where it is not full, or than a group."""
    sampler = Sampler(stream(), num_generations=8, max_gen_batches=num_batches, **{"target": 8} | options)
    batch, least, rng = sampler.target * 8, max(2 * sampler.target, 8 * sampler.multiple_of), random.Random(0)
    for_equal_shares = 32 if sampler.num_ranks == 16 else 0  # of first few: kept free
    for _ in range(15):
        sampler.begin()
        left = int(num_batches * batch)
        while asks := sampler.next_prompts():
            num = sum(ask.num for ask in asks)
            assert (num <= left, num % sampler.num_ranks) == (True, 0)
            assert not sampler.has_whole_groups or len(asks) % sampler.num_ranks == 0
            left -= num
            screened_round(sampler, asks, [rng.random() < 0.3 for _ in asks])
        assert left < least + for_equal_shares or not sampler.rollout.shortfall
        sampler.batch()
        sampler.carry([])
    for _ in range(100):
        sampler.population.update(4, 8)
    sampler.begin()
    assert options != {"screen": "auto"} or {ask.num for ask in sampler.next_prompts()} == {8}  # whose rest was lost


@pytest.mark.parametrize(("is_few", "least", "most"), [("", 8, 10), ("02468", 12, 14), ("0123456789", 16, 18)])
def test_of_the_next_batch_only_first_few_are_asked_ahead(is_few, least, most):
    """
    Eight groups are missing, and eight are ahead. Prompts known to be mixed are asked for whole: eight of them. Where
    half are asked for a few first: eight, and the half of eight. Where all are: both batches. Two more may be dropped.
    """

    class Knows(PromptMemory):
        def pass_rate(self, prompt_id):
            return (1e-3, 1e-3) if prompt_id[-1] in is_few else (500, 500)

        def expected_acceptance(self, prompt_id, num_generations):
            return 0.99

    sampler = Sampler(stream(), target=8, num_generations=16, screen="auto", carries=True, memory=Knows())
    for _ in range(100):
        sampler.population.update(0, 16)
    learn(sampler, 99, 100)
    sampler.promise.load_state_dict(sampler.acceptance.state_dict())
    sampler.begin()
    assert least <= len(sampler.next_prompts()) <= most


# ---- Checkpoints ----


@pytest.fixture
def state():
    rows = Rows.from_generated(([[1]] * 4, [[2]] * 4, None, ["a"] * 4, None, {}, None, []), ["p"] * 4)
    sampler = new(4, carries=True)
    sampler.next_prompts()
    play(sampler, [YES] * 3 + [NO] * 5).batch()
    sampler.carry([Round.of_groups(rows, torch.ones(4, 1), [1, 1])])
    return sampler.state_dict(), sampler.carried_state_dict()


def test_a_resumed_sampler_goes_on_with_the_next_prompt_the_rate_and_what_it_carried(state):
    sampler, differs = resumed(*state)
    assert differs == {}
    sampler.begin()
    assert sampler.num_missing == 2
    assert sampler.stream.take(1)[0][0] == "4"
    assert sampler.acceptance.num_accepted == 3


@pytest.mark.parametrize(
    ("name", "other"), [("seed", stream(seed=1)), ("dataset", stream(11_000))], ids=["seed", "dataset"]
)
def test_with_prompts_in_another_order_what_was_carried_is_left_behind(state, name, other):
    sampler, differs = resumed(*state, stream=other)
    assert list(differs) == [name]
    sampler.begin()
    assert sampler.num_missing == sampler.target
    assert sampler.stream.passes == 1


def streaming(texts):
    return PromptStream(Dataset.from_dict({"prompt": list(texts)}).to_iterable_dataset(), seed=0, shuffle=False)


@pytest.fixture
def of_a_stream():
    """A sampler that has drawn 4 prompts of a stream, and its state."""
    sampler = new(4, streaming("abcdefgh"), carries=True)
    sampler.next_prompts()
    return sampler.state_dict()


def test_another_stream_starts_a_fresh_pass_and_the_same_goes_on(of_a_stream):
    same, differs = resumed(of_a_stream, stream=streaming("abcdefgh"))
    assert differs == {}
    assert same.stream.take(1)[0][1] == {"prompt": "e"}
    other, differs = resumed(of_a_stream, stream=streaming("abcdXfgh"))
    assert list(differs) == ["first_rows"]
    assert other.stream.take(1)[0][1] == {"prompt": "a"}
    assert other.passes == 1
    _, differs = resumed(of_a_stream)  # no stream any more
    assert list(differs) == ["dataset"]


def test_what_a_header_does_not_say_is_taken_to_fit(of_a_stream):
    for name in ("first_rows", "seed"):
        del of_a_stream["header"][name]  # as an earlier version wrote it
    other, differs = resumed(of_a_stream, stream=streaming("Xbcdefgh"))
    assert differs == {}
    assert other.stream.take(1)[0][1] == {"prompt": "e"}


@pytest.mark.parametrize("options", [{}, {"stream": stream(seed=1)}, {"stream": stream(11_000)}])
def test_where_data_is_not_skipped_to_its_place_a_fresh_pass_begins_and_all_else_goes_on(state, options):
    state[0]["ahead"] = {"num_prompts": 2, "skips": [], "step": 0}
    sampler = Sampler(**{"stream": stream(), "target": 4, "num_generations": G, "carries": True, **options})
    assert sampler.load_state_dict(*state, ignore_data_skip=True) == {}
    assert sampler.in_flight == []
    assert (sampler.passes, sampler.acceptance.num_accepted, sampler.num_rollouts) == (1, 3, 1)
    sampler.begin()
    assert sampler.num_missing == 2  # two groups are carried
    assert sampler.stream.take(1)[0][0] == "0"


def test_a_stream_is_not_read_to_its_place_where_data_is_not_skipped(of_a_stream):
    rows = iter([{"prompt": text} for text in "ijklmnop"])  # it goes on, and cannot be read twice
    live = PromptStream(IterableDataset.from_generator(lambda: rows), seed=0)
    sampler = Sampler(live, target=4, num_generations=G, carries=True)
    assert sampler.load_state_dict(of_a_stream, None, ignore_data_skip=True) == {}
    assert sorted(example["prompt"] for _, example in live.take(8)) == list("ijklmnop")
    assert "first_rows" not in live.order()


def test_a_memory_that_the_checkpoint_lacks_starts_empty(state):
    sampler, differs = resumed(*state, memory=PromptMemory())
    assert differs == {}
    assert sampler.state_dict()["memory"] == PromptMemory().state_dict()


# ---- One rollout ahead ----


def test_what_was_drawn_ahead_is_the_next_rollouts_first_round():
    sampler = new(4, carries=True, batch_multiplier=1.5, ahead=1)
    assert names(sampler.next_prompts()) == list("012345")
    play(sampler, [YES] * 6)
    sampler.carry([carried(2)])
    sampler.draw_ahead()
    assert names(sampler.in_flight) == ["6", "7", "8", "9", "10", "11"]
    sampler.begin()
    assert names(sampler.next_prompts()) == ["6", "7", "8", "9", "10", "11"]
    play(sampler, [YES] + [NO] * 5)
    assert names(sampler.next_prompts()) == ["12", "13", "14", "15", "16", "17"]  # a second round is drawn now


def test_a_round_asks_for_the_first_few_of_the_next_batch_where_it_may_carry_them():
    options = {"num_generations": 4, "carries": True, "screen": 1}
    others = {}, {"carries": False}, {"screen": None}, {"max_round_size": 64}, {"ahead": 2}
    assert [len(new(4, **options | other).next_prompts()) for other in others] == [8, 4, 4, 4, 4]
    sampler = new(4, **options)
    assert sampler._draw(partial_groups(sampler.stream, 5, num=1), 0, math.inf) == []  # five of them are known


def test_of_two_rollouts_what_is_partial_groups_is_so_much_less_to_draw():
    sampler = learn(new(32, num_generations=4, carries=True, screen=1, ahead=2), 500, 1000)
    half = partial_groups(sampler.stream, 16, num=1)
    sampler.batch()
    sampler.carry([Round.of_groups(Rows.empty(), torch.zeros(16, 1), [1] * 16)], half)
    sampler.draw_ahead()
    assert sum(ask.first is None for ask in sampler.in_flight) == sampler.acceptance.at_most(2 * 32 - 16)


def test_a_draw_ahead_counts_on_what_is_carried():
    sampler, alone = (learn(new(512, carries=True, ahead=1), 500, 1000) for _ in range(2))
    sampler.carry([carried(256)])
    alone.carry([])
    sampler.draw_ahead()
    alone.draw_ahead()
    assert len(sampler.in_flight) < 0.6 * len(alone.in_flight)
    full = new(512, carries=True, ahead=1)
    full.carry([carried(512)])
    full.draw_ahead()
    assert full.in_flight == []
    first = Sampler(stream(), target=4, num_generations=G, ahead=1)
    first.draw_ahead()
    assert len(first.in_flight) == 4


def test_no_group_trains_that_is_older_than_two_rollouts():
    assert len(carrying(carried(4, age=2)).batch().train) == 4
    with pytest.raises(RuntimeError, match=r"3 rollouts old.*2"):
        carrying(carried(4, age=3)).batch()


def test_what_is_partial_groups_is_given_up_once_its_first_few_are_two_rollouts_old():
    sampler, blank_B = new(4, carries=True, screen=1), torch.zeros(2)
    sampler.carry([Round.of_groups(Rows.empty(), blank_B[:, None], [2, 1])], partial_groups(sampler.stream, 2, num=1))
    sampler.begin()
    assert sampler.batch().half == [Group(0, 1)]


def test_a_checkpoint_between_draw_and_round_brings_the_same_prompts_back():
    sampler = new(4, carries=True, batch_multiplier=1.5, ahead=1)
    play(sampler, [YES] * 6)
    sampler.carry([])
    sampler.draw_ahead()
    drawn, state = sampler.in_flight, saved(sampler)
    other, differs = resumed(state, batch_multiplier=1.5)
    assert differs == {}
    other.begin()
    assert other.next_prompts() == drawn
    assert other.stream.state_dict() == sampler.stream.state_dict()
    assert saved(resumed(state)[0]) == state
    other.load_state_dict(state, None, ignore_data_skip=True)  # goes on behind them
    assert other.in_flight == []


def test_a_checkpoint_keeps_of_what_is_partial_groups_as_much_as_was_asked_ahead():
    options = {"carries": True, "ahead": 1, "screen": 1, "max_round_size": 2, "batch_multiplier": 1.0}
    sampler, blank_B = new(4, **options), torch.zeros(3)
    sampler.carry([Round.of_groups(Rows.empty(), blank_B[:, None], [1] * 3)], partial_groups(sampler.stream, 3, num=1))
    sampler.draw_ahead()
    asked = sampler.in_flight
    assert names(asked)[:2] == ["0", "1"]  # a round has room for the rest of two
    again, _ = resumed(saved(sampler), sampler.carried_state_dict(), **options)
    assert again.in_flight == asked


def test_what_the_memory_passed_over_ahead_is_counted_once_and_not_asked_twice():
    class SkipsEven(PromptMemory):
        asked = 0

        def draw_skip(self, prompt_id, num_generations, may_skip):
            self.asked += 1
            self.skipped += [0.5] * (skips := int(prompt_id) % 2 == 0)
            return skips

    sampler = new(2, carries=True, batch_multiplier=1.0, ahead=1, memory=SkipsEven(seed=0))
    play(sampler, [YES] * 2, [(1, 2)] * 2)
    sampler.carry([])
    assert sampler.skipped == []
    sampler.draw_ahead()
    assert names(sampler.in_flight) == ["1", "3"]
    other, _ = resumed(sampler.state_dict(), target=2, batch_multiplier=1.0, memory=SkipsEven(seed=0))
    assert other.memory.asked == 0
    assert len(sampler.skipped) == 2  # prompts 0 and 2
    for either in (sampler, other):
        either.begin()
        assert either.skipped == []
        assert names(either.next_prompts()) == ["1", "3"]


# ---- Two rollouts ahead ----


def two_ahead(monkeypatch, **options):
    """All that is asked for is taken to be accepted."""
    monkeypatch.setattr(AcceptanceRate, "at_most", lambda self, wanted: max(int(wanted), 0))
    return new(4, carries=True, ahead=2, **options)


def play_asked(sampler, reasons, asks=None):
    """A round of what the sampler asks for; returns its prompts."""
    asks = sampler.next_prompts() if asks is None else asks
    ages = [sampler.rollout.number - ask.rollout for ask in asks]
    if asks:
        sampler.add_round(blank_round(names(asks), len(asks) * G, ages=ages, asks=asks), reasons[: len(asks)])
    return names(asks)


def end_rollout(sampler):
    batch = carry_on(sampler)
    sampler.draw_ahead()
    return batch


def test_groups_train_in_the_order_in_which_they_were_asked_for_two_rollouts_after(monkeypatch):
    """Four groups a rollout: at its start twelve are in flight, and its update leaves eight."""
    sampler = two_ahead(monkeypatch)
    for number in range(5):
        sampler.draw_ahead()
        assert names(sampler.in_flight) == [str(4 * number + i) for i in range(12)]
        assert play_asked(sampler, [YES] * 4) == [str(4 * number + i) for i in range(4)]
        sampler.draw_ahead()
        assert sampler.next_prompts() == []
        batch = end_rollout(sampler)
        assert len(sampler.in_flight) == 8
        assert select_ages(sampler.rollout.rounds, batch.train) == [min(number, 2)] * 4
        sampler.begin(number + 1)


def test_where_groups_are_dropped_no_more_is_taken_in_than_is_missing_and_as_many_are_asked_for(monkeypatch):
    sampler = two_ahead(monkeypatch)
    sampler.draw_ahead()
    assert play_asked(sampler, [YES, NO, YES, NO]) == list("0123")
    sampler.draw_ahead()  # two are missing, and eight of later rollouts: two more than are in flight
    assert names(sampler.in_flight) == [str(i) for i in range(4, 14)]
    assert play_asked(sampler, [NO, YES]) == ["4", "5"]
    assert play_asked(sampler, [YES]) == ["6"]
    assert sampler.next_prompts() == []
    assert sampler.rollout.num_rounds == 3  # of this rollout's own policy


def test_what_is_accepted_beyond_two_batches_overflows_and_is_counted(monkeypatch):
    """Fourteen are asked for and taken in at once, and all are accepted: four train, and four in the next rollout."""
    sampler = two_ahead(monkeypatch)
    monkeypatch.setattr(AcceptanceRate, "at_most", lambda self, wanted: 14)
    sampler.draw_ahead()
    assert len(play_asked(sampler, [YES] * 14)) == 14
    batch = end_rollout(sampler)
    assert len(batch.train) == len(batch.carry) == 4  # no more than one rollout can train
    assert rollout_log(sampler, batch, ["right"], torch.ones(1), {})["overlap/overflow"] == 6.0


def test_nothing_is_asked_for_that_no_rollout_would_train(monkeypatch):
    sampler = two_ahead(monkeypatch)
    sampler.draw_ahead(1)
    assert len(sampler.in_flight) == 8
    play_asked(sampler, [YES] * 4)
    sampler.draw_ahead(0)
    assert len(sampler.in_flight) == 4


@pytest.mark.parametrize("num_ranks", [4, 6])
def test_the_ranks_have_equal_shares_of_whatever_is_taken_in(monkeypatch, num_ranks):
    sampler = two_ahead(monkeypatch, num_ranks=num_ranks)
    sampler.draw_ahead()
    for _ in range(4):
        while asks := sampler.next_prompts():
            assert sum(ask.num for ask in asks) % num_ranks == 0
            play_asked(sampler, [YES, NO, NO] * 20, asks)
            sampler.draw_ahead()
        end_rollout(sampler)
        sampler.begin()


def test_a_checkpoint_holds_what_is_in_flight_and_what_has_no_answer_is_of_the_next_rollouts_policy(monkeypatch):
    sampler = two_ahead(monkeypatch)
    sampler.draw_ahead()
    play_asked(sampler, [YES] * 4)
    end_rollout(sampler)
    again, differs = resumed(saved(sampler), ahead=2)
    assert differs == {}
    assert again.in_flight == sampler.in_flight
    assert again.passes == sampler.passes == 4 / 10_000
    again.in_flight.lost = {(0, 5), (0, 6)}
    again.begin(7)
    when = {ask.name: (ask.rollout, ask.step, ask.due) for ask in again.in_flight}
    assert when["4"] == (0, 0, 2)
    assert when["5"] == when["6"] == (1, 7, 3)
    assert names(again.in_flight) == [str(i) for i in range(4, 12)]


def test_all_that_was_asked_for_in_earlier_rollouts_is_one_round(monkeypatch):
    sampler = two_ahead(monkeypatch)
    sampler.draw_ahead()
    play_asked(sampler, [YES] * 4)
    end_rollout(sampler)
    sampler.begin(1)
    sampler.draw_ahead()
    assert play_asked(sampler, [NO] * 4) == ["4", "5", "6", "7"]
    assert play_asked(sampler, [YES, YES, NO, NO]) == ["8", "9", "10", "11"]  # no more than were missing each time
    assert (sampler.rollout.num_rounds, sampler.num_missing) == (1, 2)


def test_of_what_is_in_flight_a_rollout_takes_in_no_more_than_it_may_sample(monkeypatch):
    """Batches of four groups, and no more than six groups a rollout: six are in flight, of which four fill none."""
    sampler = two_ahead(monkeypatch, max_gen_batches=1.5)
    sampler.draw_ahead()
    assert len(sampler.in_flight) == 6
    assert play_asked(sampler, [NO] * 4) == ["0", "1", "2", "3"]
    sampler.draw_ahead()
    assert len(sampler.in_flight) == 6
    assert play_asked(sampler, [NO] * 2) == ["4", "5"]
    assert (sampler.next_prompts(), sampler.num_missing) == ([], 4)


def test_what_would_be_too_old_for_the_next_rollout_is_taken_in_though_others_fill_the_batch(monkeypatch):
    sampler = two_ahead(monkeypatch)
    sampler.draw_ahead()
    sampler.carry([carried(4)])  # as if this rollout had found twice as many, and taken none of these
    sampler.begin(1)
    sampler.begin(2)
    assert sampler.num_missing == 0
    assert play_asked(sampler, [YES] * 12) == [str(i) for i in range(12)]  # asked in rollout 0, and due in 2
    assert sampler.next_prompts() == []
    assert sampler.batch().carry == []  # they would be three rollouts old


# ---- The limit, several processes and a screen ----


@pytest.mark.parametrize("limit", [1.0, 1.15, 1.5])
@pytest.mark.parametrize(
    ("num_generations", "num_ranks", "target"), [(8, 8, 2), (8, 3, 3), (16, 8, 1), (8, 8, 4), (4, 4, 4)]
)
@pytest.mark.parametrize("screen", ["auto", 2])
def test_near_the_limit_the_share_that_makes_ranks_equal_is_no_reason_to_sample_little(
    limit, num_generations, num_ranks, target, screen
):
    """Each rollout samples at least three quarters of a batch, and never more than its limit."""
    sampler = Sampler(
        stream(),
        target=target,
        num_generations=num_generations,
        num_ranks=num_ranks,
        screen=screen,
        carries=True,
        max_gen_batches=limit,
    )
    rng, batch = random.Random(0), target * num_generations
    for _ in range(12):
        sampler.begin()
        while asks := sampler.next_prompts():
            assert sum(ask.num for ask in asks) % num_ranks == 0
            screened_round(sampler, asks, [rng.random() < 0.5 for _ in asks])
        num_sampled = sampler.rollout.num_completions
        assert 0.75 * batch <= num_sampled <= limit * batch
        sampler.batch()
        sampler.carry([])

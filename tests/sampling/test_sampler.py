# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Rollouts of the sampler, step by step: which rounds it requests, what trains, and what stays."""

import json
import math
import random
from itertools import cycle
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset, IterableDataset

from trl_dapo.sampling.drop_reasons import Criterion, drop_reasons
from trl_dapo.sampling.groups import GenerationRequest, GroupState
from trl_dapo.sampling.policies import Decisions, SelectionPolicy
from trl_dapo.sampling.prompt_memory import PromptMemory
from trl_dapo.sampling.prompts import PromptStream
from trl_dapo.sampling.report import rollout_log
from trl_dapo.sampling.rollout import Totals
from trl_dapo.sampling.round_size import AcceptanceRate
from trl_dapo.sampling.rounds import Completion, Round
from trl_dapo.sampling.rows import rows_from_generated
from trl_dapo.sampling.sampler import Sampler
from trl_dapo.sampling.screen import Screen


pytestmark = pytest.mark.fast


YES, NO = None, "all_wrong"
G = 2


def stream(num_prompts=10_000, seed=0):
    """Prompts whose names are their numbers, without the hash."""
    dataset = Dataset.from_dict({"prompt": [str(i) for i in range(num_prompts)], "id": list(range(num_prompts))})
    made = PromptStream(dataset, seed=seed, shuffle=False)
    made._source._names = list(dataset["prompt"])
    return made


def make(target, prompts=None, num_generations=G, memory=None, screen=None, **options):
    """A sampler, before its first rollout."""
    policies = []
    if memory is not None:
        memory.num_generations = num_generations
        policies.append(memory)
    if screen is not None:
        policies.append(Screen(screen, memory))
    prompts = prompts or stream()
    return Sampler(prompts, target=target, num_generations=num_generations, policies=policies, **options)


def new(target, prompts=None, num_generations=G, **options):
    sampler = make(target, prompts, num_generations, **options)
    sampler.start_rollout()
    return sampler


def acceptance_of(sampler):
    return sampler.selection.acceptance_record.acceptance


def predicted_of(sampler):
    return sampler.selection.acceptance_record.predicted


def population_of(sampler):
    return sampler.selection.find(Screen).population


def learn(sampler, num_accepted, num_groups, rounds=30):
    """The acceptance rate after many equal rounds."""
    for _ in range(rounds):
        acceptance_of(sampler).update(num_accepted, num_groups)
    return sampler


def foreseeing(rate):
    """A memory that predicts this acceptance rate for every prompt."""
    return type("Foresees", (PromptMemory,), {"expected_acceptance": lambda *_: rate})()


def invent(sampler, num_groups, num=None, place=0):
    """Requests for groups that were not drawn from the stream."""
    groups = [sampler.queue.draw(str(place + i), {}, (0, place + i)) for i in range(num_groups)]
    number = sampler.rollout.number
    requests = [GenerationRequest(group, num or group.num_generations, number) for group in groups]
    sampler.queue.send(requests)
    return requests


def answer(sampler, requests, rewards=None):
    """Add the completions of a round to their groups, on one process."""
    completions, rewards = [], list(rewards or [])
    has_earlier_weights = any(request.weights_rollout < sampler.rollout.number for request in requests)
    for request in requests:
        group, num = request.group, request.num_completions
        completions += [Completion(group, group.num_received + i) for i in range(num)]
        group.receive(request, [0] * num)
        group.lengths += [0] * num
        group.truncated += [False] * num
        known = group.rewards[:, 0].tolist() if len(group.rewards) else []
        own, rewards = (rewards or [0.0] * num)[:num], rewards[num:]
        group.rewards = torch.tensor([*known, *own])[:, None]
    round_ = Round(requests, completions, has_earlier_weights=has_earlier_weights)
    sampler.add(round_)
    return round_


def play(sampler, reasons, counts=None):
    """Run one round, whatever the sampler would have requested."""
    requests = invent(sampler, len(reasons))
    answer(sampler, requests)
    sampler.record_decisions(Decisions([request.group for request in requests], reasons, 0, counts))
    return sampler


def decide_all(sampler, requests, reasons):
    """Receive the completions, and decide on the groups."""
    answer(sampler, requests)
    sampler.record_decisions(Decisions([request.group for request in requests], reasons, 0))


def play_rollout(sampler, rng, rate=1 / 3):
    """Run rounds until the sampler requests no more. A share of the groups is accepted."""
    sampler.start_rollout()
    while requests := sampler.next_requests():
        answer(sampler, requests)
        groups = [request.group for request in requests]
        sampler.record_decisions(Decisions(groups, [YES if rng.random() < rate else NO for _ in groups], 0))


def let_wait(sampler, num_groups, staleness=1, num=None, place=0):
    """Let groups of an earlier rollout wait: accepted ones, or partial ones with `num` completions."""
    rollout = sampler.num_rollouts - staleness
    groups = []
    for i in range(num_groups):
        group = sampler.queue.draw(str(place + i), {"prompt": str(place + i), "id": place + i}, (0, place + i))
        request = GenerationRequest(group, num or group.num_generations, rollout)
        sampler.queue.send([request])
        group.receive(request, [0] * request.num_completions)
        group.rewards = torch.zeros(request.num_completions, 1)
        group.lengths, group.truncated = [0] * request.num_completions, [False] * request.num_completions
        sampler.queue.record_decision(group, GroupState.PARTIAL if num else GroupState.ACCEPTED)
        groups.append(group)
    return groups


def saved(sampler):
    """Return what a checkpoint contains of a sampler."""
    return json.loads(json.dumps(sampler.state_dict()))


def resumed(state, queue=None, **options):
    """Return another sampler that loaded the state, and what of the state did not fit."""
    again = make(**{"prompts": stream(), "target": 4, "num_generations": G, "carries": True, **options})
    return again, again.load_state_dict(json.loads(json.dumps(state)), queue)[0]


def names(requests):
    return [request.group.name for request in requests]


def nums(requests):
    return [request.num_completions for request in requests]


def facts(requests):
    """Return what requests contain, to compare those of two samplers."""
    return [
        (one.group.number, one.group.name, one.num_completions, one.weights_rollout, one.weights_step, one.expires_at)
        for one in requests
    ]


def numbers(groups):
    return [group.number for group in groups]


# ---- Rounds ----


def test_groups_are_counted_over_the_rounds():
    sampler = play(play(new(3), [YES, NO]), ["masked", YES, YES, YES])
    batch = sampler.finish_rollout()
    assert numbers(batch.train) == [0, 3, 4]
    assert [group.round.number for group in batch.train] == [1, 2, 2]
    assert sampler.totals == Totals(groups_sampled=6, groups_trained=3, tokens_generated=0, empty_rollouts_in_a_row=0)
    assert (sampler.rollout.num_rounds, sampler.rollout.num_groups, sampler.rollout.shortfall) == (2, 6, 0)
    assert sampler.rollout.drop_reasons == {"all_wrong": 1, "masked": 1}
    assert sampler.next_requests() == []


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_a_screen_that_is_left_out_as_a_run_begins_requests_whole_groups_alone(ahead):
    """As if a reward function turns out to fail on the first completions of a group."""
    sampler = new(4, num_generations=4, screen=3, carries=True, rollouts_ahead=ahead)
    sampler.selection.policies.clear()
    sampler.start_rollout()
    sampler.request_ahead()
    assert {*nums(sampler.queue.requests_in_flight), *nums(sampler.next_requests())} == {4}


def test_the_limit_counts_batches_and_not_one_more_and_the_last_round_counts_too():
    """NeMo RL samples one batch more than its setting says. ms-swift samples its last round without using it."""
    sampler, other = (play(new(1, max_gen_batches=2.0), [NO]) for _ in range(2))
    assert len(sampler.next_requests()) == 1
    play(sampler, [NO])
    assert sampler.next_requests() == []
    assert (sampler.finish_rollout().train, sampler.short_rollouts_in_a_row) == ([], 1)
    play(other, [YES])
    assert (numbers(other.finish_rollout().train), other.short_rollouts_in_a_row) == ([1], 0)


def test_what_was_accepted_before_the_limit_still_trains():
    """ms-swift discards 511 accepted groups of 512 and trains on the unfiltered batch."""
    sampler = play(play(new(512, max_gen_batches=1.03), [YES] * 500 + [NO] * 12), [YES] * 11 + [NO])
    assert sampler.next_requests() == []
    assert len(sampler.finish_rollout().train) == 511
    assert sampler.rollout.shortfall == 1


NO_LIMIT = {"max_gen_batches": 0.0, "max_empty_batches": 3.0}


@pytest.mark.parametrize(
    ("options", "verdicts", "gives_up"),
    [
        ({"max_gen_batches": 0.0}, [NO] * 100, False),  # it never gives up
        (NO_LIMIT, [NO] * 5, False),
        (NO_LIMIT, [NO] * 6, True),  # a batch is two groups
        (NO_LIMIT, [NO] * 5 + [YES] + [NO] * 5, False),
        (NO_LIMIT, [NO] * 5 + [YES] + [NO] * 6, True),  # one group, and then no other: it would never end
    ],
)
def test_without_a_limit_a_rollout_ends_when_so_many_batches_in_a_row_have_no_accepted_group(
    options, verdicts, gives_up
):
    sampler = new(2, **options)
    for verdict in verdicts:
        play(sampler, [verdict])
    assert sampler.has_given_up is gives_up
    assert (sampler.next_requests() == []) is gives_up
    assert len(sampler.finish_rollout().train) == verdicts.count(YES)


def test_a_carried_group_does_not_keep_a_rollout_without_a_limit_from_ending():
    sampler = make(2, carries=True, **NO_LIMIT)
    let_wait(sampler, 1)
    sampler.start_rollout()
    play(sampler, [NO] * 6)
    assert sampler.next_requests() == []
    assert len(sampler.finish_rollout().train) == 1


def test_mask_asks_once_for_the_batch():
    sampler = new(4, mode="mask")
    assert len(sampler.next_requests()) == 4
    play(sampler, [YES, NO, NO, NO])
    assert sampler.next_requests() == []


@pytest.mark.parametrize(
    ("target", "options", "expected"),
    [
        (96, {"max_round_size": 30, "num_ranks": 8}, 28),
        (96, {"max_round_size": 3, "num_ranks": 8}, 4),
        (10, {"batch_multiplier": 2.55}, 25),
        (10, {"batch_multiplier": 2.55, "num_ranks": 8}, 28),
        (10, {"batch_multiplier": 2.55, "max_round_size": 20}, 20),
    ],
    ids=str,
)
def test_a_round_is_a_multiple_that_ranks_can_share_and_keeps_its_cap_but_is_never_nothing(target, options, expected):
    assert len(new(target, **options).next_requests()) == expected


def test_a_run_that_accepts_nothing_does_not_generate_ever_more():
    sampler = new(512)
    while prompts := sampler.next_requests():
        play(sampler, [NO] * len(prompts))
    assert sampler.rollout.num_groups == 10 * 512


def test_dropped_groups_hold_nothing_beyond_what_could_fill_the_batch():
    sampler, reasons = new(2), [NO, YES, NO, NO, YES, NO]
    requests = invent(sampler, 6)
    answer(sampler, requests)
    generated = [[1]] * 12, [[2, 3]] * 12, None, ["a"] * 12, None, {}, [["cat.png"]] * 12, []
    rows, groups = rows_from_generated(generated, ["p"] * 12), [request.group for request in requests]
    for group in groups:
        group.rows = {i: rows[G * group.number + i] for i in range(G)}
    sampler.record_decisions(Decisions(groups, reasons, 0))
    # Groups 0 and 2 could fill a batch of two, cut to one token. 3 and 5 are released.
    tokens = [[len(row.completion_ids) for row in group.rows.values()] for group in groups]
    assert tokens == [[1, 1], [2, 2], [1, 1], [], [2, 2], []]


@pytest.mark.parametrize(
    ("target", "options", "most_rounds", "most_carried"),
    [
        (512, {}, 1.3, 0),
        (64, {"carries": True}, 1.15, 0.2),
        (512, {"carries": True}, 1.06, 0.1),
        (512, {"carries": True, "rollouts_ahead": 1}, 1.03, 0.15),
    ],
    ids=str,
)
def test_a_second_round_and_what_is_left_over_are_rare(target, options, most_rounds, most_carried):
    """At an acceptance rate of 1/3, after five rollouts, less than 5% of the accepted groups are lost."""
    rng, sampler = random.Random(1), new(target, **options)
    num_rounds, num_accepted, num_carried, num_rollouts = 0, 0, 0, 30
    for step in range(num_rollouts + 5):
        play_rollout(sampler, rng)
        if step >= 5:
            num_carried += sampler.rollout.num_accepted_before
            num_accepted += len(sampler.rollout.accepted)
            num_rounds += sampler.rollout.num_rounds
        sampler.finish_rollout()
        sampler.request_ahead()
    assert num_rounds / num_rollouts < most_rounds
    assert num_accepted / num_rollouts / target < 1.05
    assert num_carried / num_rollouts / target <= most_carried


# ---- What stays for the next rollout ----


def carrying(num_groups, staleness=1, target=4):
    sampler = make(target, carries=True)
    let_wait(sampler, num_groups, staleness)
    sampler.start_rollout()
    return sampler


def test_carried_groups_train_and_need_not_be_sampled():
    sampler = carrying(3)
    assert sampler.num_missing == 1
    play(sampler, [YES, YES])
    batch = sampler.finish_rollout()
    assert numbers(batch.train) == [0, 1, 2, 3]
    assert numbers(batch.carried_to_next) == [4]
    sampler.start_rollout()
    assert sampler.num_missing == 3
    play(sampler, [YES, YES, YES])
    assert numbers(sampler.finish_rollout().train) == [4, 5, 6, 7]  # each group once
    assert carrying(4).next_requests() == []  # a batch that was carried completely needs no round


@pytest.mark.parametrize(
    ("options", "num_accepted", "num_carried"),
    [({}, 5, 0), ({"carries": True, "num_ranks": 4}, 7, 3), ({"carries": True}, 40, 4)],
    ids=["discarded", "whatever the number of processes", "one batch"],
)
def test_what_is_carried_fits_one_batch(options, num_accepted, num_carried):
    assert len(play(new(4, **options), [YES] * num_accepted).finish_rollout().carried_to_next) == num_carried


@pytest.mark.parametrize(
    ("options", "rollouts"),
    [
        ({"max_gen_batches": 1.0}, [([YES, NO], 1), ([NO, NO], 2), ([YES, YES], 0), ([NO], 1)]),
        ({"mode": "mask"}, [([YES, NO], 0), ([NO, NO], 1)]),  # only if no group trains
    ],
    ids=["filter", "mask"],
)
def test_rollouts_that_fell_short_are_counted_until_one_is_full(options, rollouts):
    sampler = new(2, **options)
    for reasons, expected in rollouts:
        sampler.start_rollout()
        play(sampler, reasons).finish_rollout()
        assert sampler.short_rollouts_in_a_row == expected


def told_of_passes(sampler, rounds):
    """Return the warnings about passes without an accepted group after each of these rounds."""
    told = []
    for reasons in rounds:
        decide_all(sampler, sampler.next_requests(), reasons)
        told.append(sampler.new_passes_without_group())
        if YES in reasons:
            sampler.finish_rollout()
            sampler.start_rollout()
    return told


def test_a_pass_that_accepts_nothing_is_told_of_once():
    """Two prompts per round, four per pass: every second round ends a pass. The fifth round accepts one group."""
    rounds = [[NO, NO]] * 4 + [[NO, YES]] + [[NO, NO]] * 2
    assert told_of_passes(new(1, stream(4), max_gen_batches=0, batch_multiplier=2.0), rounds) == [0, 1, 0, 2, 0, 0, 1]


def test_a_streamed_dataset_whose_length_is_not_known_yet_is_no_pass_without_a_group():
    # Ten prompts, two per round: the first four rounds accept both. The length is known after the first pass.
    streamed = PromptStream(IterableDataset.from_generator(lambda: ({"prompt": str(i)} for i in range(10))), seed=0)
    rounds = [[YES, YES]] * 4 + [[NO, NO]] * 9
    # The pass ends with the fifth round. A whole pass, five rounds, without a group ends with the ninth.
    expected = [0] * 8 + [1] + [0] * 4
    sampler = new(2, streamed, max_gen_batches=0, batch_multiplier=1.0)
    assert told_of_passes(sampler, rounds) == expected


def test_a_rollout_that_ends_at_ten_batches_because_no_round_is_worth_its_cost_does_not_say_that_it_continues():
    # A batch is 8 groups of 4 completions. The limit leaves a fifth of a batch after ten, and a quarter is needed.
    sampler = new(8, stream(200), num_generations=4, max_gen_batches=10.2, batch_multiplier=1.0)
    while requests := sampler.next_requests():
        decide_all(sampler, requests, [NO] * len(requests))
        assert not sampler.has_new_batches_without_group()
    assert sampler.rollout.num_completions == 10 * 8 * 4


def test_a_pass_whose_groups_a_band_drops_in_the_end_accepts_nothing_though_first_completions_differ():
    # All first completions differ (1 of 2 correct), and all groups end at 3 of 4, above the band's one half.
    sampler = new(1, stream(4), num_generations=4, screen=2, max_gen_batches=0)
    for _ in range(6):
        requests = sampler.next_requests()
        screened_round(sampler, requests, [1 if request.is_first else 2 for request in requests])
    assert sampler.new_passes_without_group() > 0


def test_prompts_that_are_skipped_are_no_part_of_a_pass_that_accepts_nothing():
    sampler, told = new(1, stream(4), max_gen_batches=0), []
    for _ in range(8):  # each takes one of the four, and skips three
        sampler.stream.take(1, lambda name, may_skip: may_skip and name != "3")
        told.append(sampler.new_passes_without_group())
    assert sampler.stream.passes >= 7
    assert told == [0, 0, 0, 1, 0, 0, 0, 2]


@pytest.mark.parametrize("num_before", range(1, 7))
def test_a_resume_tells_of_passes_that_accept_nothing_as_a_run_that_was_not_stopped(num_before):
    options = {"max_gen_batches": 0, "batch_multiplier": 4.0}  # one pass per round
    rounds = [[YES] * 4] + [[NO] * 4] * 6
    sampler = new(1, stream(4), **options)
    told = told_of_passes(sampler, rounds[:num_before])
    again, _ = resumed(saved(sampler), prompts=stream(4), target=1, carries=False, **options)
    again.start_rollout()
    assert told + told_of_passes(again, rounds[num_before:]) == [0, 1, 2, 0, 4, 0, 0]


def test_the_memory_learns_what_it_is_told_and_skips_by_it():
    sampler = new(4, stream(4), memory=PromptMemory(seed=0), max_gen_batches=0)
    for _ in range(3):
        play(sampler, [NO] * 4, counts=[(0, 16)] * 4)
    assert sampler.selection.find(PromptMemory).expected_acceptance("0", 16) < 0.05
    sampler.next_requests()
    assert sampler.stream.num_skipped > 0


def asked_with(rate, target, **options):
    """
    Return how many prompts are requested if one in ten was predicted and accepted, and the memory now predicts this
    rate.
    """
    sampler = learn(new(target, memory=foreseeing(rate), **options), 10, 100)
    predicted_of(sampler).load_state_dict(acceptance_of(sampler).state_dict())
    return len(sampler.next_requests())


def test_a_round_is_smaller_where_the_memory_expects_more_of_its_prompts_than_of_those_before():
    """With prompts that are accepted one time in two, a fifth of the number for one in ten is enough."""
    sizes = [asked_with(rate, 64) for rate in (0.05, 0.1, 0.5)]
    assert sizes[0] == sizes[1] > 600
    assert sizes[2] == pytest.approx(sizes[1] / 5, rel=0.03)
    assert asked_with(0.3, 16, max_round_size=16) == 16  # which still needs more than the 16 of a round


def test_what_the_memory_expected_of_a_round_is_known_after_a_resume():
    """Two completions with an unknown pass rate differ one time in three: 4/3 of four groups."""
    sampler = play(new(4, memory=PromptMemory()), [NO] * 4, counts=[(0, 2)] * 4)
    assert predicted_of(sampler).num_accepted == pytest.approx(4 / 3)
    state = saved(sampler)
    again, _ = resumed(state, memory=PromptMemory())
    assert saved(again) == state


@pytest.mark.parametrize(
    ("options", "counts"),
    [
        ({}, False),
        ({"screen": 4}, False),
        ({"screen": "on"}, True),
        ({"memory": PromptMemory()}, True),
    ],
)
def test_right_completions_are_counted_where_a_memory_or_the_cheapest_number_hangs_on_them(options, counts):
    assert new(4, **options).selection.needs_counts is counts


def test_without_its_screen_a_sampler_counts_as_one_that_never_had_it():
    sampler = new(4, num_generations=4, screen="on", carries=True)
    assert (sampler.selection.needs_counts, sampler.selection.splits_groups) == (True, True)
    sampler.selection.policies.clear()  # as the preflight check removes it
    assert (sampler.selection.needs_counts, sampler.selection.splits_groups) == (False, False)


def test_a_memory_that_knows_nothing_asks_for_as_many_as_none_at_first_and_at_a_resume():
    """With 16 completions and an unknown pass rate, 15 in 17 groups are mixed; of earlier groups, one in two."""
    assert len(new(64, num_generations=16, memory=PromptMemory()).next_requests()) == 64
    state, sizes = learn(new(64), 10, 100).state_dict(), []
    for memory in (None, PromptMemory()):
        again, _ = resumed(state, target=64, num_generations=16, carries=False, memory=memory)
        again.start_rollout()
        sizes.append(len(again.next_requests()))
    assert sizes[0] == sizes[1] > 600


def test_the_rest_of_partial_groups_is_shared_equally_if_nothing_is_screened_any_more():
    """Five of eight are the rest of one group. Two processes share 5 + 2 * 8, and three more of one prompt."""
    sampler = make(3, num_generations=8, num_ranks=2)
    let_wait(sampler, 1, num=3)
    sampler.start_rollout()
    assert nums(sampler.next_requests()) == [5, 8, 8, 3]


def test_the_rest_of_a_partial_group_is_requested_first():
    sampler = new(4, num_generations=4)
    requests = invent(sampler, 1, num=3)
    answer(sampler, requests)
    sampler.record_decisions(Decisions([requests[0].group], [None], 0))
    assert sampler.queue.partial == [requests[0].group]
    first = sampler.next_requests()[0]
    assert (first.group, first.num_completions) == (requests[0].group, 1)


def test_a_round_that_was_interrupted_is_sampled_by_the_next_rollout():
    sampler = new(4)
    requests = sampler.next_requests()
    sampler.start_rollout()  # as if the engine had failed, and `train` was called again
    assert names(sampler.next_requests()) == names(requests) == list("0123")
    answer(sampler, sampler.queue.requests_in_flight)
    sampler.record_decisions(Decisions([request.group for request in requests], [NO] * 4, 0))
    assert names(sampler.next_requests())[0] == "4"


def drawn_twice(num_partial, options, at_resume, lost=None):
    """
    Return what is drawn ahead after partial groups and the position of the stream, and the same after a resume. For
    two processes.
    """
    options = {"target": 8, "num_generations": 8, "num_ranks": 2, "carries": True, "rollouts_ahead": 1} | options
    one = make(**options)
    one.stream.take(num_partial)
    let_wait(one, num_partial, num=3)
    one.request_ahead()
    drawn, queue = facts(one.queue.requests_in_flight), one.queue.state_dict()
    if lost is not None:
        queue["groups"][lost]["example_digest"] = "another"
    other, _ = resumed(saved(one), queue, **options | at_resume)
    return (drawn, one.stream.state_dict()), (facts(other.queue.requests_in_flight), other.stream.state_dict()), other


def test_what_was_drawn_ahead_is_the_same_if_a_round_may_be_smaller_after_the_resume():
    before, after, _ = drawn_twice(3, {"screen": 3, "max_round_size": 8}, {"max_round_size": 2})
    assert [num for _, _, num, *_ in before[0][:3]] == [5, 5, 5]
    assert before == after


def test_a_round_is_drawn_anew_if_an_example_in_flight_is_not_there_any_more():
    (drawn, _), (again, where), other = drawn_twice(3, {"screen": 3}, {}, lost=0)
    assert len(drawn) > 3
    assert again == []
    assert where["position"] == 3  # after those that have completions
    assert numbers(other.queue.partial) == [1, 2]


def screened_round(sampler, requests, rights):
    """One round in which this many of each prompt are correct. A band from 0 to one half applies to whole groups."""
    known = [request.group.num_received for request in requests]
    rewards = [
        float(i < right)
        for request, right in zip(requests, rights, strict=True)
        for i in range(request.num_completions)
    ]
    if any(request.group.state is not GroupState.IN_FLIGHT for request in requests):
        raise AssertionError("these were not requested")
    answer(sampler, requests, rewards)
    sizes = {}
    for request, num_known in zip(requests, known, strict=True):
        sizes.setdefault((-num_known, request.group.num_received), []).append(request.group)
    for (minus_known, size), groups in sorted(sizes.items(), key=lambda item: item[0]):
        rewards_NG = torch.cat([group.rewards for group in groups]).view(len(groups), size)
        criterion = Criterion(max_accuracy=0.5) if groups[0].is_whole else Criterion()
        reasons = drop_reasons(rewards_NG, None, criterion)
        sampler.record_decisions(Decisions(groups, reasons, -minus_known))


def only(sampler, requests, num):
    """The first of the requests; the others are cancelled."""
    for request in requests[num:]:
        request.group.move_to(GroupState.DROPPED, "left out")
        del sampler.queue._groups[request.group.number]
    return requests[:num]


def test_first_few_that_pass_count_for_as_much_as_groups_that_a_band_accepts_in_the_end():
    """
    Two of four completions are requested of eight prompts, and four differ (1 of 2 correct).

    Two of these end at 1 of 4, which the band accepts, and two at 3 of 4, which it does not. So half of the partial
    groups are accepted, which is a quarter of the requested ones.
    """
    sampler = new(4, num_generations=4, screen=2)
    screened_round(sampler, only(sampler, sampler.next_requests(), 4), [1, 1, 0, 0])
    assert (acceptance_of(sampler).num_accepted, acceptance_of(sampler).num_groups) == (2, 4)  # nothing else is known
    requests = sampler.next_requests()
    assert nums(requests)[:2] == [2, 2]
    assert [one.is_first for one in requests[:3]] == [False, False, True]
    screened_round(sampler, only(sampler, requests, 2), [0, 2])
    share = (0.95 + 1) / (0.95 + 2)  # one of two, and one more that represents no band and loses weight
    assert sampler.selection.acceptance_record.partial_acceptance_rate == pytest.approx(share)
    before = acceptance_of(sampler).num_accepted
    screened_round(sampler, only(sampler, sampler.next_requests(), 3), [1, 1, 1])
    assert acceptance_of(sampler).num_accepted == pytest.approx(0.95 * before + 3 * share)
    # Three are partial and three are missing: all three, and a third prompt for the one that will be dropped.
    requests = sampler.next_requests()
    assert nums(requests)[:3] == [2, 2, 2]
    assert len(requests) > 3


def test_the_share_that_a_band_accepts_of_partial_groups_is_known_after_a_resume():
    sampler = new(4, num_generations=4, screen=2)
    screened_round(sampler, only(sampler, sampler.next_requests(), 2), [1, 1])
    screened_round(sampler, only(sampler, sampler.next_requests(), 2), [2, 2])
    assert sampler.selection.acceptance_record.partial_acceptance_rate == pytest.approx(0.95 / 2.95)  # none of two
    again, _ = resumed(saved(sampler))
    assert (
        again.selection.acceptance_record.partial_acceptance_rate
        == sampler.selection.acceptance_record.partial_acceptance_rate
    )


@pytest.mark.parametrize(("screen", "new"), [("on", [8]), (3, [3] * 4)])
def test_a_round_never_asks_for_more_completions_than_fit_its_cap(screen, new):
    """
    Four prompts of 16 are 64 completions. Four rests of 13 leave room for 12: 8 of one prompt, or 3 each of four.
    """
    sampler = make(8, num_generations=16, screen=screen, max_round_size=4, carries=True)
    let_wait(sampler, 4, num=3)
    sampler.start_rollout()
    assert nums(sampler.next_requests()) == [13] * 4 + new


def test_a_rollout_of_one_batch_ends_with_what_it_accepted():
    sampler = play(new(4, max_gen_batches=1.0), [YES, NO, NO, NO])  # 8 completions of 8
    assert sampler.next_requests() == []
    assert (len(sampler.finish_rollout().train), sampler.short_rollouts_in_a_row) == (1, 1)
    sampler = play(new(4, max_gen_batches=1.5), [NO] * 4)
    assert len(sampler.next_requests()) == 2  # 4 completions are left
    assert play(sampler, [NO] * 2).next_requests() == []  # no group was accepted, but the limit holds all the same
    # 6 of 16 completions are left, and in another case 2, which is less than a quarter, so that no round is worth its
    # cost.
    assert len(play(new(8, max_gen_batches=1.0), [NO] * 5).next_requests()) == 3
    assert play(new(8, max_gen_batches=1.0), [YES, *[NO] * 6]).next_requests() == []
    # Three of each are requested first. Half of them differ, and 5 more of these are requested: 3 + 5 / 2 of 64 are 11
    # prompts.
    assert len(learn(new(8, num_generations=8, max_gen_batches=1.0, screen=3), 50, 100).next_requests()) == 11
    # 1.15 x 100 is 114.99999999999999 in floating point.
    assert new(10, num_generations=10, max_gen_batches=1.15).completions_left == 115


KINDS = [{}, {"screen": 3}, {"screen": "on"}, {"screen": 2, "max_round_size": 8}, {"target": 1}, {"target": 3}]
KINDS += [
    {"target": 1, "screen": "on"},
    {"num_ranks": 32},
    {"screen": 3, "num_ranks": 16},
]


@pytest.mark.parametrize("num_batches", [1.0, 1.3, 2.5])
@pytest.mark.parametrize("options", KINDS, ids=str)
def test_a_rollout_asks_for_its_batches_completions_and_no_more(num_batches, options):
    """
    With 8 completions per group. At most a quarter of a batch, or one group, is left unrequested when it is not full.
    """
    sampler = make(num_generations=8, max_gen_batches=num_batches, **{"target": 8} | options)
    multiple_of, num_ranks = sampler.selection.group_multiple, sampler.selection.num_ranks
    batch, least, rng = sampler.target * 8, max(2 * sampler.target, 8 * multiple_of), random.Random(0)
    for_equal_shares = 32 if num_ranks == 16 else 0  # of first completions: reserved for equal shares
    for _ in range(15):
        sampler.start_rollout()
        left = int(num_batches * batch)
        while requests := sampler.next_requests():
            num = sum(nums(requests))
            assert (num <= left, num % num_ranks) == (True, 0)
            left -= num
            screened_round(sampler, requests, [rng.random() < 0.3 for _ in requests])
        assert left < least + for_equal_shares or not sampler.rollout.shortfall
        sampler.finish_rollout()
    if options == {"screen": "on"}:
        for _ in range(100):
            population_of(sampler).update(4, 8)
        sampler.start_rollout()
        assert {*nums(sampler.next_requests())} == {8}  # its rest was lost


@pytest.mark.parametrize(("is_few", "least", "most"), [("", 8, 10), ("02468", 12, 14), ("0123456789", 16, 18)])
def test_of_the_next_batch_only_first_few_are_asked_ahead(is_few, least, most):
    """
    Eight groups are missing, and eight are sampled ahead.

    Prompts that are known to be mixed are requested whole: eight of them. If half of them are only requested in part:
    eight, and the half of eight. If all are: both batches. Two more may be dropped.
    """

    class Knows(PromptMemory):
        def pass_rate_distribution(self, prompt_id):
            return (1e-3, 1e-3) if prompt_id is None or prompt_id[-1] in is_few else (500, 500)

        def expected_acceptance(self, prompt_id, num_generations):
            return 0.99

    sampler = make(8, num_generations=16, screen="on", carries=True, memory=Knows())
    for _ in range(100):
        population_of(sampler).update(0, 16)
    learn(sampler, 99, 100)
    predicted_of(sampler).load_state_dict(acceptance_of(sampler).state_dict())
    sampler.start_rollout()
    assert least <= len(sampler.next_requests()) <= most


# ---- Checkpoints ----


@pytest.fixture
def state():
    sampler = new(4, carries=True)
    requests = sampler.next_requests()
    answer(sampler, requests)
    sampler.record_decisions(Decisions([request.group for request in requests], [YES] * 3 + [NO], 0))
    play(sampler, [YES] * 3 + [NO] * 5).finish_rollout()  # six are accepted, and four train
    return sampler.state_dict(), sampler.queue.state_dict()


def test_a_resumed_sampler_goes_on_with_the_next_prompt_the_rate_and_what_it_carried(state):
    sampler, differs = resumed(*state)
    assert differs == {}
    sampler.start_rollout()
    assert sampler.num_missing == 2
    assert sampler.stream.take(1)[0][0] == "4"
    assert acceptance_of(sampler).num_accepted == pytest.approx(0.95 * 3 + 3)


@pytest.mark.parametrize(
    ("name", "other"), [("seed", stream(seed=1)), ("dataset", stream(11_000))], ids=["seed", "dataset"]
)
def test_with_prompts_in_another_order_what_was_carried_is_left_behind(state, name, other):
    sampler, differs = resumed(*state, prompts=other)
    assert list(differs) == [name]
    sampler.start_rollout()
    assert sampler.num_missing == sampler.target
    assert sampler.stream.passes == 1


def streaming(texts):
    return PromptStream(Dataset.from_dict({"prompt": list(texts)}).to_iterable_dataset(), seed=0, shuffle=False)


@pytest.fixture
def of_a_stream():
    """A sampler that has drawn 4 prompts of a stream, and its state."""
    sampler = new(4, streaming("abcdefgh"), carries=True)
    decide_all(sampler, sampler.next_requests(), [NO] * 4)
    return sampler.state_dict()


def test_another_stream_starts_a_fresh_pass_and_the_same_goes_on(of_a_stream):
    same, differs = resumed(of_a_stream, prompts=streaming("abcdefgh"))
    assert differs == {}
    assert same.stream.take(1)[0][1] == {"prompt": "e"}
    other, differs = resumed(of_a_stream, prompts=streaming("abcdXfgh"))
    assert list(differs) == ["first_rows"]
    assert other.stream.take(1)[0][1] == {"prompt": "a"}
    assert other.passes == 1
    _, differs = resumed(of_a_stream)  # not a stream any more
    assert list(differs) == ["dataset"]


def test_what_a_header_does_not_say_is_taken_to_fit(of_a_stream):
    for name in ("first_rows", "seed"):
        del of_a_stream["header"][name]
    other, differs = resumed(of_a_stream, prompts=streaming("Xbcdefgh"))
    assert differs == {}
    assert other.stream.take(1)[0][1] == {"prompt": "e"}


@pytest.mark.parametrize("options", [{}, {"prompts": stream(seed=1)}, {"prompts": stream(11_000)}])
def test_where_data_is_not_skipped_to_its_place_a_fresh_pass_begins_and_all_else_goes_on(state, options):
    sampler = make(**{"target": 4, "carries": True, **options})
    assert sampler.load_state_dict(*state, ignore_data_skip=True) == ({}, 0)
    assert sampler.queue.requests_in_flight == []
    assert (sampler.passes, acceptance_of(sampler).num_accepted, sampler.num_rollouts) == (1, pytest.approx(5.85), 1)
    sampler.start_rollout()
    assert sampler.num_missing == 2  # two groups are carried
    assert sampler.stream.take(1)[0][0] == "0"


def test_a_stream_is_not_read_to_its_place_where_data_is_not_skipped(of_a_stream):
    rows = iter([{"prompt": text} for text in "ijklmnop"])  # it continues, and cannot be read twice
    live = PromptStream(IterableDataset.from_generator(lambda: rows), seed=0)
    sampler = make(4, live, carries=True)
    assert sampler.load_state_dict(of_a_stream, None, ignore_data_skip=True) == ({}, 0)
    assert sorted(example["prompt"] for _, example in live.take(8)) == list("ijklmnop")
    assert "first_rows" not in live.order()


def test_a_memory_that_the_checkpoint_lacks_starts_empty(state):
    sampler, differs = resumed(*state, memory=PromptMemory())
    assert differs == {}
    assert sampler.state_dict()["policies"]["PromptMemory"] == PromptMemory().state_dict()


# ---- One rollout ahead ----


def test_what_was_drawn_ahead_is_the_next_rollouts_first_round():
    sampler = new(4, carries=True, batch_multiplier=1.5, rollouts_ahead=1)
    requests = sampler.next_requests()
    assert names(requests) == list("012345")
    decide_all(sampler, requests, [YES] * 6)
    assert len(sampler.finish_rollout().carried_to_next) == 2
    sampler.request_ahead()
    assert names(sampler.queue.requests_in_flight) == ["6", "7", "8", "9", "10", "11"]
    sampler.start_rollout()
    requests = sampler.next_requests()
    assert names(requests) == ["6", "7", "8", "9", "10", "11"]
    decide_all(sampler, requests, [YES] + [NO] * 5)
    assert names(sampler.next_requests()) == ["12", "13", "14", "15", "16", "17"]  # a second round is drawn now


def test_a_round_asks_for_the_first_few_of_the_next_batch_if_it_may_carry_them():
    options = {"num_generations": 4, "carries": True, "screen": 1}
    others = {}, {"carries": False}, {"screen": None}, {"max_round_size": 64}, {"rollouts_ahead": 2}
    assert [len(new(4, **options | other).next_requests()) for other in others] == [8, 4, 4, 4, 4]
    sampler = new(4, **options)
    let_wait(sampler, 5, num=1)
    assert sampler.selection.next_round(0, math.inf) == []  # five of them are known


def test_of_two_rollouts_what_is_partial_is_so_much_less_to_draw():
    sampler = learn(new(32, num_generations=4, carries=True, screen=1, rollouts_ahead=2), 500, 1000)
    sampler.finish_rollout()
    let_wait(sampler, 16, num=1, staleness=1)
    sampler.request_ahead()
    num_new = sum(request.is_first for request in sampler.queue.requests_in_flight)
    assert num_new == acceptance_of(sampler).most_prompts_without_surplus(2 * 32 - 16)


def test_a_draw_ahead_counts_on_what_is_carried():
    sampler, alone = (learn(make(512, carries=True, rollouts_ahead=1), 500, 1000) for _ in range(2))
    let_wait(sampler, 256)
    sampler.request_ahead()
    alone.request_ahead()
    assert len(sampler.queue.requests_in_flight) < 0.6 * len(alone.queue.requests_in_flight)
    full = make(512, carries=True, rollouts_ahead=1)
    let_wait(full, 512)
    full.request_ahead()
    assert full.queue.requests_in_flight == []
    first = make(4, rollouts_ahead=1)
    first.request_ahead()
    assert len(first.queue.requests_in_flight) == 4


def test_no_group_trains_that_is_older_than_two_rollouts():
    assert len(carrying(4, staleness=2).finish_rollout().train) == 4
    with pytest.raises(RuntimeError, match=r"sampled 3 rollouts ago.*at most 2 rollouts"):
        carrying(4, staleness=3).finish_rollout()


def test_partial_groups_are_given_up_once_their_first_completions_are_two_rollouts_old():
    sampler = make(4, carries=True, screen=1)
    let_wait(sampler, 1, staleness=2, num=1)
    let_wait(sampler, 1, staleness=1, num=1, place=1)
    sampler.start_rollout()
    batch = sampler.finish_rollout()
    assert (numbers(batch.dropped_partial), numbers(batch.partial)) == ([0], [1])
    assert batch.dropped_partial[0].drop_reason == "stale"


def test_partial_groups_that_no_later_rollout_may_complete_are_surplus_and_not_stale():
    sampler = make(4, carries=False, screen=1)
    let_wait(sampler, 1, staleness=0, num=1)
    sampler.start_rollout()
    (group,) = sampler.finish_rollout().dropped_partial
    assert group.drop_reason == "surplus"


def test_a_budget_that_is_overdrawn_leaves_room_for_no_request():
    """Six requests may wait. A budget of -4 completions in groups of 4 allows none of them, not six less one."""
    selection = SimpleNamespace(
        acceptance_record=SimpleNamespace(acceptance=SimpleNamespace(most_prompts_without_surplus=lambda num: num)),
        round_up_groups=lambda num: num,
        group_multiple=1,
    )
    requests = [SimpleNamespace(may_wait_two_rollouts=True)] * 6
    for completions_left, expected in ((8, 2), (0, 0), (-4, 0), (-16, 0)):
        sampler = SimpleNamespace(
            selection=selection, num_missing=4, completions_left=completions_left, num_generations=4
        )
        assert len(Sampler._needed_of(sampler, requests)) == expected


def test_a_checkpoint_between_draw_and_round_brings_the_same_prompts_back():
    sampler = new(4, carries=True, batch_multiplier=1.5, rollouts_ahead=1)
    decide_all(sampler, sampler.next_requests(), [YES] * 4 + [NO] * 2)
    sampler.finish_rollout()
    sampler.request_ahead()
    drawn, state, queue = facts(sampler.queue.requests_in_flight), saved(sampler), sampler.queue.state_dict()
    other, differs = resumed(state, queue, batch_multiplier=1.5)
    assert differs == {}
    assert (saved(other), other.queue.state_dict()) == (state, queue)
    other.rollouts_ahead = 1
    other.start_rollout()
    assert facts(other.next_requests()) == drawn
    assert other.stream.state_dict() == sampler.stream.state_dict()
    other.load_state_dict(state, queue, ignore_data_skip=True)  # continues after them
    assert other.queue.requests_in_flight == []


def test_a_checkpoint_keeps_of_partial_groups_as_much_as_was_requested_ahead():
    options = {"carries": True, "rollouts_ahead": 1, "screen": 1, "max_round_size": 2, "batch_multiplier": 1.0}
    sampler = make(4, **options)
    sampler.stream.take(3)
    let_wait(sampler, 3, num=1)
    sampler.request_ahead()
    assert names(sampler.queue.requests_in_flight)[:2] == ["0", "1"]  # a round has room for the rest of two
    again, _ = resumed(saved(sampler), sampler.queue.state_dict(), **options)
    assert facts(again.queue.requests_in_flight) == facts(sampler.queue.requests_in_flight)
    assert numbers(again.queue.partial) == numbers(sampler.queue.partial) == [2]


def test_what_the_memory_passed_over_ahead_is_counted_once_and_not_asked_twice():
    class SkipsEven(PromptMemory):
        asked = 0

        def draw_skip(self, prompt_id, num_generations, may_skip):
            self.asked += 1
            self.skipped_distributions += [(1.0, 1.0)] * (skips := int(prompt_id) % 2 == 0)
            return skips

    memory = SkipsEven(seed=0)
    sampler = new(2, carries=True, batch_multiplier=1.0, rollouts_ahead=1, memory=memory)
    play(sampler, [YES] * 2, [(1, 2)] * 2)
    sampler.finish_rollout()
    assert sampler.skipped_pass_rates == []
    sampler.request_ahead()
    assert names(sampler.queue.requests_in_flight) == ["1", "3"]
    of_other = SkipsEven(seed=0)
    other, _ = resumed(
        sampler.state_dict(),
        sampler.queue.state_dict(),
        target=2,
        batch_multiplier=1.0,
        rollouts_ahead=1,
        memory=of_other,
    )
    assert of_other.asked == 0
    assert len(sampler.skipped_pass_rates) == 2  # prompts 0 and 2
    # The totals have them before a checkpoint is saved.
    assert (sampler.totals.num_skipped, other.totals.num_skipped) == (2, 2)
    for either in (sampler, other):
        either.start_rollout()
        assert either.totals.num_skipped == 2
        assert either.skipped_pass_rates == []
        assert names(either.next_requests()) == ["1", "3"]


# ---- Two rollouts ahead ----


def two_ahead(monkeypatch, **options):
    """All requested groups are predicted to be accepted."""
    monkeypatch.setattr(AcceptanceRate, "most_prompts_without_surplus", lambda self, wanted: max(int(wanted), 0))
    return new(4, carries=True, rollouts_ahead=2, **options)


def play_requests(sampler, reasons, requests=None):
    """Run a round of the sampler's requests. Return its prompts."""
    requests = sampler.next_requests() if requests is None else requests
    if requests:
        decide_all(sampler, requests, reasons[: len(requests)])
    return names(requests)


def end_rollout(sampler):
    batch = sampler.finish_rollout()
    sampler.request_ahead()
    return batch


def test_groups_train_in_the_order_in_which_they_were_asked_for_two_rollouts_after(monkeypatch):
    """Four groups per rollout: at its start twelve are in flight, and its update leaves eight."""
    sampler = two_ahead(monkeypatch)
    for number in range(5):
        sampler.request_ahead()
        assert names(sampler.queue.requests_in_flight) == [str(4 * number + i) for i in range(12)]
        assert play_requests(sampler, [YES] * 4) == [str(4 * number + i) for i in range(4)]
        sampler.request_ahead()
        assert sampler.next_requests() == []
        batch = end_rollout(sampler)
        assert len(sampler.queue.requests_in_flight) == 8
        assert [group.staleness(number) for group in batch.train] == [min(number, 2)] * 4
        sampler.start_rollout(number + 1)


def test_where_groups_are_dropped_no_more_is_taken_in_than_is_missing_and_as_many_are_asked_for(monkeypatch):
    sampler = two_ahead(monkeypatch)
    sampler.request_ahead()
    assert play_requests(sampler, [YES, NO, YES, NO]) == list("0123")
    sampler.request_ahead()  # two are missing, and eight of later rollouts: two more than are in flight
    assert names(sampler.queue.requests_in_flight) == [str(i) for i in range(4, 14)]
    assert play_requests(sampler, [NO, YES]) == ["4", "5"]
    assert play_requests(sampler, [YES]) == ["6"]
    assert sampler.next_requests() == []
    assert sampler.rollout.num_rounds == 3  # of this rollout's own policy


def test_what_is_accepted_beyond_two_batches_overflows_and_is_counted(monkeypatch):
    """
    Fourteen groups are requested and received at once, and all are accepted: four train, and four in the next rollout.
    """
    sampler = two_ahead(monkeypatch)
    monkeypatch.setattr(AcceptanceRate, "most_prompts_without_surplus", lambda self, wanted: 14)
    sampler.request_ahead()
    assert len(play_requests(sampler, [YES] * 14)) == 14
    batch = end_rollout(sampler)
    assert len(batch.train) == len(batch.carried_to_next) == 4  # no more than one rollout can train
    assert rollout_log(sampler, batch, ["right"], torch.ones(1), {})["rollouts_ahead/discarded"] == 6.0


def test_nothing_is_asked_for_that_no_rollout_would_train(monkeypatch):
    sampler = two_ahead(monkeypatch)
    sampler.request_ahead(1)
    assert len(sampler.queue.requests_in_flight) == 8
    play_requests(sampler, [YES] * 4)
    sampler.request_ahead(0)
    assert len(sampler.queue.requests_in_flight) == 4


@pytest.mark.parametrize("num_ranks", [4, 6])
def test_the_ranks_have_equal_shares_of_whatever_is_taken_in(monkeypatch, num_ranks):
    sampler = two_ahead(monkeypatch, num_ranks=num_ranks)
    sampler.request_ahead()
    for _ in range(4):
        while requests := sampler.next_requests():
            assert sum(nums(requests)) % num_ranks == 0
            play_requests(sampler, [YES, NO, NO] * 20, requests)
            sampler.request_ahead()
        end_rollout(sampler)
        sampler.start_rollout()


def test_a_checkpoint_holds_what_is_in_flight_and_what_has_no_answer_is_of_the_next_rollouts_policy(monkeypatch):
    sampler = two_ahead(monkeypatch)
    sampler.request_ahead()
    play_requests(sampler, [YES] * 4)
    end_rollout(sampler)
    again, differs = resumed(saved(sampler), sampler.queue.state_dict(), rollouts_ahead=2)
    assert differs == {}
    assert facts(again.queue.requests_in_flight) == facts(sampler.queue.requests_in_flight)
    assert again.passes == sampler.passes == 4 / 10_000
    again.unanswered = {5, 6}
    again.start_rollout(7)
    when = {
        one.group.name: (one.weights_rollout, one.weights_step, one.expires_at)
        for one in again.queue.requests_in_flight
    }
    assert when["4"] == (0, 0, 2)
    assert when["5"] == when["6"] == (1, 7, 3)
    assert names(again.queue.requests_in_flight) == [str(i) for i in range(4, 12)]


@pytest.mark.parametrize(("num_completed", "num_prompts"), [(1.0, 6), (2.0, 7)])
def test_the_rest_of_a_partial_group_in_flight_is_counted_on_and_no_prompt_is_requested_for_it_again(
    monkeypatch, num_completed, num_prompts
):
    """
    Two rollouts need eight groups. Two partial groups are expected to bring two of these, or one if half of the
    completed ones are dropped. So six or seven prompts are requested in addition to their rests, and later no more.
    """
    sampler = two_ahead(monkeypatch, num_generations=4, screen=1)
    sampler.selection.acceptance_record._completed = [1.0, num_completed]
    sampler.finish_rollout()
    let_wait(sampler, 2, num=1)
    sampler.request_ahead()
    requested = facts(sampler.queue.requests_in_flight)
    assert [one.is_first for one in sampler.queue.requests_in_flight] == [False] * 2 + [True] * num_prompts
    sampler.request_ahead()
    assert facts(sampler.queue.requests_in_flight) == requested


def test_a_prompt_that_one_policy_skips_is_not_put_to_the_next():
    class Skips(SelectionPolicy):
        def __init__(self, names):
            self.names, self.skipped_distributions = names, []

        def skips(self, name, may_skip):
            if name in self.names:
                self.skipped_distributions.append((1.0, 1.0))
            return name in self.names

    class SkipsToo(Skips):
        pass

    sampler = Sampler(stream(), target=2, num_generations=G, policies=[Skips("01"), SkipsToo("12")])
    sampler.start_rollout()
    assert names(sampler.next_requests()) == ["3", "4"]
    assert len(sampler.skipped_pass_rates) == 3  # prompts 0, 1 and 2, each of them once


def in_second_rollout(monkeypatch):
    """Return a sampler at the start of its second rollout, for which the first one has requested."""
    sampler = two_ahead(monkeypatch)
    sampler.request_ahead()
    play_requests(sampler, [YES] * 4)
    end_rollout(sampler)
    sampler.start_rollout(1)
    return sampler


def test_the_seconds_of_refills_leave_out_what_counts_as_the_first_round(monkeypatch):
    """Two rounds requested by an earlier rollout count as one, the first. A third one, of two groups, took 4 s."""
    sampler = in_second_rollout(monkeypatch)
    play_requests(sampler, [NO] * 4)
    play_requests(sampler, [YES, YES, NO, NO])
    sampler.request_ahead()
    assert play_requests(sampler, [YES, YES]) == ["12", "13"]
    for round_, seconds in zip(sampler.rollout.rounds, [1.0, 2.0, 4.0], strict=True):
        round_.seconds = seconds
    log = rollout_log(sampler, sampler.finish_rollout(), ["right"], torch.ones(1), {})
    assert (log["dynamic_sampling/rounds"], log["dynamic_sampling/refill_seconds"]) == (2.0, 4.0)


def test_all_that_was_asked_for_in_earlier_rollouts_is_one_round(monkeypatch):
    sampler = in_second_rollout(monkeypatch)
    sampler.request_ahead()
    assert play_requests(sampler, [NO] * 4) == ["4", "5", "6", "7"]
    assert play_requests(sampler, [YES, YES, NO, NO]) == ["8", "9", "10", "11"]  # no more than were missing each time
    assert (sampler.rollout.num_rounds, sampler.num_missing) == (1, 2)


def test_of_what_is_in_flight_a_rollout_takes_in_no_more_than_it_may_sample(monkeypatch):
    """
    Batches of four groups, and no more than six groups per rollout: six are in flight, of which four fill no batch.
    """
    sampler = two_ahead(monkeypatch, max_gen_batches=1.5)
    sampler.request_ahead()
    assert len(sampler.queue.requests_in_flight) == 6
    assert play_requests(sampler, [NO] * 4) == ["0", "1", "2", "3"]
    sampler.request_ahead()
    assert len(sampler.queue.requests_in_flight) == 6
    assert play_requests(sampler, [NO] * 2) == ["4", "5"]
    assert (sampler.next_requests(), sampler.num_missing) == ([], 4)


def test_what_would_be_too_old_for_the_next_rollout_is_taken_in_though_others_fill_the_batch(monkeypatch):
    sampler = two_ahead(monkeypatch)
    sampler.request_ahead()
    for step in (1, 2):
        sampler.finish_rollout()
        sampler.start_rollout(step)
    sampler.rollout.num_accepted_before = len(let_wait(sampler, 4, place=100))  # as if others had filled the batch
    assert sampler.num_missing == 0
    assert play_requests(sampler, [YES] * 12) == [str(i) for i in range(12)]  # requested in rollout 0, and due in 2
    assert sampler.next_requests() == []
    batch = sampler.finish_rollout()
    assert numbers(batch.train) == [0, 1, 2, 3]  # the oldest
    # they would train three rollouts after they were sampled
    assert numbers(batch.discarded) == [4, 5, 6, 7, 8, 9, 10, 11]
    assert numbers(batch.carried_to_next) == [12, 13, 14, 15]


# ---- The limit, several processes and screening ----


@pytest.mark.parametrize("limit", [1.0, 1.15, 1.5])
@pytest.mark.parametrize(
    ("num_generations", "num_ranks", "target"), [(8, 8, 2), (8, 3, 3), (16, 8, 1), (8, 8, 4), (4, 4, 4)]
)
@pytest.mark.parametrize("screen", ["on", 2])
def test_near_the_limit_the_share_that_makes_ranks_equal_is_no_reason_to_sample_little(
    limit, num_generations, num_ranks, target, screen
):
    """Each rollout samples at least three quarters of a batch, and never more than its limit."""
    sampler = make(
        target,
        num_generations=num_generations,
        num_ranks=num_ranks,
        screen=screen,
        carries=True,
        max_gen_batches=limit,
    )
    rng, batch = random.Random(0), target * num_generations
    for _ in range(12):
        sampler.start_rollout()
        while requests := sampler.next_requests():
            assert sum(nums(requests)) % num_ranks == 0
            screened_round(sampler, requests, [rng.random() < 0.5 for _ in requests])
        num_sampled = sampler.rollout.num_completions
        assert 0.75 * batch <= num_sampled <= limit * batch
        sampler.finish_rollout()
        for group in [*sampler.queue.accepted, *sampler.queue.partial]:
            sampler.queue.drop([group], "left out")


def test_prompts_that_were_skipped_in_another_dataset_are_no_part_of_the_passes_over_this_one():
    def of_twenty():
        return PromptStream(IterableDataset.from_generator(lambda: ({"prompt": str(i)} for i in range(20))), seed=0)

    before = Sampler(of_twenty(), target=2, num_generations=4)
    before.start_rollout()
    skipped = cycle([True, False])
    before.stream.take(200, lambda name, may_skip: may_skip and next(skipped))  # 400 prompts, half of them skipped
    after = Sampler(of_twenty(), target=2, num_generations=4)
    after.load_state_dict(json.loads(json.dumps(before.state_dict())), None, ignore_data_skip=True)
    assert after.new_passes_without_group() == 0
    after.stream.take(21)
    assert after.new_passes_without_group() == 1


def test_two_policies_of_one_class_are_refused():
    with pytest.raises(ValueError, match="Two selection policies are of the same class"):
        Sampler(stream(), target=2, num_generations=2, policies=[PromptMemory(), PromptMemory()])


def test_a_multiple_of_a_batch_is_not_a_prompt_short():
    sampler = Sampler(stream(), target=100, num_generations=2, batch_multiplier=1.15)
    sampler.start_rollout()
    assert len(sampler.next_requests()) == 115  # 1.15 * 100 is 114.99999999999999 in floating point

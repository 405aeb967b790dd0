# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Screening and pass-rate memory are switched on and off by the acceptance rate of a run."""

import copy
import json

import numpy as np
import pytest
import torch
from datasets import Dataset

from trl_dapo.sampling.auto_switch import AutoSwitch
from trl_dapo.sampling.policies import Decisions, SelectionPolicy
from trl_dapo.sampling.prompt_memory import PromptMemory
from trl_dapo.sampling.prompts import PromptStream
from trl_dapo.sampling.rounds import Completion, Round
from trl_dapo.sampling.sampler import Sampler
from trl_dapo.sampling.screen import Screen


pytestmark = pytest.mark.fast

G = 8


# ---- A simulated run ----


class Run:
    """A sampler for prompts with known pass rates, without rows."""

    def __init__(self, rate_N, auto=True, target=16, seed=0, **options):
        self.rate_N = rate_N
        self._rng = np.random.default_rng(seed)
        self.memory = PromptMemory(seed=seed, num_generations=G)
        self.screen = Screen("on", self.memory)
        policies: list[SelectionPolicy] = [self.memory, self.screen] if auto is not None else []
        self.switch = AutoSwitch(policies, policies, G)
        dataset = Dataset.from_dict({"id": range(len(rate_N))})
        self.sampler = Sampler(
            PromptStream(dataset, seed=seed),
            target=target,
            num_generations=G,
            carries=True,
            policies=[self.switch, *policies] if auto else policies,
            **{"max_gen_batches": 0.0, **options},
        )
        self.messages, self.requested = [], []

    @property
    def is_on(self):
        return self.memory.is_on, self.screen.is_on

    def roll_out(self, num_rollouts=1):
        for _ in range(num_rollouts):
            self.sampler.start_rollout()
            self.messages += self.sampler.selection.take_messages()
            self.requested.append([])
            while requests := self.sampler.next_requests():
                self.requested[-1] += [(one.group.name, one.num_completions) for one in requests]
                self._answer(requests)
            self.sampler.finish_rollout()
        return self

    @property
    def num_completions(self):
        return sum(num for rollout in self.requested for _, num in rollout)

    def _answer(self, requests):
        completions, by_size = [], {}
        for request in requests:
            group, num = request.group, request.num_completions
            known = group.num_received
            rate = self.rate_N[group.example["id"]]
            new = torch.tensor(self._rng.random(num) < rate).float()[:, None]
            completions += [Completion(group, known + i) for i in range(num)]
            group.receive(request, [0] * num)
            group.lengths += [1] * num
            group.truncated += [False] * num
            group.rewards = torch.cat([group.rewards, new]) if known else new
            by_size.setdefault((-known, group.num_received), []).append(group)
        self.sampler.add(Round(requests, completions))
        for (minus_known, _), groups in sorted(by_size.items(), key=lambda item: item[0]):
            correct = [group.rewards[:, 0] for group in groups]
            reasons = [None if 0 < one.sum() < len(one) else "all_wrong" for one in correct]
            counts = [(int(one[-minus_known:].sum()), len(one) + minus_known) for one in correct]
            self.sampler.record_decisions(Decisions(groups, reasons, -minus_known, counts))


def few_informative(num_prompts=2000, seed=0):
    """Prompts of which 12% can be solved, and the others never."""
    rng = np.random.default_rng(seed)
    num = int(0.12 * num_prompts)
    return np.concatenate([np.zeros(num_prompts - num), rng.beta(2, 2, num)])


def evenly_spread(num_prompts=2000, seed=0):
    """Pass rates that are uniform between 0 and 1: 7 of 9 groups of 8 are accepted."""
    return np.random.default_rng(seed).random(num_prompts)


# ---- On if it pays off, and otherwise off ----


@pytest.mark.parametrize("seed", range(3))
def test_where_one_prompt_in_ten_is_informative_both_are_on_within_three_rollouts_and_stay_on(seed):
    run = Run(few_informative(seed=seed), seed=seed).roll_out(3)
    assert run.is_on == (True, True)
    assert len(run.messages) == 2
    run.roll_out(40)
    assert run.is_on == (True, True)
    assert len(run.messages) == 2


def test_where_one_prompt_in_ten_is_informative_it_takes_less_than_0_4_times_the_completions():
    rate_N = few_informative()
    assert Run(rate_N).roll_out(30).num_completions < 0.4 * Run(rate_N, auto=None).roll_out(30).num_completions


@pytest.mark.parametrize("seed", range(3))
def test_where_most_groups_are_accepted_a_run_requests_what_it_would_without_both(seed):
    run = Run(evenly_spread(seed=seed), seed=seed).roll_out(30)
    assert run.messages == []
    assert run.requested == Run(evenly_spread(seed=seed), auto=None, seed=seed).roll_out(30).requested


def test_on_a_hard_tail_whose_prompts_are_solved_a_few_times_in_a_hundred_both_stay_off():
    # 1 - 0.97^8 = 22% of groups are accepted, and all prompts are alike.
    run = Run(np.full(2000, 0.03)).roll_out(30)
    assert run.messages == []
    assert run.is_on == (False, False)


def test_both_go_off_when_the_model_has_learnt_most_prompts_and_the_terminal_says_so():
    run = Run(few_informative()).roll_out(5)
    assert run.is_on == (True, True)
    run.rate_N = evenly_spread()
    run.roll_out(40)
    assert run.is_on == (False, False)
    assert [message.split(". ")[1] for message in run.messages[-2:]] == [
        "From here on, no prompt is skipped.",
        "From here on, whole groups are sampled.",
    ]


@pytest.mark.parametrize("share", [0.2, 0.25, 0.3])
def test_a_run_whose_acceptance_hovers_about_a_bound_does_not_flip_back_and_forth(share):
    """The acceptance rate of 100 rollouts is exactly the bound, and its estimate is above and below it in turn."""
    rng = np.random.default_rng(0)
    rate_N = np.concatenate([np.zeros(2000 - int(2000 * share)), np.full(int(2000 * share), 0.5)])
    rng.shuffle(rate_N)
    run = Run(rate_N).roll_out(100)
    assert len(run.messages) <= 2  # each is switched on at most once


# ---- What it learns from ----


class Skipping(SelectionPolicy):
    """A policy that skips what a test sets, and knows one pass rate for all prompts."""

    name = "skipping"

    def __init__(self, correct, wrong, saving=2.0):
        self.beta, self.saving = (correct, wrong), saving
        self.skipped_distributions = []

    def pass_rate_distribution(self, name):
        return self.beta

    def expected_saving(self, num_generations):
        return self.saving

    def describe_on(self, num_generations):
        return "some prompts are skipped"

    def describe_off(self):
        return "no prompt is skipped"


class Group:
    """The attributes of a group that the switch reads."""

    def __init__(self, num_received, num_generations=4):
        self.name, self.num_received, self.num_generations = "a", num_received, num_generations
        self.num_completions_missing = num_generations - num_received
        self.is_whole = self.num_completions_missing == 0


def test_whole_groups_count_as_accepted_or_not():
    policy = Skipping(1.0, 1.0)
    switch = AutoSwitch([policy], [policy], num_generations=4)
    groups = [Group(4)] * 4
    switch.observe(Decisions(groups, [None, "all_wrong", "all_wrong", None], 0, [(1, 4), (0, 4), (0, 4), (2, 4)]))
    assert (switch._num_prompts, switch._num_accepted) == (4, 2.0)


def test_first_completions_that_are_equal_count_for_the_probability_that_the_rest_differs():
    # Uniform pass rates, and two of two are incorrect: two more are incorrect too with probability B(1, 5) / B(1, 3) =
    # 3 / 5.
    policy = Skipping(1.0, 1.0)
    switch = AutoSwitch([policy], [policy], num_generations=4)
    switch.observe(Decisions([Group(2)] * 2, [None, "all_wrong"], 0, [(1, 2), (0, 2)]))
    assert switch._num_accepted == pytest.approx(1 + 2 / 5)


def test_prompts_that_were_skipped_count_for_what_was_expected_of_them():
    # Uniform pass rates: of four completions all are correct with probability 1 / 5, and all incorrect as well.
    policy = Skipping(1.0, 1.0)
    switch = AutoSwitch([policy], [policy], num_generations=4)
    policy.skipped_distributions += [(1.0, 1.0)] * 2
    switch.observe(Decisions([Group(4)], [None], 0, [(2, 4)]))
    policy.skipped_distributions += [(1.0, 1.0)]  # after the last round, by a draw ahead
    switch.start_rollout()
    assert switch.acceptance.num_groups == 4
    assert switch.acceptance.num_accepted == pytest.approx(1 + 3 * 3 / 5)


def test_what_each_of_two_policies_skipped_is_counted_once():
    """
    There are four prompts: an accepted one, two skipped ones whose groups would be accepted 3 times in 5, and a
    skipped one that is never solved.
    """
    one, other = Skipping(1.0, 1.0), Skipping(1.0, 1.0)
    switch = AutoSwitch([one, other], [one, other], num_generations=4)
    one.skipped_distributions += [(1.0, 1.0)]
    other.skipped_distributions += [(1.0, 1.0)]
    switch.observe(Decisions([Group(4)], [None], 0, [(2, 4)]))
    one.skipped_distributions += [(1e-9, 1.0)]
    switch.start_rollout()
    assert switch.acceptance.num_groups == 4
    assert switch.acceptance.num_accepted == pytest.approx(1 + 2 * 3 / 5)


def test_the_rest_of_a_group_is_not_counted_again():
    policy = Skipping(1.0, 1.0)
    switch = AutoSwitch([policy], [policy], num_generations=4)
    switch.observe(Decisions([Group(4)], [None], 2, [(1, 2)]))
    assert switch._num_prompts == 0


@pytest.mark.parametrize(("saving", "is_on"), [(1.2, False), (1.3, True)])
def test_a_policy_that_is_expected_to_save_little_stays_off(saving, is_on):
    policy = Skipping(1.0, 1.0, saving)
    switch = AutoSwitch([policy], [policy], num_generations=4)
    for _ in range(10):
        switch.observe(Decisions([Group(4)] * 20, ["all_wrong"] * 18 + [None] * 2, 0, [(0, 4)] * 20))
        switch.start_rollout()
    assert policy.is_on is is_on


def test_a_few_groups_that_are_all_dropped_switch_nothing_on():
    policy = Skipping(1.0, 1.0)
    switch = AutoSwitch([policy], [policy], num_generations=4)
    switch.observe(Decisions([Group(4)] * 4, ["all_wrong"] * 4, 0, [(0, 4)] * 4))
    switch.start_rollout()
    assert policy.is_on is False


def test_the_message_gives_the_rate_what_is_done_and_the_saving():
    policy = Skipping(1.0, 1.0, saving=2.94)
    switch = AutoSwitch([policy], [policy], num_generations=4)
    switch.observe(Decisions([Group(4)] * 100, ["all_wrong"] * 90 + [None] * 10, 0, [(0, 4)] * 100))
    switch.start_rollout()
    # Two further groups, one of them accepted, represent the prior: r = (10 + 1) / (100 + 2) = 0.108, and two standard
    # deviations are 2 sqrt(r (1 - r) / 102) = 0.061.
    assert switch.take_messages() == [
        "At most 17% of groups are accepted. From here on, some prompts are skipped. This is expected to take 2.9 "
        "times fewer completions for each accepted group."
    ]
    assert switch.take_messages() == []


def test_the_message_of_a_run_that_accepts_nothing_does_not_say_that_some_are_accepted():
    policy = Skipping(1.0, 1.0)
    switch = AutoSwitch([policy], [policy], num_generations=4)
    switch.observe(Decisions([Group(4)] * 28, ["all_wrong"] * 28, 0, [(0, 4)] * 28))
    switch.start_rollout()
    # (0 + 1) / (28 + 2) = 0.033, and 0.036 with the change that the rate may have had since: 0.036 + 2 x 0.035.
    assert switch.take_messages()[0].startswith("At most 11% of groups are accepted. ")


def test_the_message_says_why_a_policy_goes_off():
    """
    There are 80 accepted groups of 100: r = 81 / 102 = 0.794, less 2 sqrt(r (1 - r) / 102) = 0.080. Or little is
    saved.
    """
    for num_accepted, saving, why in (
        (80, 2.0, "At least 71% of groups are accepted"),
        (10, 1.05, "The expected saving is small by now (a factor of 1.05)"),
    ):
        policy = Skipping(1.0, 1.0, saving)
        switch = AutoSwitch([policy], [policy], num_generations=4)
        policy.is_on = True
        reasons = [None] * num_accepted + ["all_wrong"] * (100 - num_accepted)
        switch.observe(Decisions([Group(4)] * 100, reasons, 0, [(0, 4)] * 100))
        switch.start_rollout()
        assert switch.take_messages() == [f"{why}. From here on, no prompt is skipped."]


# ---- Checkpoints ----


@pytest.mark.parametrize("num_before", [1, 2, 10])
def test_a_resumed_run_switches_and_requests_as_one_that_was_not_stopped(num_before):
    rate_N = few_informative(400)
    run = Run(rate_N).roll_out(num_before)
    again = Run(rate_N)
    again._rng.bit_generator.state = run._rng.bit_generator.state
    state = json.loads(json.dumps(run.sampler.state_dict()))
    state["policies"]["PromptMemory"]["records"] = copy.deepcopy(run.memory._records)
    again.sampler.load_state_dict(state, copy.deepcopy(run.sampler.queue.state_dict()))
    assert again.is_on == run.is_on
    rest, rest_again = run.roll_out(10).requested[num_before:], again.roll_out(10).requested
    assert rest == rest_again
    assert again.switch.state_dict() == run.switch.state_dict()


def test_a_policy_that_the_run_goes_on_without_is_switched_no_more():
    run = Run(few_informative())
    run.sampler.selection.remove(run.screen)
    run.roll_out(5)
    assert run.is_on == (True, False)
    assert len(run.messages) == 1

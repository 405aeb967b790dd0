# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The number of first completions, and equal shares of requests, with examples computed by hand."""

import datetime

import pytest
from datasets import Dataset

from trl_dapo.sampling.example_names import prompt_name
from trl_dapo.sampling.groups import GenerationRequest, GroupState, PromptGroup
from trl_dapo.sampling.prompt_memory import Population
from trl_dapo.sampling.prompts import PromptStream
from trl_dapo.sampling.queue import GroupQueue
from trl_dapo.sampling.screen import cheapest_screen_size, expected_cost
from trl_dapo.sampling.selection import extend_to_equal_shares, num_for_equal_shares, rest_of, shrink_to_fit


pytestmark = pytest.mark.fast


def first(num, num_generations=8, number=0):
    """A request for the first completions of a group."""
    return GenerationRequest(PromptGroup(number, str(number), {}, num_generations, (0, number)), num)


def rest(num, num_generations=8, number=0):
    """A request for the rest of a group: `num` completions."""
    group = PromptGroup(number, str(number), {}, num_generations, (0, number))
    group.ranks = [0] * (num_generations - num)
    return GenerationRequest(group, num)


def nums(requests):
    return [request.num_completions for request in requests]


def never(num):
    raise AssertionError("no further prompt is needed")


def test_the_cost_of_an_accepted_group_is_the_first_few_over_their_chance_and_the_rest():
    # With a uniform pass rate, 2 of 4 agree in 2/3 of cases: 2 / (1/3) + 2. Whole groups agree in 2/5: 4 / (3/5).
    assert expected_cost(1, 1, 2, 4) == pytest.approx(8)
    assert expected_cost(1, 1, 4, 4) == pytest.approx(4 / 0.6)


def test_whole_groups_are_asked_for_where_most_are_accepted_and_few_where_most_are_not():
    assert cheapest_screen_size(1, 1, 4) == 4
    assert cheapest_screen_size(50, 50, 16) == 16  # a pass rate near one half
    assert cheapest_screen_size(0.01, 1, 16) in (2, 3)  # hardly ever solved
    assert cheapest_screen_size(0.01, 1, 2) == 2  # there is no smaller number


def test_the_rest_of_the_oldest_comes_first_as_far_as_completions_are_left():
    partial = [rest(num, number=i).group for i, num in enumerate((5, 4, 5))]
    assert [(one.group.number, one.num_completions) for one in rest_of(partial, 2, 99)] == [(0, 5), (1, 4)]
    assert nums(rest_of(partial, 3, 9)) == [5, 4]


def test_if_the_engine_takes_no_more_the_last_whole_groups_are_requested_in_part():
    # 3 x 16 = 48 rows, and room for 40: only the first 8 of the last are requested.
    whole = [first(16, 16, i) for i in range(3)]
    assert nums(shrink_to_fit(whole, 40)) == [16, 16, 8]
    assert nums(shrink_to_fit(whole[:2], 40)) == [16, 16]


def test_processes_have_equal_shares_by_one_more_of_the_last_first_completions():
    assert nums(extend_to_equal_shares([first(3), first(3), first(3)], 4, never)) == [3, 3, 6]
    assert nums(extend_to_equal_shares([first(3), first(8)], 4, never)) == [4, 8]
    # The rest of a group cannot grow, so three completions of another prompt are requested, even if it should be
    # sampled whole.
    for num in (2, 8):
        even = extend_to_equal_shares([rest(5)], 4, lambda _, num=num: [first(num, number=1)])  # 5 + 3 = 2 * 4
        assert [(one.group.number, one.num_completions) for one in even] == [(0, 5), (1, 3)]


@pytest.mark.parametrize("num_ranks", [2, 3, 8, 16])
def test_whatever_is_partial_processes_get_equal_shares(num_ranks):
    for num in range(1, 8):
        even = extend_to_equal_shares([rest(num)], num_ranks, lambda wanted: [first(8, number=1)] * wanted)
        assert sum(nums(even)) % num_ranks == 0
        # A single completion cannot be compared with another one. If one is missing, each process takes one more.
        assert all(2 <= one <= 8 for one in nums(even)[1:])
        assert sum(nums(even)) == num + num_for_equal_shares([rest(num)], num_ranks) <= num + num_ranks + 1


@pytest.mark.parametrize("kind", [Dataset.from_list, lambda rows: Dataset.from_list(rows).to_iterable_dataset()])
def test_a_checkpoint_keeps_partial_groups_by_their_position_in_the_stream(kind):
    rows = [{"id": i, "on": datetime.date(2026, 1, 1 + i)} for i in range(8)]
    stream, queue = PromptStream(kind(rows), seed=0), GroupQueue(8)
    for index in range(11):  # 7 and 8 are of the first pass and the second
        ((name, example),) = stream.take(1)
        if index in (3, 7, 8):
            request = GenerationRequest(queue.draw(name, example, stream.taken_at[0]), 3)
            queue.send([request])
            request.group.receive(request, [0, 0, 0])
            queue.record_decision(request.group, GroupState.PARTIAL)
    assert [group.stream_position for group in queue.partial] == [(0, 3), (0, 7), (1, 0)]

    def resumed(rows):
        other, again = PromptStream(kind(rows), seed=0), GroupQueue(8)
        other.load_state_dict(stream.state_dict())
        return again.load_state_dict(queue.state_dict(), other), again, other

    found, again, other = resumed(rows)
    assert found == (0, True)
    assert again.state_dict() == queue.state_dict()
    assert [group.example for group in again.partial] == [group.example for group in queue.partial]
    assert other.take(3) == stream.take(3)
    found, again, _ = resumed([row | {"on": None} for row in rows])
    assert (found, again.partial) == ((3, True), [])


def test_a_population_that_is_looked_at_again_forgets_by_rounds():
    population = Population()
    for _ in range(98):
        population.update(0, 4)
    mean = lambda: population.pass_rate_distribution()[0] / sum(population.pass_rate_distribution())  # noqa: E731
    assert mean() == pytest.approx(1 / 100)  # two observations of 1/2 each, and 98 of 0
    population.fade(0.5)
    assert mean() == pytest.approx(1 / 51)


def test_an_example_whose_keys_json_cannot_hold_is_told_from_others():
    odd = {"id": 1, "prompt": "1+1", "at": {(1, 2): 3, 4: 5}}
    other = odd | {"at": {(1, 2): 4}}
    assert prompt_name(odd | {"id": None}) != prompt_name({"prompt": "1+1", "at": {(1, 2): 4, 4: 5}})
    states = [PromptGroup(0, "1", example, 8, (0, 0)).state_dict()["example_digest"] for example in (odd, other)]
    assert states[0] != states[1]

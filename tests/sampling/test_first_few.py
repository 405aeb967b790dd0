# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""How many completions are asked for first, and what a round asks for, by hand."""

import datetime
import json
from types import SimpleNamespace

import pytest
from datasets import Dataset

from trl_dapo.sampling.example_names import prompt_name
from trl_dapo.sampling.prompt_memory import Population
from trl_dapo.sampling.prompts import PromptStream
from trl_dapo.sampling.refill import Batch, Group
from trl_dapo.sampling.rollout import Rollout
from trl_dapo.sampling.rounds import Ask
from trl_dapo.sampling.screening import (
    asks_of,
    cheapest_first,
    expected_cost,
    in_equal_shares,
    rest_of,
    state_of,
    to_carry,
    within_rows,
)


pytestmark = pytest.mark.fast


def asks(*nums):
    return [Ask(str(i), {"id": i}, num) for i, num in enumerate(nums)]


def never(num):
    raise AssertionError("no further prompt is needed")


def test_the_cost_of_an_accepted_group_is_the_first_few_over_their_chance_and_the_rest():
    # Of a uniform pass rate, 2 of 4 agree in 2/3 of cases: 2 / (1/3) + 2; whole groups agree in 2/5: 4 / (3/5).
    assert expected_cost(1, 1, 2, 4) == pytest.approx(8)
    assert expected_cost(1, 1, 4, 4) == pytest.approx(4 / 0.6)


def test_whole_groups_are_asked_for_where_most_are_accepted_and_few_where_most_are_not():
    assert cheapest_first(1, 1, 4) == 4
    assert cheapest_first(50, 50, 16) == 16  # a pass rate near one half
    assert cheapest_first(0.01, 1, 16) in (2, 3)  # hardly ever solved
    assert cheapest_first(0.01, 1, 2) == 2  # there is no fewer


def test_the_rest_of_the_oldest_comes_first():
    half = {Group(0, 4): Ask("a", {}, 3), Group(2, 0): Ask("b", {}, 4), Group(2, 1): Ask("c", {}, 3)}
    assert rest_of(half, 2, None, 8) == [Ask("a", {}, 5, Group(0, 4)), Ask("b", {}, 4, Group(2, 0))]


def test_where_the_engine_takes_no_more_the_last_whole_groups_are_asked_for_a_few():
    # 3 x 16 = 48 rows, and room for 40: the last is asked for 8 first.
    assert [ask.num for ask in within_rows(asks(16, 16, 16), 40, 16)] == [16, 16, 8]
    assert [ask.num for ask in within_rows(asks(16, 16), 40, 16)] == [16, 16]


def test_ranks_have_equal_shares_by_one_more_of_the_last_first_few():
    assert [ask.num for ask in in_equal_shares(asks(3, 3, 3), 8, 4, never)] == [3, 3, 6]
    assert [ask.num for ask in in_equal_shares(asks(3, 8), 8, 4, never)] == [4, 8]
    # The rest of a group cannot be more: three of another prompt are asked, even of one that is best asked for whole.
    rest = [Ask("a", {}, 5, Group(0, 0))]
    for num in (2, 8):
        even = in_equal_shares(rest, 8, 4, lambda _, num=num: [Ask("b", {}, num)])  # 5 + 3 = 2 * 4
        assert [(ask.name, ask.num) for ask in even] == [("a", 5), ("b", 3)]


@pytest.mark.parametrize("num_ranks", [2, 3, 8, 16])
def test_whatever_is_partial_groups_ranks_get_equal_shares(num_ranks):
    for rest in range(1, 8):
        even = in_equal_shares([Ask("a", {}, rest, Group(0, 0))], 8, num_ranks, lambda num: [Ask("b", {}, 8)] * num)
        assert sum(ask.num for ask in even) % num_ranks == 0
        # One completion has nothing to be compared with: where one is missing, each rank takes one more.
        assert all(2 <= ask.num <= 8 for ask in even[1:])
        assert sum(ask.num for ask in even) <= rest + num_ranks + 1


def test_what_is_partial_groups_is_carried_in_the_order_of_its_age():
    """Two groups of an earlier rollout were asked for 4 and 3, one of this rollout for 2: in that order they go on."""
    half = dict(zip([Group(0, 0), Group(1, 0), Group(2, 5)], asks(4, 3, 2), strict=True))
    carried, moved = to_carry(Rollout(8, half=half), Batch([], [], [], half=[*half]), 8, 1)
    assert carried == [([Group(2, 5)], 2), ([Group(1, 0)], 3), ([Group(0, 0)], 4)]
    assert moved == dict(zip([Group(2, 0), Group(1, 0), Group(0, 0)], asks(4, 3, 2), strict=True))
    assert [name for _, _, name, *_ in state_of(moved)] == ["0", "1", "2"]  # in a checkpoint too


@pytest.mark.parametrize("kind", [Dataset.from_list, lambda rows: Dataset.from_list(rows).to_iterable_dataset()])
def test_a_checkpoint_keeps_what_is_partial_groups_by_where_it_stands(kind):
    rows = [{"id": i, "on": datetime.date(2026, 1, 1 + i)} for i in range(8)]
    stream, half = PromptStream(kind(rows), seed=0), {}
    for index in range(11):  # 7 and 8 are of the first pass and the second
        ((name, example),) = stream.take(1)
        if index in (3, 7, 8):
            half[Group(1, index)] = Ask(name, example, 3, place=stream.taken_at[0])
    assert [ask.place for ask in half.values()] == [(0, 3), (0, 7), (1, 0)]
    state = json.loads(json.dumps(state_of(half)))

    def resumed(rows):
        other = PromptStream(kind(rows), seed=0)
        other.load_state_dict(stream.state_dict())
        (half,) = asks_of([state], other)
        return half, other

    again, other = resumed(rows)
    assert again == half
    assert other.take(3) == stream.take(3)
    assert resumed([row | {"on": None} for row in rows])[0] == {}
    state = [[number, i, name, "{}", num] for number, i, name, num, *_ in state]  # as an earlier version wrote it
    assert resumed(rows)[0] == {}


def test_a_population_that_is_looked_at_again_forgets_by_rounds():
    population = Population()
    for _ in range(98):
        population.update(0, 4)
    mean = lambda: population.pass_rate()[0] / sum(population.pass_rate())  # noqa: E731
    assert mean() == pytest.approx(1 / 100)  # two looks of 1/2 each, and 98 of 0
    population.fade(0.5)
    assert mean() == pytest.approx(1 / 51)


def test_an_example_whose_keys_json_cannot_hold_is_partial_groups_like_any_other():
    odd = {"id": 1, "prompt": "1+1", "at": {(1, 2): 3, 4: 5}}
    assert prompt_name(odd | {"id": None}) != prompt_name({"prompt": "1+1", "at": {(1, 2): 4, 4: 5}})
    (state,) = state_of({Group(0, 0): Ask("1", odd, 2, place=(0, 0))})
    (other,) = state_of({Group(0, 0): Ask("1", odd | {"at": {(1, 2): 4}}, 2, place=(0, 0))})
    assert state != other


def test_carried_first_few_are_repeated_only_as_far_as_the_ranks_rows_need_it():
    for size, num in ((4, 3), (3, 4)):  # on two ranks; three groups of three completions are nine rows
        half = {Group(0, i): Ask(str(i), {}, size) for i in range(3)}
        ((groups, _),), _ = to_carry(SimpleNamespace(half=half), Batch([], [], [], [*half]), 8, num_ranks=2)
        assert len(groups) == num

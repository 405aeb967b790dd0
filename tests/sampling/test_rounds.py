# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Rows, their scoring, and their way into a batch, with examples computed by hand."""

import math

import numpy as np
import pytest
import torch

from trl_dapo.ranks import local_slice
from trl_dapo.sampling import rounds, rows
from trl_dapo.sampling.groups import GenerationRequest, PromptGroup
from trl_dapo.sampling.rounds import (
    Completion,
    RoundRecording,
    ScoringPlan,
    bring_together,
    in_batch,
    note_scores,
    plan_scoring,
    receive_rows,
    rows_of_batch,
)
from trl_dapo.sampling.rows import as_generated, exchange_rows, rows_from_generated


pytestmark = pytest.mark.fast


CPU = torch.device("cpu")


def generated(lengths, logprobs=None):
    """Return the output of TRL's `_generate` for completions of these lengths. Row i has the token ids i, i, ..."""
    completion_ids = [[i] * length for i, length in enumerate(lengths)]
    prompt_ids = [[100 + i] for i in range(len(lengths))]
    return prompt_ids, completion_ids, None, [f"completion {i}" for i in range(len(lengths))], logprobs, {}, None, []


def rows_of(lengths, **kwargs):
    return rows_from_generated(generated(lengths, **kwargs), [f"prompt {i}" for i in range(len(lengths))])


def new_group(num_generations=2, number=0, name="p"):
    return PromptGroup(number, name, {}, num_generations, (0, number))


def group_of(lengths, num_generations=None, number=0, **kwargs):
    """A group that has completions of these lengths, with the rewards 0, 1, ..."""
    group = new_group(num_generations or len(lengths), number)
    group.receive(GenerationRequest(group, len(lengths)), [0] * len(lengths))
    group.rows = dict(enumerate(rows_of(lengths, **kwargs)))
    group.rewards = torch.arange(float(len(lengths))).unsqueeze(1)
    return group


def num_tokens(found):
    return [len(row.completion_ids) for row in found]


def as_text(share):
    """Completions, by the name of their group and their index."""
    return " ".join(f"{group.name}{index}" for group, index in share)


class SentError(Exception):
    """Raised with what a process sends, before the others have sent theirs."""


class Processes:
    """Processes that run in turn. Each may exchange bytes or gather a tensor once."""

    device = CPU

    def __init__(self):
        self.rank, self.num_ranks, self.sent = 0, 1, None

    def call(self, num_ranks, function):
        """Return the results of a function of the rank on each of `num_ranks` processes."""
        self.num_ranks, self.sent, sent = num_ranks, None, []
        for self.rank in range(num_ranks):
            with pytest.raises(SentError) as error:
                function(self.rank)
            sent.append(error.value.args[0])
        self.sent, results = sent, []
        for self.rank in range(num_ranks):
            results.append(function(self.rank))
        return results

    def rank_and_world_size(self):
        return self.rank, self.num_ranks

    def _share(self, mine):
        if self.sent is None:
            raise SentError(mine)
        return self.sent

    def exchange_bytes(self, payloads, device):
        return [theirs[self.rank] for theirs in self._share(payloads)]

    def gather(self, tensor):
        return torch.cat(self._share(tensor))


@pytest.fixture
def processes(monkeypatch):
    made = Processes()
    for module in (rounds, rows):
        monkeypatch.setattr(module, "rank_and_world_size", made.rank_and_world_size)
    monkeypatch.setattr(rows, "exchange_bytes", made.exchange_bytes)
    return made


# ---- Rows ----


def test_what_was_recorded_is_replayed():
    made = rows_from_generated(generated([2, 3], logprobs=[[-0.5, None], [-1.0, -2.0, -3.0]]), ["a", "b"])
    prompt_ids, completion_ids, tool_mask, texts, logprobs, extra, images, tool_images = as_generated(made)
    assert [ids.tolist() for ids in prompt_ids] == [[100], [101]]
    assert [ids.tolist() for ids in completion_ids] == [[0, 0], [1, 1, 1]]
    assert completion_ids[0].dtype == np.int64  # what TRL's padding and `gather` take
    assert texts == ["completion 0", "completion 1"]
    assert logprobs[1] == [-1.0, -2.0, -3.0]
    assert logprobs[0][0] == -0.5
    assert math.isnan(logprobs[0][1])  # a token for which the engine has no log-probability
    assert (tool_mask, extra, images, tool_images) == (None, {}, None, [])


def test_images_are_found_in_the_messages_they_were_moved_into():
    messages = [{"role": "user", "content": [{"type": "image", "image": "cat.png"}, {"type": "text", "text": "?"}]}]
    made = rows_from_generated(generated([1, 1]), [messages, "text only"])
    assert [row.images for row in made] == [["cat.png"], None]


def test_messages_that_a_reward_function_changes_are_remembered_as_they_were():
    prompt, answer = [{"role": "user", "content": "2+2"}], [{"role": "assistant", "content": "right"}]
    (row,) = rows_from_generated(([[1]], [[2]], None, [answer], None, {}, None, []), [prompt])
    prompt[0]["content"] = answer[0]["content"] = "changed"
    assert [row.prompt[0]["content"], row.completion[0]["content"]] == ["2+2", "right"]


def test_the_tokens_of_tools_are_not_the_models_own():
    row, other = rows_from_generated(
        ([[1]] * 2, [[2, 3, 4], [5]], [[1, 0, 1], [1]], ["", ""], None, {}, None, []), "ab"
    )
    assert (row.num_tokens, other.num_tokens) == (2, 1)
    assert rows_of([3])[0].num_tokens == 3


def test_groups_that_wait_survive_a_checkpoint_that_loads_only_weights(tmp_path):
    torch.save(group_of([2, 3], logprobs=[[-0.5, -0.25], [-1.0] * 3]).state_dict(), tmp_path / "state.pt")
    again = PromptGroup.from_state_dict(torch.load(tmp_path / "state.pt", weights_only=True), {}, 2)
    assert [again.rows[i].completion_ids.tolist() for i in range(2)] == [[0, 0], [1, 1, 1]]
    assert again.rows[0].completion_ids.dtype == np.int32
    assert again.rows[0].logprobs.tolist() == [-0.5, -0.25]
    assert again.rewards.tolist() == [[0.0], [1.0]]
    assert (again.name, again.is_whole) == ("p", True)


def test_rows_that_the_ranks_cannot_share_equally_are_refused():
    assert local_slice(6, 1, 3) == slice(2, 4)
    with pytest.raises(ValueError, match="7 rows cannot be split into equal parts for 2 processes"):
        local_slice(7, 0, 2)


# ---- Batches ----


def test_groups_come_in_the_order_asked_for():
    first, _, third = groups = [group_of([1, 1]), group_of([1, 1], number=1), group_of([2, 2], number=2)]
    found = rows_of_batch([third, first], [], 2, CPU)
    assert num_tokens(found) == [2, 2, 1, 1]
    assert [row.completion for row in found] == ["completion 0", "completion 1"] * 2
    assert torch.stack(in_batch(lambda group: group.rewards, [third, first], 2)).flatten().tolist() == [0, 1, 0, 1]
    assert in_batch(lambda group: [group.number] * 2, groups, 2) == [0, 0, 1, 1, 2, 2]


def test_rows_that_only_fill_the_batch_are_cut_to_one_token_and_the_group_keeps_its_own():
    trains, fills = (group_of([n, n], logprobs=[[-1.0] * n] * 2) for n in (5, 7))
    found = rows_of_batch([trains], [fills], 2, CPU)
    assert num_tokens(found) == [5, 5, 1, 1]
    assert [len(row.logprobs) for row in found] == [5, 5, 1, 1]
    assert num_tokens(fills.rows.values()) == [7, 7]


def test_three_first_of_eight_fill_the_place_of_a_whole_group_and_no_more(monkeypatch):
    first = group_of([5, 6, 7], num_generations=8)
    # With several processes, a position after the last row would be sent to none of them.
    monkeypatch.setattr(rounds, "rank_and_world_size", lambda: (0, 2))
    sent = []
    monkeypatch.setattr(rounds, "exchange_rows", lambda outgoing, device: sent.extend(outgoing) or outgoing[0])
    rows_of_batch([], [first], 8, CPU)
    assert [[place for place, _ in part] for part in sent] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    texts = [row.completion for part in sent for _, row in part]
    assert [text[-1] for text in texts] == ["0", "1", "2", "0", "1", "2", "0", "1"]
    assert in_batch(lambda group: "abc", [first], 8) == ["a", "b", "c", "a", "b", "c", "a", "b"]


def test_a_row_whose_tools_returned_images_is_not_cut():
    group = group_of([5, 5])
    group.rows[0].tool_images = ["plot.png"]
    assert num_tokens(rows_of_batch([], [group], 2, CPU)) == [5, 1]


def test_rows_are_put_in_the_order_of_their_places(processes):
    """
    Each process has one completion of each of two groups. The rows of the first arrive after those of the second.
    """

    def find(rank):
        groups = [group_of([1, 2]), group_of([3, 4], number=1)]
        for group in groups:
            group.rows = {1 - rank: group.rows[1 - rank]}
        return num_tokens(rows_of_batch(groups, [], 2, CPU))

    assert processes.call(2, find) == [[1, 2], [3, 4]]


def test_keys_and_rows_come_to_the_process_they_are_sent_to(processes):
    def send(rank):
        mine = rows_of([1 + rank, 3 + rank, 5 + rank])
        outgoing = [[(f"{rank} to {to}", mine[to])] if to != 1 else [] for to in range(3)]
        return [(key, len(row.completion_ids)) for key, row in exchange_rows(outgoing, CPU)]

    assert processes.call(3, send) == [
        [("0 to 0", 1), ("1 to 0", 2), ("2 to 0", 3)],
        [],
        [("2 to 2", 7), ("0 to 2", 5), ("1 to 2", 6)],  # its own first
    ]


# ---- Completions are added to their groups ----


def received(accelerator, rank, names, num_ranks=2):
    """
    The first two completions of each prompt, each one token longer than the last. Those with an even length are cut
    off.
    """
    groups = [new_group(4, number, name) for number, name in enumerate(names)]
    mine = range(2 * len(groups))[local_slice(2 * len(groups), rank, num_ranks)]
    recording = RoundRecording(
        rows=rows_of([i + 1 for i in mine]), lengths=[i + 1 for i in mine], truncated=[i % 2 == 1 for i in mine]
    )
    requests = [GenerationRequest(group, 2, weights_rollout=3, weights_step=5) for group in groups]
    return groups, receive_rows(requests, recording, accelerator)


def test_completions_join_their_groups_and_each_process_keeps_the_rows_that_it_sampled(processes):
    def receive(rank):
        groups, completions = received(processes, rank, ["p", "q", "r"])
        assert [(group.number, index) for group, index in completions] == [
            (0, 0),
            (0, 1),
            (1, 0),
            (1, 1),
            (2, 0),
            (2, 1),
        ]
        assert [group.ranks for group in groups] == [[0, 0], [0, 1], [1, 1]]
        assert [group.lengths for group in groups] == [[1, 2], [3, 4], [5, 6]]
        assert [group.truncated for group in groups] == [[False, True]] * 3
        assert (groups[0].weights_rollouts, groups[0].weights_steps) == ([3, 3], [5, 5])
        return [{index: len(row.completion_ids) for index, row in group.rows.items()} for group in groups]

    assert processes.call(2, receive) == [[{0: 1, 1: 2}, {0: 3}, {}], [{}, {1: 4}, {0: 5, 1: 6}]]


def test_processes_that_drew_different_prompts_are_refused(processes):
    with pytest.raises(RuntimeError, match="The processes drew different prompts"):
        processes.call(2, lambda rank: received(processes, rank, ["p", f"q{rank}"]))


# ---- Which process scores what ----


def requests_of(num_ranks, num_generations, asked):
    """
    Return the requests of a round whose completions were received, and these completions.

    For each group: the processes that hold the completions it had before, and the number of new ones.
    """
    requests, completions = [], []
    for number, (known, num_new) in enumerate(asked):
        group = new_group(num_generations, number, "ABCD"[number])
        group.receive(GenerationRequest(group, len(known)), known)
        requests.append(GenerationRequest(group, num_new))
        completions += [Completion(group, len(known) + i) for i in range(num_new)]
    per_rank = len(completions) // num_ranks
    for place, (group, _) in enumerate(completions):
        group.receive(requests[group.number], [place // per_rank])
    return requests, completions


def plan_of(num_ranks, num_generations, asked, **options):
    """Return what each process scores, and whether it scores exactly what it sampled."""
    plan = plan_scoring(*requests_of(num_ranks, num_generations, asked), num_ranks, **options)
    return [as_text(share) for share in plan.per_rank], plan.is_in_place


WHOLE, FIRST_TWO = ([], 4), ([], 2)  # of groups of four


@pytest.mark.parametrize(
    ("asked", "shares", "is_in_place"),
    [
        ([WHOLE, WHOLE], ["A0 A1 A2 A3 B0 B1 B2 B3"], True),
        ([FIRST_TWO, ([], 3)], ["A0 A1 B0 B1 B2"], True),
        ([([0, 0], 2)], ["A0 A1 A2 A3"], False),  # the rest of a group is scored with its first completions
        ([([0, 0], 2), FIRST_TWO, WHOLE], ["B0 B1 C0 C1 C2 C3 A0 A1 A2 A3"], False),
    ],
)
def test_one_process_scores_whole_groups(asked, shares, is_in_place):
    assert plan_of(1, 4, asked) == (shares, is_in_place)


@pytest.mark.parametrize(
    ("asked", "shares", "is_in_place"),
    [
        ([WHOLE, WHOLE], ["A0 A1 A2 A3", "B0 B1 B2 B3"], True),
        # B was sampled by both processes.
        ([WHOLE, WHOLE, WHOLE], ["A0 A1 A2 A3 B0 B1 B2 B3", "C0 C1 C2 C3 C0 C1 C2 C3"], False),
        ([WHOLE], ["A0 A1 A2 A3", "A0 A1 A2 A3"], False),
        # First completions are scored by the processes that hold them, one or two.
        ([FIRST_TWO, FIRST_TWO, FIRST_TWO], ["A0 A1 B0", "B1 C0 C1"], True),
        ([([0, 0], 2), FIRST_TWO], ["A0 A1 A2 A3", "B0 B1 B0 B1"], False),
        # The rest of A was sampled by the first process, that of B by the second.
        ([([1, 1], 2), ([0, 0], 2)], ["A0 A1 A2 A3", "B0 B1 B2 B3"], False),
        ([([0, 1], 2), ([], 3), ([], 3)], ["B0 B1 A0 A1 A2 A3", "B2 C0 C1 C2 B2 C0"], False),
    ],
)
def test_two_processes_bring_split_groups_together(asked, shares, is_in_place):
    assert plan_of(2, 4, asked) == (shares, is_in_place)


@pytest.mark.parametrize(
    ("num_generations", "asked", "shares", "is_in_place"),
    [
        (4, [WHOLE] * 3, ["A0 A1 A2 A3", "B0 B1 B2 B3", "C0 C1 C2 C3"], True),
        # Four groups of three: the first process samples B0 too, the second B1 B2 C0 C1, the third C2.
        (
            3,
            [([], 3)] * 4,
            ["A0 A1 A2 C0 C1 C2", "B0 B1 B2 B0 B1 B2", "D0 D1 D2 D0 D1 D2"],
            False,
        ),
        (4, [([0, 0], 2), FIRST_TWO, FIRST_TWO], ["A0 A1 A2 A3", "B0 B1 B0 B1", "C0 C1 C0 C1"], False),
        # The rests of two groups, of which each process sampled one completion more, and first completions.
        (3, [([2, 2], 1), ([1, 0], 1), ([], 1)], ["A0 A1 A2", "B0 B1 B2", "C0 C0 C0"], False),
    ],
)
def test_three_processes_bring_split_groups_together(num_generations, asked, shares, is_in_place):
    assert plan_of(3, num_generations, asked) == (shares, is_in_place)


def test_processes_without_a_group_score_copies_of_the_first_one():
    assert plan_of(4, 4, [WHOLE]) == (["A0 A1 A2 A3"] * 4, False)
    assert plan_of(4, 4, [WHOLE, WHOLE]) == (
        ["A0 A1 A2 A3", "B0 B1 B2 B3", "A0 A1 A2 A3", "A0 A1 A2 A3"],
        False,
    )
    assert plan_of(3, 6, [([], 6)]) == (["A0 A1 A2 A3 A4 A5"] * 3, False)


def test_completions_that_cannot_be_moved_are_scored_where_they_are():
    assert plan_of(2, 4, [WHOLE] * 3, may_move=False) == (["A0 A1 A2 A3 B0 B1", "B2 B3 C0 C1 C2 C3"], True)
    assert plan_of(1, 4, [([0, 0], 2)], may_move=False) == (["A2 A3"], True)


def with_rows(completions, known, rank):
    """Give the groups of completions the rows that a process holds. The length of each row identifies it."""
    for group, index in [*completions, *known]:
        if group.ranks[index] == rank:
            length = 10 * (group.number + 1) + index
            (group.rows[index],) = rows_of([length])


def test_rows_come_to_the_process_that_scores_them_and_whole_groups_stay_there(processes):
    """The first completions of A are on the second process; its rest and the first ones of B were just sampled."""

    def bring(rank):
        requests, completions = requests_of(2, 4, [([1, 1], 2), ([], 2)])
        a, b = (request.group for request in requests)
        with_rows(completions, [(a, 0), (a, 1)], rank)
        plan = plan_scoring(requests, completions, 2)
        found = num_tokens(bring_together(plan, CPU))
        assert (a.ranks, b.ranks) == ([0] * 4, [1] * 2)
        return found, sorted(a.rows), sorted(b.rows)

    assert processes.call(2, bring) == [
        ([10, 11, 12, 13], [0, 1, 2, 3], []),
        ([20, 21, 20, 21], [], [0, 1]),
    ]


def test_of_a_group_that_several_processes_score_one_keeps_the_rows(processes):
    def bring(rank):
        requests, completions = requests_of(3, 3, [([], 3)])
        with_rows(completions, [], rank)
        (group,) = (request.group for request in requests)
        found = num_tokens(bring_together(plan_scoring(requests, completions, 3), CPU))
        assert group.ranks == [0] * 3
        return found, sorted(group.rows)

    assert processes.call(3, bring) == [([10, 11, 12], [0, 1, 2]), ([10, 11, 12], []), ([10, 11, 12], [])]


def test_groups_get_the_rewards_of_their_completions_and_what_was_logged_of_them():
    a, b = new_group(3, 0, "A"), new_group(3, 1, "B")
    for group, num in ((a, 3), (b, 2)):
        group.receive(GenerationRequest(group, num), [0] * num)
    shares = [[(b, 0), (b, 1), (b, 0)], [(a, 2), (a, 0), (a, 1)]]
    plan = ScoringPlan([[Completion(*one) for one in share] for share in shares], False)
    rewards_BF = torch.tensor([[1.0, 0.0], [2.0, 0.0], [9.0, 9.0], [3.0, 0.0], [4.0, 0.5], [5.0, 0.0]])
    note_scores(plan, rewards_BF, {"seen": list("xyzuvw")})
    assert a.rewards.tolist() == [[4.0, 0.5], [5.0, 0.0], [3.0, 0.0]]
    assert b.rewards.tolist() == [[1.0, 0.0], [2.0, 0.0]]  # for a completion that was scored twice, the first score
    assert (a.extra_logs, b.extra_logs) == ({"seen": ["v", "w", "u"]}, {"seen": ["x", "y"]})


# ---- Policies ----


def test_a_group_is_as_stale_as_its_oldest_completion():
    group = new_group(4)
    assert group.staleness(3) == 0
    group.receive(GenerationRequest(group, 2, weights_rollout=3), [0, 0])
    assert [group.staleness(rollout) for rollout in (3, 4, 5)] == [0, 1, 2]
    group.receive(GenerationRequest(group, 2, weights_rollout=4), [0, 0])
    assert group.weights_rollouts == [3, 3, 4, 4]
    assert [group.staleness(rollout) for rollout in (4, 5)] == [1, 2]

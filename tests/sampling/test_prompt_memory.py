# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The pass-rate memory: what it stores for a prompt, and how often the prompt is skipped."""

import json
import math
import random

import pyarrow.parquet as pq
import pytest

from trl_dapo.sampling.example_names import digest, prompt_name
from trl_dapo.sampling.prompt_memory import PromptMemory, expected_acceptance


pytestmark = pytest.mark.fast


G = 16


def taught(num_prompts=300, seed=0, **options):
    """A memory that has observed prompts of which a third are solved, a third never solved, and a third in between."""
    memory = PromptMemory(seed=seed, **options)
    for i in range(num_prompts):
        memory.update(str(i), (0, G // 2, G)[i % 3], G, step=0)
    return memory


def hopeless():
    """A memory with waits of up to 8 passes, whose prompt "0" is never solved."""
    memory = taught(longest_wait=8)
    for _ in range(5):
        memory.update("0", 0, 100 * G, step=0)
    return memory


def share_skipped(memory, prompt_id, num_passes=2000):
    """Share of the passes in which a prompt is skipped, if nothing new is learned."""
    return sum(memory.draw_skip(prompt_id, G) for _ in range(num_passes)) / num_passes


def read_back(state, path):
    """A memory that continues from a checkpoint's state and file."""
    memory = PromptMemory()
    memory.load_state_dict(json.loads(json.dumps(state)) | {"records": PromptMemory.read(path)})
    return memory


# ---- The prediction ----


@pytest.mark.parametrize(
    ("correct", "wrong", "num", "expected"),
    [
        # with a uniform pass rate, all 17 counts of 16 draws are equally likely, and 2 are dropped
        (1, 1, G, 15 / 17),
        (5e5, 5e5, 2, 1 / 2),
        (1e5, 3e5, 3, 1 - 1 / 64 - 27 / 64),
    ],
    ids=str,
)
def test_the_acceptance_of_a_pass_rate(correct, wrong, num, expected):
    assert expected_acceptance(correct, wrong, num) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("correct", "wrong"), [(1e-6, 1e-6), (1e-9, 1.0), (1.0, 1e-9), (1e-12, 1e9)])
def test_the_acceptance_of_extreme_pass_rates_is_a_probability(correct, wrong):
    assert 0 <= expected_acceptance(correct, wrong, G) < 0.01


def test_the_population_is_fitted_by_its_first_two_moments():
    """
    0, 2 and 4 of 4 completions are correct: the mean p is 1/2, and c (c - 1) / 12 is 0, 1/6 and 1, so the mean p^2 is
    7/18. Variance 7/18 - 1/4 = 5/36, concentration (1/4) / (5/36) - 1 = 0.8: Beta(0.4, 0.4).
    """
    memory = PromptMemory()
    for i in range(30_000):
        memory.update(str(i), (0, 2, 4)[i % 3], 4, step=0)
    assert memory.expected_acceptance("new", G) == pytest.approx(expected_acceptance(0.4, 0.4, G), abs=1e-3)


def test_a_look_counts_in_the_population_for_the_passes_that_it_was_waited_for():
    """Skipping makes observations a biased sample. Weighted by the waits, each prompt counts once per pass."""
    memory, num_skipped = taught(), 0
    while memory.draw_skip("0", G):
        num_skipped += 1
    before = memory.state_dict()
    memory.update("0", 4, G, step=1)
    after = memory.state_dict()
    num_passes = num_skipped + 1
    assert num_passes > 1
    assert after["num_passes"] - before["num_passes"] == num_passes
    assert after["sum_rate"] - before["sum_rate"] == pytest.approx(num_passes * 4 / 16)
    assert after["sum_square"] - before["sum_square"] == pytest.approx(num_passes * 4 * 3 / (16 * 15))
    memory.update("0", 4, G, step=1)  # sampled again immediately: no further pass, and no wait
    assert memory.state_dict()["num_passes"] - after["num_passes"] == 1


def test_looks_that_come_late_count_for_all_the_passes_before():
    """A round may pass over the dataset more than once. Then a prompt is drawn again before it was observed."""
    memory = taught(longest_wait=8)
    before = memory.state_dict()["num_passes"]
    num_looks = 20 - sum(memory.draw_skip("0", G) for _ in range(20))
    assert 1 < num_looks < 20
    for _ in range(num_looks):
        memory.update("0", 0, G, step=1)
    assert memory.state_dict()["num_passes"] - before == 20


# Observations of one completion each say nothing about the spread of the population, which stays uniform: Beta(1, 1).


def test_earlier_looks_count_half_at_a_new_one_and_the_rest_of_a_group_is_no_new_one():
    memory = PromptMemory()
    memory.update("a", 0, 1, step=0)
    assert memory.pass_rate_distribution("a") == pytest.approx((1, 2))
    memory.update("a", 0, 1, step=1)
    assert memory.pass_rate_distribution("a") == pytest.approx((1, 1 + 0.5 + 1))
    memory.update("a", 1, 1, step=1, is_rest=True)
    assert memory.pass_rate_distribution("a") == pytest.approx((2, 2.5))


def test_a_surprise_is_how_much_better_half_the_evidence_would_have_foretold_a_look():
    """
    After one incorrect completion, a correct one has probability 1/3 by Beta(1, 2) and 2/5 by Beta(1, 1.5); an
    incorrect one has 2/3 and 3/5.
    """
    memory = PromptMemory()
    memory.update("a", 0, 1, step=0)
    memory.update("b", 0, 1, step=0)
    assert memory.state_dict()["surprise"] == 0  # there was no prediction, since nothing was known
    memory.update("a", 1, 1, step=1)
    assert memory.state_dict()["surprise"] == pytest.approx(math.log(6 / 5))
    memory.update("b", 0, 1, step=1)
    assert memory.state_dict()["surprise"] == pytest.approx(math.log(6 / 5) + math.log(9 / 10))
    memory.update("b", 0, 1, step=2)  # by Beta(1, 2.5) and Beta(1, 1.75)
    assert memory.state_dict()["surprise"] == 0  # log(1.08) + log(0.89), but never below zero


def test_where_looks_surprise_all_that_is_known_counts_half():
    """55 prompts, first incorrect and then correct, give a surprise of 55 log(6/5) = 10.03, above 10; 54 give 9.8."""
    memory = PromptMemory()
    for i in range(55):
        memory.update(str(i), 0, 1, step=0)
    memory.update("wrong", 0, 1, step=0)
    for i in range(54):
        memory.update(str(i), 1, 1, step=1)
    assert memory.pass_rate_distribution("wrong") == pytest.approx((1, 2))
    memory.update("54", 1, 1, step=1)
    assert memory.pass_rate_distribution("wrong") == pytest.approx((1, 1.5))
    # the observation that revealed it has its full weight
    assert memory.pass_rate_distribution("54") == pytest.approx((1 + 1, 1 + 0.5 / 2))
    assert memory.state_dict()["surprise"] == 0


def test_a_group_without_a_score_teaches_nothing_nor_does_the_rest_of_one_that_passed():
    memory = taught()
    before = memory.expected_acceptance("0", G), memory.expected_acceptance("new", G)
    memory.update("0", 0, 0, step=0)
    memory.update("other", 0, 0, step=0)
    assert (memory.expected_acceptance("0", G), memory.expected_acceptance("other", G)) == before
    state = memory.state_dict()
    memory.update("0", 13, 13, step=1, is_rest=True)  # requested because the first completions differed
    assert memory.state_dict() == state


# ---- Skipping ----


def test_an_unseen_prompt_and_a_useful_one_are_never_skipped():
    memory = taught()
    assert not any(memory.draw_skip(f"new {i}", G) for i in range(1000))
    assert share_skipped(memory, "1") == 0


@pytest.mark.parametrize("prompt_id", ["0", "2"])
def test_a_prompt_that_will_be_dropped_is_mostly_skipped(prompt_id):
    assert 0.5 < share_skipped(taught(), prompt_id) < 1


def test_the_least_promising_prompt_waits_less_than_its_longest_wait():
    """Waits are uniform over 1 to 8 passes: at most 7 skips in a row, and visits in 2 of 9 passes."""
    memory, waits = hopeless(), []
    for _ in range(3000):
        wait = 1
        while memory.draw_skip("0", G):
            wait += 1
        waits.append(wait)
    assert set(waits) == set(range(1, 9))
    assert sum(waits) / len(waits) == pytest.approx(4.5, abs=0.15)  # standard error 2.3 / sqrt(3000) = 0.04


def test_a_look_that_comes_late_does_not_begin_a_wait_anew():
    """A round that passes over the dataset twice visits a prompt only after it was skipped again."""
    memory, most, rng = hopeless(), 0, random.Random(0)
    num_skipped = num_due = 0
    for _ in range(3000):
        is_skipped = memory.draw_skip("0", G)
        num_skipped, num_due = (num_skipped + 1 if is_skipped else 0), num_due + (not is_skipped)
        most = max(most, num_skipped)
        if num_due and rng.random() < 0.3:
            memory.update("0", 0, 0, step=1)
            num_due -= 1
    assert most == 7


def test_a_wait_ends_with_a_prompt_that_may_not_be_skipped():
    """With waits of up to 8 passes, the next wait begins after this one: 7 more skips, not 3."""
    memory = hopeless()
    most = num_skipped = 0
    for _ in range(3000):
        num_skipped = num_skipped + 1 if memory.draw_skip("0", G) else 0
        most = max(most, num_skipped)
        if num_skipped == 4:
            assert not memory.draw_skip("0", G, may_skip=False)
    assert most == 4 + 7


# ---- The file ----


def test_the_file_says_what_is_known_of_each_prompt_also_of_one_with_half_of_a_surrogate_pair(tmp_path):
    memory = PromptMemory()
    memory.update("a", 4, 16, step=3)
    memory.update("b", 0, 0, step=4)
    memory.update("a", 2, 8, step=7)
    memory.save(tmp_path / "memory.parquet")
    rows = pq.read_table(tmp_path / "memory.parquet").to_pylist()
    wanted = ("prompt_id", "num_seen", "pass_rate", "last_step", "num_correct", "num_scored")
    assert [tuple(row[name] for name in wanted) for row in rows] == [("a", 2, 0.25, 7, 6, 24), ("b", 1, None, 4, 0, 0)]
    assert [path.name for path in tmp_path.iterdir()] == ["memory.parquet"]
    memory.update(broken := prompt_name({"id": "a\ud83d"}), 1, 2, step=0)
    memory.save(tmp_path / "memory.parquet")
    assert [*PromptMemory.read(tmp_path / "memory.parquet")] == ["a", "b", broken]
    assert broken.startswith(r"a\ud83d #")


def test_a_group_is_seen_once_though_its_rest_is_sampled_later(tmp_path):
    memory = PromptMemory()
    memory.update("a", 1, 2, step=0)
    memory.update("a", 0, 2, step=1, is_rest=True)
    memory.save(tmp_path / "memory.parquet")
    (row,) = pq.read_table(tmp_path / "memory.parquet").to_pylist()
    assert [row[name] for name in ("num_seen", "num_correct", "num_scored", "last_step")] == [1, 1, 4, 1]


def test_an_empty_memory_can_be_saved_and_takes_the_place_of_what_was_known(tmp_path):
    PromptMemory().save(tmp_path / "memory.parquet")
    memory = taught(3)
    memory.load_state_dict(PromptMemory().state_dict() | {"records": PromptMemory.read(tmp_path / "memory.parquet")})
    memory.save(tmp_path / "again.parquet")
    assert pq.read_table(tmp_path / "again.parquet").num_rows == 0


def test_a_resumed_memory_goes_on_bit_for_bit(tmp_path):
    rng = random.Random(0)

    def live(memory, rng, step):
        skipped = []
        for i in range(300):
            skipped.append(memory.draw_skip(str(i), G))
            if not skipped[-1]:
                memory.update(str(i), rng.choice([0, 0, 5, 16]), G, step)
        return skipped

    straight = taught()
    for step in range(1, 40, 7):
        live(straight, rng, step)
    straight.save(tmp_path / "memory.parquet")
    resumed = read_back(straight.state_dict(), tmp_path / "memory.parquet")
    for step in range(40, 200, 7):
        assert live(straight, random.Random(step), step) == live(resumed, random.Random(step), step)
    assert straight.state_dict() == resumed.state_dict()
    assert straight._records == resumed._records


def test_a_draw_hangs_on_the_seed_its_number_and_the_prompt_alone():
    memory = PromptMemory(seed=3)
    assert [memory._draw("a"), memory._draw("b")] == [int(digest(text), 16) / 2**64 for text in ("3/1/a", "3/2/b")]


def test_a_group_without_a_score_leaves_a_prompt_the_weight_of_its_skipped_passes():
    memory = PromptMemory()
    memory.update("a", 0, 4, step=1)
    memory._records["a"].num_passes = 6  # it was skipped in five passes
    memory.update("a", 0, 0, step=2)
    memory.update("a", 4, 4, step=3)
    other = PromptMemory()
    other.update("a", 0, 4, step=1)
    other.population.update(4, 4, 6)
    assert memory.population.state_dict() == other.population.state_dict()

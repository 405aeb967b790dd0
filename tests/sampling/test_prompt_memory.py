# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""What is remembered of a prompt, and how often it is skipped."""

import json
import random

import pyarrow.parquet as pq
import pytest

from trl_dapo.sampling.prompt_memory import PromptMemory, expected_acceptance


pytestmark = pytest.mark.fast


G = 16


def taught(num_prompts=300, seed=0, **options):
    """A memory that has seen a third of the prompts solved, a third hopeless, a third in between."""
    memory = PromptMemory(seed=seed, **options)
    for i in range(num_prompts):
        memory.update(str(i), (0, G // 2, G)[i % 3], G, step=0)
    return memory


def share_skipped(memory, prompt_id, step=1, num_passes=2000):
    """Share of the passes in which a prompt is skipped, if its looks teach nothing new."""
    return sum(memory.draw_skip(prompt_id, step, G) for _ in range(num_passes)) / num_passes


# ---- The prediction ----


def test_the_acceptance_of_a_uniform_pass_rate():
    """All 17 counts of 16 draws are equally likely, and 2 of them are dropped."""
    assert expected_acceptance(1, 1, G) == pytest.approx(15 / 17)


def test_the_acceptance_of_a_known_pass_rate():
    assert expected_acceptance(5e5, 5e5, 2) == pytest.approx(1 / 2, rel=1e-4)
    assert expected_acceptance(1e5, 3e5, 3) == pytest.approx(1 - 1 / 64 - 27 / 64, rel=1e-4)


@pytest.mark.parametrize(("correct", "wrong"), [(1e-6, 1e-6), (1e-9, 1.0), (1.0, 1e-9), (1e-12, 1e9)])
def test_the_acceptance_of_extreme_pass_rates_is_a_probability(correct, wrong):
    assert 0 <= expected_acceptance(correct, wrong, G) < 0.01


def test_an_unseen_prompt_is_predicted_by_the_population():
    memory = PromptMemory()
    assert memory.expected_acceptance("new", 0, G) == pytest.approx(15 / 17)  # nothing seen: uniform
    for i in range(1000):
        memory.update(str(i), 0, G, step=0)
    assert memory.expected_acceptance("new", 0, G) < 0.05


def test_the_population_is_fitted_by_its_first_two_moments():
    """
    Of 4 completions 0, 2 and 4 correct: mean p is 1/2, and c (c - 1) / 12 is 0, 1/6 and 1, so mean p^2 is 7/18.
    Variance 7/18 - 1/4 = 5/36, concentration (1/4) / (5/36) - 1 = 0.8: Beta(0.4, 0.4).
    """
    memory = PromptMemory()
    for i in range(30_000):
        memory.update(str(i), (0, 2, 4)[i % 3], 4, step=0)
    assert memory.expected_acceptance("new", 0, G) == pytest.approx(expected_acceptance(0.4, 0.4, G), abs=1e-3)


def test_only_first_looks_make_the_population():
    """Skipping makes later looks a choice; first looks are not."""
    memory = taught()
    before = memory.expected_acceptance("new", 1, G)
    for _ in range(100):
        memory.update("0", 0, G, step=1)
    assert memory.expected_acceptance("new", 1, G) == before


def test_a_prompt_is_predicted_by_what_was_seen_of_it():
    memory = taught()
    unseen = memory.expected_acceptance("new", 1, G)
    hopeless, useful, solved = (memory.expected_acceptance(i, 1, G) for i in "012")
    assert hopeless < unseen / 3
    assert solved < unseen / 3
    assert useful > 0.99


def test_one_success_in_sixteen_is_told_from_none():
    """A count of dropped groups in a row, as GRESO keeps, cannot."""
    memory = taught()
    memory.update("0", 1, G, step=0)
    memory.update("3", 0, G, step=0)
    assert memory.expected_acceptance("0", 1, G) > 3 * memory.expected_acceptance("3", 1, G)


def test_evidence_fades_as_the_policy_changes():
    memory = taught()
    unseen = memory.expected_acceptance("new", 0, G)
    fresh, older, old = (memory.expected_acceptance("0", step, G) for step in (0, 400, 1_000_000))
    assert fresh < unseen / 3
    assert fresh < older < unseen
    assert old == pytest.approx(unseen)


def test_what_was_long_ago_does_not_outweigh_a_new_look():
    memory = taught()
    memory.update("2", 0, G, step=1_000_000)  # solved then, hopeless now
    memory.update("new", 0, G, step=1_000_000)
    assert memory.expected_acceptance("2", 1_000_000, G) == memory.expected_acceptance("new", 1_000_000, G)


def test_evidence_loses_half_its_weight_in_a_half_life():
    """Sixteen wrong completions count 400 steps later as much as eight new ones."""
    memory = taught()
    memory.update("old", 0, 16, step=0)
    memory.update("new", 0, 8, step=400)
    assert memory.expected_acceptance("old", 400, G) == memory.expected_acceptance("new", 400, G)


def test_an_unscored_group_teaches_nothing_but_that_it_was_seen():
    memory = taught()
    before = memory.expected_acceptance("0", 1, G), memory.expected_acceptance("new", 1, G)
    memory.update("0", 0, 0, step=0)
    memory.update("other", 0, 0, step=0)
    assert (memory.expected_acceptance("0", 1, G), memory.expected_acceptance("other", 1, G)) == before


def test_impossible_counts_are_refused():
    with pytest.raises(ValueError, match="'a' cannot have 5 correct of 4"):
        PromptMemory().update("a", 5, 4, step=0)


# ---- The skipping ----


def test_an_unseen_prompt_is_never_skipped():
    memory = taught()
    assert not any(memory.draw_skip(f"new {i}", 1, G) for i in range(1000))


def test_a_useful_prompt_is_never_skipped():
    memory = taught()
    assert not any(memory.draw_skip("1", 1, G) for _ in range(1000))


@pytest.mark.parametrize("prompt_id", ["0", "2"])
def test_a_prompt_that_will_be_dropped_is_mostly_skipped(prompt_id):
    memory = taught()
    assert 0.5 < share_skipped(memory, prompt_id) < 1


def test_the_least_promising_prompt_waits_less_than_its_longest_wait():
    """Waits are uniform over 1 to 8 passes: no more than 7 skips in a row, and looks in 2 of 9 passes."""
    memory = taught(longest_wait=8)
    for _ in range(5):
        memory.update("0", 0, 100 * G, step=0)
    waits = []
    for _ in range(3000):
        wait = 1
        while memory.draw_skip("0", 1, G):
            wait += 1
        waits.append(wait)
    assert set(waits) == set(range(1, 9))
    assert sum(waits) / len(waits) == pytest.approx(4.5, abs=0.15)  # standard error 2.3 / sqrt(3000) = 0.04


def test_every_prompt_comes_back_for_a_look():
    memory = taught(longest_wait=8)
    looked_at = {str(i): 0 for i in range(300)}
    for current in range(1, 17):
        for prompt_id in looked_at:
            if not memory.draw_skip(prompt_id, current, G):
                memory.update(prompt_id, memory._records[prompt_id].num_correct % 17, G, current)
                looked_at[prompt_id] += 1
    assert min(looked_at.values()) >= 2  # 16 passes, at most 8 apart


def test_a_longest_wait_of_one_skips_nothing():
    memory = taught(longest_wait=1)
    assert not any(memory.draw_skip(str(i), 1, G) for i in range(300))
    with pytest.raises(ValueError, match=r"`longest_wait`.*0"):
        PromptMemory(longest_wait=0)


def test_two_processes_skip_the_same_prompts():
    one, two = taught(), taught()
    order = [str(i % 300) for i in range(3000)]
    assert [one.draw_skip(i, 1, G) for i in order] == [two.draw_skip(i, 1, G) for i in order]


def test_the_seed_sets_what_is_skipped():
    order = [str(i) for i in range(300)]
    one, two = taught(seed=0), taught(seed=1)
    assert [one.draw_skip(i, 1, G) for i in order] != [two.draw_skip(i, 1, G) for i in order]


def test_nothing_is_skipped_where_no_prompt_is_promising():
    memory = PromptMemory()
    for i in range(100_000):
        memory.update(str(i), 0, G, step=0)
    assert 0 < share_skipped(memory, "0") < 1


# ---- The file ----


def test_the_file_says_what_is_known_of_each_prompt(tmp_path):
    memory = PromptMemory()
    memory.update("a", 4, 16, step=3)
    memory.update("b", 0, 0, step=4)
    memory.update("a", 2, 8, step=7)
    memory.save(tmp_path / "memory.parquet")
    rows = pq.read_table(tmp_path / "memory.parquet").to_pylist()
    wanted = ("prompt_id", "num_seen", "pass_rate", "last_step", "num_correct", "num_scored")
    assert [tuple(row[name] for name in wanted) for row in rows] == [("a", 2, 0.25, 7, 6, 24), ("b", 1, None, 4, 0, 0)]
    assert [path.name for path in tmp_path.iterdir()] == ["memory.parquet"]


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
            skipped.append(memory.draw_skip(str(i), step, G))
            if not skipped[-1]:
                memory.update(str(i), rng.choice([0, 0, 5, 16]), G, step)
        return skipped

    straight = taught()
    for step in range(1, 40, 7):
        live(straight, rng, step)
    straight.save(tmp_path / "memory.parquet")
    resumed = PromptMemory()
    state = json.loads(json.dumps(straight.state_dict()))
    resumed.load_state_dict(state | {"records": PromptMemory.read(tmp_path / "memory.parquet")})
    for step in range(40, 200, 7):
        assert live(straight, random.Random(step), step) == live(resumed, random.Random(step), step)
    assert straight.state_dict() == resumed.state_dict()
    assert straight._records == resumed._records

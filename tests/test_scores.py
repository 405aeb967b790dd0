# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Scores of evaluations during training: every problem counts once, and nothing is left of another evaluation."""

import pytest

from trl_dapo.evaluation import EvaluationScores
from trl_dapo.evaluation.scores import problem_id


# ---- Which rows are one problem ----


def test_a_problem_has_its_id_and_none_is_no_id():
    assert problem_id({"id": "a", "prompt": "1+1"}) == "a"
    assert problem_id({"id": 0, "prompt": "1+1"}) == "0"
    by_prompt = problem_id({"prompt": "1+1"})
    assert by_prompt == problem_id({"id": None, "prompt": "1+1"}) == problem_id({"id": "", "prompt": "1+1"})
    assert by_prompt != problem_id({"prompt": "1+2"})


def test_prompts_with_an_image_and_no_id_are_not_taken_for_one_another():
    assert problem_id({"prompt": "What is this?", "image": object()}) is None
    assert problem_id({"prompt": "What is this?", "images": [object()]}) is None
    assert problem_id({"prompt": [{"role": "user", "content": [{"type": "image", "image": object()}]}]}) is None
    assert problem_id({"id": "cat", "prompt": "What is this?", "image": object()}) == "cat"
    assert problem_id({"prompt": "1+1", "image": None}) == problem_id({"prompt": "1+1"})


def add(scores, problem, answers, right="7"):
    scores.add([problem] * len(answers), list(answers), [answer == right for answer in answers])


def test_scores_by_hand():
    scores = EvaluationScores(k=2)
    scores.begin(3)
    add(scores, ("easy", "1"), "77")
    add(scores, ("hard", "1"), "73")
    add(scores, ("hard", "2"), "33")
    assert scores.means() == pytest.approx(
        {
            "avg@2": (1 + 1 / 2 + 0) / 3,
            "pass@2": 2 / 3,
            "maj@2": (1 + 1 / 2 + 0) / 3,  # one vote each: half a verdict
            **{"avg@2/easy": 1, "pass@2/easy": 1, "maj@2/easy": 1},
            **{"avg@2/hard": 1 / 4, "pass@2/hard": 1 / 2, "maj@2/hard": 1 / 4},
        }
    )


def test_repeats_of_a_problem_are_pooled_and_weigh_as_one():
    scores = EvaluationScores(k=2)
    scores.begin(3)
    for problem, answers in ((("a", "1"), "73"), (("a", "2"), "77"), (("a", "1"), "33")):
        add(scores, problem, answers)
    # Of problem 1's four completions one is right; of the six pairs of them three have it.
    assert scores.means()["avg@2"] == (1 / 4 + 1) / 2
    assert scores.means()["pass@2"] == pytest.approx((3 / 6 + 1) / 2)
    assert scores.means()["maj@2"] == (0 + 1) / 2


def test_lists_that_fill_the_last_batch_are_dropped_by_their_number():
    scores = EvaluationScores(k=2)
    scores.begin(2)
    # The second row is a repeat of the first; the third only fills the batch, with other completions.
    for answers in ("77", "33", "77"):
        add(scores, (None, "1"), answers)
    assert scores.means()["avg@2"] == 1 / 2


def test_a_stream_of_unknown_length_counts_every_list():
    scores = EvaluationScores(k=1)
    scores.begin(None)
    for i, answer in enumerate("7733"):
        add(scores, (None, str(i)), answer)
    assert scores.means()["avg@1"] == 1 / 2


def test_problems_without_an_id_or_a_prompt_to_go_by_are_each_their_own():
    scores = EvaluationScores(k=2)
    scores.begin(3)
    for answers in ("77", "33", "33"):
        add(scores, ("images", None), answers)
    assert scores.means()["pass@2"] == pytest.approx(1 / 3)


def test_a_problem_that_cannot_be_scored_is_left_out():
    scores = EvaluationScores(k=2)
    scores.begin(2)
    scores.add([(None, "1")] * 2, ["7", "3"], [True, None])
    assert scores.means() == {}
    scores.add([(None, "2")] * 2, ["7", "3"], [True, False])
    assert scores.means()["avg@2"] == 1 / 2


def test_the_score_of_all_is_over_problems_with_and_without_a_source():
    scores = EvaluationScores(k=1)
    scores.begin(2)
    add(scores, (None, "1"), "7")
    add(scores, ("hard", "2"), "3")
    assert (scores.means()["avg@1"], scores.means()["avg@1/hard"]) == (1 / 2, 0)


def test_an_evaluation_begins_with_nothing():
    scores = EvaluationScores(k=1)
    scores.begin(2)
    add(scores, (None, "1"), "7")
    scores.begin(2)
    assert scores.means() == {}


def test_half_a_list_is_refused():
    scores = EvaluationScores(k=4)
    scores.begin(1)
    with pytest.raises(ValueError, match="come 4 to a problem, got 2 with 2 answers and 2 verdicts"):
        add(scores, (None, "1"), "73")

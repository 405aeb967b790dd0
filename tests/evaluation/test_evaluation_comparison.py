# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Two evaluations of the same problems, problem by problem."""

import json

import pytest
from evaluations import Deal, ask, sums, sums_of

from trl_dapo.evaluation import compare, estimate_mean


pytestmark = pytest.mark.fast


def evaluated(serve, output_dir, first, second, third, order=(0, 1, 2), **settings):
    dataset = sums(3, source=["easy", "easy", "hard"]).select(order)
    ask(serve(Deal(first=first, second=second, third=third)), dataset, output_dir, **settings)
    return output_dir


PROBLEM = {"id": "a", "source": "x", "num_correct": 1, "num_completions": 2, "maj": 1.0}
RIGHT = {1: "Answer: 2", 2: "Answer: 3", 3: "Answer: 4"}


def texts(*num_correct):
    return [[RIGHT[i]] * num + ["Answer: 0"] * (4 - num) for i, num in enumerate(num_correct, start=1)]


def test_a_comparison_by_hand(serve, tmp_path):
    base = evaluated(serve, tmp_path / "base", *texts(2, 1, 4))
    trained = evaluated(serve, tmp_path / "trained", *texts(3, 4, 3))
    change = compare(base, trained / "summary.json")
    avg = change["metrics"]["avg@4"]
    assert (avg["base"], avg["trained"]) == pytest.approx((7 / 12, 10 / 12))
    assert avg["difference"] == estimate_mean([1 / 4, 3 / 4, -1 / 4], (-1, 1))._asdict()
    # the first problem was a tie of two and two, the second three wrong ones to one
    assert change["metrics"]["maj@4"]["difference"]["mean"] == pytest.approx((1 / 2 + 1 + 0) / 3)
    assert change["metrics"]["pass@2"]["difference"]["mean"] == pytest.approx((1 / 6 + 3 / 6 + 0) / 3)
    assert change["sources"]["hard"]["metrics"]["avg@4"]["difference"]["mean"] == -0.25
    assert change["gained"] == [
        {"id": "id2", "source": "easy", "base": 0.25, "trained": 1.0, "difference": 0.75},
        {"id": "id1", "source": "easy", "base": 0.5, "trained": 0.75, "difference": 0.25},
    ]
    assert change["lost"] == [{"id": "id3", "source": "hard", "base": 1.0, "trained": 0.75, "difference": -0.25}]
    assert (change["k"], change["num_problems"], change["differing_settings"]) == (4, 3, {})


def test_problems_are_paired_by_id_not_by_position(serve, tmp_path):
    base = evaluated(serve, tmp_path / "base", *texts(0, 1, 4))
    trained = evaluated(serve, tmp_path / "trained", *texts(0, 1, 4), order=[2, 0, 1])
    change = compare(base, trained)
    assert change["metrics"]["avg@4"]["difference"]["mean"] == change["metrics"]["avg@4"]["num_differing"] == 0
    assert change["gained"] == change["lost"] == []


def test_a_comparison_says_what_else_differed(serve, tmp_path):
    base = evaluated(serve, tmp_path / "base", *texts(1, 1, 1))
    trained = evaluated(serve, tmp_path / "trained", *texts(1, 1, 1), temperature=0.6)
    assert compare(base, trained)["differing_settings"] == {"temperature": [1.0, 0.6]}


@pytest.mark.parametrize(
    ("numbers", "k", "message"),
    [
        ([1, 2, 4, 5], 2, r"1 only in `.*base` \(ids id3\) and 2 only in `.*trained` \(ids id4, id5\)"),
        ([1, 2, 3], 4, r"has 2 completions a problem and .* has 4"),
    ],
    ids=["problems", "k"],
)
def test_evaluations_of_other_problems_or_another_k_are_not_compared(serve, tmp_path, numbers, k, message):
    server = serve(lambda body: "Answer: 2")
    ask(server, sums(3), tmp_path / "base", k=2)
    ask(server, sums_of(numbers), tmp_path / "trained", k=k)
    with pytest.raises(ValueError, match=message):
        compare(tmp_path / "base", tmp_path / "trained")


def test_what_is_no_summary_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no `.*summary.json`. The folder is not the `output_dir` of an eval"):
        compare(tmp_path, tmp_path)
    (tmp_path / "completions.jsonl").touch()
    with pytest.raises(FileNotFoundError, match=r"no `.*summary.json`. The evaluation has not ended"):
        compare(tmp_path, tmp_path)
    with pytest.raises(FileNotFoundError, match=r"There is no `.*nothing.json`.$"):
        compare(tmp_path / "nothing.json", tmp_path)
    unreadable = ("{", "is not JSON"), ("[" * 100_000, "is not JSON"), ("[]", "is not the summary of an evaluation")
    for content, message in unreadable:
        (tmp_path / "summary.json").write_text(content)
        with pytest.raises(ValueError, match=message):
            compare(tmp_path, tmp_path)


@pytest.mark.parametrize(
    "changed",
    [
        {"settings": {"model": "m"}},
        {"problems": None},
        {"problems": []},
        {"problems": [{name: value for name, value in PROBLEM.items() if name != "maj"}]},
        {"problems": [{**PROBLEM, "num_correct": None}]},
        {"problems": [{**PROBLEM, "id": ["a"]}]},
    ],
    ids=str,
)
def test_a_summary_that_lacks_what_is_compared_is_named(tmp_path, changed):
    summary = {"settings": {"k": 2, "model": "m"}, "scorer": "paper", "problems": [PROBLEM]}
    whole, other = tmp_path / "whole.json", tmp_path / "other.json"
    whole.write_text(json.dumps(summary))
    other.write_text(json.dumps({**summary, **changed}))
    assert compare(whole, whole)["num_problems"] == 1
    with pytest.raises(ValueError, match=r"`.*other.json` is not the summary of an evaluation"):
        compare(whole, other)

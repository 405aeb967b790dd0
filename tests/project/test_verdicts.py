# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The verdicts of the kept runs when many differences are tested together, and what the pages say about them."""

import math
import statistics
from pathlib import Path

import pytest

from benchmarks import intervals, pages
from benchmarks.frame.kept import EVIDENCE, read_csv, read_rows
from benchmarks.frame.predictions import by_holm, check, describe_outcome
from benchmarks.frame.verdicts import LEVEL, holm, interval, p_value
from benchmarks.larger import study as larger
from benchmarks.mechanisms import study as mechanisms
from benchmarks.mechanisms.study import PREDICTIONS
from benchmarks.peers.ms_swift import study as peers
from benchmarks.real_model import study as real_model
from benchmarks.same_budget import study as same_budget
from benchmarks.savings import study as savings
from benchmarks.two_names import study as two_names


STUDIES = mechanisms, larger, real_model, same_budget, savings, two_names
ROOT = Path(__file__).parents[2]
README, BENCHMARKS = (" ".join((ROOT / name).read_text().split()) for name in ("README.md", "docs/benchmarks.md"))
OF_EVIDENCE = " ".join(EVIDENCE.read_text().split())


@pytest.mark.parametrize(("n", "quantile"), [(2, 12.7062), (3, 4.30265), (4, 3.18245), (5, 2.77645), (10, 2.26216)])
def test_a_mean_at_students_quantile_of_the_tables_has_a_p_value_of_a_twentieth(n, quantile):
    values = [1.0, -1.0, *[0.0] * (n - 2)]  # their variance is 2 / (n - 1)
    error = math.sqrt(2 / (n - 1) / n)
    assert p_value([value - quantile * error for value in values]) == pytest.approx(0.05, rel=1e-4)
    assert interval([3 + value for value in values]) == (pytest.approx(3.0), pytest.approx(quantile * error, rel=2e-4))


def test_one_value_has_no_interval_and_values_without_spread_differ_from_0_or_do_not():
    assert math.isnan(interval([1.0])[1])
    assert [p_value([0.0, 0.0, 0.0]), p_value([0.5, 0.5, 0.5])] == [1.0, 0.0]


def test_the_smallest_of_three_p_values_counts_three_times_the_next_twice_and_none_falls_below_one_before():
    # 3 x 0.01; 2 x 0.04; 0.05, which is not less than 0.08.
    assert holm([0.05, 0.01, 0.04]) == pytest.approx([0.08, 0.03, 0.08])
    assert holm([0.9, 0.8]) == [1.0, 1.0]


def count(results, predictions):
    """Return the number of interval verdicts other than "not shown", and how many of these hold by Holm."""
    held = by_holm(results, predictions)
    plain = [check(prediction, results).verdict for prediction in predictions]
    assert all(as_one in (verdict, "not shown", "not counted") for verdict, as_one in zip(plain, held, strict=True))
    decided = {"shown", "refuted"}
    return sum(verdict in decided for verdict in plain), sum(verdict in decided for verdict in held)


def test_the_mechanisms_verdicts_that_hold_are_counted_on_the_page():
    plain, held = count(mechanisms.STUDY.read(), PREDICTIONS)
    assert (plain, held) == (11, 7)
    said = (
        f'Apart from what is by construction, {plain} outcomes are "shown" or "refuted", and {held} of the {plain} '
        "hold by Holm."
    )
    assert said in OF_EVIDENCE


def test_what_is_true_by_construction_is_neither_shown_nor_counted_and_facts_are_on_the_page():
    results = mechanisms.STUDY.read()
    assert mechanisms.describe_facts(results) in OF_EVIDENCE
    named = [prediction for prediction in PREDICTIONS if prediction.by_construction]
    assert [(prediction.arm, prediction.quantity.title) for prediction in named] == [
        ("filtering", "correct but cut-off completions that are punished"),
        ("carry", "generated tokens per token that trains"),
    ]
    assert all(describe_outcome(prediction, results).endswith(": by construction") for prediction in named)
    assert by_holm(results, named) == ["not counted"] * 2


def test_none_of_the_larger_tasks_verdicts_holds_and_the_page_says_so():
    assert count(larger.STUDY.counted(larger.STUDY.read()), larger.STUDY.predictions) == (2, 0)
    said = "Two predictions are shown or refuted by their own intervals, and neither verdict holds by Holm."
    assert said in OF_EVIDENCE


def test_the_peers_table_says_of_each_difference_whether_it_holds():
    judged = peers.judge(peers.differences(read_csv(peers.HERE, peers.KEY)))
    accuracy = [said for (_, _, name), said in judged.items() if name == "accuracy" and said.startswith(":")]
    assert accuracy == [": differs, but not by Holm"] * 3
    assert "three of our six rows are ahead by more than the interval, by Holm none" in OF_EVIDENCE
    # Two tasks with six methods and two figures, without the reference and the method that made the very same runs.
    same = [key for key, said in judged.items() if said == ", the same runs"]
    assert [key[:2] for key in same] == [("quickstart", "ms-swift, 3 resamples")] * 2
    assert f"{2 * (2 * 5) - len(same)} differences tested" in OF_EVIDENCE


def test_ms_swift_did_what_its_model_does_in_every_rollout_and_the_page_says_so():
    of_swift = [run for key, run in read_csv(peers.HERE, peers.KEY).items() if key[1] in peers.PEERS]
    assert all(run["as_modelled"] == 1 for run in of_swift)
    assert f"all {sum(run['rollouts'] for run in of_swift):.0f} rollouts" in OF_EVIDENCE


def tokens_of_the_last_two_rungs(which):
    """Return the tokens generated with and without dynamic sampling, as means over seeds."""
    path = {"ablation": ROOT / "recipes/ablation/ladder.csv", "larger": ROOT / "benchmarks/larger/runs.csv"}[which]
    name = {"ablation": "rung", "larger": "arm"}[which]
    found = {}
    for row in read_rows(path):
        if row.get("part") != "warm-up":
            found.setdefault(row[name], []).append(float(row["tokens"]))
    return [statistics.mean(found[rung]) for rung in ("+ dynamic sampling", "+ token-level loss")]


def test_of_both_ladders_only_dynamic_samplings_first_step_holds():
    ladders = [pages.steps(ladder) for ladder in pages.ladders()]
    found = {(i, name): p_value(step) for i, steps in enumerate(ladders) for name, step in steps.items()}
    adjusted = dict(zip(found, holm(list(found.values())), strict=True))
    assert [key for key, p in adjusted.items() if p <= LEVEL] == [(0, "dynamic sampling")]
    said = "only dynamic sampling helped: it made the smaller model better, for three times the tokens of the same run"
    assert said in README
    # 259,395 of 79,585 tokens, and 259,770 of 94,897.
    assert [round(mine / above) for mine, above in map(tokens_of_the_last_two_rungs, ("ablation", "larger"))] == [3, 3]
    assert "for about three times the tokens of the rung above" in BENCHMARKS


@pytest.mark.parametrize(
    ("page", "filled_in"),
    [
        *((EVIDENCE, study.STUDY.filled_in) for study in STUDIES),
        (EVIDENCE, peers.filled_in),
        (ROOT / "docs" / "evaluation.md", intervals.filled_in),
        *((page, pages.filled_in) for page in pages.PAGES),
    ],
)
def test_the_tables_of_a_page_are_written_from_the_kept_files(page, filled_in):
    text = page.read_text()
    assert filled_in(text) == text
    changed = text.replace("5", "6")
    assert filled_in(changed) != changed


def test_every_method_that_was_run_has_a_row():
    results = pages.of_results()
    assert {method for _, method in results} == set(pages.METHODS)
    assert len(results) == 2 * len(pages.METHODS) == 26
    assert results["one in ten", "GRPO"] == ("103,836", "53.2")
    assert all(f"| {name} |" in BENCHMARKS for name in pages.METHODS.values())
    assert all(f"| {name} |" in BENCHMARKS for name in pages.SHOWN)
    assert all(f"| {name} |" in BENCHMARKS for name in (*pages.ARMS.values(), *pages.ARMS_OF_TWO_REWARDS.values()))


def test_the_table_of_tokens_has_those_of_each_arm_and_their_ratio_to_grpos():
    rows = {cells[0]: cells[1:] for cells in (row.strip("| ").split(" | ") for row in pages.results_table()[2:])}
    # 29,569 of 153,602, each arm at its best rate.
    assert rows["`GRPOTrainer`"][1] == "153,602"
    assert rows["`DAPOTrainer`, former default"][1] == "29,569 (0.19x)"
    # With as many prompts as are informative in a rollout of GRPO's: no more than GRPO, within a twentieth.
    fewer = [
        float(cell.split("(")[1].removesuffix("x)"))
        for cell in rows["... former default, fewer prompts per rollout"][:5]
    ]
    assert fewer == [1.04, 0.18, 0.99, 1.01, 1.02]
    only_one = rows['... former default, `dynamic_sampling_rewards=["correct"]`']
    assert only_one[:5] == ["one reward"] * 5


def test_accuracy_is_read_when_the_steps_or_the_seconds_of_a_task_are_spent():
    curve = [
        {"rollouts": 0, "tokens": 0, "seconds": 0.0, "accuracy": 0.4},
        {"rollouts": 50, "tokens": 900, "seconds": 20.0, "accuracy": 0.6},
        {"rollouts": 100, "tokens": 2000, "seconds": 40.0, "accuracy": 0.5},
    ]
    results = {("quickstart", arm, "1", 10): {"curve": curve} for arm in (two_names.FOUR, two_names.ONE)}
    # 300 steps are 75 rollouts of four: halfway from 0.6 to 0.5. After 20 seconds it is 0.6.
    of_four, _, of_one, *others = same_budget.rows_of(results, "quickstart")
    assert of_four == ["GRPO", "55.0% (55.0% to 55.0%, 1 of 5 seeds)", "1,450", "60.0% (60.0% to 60.0%, 1 of 5 seeds)"]
    assert of_one == [
        "GRPO, one step",
        "",
        "",
        "60.0% (60.0% to 60.0%, 1 of 5 seeds)",
    ]  # a step is something else there
    assert [row[3] for row in others] == ["not run"] * 2


def run(tokens, accuracy=0.6):
    """Return a run whose curve has two points and begins at 0.4."""
    points = [(0, 0.4), (tokens, accuracy)]
    curve = [{"rollouts": i, "tokens": at, "seconds": 1.0, "accuracy": found} for i, (at, found) in enumerate(points)]
    return {"accuracy": accuracy, "tokens": float(tokens), "seconds": 1.0, "acceptance": 0.5, "curve": curve}


def test_the_best_rate_of_each_arm_with_the_seed_that_does_not_count_is_used(tmp_path):
    results, page = {}, EVIDENCE.read_text()
    for arm, best in ((two_names.FOUR, 2.0), (two_names.DEFAULT, 0.5)):
        for factor in two_names.FACTORS:
            never = run(100, accuracy=0.49)  # of 10 points more
            results["quickstart", arm, f"{factor:g}", two_names.TRIAL] = run(900) if factor == best else never
            for seed in range(10, 13):
                tokens = {two_names.FOUR: 1000, two_names.DEFAULT: 700}[arm] + seed
                results["quickstart", arm, f"{factor:g}", seed] = run(tokens if factor == best else 1)
    kept = two_names.STUDY._replace(folder=tmp_path)
    kept.write(results)
    assert kept.read() == results
    blank = two_names.STUDY._replace(folder=tmp_path / "nothing").filled_in(page)
    said = [line for line in kept.filled_in(page).splitlines() if line not in blank.splitlines()]
    # 700 and 1,000 tokens with 10, 11 and 12 more; GRPO's curve has 54.06% at 710 of 1,010.
    assert said == [
        "| quickstart | former default | GRPO | fewer tokens | 711 and 1,011: -300 (-300 to -300): shown | shown |",
        "| quickstart | former default | GRPO | accuracy at equal tokens higher | 60.0% and 54.1%: +5.9 (+5.9 to "
        "+5.9): shown | shown |",
    ]

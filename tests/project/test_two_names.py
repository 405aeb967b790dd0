# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks two_names`: which rate counts, and what the kept files say on the page."""

from pathlib import Path

from benchmarks.two_names import study


PAGE = (Path(__file__).parents[2] / "benchmarks" / "EVIDENCE.md").read_text()


def run(tokens, accuracy=0.6):
    """Two points of a curve that begins at 0.4."""
    points = [(0, 0.4), (tokens, accuracy)]
    curve = [{"rollouts": i, "tokens": at, "seconds": 1.0, "accuracy": found} for i, (at, found) in enumerate(points)]
    return {"accuracy": accuracy, "tokens": float(tokens), "seconds": 1.0, "acceptance": 0.5, "curve": curve}


def test_of_each_arm_the_rate_counts_that_was_best_with_the_seed_that_does_not(tmp_path):
    results = {}
    for arm, best in ((study.FOUR, 2.0), (study.AS_IS, 0.5)):
        for factor in study.FACTORS:
            never = run(100, accuracy=0.49)  # of 10 points more
            results["quickstart", arm, f"{factor:g}", study.TRIAL] = run(900) if factor == best else never
            for seed in range(10, 13):
                tokens = {study.FOUR: 1000, study.AS_IS: 700}[arm] + seed
                results["quickstart", arm, f"{factor:g}", seed] = run(tokens if factor == best else 1)
    kept = study.STUDY._replace(folder=tmp_path)
    kept.write(results)
    assert kept.read() == results
    blank = study.STUDY._replace(folder=tmp_path / "nothing").filled_in(PAGE)
    said = [line for line in kept.filled_in(PAGE).splitlines() if line not in blank.splitlines()]
    # 700 and 1,000 tokens with 10, 11 and 12 more; GRPO's curve has 54.06 % at 710 of 1,010.
    assert said == [
        "| quickstart | as it is, GRPO | fewer tokens | 711 beside 1,011: -300 (-300 to -300): shown | shown |",
        "| quickstart | as it is, GRPO | accuracy at equal tokens higher | 60.0 % beside 54.1 %: +5.9 (+5.9 to +5.9): "
        "shown | shown |",
    ]

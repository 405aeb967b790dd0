# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Reading of the datasets that people train on: a few rows of our own in the schema of each, in `data/schemas/`."""

import re
from pathlib import Path

import pytest

from trl_dapo.data import load_math_dataset


pytestmark = pytest.mark.fast

SCHEMAS = Path(__file__).parent / "data" / "schemas"
NONE, SEVERAL, TRUTH = "expected an answer.", "expected one answer, because it is not clear", "not a truth value"
CODE, WORKED = "not code or its tests", "a worked solution with its answer in"
# The gold answer of each row, or (row number, message about the row).
GOLDS = {
    "skywork_or1.jsonl": ["5", "$\\frac{a}{2}$", ("line 3", SEVERAL), ("line 4", CODE), ("line 5", CODE)],
    "numinamath_cot.jsonl": ["5", ("line 2", WORKED), "$\\frac{a}{2}$"],
    "numinamath_1.5.jsonl": ["5", ("line 2", NONE), ("line 3", NONE), "$x_{1}=2,x_{2}=-2$", "B", ("line 6", NONE)],
    "big_math.jsonl": ["5", "$[0,1]$", "1000000"],
    "orz.json": ["5", "$\\frac{a}{2}$", ("row 2", NONE)],
    "openmathreasoning.jsonl": ["5", "$\\frac{a}{2}$", ("line 3", NONE)],
    "deepmath_103k.jsonl": ["5", "$\\dfrac{a}{2}$", "Yes", ("line 4", TRUTH), ("line 5", TRUTH)],
    "verl_gsm8k.jsonl": ["5", "1500"],
    "dapo_math_17k.jsonl": ["5", "-2"],  # a row twice
    "openr1_math_220k.jsonl": ["5", "$12\\mathrm{~}$"],
    "deepscaler.jsonl": ["5", "$\\frac{1}{2}$", "$1000"],
    "math.jsonl": ["5", "$\\frac12$", "2", ("line 4", WORKED)],
    "math_500.jsonl": ["5", "$\\left( 3, \\frac{\\pi}{2} \\right)$", "$11,\\! 111$"],
    "gsm8k.jsonl": ["5", "1234567", "-1000", ("line 4", "between groups of three digits"), ("line 5", WORKED)],
    "aime_2024.jsonl": ["5", "25"],
    "aime_2024_hf.jsonl": ["5"],
    "aime_2025.jsonl": ["5", "25"],
    "amc.jsonl": ["5", "0.5"],
    "amc23.jsonl": ["5", "25"],
    "olympiadbench.jsonl": ["5", "$(1,2), (2,1)$", ("line 3", SEVERAL), ("line 4", NONE), "7"],
    "omni_math.jsonl": ["5", "$\\text{all odd } n$"],
    "eurus_2.jsonl": ["5", ("line 2", CODE), "$\\frac{a}{2}$"],
    "humaneval.jsonl": [("line 1", CODE)],
    "acemath_instruct.jsonl": ["5", ("line 2", WORKED)],
    "acereason_math.jsonl": ["5", "$\\frac{a}{2}$"],
    "trl.jsonl": ["5", "$\\frac{a}{2}$", "2"],
    "ms_swift.jsonl": ["5", "2"],
    "nemo_rl.jsonl": ["5", "$\\frac{a}{2}$"],
    "skyrl.jsonl": ["5", ("line 2", NONE)],
    "slime.jsonl": ["5", ("line 2", "or a list in JSON")],
}


def test_every_file_is_in_the_table():
    assert sorted(path.name for path in SCHEMAS.iterdir()) == sorted(GOLDS)


@pytest.mark.parametrize("name", GOLDS)
def test_a_row_of_each_schema_has_its_gold_answer_or_is_refused_by_its_place(name):
    bad = [row for row in GOLDS[name] if isinstance(row, tuple)]
    golds = [row for row in GOLDS[name] if isinstance(row, str)]
    for place, message in bad[:1]:
        # The first one is named with its fault, and all are counted.
        places = ", ".join(place for place, _ in bad)
        with pytest.raises(
            ValueError, match=rf"{place}, read with .*{re.escape(message)}.* {len(bad)} of .*\({places}\)"
        ):
            load_math_dataset(SCHEMAS / name, prompt_style="as_is")
    if not golds:
        return
    dataset = load_math_dataset(SCHEMAS / name, prompt_style="as_is", on_bad_rows="skip")
    assert dataset["solution"][:] == golds
    assert "What is 2 + 3?" in dataset["prompt"][0][-1]["content"]

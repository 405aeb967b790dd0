# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
import json
import logging
import os

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trl_dapo.data import load_math_dataset, refuse_overlap


needs_data = pytest.mark.skipif(
    "TRL_DAPO_DATA" not in os.environ, reason="TRL_DAPO_DATA does not name the folder with the real data"
)

PAPER = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n{}\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)
SLIME = PAPER.replace("$Answer (without quotes)", "\\boxed{{$Answer}}")
GRESO = (
    "Please solve the following math problem: {}. The assistant first thinks about the reasoning process step by step "
    "and then provides the user with the answer. Return the final answer in \\boxed{{}} tags, for example "
    "\\boxed{{1}}. Let's solve this step by step. "
)
BOXED = "{}\n\nPlease reason step by step, and put your final answer within \\boxed{{}}."


def user(text):
    return [{"role": "user", "content": text}]


def contents(dataset):
    return [prompt[0]["content"] for prompt in dataset["prompt"]]


@pytest.fixture
def write(tmp_path):
    """Writes rows to a file and returns its path."""

    def write(rows, name="sums.jsonl"):
        path = tmp_path / name
        if path.suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        elif path.suffix == ".json":
            path.write_text(json.dumps(rows))
        else:
            path.write_text("\n".join(json.dumps(row) for row in rows))
        return path

    return write


def sums(*pairs):
    return [{"problem": problem, "answer": answer} for problem, answer in pairs]


SCHEMAS = {
    "verl": {"prompt": user("What is 1+1?"), "reward_model": {"ground_truth": "2", "style": "rule"}},
    "slime": {"prompt": user("What is 1+1?"), "label": "2"},
    "open-r1": {"prompt": "What is 1+1?", "solution": "2", "reward_model": {"ground_truth": "2"}},
    "open-r1 without verl's column": {"prompt": "What is 1+1?", "solution": "2"},
    "GSM8K": {"question": "What is 1+1?", "answer": "1 = 1 and #### is a marker.\n#### 2"},
    "MATH": {"problem": "What is 1+1?", "answer": "2", "solution": "As $1+1=2$, it is $\\boxed{2}$."},
}


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".json"])
@pytest.mark.parametrize("row", SCHEMAS.values(), ids=SCHEMAS)
def test_every_schema_becomes_the_same_four_columns(write, row, suffix):
    dataset = load_math_dataset(write([row], "sums" + suffix), prompt_style="boxed")
    assert dataset.column_names == ["prompt", "solution", "source", "id"]
    assert dataset[0] == {
        "prompt": user(BOXED.format("What is 1+1?")),
        "solution": "2",
        "source": "sums",
        "id": "31adf3e245f99d7b",
    }


@pytest.mark.parametrize("column", ["data_source", "source"])
def test_the_source_of_a_row_is_kept(write, column):
    dataset = load_math_dataset(write([{"problem": "1+1", "answer": "2", column: "aime"}]))
    assert dataset["source"][:] == ["aime"]


@pytest.mark.parametrize(
    "wrapper", [PAPER, SLIME, GRESO, BOXED, "{}"], ids=["paper", "slime", "GRESO", "boxed", "bare"]
)
def test_known_wrappers_are_taken_off_before_another_is_put_on(write, wrapper):
    prompt = wrapper.format("Find $x$.")
    path = write([{"prompt": user(prompt), "label": "2"}])
    assert contents(load_math_dataset(path, prompt_style="answer_line")) == [PAPER.format("Find $x$.")]
    assert contents(load_math_dataset(path, prompt_style="boxed")) == [BOXED.format("Find $x$.")]
    assert contents(load_math_dataset(path, prompt_style="as_is")) == [prompt]


def test_braces_and_dollars_of_a_problem_survive_the_wrapping(write):
    problem = "Let $f = {x} \\frac{1}{2}$ and $Answer {problem} {0}."
    assert contents(load_math_dataset(write(sums((problem, "2"))))) == [PAPER.replace("{}", problem)]


def test_the_id_depends_on_the_problem_only(write):
    ids = {
        load_math_dataset(write([{"prompt": user(prompt), "label": "2"}], name), prompt_style=style)["id"][0]
        for prompt in (PAPER.format("Find $x$."), GRESO.format("Find $x$."), "  Find $x$.\n")
        for name in ("a.jsonl", "b.parquet")
        for style in ("answer_line", "boxed", "as_is")
    }
    assert len(ids) == 1


def test_duplicates_go_but_for_the_first_and_conflicts_go_altogether(write, caplog):
    rows = sums(("a", "1"), ("b", "2"), ("a", "1"), ("c", "3"), ("b", "4"), ("a ", "1"), ("b", "2"))
    dataset = load_math_dataset(write(rows))
    assert dataset["solution"][:] == ["1", "3"]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "2 problems from 7 rows; removed 2 duplicates" in record.message
    assert "and 1 problems with conflicting answers (3 rows)." in record.message
    assert dataset.info.description == record.message


def test_clean_data_is_no_warning(write, caplog):
    load_math_dataset(write(sums(("a", "1"), ("b", "2"))))
    assert not caplog.records


def test_offset_and_limit_count_problems_not_rows(write):
    path = write(sums(("a", "1"), ("a", "1"), ("b", "2"), ("c", "3"), ("d", "4")))
    assert load_math_dataset(path, offset=1, limit=2)["solution"][:] == ["2", "3"]
    assert load_math_dataset(path, offset=3, limit=9)["solution"][:] == ["4"]


def test_answers_become_text(write):
    rows = [{"problem": f"p{i}", "answer": answer} for i, answer in enumerate([34, 34.0, 0.5, " 7 "])]
    assert load_math_dataset(write(rows))["solution"][:] == ["34", "34", "0.5", "7"]


def test_thousands_separators_of_gsm8k_are_dropped(write):
    assert load_math_dataset(write([{"question": "q", "answer": "#### 70,000"}]))["solution"][:] == ["70000"]


def test_a_conversation_is_left_alone_as_is_and_refused_otherwise(write):
    messages = [{"role": "system", "content": "Be brief."}, *user("1+1")]
    path = write([{"prompt": messages, "label": "2"}])
    assert load_math_dataset(path, prompt_style="as_is")["prompt"][0] == messages
    with pytest.raises(ValueError, match=r'2 messages \(system, user\).*prompt_style="as_is"'):
        load_math_dataset(path)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"text": "1+1", "answer": "2"},
            "found columns `text`, `answer`; expected `prompt` and `reward_model`",
        ),
        ({"prompt": "1+1", "reward_model": {"style": "rule"}}, "row 0 .verl.*ground_truth"),
        ({"prompt": "1+1", "reward_model": "2"}, "row 0 .verl.*`reward_model` is '2', expected a struct"),
        ({"prompt": "1+1", "label": None}, "row 0 .slime.*`label` is None, expected an answer"),
        ({"prompt": "1+1", "label": ["2"]}, r"`label` is \['2'\], expected an answer"),
        ({"problem": "1+1", "answer": float("nan")}, "`answer` is nan"),
        ({"prompt": " ", "label": "2"}, "`prompt` is ' ', expected a problem"),
        ({"prompt": None, "label": "2"}, "`prompt` is None, expected text, or messages"),
        ({"prompt": [], "label": "2"}, r"`prompt` is \[\], expected text, or messages"),
        ({"prompt": [{"role": "assistant", "content": "2"}], "label": "2"}, "of which the last is the user's"),
        ({"question": "1+1", "answer": "2"}, "row 0 .GSM8K.*expected a text that ends in `#### N`"),
    ],
)
def test_a_row_of_another_shape_is_refused_with_what_was_found_and_expected(write, row, message):
    with pytest.raises(ValueError, match=message):
        load_math_dataset(write([row]))


def test_the_number_of_the_wrong_row_is_named(write):
    with pytest.raises(ValueError, match=r"row 1 .*`answer` is ''"):
        load_math_dataset(write(sums(("a", "1"), ("b", ""))))


@pytest.mark.parametrize("name", ["sums.parquet", "sums.jsonl", "sums.json"])
@pytest.mark.parametrize(("text", "message"), [("", "empty|cannot be read"), ("no json", "cannot be read as ")])
def test_an_unreadable_file_is_refused(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        load_math_dataset(tmp_path / name)


def test_a_json_file_without_rows_is_refused(write, tmp_path):
    with pytest.raises(ValueError, match="is empty: expected rows with `prompt` and `reward_model`"):
        load_math_dataset(write([], "sums.json"))
    (tmp_path / "sums.json").write_text('{"data": []}')
    with pytest.raises(ValueError, match="a row is 'data', not an object"):
        load_math_dataset(tmp_path / "sums.json")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"offset": 2}, "`offset` 2 is beyond the end of .* which has 2 problems"),
        ({"offset": -1}, "`offset` must not be negative, got -1"),
        ({"limit": 0}, "`limit` must be at least 1, got 0"),
        ({"prompt_style": "xml"}, "'answer_line', 'boxed', 'as_is', got 'xml'"),
    ],
)
def test_settings_without_a_meaning_are_refused_with_their_value(write, settings, message):
    with pytest.raises(ValueError, match=message):
        load_math_dataset(write(sums(("a", "1"), ("b", "2"))), **settings)


def test_a_file_is_looked_up_here_first_and_then_in_the_data_folder(write, tmp_path, monkeypatch):
    write(sums(("a", "1")))
    monkeypatch.setenv("TRL_DAPO_DATA", str(tmp_path))
    assert load_math_dataset("sums.jsonl")["solution"][:] == ["1"]
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    (here / "sums.jsonl").write_text(json.dumps({"problem": "b", "answer": "2"}))
    assert load_math_dataset("sums.jsonl")["solution"][:] == ["2"]


def test_a_missing_file_is_named_with_every_place_that_was_searched(tmp_path, monkeypatch):
    monkeypatch.setenv("TRL_DAPO_DATA", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=f"no `{tmp_path}/sums.jsonl` nor `{tmp_path}/data/sums.jsonl`"):
        load_math_dataset("sums.jsonl")
    monkeypatch.delenv("TRL_DAPO_DATA")
    with pytest.raises(FileNotFoundError, match="TRL_DAPO_DATA is not set"):
        load_math_dataset("sums.jsonl")


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is not a file of one of the kinds"):
        load_math_dataset(tmp_path)


def test_another_name_is_a_dataset_of_the_hub(monkeypatch):
    def load_dataset(*args, **kwargs):
        assert (args, kwargs) == (("openai/gsm8k", "main"), {"split": "test"})
        return datasets.Dataset.from_list([{"question": "1+1", "answer": "#### 2"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    dataset = load_math_dataset("openai/gsm8k", split="test", name="main")
    assert (dataset["solution"][0], dataset["source"][0]) == ("2", "gsm8k")


def test_a_dataset_that_the_hub_does_not_have_is_a_missing_file(monkeypatch):
    def load_dataset(*args, **kwargs):
        raise datasets.exceptions.DatasetNotFoundError("Dataset 'sums.parqet' doesn't exist")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(FileNotFoundError, match=r"`sums.parqet` is no local .parquet.*doesn't exist"):
        load_math_dataset("sums.parqet")


def test_ranges_that_overlap_are_refused_and_others_are_not(write):
    path = write(sums(("a", "1"), ("b", "2"), ("c", "3"), ("d", "4")))
    train = load_math_dataset(path, limit=3)
    refuse_overlap(train, load_math_dataset(path, offset=3))
    with pytest.raises(ValueError, match="1 of the 2 evaluation problems are in the training set"):
        refuse_overlap(train, load_math_dataset(path, offset=2, prompt_style="boxed"))


@needs_data
def test_dapo_math_17k_has_17243_problems_and_asks_for_an_answer_line():
    dataset = load_math_dataset("dapo_math_17k.parquet")
    # 17,398 distinct prompts, 143 of which differ from another by whitespace around the problem only
    assert len(dataset) == len(set(dataset["id"])) == 17_398 - 143 - 12
    assert "removed 650 duplicates and 12 problems with conflicting answers (24 rows)" in dataset.info.description
    opening, closing = PAPER.split("{}")
    for content in contents(dataset):
        assert content.startswith(opening)
        assert content.endswith(closing)
        assert "Return the final answer in" not in content
    assert dataset[0]["solution"] == "34"
    assert dataset[0]["source"] == "dapo_math"
    assert contents(dataset)[0].removeprefix(opening).startswith("In triangle $ABC$, $\\sin")
    assert contents(dataset)[0].removesuffix(closing).endswith("find $a + b + c$.")


@needs_data
def test_the_960_rows_of_aime_are_30_problems():
    dataset = load_math_dataset("aime-2024.parquet")
    assert len(dataset) == 30
    assert set(dataset["source"]) == {"math_dapo"}
    as_is = load_math_dataset("aime-2024.parquet", prompt_style="as_is")
    assert dataset["prompt"][:] == as_is["prompt"][:]  # the file already has the paper's prompt


@needs_data
def test_gsm8k_is_read_to_the_last_row():
    dataset = load_math_dataset("gsm8k_test.jsonl")
    assert len(dataset) == 1_319
    assert all(solution.lstrip("-").isdigit() for solution in dataset["solution"])

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
import json
import logging
import os
import re

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from trl.rewards import think_format_reward

from trl_dapo.data import each_row, load_math_dataset, load_prompts, refuse_overlap
from trl_dapo.rewards import DapoMathReward, dapo_math_reward, math_verify_reward


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
    "open-r1 with a worked solution": {"prompt": "What is 1+1?", "solution": "It is $3-1=2$.", "answer": "2"},
    "a boxed solution": {"prompt": "What is 1+1?", "solution": "It is $\\boxed{3-1}=\\boxed{2}$.", "level": 1},
    "a box without braces": {"problem": "What is 1+1?", "solution": "It is $\\fbox{3}$, no, $\\boxed 2$ indeed."},
    "ground_truth": {"question": "What is 1+1?", "ground_truth": "2", "answer": "It is $3-1$."},
    "content in parts": {"prompt": user([{"type": "text", "text": "What is 1+1?"}]), "label": "2"},
    "content as a list of text": {"prompt": user(["What is ", "1+1?"]), "label": "2"},
    "content as one part": {"prompt": user({"type": "text", "text": "What is 1+1?"}), "label": "2"},
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


@pytest.mark.parametrize(
    "wrapper", [PAPER, SLIME, GRESO, BOXED, "{}"], ids=["paper", "slime", "GRESO", "boxed", "bare"]
)
def test_known_instructions_are_replaced_by_those_of_the_prompt_style(write, wrapper):
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
    (other,) = load_math_dataset(write([{"prompt": user("Find $y$."), "label": "2"}]))["id"]
    assert other not in ids


def test_the_first_of_duplicates_is_kept_and_conflicts_are_dropped(write, caplog):
    rows = sums(("a", "1"), ("b", "2"), ("a", "1"), ("c", "3"), ("b", "4"), ("a ", "1"), ("b", "2"))
    dataset = load_math_dataset(write(rows))
    assert dataset["solution"][:] == ["1", "3"]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "2 problems from 7 rows; removed 2 duplicate rows" in record.message
    assert "and 1 problems with conflicting answers (3 rows)." in record.message
    assert dataset.info.description == record.message
    caplog.clear()
    load_math_dataset(write(sums(("a", "1"), ("b", "2"))))
    assert not caplog.records


def test_offset_and_limit_count_problems_not_rows(write):
    path = write(sums(("a", "1"), ("a", "1"), ("b", "2"), ("c", "3"), ("d", "4")))
    assert load_math_dataset(path, offset=1, limit=2)["solution"][:] == ["2", "3"]
    assert load_math_dataset(path, offset=3, limit=9)["solution"][:] == ["4"]
    path = write(sums(("a", "proof"), ("b", "2"), ("c", "proof"), ("d", "4"), ("e", "proof")))
    dataset = load_math_dataset(path, limit=2, on_bad_rows="skip")
    assert dataset["solution"][:] == ["2", "4"]
    assert "2 problems from the first 4 rows" in dataset.info.description


def test_an_answer_in_two_notations_is_not_a_conflict(write):
    dataset = load_math_dataset(write(sums(("a", "34"), ("b", "35"), ("a", "$34$"))))
    assert dataset["solution"][:] == ["34", "35"]
    assert "removed 1 duplicate rows and 0 problems" in dataset.info.description


def test_a_formula_is_read_by_both_rewards(write):
    problem = {"problem": "What is the area?", "solution": "It is $\\pi r^2 = \\boxed{2\\pi}$.", "source": "aime"}
    dataset = load_math_dataset(write([problem]))
    assert dataset["source"][:] == ["aime"]
    (gold,) = dataset["solution"]
    assert math_verify_reward(["$\\boxed{\\pi \\cdot 2}$", "$\\boxed{2}$"], [gold] * 2) == [1.0, 0.0]
    assert dapo_math_reward(["Answer: $2\\pi$", "Answer: 2"], [gold] * 2) == [1.0, -1.0]
    assert DapoMathReward(boxed="strict")(["\\boxed{2\\pi}", "\\boxed{2}"], [gold] * 2) == [1.0, -1.0]


def test_rows_without_a_gold_answer_are_an_error_or_are_skipped(write, caplog):
    golds = ["1", "proof", "proof", "2", None, "", "x" * 301, "notfound", True]  # 7 of 9 are not a gold answer
    path = write(sums(*((f"p{i}", gold) for i, gold in enumerate(golds))))
    seven = r"7 of 9 \(line 2, line 3, line 5, line 6, line 7, \.\.\.\)"
    way_out = rf"Bad rows: {seven}\. Correct .*`on_bad_rows=\"skip\"`"
    with pytest.raises(ValueError, match=rf"line 2, .*`answer` is 'proof', expected an answer\. {way_out}"):
        load_math_dataset(path)
    assert load_math_dataset(path, on_bad_rows="skip")["solution"][:] == ["1", "2"]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "2 problems from 9 rows; removed 0 duplicate rows" in record.message
    assert re.search(f"Bad rows left out: {seven}", record.message)


def test_a_file_without_a_usable_problem_is_refused(write):
    with pytest.raises(ValueError, match=r"2 of 2 \(line 1, line 2\)\. No problem is left"):
        load_math_dataset(write(sums(("a", "proof"), ("b", ""))), on_bad_rows="skip")
    with pytest.raises(ValueError, match=r"1 problems with conflicting answers \(2 rows\)\. No problem is left"):
        load_math_dataset(write(sums(("1+1", "2"), ("1+1", "3"))))


def test_a_conversation_is_unchanged_with_as_is_and_refused_with_other_styles(write):
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
            "columns are `text`, `answer`. Expected `prompt` and `reward_model.ground_",
        ),
        ({"prompt": "1+1", "reward_model": "2"}, "line 1, .* verl schema: `reward_model.ground_truth` is None, exp"),
        ({"prompt": " ", "label": "2"}, "`prompt` is ' ', expected a problem"),
        ({"prompt": None, "label": "2"}, "`prompt` is None, expected text, or a list of text messages"),
        (
            {"prompt": user([{"type": "image"}, {"type": "text", "text": "1"}]), "label": "2"},
            "expected text, or a list",
        ),
        ({"problem": "1+1", "solution": "It is 2."}, r"expected a worked solution with its answer in `.boxed\{\}`"),
        ({"prompt": [], "label": "2"}, r"`prompt` is \[\], expected text, or a list of text messages"),
        ({"prompt": [{"role": "assistant", "content": "2"}], "label": "2"}, "that ends with one of the user"),
    ],
)
def test_the_error_for_a_row_of_another_schema_says_what_was_found_and_expected(write, row, message):
    with pytest.raises(ValueError, match=message):
        load_math_dataset(write([row]))


def test_the_error_for_a_bad_row_names_its_place(write):
    for name in ("sums.json", "sums.parquet"):
        with pytest.raises(ValueError, match=r"`, row 1, .*`answer` is ''"):
            load_math_dataset(write(sums(("a", "1"), ("b", "")), name))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"problem": "b", "answer"', "as jsonl: line 4: Expecting ':' delimiter$"),
        (b"[1, 2]", r"line 4: a row is \[1, 2\], not an object"),
        (b'{"problem": "b", "answer": "\xff"}', "line 4: .*can't decode"),
        (
            b'{"problem": "b\\ud800", "answer": "2"}',
            "line 4, .* MATH schema: `problem` is 'b.*without lone surrogates",
        ),
        (b'{"problem": "b", "answer": "\\ud800"}', "line 4, .* MATH schema: `answer` is '.*without lone surrogates"),
    ],
)
def test_a_bad_line_is_named_by_its_number_in_the_file(tmp_path, line, message):
    path = tmp_path / "sums.jsonl"
    path.write_bytes(b'{"problem": "a", "answer": "1"}\n\n \r\n' + line + b'\n{"problem": "c", "answer": "3"}\n')
    with pytest.raises(ValueError, match=message):
        load_math_dataset(path)


@pytest.mark.parametrize("name", ["sums.jsonl", "sums.json"])
def test_a_byte_order_mark_and_windows_line_ends_are_not_part_of_the_data(tmp_path, name):
    text = '{"problem": "a\u00e9", "answer": "1"}\r\n'
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + (f"[{text}]" if name.endswith("json") else text * 2).encode())
    dataset = load_math_dataset(tmp_path / name, prompt_style="as_is")
    assert (contents(dataset), dataset["solution"][:]) == (["a\u00e9"], ["1"])


NUM_ROWS = 20_000


def test_a_limit_reads_no_further_line(write, monkeypatch):
    path = write(sums(*((f"p{i // 2}", i // 2) for i in range(NUM_ROWS))))  # every problem twice
    parsed, loads = [], json.loads
    monkeypatch.setattr(json, "loads", lambda line: parsed.append(line) or loads(line))
    dataset = load_math_dataset(path, offset=50, limit=100)
    assert dataset["solution"][:] == [str(i) for i in range(50, 150)]
    assert len(parsed) == 2 * 149 + 1  # the second row of the 150th problem is not read
    assert "150 problems from the first 299 rows" in dataset.info.description
    assert len(load_math_dataset(path)) == NUM_ROWS / 2
    assert len(parsed) == 299 + NUM_ROWS


def test_a_limit_reads_no_further_batch_of_parquet(write, monkeypatch):
    path = write(sums(*((f"p{i}", i) for i in range(NUM_ROWS))), "sums.parquet")
    taken, iter_batches = [], pq.ParquetFile.iter_batches

    def counted(self, *args, **kwargs):
        for batch in iter_batches(self, *args, **kwargs):
            taken.append(len(batch))
            yield batch

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", counted)
    assert len(load_math_dataset(path, limit=100)) == 100
    assert sum(taken) <= NUM_ROWS / 10
    taken.clear()
    assert len(load_math_dataset(path)) == sum(taken) == NUM_ROWS


def test_ranges_do_not_overlap_if_a_longer_one_has_more_conflicts(write):
    rows = [*((f"p{i}", i) for i in range(10)), ("p2", 0), ("p7", 0), *((f"p{i}", i) for i in range(10, 15))]
    path = write(sums(*rows))
    for middle in range(1, 12):
        before, after = load_math_dataset(path, limit=middle), load_math_dataset(path, offset=middle)
        following = load_math_dataset(path, offset=middle, limit=1)
        refuse_overlap(before, after)
        refuse_overlap(before, following)
        assert (before["solution"][0], after["solution"][-1]) == ("0", "14")
        assert int(before["solution"][-1]) < int(following["solution"][0])


def drawing(grey):
    return Image.fromarray(np.full((2, 2, 3), grey, dtype=np.uint8))


@pytest.mark.parametrize("place", ["hub", "file"])
@pytest.mark.parametrize("column", ["images", "image"])
def test_problems_with_images_keep_them_and_are_told_apart_by_them(tmp_path, monkeypatch, place, column):
    # The same text three times: twice with the drawing whose answer is 1, once with the one whose answer is 2.
    greys = (10, 10, 20)
    rows = datasets.Dataset.from_dict(
        {
            column: [[drawing(grey)] if column == "images" else drawing(grey) for grey in greys],
            "problem": ["<image>Find x."] * 3,
            "answer": ["1", "1", "2"],
        }
    )
    path = tmp_path / "drawings.parquet"
    rows.to_parquet(path)
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: rows)
    dataset = load_math_dataset(path if place == "file" else "drawings", prompt_style="as_is")
    assert contents(dataset) == ["Find x."] * 2  # TRL reports where an image is
    assert dataset["solution"] == ["1", "2"]
    assert [[image.getpixel((0, 0)) for image in images] for images in dataset["images"]] == [[(10,) * 3], [(20,) * 3]]
    assert len(set(dataset["id"])) == 2


def test_problems_with_and_without_images_can_be_mixed_and_other_values_are_refused(write):
    rows = [{"problem": "Find x.", "answer": "1", "images": ["a.png", "b.png"]}, *sums(("1+1", "2"))]
    images = load_math_dataset(write(rows)).with_format("arrow")["images"].to_pylist()
    assert [[image["path"] for image in each] for each in images] == [["a.png", "b.png"], []]
    with pytest.raises(ValueError, match=r"line 1: 7 is not an image\. Expected a path, or a mapping"):
        load_math_dataset(write([{"problem": "Find x.", "answer": "1", "image": 7}]))


def test_the_style_think_asks_for_what_both_rewards_read(write):
    (prompt,) = contents(load_math_dataset(write(sums(("1+1", "2"))), prompt_style="think"))
    assert prompt.startswith("1+1\n")
    answered = [[{"role": "assistant", "content": "<think>One more.</think>\n\\boxed{2}"}]]
    assert all(mark in prompt for mark in ("<think>", "</think>", "\\boxed{}"))
    assert think_format_reward(answered) == math_verify_reward(answered, ["2"]) == [1.0]


@pytest.mark.parametrize("name", ["sums.parquet", "sums.jsonl", "sums.json"])
@pytest.mark.parametrize(
    ("text", "message"),
    [("", "empty|cannot be read"), ("no json", "cannot be read as "), ("[" * 100_000, "as (json.*recursion|parquet)")],
    ids=["nothing", "no json", "endless"],
)
def test_an_unreadable_file_is_refused(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        load_math_dataset(tmp_path / name)


def test_a_damaged_parquet_file_is_refused_with_its_name(write):
    path = write(sums(("a", "1")), "sums.parquet")
    path.write_bytes(path.read_bytes()[4:])
    with pytest.raises(ValueError, match=r"sums.parquet` cannot be read as parquet: "):
        load_math_dataset(path)


def test_a_json_file_without_rows_is_refused(write, tmp_path):
    with pytest.raises(ValueError, match=r"is empty\. Expected rows with `prompt` and `reward_model"):
        load_math_dataset(write([], "sums.json"))
    refused = {'{"data": []}': "it contains .*, not a list", "{}\n{}": "Extra data.*one object per line.*jsonl"}
    for text, message in refused.items():
        (tmp_path / "sums.json").write_text(text)
        with pytest.raises(ValueError, match=rf"sums.json` cannot be read as json: {message}"):
            load_math_dataset(tmp_path / "sums.json")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"offset": 2}, "`offset=2` is beyond the end of .* which has 2 problems"),
        ({"offset": -1}, "`offset` must be a whole number of at least 0, got -1"),
        ({"limit": 0}, "`limit` must be a whole number of at least 1, got 0. Leave it out for all"),
        ({"on_bad_rows": "drop"}, "'error', 'skip', got 'drop'"),
        ({"prompt_style": "xml"}, "'answer_line', 'boxed', 'think', 'as_is', got 'xml'"),
    ],
)
def test_the_error_for_a_setting_that_is_not_allowed_contains_its_value(write, settings, message):
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
    with pytest.raises(FileNotFoundError, match=f"no `sums.jsonl` in {tmp_path}, none in {tmp_path}/data "):
        load_math_dataset("sums.jsonl")
    monkeypatch.setenv("TRL_DAPO_DATA", "")
    with pytest.raises(FileNotFoundError, match=f"no `sums.jsonl` in {tmp_path} and none .* TRL_DAPO_DATA is not set"):
        load_math_dataset("sums.jsonl")
    monkeypatch.delenv("TRL_DAPO_DATA")
    with pytest.raises(FileNotFoundError, match="TRL_DAPO_DATA is not set"):
        load_math_dataset("sums.jsonl")


def test_a_name_that_is_not_a_file_is_a_dataset_on_the_hub(monkeypatch):
    def load_dataset(*args, **kwargs):
        assert (args, kwargs) == (("openai/gsm8k", "main"), {"split": "test"})
        return datasets.Dataset.from_list([{"question": "1+1", "answer": "#### 2"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    dataset = load_math_dataset("openai/gsm8k", split="test", name="main")
    assert (dataset["solution"][0], dataset["source"][0]) == ("2", "gsm8k")


def test_a_folder_without_data_and_one_with_the_name_of_a_file_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="doesn't contain any data files"):
        load_math_dataset(tmp_path)
    (tmp_path / "sums.jsonl").mkdir()
    with pytest.raises(IsADirectoryError, match=r"sums.jsonl` is a folder. Name a file in it"):
        load_math_dataset(tmp_path / "sums.jsonl")


def test_a_dataset_that_the_hub_does_not_have_is_a_missing_file(monkeypatch):
    def load_dataset(*args, **kwargs):
        raise datasets.exceptions.DatasetNotFoundError("Dataset 'sums.parqet' doesn't exist")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(
        FileNotFoundError, match=r"`sums.parqet` is neither a file nor a folder here, and .*doesn't exist"
    ):
        load_math_dataset("sums.parqet")


def test_ranges_that_overlap_are_refused_and_others_are_not(write):
    path = write(sums(("a", "1"), ("b", "2"), ("c", "3"), ("d", "4")))
    train = load_math_dataset(path, limit=3)
    refuse_overlap(train, load_math_dataset(path, offset=3))
    with pytest.raises(ValueError, match=r"1 of the 2 evaluation problems .* set `dataset_limit` and `eval_dataset_o"):
        refuse_overlap(train, load_math_dataset(path, offset=2, prompt_style="boxed"))


@pytest.mark.parametrize(
    "other",
    [
        {"solution": "1", "split": "test"},
        {"solution": "1", "id": "another"},
        {"solution": 1},
        {"prompt": [{"role": "user", "content": "a"}], "solution": "1"},
        {"prompt": PAPER.format("a"), "solution": "1"},
    ],
    ids=["split", "id", "number", "messages", "wrapped"],
)
def test_an_evaluation_prompt_that_is_also_a_training_prompt_is_refused_whatever_its_other_columns(other):
    train = datasets.Dataset.from_list([{"prompt": "a", "solution": "1"}, {"prompt": "b", "solution": "2"}])
    with pytest.raises(ValueError, match=r"1 of the 1 evaluation problems are in the training set as well \(row 0\)"):
        refuse_overlap(train, datasets.Dataset.from_list([{"prompt": "a", **other}]))
    refuse_overlap(train, datasets.Dataset.from_list([{**other, "prompt": "c"}]))


def test_missing_values_that_a_file_adds_do_not_change_a_prompt():
    train = datasets.Dataset.from_list([{"prompt": [{"role": "user", "content": "a", "name": None}]}])
    with pytest.raises(ValueError, match="1 of the 1 evaluation problems"):
        refuse_overlap(train, datasets.Dataset.from_list([{"prompt": "a", "images": []}]))


def test_the_error_for_a_lone_surrogate_names_its_row(write):
    path = write([{"prompt": "a"}, {"prompt": "b", "hint": "\ud800"}])
    with pytest.raises(ValueError, match=r"line 2 has text with lone surrogates, which cannot be stored in a file"):
        load_prompts(path)


def test_rows_have_the_types_that_a_data_loader_reads():
    dataset = datasets.Dataset.from_dict({"prompt": ["a"], "level": [1.5]}).with_format("numpy")
    assert [type(row["level"]) for row in each_row(dataset)] == [np.float32]  # a single row would have a float64


def test_where_one_prompt_asks_for_many_things_those_are_compared():
    """Like the tasks of an environment, whose prompts are all the same."""
    train, held_out = ([{"prompt": "Guess it.", "word": word} for word in words] for words in (["ox", "hen"], ["ass"]))
    refuse_overlap(datasets.Dataset.from_list(train), datasets.Dataset.from_list(held_out))
    with pytest.raises(ValueError, match="1 of the 2 evaluation problems"):
        refuse_overlap(*map(datasets.Dataset.from_list, (train, [*held_out, {"prompt": "Guess it.", "word": "hen"}])))


def test_text_stays_text_with_as_is_and_becomes_a_message_in_other_styles(write):
    path = write([{"prompt": "a", "solution": "1"}])
    assert load_math_dataset(path, prompt_style="as_is")["prompt"][0] == "a"
    assert load_math_dataset(path, prompt_style="boxed")["prompt"][0][0]["role"] == "user"
    problem = write([{"problem": "a", "answer": "1"}])  # a problem is not a prompt yet
    assert load_math_dataset(problem, prompt_style="as_is")["prompt"][0] == [{"role": "user", "content": "a"}]


@needs_data
def test_dapo_math_17k_has_17243_problems_and_asks_for_an_answer_line():
    dataset = load_math_dataset("dapo_math_17k.parquet")
    # 17,398 distinct prompts, 143 of which differ from another by whitespace around the problem only
    assert len(dataset) == len(set(dataset["id"])) == 17_398 - 143 - 12
    assert "removed 650 duplicate rows and 12 problems with conflicting answers (24 rows)" in dataset.info.description
    opening, closing = PAPER.split("{}")
    for content in contents(dataset):
        assert content.startswith(opening)
        assert content.endswith(closing)
        assert "Return the final answer in" not in content
    assert (dataset[0]["solution"], dataset[0]["source"]) == ("34", "dapo_math")


@needs_data
def test_the_960_rows_of_aime_are_30_problems():
    dataset = load_math_dataset("aime-2024.parquet")
    assert len(dataset) == 30
    assert set(dataset["source"]) == {"math_dapo"}
    as_is = load_math_dataset("aime-2024.parquet", prompt_style="as_is")
    assert dataset["prompt"][:] == as_is["prompt"][:]  # the file already has the paper's prompt


# ---- Numbers keep their digits, problems are whole prompts, and a suffix may be written in capitals ----

LONG = 2**63 + 5  # 9223372036854775813 does not fit into 64 bits


def golds(path, **options):
    return [row["solution"] for row in load_prompts(path, **options)]


def test_integers_that_do_not_fit_into_64_bits_become_text(write):
    rows = [{"prompt": f"p{i}", "solution": gold} for i, gold in enumerate([LONG, 3, None])]
    assert golds(write(rows)) == [str(LONG), "3", None]  # a column has one type
    nested = [{"prompt": "p", "reward_model": {"ground_truth": [LONG]}}]
    assert load_prompts(write(nested))[0]["reward_model"] == {"ground_truth": [str(LONG)]}
    assert golds(write([{"prompt": "p", "solution": 2**63 - 1}])) == [2**63 - 1]  # the values that it can hold


def test_a_column_of_unsigned_64_bit_integers_keeps_its_digits(tmp_path):
    table = pa.table({"prompt": ["a", "b"], "solution": pa.array([2**64 - 1, 4], pa.uint64())})
    pq.write_table(table, tmp_path / "sums.parquet")
    assert golds(tmp_path / "sums.parquet") == [str(2**64 - 1), "4"]


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (["3", "4"], [3, 4]),
        (["12345678901234567", "", "3"], [12345678901234567, None, 3]),  # a float would end in ...568
        (["12345678901234567", "2.5"], ["12345678901234567", "2.5"]),
        ([str(LONG), "", "3"], [str(LONG), None, "3"]),
        (["007", "33"], ["007", "33"]),  # three digits, as in AIME
        (["0.50", "1e-07"], [0.5, 1e-07]),
        (["0.12345678901234567890", "1"], ["0.12345678901234567890", "1"]),
        (["-5", "+5"], [-5, 5]),
        (["True", "false"], [True, False]),
        (["five", "3"], ["five", "3"]),
        (["", ""], [None, None]),
    ],
    ids=str,
)
def test_a_gold_answer_in_a_csv_file_keeps_its_digits(tmp_path, written, read):
    path = tmp_path / "golds.csv"
    path.write_text("prompt,solution\n" + "".join(f"p{i},{gold}\n" for i, gold in enumerate(written)))
    found = golds(path)
    assert found == read
    assert list(map(type, found)) == list(map(type, read))


def messages(*turns):
    return [{"role": role, "content": content} for role, content in turns]


def test_conversations_that_end_in_the_same_message_are_different_problems(write):
    """Eight conversations and a single prompt end with the same question. Each has an answer of its own."""
    rows = [
        {"prompt": messages(("system", f"Rule {i}"), ("user", "What is x?")), "solution": str(i)} for i in range(4)
    ]
    rows += [
        {"prompt": messages(("user", f"x is {i}"), ("assistant", "Ok."), ("user", "What is x?")), "solution": str(i)}
        for i in range(4)
    ]
    rows.append({"prompt": messages(("user", "What is x?")), "solution": "9"})
    dataset = load_math_dataset(write(rows), prompt_style="as_is")
    assert dataset["solution"] == ["0", "1", "2", "3", "0", "1", "2", "3", "9"]
    assert len(set(dataset["id"])) == 9
    # The same conversation twice is one problem, and the id of a single prompt has not changed.
    assert len(load_math_dataset(write(rows + rows), prompt_style="as_is")) == 9
    single = load_math_dataset(write([{"prompt": "What is x?", "solution": "9"}]))
    assert dataset["id"][8] == single["id"][0]


def test_a_suffix_may_be_written_in_capitals(write, tmp_path):
    write([{"prompt": "p", "solution": "1"}]).rename(tmp_path / "sums.JSONL")
    assert golds(tmp_path / "sums.JSONL") == ["1"]
    assert load_math_dataset(tmp_path / "sums.JSONL")["solution"] == ["1"]

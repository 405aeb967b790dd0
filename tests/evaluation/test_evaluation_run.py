# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""One evaluation: what it refuses, asks and sums up."""

import json
from datetime import UTC, datetime

import pytest
from datasets import Dataset, DatasetDict
from evaluations import Deal, ask, asked, completions, here, reply, sums, sums_of

from trl_dapo.evaluation import compare, estimate_mean, evaluate


# ---- The summary ----


def means(summary):
    return {name: estimate["mean"] for name, estimate in summary["metrics"].items()}


def test_the_summary_by_hand(serve, tmp_path):
    long = (200, reply("Answer: 2", False, num_tokens=97, finish_reason="length"))
    script = Deal(
        first=["Answer: 2", long, "Answer: 3", "no idea"],
        second=["Answer: 4", "Answer: 4", "Answer: 3", "Answer: 5"],
        third=["Answer: 4", "Answer: 4", "Answer: $4$", "Answer: 3"],
    )
    summary = ask(serve(script), sums(3, source=["easy", "easy", "hard"]), tmp_path)
    # Pairs without a correct one of the 6: {3, 4} of the first, 3 of the second, none of the third; 4 outvotes 3, 5.
    expected = {"avg@4": (2 / 4 + 1 / 4 + 3 / 4) / 3, "pass@2": (5 / 6 + 3 / 6 + 6 / 6) / 3, "pass@4": 1.0}
    assert means(summary) == pytest.approx({**expected, "maj@4": (1 + 0 + 1) / 3})
    assert summary["metrics"]["avg@4"] == estimate_mean([0.5, 0.25, 0.75])._asdict()
    assert summary["num_problems"] == 3
    assert summary["mean_length"] == (97 + 11 * 7) / 12
    assert summary["truncated"] == 1 / 12
    easy = summary["sources"]["easy"]
    assert (easy["num_problems"], easy["metrics"]["avg@4"]["mean"], easy["truncated"]) == (2, 3 / 8, 1 / 8)
    # one problem, solved, says next to nothing
    assert summary["sources"]["hard"]["metrics"]["maj@4"] == pytest.approx({"mean": 1, "low": 0, "high": 1}, abs=1e-3)
    second = {"id": "id2", "source": "easy", "num_correct": 1, "num_completions": 4, "maj": 0.0}
    assert summary["problems"][1] == second
    written = json.loads((tmp_path / "summary.json").read_text())
    assert datetime.fromisoformat(written.pop("finished")) <= datetime.now(UTC)
    assert written == summary


def test_an_evaluation_with_few_answers_warns_and_says_what_to_do(serve, tmp_path, caplog):
    server = serve(Deal(first=["Answer: 2", "It is 2.", "two"], second=["Answer: 3", "Answer: 5", "two"]))
    ask(server, sums(2), tmp_path / "half", k=3)
    assert caplog.messages == []
    ask(serve(lambda body: "It is 2."), sums(2), tmp_path / "none", k=3)
    (said,) = caplog.messages
    assert said.startswith(
        "No answer was found in 6 of 6 completions. The first of them ends with 'It is 2.'. The scorer 'dapo_math' "
    )
    caplog.clear()
    long = (200, reply("Hm", False, finish_reason="length"))
    ask(serve(lambda body: long), sums(2), tmp_path / "long", k=3, scorer=lambda text, gold: (False, None))
    (said,) = caplog.messages
    assert said == (
        "No answer was found in 6 of 6 completions. The first of them ends with 'Hm'. 6 of those without an "
        "answer were cut off. Raise `max_completion_length`."
    )


def test_every_completion_is_a_row_of_the_parquet_file(serve, tmp_path):
    ask(serve(lambda body: f"{asked(body)[0]}: Answer: 3"), sums(2), tmp_path, k=2)
    of_both = [(name, i, name == "id2") for name in ("id1", "id2") for i in (0, 1)]
    assert [(row["id"], row["index"], row["correct"]) for row in completions(tmp_path)] == of_both
    told = {"prompt": "1+2", "solution": "3", "completion": "1+2: Answer: 3", "answer": "3", "length": 7}
    assert completions(tmp_path)[2].items() >= {**told, "truncated": False}.items()


def test_equal_ids_of_two_sources_are_two_problems(serve, tmp_path):
    dataset = sums(2, id=["1", "1"], source=["easy", "hard"])
    base = ask(serve(Deal(**{"first": ["Answer: 2"] * 4, "second": ["Answer: 0"] * 4})), dataset, tmp_path / "base")
    assert base["metrics"]["avg@4"]["mean"] == 0.5
    assert [base["sources"][source]["metrics"]["avg@4"]["mean"] for source in ("easy", "hard")] == [1.0, 0.0]
    ask(serve(lambda body: "Answer: 3"), dataset, tmp_path / "trained")
    change = compare(tmp_path / "base", tmp_path / "trained")
    assert [(p["source"], p["difference"]) for p in change["gained"] + change["lost"]] == [("hard", 1), ("easy", -1)]


def test_rows_that_share_an_id_are_problems_of_their_own_and_equal_rows_are_one(serve, tmp_path):
    """Two datasets put together, each numbered from 0: by their ids alone 1+1 and 1+2 would be one problem."""
    rows = [*sums(2, id=["0", "0"]), *sums(2, id=["0", "0"]).select([0])]
    server = serve(Deal(first=["Answer: 2"] * 4, second=["Answer: 0"] * 2))
    summary = ask(server, Dataset.from_list(rows), tmp_path, k=2)
    # Each of them is always or never solved; the first is listed twice.
    assert means(summary) == {"avg@2": 0.5, "pass@2": 0.5, "maj@2": 0.5}
    assert [(p["id"][:2], p["num_correct"], p["num_completions"]) for p in summary["problems"]] == [
        ("0#", 4, 4),
        ("0#", 0, 2),
    ]
    assert len({problem["id"] for problem in summary["problems"]}) == 2


def test_one_prompt_with_two_golds_is_two_problems_with_completions_of_their_own(serve, tmp_path):
    dataset = sums_of([1, 1], solution=["2", "3"])
    server = serve(Deal(first=["Answer: 2"] * 4))
    summary = ask(server, dataset, tmp_path, k=2)
    assert [problem["num_correct"] for problem in summary["problems"]] == [2, 0]
    assert len(server.requests) == len({seed for _, seed in server.asked}) == 4


def test_equal_ids_of_two_sources_draw_other_random_numbers(serve, tmp_path):
    server = serve(lambda body: "Answer: 2")
    ask(server, sums_of([1, 1], id=["0", "0"], source=[0, 1]), tmp_path, k=2)
    assert len({seed for _, seed in server.asked}) == 4
    assert [*json.loads((tmp_path / "summary.json").read_text())["sources"]] == ["0", "1"]


def test_limit_and_offset_count_problems_of_which_equal_rows_are_one(serve, tmp_path):
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"1+{i}", "label": str(1 + i)} for i in (1, 1, 2, 3, 2)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def is_label(completions, label, **kwargs):
        return [float(text == gold) for text, gold in zip(completions, label, strict=True)]

    server = serve(lambda body: "2")
    summary = ask(server, file, tmp_path / "first", k=2, limit=2, scorer=is_label)
    assert [problem["num_completions"] for problem in summary["problems"]] == [4, 4]
    summary = ask(server, file, tmp_path / "last", k=2, offset=2, scorer=is_label)
    assert [problem["num_completions"] for problem in summary["problems"]] == [2]


def test_the_order_of_the_rows_does_not_say_which_of_two_problems_of_one_prompt_is_meant(serve, tmp_path):
    def is_gold(completions, solution, **kwargs):
        return [float(text == gold) for text, gold in zip(completions, solution, strict=True)]

    rows = [{"prompt": "1+1", "solution": "2"}, {"prompt": "1+1", "solution": "3"}]
    for name, listed in (("base", rows), ("trained", rows[::-1])):
        ask(serve(lambda body: "2"), Dataset.from_list(listed), tmp_path / name, k=2, scorer=is_gold)
    change = compare(tmp_path / "base", tmp_path / "trained")
    assert change["gained"] == change["lost"] == []


def test_the_next_problems_of_a_file_join_those_that_are_there(serve, tmp_path, problems_file):
    server = serve(lambda body: "Answer: 2")
    ask(server, problems_file, tmp_path / "out", k=1, limit=1)
    ask(server, problems_file, tmp_path / "out", k=1, limit=1, offset=1)
    assert len(server.requests) == 2
    ask(server, f"{problems_file.parent}/./{problems_file.name}", tmp_path / "out", k=1, limit=2)  # the same file
    assert len(server.requests) == 2


@pytest.mark.parametrize(("setting", "value"), [("split", "test"), ("name", "main")])
def test_a_split_or_a_configuration_of_a_file_is_refused(tmp_path, problems_file, setting, value):
    with pytest.raises(ValueError, match=rf"`{setting}='{value}'` has no effect: `.*` is a file, which has neither"):
        here("model", problems_file, tmp_path / "out", **{setting: value})


@pytest.mark.parametrize("dataset", [[{"prompt": "1+1"}], DatasetDict(test=sums(1))], ids=["list", "splits"])
def test_the_error_for_a_value_that_is_not_a_dataset_says_what_to_use(tmp_path, serve, dataset):
    with pytest.raises(ValueError, match=r"`dataset` is a `\w+`. Use a file, the id of a dataset on the Hub, or a"):
        ask(serve(lambda body: "2"), dataset, tmp_path)


def test_math_verify_scores_and_leaves_out_what_it_cannot_read(serve, tmp_path):
    dataset = Dataset.from_dict({"prompt": ["half", "what"], "solution": ["0.5", "?!"]})
    summary = ask(serve(lambda body: "\\boxed{\\frac{2}{4}}"), dataset, tmp_path, scorer="math_verify", k=2)
    assert summary["metrics"]["avg@2"]["mean"] == 1.0
    assert (summary["num_problems"], summary["num_unscored_problems"]) == (1, 1)
    assert [row["correct"] for row in completions(tmp_path)] == [True, True, None, None]


def test_a_scorer_is_any_function_of_completion_and_gold_answer(serve, tmp_path):
    summary = ask(serve(lambda body: "4"), sums(3), tmp_path, scorer=lambda text, gold: (text == gold, text))
    assert [problem["num_correct"] for problem in summary["problems"]] == [0, 0, 4]


# ---- Settings ----


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"k": 0}, "`k` must be a whole number of at least 1, got 0"),
        ({"temperature": -1.0}, "`temperature` must be at least 0 and finite, got -1.0. 0 means greedy"),
        ({"temperature": 0.0}, "With `temperature=0` all 32 completions of a problem would be the same. Set `k=1`"),
        ({"top_p": 0.0}, "`top_p` must be above 0 and at most 1, got 0.0"),
        ({"top_k": -1}, "`top_k` must be a whole number of at least 0, got -1. 0 means all tokens"),
        ({"request_timeout": 0}, "`request_timeout` must be above 0 and finite, got 0"),
        (
            {"scorer": "exact"},
            "`scorer` names 'exact', which is unknown. Use one of dapo_math, math_verify, ",
        ),
        (
            {"prompt_style": "boxed"},
            "asks for .boxed{}, but the scorer 'dapo_math' reads only the last `Answer:` line",
        ),
        ({"engine": "sglang"}, "`engine` must be one of 'transformers', 'vllm', got 'sglang'"),
        ({"engine": "vllm", "base_url": "http://x"}, "`engine='vllm'` contradicts `base_url`"),
        ({"base_url": "localhost:8000"}, "`base_url` must start with http:// or https://, got 'localhost:8000'"),
        ({"base_url": "http://me:pw@x", "engine": "vllm"}, r"contradicts `base_url` \(http://x\)"),
        ({"base_url": "http://x", "processing_class": object()}, "with the engine 'transformers'"),
        ({"model": object()}, "A loaded model needs its tokenizer. Pass it as `processing_class`"),
        ({"limit": 3}, "{'limit': 3} applies only to a file or a dataset on the Hub"),
        ({"accuracy_threshold": 0.5, "scorer": lambda text, gold: (True, text)}, "`accuracy_threshold=0.5` is for re"),
        ({"chat_template_kwargs": {"a": 1}}, r"`chat_template_kwargs=.'a': 1.` has no effect: the prompts are text"),
        ({"chat_template_kwargs": "[1]"}, r"`chat_template_kwargs` must be a mapping, got '\[1\]'"),
        ({"min_p": 1.5}, "`min_p` must be at least 0 and at most 1, got 1.5. 0 means the value in the model's"),
    ],
)
def test_the_error_for_a_setting_that_is_not_allowed_has_its_value(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        evaluate(**{"model": "tiny", "dataset": sums(1), "output_dir": tmp_path / "eval", **settings})
    assert not (tmp_path / "eval").exists()


def test_an_empty_folder_is_refused_as_a_model(tmp_path):
    (tmp_path / "model").mkdir()
    with pytest.raises(ValueError, match=r"model` is an empty folder\. Name the folder of a model, which contains"):
        evaluate(str(tmp_path / "model"), sums(1), tmp_path / "out")


def test_the_folder_of_a_run_without_a_model_is_refused_with_its_last_checkpoint(tmp_path):
    for step in (8, 40):
        (tmp_path / "run" / f"checkpoint-{step}").mkdir(parents=True)
    last = tmp_path / "run" / "checkpoint-40"
    with pytest.raises(ValueError, match="only checkpoints") as error:
        here(tmp_path / "run", sums(1), tmp_path / "out")
    assert str(error.value) == (
        f"`{tmp_path / 'run'}` contains no model, only checkpoints. Evaluate `{last}`, or save the trained model in "
        "the folder with `trainer.save_model()`."
    )
    assert not (tmp_path / "out").exists()


def test_a_model_that_is_not_found_draws_no_bar_before_its_line(tmp_path, capfd):
    with pytest.raises(OSError, match=r"^`modle/trained` is not a folder"):
        evaluate("modle/trained", sums(2), tmp_path, k=1)
    assert "completion" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("scorer", "style"), [("dapo_math", "Answer:"), ("math_verify", "boxed"), (lambda text, gold: (True, text), None)]
)
def test_the_scorer_decides_the_prompt_style_unless_completions_are_stored(
    serve, tmp_path, problems_file, scorer, style
):
    server = serve(lambda body: "Answer: 2")
    ask(server, problems_file, tmp_path / "run", scorer=scorer)
    (asked,) = {body["messages"][-1]["content"] for _, _, body in server.requests if "1+1" in str(body)}
    assert style in asked if style else asked == "1+1"
    ask(server, problems_file, tmp_path / "run", scorer="last_number")
    assert len(server.requests) == 2 * 4


def test_problems_with_images_are_refused(tmp_path):
    rows = {"prompt": ["Find x."], "solution": ["1"], "images": [["a.png"]]}
    with pytest.raises(ValueError, match="has the column images, but the model would not see"):
        evaluate("a-model", Dataset.from_dict(rows), tmp_path / "out", scorer="math_verify")

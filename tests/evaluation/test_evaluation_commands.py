# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""`trl-dapo eval` and `compare`: what they take, find, problem by problem, and print."""

import argparse
import json
from io import StringIO

import pytest
from evaluations import Deal, ask, sums, sums_of
from rich.console import Console

from trl_dapo.cli import entry_point as cli
from trl_dapo.evaluation import commands, compare, estimate_mean


pytestmark = pytest.mark.fast


def run_eval(*argv):
    return cli.main(["eval", *map(str, argv)])


def run_compare(*argv):
    return cli.main(["compare", *map(str, argv)])


def test_both_commands_print_their_figures(serve, tmp_path, problems_file, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for name, right in (("base", 2), ("trained", 3)):
        server = serve(lambda body, right=right: f"Answer: {right}" if "1+2" in str(body) else "Answer: 2")
        options = ["--model", name, "--dataset", problems_file, "--output-dir", tmp_path / name, "--k", 2]
        assert run_eval(*options, "--base_url", server.url, "--max-completion-length", 9) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.replace(str(tmp_path), "").splitlines())) <= 80
    figures, intervals = [line.split() for line in printed.splitlines() if "%" in line or "[" in line][-2:]
    assert figures[:5] == ["all", "2", "100.0%", "100.0%", "100.0%"]
    # both of two, by the likelihood ratio: 2 * 2 * log(1 / 0.0245) is Student's t squared, 3.85^2
    assert intervals == ["[2.5,", "100.0]"] * 3
    assert server.requests[0][2]["max_tokens"] == 9
    assert run_compare(tmp_path / "base", tmp_path / "trained" / "summary.json") == 0
    printed = capsys.readouterr().out
    assert max(len(line) for line in printed.splitlines() if str(tmp_path) not in line) <= 80
    assert "+50.0 [" in printed
    assert "all equal" not in printed
    assert "1 problems better: +50.0 points of avg@2." in printed
    assert "With fewer than 30 problems an interval is only approximate" in printed
    assert "0 problems worse: +0.0 points" in printed
    assert run_compare(tmp_path / "base", tmp_path / "trained", "--json") == 0
    assert json.loads(capsys.readouterr().out) == compare(tmp_path / "base", tmp_path / "trained")


def test_equal_evaluations_are_reported_as_equal_so_far(serve, tmp_path, problems_file, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    server = serve(lambda body: "Answer: 2")
    for name in ("base", "trained"):
        ask(server, problems_file, tmp_path / name, k=2)
    assert run_compare(tmp_path / "base", tmp_path / "trained") == 0
    printed = capsys.readouterr().out
    assert max(len(line) for line in printed.splitlines() if str(tmp_path) not in line) <= 80
    assert "+0.0 [+0.0, +0.0]" not in printed
    assert "unclear" not in printed
    assert printed.count("all equal") == 3 + 1
    assert "all equal: no evaluated problem differs" in printed


def test_a_long_source_is_broken_and_a_number_never_and_up_to_half_a_point_more_is_unclear():
    difference = {"mean": -0.01, "low": -0.02, "high": 0.005}
    values = {"base": 0.5, "trained": 0.49, "num_differing": 1, "difference": difference}
    figures = {"metrics": dict.fromkeys(("avg@2", "pass@2", "maj@2"), values)}
    named = {"base": "a", "trained": "b", "differing_settings": {}, "gained": [], "lost": []}
    sources = {"competition" * 9: figures, "other": figures}
    console = Console(file=StringIO(), width=80)
    commands.print_comparison(figures | named | {"k": 2, "num_problems": 40, "sources": sources}, console)
    printed = console.file.getvalue()
    assert printed.count("-1.0 [-2.0, +0.5]") == printed.count("unclear") == 3 * 3
    assert max(map(len, printed.splitlines())) <= 80
    assert "\nother " in printed


def test_a_difference_between_two_tenths_is_always_rounded_in_the_same_way():
    # 20 of 80 problems gain 0.35: 8.75 points, which the sum of shares misses by its last bits.
    gained = [{"id": str(i), "source": "a", "base": 0.0, "trained": 0.35, "difference": 0.35} for i in range(20)]
    difference = {"mean": 0.0875, "low": 0.05, "high": -0.00001}
    values = {"base": 0.0, "trained": 0.0875, "num_differing": 20, "difference": difference}
    metrics = dict.fromkeys(["avg@4", "pass@4"], values)  # nothing states answers: there is no maj@4
    change = {"base": "a", "trained": "b", "k": 4, "differing_settings": {}, "num_problems": 80, "sources": {}}
    console = Console(file=StringIO(), width=200)
    commands.print_comparison({**change, "metrics": metrics, "gained": gained, "lost": []}, console)
    said = console.file.getvalue()
    assert "+8.8 [+5.0, +0.0]" in said
    assert "20 problems better: +8.8 points of avg@4." in said


def test_without_stated_answers_there_is_no_maj_at_k_in_the_table_nor_in_a_comparison(serve, tmp_path, capsys):
    def is_two(completions, **kwargs):
        return [float(text == "2") for text in completions]

    for name in ("base", "trained"):
        summary = ask(serve(lambda body: "2"), sums(2), tmp_path / name, k=2, scorer=is_two)
        assert [*summary["metrics"]] == ["avg@2", "pass@2"]
    assert cli.main(["compare", str(tmp_path / "base"), str(tmp_path / "trained")]) == 0
    assert "maj@2" not in capsys.readouterr().out
    assert "maj@2" not in compare(tmp_path / "base", tmp_path / "trained")["metrics"]


def test_a_server_names_its_model_as_it_likes(serve, tmp_path, problems_file):
    server = serve(lambda body: "Answer: 2")
    options = ["--dataset", str(problems_file), "--output_dir", str(tmp_path / "out"), "--k", "1"]
    assert cli.main(["eval", "--model", "/only/there/model:v1", "--base_url", server.url, *options]) == 0
    assert server.requests[0][2]["model"] == "/only/there/model:v1"


def test_a_mistake_is_one_line_and_status_2(tmp_path, capsys):
    options = ["--model", "m", "--dataset", "nowhere.jsonl", "--output_dir", tmp_path]
    assert run_eval(*options) == 2
    assert capsys.readouterr().err.startswith("trl-dapo eval: There is no `")
    assert run_compare(tmp_path, tmp_path) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert run_eval("--model", "http://planted:pa55word@gpu-7/m", *options[2:]) == 2
    assert "`http://gpu-7/m`" in capsys.readouterr().err


def test_the_defaults_on_the_command_line_are_the_papers():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    commands.add_eval_arguments(parser)
    given = vars(parser.parse_args(["--model", "m", "--dataset", "d", "--output_dir", "o"]))
    assert given.items() >= {"k": 32, "temperature": 1.0, "top_p": 0.7, "max_completion_length": 20480}.items()
    help_text = parser.format_help()
    assert "(default: None)" not in help_text
    assert "processing_class" not in help_text
    assert "(default: 0.7)" in help_text


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
    change = compare(base, evaluated(serve, tmp_path / "trained", *texts(3, 4, 3), temperature=0.6) / "summary.json")
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
    assert (change["k"], change["num_problems"]) == (4, 3)
    assert change["differing_settings"] == {"temperature": [1.0, 0.6]}


@pytest.mark.parametrize("has_other_style", [False, True])
def test_a_comparison_says_in_words_that_problems_with_the_same_ids_differ(has_other_style):
    difference = {"mean": 0.0, "low": -0.1, "high": 0.1}
    values = {"base": 0.5, "trained": 0.5, "num_differing": 1, "difference": difference}
    differing = {"problems": ["c1a3", "4038"]} | ({"prompt_style": ["answer_line", None]} if has_other_style else {})
    change = {"base": "a", "trained": "b", "k": 2, "differing_settings": differing, "num_problems": 40, "sources": {}}
    console = Console(file=StringIO(), width=200)
    commands.print_comparison(change | {"metrics": {"avg@2": values}, "gained": [], "lost": []}, console)
    said = console.file.getvalue()
    assert "c1a3" not in said
    assert ("problems with the same id have another prompt" in said) is not has_other_style
    assert ("prompt_style is 'answer_line' for base, None for trained" in said) is has_other_style


def test_problems_are_paired_by_id_not_by_position(serve, tmp_path):
    base = evaluated(serve, tmp_path / "base", *texts(0, 1, 4))
    change = compare(base, evaluated(serve, tmp_path / "trained", *texts(0, 1, 4), order=[2, 0, 1]))
    assert change["metrics"]["avg@4"]["difference"]["mean"] == change["metrics"]["avg@4"]["num_differing"] == 0
    assert change["gained"] == change["lost"] == []


@pytest.mark.parametrize(
    ("numbers", "k", "message"),
    [
        ([1, 2, 4, 5], 2, r"1 only in `.*base` \(ids id3\) and 2 only in `.*trained` \(ids id4, id5\)"),
        ([1, 2, 3], 4, r"has 2 completions per problem, but .* has 4"),
    ],
)
def test_evaluations_of_other_problems_or_another_k_are_not_compared(serve, tmp_path, numbers, k, message):
    server = serve(lambda body: "Answer: 2")
    ask(server, sums(3), tmp_path / "base", k=2)
    ask(server, sums_of(numbers), tmp_path / "trained", k=k)
    with pytest.raises(ValueError, match=message):
        compare(tmp_path / "base", tmp_path / "trained")


def test_the_error_for_a_file_that_is_not_a_summary_names_it(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no `.*summary.json`. Name the `output_dir` of an eval"):
        compare(tmp_path, tmp_path)
    (tmp_path / "completions.jsonl").touch()
    with pytest.raises(FileNotFoundError, match=r"no `.*summary.json`. The evaluation has not ended"):
        compare(tmp_path, tmp_path)
    with pytest.raises(FileNotFoundError, match=r"There is no `.*nothing.json`. Name the `output_dir` of an eval"):
        compare(tmp_path / "nothing.json", tmp_path)
    (tmp_path / "completions.jsonl").write_text("{}\n{}\n")
    with pytest.raises(ValueError, match=r"completions.jsonl` has the completions of an evaluation, not its summary"):
        compare(tmp_path / "completions.jsonl", tmp_path)
    not_json = "is not JSON: .* If it is a damaged summary, run the command of this evaluation again, .* Otherwise: Na"
    not_a_summary = r"is not the summary of an evaluation\. Name the `output_dir` of an evaluation, which"
    unreadable = ("{", not_json), ("[" * 100_000, not_json), ("[]", not_a_summary)
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
def test_the_error_for_an_incomplete_summary_names_it(tmp_path, changed):
    summary = {"settings": {"k": 2, "model": "m"}, "scorer": "paper", "problems": [PROBLEM]}
    whole, other = tmp_path / "whole.json", tmp_path / "other.json"
    whole.write_text(json.dumps(summary))
    other.write_text(json.dumps({**summary, **changed}))
    assert compare(whole, whole)["num_problems"] == 1
    with pytest.raises(ValueError, match=r"`.*other.json` is not the summary of an evaluation"):
        compare(whole, other)

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""`trl-dapo eval` and `compare`: what they take, and print."""

import argparse
import json

from evaluations import ask

from trl_dapo.cli import commands as cli
from trl_dapo.evaluation import commands, compare


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
    assert "1 problems gained: +50.0 points of avg@2." in printed
    assert "Of fewer than 30 problems an interval is a hint" in printed
    assert "0 problems lost: +0.0 points" in printed
    assert run_compare(tmp_path / "base", tmp_path / "trained", "--json") == 0
    assert json.loads(capsys.readouterr().out) == compare(tmp_path / "base", tmp_path / "trained")


def test_models_that_do_not_differ_are_said_to_be_equal_so_far(serve, tmp_path, problems_file, capsys, monkeypatch):
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
    assert "all equal: no problem differs" in printed


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

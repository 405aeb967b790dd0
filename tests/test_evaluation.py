# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
import argparse
import itertools
import json
import math
import os
import re
import subprocess
import sys
import threading
import types
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset
from servers import asked, reply
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_dapo import evaluation
from trl_dapo.evaluation import (
    avg_at_k,
    compare,
    engines,
    estimate_mean,
    estimate_share,
    evaluate,
    maj_at_k,
    pass_at_k,
)
from trl_dapo.evaluation.journal import Completion, Journal
from trl_dapo.quickstart import Problems, build_model, build_tokenizer, exact_answer, warm_up


# ---- Statistics ----


def verdicts(num_correct, k):
    return [[True] * num_correct + [False] * (k - num_correct)]


def test_avg_at_k_is_the_share_of_correct_completions_of_each_problem():
    assert avg_at_k([[True, False, False, False], [True, True, True, False]]).tolist() == [0.25, 0.75]


@pytest.mark.parametrize(("num_correct", "k"), list(itertools.product(range(7), range(1, 7))))
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_completion(num_correct, k):
    subsets = list(itertools.combinations(verdicts(num_correct, 6)[0], k))
    (probability,) = pass_at_k(verdicts(num_correct, 6), k)
    assert probability == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


def test_pass_at_k_by_hand():
    # 5 completions, 2 correct, 3 tries: one way in C(5, 3) = 10 to draw the three wrong ones
    assert pass_at_k(verdicts(2, 5), 3).tolist() == pytest.approx([0.9])


def test_pass_at_k_holds_where_binomials_have_hundreds_of_digits():
    exact = 1 - math.comb(1997, 500) / math.comb(2000, 500)
    assert pass_at_k(verdicts(3, 2000), 500)[0] == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("k", [0, 5])
def test_pass_at_k_needs_k_completions(k):
    with pytest.raises(ValueError, match=f"pass@{k} needs k from 1 to the 4"):
        pass_at_k(verdicts(1, 4), k)


def majority(answers, right):
    return maj_at_k([answers], [[answer == right for answer in answers]])[0]


def test_the_most_frequent_answer_decides():
    assert majority(["3", "7", "7"], "7") == 1.0
    assert majority(["3", "3", "7"], "7") == 0.0


def test_tied_answers_share_the_verdict_in_any_order():
    for answers in set(itertools.permutations(["7", "7", "3", "3", "5"])):
        assert majority(answers, "7") == 1 / 2
    assert majority(["1", "2", "3"], "3") == pytest.approx(1 / 3)


def test_completions_without_an_answer_have_no_vote():
    assert majority([None, None, None, "7"], "7") == 1.0
    assert maj_at_k([[None, None]], [[False, False]]).tolist() == [0.0]


def test_an_answer_with_several_verdicts_counts_its_share():
    assert maj_at_k([["x", "x", "x", "x"]], [[True, True, True, False]]).tolist() == [0.75]


def test_an_interval_of_differences_has_no_width_where_all_problems_agree():
    assert estimate_mean([0.25] * 30) == (0.25, 0.25, 0.25)


def test_none_or_all_of_thirty_solved_is_no_certainty():
    # Wilson with z = 1.95996: the bound at 0 of n is z^2 / (n + z^2) = 3.8415 / 33.8415
    assert estimate_share([0.0] * 30) == pytest.approx((0.0, 0.0, 0.11351), abs=1e-5)
    assert estimate_share([1.0] * 30) == pytest.approx((1.0, 1 - 0.11351, 1.0), abs=1e-5)
    # the more problems, the surer
    assert estimate_share([0.0] * 1000).high == pytest.approx(3.8415 / 1003.8415, abs=1e-6)


def test_equal_shares_between_have_wilsons_interval():
    # the bounds are the roots of (0.25 - p)^2 = z^2 p (1 - p) / 30
    mean, low, high = estimate_share([0.25] * 30)
    assert mean == 0.25
    for bound in (low, high):
        assert (0.25 - bound) ** 2 == pytest.approx(1.959964**2 * bound * (1 - bound) / 30, rel=1e-5)
    assert low < 0.25 < high


def test_shares_that_differ_have_the_bootstraps_interval():
    assert estimate_share([0.0] * 29 + [1.0]) == estimate_mean([0.0] * 29 + [1.0])


def test_a_difference_is_no_share():
    with pytest.raises(ValueError, match="between 0 and 1"):
        estimate_share([0.5, -0.5])


def test_an_interval_is_that_of_resampled_problems():
    values = np.random.default_rng(1).choice([0.0, 0.25, 0.5, 1.0], size=40)
    resampled = values[np.random.default_rng(2).integers(0, 40, size=(20_000, 40))].mean(axis=1)
    estimate = estimate_mean(values)
    assert estimate.mean == pytest.approx(values.mean())
    assert [estimate.low, estimate.high] == pytest.approx(np.quantile(resampled, [0.025, 0.975]).tolist(), abs=0.01)


def test_an_interval_of_a_hundred_coin_flips_is_ten_points_to_each_side():
    # standard error 0.5 / sqrt(100) = 0.05, times 1.96
    mean, low, high = estimate_mean([0.0, 1.0] * 50)
    assert (mean, low, high) == pytest.approx((0.5, 0.402, 0.598), abs=0.01)


def test_the_same_seed_gives_the_same_interval():
    values = np.linspace(0, 1, 50)
    assert estimate_mean(values, seed=3) == estimate_mean(values, seed=3)
    assert estimate_mean(values, seed=3) != estimate_mean(values, seed=4)


def sums(num, **columns):
    """Problems `1+1`, `1+2`, ... as plain text, with their answers and short ids."""
    return sums_of(range(1, num + 1), **columns)


def sums_of(numbers, **columns):
    return Dataset.from_dict(
        {
            "prompt": [f"1+{i}" for i in numbers],
            "solution": [str(1 + i) for i in numbers],
            "id": [f"id{i}" for i in numbers],
            **columns,
        }
    )


def ask(server, dataset, output_dir, **settings):
    settings = {"k": 4, "concurrency": 4, "progress": False, **settings}
    return evaluate("tiny", dataset, output_dir, base_url=server.url, **settings)


class Deal:
    """Script that deals each prompt's completions from a list, whatever the order of the requests."""

    def __init__(self, **texts):
        self.left = {prompt: list(texts[name]) for prompt, name in zip(("1+1", "1+2", "1+3"), texts, strict=False)}
        self.lock = threading.Lock()

    def __call__(self, body):
        with self.lock:
            return self.left[asked(body)[0]].pop()


# ---- The summary ----


def test_the_summary_by_hand(serve, tmp_path):
    long = (200, reply("Answer: 2", False, num_tokens=97, finish_reason="length"))
    script = Deal(
        first=["Answer: 2", long, "Answer: 3", "no idea"],
        second=["Answer: 4", "Answer: 4", "Answer: 3", "Answer: 5"],
        third=["Answer: 4", "Answer: 4", "Answer: $4$", "Answer: 3"],
    )
    summary = ask(serve(script), sums(3, source=["easy", "easy", "hard"]), tmp_path)
    metrics = {name: estimate["mean"] for name, estimate in summary["metrics"].items()}
    assert metrics == pytest.approx(
        {
            "avg@4": (2 / 4 + 1 / 4 + 3 / 4) / 3,
            # pairs without a correct one of the 6: {3, 4} of the first, 3 of the second, none of the third
            "pass@2": (5 / 6 + 3 / 6 + 6 / 6) / 3,
            "pass@4": 1.0,
            "maj@4": (1 + 0 + 1) / 3,  # 4 outvotes 3 and 5
        }
    )
    assert summary["metrics"]["avg@4"] == estimate_mean([0.5, 0.25, 0.75])._asdict()
    assert summary["num_problems"] == 3
    assert summary["mean_length"] == (97 + 11 * 7) / 12
    assert summary["truncated"] == 1 / 12
    easy = summary["sources"]["easy"]
    assert (easy["num_problems"], easy["metrics"]["avg@4"]["mean"], easy["truncated"]) == (2, 3 / 8, 1 / 8)
    # one problem, solved: Wilson's lower bound 1 / (1 + z^2)
    assert summary["sources"]["hard"]["metrics"]["maj@4"] == pytest.approx({"mean": 1, "low": 1 / 4.84146, "high": 1})
    assert summary["problems"][1] == {
        "id": "id2",
        "source": "easy",
        "num_correct": 1,
        "num_completions": 4,
        "maj": 0.0,
    }
    assert json.loads((tmp_path / "summary.json").read_text()) == summary


def test_every_completion_is_a_row_of_the_parquet_file(serve, tmp_path):
    ask(serve(lambda body: f"{asked(body)[0]}: Answer: 3"), sums(2), tmp_path, k=2)
    rows = pq.read_table(tmp_path / "completions.parquet").to_pylist()
    assert [(row["id"], row["index"], row["correct"]) for row in rows] == [
        ("id1", 0, False),
        ("id1", 1, False),
        ("id2", 0, True),
        ("id2", 1, True),
    ]
    assert rows[2]["completion"] == "1+2: Answer: 3"
    assert (rows[2]["prompt"], rows[2]["solution"], rows[2]["answer"], rows[2]["length"]) == ("1+2", "3", "3", 7)
    assert rows[2]["truncated"] is False


def test_repeats_of_a_problem_are_pooled(serve, tmp_path):
    # 1+1 is listed twice: of its 8 completions 2 are right; of 1+2's 4 all are.
    script = Deal(first=["Answer: 2"] * 2 + ["Answer: 0"] * 6, second=["Answer: 3"] * 4)
    server = serve(script)
    summary = ask(server, sums_of([1, 2, 1]), tmp_path)
    assert len(set(server.asked)) == 12
    metrics = {name: estimate["mean"] for name, estimate in summary["metrics"].items()}
    # of the 70 ways to draw 4 of 8 completions, C(6, 4) = 15 find no right one; of the 28 pairs, 15
    expected = {"avg@4": (2 / 8 + 1) / 2, "pass@2": (13 / 28 + 1) / 2, "pass@4": (55 / 70 + 1) / 2, "maj@4": 1 / 2}
    assert metrics == pytest.approx(expected)
    assert [(p["id"], p["num_correct"], p["num_completions"]) for p in summary["problems"]] == [
        ("id1", 2, 8),
        ("id2", 4, 4),
    ]
    assert pq.read_table(tmp_path / "completions.parquet").num_rows == 12


def test_equal_ids_of_two_sources_are_two_problems(serve, tmp_path):
    dataset = sums(2, id=["1", "1"], source=["easy", "hard"])
    texts = {"first": ["Answer: 2"] * 4, "second": ["Answer: 0"] * 4}
    base = ask(serve(Deal(**texts)), dataset, tmp_path / "base")
    assert base["metrics"]["avg@4"]["mean"] == 0.5
    assert [base["sources"][source]["metrics"]["avg@4"]["mean"] for source in ("easy", "hard")] == [1.0, 0.0]
    ask(serve(lambda body: "Answer: 3"), dataset, tmp_path / "trained")
    change = compare(tmp_path / "base", tmp_path / "trained")
    assert [(p["source"], p["difference"]) for p in change["gained"] + change["lost"]] == [("hard", 1), ("easy", -1)]


def test_equal_ids_of_two_sources_are_asked_in_this_process_each_by_its_prompt(tiny_model, tmp_path):
    tokenizer, prompts = AutoTokenizer.from_pretrained(tiny_model), []
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    echo = Echo(model, lambda ids: prompts.append(tokenizer.decode(ids)) or [tokenizer.eos_token_id])
    here(echo, sums(2, id=["1", "1"], source=["a", "b"]), tmp_path, k=1, processing_class=tokenizer)
    assert prompts == ["1+1", "1+2"]


def test_zero_is_an_id_and_nothing_is_none(serve, tmp_path):
    summary = ask(serve(lambda body: "Answer: 2"), sums(2, id=[0, None]), tmp_path, k=1)
    first, second = summary["problems"]
    assert first["id"] == "0"
    assert len(second["id"]) == 16


def test_math_verify_scores_and_leaves_out_what_it_cannot_read(serve, tmp_path):
    dataset = Dataset.from_dict({"prompt": ["half", "what"], "solution": ["0.5", "?!"]})
    summary = ask(serve(lambda body: "\\boxed{\\frac{2}{4}}"), dataset, tmp_path, scorer="math_verify", k=2)
    assert summary["metrics"]["avg@2"]["mean"] == 1.0
    assert (summary["num_problems"], summary["num_unscored_problems"]) == (1, 1)
    assert [row["correct"] for row in pq.read_table(tmp_path / "completions.parquet").to_pylist()] == [
        *[True, True],
        *[None, None],
    ]


def test_a_scorer_is_any_function_of_completion_and_gold_answer(serve, tmp_path):
    summary = ask(serve(lambda body: "4"), sums(3), tmp_path, scorer=lambda text, gold: (text == gold, text))
    assert [problem["num_correct"] for problem in summary["problems"]] == [0, 0, 4]


def test_another_scorer_asks_for_nothing_again(serve, tmp_path):
    server = serve(lambda body: "Answer: 2")
    assert ask(server, sums(1), tmp_path)["metrics"]["avg@4"]["mean"] == 1.0
    never = ask(server, sums(1), tmp_path, scorer=lambda text, gold: (False, None))
    assert never["metrics"]["avg@4"]["mean"] == 0.0
    assert len(server.requests) == 4


@pytest.mark.skipif("TRL_DAPO_DATA" not in os.environ, reason="TRL_DAPO_DATA names no folder with the real data")
def test_aime_is_thirty_problems_of_thirty_two_completions_by_default(serve, tmp_path):
    server = serve(lambda body: f"Answer: {body['seed'] % 1000}")
    summary = evaluate("tiny", "aime-2024.parquet", tmp_path, base_url=server.url, concurrency=4, progress=False)
    assert summary["num_problems"] == 30
    assert len(server.requests) == len(set(server.asked)) == 960
    assert set(Counter(prompt for prompt, _ in server.asked).values()) == {32}
    assert {"avg@32", "pass@2", "pass@4", "pass@8", "pass@16", "pass@32", "maj@32"} == summary["metrics"].keys()
    protocols = {(body["temperature"], body["top_p"], body["max_tokens"]) for _, _, body in server.requests}
    assert protocols == {(1.0, 0.7, 20480)}


# ---- The server's requests ----


def test_plain_prompts_are_completed_and_conversations_continued(serve, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    server = serve(lambda body: "Answer: 2")
    ask(server, sums(1), tmp_path / "plain", k=1, top_k=5)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1"}]
    ask(server, Dataset.from_dict({"prompt": [messages], "solution": ["2"]}), tmp_path / "chat", k=1)
    (plain_path, headers, plain), (chat_path, _, chat) = server.requests
    assert (plain_path, plain["prompt"], plain["model"], plain["top_k"]) == ("/v1/completions", "1+1", "tiny", 5)
    assert (chat_path, chat["messages"]) == ("/v1/chat/completions", messages)
    assert "top_k" not in chat  # OpenAI's own servers refuse it
    assert headers["Authorization"] == "Bearer secret"


def test_every_completion_has_a_seed_of_its_own_that_stays(serve, tmp_path):
    server = serve(lambda body: "Answer: 2")
    ask(server, sums(3), tmp_path / "a")
    ask(server, sums(3), tmp_path / "b")
    ask(server, sums(3), tmp_path / "c", seed=1)
    first, second, other = (set(server.asked[i : i + 12]) for i in (0, 12, 24))
    assert len({seed for _, seed in first}) == 12
    assert first == second
    assert not first & other


@pytest.mark.parametrize(
    "failure",
    [
        (500, {"error": "overloaded"}),
        (429, {"error": "slow down"}),
        None,
        (200, b"<html>gateway</html>"),
        (200, {"choices": []}),
        (200, reply({"not": "text"}, False)),
    ],
    ids=["500", "429", "hangs up", "no json", "no choice", "no text"],
)
def test_a_request_that_fails_is_made_again(serve, tmp_path, failure):
    seen = set()

    def script(body):
        is_first = asked(body) not in seen
        seen.add(asked(body))
        return failure if is_first else "Answer: 2"

    server = serve(script)
    assert ask(server, sums(1), tmp_path)["metrics"]["avg@4"]["mean"] == 1.0
    assert Counter(Counter(server.asked).values()) == {2: 4}
    assert len((tmp_path / "completions.jsonl").read_text().splitlines()) == 1 + 4


def test_a_refusal_is_no_failure_to_retry(serve, tmp_path):
    server = serve(lambda body: (400, {"error": "maximum context length is 4096"}))
    with pytest.raises(ConnectionError, match=r"refuses .* 400 .*maximum context length is 4096") as error:
        ask(server, sums(1), tmp_path, concurrency=1)
    assert "0 of 4 completions are in" in str(error.value)
    assert len(server.requests) == 1


def test_a_refusal_ends_the_waiting_of_other_requests_and_keeps_what_they_bring(serve, tmp_path, monkeypatch):
    monkeypatch.setattr(engines, "_FIRST_DELAY", 1e6)
    all_are_under_way, is_refused = threading.Barrier(3), threading.Event()

    def script(body):
        all_are_under_way.wait()
        prompt = asked(body)[0]
        if prompt == "1+1":
            return 500, {"error": "its thread waits for its next try"}
        if prompt == "1+2":
            is_refused.set()
            return 400, {"error": "no"}
        is_refused.wait()
        return "Answer: 4"

    server = serve(script)
    with pytest.raises(ConnectionError, match=r"refuses a request with 400 .* 1 of 3 completions are in"):
        ask(server, sums(3), tmp_path, k=1)
    assert len(server.requests) == 3


def test_a_request_is_made_again_as_often_as_asked(serve, tmp_path):
    server = serve(lambda body: (500, {"error": "overloaded"}))
    with pytest.raises(ConnectionError, match=r"asked 3 times\): 500 .*overloaded"):
        ask(server, sums(1), tmp_path, concurrency=1, num_retries=2)
    assert len(server.requests) == 3


def test_the_delays_double_up_to_a_minute(serve, monkeypatch):
    monkeypatch.setattr(engines, "_FIRST_DELAY", 0.5)
    monkeypatch.setattr(engines._jitter, "uniform", lambda low, high: high)
    server = serve(lambda body: (503, {"error": "loading"}))
    sampling = engines.Sampling(1.0, 0.7, 0, 8)
    asking = engines._Server(server.url, "tiny", sampling, request_timeout=60, num_retries=9)
    delays = []
    asking.is_given_up = types.SimpleNamespace(wait=delays.append)
    with pytest.raises(ConnectionError, match="asked 10 times"):
        asking.ask(engines.Job("id", 0, "1+1", 0))
    assert delays == [0.5, 1, 2, 4, 8, 16, 32, 60, 60]


def test_a_server_that_goes_down_is_one_error_and_costs_nothing(serve, tmp_path):
    lock, num_answers = threading.Lock(), itertools.count()

    def script(body):
        with lock:
            return "Answer: 2" if next(num_answers) < 5 else None

    server = serve(script)
    with pytest.raises(ConnectionError) as error:
        ask(server, sums(4), tmp_path, num_retries=2)
    message = re.escape(f"{server.url} does not answer (asked 3 times): ")
    assert re.match(message, str(error.value))
    assert "5 of 16 completions are in" in str(error.value)
    assert not (tmp_path / "summary.json").exists()

    again = serve(lambda body: "Answer: 2")
    summary = ask(again, sums(4), tmp_path)
    assert len(again.requests) == len(set(again.asked)) == 11
    assert summary["problems"][0]["num_correct"] == 4


def test_a_server_that_is_not_there_is_one_error(serve, tmp_path):
    server = serve(lambda body: "")
    server.stop()
    with pytest.raises(ConnectionError, match=r"does not answer \(asked 2 times\): .*refused"):
        ask(server, sums(1), tmp_path, num_retries=1)


def test_hostile_completions_are_kept_and_scored(serve, tmp_path):
    hostile = [
        "\0 NUL \0\nAnswer: 2",
        "\ud800 lone surrogate \udfff\nAnswer: 2\ud800",
        "x" * 1_000_000 + "\nAnswer: 2",
        "\u2028line\u2029separators\r\x85\nAnswer: 2",
        '{"id": "id1", "index": 0}\n' * 3,
        "",
        "{" * 100_000,
        "\u202eright to left\nAnswer: 2",
    ]
    summary = ask(serve(Deal(only=hostile)), sums(1), tmp_path, k=8)
    assert summary["problems"][0]["num_correct"] == 4
    with open(tmp_path / "completions.jsonl", encoding="ascii") as file:
        kept = [json.loads(line)["text"] for line in file.read().split("\n")[1:-1]]
    assert sorted(kept) == sorted(hostile)
    rows = pq.read_table(tmp_path / "completions.parquet").to_pylist()
    assert sum(row["completion"].startswith("\0 NUL \0") for row in rows) == 1
    assert "? lone surrogate ?\nAnswer: 2?" in [row["completion"] for row in rows]


def test_a_message_without_content_is_an_empty_completion(serve, tmp_path):
    server = serve(lambda body: (200, reply(None)))
    summary = ask(server, mixed_prompts(1), tmp_path, k=2)
    assert len(server.requests) == 2
    assert summary["metrics"]["avg@2"]["mean"] == 0.0


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_a_server_that_keeps_what_the_model_wrote_from_the_text_is_a_warning(serve, tmp_path, caplog, field):
    def script(body):
        message = {"role": "assistant", "content": None, field: "1 and 1 make 2"}
        return 200, {"choices": [{"message": message, "finish_reason": "length"}]}

    summary = ask(serve(script), mixed_prompts(2), tmp_path, max_completion_length=77)
    assert summary["metrics"]["avg@4"]["mean"] == 0.0
    (record,) = caplog.records  # one line, not one a completion
    assert "has put what the model wrote into `reasoning_content`, which is not scored" in record.getMessage()
    assert "--reasoning-parser" in record.getMessage()
    assert "`max_completion_length`, which is 77" in record.getMessage()


def test_reasoning_beside_an_answer_is_no_warning(serve, tmp_path, caplog):
    message = {"role": "assistant", "content": "Answer: 1", "reasoning_content": "Hm."}
    ask(serve(lambda body: (200, {"choices": [{"message": message}]})), mixed_prompts(1), tmp_path, k=1)
    ask(serve(lambda body: (200, reply(None))), mixed_prompts(1), tmp_path / "empty", k=1)
    assert not caplog.records


def test_lengths_that_a_server_does_not_say_are_not_made_up(serve, tmp_path):
    server = serve(lambda body: (200, {"choices": [{"text": "Answer: 2"}]}))
    summary = ask(server, sums(1), tmp_path)
    assert (summary["mean_length"], summary["truncated"]) == (None, 0.0)
    assert summary["metrics"]["avg@4"]["mean"] == 1.0


# ---- Interruptions ----


KILLED = """
import sys
from trl_dapo.evaluation import evaluate
evaluate("tiny", sys.argv[1], sys.argv[2], base_url=sys.argv[3], k=8, concurrency=3, progress=False)
"""


def test_a_killed_evaluation_continues_without_asking_for_anything_twice(serve, tmp_path):
    problems = tmp_path / "problems.jsonl"
    problems.write_text("".join(json.dumps({"problem": f"1+{i}", "answer": str(1 + i)}) + "\n" for i in range(6)))
    answers, lock = [], threading.Lock()
    withheld, is_over = threading.Semaphore(0), threading.Event()

    def text(body):
        return f"Answer: {body['seed'] % 5}"

    def answers_ten_and_no_more(body):
        with lock:
            if len(answers) < 10:
                answers.append(asked(body))
                return text(body)
        withheld.release()
        is_over.wait()

    server = serve(answers_ten_and_no_more)
    command = [sys.executable, "-c", KILLED, str(problems), str(tmp_path / "run"), server.url]
    environment = {**os.environ, "PYTHONPATH": str(Path(evaluation.__file__).parents[2])}
    with subprocess.Popen(command, env=environment) as process:
        # No thread asks before its last answer is on disk: once all three wait, all ten are.
        for _ in range(3):
            assert withheld.acquire(timeout=60)
        process.kill()
    is_over.set()
    assert process.returncode < 0

    again, unbroken = serve(text), serve(text)
    settings = {"k": 8, "concurrency": 3}
    continued = ask(again, problems, tmp_path / "run", **settings)
    assert len(again.requests) == 48 - 10
    assert len(set(again.asked) | set(answers)) == 48
    assert continued == ask(unbroken, problems, tmp_path / "unbroken", **settings)
    assert len(unbroken.requests) == 48
    assert 0 < continued["metrics"]["avg@8"]["mean"] < 1


def test_a_finished_evaluation_asks_for_nothing(serve, tmp_path):
    server = serve(lambda body: "Answer: 2")
    first = ask(server, sums(2), tmp_path)
    server.stop()
    assert ask(server, sums(2), tmp_path) == first


def test_more_completions_of_each_problem_continue_a_finished_evaluation(serve, tmp_path):
    server = serve(lambda body: f"Answer: {2 + body['seed'] % 2}")
    ask(server, sums(3), tmp_path / "raised", k=2)
    raised = ask(server, sums(3), tmp_path / "raised", k=8)
    assert len(server.requests) == len(set(server.asked)) == 3 * 8
    at_once = ask(server, sums(3), tmp_path / "at once", k=8)
    assert raised == at_once
    assert 0 < raised["metrics"]["avg@8"]["mean"] < 1
    # fewer are among those that are there
    assert ask(server, sums(3), tmp_path / "raised", k=2)["problems"][0]["num_completions"] == 2
    assert len(server.requests) == 2 * 24


def test_more_problems_continue_a_finished_evaluation(serve, tmp_path, problems_file):
    server = serve(lambda body: "Answer: 2")
    first = ask(server, problems_file, tmp_path / "run", limit=1)
    both = ask(server, problems_file, tmp_path / "run")
    assert len(server.requests) == len(set(server.asked)) == 2 * 4
    assert (first["num_problems"], both["num_problems"]) == (1, 2)
    assert ask(server, problems_file, tmp_path / "run", limit=1) == first
    assert len(server.requests) == 2 * 4


def test_what_an_error_counts_are_the_completions_asked_for(serve, tmp_path):
    ask(serve(lambda body: "Answer: 2"), sums(2), tmp_path)
    refuses = serve(lambda body: (400, {"error": "no"}))
    with pytest.raises(ConnectionError, match="4 of 8 completions are in"):
        ask(refuses, sums_of([2, 3]), tmp_path)


@pytest.mark.parametrize("torn", [1, 20])
def test_a_torn_last_line_is_asked_for_again(serve, tmp_path, torn):
    server = serve(lambda body: "Answer: 2")
    ask(server, sums(1), tmp_path, concurrency=1)
    journal = tmp_path / "completions.jsonl"
    content = journal.read_bytes()
    journal.write_bytes(content[:-torn])
    ask(server, sums(1), tmp_path)
    assert len(server.requests) == 5
    assert server.asked[4] == server.asked[3]
    assert journal.read_bytes() == content


def test_an_evaluation_killed_at_its_first_line_starts_over(serve, tmp_path):
    (tmp_path / "completions.jsonl").write_text('{"settings": {"mod')
    assert ask(serve(lambda body: "Answer: 2"), sums(1), tmp_path)["num_problems"] == 1


def test_a_line_that_no_evaluation_has_written_is_named(serve, tmp_path):
    server = serve(lambda body: "Answer: 2")
    ask(server, sums(1), tmp_path)
    journal = tmp_path / "completions.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    lines[2] = b"\0\0\0\n"
    journal.write_bytes(b"".join(lines))
    with pytest.raises(ValueError, match=r"Line 3 of .*x00.*Remove that line"):
        ask(server, sums(1), tmp_path)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"temperature": 0.6}, "`temperature` was 1.0, is now 0.6"),
        ({"max_completion_length": 10}, "`max_completion_length` was 20480, is now 10"),
        ({"dataset": sums(2).select([1])}, "holds completions of 1 other problems, .*of which the first has .* 'id2'"),
        ({"dataset": sums(1, prompt=["2+0"])}, "holds completions of 1 other problems"),
    ],
)
def test_other_settings_in_the_same_folder_are_refused_with_both_values(serve, tmp_path, changed, message):
    server = serve(lambda body: "Answer: 2")
    ask(server, sums(1), tmp_path)
    with pytest.raises(ValueError, match=message + ".*Use another `output_dir`"):
        ask(server, **{"dataset": sums(1), "output_dir": tmp_path, **changed})
    assert len(server.requests) == 4


def test_another_training_of_the_same_name_is_refused(serve, tmp_path, tiny_model):
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    server = serve(lambda body: "Answer: 2")
    settings = {"base_url": server.url, "k": 1, "progress": False}
    model.save_pretrained(tmp_path / "trained")
    evaluate(tmp_path / "trained", sums(1), tmp_path / "eval", **settings)
    with torch.no_grad():
        model.lm_head.weight += 1e-3
    model.save_pretrained(tmp_path / "trained")
    with pytest.raises(ValueError, match=r"`weights` was '[0-9a-f]{16}', is now"):
        evaluate(tmp_path / "trained", sums(1), tmp_path / "eval", **settings)


def test_two_evaluations_do_not_write_to_one_folder(tmp_path):
    path = tmp_path / "completions.jsonl"
    with Journal(path, {}) as journal:
        journal.append("a", 0, Completion("text", 1, False))
        with pytest.raises(BlockingIOError, match=f"Another evaluation is writing to `{tmp_path}`"):
            Journal(path, {})
    with Journal(path, {}) as journal:
        assert journal.completions == {("a", 0): Completion("text", 1, False)}


# ---- In this process ----


def here(model, dataset, output_dir, **settings):
    settings = {"k": 4, "max_completion_length": 8, "progress": False, **settings}
    return evaluate(model, dataset, output_dir, **settings)


def completions(output_dir):
    return pq.read_table(output_dir / "completions.parquet").to_pylist()


def has_digit(text, gold):
    found = re.search("[0-9]", text)
    return found is not None, found and found[0]


def mixed_prompts(num):
    texts = [f"{'Hm. ' * (i % 4)}What is 1+{i}?" for i in range(num)]
    conversations = [[{"role": "user", "content": text}] for text in texts]
    return Dataset.from_dict({"prompt": conversations, "solution": ["1"] * num})


def serve_model(path, serve):
    """The same model behind HTTP, with generation settings spelt out by the test itself."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    lock = threading.Lock()

    def script(body):
        text = tokenizer.apply_chat_template(body["messages"], tokenize=False, add_generation_prompt=True)
        inputs = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
        how = {"do_sample": False}
        if body["temperature"] > 0:
            how = {"do_sample": True, "temperature": body["temperature"], "top_p": body["top_p"], "top_k": 0}
        with lock, torch.random.fork_rng():
            torch.manual_seed(body["seed"])
            output = model.generate(**inputs, max_new_tokens=body["max_tokens"], **how)
        ids = output[0, inputs["input_ids"].size(1) :]
        is_over = ids[-1] == tokenizer.eos_token_id
        said = tokenizer.decode(ids, skip_special_tokens=True)
        return 200, reply(said, num_tokens=len(ids), finish_reason="stop" if is_over else "length")

    return serve(script)


def test_the_model_here_and_behind_a_server_have_the_same_avg_at_k(tiny_model, serve, tmp_path):
    dataset, settings = mixed_prompts(12), {"k": 12, "scorer": has_digit, "max_completion_length": 6}
    in_process = here(tiny_model, dataset, tmp_path / "here", batch_size=48, **settings)
    server = serve_model(tiny_model, serve)
    served = evaluate(
        tiny_model, dataset, tmp_path / "server", base_url=server.url, concurrency=2, progress=False, **settings
    )
    ours, theirs = (summary["metrics"]["avg@12"] for summary in (in_process, served))
    assert ours["low"] <= theirs["mean"] <= ours["high"]
    assert theirs["low"] <= ours["mean"] <= theirs["high"]
    assert 0.1 < ours["mean"] < 0.9
    difference = compare(tmp_path / "here", tmp_path / "server")["metrics"]["avg@12"]["difference"]
    assert difference["low"] <= 0 <= difference["high"]


def test_the_quickstarts_model_has_the_same_avg_at_k_here_and_behind_a_server(serve, tmp_path):
    problems, tokenizer = Problems(seed=42), build_tokenizer()
    model = build_model(tokenizer, seed=42)
    warm_up(model, tokenizer, problems, num_steps=100)
    path = tmp_path / "model"
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    asked = problems.held_out[:20]  # sums of one and two digits
    conversations = [[{"role": "user", "content": problem.text}] for problem in asked]
    dataset = Dataset.from_dict({"prompt": conversations, "solution": [problem.answer for problem in asked]})
    settings = {"k": 16, "scorer": exact_answer, "top_p": 1.0, "max_completion_length": 8}
    in_process = here(str(path), dataset, tmp_path / "here", batch_size=80, **settings)
    server = serve_model(str(path), serve)
    served = evaluate(str(path), dataset, tmp_path / "server", base_url=server.url, progress=False, **settings)
    ours, theirs = (summary["metrics"]["avg@16"] for summary in (in_process, served))
    assert 0 < ours["mean"] < 1
    assert ours["low"] <= theirs["mean"] <= ours["high"]
    assert theirs["low"] <= ours["mean"] <= theirs["high"]


def test_the_most_probable_completion_is_the_same_here_in_a_batch_and_behind_a_server(tiny_model, serve, tmp_path):
    dataset, settings = mixed_prompts(6), {"k": 1, "temperature": 0.0, "max_completion_length": 8}
    here(tiny_model, dataset, tmp_path / "batch", batch_size=6, **settings)
    here(tiny_model, dataset, tmp_path / "single", batch_size=1, **settings)
    server = serve_model(tiny_model, serve)
    evaluate(tiny_model, dataset, tmp_path / "server", base_url=server.url, progress=False, **settings)
    batch, single, served = (completions(tmp_path / name) for name in ("batch", "single", "server"))
    assert batch == single == served
    assert len({row["completion"] for row in batch}) > 1


class Echo(torch.nn.Module):
    """Wraps a model: says `script(prompt ids)`, then pads, as `generate` does."""

    def __init__(self, model, script):
        super().__init__()
        self.model, self.script = model, script
        self.config, self.generation_config, self.device = model.config, model.generation_config, model.device

    def generate(self, input_ids, attention_mask):
        rows = [self.script(ids[mask.bool()].tolist()) for ids, mask in zip(input_ids, attention_mask, strict=True)]
        width = max(map(len, rows))
        pad = self.config.pad_token_id
        return torch.cat([input_ids, torch.tensor([row + [pad] * (width - len(row)) for row in rows])], dim=1)


def test_a_completion_ends_with_its_end_token_which_counts(tiny_model, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    eos = tokenizer.eos_token_id

    def script(prompt_ids):
        text = tokenizer.decode(prompt_ids)
        return tokenizer("abc")["input_ids"] + ([eos] if text == "1+1" else tokenizer("defgh")["input_ids"])

    model = Echo(AutoModelForCausalLM.from_pretrained(tiny_model), script)
    summary = here(model, sums(2), tmp_path, k=1, processing_class=tokenizer)
    first, second = completions(tmp_path)
    assert (first["completion"], first["length"], first["truncated"]) == ("abc", 4, False)
    assert (second["completion"], second["length"], second["truncated"]) == ("abcdefgh", 8, True)
    assert (summary["mean_length"], summary["truncated"]) == (6.0, 0.5)


def test_a_model_in_training_is_evaluated_without_dropout(tiny_model, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    model = Echo(
        AutoModelForCausalLM.from_pretrained(tiny_model), lambda prompt_ids: modes.append(model.training) or [3]
    )
    modes = []
    model.train()
    here(model, sums(1), tmp_path, k=1, processing_class=tokenizer)
    assert modes == [False]
    assert model.training


def test_a_chat_template_says_itself_how_a_prompt_begins(tiny_model, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    begin = TemplateProcessing(single="<unk> $0", special_tokens=[("<unk>", tokenizer.unk_token_id)])
    tokenizer.backend_tokenizer.post_processor = begin
    prompts = []
    model = Echo(
        AutoModelForCausalLM.from_pretrained(tiny_model), lambda prompt_ids: prompts.append(prompt_ids) or [3]
    )
    here(model, mixed_prompts(1), tmp_path / "chat", k=1, processing_class=tokenizer)
    here(model, sums(1), tmp_path / "plain", k=1, processing_class=tokenizer)
    assert [tokenizer.decode(ids) for ids in prompts] == ["<u>What is 1+0?<eos><a>", "<unk>1+1"]


def test_batches_of_one_problem_do_not_repeat_each_other(tiny_model, tmp_path):
    here(tiny_model, sums(1), tmp_path, k=8, batch_size=2)
    assert len({row["completion"] for row in completions(tmp_path)}) == 8


def test_sampling_settings_that_come_with_a_model_have_no_say(tiny_model, tmp_path):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_model), AutoTokenizer.from_pretrained(tiny_model)
    own = model.generation_config
    here(model, sums(2), tmp_path / "without", processing_class=tokenizer)
    own.update(top_k=1, repetition_penalty=9.0, do_sample=False, max_new_tokens=2)
    model.train()
    here(model, sums(2), tmp_path / "with", processing_class=tokenizer)
    assert completions(tmp_path / "with") == completions(tmp_path / "without")
    assert len({row["completion"] for row in completions(tmp_path / "with")}) == 8
    assert model.generation_config is own
    assert model.training


def test_an_evaluation_leaves_the_random_numbers_of_the_program_alone(tiny_model, tmp_path):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    here(tiny_model, sums(1), tmp_path)
    assert torch.equal(torch.rand(3), expected)


def test_an_interrupted_evaluation_here_ends_like_an_unbroken_one(tiny_model, tmp_path):
    unbroken = here(tiny_model, sums(3), tmp_path / "unbroken", batch_size=2)
    journal = tmp_path / "unbroken" / "completions.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "completions.jsonl").write_bytes(b"".join(lines[: 1 + 6]))
    assert here(tiny_model, sums(3), tmp_path / "broken", batch_size=2) == unbroken
    assert (tmp_path / "broken" / "completions.jsonl").read_bytes() == journal.read_bytes()


def test_more_tokens_than_the_model_is_made_for_are_a_warning(tiny_model, tmp_path, caplog):
    here(tiny_model, sums(1), tmp_path / "short", k=1)
    assert not caplog.records
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_model), AutoTokenizer.from_pretrained(tiny_model)
    echo = Echo(model, lambda prompt_ids: [tokenizer.eos_token_id])
    here(echo, sums(1), tmp_path / "long", k=1, max_completion_length=2046, processing_class=tokenizer)
    assert "come to 2049 tokens, the model is made for 2048" in caplog.text


def test_messages_need_a_chat_template(tiny_model, tmp_path):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_model), AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="has no chat template"):
        here(model, mixed_prompts(1), tmp_path, processing_class=tokenizer)


def test_without_vllm_its_engine_says_what_to_do(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ImportError, match=r"pip install 'trl-dapo\[vllm\]'.*base_url"):
        here(tiny_model, sums(1), tmp_path, engine="vllm")


def test_vllm_is_asked_for_everything_at_once_and_answers_in_any_order(tiny_model, tmp_path, monkeypatch):
    class Engine:
        def __init__(self):
            self.waiting = []
            self.engine_core = self

        def shutdown(self):
            made.append("shut down")

        def add_request(self, request_id, prompt, params):
            self.waiting.append((request_id, prompt["prompt_token_ids"], params))

        def has_unfinished_requests(self):
            return bool(self.waiting)

        def step(self):
            request_id, ids, params = self.waiting.pop()
            answer = types.SimpleNamespace(
                text=f"Answer: {AutoTokenizer.from_pretrained(tiny_model).decode(ids)[-1:]}",
                token_ids=[0] * params.max_tokens,
                finish_reason="length",
            )
            return [
                types.SimpleNamespace(request_id="0", finished=False, outputs=[]),
                types.SimpleNamespace(request_id=request_id, finished=True, outputs=[answer]),
            ]

    def make_llm(model, tensor_parallel_size, max_model_len, seed):
        made.append((model, tensor_parallel_size, max_model_len))
        seeds.append(seed)
        return types.SimpleNamespace(llm_engine=Engine())

    made, seeds = [], []
    vllm = types.ModuleType("vllm")
    vllm.LLM, vllm.SamplingParams = make_llm, types.SimpleNamespace
    vllm.sampling_params = types.ModuleType("vllm.sampling_params")
    vllm.sampling_params.RequestOutputKind = types.SimpleNamespace(FINAL_ONLY=2)
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", vllm.sampling_params)
    dataset = Dataset.from_dict({"prompt": ["say 3", "say 4"], "solution": ["3", "5"]})
    summary = here(tiny_model, dataset, tmp_path, engine="vllm", tensor_parallel_size=2)
    assert [problem["num_correct"] for problem in summary["problems"]] == [4, 0]
    assert (summary["mean_length"], summary["truncated"]) == (8, 1.0)
    assert made == [(tiny_model, 2, 5 + 8), "shut down"]

    # What is left is not sampled with the random numbers of what is there, ...
    journal = tmp_path / "completions.jsonl"
    header, *lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join([header, *lines[:-1]]))
    here(tiny_model, dataset, tmp_path, engine="vllm", tensor_parallel_size=2)
    assert len(set(seeds)) == 2
    # ... nor where as many are left as there were at first, with the same first one, because more are asked for.
    indices = [json.loads(line) for line in lines]
    journal.write_bytes(
        b"".join([header, *(line for line, entry in zip(lines, indices, strict=True) if entry["index"])])
    )
    here(tiny_model, dataset, tmp_path, engine="vllm", tensor_parallel_size=2, k=7)
    assert len(set(seeds)) == 3


def test_vllm_takes_no_adapter(tmp_path, monkeypatch):
    vllm = types.ModuleType("vllm")
    vllm.LLM = vllm.SamplingParams = None
    vllm.sampling_params = types.ModuleType("vllm.sampling_params")
    vllm.sampling_params.RequestOutputKind = None
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", vllm.sampling_params)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"is an adapter\. Merge it into its model first"):
        here(tmp_path, sums(1), tmp_path / "eval", engine="vllm")


# ---- Settings ----


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"k": 0}, "`k` must be at least 1, got 0"),
        ({"temperature": -1.0}, "`temperature` must be 0 .* or more, got -1.0"),
        ({"temperature": math.nan}, "`temperature` .* got nan"),
        ({"temperature": 0.0}, "At `temperature=0` the 32 completions of a problem are all the same: use `k=1`"),
        ({"top_p": 0.0}, "`top_p` must be above 0 and at most 1, got 0.0"),
        ({"top_k": -1}, "`top_k` must be 0 .* or more, got -1"),
        ({"max_completion_length": 0}, "`max_completion_length` must be at least 1, got 0"),
        ({"batch_size": 0}, "`batch_size` must be at least 1, got 0"),
        ({"concurrency": 0}, "`concurrency` must be at least 1, got 0"),
        ({"num_retries": -1}, "`num_retries` must be at least 0, got -1"),
        ({"request_timeout": 0}, "`request_timeout` must be a positive number of seconds, got 0"),
        ({"scorer": "exact"}, "`scorer` must be a function or one of 'dapo_math', 'math_verify', got 'exact'"),
        ({"prompt_style": "boxed"}, "asks for .boxed{}, and the scorer 'dapo_math' reads the last `Answer:` line"),
        ({"engine": "sglang"}, "`engine` must be one of 'transformers', 'vllm', got 'sglang'"),
        ({"engine": "vllm", "base_url": "http://x"}, "leave out `engine='vllm'`"),
        ({"base_url": "localhost:8000"}, "`base_url` must start with http:// or https://, got 'localhost:8000'"),
        ({"base_url": "http://x", "processing_class": object()}, "by the engine 'transformers' only"),
        ({"model": object()}, "A loaded model needs its tokenizer as `processing_class`"),
        ({"limit": 3}, "{'limit': 3} applies to a file or a hub dataset"),
        ({"dataset": Dataset.from_dict({"prompt": ["1+1"]})}, "has no column 'solution'; found 'prompt'"),
        (
            {"dataset": sums(2, id=["a", "a"])},
            "Two rows of the source 'dataset' have the id 'a', but the `prompt` of one is '1.1' and of the other '1.2",
        ),
        (
            {"dataset": sums_of([1, 1], solution=["2", "3"])},
            "have the id 'id1', but the `solution` of one is '2' and of the other '3'",
        ),
    ],
)
def test_settings_without_a_meaning_are_refused_with_their_value(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        evaluate(**{"model": "tiny", "dataset": sums(1), "output_dir": tmp_path / "eval", **settings})
    assert not (tmp_path / "eval").exists()


# ---- Comparison ----


def evaluated(serve, output_dir, first, second, third, order=(0, 1, 2), **settings):
    dataset = sums(3, source=["easy", "easy", "hard"]).select(order)
    ask(serve(Deal(first=first, second=second, third=third)), dataset, output_dir, **settings)
    return output_dir


RIGHT = {1: "Answer: 2", 2: "Answer: 3", 3: "Answer: 4"}


def texts(*num_correct):
    return [[RIGHT[i]] * num + ["Answer: 0"] * (4 - num) for i, num in enumerate(num_correct, start=1)]


def test_a_comparison_by_hand(serve, tmp_path):
    base = evaluated(serve, tmp_path / "base", *texts(2, 1, 4))
    trained = evaluated(serve, tmp_path / "trained", *texts(3, 4, 3))
    change = compare(base, trained / "summary.json")
    avg = change["metrics"]["avg@4"]
    assert (avg["base"], avg["trained"]) == pytest.approx((7 / 12, 10 / 12))
    assert avg["difference"] == estimate_mean([1 / 4, 3 / 4, -1 / 4])._asdict()
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
    assert change["metrics"]["avg@4"]["difference"] == {"mean": 0.0, "low": 0.0, "high": 0.0}
    assert change["gained"] == change["lost"] == []


def test_a_comparison_is_sharper_than_the_evaluations_it_compares(serve, tmp_path):
    base = evaluated(serve, tmp_path / "base", *texts(0, 1, 3))
    trained = evaluated(serve, tmp_path / "trained", *texts(1, 2, 4))
    difference = compare(base, trained)["metrics"]["avg@4"]["difference"]
    assert difference == {"mean": 0.25, "low": 0.25, "high": 0.25}


def test_a_comparison_says_what_else_differed(serve, tmp_path):
    base = evaluated(serve, tmp_path / "base", *texts(1, 1, 1))
    trained = evaluated(serve, tmp_path / "trained", *texts(1, 1, 1), temperature=0.6)
    assert compare(base, trained)["differing_settings"] == {"temperature": [1.0, 0.6]}


def test_evaluations_of_other_problems_are_not_compared(serve, tmp_path):
    server = serve(lambda body: "Answer: 2")
    ask(server, sums(3), tmp_path / "base")
    ask(server, sums(5).select([0, 1, 3, 4]), tmp_path / "trained")
    with pytest.raises(ValueError, match=r"1 only in `.*base` \(ids id3\) and 2 only in `.*trained` \(ids id4, id5\)"):
        compare(tmp_path / "base", tmp_path / "trained")


def test_evaluations_of_other_k_are_not_compared(serve, tmp_path):
    server = serve(lambda body: "Answer: 2")
    ask(server, sums(1), tmp_path / "base", k=2)
    ask(server, sums(1), tmp_path / "trained", k=4)
    with pytest.raises(ValueError, match=r"has 2 completions a problem and .* has 4"):
        compare(tmp_path / "base", tmp_path / "trained")


def test_what_is_no_summary_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no `.*summary.json`. The evaluation has not ended"):
        compare(tmp_path, tmp_path)
    with pytest.raises(FileNotFoundError, match=r"There is no `.*nothing.json`.$"):
        compare(tmp_path / "nothing.json", tmp_path)
    for content, message in (("{", "is not JSON"), ("[]", "is not the summary of an evaluation")):
        (tmp_path / "summary.json").write_text(content)
        with pytest.raises(ValueError, match=message):
            compare(tmp_path, tmp_path)


# ---- On the command line ----


def run(add_arguments, command, *argv):
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add_arguments(parser)
    return command(parser.parse_args([str(arg) for arg in argv]))


def run_eval(*argv):
    return run(evaluation.add_eval_arguments, evaluation.run_eval, *argv)


def run_compare(*argv):
    return run(evaluation.add_compare_arguments, evaluation.run_compare, *argv)


@pytest.fixture
def problems_file(tmp_path):
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(json.dumps({"problem": f"1+{i}", "answer": str(1 + i)}) + "\n" for i in (1, 2)))
    return path


def test_both_commands_print_their_figures(serve, tmp_path, problems_file, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    for name, right in (("base", 2), ("trained", 3)):
        server = serve(lambda body, right=right: f"Answer: {right}" if "1+2" in str(body) else "Answer: 2")
        options = ["--model", name, "--dataset", problems_file, "--output-dir", tmp_path / name, "--k", 2]
        assert run_eval(*options, "--base_url", server.url, "--max-completion-length", 9) == 0
    printed = capsys.readouterr().out
    assert "50.0% [0.0%, 100.0%]" in printed
    assert "100.0% [34.2%, 100.0%]" in printed  # both of two: Wilson's lower bound 2 / (2 + z^2)
    assert server.requests[0][2]["max_tokens"] == 9

    assert run_compare(tmp_path / "base", tmp_path / "trained" / "summary.json") == 0
    printed = capsys.readouterr().out
    assert "+50.0 [+0.0, +100.0]" in printed
    assert "1 problems gained: +50.0 points of avg@2." in printed
    assert "0 problems lost: +0.0 points" in printed
    assert run_compare(tmp_path / "base", tmp_path / "trained", "--json") == 0
    assert json.loads(capsys.readouterr().out) == compare(tmp_path / "base", tmp_path / "trained")


def test_a_mistake_is_one_line_and_status_2(tmp_path, capsys):
    options = ["--model", "m", "--dataset", "nowhere.jsonl", "--output_dir", tmp_path]
    assert run_eval(*options) == 2
    assert capsys.readouterr().err.startswith("trl-dapo eval: There is no `")
    assert run_compare(tmp_path, tmp_path) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_defaults_on_the_command_line_are_the_papers():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    evaluation.add_eval_arguments(parser)
    given = vars(parser.parse_args(["--model", "m", "--dataset", "d", "--output_dir", "o"]))
    assert given.items() >= {"k": 32, "temperature": 1.0, "top_p": 0.7, "max_completion_length": 20480}.items()
    help_text = parser.format_help()
    assert "None" not in help_text
    assert "(default: 0.7)" in help_text


def test_importing_the_evaluation_imports_no_framework():
    heavy = ("torch", "transformers", "datasets", "vllm", "pyarrow", "trl")
    code = f"import sys, trl_dapo.evaluation; print([name for name in {heavy!r} if name in sys.modules])"
    environment = {**os.environ, "PYTHONPATH": str(Path(evaluation.__file__).parents[2])}
    output = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert output.stdout.strip() == "[]"

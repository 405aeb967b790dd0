# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""A server is asked, and what it does is met: failures, refusals, silence, hostile text."""

import itertools
import json
import re
import threading
import types
from collections import Counter

import pyarrow.parquet as pq
import pytest
from datasets import Dataset
from evaluations import Deal, ask, asked, mixed_prompts, reply, sums

from trl_dapo.evaluation import server_client as server_engine
from trl_dapo.evaluation.jobs import Job, SamplingSettings


pytestmark = pytest.mark.fast


def test_plain_prompts_are_completed_and_conversations_continued(serve, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    caplog.set_level("INFO")
    server = serve(lambda body: "Answer: 2")
    ask(server, sums(1), tmp_path / "plain", k=1, top_k=5)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1"}]
    ask(server, Dataset.from_dict({"prompt": [messages], "solution": ["2"]}), tmp_path / "chat", k=1)
    (plain_path, headers, plain), (chat_path, _, chat) = server.requests
    assert (plain_path, plain["prompt"], plain["model"], plain["top_k"]) == ("/v1/completions", "1+1", "tiny", 5)
    assert (chat_path, chat["messages"]) == ("/v1/chat/completions", messages)
    assert "top_k" not in chat  # OpenAI's own servers refuse it
    assert (headers["Authorization"], headers["Connection"]) == ("Bearer secret", "close")
    assert "httpx2" not in {record.name for record in caplog.records}  # no line a request


def test_only_the_proxy_for_the_servers_own_scheme_is_read(serve, tmp_path, monkeypatch):
    monkeypatch.setenv("ALL_PROXY", "socks5h://127.0.0.1:9")
    monkeypatch.setenv("https_proxy", "ftp://127.0.0.1:9")
    assert ask(serve(lambda body: "Answer: 2"), sums(1), tmp_path)["metrics"]["avg@4"]["mean"] == 1.0
    monkeypatch.setenv("http_proxy", "http://proxy:8080")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    addresses = ["http://server/v1", "http://127.0.0.1:8000/v1", "https://server/v1"]
    assert [server_engine._proxy_of(url) for url in addresses] == ["http://proxy:8080", None, "ftp://127.0.0.1:9"]


def test_an_answer_is_utf_8_whatever_it_is_declared_to_be():
    answer = json.dumps(reply("½ + 1½ = 2", False), ensure_ascii=False).encode()
    response = server_engine.httpx2.Response(200, headers={"Content-Type": "a/b; charset=latin-1"}, content=answer)
    server = server_engine._Server("http://server/v1", "tiny", SamplingSettings(1.0, 1.0, 0, 8), 1.0, 0)
    server._client = types.SimpleNamespace(post=lambda *args, **kwargs: response)
    assert server.request(Job("a", 0, "1+1", 0)).text == "½ + 1½ = 2"


def test_an_api_key_is_sent_without_its_line_break_and_refused_if_no_header_can_hold_it(serve, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret\n")
    server = serve(lambda body: "Answer: 2")
    ask(server, sums(1), tmp_path / "stripped", k=1)
    assert server.requests[0][1]["Authorization"] == "Bearer secret"
    monkeypatch.setenv("OPENAI_API_KEY", "sec\nret")
    with pytest.raises(ValueError, match="The environment variable OPENAI_API_KEY is not an API key") as error:
        ask(server, sums(1), tmp_path / "refused", k=1)
    assert "sec" not in str(error.value)


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
        (429, {"error": "slow down"}),
        None,
        (200, b"<html>gateway</html>"),
        (200, {"choices": []}),
        (200, reply({"not": "text"}, False)),
    ],
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


@pytest.mark.parametrize(
    ("status", "message", "num_requests"),
    [(400, r"refused .* 400 .*context is 4096", 1), (500, r"in 3 attempts: 500 .*context is 4096", 3)],
)
def test_a_refused_request_is_not_retried_and_a_failed_one_is(serve, tmp_path, status, message, num_requests):
    server = serve(lambda body: (status, {"error": "the context is 4096"}))
    with pytest.raises(ConnectionError, match=message) as error:
        ask(server, sums(1), tmp_path, concurrency=1, num_retries=2)
    assert "0 of 4 completions are stored in" in str(error.value)
    assert len(server.requests) == num_requests


def test_the_user_in_a_url_is_sent_but_not_part_of_messages(serve, tmp_path, capfd):
    server = serve(lambda body: (400, {"error": "no"}))
    there = types.SimpleNamespace(url=server.url.replace("://", "://planted:pa55word@"))
    with pytest.raises(ConnectionError, match="refused a request with 400") as error:
        ask(there, sums(1), tmp_path, k=1)
    assert server.requests[0][1]["Authorization"].startswith("Basic ")
    left = "".join(path.read_text() for path in tmp_path.rglob("*.json*"))
    assert not re.search("planted|pa55word", f"{error.value}{left}{capfd.readouterr()}")


@pytest.mark.parametrize("status", [401, 500])
def test_messages_of_a_server_are_quoted_without_keys_and_users(serve, tmp_path, monkeypatch, status):
    monkeypatch.setenv("OPENAI_API_KEY", "planted-key")
    server = serve(lambda body: (status, {"error": "no key planted-key for http://inner:pa55word@gpu-8/v1"}))
    with pytest.raises(ConnectionError, match=r"no key \[left out\] for http://gpu-8/v1"):
        ask(server, sums(1), tmp_path, k=1, num_retries=0)


def test_a_refused_request_ends_retries_of_others_and_keeps_their_completions(serve, tmp_path, monkeypatch):
    monkeypatch.setattr(server_engine, "_FIRST_DELAY", 1e6)
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
    with pytest.raises(ConnectionError, match=r"refused a request with 400 .* 1 of 3 completions are stored in"):
        ask(server, sums(3), tmp_path, k=1)
    assert len(server.requests) == 3


def test_the_delays_double_up_to_a_minute(serve, monkeypatch):
    monkeypatch.setattr(server_engine, "_FIRST_DELAY", 0.5)
    monkeypatch.setattr(server_engine._jitter, "uniform", lambda low, high: high)
    server = serve(lambda body: (503, {"error": "loading"}))
    sampling = server_engine.SamplingSettings(1.0, 0.7, 0, 8)
    asking = server_engine._Server(server.url, "tiny", sampling, request_timeout=60, num_retries=9)
    delays = []
    asking.is_given_up = types.SimpleNamespace(wait=delays.append)
    with pytest.raises(ConnectionError, match="in 10 attempts"):
        asking.request(server_engine.Job("id", 0, "1+1", 0))
    assert delays == [0.5, 1, 2, 4, 8, 16, 32, 60, 60]


def test_a_server_that_goes_down_is_one_error_and_costs_nothing(serve, tmp_path):
    lock, num_answers = threading.Lock(), itertools.count()

    def script(body):
        with lock:
            return "Answer: 2" if next(num_answers) < 5 else None

    server = serve(script)
    with pytest.raises(ConnectionError) as error:
        ask(server, sums(4), tmp_path, num_retries=2)
    assert re.match(re.escape(f"{server.url} did not return a completion in 3 attempts: "), str(error.value))
    assert "5 of 16 completions are stored in" in str(error.value)
    assert not (tmp_path / "summary.json").exists()
    again = serve(lambda body: "Answer: 2")
    summary = ask(again, sums(4), tmp_path)
    assert len(again.requests) == len(set(again.asked)) == 11
    assert summary["problems"][0]["num_correct"] == 4


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
    assert ask(serve(Deal(only=hostile)), sums(1), tmp_path, k=8)["problems"][0]["num_correct"] == 4
    with open(tmp_path / "completions.jsonl", encoding="ascii") as file:
        kept = [json.loads(line)["text"] for line in file.read().split("\n")[1:-1]]
    assert sorted(kept) == sorted(hostile)
    rows = pq.read_table(tmp_path / "completions.parquet").to_pylist()
    assert sum(row["completion"].startswith("\0 NUL \0") for row in rows) == 1
    assert "? lone surrogate ?\nAnswer: 2?" in [row["completion"] for row in rows]


@pytest.mark.parametrize("content", [None, "\n\n"])
@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_a_server_that_separates_reasoning_from_an_empty_text_gives_a_warning(serve, tmp_path, caplog, field, content):
    def script(body):
        message = {"role": "assistant", "content": content, field: "1 and 1 make 2"}
        return 200, {"choices": [{"message": message, "finish_reason": "length"}]}

    assert ask(serve(script), mixed_prompts(2), tmp_path, max_completion_length=77)["metrics"]["avg@4"]["mean"] == 0.0
    # One line, not one a completion.
    (record,) = [record for record in caplog.records if "reasoning" in record.getMessage()]
    assert "put what the model wrote into `reasoning_content`. Only the text is scored" in record.getMessage()
    assert "--reasoning-parser" in record.getMessage()
    assert "`max_completion_length`, which is 77" in record.getMessage()


def test_reasoning_next_to_a_text_gives_no_warning(serve, tmp_path, caplog):
    message = {"role": "assistant", "content": "Answer: 1", "reasoning_content": "Hm."}
    ask(serve(lambda body: (200, {"choices": [{"message": message}]})), mixed_prompts(1), tmp_path, k=1)
    empty = ask(serve(lambda body: (200, reply(None))), mixed_prompts(1), tmp_path / "empty", k=1)
    assert empty["metrics"]["avg@1"]["mean"] == 0.0  # no content is an empty completion
    assert "reasoning" not in caplog.text


def test_lengths_that_a_server_does_not_say_are_not_made_up(serve, tmp_path):
    summary = ask(serve(lambda body: (200, {"choices": [{"text": "Answer: 2"}]})), sums(1), tmp_path)
    assert (summary["mean_length"], summary["truncated"]) == (None, 0.0)
    assert summary["metrics"]["avg@4"]["mean"] == 1.0

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Requests to a server that hangs, fails or is abandoned, over real sockets."""

import contextlib
import json
import math
import socket
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import requests
from helpers import tiny_config
from requests.adapters import HTTPAdapter
from trl.generation import vllm_client
from trl.generation.vllm_client import VLLMClient
from urllib3.util.retry import Retry

from trl_dapo.engines import lora_client
from trl_dapo.engines import server as module_of_server
from trl_dapo.engines.call import call
from trl_dapo.engines.http_session import TimedAdapter
from trl_dapo.engines.lora_client import AdapterClient
from trl_dapo.engines.server import BoundClient, ServerFault, naming_lost_server


OK = (200, "{}")


class Handler(BaseHTTPRequestHandler):
    """
    Answer each path with the next of the server's `answers`, (status, text), and repeat the last one. `None` hangs
    until the test ends, and a function answers itself.
    """

    def answer(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path, self.body = self.path.partition("?")[0], json.loads(body or "null")
        self.server.asked.append((path, self.body))
        self.server.was_asked.release()
        answers = self.server.answers[path]
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if answer is None:
            self.server.over.wait()
            return
        if callable(answer):
            answer(self)
            return
        status, text, *headers = answer
        self.send_response(status)
        for header in (("Content-Length", str(len(text))), *headers):
            self.send_header(*header)
        self.end_headers()
        self.wfile.write(text.encode())

    do_GET = do_POST = answer

    def log_message(self, *args):
        pass


def drips(handler, text=b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n", at_once=0):
    """Answer one byte at a time, the first `at_once` without a pause."""
    for i, byte in enumerate(text + 1000 * b" "):
        if i >= at_once and handler.server.over.wait(0.02):
            return
        handler.wfile.write(bytes([byte]))


def drips_behind_its_headers(handler):
    drips(handler, at_once=60)


def stops_in_its_headers(handler):
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Le")
    handler.wfile.flush()
    handler.server.over.wait()


def breaks_off(handler):
    """Reset the connection in the middle of an answer."""
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{")
    handler.wfile.flush()
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.connection.close()


@pytest.fixture(autouse=True)
def without_vllm(monkeypatch):
    monkeypatch.setattr(vllm_client, "is_vllm_available", lambda *args, **kwargs: True)  # a client does not need it


@pytest.fixture
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.asked, server.was_asked, server.over = [], threading.Semaphore(0), threading.Event()
    models = json.dumps({"data": [{"id": "base", "root": "/models/base"}]})
    server.answers = {"/health": [(200, "")], "/v1/models": [(200, models)]}
    server.answers |= {f"/v1/{act}_lora_adapter": [(200, "")] for act in ("load", "unload")}
    server.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.over.set()
    server.shutdown()
    server.server_close()


def session_with(timeout):
    """A session as TRL's client creates it, but without pauses between retries."""
    session = requests.Session()
    session.trust_env = False
    retries = Retry(total=5, connect=5, read=5, status=3, status_forcelist=[503], allowed_methods=["POST"])
    session.mount("http://", TimedAdapter(HTTPAdapter(max_retries=retries, pool_maxsize=64), timeout))
    return session


@contextlib.contextmanager
def under_way(session, server):
    """A request that the server has received and not answered."""
    with ThreadPoolExecutor(1) as executor:
        call = executor.submit(session.post, f"{server.url}/", json={})
        assert server.was_asked.acquire(timeout=30)
        yield call


BUSY = (503, "", ("Retry-After", "30"))


@pytest.mark.parametrize("answer", [None, drips, drips_behind_its_headers, BUSY])
def test_a_server_that_does_not_answer_in_time_is_given_up_and_not_asked_again(server, answer):
    session = session_with(0.2)
    server.answers["/"] = [answer, OK]
    with pytest.raises(requests.exceptions.ReadTimeout):
        session.post(f"{server.url}/", json={})
    assert server.was_asked.acquire(timeout=30)  # it is late itself, but may still have to read the answer
    assert len(server.asked) == 1


def test_what_trl_retries_is_retried(server):
    session = session_with(1000.0)
    server.answers["/"] = [(503, ""), (503, ""), OK]
    assert session.post(f"{server.url}/", json={}).status_code == 200
    assert len(server.asked) == 3


def test_an_answer_that_breaks_off_is_asked_for_once_more(server):
    session = session_with(1000.0)
    server.answers["/"] = [breaks_off, OK, breaks_off]
    assert session.post(f"{server.url}/", json={}).text == "{}"
    with pytest.raises(requests.exceptions.ChunkedEncodingError):
        session.post(f"{server.url}/", json={})
    assert len(server.asked) == 4


@pytest.mark.parametrize("answer", [None, drips_behind_its_headers, stops_in_its_headers])
def test_a_request_under_way_ends_when_its_session_is_closed_and_is_not_sent_again(server, answer):
    session = session_with(1000.0)
    server.answers["/"] = [answer, OK]
    with under_way(session, server) as call:
        session.close()
        with pytest.raises(requests.exceptions.RequestException):
            call.result(timeout=30)
    assert len(server.asked) == 1
    assert session.post(f"{server.url}/", json={}).status_code == 200


@pytest.mark.parametrize("answer", [None, drips_behind_its_headers])
def test_what_is_ended_with_a_request_that_was_late_is_late_too(server, answer):
    """The first of many requests that is waited for may not be the first one whose time is up."""
    session = session_with(1000.0)
    server.answers["/"] = [answer, drips]
    with under_way(session, server) as call:
        with pytest.raises(requests.exceptions.ReadTimeout):
            session.post(f"{server.url}/", json={}, timeout=0.2)
        with pytest.raises(requests.exceptions.ReadTimeout):
            call.result(timeout=30)


# ---- TRL's client and ours, and server failures ----


class InNoGroup(VLLMClient):
    """TRL's client without the group for weights, which needs a GPU."""

    def init_communicator(self, device):
        pass


def client_of(server, kind=BoundClient, seconds=30.0):
    client = type("Client", (kind, InNoGroup), {"request_seconds": seconds, "vocab_size": 8})(base_url=server.url)
    for adapter in client.session.adapters.values():
        adapter.max_retries.backoff_factor = 0
    return client


def paths(server):
    return [path for path, _ in server.asked]


def test_a_server_that_hangs_while_a_trainer_is_made_is_given_up(server, monkeypatch):
    monkeypatch.setattr(module_of_server, "HEALTH_SECONDS", 0.2)
    server.answers["/health"] = [None]
    with pytest.raises(requests.exceptions.ConnectionError, match="can't be reached"):
        client_of(server)


def test_requests_of_the_clients_own_constructor_end_too(server):
    server.answers["/v1/models"] = [None]
    with pytest.raises(requests.exceptions.ReadTimeout):
        client_of(server, seconds=0.2)


LOGPROBS = {"tokens": ["token_id:5", "token_id:6"], "top_logprobs": [{}, {}], "token_logprobs": [-1.0, -2.0]}
CHOICE = {"prompt_token_ids": [3], "token_ids": [5, 6], "logprobs": LOGPROBS}


def beside_a_whole_one(**changes):
    """An answer with two completions. The first is complete, and the second is complete except for `changes`."""
    return 200, json.dumps({"choices": [CHOICE, CHOICE | changes]})


def logprobs_with(**changes):
    return beside_a_whole_one(logprobs=LOGPROBS | changes)


def ids_with(second, name=None):
    return beside_a_whole_one(
        token_ids=[5, second], logprobs=LOGPROBS | {"tokens": ["token_id:5", name or f"token_id:{second}"]}
    )


FIVE_TOKENS = {"tokens": ["token_id:5"] * 5, "top_logprobs": [None] * 5, "token_logprobs": [-1.0] * 5}


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((200, "<html>"), "sent an answer that is not JSON"),
        ((200, "[]"), "returned 0 completions, but 2 were requested"),
        ((200, json.dumps({"choices": [CHOICE]})), "returned 1 completions, but 2 were requested"),
        (beside_a_whole_one(token_ids=[]), "returned 0 tokens with 2 log-probabilities"),
        (beside_a_whole_one(logprobs=None), "returned 2 tokens with 0 log-probabilities"),
        (logprobs_with(token_logprobs=[-1.0]), "returned 2 tokens with 1 log-probabilities"),
        (logprobs_with(top_logprobs=[{}]), "returned 2 tokens with 1 log-probabilities"),
        (logprobs_with(token_logprobs=[-1.0, -9999.0]), "returned the log-probability -9999 for a token"),
        (logprobs_with(token_logprobs=[math.nan, 0.5]), "returned the log-probability 0.5 for a token"),
        # TRL trains with this value if it names the token.
        (logprobs_with(top_logprobs=[{}, {"token_id:6": -9999.0}]), "returned the log-probability -9999 for a token"),
        (
            logprobs_with(top_logprobs=[{}, {"token_id:6": -30.0}]),
            "returned the log-probabilities -2 and -30 for a token",
        ),
        (
            logprobs_with(top_logprobs=[{}, {"token_id:7": -0.1}]),
            "returned log-probabilities of 2 tokens for the sampled token 6",
        ),
        (ids_with(6, name="token_id:7"), "returned log-probabilities of token_id:7 for the sampled token 6"),
        (ids_with(8), "returned 8, which is not a token of a vocabulary of 8"),
        (ids_with(-1), "returned -1, which is not a token of a vocabulary of 8"),
        (ids_with("6"), "returned '6', which is not a token of a vocabulary of 8"),
        (beside_a_whole_one(prompt_token_ids=[4]), "returned completions of another prompt than the requested one"),
        (
            beside_a_whole_one(token_ids=[5] * 5, logprobs=FIVE_TOKENS),
            "returned 5 tokens, but at most 4 were requested",
        ),
        (
            (200, json.dumps({"choices": [CHOICE, None]})),
            r"sent an answer that does not have vLLM's format \(TypeError",
        ),
        ((200, json.dumps({"choices": [CHOICE, {}]})), r"sent an answer that does not have .*'prompt_token_ids'"),
        ((400, "too long"), r"refused a request \(Request failed: 400, too long\)"),
        ((500, "no"), "is gone"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_an_answer_that_cannot_be_trained_on_names_server_and_checkpoint(server, tmp_path, answer, said):
    server.answers["/v1/completions"] = [answer]
    args = tiny_config(tmp_path / "run", vllm_server_base_url=server.url)
    checkpoint = tmp_path / "run" / "checkpoint-3"
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer_state.json").write_text("{}")
    client = client_of(server)
    with pytest.raises(RuntimeError, match=f"{server.url} {said}.*resume from {checkpoint}"):
        with naming_lost_server(args):
            client.generate([[3]], n=2, max_tokens=4)


def test_a_whole_answer_is_trls(server):
    server.answers["/v1/completions"] = [(200, json.dumps({"choices": [CHOICE] * 2}))]
    output = client_of(server).generate([[3]], n=2, max_tokens=4)
    assert output["completion_ids"] == [[5, 6], [5, 6]]
    assert output["logprobs"] == [[[-1.0], [-2.0]]] * 2
    logprobs = LOGPROBS | {"token_logprobs": [-1.0, 0.0], "top_logprobs": [{}, {"token_id:6": -1e-3}]}
    server.answers["/v1/completions"] = [(200, json.dumps({"choices": [CHOICE | {"logprobs": logprobs}]}))]
    assert client_of(server).generate([[3]], n=1, max_tokens=4)["logprobs"] == [[[-1.0], [-1e-3]]]


def completes_within_12(handler):
    """Complete a prompt of n tokens with repetitions of the token n % 8, in a context of 12 tokens."""
    prompts, max_tokens = handler.body["prompt"], handler.body["max_tokens"]
    choices = []
    for ids in prompts:
        token, logprobs = len(ids) % 8, {"token_logprobs": [-1.0] * max_tokens, "top_logprobs": [None] * max_tokens}
        logprobs["tokens"] = [f"token_id:{token}"] * max_tokens
        choices.append({"prompt_token_ids": ids, "token_ids": [token] * max_tokens, "logprobs": logprobs})
    is_too_long = not max_tokens or max(map(len, prompts)) + max_tokens > 12
    text = json.dumps({"choices": choices})
    handler.send_response(400 if is_too_long else 200)
    handler.send_header("Content-Length", str(len(text)))
    handler.end_headers()
    handler.wfile.write(text.encode())


def test_behind_tool_calls_a_prompt_is_asked_for_the_tokens_that_the_context_has_left(server):
    models = {"data": [{"id": "base", "root": "/models/base", "max_model_len": 12}]}
    server.answers |= {"/v1/models": [(200, json.dumps(models))], "/v1/completions": [completes_within_12]}
    client = client_of(server)
    prompts = [[3] * length for length in (8, 3, 12, 6, 8)]
    with pytest.raises(ServerFault, match="refused a request"):  # a first turn has the room that was set
        client.generate(prompts, n=1, max_tokens=6)
    client.in_tool_turns = True
    for some in ([9], [9, 10]):
        answered = client.generate([[3] * n for n in some], n=1, max_tokens=6)["completion_ids"]
        assert answered == [[n % 8] * (12 - n) for n in some]
    output = client.generate(prompts=prompts, features=None, n=1, max_tokens=6)
    assert output["prompt_ids"] == prompts
    assert output["completion_ids"] == [[0] * 4, [3] * 6, [], [6] * 6, [0] * 4]
    assert output["logprobs"] == [[[-1.0]] * len(ids) for ids in output["completion_ids"]]
    asked = [(len(body["prompt"]), body["max_tokens"]) for path, body in server.asked if path == "/v1/completions"]
    assert sorted(asked[4:]) == [(1, 4), (1, 4), (1, 6), (1, 6)]


def info(instance, num_processes=1):
    config = {"instance_id": instance, "parallel_config": {"_api_process_count": num_processes}}
    return 200, json.dumps({"vllm_config": config})


@pytest.mark.parametrize("afterwards", [info("2"), (404, "")], ids=["with its endpoints", "without"])
def test_a_server_that_was_started_again_has_not_the_weights_that_it_was_sent(server, tmp_path, afterwards):
    server.answers["/v1/completions"] = [(200, json.dumps({"choices": [CHOICE] * 2}))]
    server.answers["/server_info"] = [info("1"), info("1"), afterwards]
    args = tiny_config(tmp_path / "run", vllm_server_base_url=server.url)
    client = client_of(server)
    client.init_communicator(device=0)
    assert len(client.generate([[3]], n=2, max_tokens=4)["completion_ids"]) == 2
    with pytest.raises(RuntimeError, match=f"{server.url} was restarted .*start over"):
        with naming_lost_server(args):
            client.generate([[3]], n=2, max_tokens=4)


@pytest.mark.parametrize(
    "infos",
    [[(404, "")], [(200, '{"vllm_config": {}}')], [info("1", 2), info("2", 2)]],
    ids=["no endpoint", "no name", "two processes behind one port"],
)
def test_a_server_that_does_not_say_who_it_is_samples_as_ever(server, infos):
    server.answers["/v1/completions"] = [(200, json.dumps({"choices": [CHOICE] * 2}))]
    server.answers["/server_info"] = infos
    client = client_of(server)
    client.init_communicator(device=0)
    assert len(client.generate([[3]], n=2, max_tokens=4)["completion_ids"]) == 2


@pytest.mark.parametrize("again", [(200, ""), (400, "'trl-policy-v1' has already been loaded")])
def test_an_adapter_is_handed_over_again_after_one_error_or_a_lost_answer(server, tmp_path, again):
    server.answers["/v1/load_lora_adapter"] = [(500, "busy"), again]
    client = client_of(server, AdapterClient)
    client.serve_adapter("trl-policy-v1", tmp_path)
    assert client.model == "trl-policy-v1"
    assert paths(server).count("/v1/load_lora_adapter") == 2
    server.answers["/v1/completions"] = [(200, json.dumps({"choices": [CHOICE]}))]
    asked = {"prompts": [[3]], "n": 1, "max_tokens": 4, "generation_kwargs": {"seed": 7}}
    assert client.submit_request(call, **asked).result()["completion_ids"] == [[5, 6]]
    assert [server.asked[-1][1][name] for name in ("model", "seed")] == ["trl-policy-v1", 7]


def test_an_adapter_that_the_server_never_takes_ends_the_run_with_what_it_said(server, tmp_path):
    server.answers["/v1/load_lora_adapter"] = [(500, "out of memory")]
    args = tiny_config(tmp_path / "run", vllm_server_base_url=server.url)
    client = client_of(server, AdapterClient)
    with pytest.raises(RuntimeError, match=f"{server.url} refused the adapter: out of memory.*start over"):
        with naming_lost_server(args):
            client.serve_adapter("trl-policy-v1", tmp_path)


def test_an_adapter_that_a_hung_server_does_not_forget_is_asked_for_again(server, tmp_path, monkeypatch):
    monkeypatch.setattr(lora_client, "UNLOAD_SECONDS", 1.0)
    server.answers["/v1/unload_lora_adapter"] = [None, (200, "")]
    client = client_of(server, AdapterClient)
    for version in (1, 2, 3):
        client.serve_adapter(f"v{version}", tmp_path / f"v{version}")
    unloaded = [body["lora_name"] for path, body in server.asked if path == "/v1/unload_lora_adapter"]
    assert unloaded == ["v1", "v2", "v1"]


def test_a_request_that_failed_unloads_nothing(server, tmp_path):
    """The server may hang, and Ctrl-C must not wait for it."""
    client = client_of(server, AdapterClient)
    for version in (1, 2):
        client._in_flight["v1"] += version == 1  # as if a round of it were in progress
        client.serve_adapter(f"v{version}", tmp_path / f"v{version}")
    client._in_flight.clear()
    server.answers["/v1/completions"] = [(400, "no")]
    with pytest.raises(Exception, match="Request failed: 400"):
        client.generate([[3]], n=2, max_tokens=4)
    assert "/v1/unload_lora_adapter" not in paths(server)


def test_what_a_killed_run_of_the_same_folder_left_is_cleared(server, tmp_path):
    ours, theirs = tmp_path / "a" / "_vllm_lora", tmp_path / "b" / "_vllm_lora"
    adapters = [{"id": f"trl-policy-{root.parent.name}", "root": str(root / "v7")} for root in (ours, theirs)]
    server.answers["/v1/models"] = [(200, json.dumps({"data": [{"id": "base", "root": "/models/base"}, *adapters]}))]
    for root in (ours, theirs):
        (root / "v7").mkdir(parents=True)
    client_of(server, AdapterClient).clear(ours)
    assert [body["lora_name"] for path, body in server.asked if path == "/v1/unload_lora_adapter"] == ["trl-policy-a"]
    assert not ours.exists()
    assert theirs.exists()

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Requests to a server that hangs, fails or is given up, over real sockets. `requests` comes with vLLM."""

import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest


requests = pytest.importorskip("requests")

from requests.adapters import HTTPAdapter  # noqa: E402
from urllib3.util.retry import Retry  # noqa: E402

from trl_dapo.engines.http_session import TimedAdapter  # noqa: E402


@pytest.fixture
def server():
    """Answers each request with the next of its `statuses`; `None` hangs until the test ends."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status = self.server.statuses.pop(0)
            self.server.asked.release()
            if status is None:
                self.server.over.wait()
                return
            self.send_response(status)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.statuses, server.asked, server.over = [], threading.Semaphore(0), threading.Event()
    server.url = f"http://127.0.0.1:{server.server_port}/"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.over.set()
    server.shutdown()
    server.server_close()


def session_with(timeout):
    """As TRL's client makes it, but for the pauses between its retries."""
    session = requests.Session()
    session.trust_env = False
    retries = Retry(total=5, connect=5, read=5, status=3, status_forcelist=[503], allowed_methods=["POST"])
    session.mount("http://", TimedAdapter(HTTPAdapter(max_retries=retries, pool_maxsize=64), timeout))
    return session


def test_a_server_that_hangs_is_given_up_after_the_timeout_and_not_asked_again(server):
    session = session_with(0.2)
    server.statuses = [None, 200]
    with pytest.raises(requests.exceptions.ReadTimeout):
        session.post(server.url, json={})
    assert server.statuses == [200]


def test_a_request_may_say_otherwise(server):
    session = session_with(1000.0)
    server.statuses = [None]
    with pytest.raises(requests.exceptions.ReadTimeout):
        session.post(server.url, json={}, timeout=0.2)


def test_what_trl_retries_is_retried(server):
    session = session_with(1000.0)
    server.statuses = [503, 503, 200]
    assert session.post(server.url, json={}).status_code == 200
    assert server.statuses == []


def test_a_request_under_way_ends_when_its_session_is_closed_and_is_not_sent_again(server):
    session = session_with(1000.0)
    server.statuses = [None, 200]
    with ThreadPoolExecutor(1) as executor:
        call = executor.submit(session.post, server.url, json={})
        assert server.asked.acquire(timeout=30)
        session.close()
        with pytest.raises(requests.exceptions.ConnectionError):
            call.result(timeout=30)
    assert server.statuses == [200]
    assert session.post(server.url, json={}).status_code == 200

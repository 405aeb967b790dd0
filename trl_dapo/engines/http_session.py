# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""HTTP adapter for the session of TRL's client. The packages that it needs come with vLLM."""

import contextlib
import socket
import threading
from collections.abc import Callable
from concurrent.futures import wait
from functools import partial
from typing import Any, Self
from weakref import WeakSet

from requests import PreparedRequest, Response
from requests.adapters import HTTPAdapter
from requests.exceptions import ChunkedEncodingError, ConnectionError, ReadTimeout, RequestException
from urllib3 import HTTPConnectionPool
from urllib3.exceptions import ReadTimeoutError
from urllib3.util.retry import Retry

from .call import MAX_CALLS, call


class RetryUnlessTimeout(Retry):
    """
    Retries requests that did not reach the server. It does not retry requests that the server did not answer in time,
    since the server would then process them twice.
    """

    def increment(
        self, method: Any = None, url: Any = None, response: Any = None, error: Any = None, *args: Any, **kwargs: Any
    ) -> Self:
        if isinstance(error, ReadTimeoutError):
            raise error
        return super().increment(method, url, response, error, *args, **kwargs)


class TimedAdapter(HTTPAdapter):
    """An adapter whose requests must be answered completely within `timeout` seconds, including repetitions."""

    def __init__(self, adapter: HTTPAdapter, timeout: float) -> None:
        self.timeout = timeout
        self.num_closings = self._num_late = 0
        self._lock = threading.Lock()
        self._pools: WeakSet[HTTPConnectionPool] = WeakSet()
        self._connections: WeakSet = WeakSet()
        self.__setstate__({**adapter.__getstate__(), "_pool_maxsize": MAX_CALLS})
        retries = RetryUnlessTimeout.__new__(RetryUnlessTimeout)
        retries.__dict__.update(adapter.max_retries.__dict__)
        self.max_retries = retries

    def send(self, request: PreparedRequest, stream: bool = False, timeout: Any = None, **kwargs: Any) -> Response:
        seconds, num_late = self.timeout if timeout is None else timeout, self._num_late
        late = ReadTimeout(f"no complete answer within {seconds:g} s", request=request)
        send = partial(super().send, request, stream=stream, timeout=seconds, **kwargs)
        answer = call(partial(self._send_completely, send))
        try:
            if not wait([answer], seconds).done:
                self._num_late += 1
                raise late
            return answer.result()
        except RequestException:
            if self._num_late > num_late:  # this request or another was late, which ends all requests in progress
                raise late from None
            raise
        finally:
            if not answer.done():
                self.close()

    def _send_completely(self, send: Callable[[], Response], is_last: bool = False) -> Response:
        """Send a request and return the complete answer. If the answer breaks off, send the request once more."""
        closings, response = self.num_closings, send()
        try:
            _ = response.content
        except ChunkedEncodingError:
            if is_last or self.num_closings > closings:
                raise
            return self._send_completely(send, is_last=True)
        if self.num_closings > closings:  # an answer that ends within its headers looks like an empty one
            raise ConnectionError("the session was closed while the request was in progress")
        return response

    def get_connection_with_tls_context(self, *args: Any, **kwargs: Any) -> HTTPConnectionPool:
        pool = super().get_connection_with_tls_context(*args, **kwargs)
        # Only the thread that waits for an answer knows its connection. Record it, so that others can close it.
        pool.ConnectionCls = partial(self._note, type(pool).ConnectionCls)
        self._pools.add(pool)
        return pool

    def _note(self, make: Any, **kwargs: Any) -> Any:
        connection = make(**kwargs)
        with self._lock:
            self._connections.add(connection)
        return connection

    def close(self) -> None:
        """Close the adapter, and end requests in progress with an error. Later requests work as before."""
        self.num_closings += 1
        super().close()
        for pool in list(self._pools):
            pool.close()  # so that requests are not sent again
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            with contextlib.suppress(OSError, AttributeError):  # already closed
                connection.sock.shutdown(socket.SHUT_RDWR)

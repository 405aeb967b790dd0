# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""An adapter for the session of TRL's client, whose packages come with vLLM."""

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

from .call import MOST, call


class OneWait(Retry):
    """Retries what did not come to the server, and not what it did not answer in time: it would work on it twice."""

    def increment(
        self, method: Any = None, url: Any = None, response: Any = None, error: Any = None, *args: Any, **kwargs: Any
    ) -> Self:
        if isinstance(error, ReadTimeoutError):
            raise error
        return super().increment(method, url, response, error, *args, **kwargs)


class TimedAdapter(HTTPAdapter):
    """An adapter of a session whose requests have `timeout` seconds for a whole answer, repetitions included."""

    def __init__(self, adapter: HTTPAdapter, timeout: float) -> None:
        self.timeout = timeout
        self.num_closings = self._num_late = 0
        self._lock = threading.Lock()
        self._pools: WeakSet[HTTPConnectionPool] = WeakSet()
        self._connections: WeakSet = WeakSet()
        self.__setstate__({**adapter.__getstate__(), "_pool_maxsize": MOST})
        retries = OneWait.__new__(OneWait)
        retries.__dict__.update(adapter.max_retries.__dict__)
        self.max_retries = retries

    def send(self, request: PreparedRequest, stream: bool = False, timeout: Any = None, **kwargs: Any) -> Response:
        seconds, num_late = self.timeout if timeout is None else timeout, self._num_late
        late = ReadTimeout(f"no whole answer in {seconds:g} s", request=request)
        answer = call(partial(self._whole, partial(super().send, request, stream=stream, timeout=seconds, **kwargs)))
        try:
            if not wait([answer], seconds).done:
                self._num_late += 1
                raise late
            return answer.result()
        except RequestException:
            if self._num_late > num_late:  # of this one or another, with which all under way are ended
                raise late from None
            raise
        finally:
            if not answer.done():
                self.close()

    def _whole(self, send: Callable[[], Response], is_last: bool = False) -> Response:
        """Return a complete answer. A request whose answer breaks off is sent once more."""
        closings, response = self.num_closings, send()
        try:
            _ = response.content
        except ChunkedEncodingError:
            if is_last or self.num_closings > closings:
                raise
            return self._whole(send, is_last=True)
        if self.num_closings > closings:  # an end in the middle of headers looks like that of an empty answer
            raise ConnectionError("the session was closed while it was under way")
        return response

    def get_connection_with_tls_context(self, *args: Any, **kwargs: Any) -> HTTPConnectionPool:
        pool = super().get_connection_with_tls_context(*args, **kwargs)
        # Only the thread that waits for an answer knows its connection: note it.
        pool.ConnectionCls = partial(self._note, type(pool).ConnectionCls)
        self._pools.add(pool)
        return pool

    def _note(self, make: Any, **kwargs: Any) -> Any:
        connection = make(**kwargs)
        with self._lock:
            self._connections.add(connection)
        return connection

    def close(self) -> None:
        """Ends requests under way too, each with an error; later ones are made as ever."""
        self.num_closings += 1
        super().close()
        for pool in list(self._pools):
            pool.close()  # so that nothing is sent again
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            with contextlib.suppress(OSError, AttributeError):  # closed already
                connection.sock.shutdown(socket.SHUT_RDWR)

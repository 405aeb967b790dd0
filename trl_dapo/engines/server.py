# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Requests to the vLLM server that end: after a time, or when they are interrupted."""

import contextlib
import socket
import threading
from typing import TYPE_CHECKING, Any

from requests import PreparedRequest, Response
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.exceptions import ProtocolError, ReadTimeoutError
from urllib3.util.retry import Retry


if TYPE_CHECKING:
    from urllib3.response import BaseHTTPResponse


class ServerAdapter(HTTPAdapter):
    """
    Stands in for one of the adapters of a `requests.Session`, with its retries and its pool, and with an end.

    A request whose answer does not come within `timeout` is not sent again: the server would work on it twice.

    Args:
        adapter ([`~requests.adapters.HTTPAdapter`]):
            The one to stand in for.
        timeout (`float`):
            Seconds that a request waits for the server, where it says nothing else.
    """

    def __init__(self, adapter: HTTPAdapter, timeout: float) -> None:
        self._timeout = timeout
        self._sockets: set[socket.socket] = set()
        self._interrupted = threading.Event()
        self.__setstate__(adapter.__getstate__())
        self.max_retries = _that_ends(adapter.max_retries, self._interrupted)

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        super().init_poolmanager(*args, **kwargs)
        # Only the thread that waits for an answer knows its connection: note its socket.
        self.poolmanager.pool_classes_by_scheme = {
            "http": _noting(HTTPConnectionPool, HTTPConnection, self._sockets, self._interrupted),
            "https": _noting(HTTPSConnectionPool, HTTPSConnection, self._sockets, self._interrupted),
        }

    def send(
        self, request: PreparedRequest, stream: bool = False, timeout: float | None = None, **kwargs: Any
    ) -> Response:
        return super().send(request, stream=stream, timeout=self._timeout if timeout is None else timeout, **kwargs)

    def interrupt(self) -> None:
        """Ends the requests that wait for an answer, each with an error in its thread; later ones are not touched."""
        self._interrupted.set()
        for open_socket in list(self._sockets):
            with contextlib.suppress(OSError):  # closed already
                open_socket.shutdown(socket.SHUT_RDWR)
        self._sockets.clear()

    def resume(self) -> None:
        """Lets requests wait and be sent again after [`ServerAdapter.interrupt`]."""
        self._interrupted.clear()


def _noting(pool_class: type, connection_class: Any, sockets: set, interrupted: threading.Event) -> type:
    class Connection(connection_class):
        def connect(self) -> None:
            super().connect()
            sockets.add(self.sock)
            if interrupted.is_set():
                raise ProtocolError("The request was interrupted.")

        def close(self) -> None:
            sockets.discard(self.sock)
            super().close()

    return type(pool_class.__name__, (pool_class,), {"ConnectionCls": Connection})


def _that_ends(retry: Retry, interrupted: threading.Event) -> Retry:
    """As `retry`, but for answers that did not come in time and for requests that were interrupted."""

    kind: Any = type(retry)  # the session's may be of a subclass

    class Ending(kind):
        def increment(
            self,
            method: str | None = None,
            url: str | None = None,
            response: "BaseHTTPResponse | None" = None,
            error: Exception | None = None,
            *args: Any,
            **kwargs: Any,
        ) -> Retry:
            if isinstance(error, ReadTimeoutError):
                raise error
            if interrupted.is_set():
                raise ProtocolError("The request was interrupted.")
            return super().increment(method, url, response, error, *args, **kwargs)

        def sleep(self, response: "BaseHTTPResponse | None" = None) -> None:
            interrupted.wait(self.get_backoff_time())

    retry = retry.new()
    retry.__class__ = Ending  # what `new` makes of it is of its class again
    return retry

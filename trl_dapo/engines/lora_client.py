# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The client of a vLLM server that serves LoRA adapters, each version under a name of its own."""

import atexit
import contextlib
import shutil
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .server import BoundClient, ServerFault


UNLOAD_SECONDS = 5  # maximum time that a server may take to unload an adapter


class AdapterRefused(ServerFault):
    """Raised if the server cannot load an adapter. The message says what to do about it."""


class AdapterClient(BoundClient):
    """Mixed into the class of TRL's `VLLMClient`, to request completions from an adapter."""

    # Each request names the adapter that was loaded last. An earlier adapter stays on the server until no request in
    # flight names it any more, so that a request ends with the adapter with which it began.

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._in_flight: Counter[str | None] = Counter()  # number of requests that name each adapter
        self._adapters: dict[str, Path] = {}  # adapters on the server, by name
        self._lock = threading.Lock()
        super().__init__(*args, **kwargs)
        atexit.register(self._clean_up)

    def check_server(self, *args: Any, **kwargs: Any) -> None:
        from .http_session import TimedAdapter  # its packages come with vLLM

        super().check_server(*args, **kwargs)
        # Loading an adapter is retried like other requests, but the text of the last error response is needed.
        self._load_url = f"{self.base_url}/v1/load_lora_adapter"
        adapter = TimedAdapter(self.session.get_adapter(self._load_url), self.request_seconds)
        adapter.max_retries.raise_on_status = False
        self.session.mount(self._load_url, adapter)

    def init_communicator(self, device: torch.device | str | int = 0) -> None:
        """Do nothing. No group for pushing weights is needed, since only the adapter is sent."""

    def serve_adapter(self, name: str, path: Path) -> None:
        """Load an adapter on the server, and name it in every request from now on."""
        response = self.session.post(self._load_url, json={"lora_name": name, "lora_path": str(path)})
        if response.status_code == 404 and name not in response.text:
            raise AdapterRefused(
                "cannot load adapters while it runs. Restart it with `VLLM_ALLOW_RUNTIME_LORA_UPDATING=True` in its "
                "environment"
            )
        if response.status_code == 404:
            raise AdapterRefused(
                f"cannot read the adapter in {path}. Set an `output_dir` that has the same path on both machines"
            )
        # It may already be loaded, if the answer to the request was lost and the request was sent again.
        if response.status_code != 200 and "already been loaded" not in response.text:
            raise AdapterRefused(f"refused the adapter: {response.text}")
        with self._lock:
            self._adapters[name] = path
            self.model = name
        self._unload_unnamed()

    def submit_request(self, call: Callable[[Callable], Future], **arguments: Any) -> Future:
        """Submit a request that names the present adapter, which stays loaded until the request has ended."""
        name, kwargs = self.model, arguments["generation_kwargs"] or {}
        with self._lock:
            self._in_flight[name] += 1
        request = super().submit_request(call, **{**arguments, "generation_kwargs": {**kwargs, "model": name}})
        request.add_done_callback(partial(self._release, name))
        return request

    def _release(self, name: str, request: Future) -> None:
        with self._lock:
            self._in_flight[name] -= 1
        if not request.cancelled() and request.exception() is None:  # after an error the server may hang
            self._unload_unnamed()

    def _post(self, url: str, **kwargs: Any) -> dict:
        named = (kwargs.get("json") or {}).get("model")
        with self._lock:
            self._in_flight[named] += 1
        try:
            answer = super()._post(url, **kwargs)
        finally:
            with self._lock:
                self._in_flight[named] -= 1
        self._unload_unnamed()  # not after an error: the server may hang
        return answer

    def _unload_unnamed(self) -> None:
        """Unload every adapter that is not the present one and that no request in flight names."""
        with self._lock:
            idle = [name for name in self._adapters if name != self.model and not self._in_flight[name]]
            paths = [self._adapters.pop(name) for name in idle]
        for name, path in zip(idle, paths, strict=True):
            try:
                self._unload(name, path)
            except OSError:  # try again later
                with self._lock:
                    self._adapters[name] = path

    def clear(self, root: Path) -> None:
        """Remove the adapters that a killed run left behind in a folder and on the server."""
        for model in self.session.get(f"{self.base_url}/v1/models").json()["data"]:
            if Path(model.get("root") or "").parent == root:
                self._unload(model["id"], root / model["id"])
        shutil.rmtree(root, ignore_errors=True)

    def _unload(self, name: str, path: Path) -> None:
        import requests  # comes with vLLM

        # The status is not checked: a server that was restarted does not have the adapter.
        requests.post(f"{self.base_url}/v1/unload_lora_adapter", json={"lora_name": name}, timeout=UNLOAD_SECONDS)
        shutil.rmtree(path, ignore_errors=True)

    def _clean_up(self) -> None:
        """Remove all adapters from the server and from the disk."""
        with contextlib.suppress(OSError):  # the server may be gone
            for name, path in self._adapters.items():
                self._unload(name, path)
        for path in self._adapters.values():
            shutil.rmtree(path, ignore_errors=True)
            with contextlib.suppress(OSError):  # it may contain another adapter
                path.parent.rmdir()

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The client of a vLLM server that serves LoRA adapters, each under a name of its own."""

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


UNLOAD_SECONDS = 5  # that a server may take to forget an adapter


class AdapterRefused(ServerFault):
    """The server's answer to an adapter that it could not load, with what to do about it."""


class AdapterClient(BoundClient):
    """Mixin for TRL's `VLLMClient` that requests completions of an adapter."""

    # Requests name the adapter that was served last. An earlier one stays on the server until no request names it any
    # more, so that a rollout in flight ends with the adapter it began with.

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._in_flight: Counter[str | None] = Counter()  # requests that name an adapter
        self._adapters: dict[str, Path] = {}  # on the server, by name
        self._lock = threading.Lock()
        super().__init__(*args, **kwargs)
        atexit.register(self._leave)

    def check_server(self, *args: Any, **kwargs: Any) -> None:
        from .http_session import TimedAdapter  # its packages come with vLLM

        super().check_server(*args, **kwargs)
        # An error is tried again as any other, but its text is wanted.
        self._load_url = f"{self.base_url}/v1/load_lora_adapter"
        adapter = TimedAdapter(self.session.get_adapter(self._load_url), self.request_seconds)
        adapter.max_retries.raise_on_status = False
        self.session.mount(self._load_url, adapter)

    def init_communicator(self, device: torch.device | str | int = 0) -> None:
        """Joins no group: an adapter needs none."""

    def serve_adapter(self, name: str, path: Path) -> None:
        """Load an adapter, and name it in every request from now on."""
        response = self.session.post(self._load_url, json={"lora_name": name, "lora_path": str(path)})
        if response.status_code == 404 and name not in response.text:
            raise AdapterRefused(
                "loads no adapters while it runs. Restart it with `VLLM_ALLOW_RUNTIME_LORA_UPDATING=True` in its "
                "environment"
            )
        if response.status_code == 404:
            raise AdapterRefused(
                f"cannot read the adapter in {path}. Set an `output_dir` that both see under one path"
            )
        # Loaded already: by a request whose answer was lost, and which was sent again.
        if response.status_code != 200 and "already been loaded" not in response.text:
            raise AdapterRefused(f"does not take the adapter: {response.text}")
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
        request.add_done_callback(partial(self._let_go, name))
        return request

    def _let_go(self, name: str, request: Future) -> None:
        with self._lock:
            self._in_flight[name] -= 1
        if not request.cancelled() and request.exception() is None:  # else the server may hang
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
        """Unloads every adapter but the present one that no request in flight names."""
        with self._lock:
            idle = [name for name in self._adapters if name != self.model and not self._in_flight[name]]
            paths = [self._adapters.pop(name) for name in idle]
        for name, path in zip(idle, paths, strict=True):
            try:
                self._unload(name, path)
            except OSError:  # to be unloaded later
                with self._lock:
                    self._adapters[name] = path

    def clear(self, root: Path) -> None:
        """Forgets the adapters of a folder, which a run that was killed left behind, there and on the server."""
        for model in self.session.get(f"{self.base_url}/v1/models").json()["data"]:
            if Path(model.get("root") or "").parent == root:
                self._unload(model["id"], root / model["id"])
        shutil.rmtree(root, ignore_errors=True)

    def _unload(self, name: str, path: Path) -> None:
        import requests  # comes with vLLM

        # A server that was started again has forgotten it, which is as well.
        requests.post(f"{self.base_url}/v1/unload_lora_adapter", json={"lora_name": name}, timeout=UNLOAD_SECONDS)
        shutil.rmtree(path, ignore_errors=True)

    def _leave(self) -> None:
        """Leaves nothing behind, on the server or on the disk."""
        with contextlib.suppress(OSError):  # the server may be gone
            for name, path in self._adapters.items():
                self._unload(name, path)
        for path in self._adapters.values():
            shutil.rmtree(path, ignore_errors=True)
            with contextlib.suppress(OSError):  # another adapter is in it
                path.parent.rmdir()

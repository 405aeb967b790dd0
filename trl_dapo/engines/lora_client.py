# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The client of a vLLM server that serves LoRA adapters, each under a name of its own."""

import atexit
import contextlib
import shutil
import threading
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch


if TYPE_CHECKING:
    from trl.generation.vllm_client import VLLMClient as ClientBase
else:
    ClientBase = object  # TRL's client, once this is mixed into its class


class AdapterRefused(Exception):
    """The server's answer to an adapter that it could not load, with what to do about it."""


class AdapterClient(ClientBase):
    """
    What a [`~trl.generation.vllm_client.VLLMClient`] needs beside it to ask for an adapter: mixed into its class.

    Requests name the adapter that was served last. One that was asked for before stays on the server until no request
    names it any more, so that a rollout in flight ends with the adapter it began with.
    """

    request_seconds: float | None = None  # that the server may take to load an adapter, or to say how it was started

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._in_flight: Counter[str | None] = Counter()  # requests that name an adapter
        self._adapters: dict[str, Path] = {}  # on the server, by name
        self._lock = threading.Lock()
        super().__init__(*args, **kwargs)
        atexit.register(self._leave)

    def init_communicator(self, device: torch.device | str | int = 0) -> None:
        """Joins no group: an adapter needs none."""

    def join_group(self, device: torch.device | str | int) -> None:
        """As TRL's client does at once: for weights that are merged."""
        super().init_communicator(device)

    def server_config(self) -> dict:
        """What the server was started with."""
        url = f"{self.base_url}/server_info"
        response = self.session.get(url, params={"config_format": "json"}, timeout=self.request_seconds)
        if response.status_code == 404:
            raise RuntimeError(
                f"The vLLM server at {self.base_url} does not say how it was started. Restart it with "
                "`VLLM_SERVER_DEV_MODE=1` in its environment."
            )
        response.raise_for_status()
        return response.json()["vllm_config"]

    def serve_adapter(self, name: str, path: Path) -> None:
        """Loads an adapter and asks for it from now on."""
        import requests  # comes with vLLM

        # Not through the session, which would try again what the server answered with an error, and then lose it.
        url = f"{self.base_url}/v1/load_lora_adapter"
        response = requests.post(url, json={"lora_name": name, "lora_path": str(path)}, timeout=self.request_seconds)
        if response.status_code == 404 and name not in response.text:
            raise AdapterRefused(
                f"the vLLM server at {self.base_url} loads no adapters while it runs. Restart it with "
                "`VLLM_ALLOW_RUNTIME_LORA_UPDATING=True` in its environment"
            )
        if response.status_code == 404:
            raise AdapterRefused(
                f"the vLLM server at {self.base_url} cannot read the adapter in {path}. Set an `output_dir` that both "
                "see under one path"
            )
        if response.status_code != 200:
            raise AdapterRefused(f"the vLLM server at {self.base_url} does not take the adapter: {response.text}")
        with self._lock:
            self._adapters[name] = path
            self.model = name
        self._unload_unnamed()

    def _post(self, url: str, **kwargs: Any) -> dict:
        named = (kwargs.get("json") or {}).get("model")
        with self._lock:
            self._in_flight[named] += 1
        try:
            return super()._post(url, **kwargs)
        finally:
            with self._lock:
                self._in_flight[named] -= 1
            self._unload_unnamed()

    def _unload_unnamed(self) -> None:
        """Unloads every adapter but the present one that no request in flight names."""
        with self._lock:
            idle = [name for name in self._adapters if name != self.model and not self._in_flight[name]]
            paths = [self._adapters.pop(name) for name in idle]
        for name, path in zip(idle, paths, strict=True):
            self._unload(name, path)

    def _unload(self, name: str, path: Path) -> None:
        import requests

        # A server that was started again has forgotten it, which is as well.
        requests.post(f"{self.base_url}/v1/unload_lora_adapter", json={"lora_name": name}, timeout=60)
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

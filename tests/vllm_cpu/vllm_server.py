# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""A real vLLM server on this machine's CPU."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace


HOST = "127.0.0.1"
START_TIMEOUT = 240  # seconds; about 20 on a quiet machine
CLOSE = 1e-4  # float32 on both sides: measured errors are about 1e-6


def errors(report: dict, *, updated: bool) -> list[float]:
    """
    The reference: vLLM's log-probabilities compared with those of the trained model, before or after the first update.
    """
    return [call["error"] for call in report["calls"] if (call["step"] > 0) == updated]


def cpu_environment(*path: Path) -> dict[str, str]:
    """Environment of a process that runs vLLM on the CPU. `path` is searched first for imports."""
    path = [*map(str, path), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",  # with two threads in one process, throughput sometimes collapses
        "PYTHONPATH": os.pathsep.join(path),
        "VLLM_CPU_CI_ENV": "1",  # no compilation, neither by inductor nor
        "TORCH_COMPILE_DISABLE": "1",  # otherwise
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # no separate process for the worker, since each imports vLLM
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def on_server(server: SimpleNamespace, **settings) -> dict:
    """Settings of a run that samples from `server`."""
    return {"vllm_mode": "server", "vllm_server_base_url": server.url, "vllm_server_timeout": 60, **settings}


@contextmanager
def vllm_server(model: str, log: Path) -> Iterator[SimpleNamespace]:
    """Serve `model` and LoRA adapters of rank 8 within a block. Weights cannot be pushed, since that needs NCCL."""
    port = free_port()
    # Not `vllm serve`, which searches for a distribution named vllm. This one is named vllm-cpu.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--dtype", "float32"]
    command += ["--host", HOST, "--port", str(port), "--max-model-len", "128"]
    command += ["--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1", "--generation-config", "vllm"]
    command += ["--enable-lora", "--max-lora-rank", "8", "--max-loras", "3"]
    environment = {
        **cpu_environment(),
        "VLLM_SERVER_DEV_MODE": "1",  # the endpoint for the server's settings
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "VLLM_HOST_IP": HOST,
    }
    with (
        log.open("w") as output,
        subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        ) as process,
    ):
        try:
            _wait_until_healthy(process, port, log)
            yield SimpleNamespace(url=f"http://{HOST}:{port}")
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=30)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # the engine is a process of its own


def _wait_until_healthy(process: subprocess.Popen, port: int, log: Path):
    deadline = time.monotonic() + START_TIMEOUT
    while True:
        try:
            with urllib.request.urlopen(f"http://{HOST}:{port}/health", timeout=10):
                return
        except OSError as error:
            if time.monotonic() > deadline:
                raise TimeoutError(f"No server after {START_TIMEOUT} s:\n{log.read_text()[-5000:]}") from error
        with contextlib.suppress(subprocess.TimeoutExpired):
            raise RuntimeError(f"The server ended with {process.wait(timeout=0.5)}:\n{log.read_text()[-5000:]}")

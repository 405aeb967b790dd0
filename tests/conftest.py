# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""What tests of several folders share. Fixtures import what they need: `pytest -m fast` is not to wait for TRL."""

import json
import os
from unittest.mock import patch


# Before torch and the hub client are imported: tests touch no network, and small models gain nothing from threads.
os.environ.update(HF_HUB_OFFLINE="1", TRL_EXPERIMENTAL_SILENCE="1", TOKENIZERS_PARALLELISM="false")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest


def pytest_ignore_collect(collection_path, config):
    """With `-m fast`, only files that say `mark.fast` are imported: the imports of all take longer than the tests."""
    if config.option.markexpr != "fast":
        return None
    files = [collection_path] if collection_path.is_file() else collection_path.rglob("test_*.py")
    return None if any("mark.fast" in file.read_text() for file in files) else True


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """Path of a random Qwen3 model whose tokenizer has one token a character."""
    from tiny_models import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture(scope="session")
def tool_model(tmp_path_factory):
    """Path of a random model that may call tools."""
    from tiny_models import save_tool_model

    return save_tool_model(tmp_path_factory.mktemp("tool-model"))


@pytest.fixture(scope="session")
def image_model(tmp_path_factory):
    """Path of a random model that takes images."""
    from tiny_models import save_image_model

    return save_image_model(tmp_path_factory.mktemp("image-model"))


@pytest.fixture(autouse=True)
def own_environment():
    """
    What a test adds to the environment ends with it. TRL names a meeting place there for an engine in its process, and
    at it the trainer of the next test would open a port.
    """
    with patch.dict(os.environ):
        yield


@pytest.fixture
def launched_on(monkeypatch):
    """Lets configs believe in a launch of so many processes, without the process group."""
    import torch

    from trl_dapo import DAPOConfig

    def set_processes(num_processes):
        monkeypatch.setenv("WORLD_SIZE", str(num_processes))
        monkeypatch.setattr(DAPOConfig, "world_size", num_processes)
        monkeypatch.setattr(DAPOConfig, "device", torch.device("cpu"))

    return set_processes


@pytest.fixture
def serve(monkeypatch):
    """Starts a `Server` with a script."""
    from evaluations import Server

    from trl_dapo.evaluation import server_client as server_engine

    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(server_engine, "_FIRST_DELAY", 0.0)
    servers = []

    def start(script):
        servers.append(Server(script))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def problems_file(tmp_path):
    """Two problems in a file: 1+1 and 1+2."""
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(json.dumps({"problem": f"1+{i}", "answer": str(1 + i)}) + "\n" for i in (1, 2)))
    return path

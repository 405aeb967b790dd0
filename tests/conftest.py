# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Fixtures and options for the tests of all folders. Fixtures import what they need inside, so that `pytest -m fast`
does not have to wait for importing TRL.
"""

import json
import os
from unittest.mock import patch


# Set before torch and the hub client are imported. Tests do not use the network, and small models do not benefit from
# threads.
os.environ.update(HF_HUB_OFFLINE="1", TRL_EXPERIMENTAL_SILENCE="1", TOKENIZERS_PARALLELISM="false")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest


def pytest_ignore_collect(collection_path, config):
    """
    With `-m fast`, import only files that contain `mark.fast`, because importing all files takes longer than the fast
    tests.
    """
    if config.option.markexpr != "fast":
        return None
    files = [collection_path] if collection_path.is_file() else collection_path.rglob("test_*.py")
    return None if any("mark.fast" in file.read_text() for file in files) else True


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """Path of a random Qwen3 model whose tokenizer has one token per character."""
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
    Remove what a test adds to the environment. TRL stores the address of a process group there for an engine in the
    same process, and the trainer of the next test would open a port at it.
    """
    with patch.dict(os.environ):
        yield


@pytest.fixture
def launched_on(monkeypatch):
    """Make configs behave as in a launch of several processes, without a process group."""
    import torch

    from trl_dapo import DAPOConfig

    def set_processes(num_processes):
        monkeypatch.setenv("WORLD_SIZE", str(num_processes))
        monkeypatch.setattr(DAPOConfig, "world_size", num_processes)
        monkeypatch.setattr(DAPOConfig, "device", torch.device("cpu"))

    return set_processes


@pytest.fixture
def serve(monkeypatch):
    """Return a function that starts a `Server` with a script."""
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
    """Path of a file with two problems: 1+1 and 1+2."""
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(json.dumps({"problem": f"1+{i}", "answer": str(1 + i)}) + "\n" for i in (1, 2)))
    return path

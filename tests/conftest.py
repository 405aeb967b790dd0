# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""A model and a tokenizer small enough to train in a test, made on the spot."""

import os


# Before torch and the hub client are imported: tests touch no network, and small models gain nothing from threads.
os.environ.update(HF_HUB_OFFLINE="1", TRL_EXPERIMENTAL_SILENCE="1", TOKENIZERS_PARALLELISM="false")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from helpers import save_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """Path of a random Qwen3 model whose tokenizer has one token a character."""
    return save_tiny_model(tmp_path_factory.mktemp("tiny-model"))

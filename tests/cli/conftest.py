# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests of the command line. They import TRL only when needed, so that `pytest -m fast` is quick."""

import pytest


@pytest.fixture
def started(monkeypatch):
    """The launches that would have happened."""
    from trl_dapo.cli import processes

    launches = []
    monkeypatch.setattr(processes, "launch_command", launches.append)
    return launches


@pytest.fixture
def tiny() -> list[str]:
    """The options of one step on the CPU, of four completions of at most four tokens."""
    on_the_cpu = "--use_cpu true --bf16 false --report_to none --gradient_checkpointing false --max_steps 1"
    sizes = "--per_device_train_batch_size 4 --num_generations 4 --gradient_accumulation_steps 1"
    return f"{on_the_cpu} {sizes} --max_completion_length 4 --dynamic_sampling_max_gen_batches 1".split()


@pytest.fixture
def made(monkeypatch):
    """The trainers that were made."""
    from trl_dapo import DAPOTrainer

    trainers, init = [], DAPOTrainer.__init__

    def record(self, *args, **kwargs):
        init(self, *args, **kwargs)
        trainers.append(self)

    monkeypatch.setattr(DAPOTrainer, "__init__", record)
    return trainers


@pytest.fixture
def mistake(capfd):
    """Return the error that `trl-dapo train` prints for a command line, which must be the last line."""
    from trl_dapo.cli.train import launch

    def tell(*words: str) -> str:
        assert launch([*words]) == 2
        said = capfd.readouterr().err.strip()
        assert said.splitlines()[-1].startswith("trl-dapo train: ")
        return said

    return tell

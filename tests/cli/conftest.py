# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""What tests of the command line share. Fixtures import what they need: `pytest -m fast` is not to wait for TRL."""

import pytest


@pytest.fixture
def started(monkeypatch):
    """What would be launched."""
    from trl_dapo.cli import processes

    launches = []
    monkeypatch.setattr(processes, "launch_command", launches.append)
    return launches

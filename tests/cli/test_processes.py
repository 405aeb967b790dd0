# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""A launch of several processes ends as they ended."""

import signal

import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException

from trl_dapo.cli import processes


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_and_an_end_by_a_scheduler_are_statuses_and_no_traceback(monkeypatch, number, status):
    def launch(arguments):
        raise SignalException(f"Process 1 got signal: {number}", sigval=number)

    monkeypatch.setattr(processes, "launch_command", launch)
    assert processes.launch_processes(["--config", "smoke_cpu"], 2, None) == status

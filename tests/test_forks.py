# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Jobs in forked processes: how the launcher treats jobs that end on their own."""

import os
import select
import time

import forks
import pytest


@pytest.mark.fast
def test_of_two_jobs_that_fail_at_once_the_second_is_waited_for_and_the_next_two_are_told_apart(tmp_path, monkeypatch):
    """When the launcher learns that the first has ended, the second has ended as well, so there is nothing to kill."""

    def hear_of_one(streams, *others):
        if len(streams) < 2:
            return ready(streams, *others)
        deadline = time.monotonic() + 60
        while len(ready(streams, [], [], 1)[0]) < 2 and time.monotonic() < deadline:
            pass
        return streams[:1], [], []

    ready = select.select
    monkeypatch.setattr(forks, "_forks", {})
    monkeypatch.setattr(forks.select, "select", hear_of_one)
    (tmp_path / "job.py").write_text("raise SystemExit(3)")
    job = {"num_processes": 2, "timeout": 60, "env": dict(os.environ), "folder": tmp_path, "imported": ("json",)}
    for _ in range(2):
        assert forks.run([str(tmp_path / "job.py")], **job)[0] == 3

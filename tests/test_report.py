# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
import json

import pytest

from trl_dapo.report import load_log_history, plot_run, series, smooth


def test_a_running_mean_starts_with_what_there_is():
    assert smooth([1.0, 3.0, 5.0, 7.0], window=2) == [1.0, 2.0, 4.0, 6.0]


def test_entries_without_the_metric_or_without_a_number_are_left_out():
    history = [
        {"step": 1, "reward": 0.5},
        {"step": 2},
        {"step": 3, "reward": None},
        {"step": 4, "reward": float("nan")},
    ]
    assert series(history, "reward") == ([1], [0.5])


def test_the_newest_complete_state_of_a_run_is_read(tmp_path):
    for step in (2, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
        state = {"global_step": step, "log_history": [{"step": step, "reward": 0.0}]}
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(json.dumps(state))
    (tmp_path / "checkpoint-12").mkdir()
    (tmp_path / "checkpoint-12" / "trainer_state.json").write_text('{"global_step": 12, "log_hi')  # killed here
    assert load_log_history(tmp_path) == [{"step": 10, "reward": 0.0}]


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no complete `trainer_state.json`"):
        load_log_history(tmp_path)


def test_a_run_without_some_metrics_is_drawn_all_the_same(tmp_path):
    plot_run([{"step": 1, "reward": 0.1}], tmp_path / "plots" / "run.png")
    assert (tmp_path / "plots" / "run.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"

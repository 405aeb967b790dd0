# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The report of a trial, computed by hand from what was measured."""

import pytest

from trl_dapo.run.trial_report import Measured, Phase, Schedule, TrialReport, count_periods, halvings


pytestmark = pytest.mark.fast
GIB = 2**30


def make_report(phases=None, schedule=None, **fields):
    if phases is None:
        phases = [
            Phase("sampling", "8 prompts x 4", Measured(30.0, 2 * GIB), "dynamic_sampling_max_round_size"),
            Phase("update", "2 micro-batches", Measured(9.0, 5 * GIB), "max_tokens_per_microbatch", 512),
            Phase("update of this rollout", "the first of 2 steps", Measured(20.0, 4 * GIB)),
            Phase("evaluation", "a batch of 48", Measured(50.0, 3 * GIB), "per_device_eval_batch_size", 48),
            Phase("checkpoint", "written and deleted", Measured(2.0, 1 * GIB), "save_only_model", False),
        ]
    schedule = schedule or Schedule(16, 2.0, num_evaluations=3, batches_per_evaluation=2, num_checkpoints=4)
    values = {"title": "Trial on CPU, 1 process", "total": 8 * GIB, "num_sharing": 1, "loading": GIB}
    return TrialReport(**{**values, "phases": phases, "schedule": schedule, **fields})


def test_a_run_takes_its_steps_evaluations_and_checkpoints_as_they_were_measured():
    report = make_report()
    # A rollout of 30 s trains in two steps of 20 s.
    assert report.step_seconds == 30 / 2 + 20
    assert report.run_seconds == 16 * 35 + 3 * 2 * 50 + 4 * 2
    # The worst case bounds memory, and takes no part in the time.
    assert report.peak == 5 * GIB
    assert report.left(report.peak) == 3 * GIB


@pytest.mark.parametrize(("sampling", "seconds"), [(30.0, 20.0), (60.0, 30.0)])
def test_a_server_that_samples_ahead_is_waited_for_only_if_it_takes_longer(sampling, seconds):
    phases = [Phase("sampling", "", Measured(sampling, 0)), Phase("update of this rollout", "", Measured(20.0, 0))]
    ahead = make_report(phases, Schedule(16, 2.0, samples_ahead=True))
    assert ahead.step_seconds == seconds


def test_processes_on_one_machine_share_its_memory():
    report = make_report(num_sharing=2)
    assert report.left(3 * GIB) == 2 * GIB
    assert "peak memory: 2 processes x 5.0 GiB of 8.0 GiB" in str(report)


def test_the_seconds_of_a_run_are_not_known_if_a_part_of_it_did_not_fit():
    failed = [Phase("sampling", "", None, None, None, [None]), Phase("checkpoint", "", Measured(1.0, GIB))]
    report = make_report(failed)
    assert (report.step_seconds, report.run_seconds, report.fits) == (None, None, False)
    assert "unknown, because a part of it did not fit" in " ".join(str(report).split())
    # An evaluation that does not fit is a part of the run, unless the run has none.
    phases = [*make_report().phases[:3], Phase("evaluation", "", None, "per_device_eval_batch_size", None, [48])]
    assert make_report(phases).run_seconds is None
    assert make_report(phases, Schedule(16, 2.0)).run_seconds == 16 * 35


def test_what_ran_out_of_memory_is_named_with_the_value_that_fits():
    fits = Phase("update", "", Measured(1.0, GIB), "max_tokens_per_microbatch", 4096, [16384, 8192])
    said = "The update ran out of memory with `max_tokens_per_microbatch: 16384`. It fits with "
    assert fits.describe_problem() == said + "`max_tokens_per_microbatch: 4096`: set that."
    never = Phase("update", "", None, "max_tokens_per_microbatch", None, [16384, 8192])
    assert never.describe_problem().startswith(
        "The update ran out of memory with `max_tokens_per_microbatch: 16384`, and still with "
        "`max_tokens_per_microbatch: 8192`. Set `gradient_checkpointing: true`, "
    )
    unset = Phase("update", "", Measured(1.0, GIB), "max_tokens_per_microbatch", 4096, [None])
    assert unset.describe_problem().startswith("The update ran out of memory with the run's settings. It fits with")


def test_the_page_has_at_most_80_columns_and_says_what_was_tried_and_what_is_assumed():
    page = str(make_report(checkpoint_bytes=59 * 2**20, notes=["every rollout takes as long as the first one " * 3]))
    assert max(map(len, page.splitlines())) <= 80
    assert "update of this rollout                    20.0 s         4.0 GiB         4.0 GiB" in page
    said = " ".join(page.split())
    assert "an optimizer step, including its share of a rollout: 35.0 s" in said
    assert "the run after loading: 14.5 min (16 optimizer steps, 3 evaluations of 2 batches, 4 checkpoints of" in said
    assert "- every rollout takes as long as the first one" in said
    assert said.endswith("Fits: peak 5.0 GiB, 3.0 GiB stay free.")


@pytest.mark.parametrize(("max_kept", "on_disk"), [(None, "8.0 GiB"), (2, "6.0 GiB"), (9, "8.0 GiB")])
def test_the_disk_holds_one_checkpoint_more_than_are_kept_while_the_newest_is_written(max_kept, on_disk):
    schedule = Schedule(16, 2.0, num_checkpoints=4, max_checkpoints_kept=max_kept)
    page = str(make_report(schedule=schedule, checkpoint_bytes=2 * GIB))
    assert f"disk: {on_disk} for checkpoints" in page


@pytest.mark.parametrize(
    ("strategy", "every", "delay", "times"),
    [
        ("steps", 16, 0, 1),
        ("steps", 5, 0, 4),
        ("steps", 5, 6, 3),  # at 10, 15 and 16
        ("steps", 5, 17, 0),
        ("no", 5, 0, 0),
        ("epoch", None, 0, 2),
        ("epoch", None, 2, 1),
    ],
)
def test_a_run_evaluates_and_saves_every_so_many_steps_and_at_its_end(strategy, every, delay, times):
    assert count_periods(strategy, num_steps=16, every=every, num_epochs=2, delay=delay) == times


def test_halves_go_down_to_the_least():
    assert list(halvings(100, 20)) == [50, 25, 20]
    assert list(halvings(40, 20)) == [20]
    assert list(halvings(20, 20)) == []

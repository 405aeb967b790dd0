# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Ending a run before `max_steps`, and resuming a run that was ended."""

import json

import pytest
from helpers import launch, make_trainer, number

from trl_dapo.run.checkpoint import last_complete_checkpoint
from trl_dapo.settings.sampling_defaults import PAPER


SAVED = {"save_strategy": "steps", "save_steps": 1}


@pytest.fixture
def run(tiny_model, tmp_path):
    """Trains 4 prompts x 4 completions per rollout, in order. Half of a solved prompt's are correct."""

    def train(solved=lambda i: True, resumes=False, **settings):
        settings = {"max_steps": 12, "dynamic_sampling_max_gen_batches": 1, "num_prompts": 40, **PAPER, **settings}

        def script(text, i):
            return "right" if i % 2 and solved(number(text)) else "wrong"

        trainer = make_trainer(tiny_model, tmp_path, script, **settings)
        trainer.train(resume_from_checkpoint=resumes)
        return trainer

    return train


def never(i):
    return False


def test_a_run_stops_after_several_empty_rollouts_in_a_row_with_a_checkpoint_and_advice(run, tmp_path, caplog):
    trainer = run(lambda i: i in (4, 5), dynamic_sampling_stop_after=3)
    # Rollout 1 finds nothing, 2 (prompts 4 to 7) finds something, 3 to 5 find nothing, in half a pass.
    assert "No group was accepted in" not in caplog.text
    assert trainer.state.global_step == 5
    assert trainer.stop.found_nothing
    checkpoint = last_complete_checkpoint(tmp_path)
    assert checkpoint == tmp_path / "checkpoint-5"  # although `save_strategy` is "no"
    (said,) = [record.message for record in caplog.records if "Training stops" in record.message]
    assert "no group was accepted in the last 3 rollouts (dropped in the last rollout: all_wrong 4)" in said
    assert "Most prompts are too hard for the model" in said
    assert f"{checkpoint} can be resumed" in said
    assert said.count("Most prompts are too hard") == 1
    # As many tries again.
    assert run(never, resumes=True, dynamic_sampling_stop_after=3).state.global_step == 8


def test_a_run_that_never_accepts_a_group_says_so_when_that_begins_and_when_it_stops_the_run(run, caplog):
    """Ten batches of four prompts are a pass, and seven batches end in the second one."""
    run(never, dynamic_sampling_stop_after=7, num_prompts=8)
    (first, stop) = (record.message for record in caplog.records if "accepted" in record.message)
    assert first.startswith("The batch is not full at the limit of 1 batch of completions, this time: 0 of 4 sampled")
    assert stop.startswith("Training stops: no group was accepted in the last 7 rollouts")


def test_rewards_that_score_nothing_are_not_blamed_on_the_batch_as_well(tiny_model, tmp_path, caplog):
    def unsure(completions, **kwargs):
        return [None] * len(completions)

    settings = {"dynamic_sampling_max_gen_batches": 1, "dynamic_sampling_stop_after": 7, "max_steps": 9, **PAPER}
    make_trainer(tiny_model, tmp_path, reward_funcs=unsure, **settings).train()
    said = [record.message for record in caplog.records]
    assert sum("scored none of the 16 completions of the first rollout" in message for message in said) == 1
    assert sum("is not full" in message for message in said) == 0
    assert sum("Training stops: no group was accepted" in message for message in said) == 1
    # TRL's warning, which contains the whole example, is not repeated at every step.
    assert sum("All reward functions returned None" in message for message in said) == 1


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"max_steps": 2}, "`max_steps=2` is reached"),
        ({"max_steps": 0}, "`max_steps=0` is reached"),
        ({"max_steps": -1, "num_train_epochs": 1, "num_prompts": 8}, "`num_train_epochs=1` is reached"),
        ({"max_tokens_generated": 200}, "`max_tokens_generated=200` is reached"),  # 96 tokens per step
        (
            {"solved": never, "dynamic_sampling_stop_after": 2},
            "no group was accepted any more (`dynamic_sampling_stop_after=2` is reached)",
        ),
        (
            {"solved": never, "dynamic_sampling_stop_after": 1, "dynamic_sampling_max_gen_batches": 0},
            "no group was accepted in 10 batches of completions (10 times `dynamic_sampling_stop_after=1`)",
        ),
    ],
    ids=["steps", "no step", "epochs", "tokens", "empty rollouts", "empty batches"],
)
def test_the_summary_says_which_limit_ended_the_run(run, capsys, settings, why):
    run(**settings)
    (ended,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Ended:")]
    assert f", because {why}. " in ended


def test_an_empty_rollout_without_a_limit_stops_the_run(run, caplog):
    trainer = run(never, dynamic_sampling_max_gen_batches=0, dynamic_sampling_stop_after=2)
    assert trainer.state.global_step == 1
    assert trainer.stop.found_nothing
    # Twice the ten batches that a rollout has by default.
    (said,) = [record.message for record in caplog.records if "Training stops" in record.message]
    assert said.startswith("Training stops: no group was accepted in the last 20 batches of completions (dropped ")
    (short,) = [record.message for record in caplog.records if "is not full" in record.message]
    assert short.startswith(
        "The batch is not full since no further group was accepted, this time: 0 of 80 sampled groups were accepted "
        "(dropped: all_wrong 80); a full batch has 4. This rollout trains on no group and changes no weights. "
    )
    assert short.endswith(
        " No group was accepted, so a higher `dynamic_sampling_stop_after` would probably not fill the batch either."
    )


@pytest.mark.parametrize(
    ("settings", "until"),
    [
        (
            {"dynamic_sampling_max_gen_batches": 0, "dynamic_sampling_stop_after": 2},
            "until 20 batches brought none (10 times `dynamic_sampling_stop_after`), because "
            "`dynamic_sampling_max_gen_batches=0` sets no limit.",
        ),
        (
            {"dynamic_sampling_max_gen_batches": 15},
            "until the limit of 15 batches (`dynamic_sampling_max_gen_batches`) is reached.",
        ),
    ],
    ids=["no limit", "a high limit"],
)
def test_a_rollout_that_samples_more_than_ten_batches_without_a_group_says_so_once(run, caplog, settings, until):
    run(never, num_prompts=400, max_steps=2, **settings)
    (said,) = [record.message for record in caplog.records if "No group was accepted in" in record.message]
    assert said.startswith(
        "No group was accepted in 10 batches of completions (dropped: all_wrong 40). Sampling continues "
        f"{until} Most prompts are too hard for the model: "
    )


def test_a_rollout_with_the_default_limit_does_not_say_that_it_continues(run, caplog):
    run(never, num_prompts=400, max_steps=1, dynamic_sampling_max_gen_batches=10)
    assert "No group was accepted in" not in caplog.text


def test_a_rollout_without_a_limit_trains_on_what_it_accepted_before_it_gave_up_and_then_the_run_stops(run, caplog):
    """One prompt of 40 is solved, and only once: its group trains in two optimizer steps, although none follows."""
    solved_once = iter([True])
    steps = {"gradient_accumulation_steps": 2, "steps_per_generation": 4}
    limits = {"dynamic_sampling_max_gen_batches": 0, "dynamic_sampling_stop_after": 1}
    trainer = run(lambda i: i == 2 and next(solved_once, False), **steps, **limits)
    assert (trainer.state.global_step, trainer.stop.found_nothing) == (2, True)
    assert trainer._sampler.totals.groups_trained == 1
    assert sum(log["dynamic_sampling/groups_trained"] for log in trainer.state.log_history if "reward" in log) == 1
    assert "no group was accepted in the last 10 batches of completions" in caplog.text


def test_a_run_that_is_resumed_within_the_rollout_that_gave_up_stops_after_it(run):
    solved_once = iter([True])
    settings = {"gradient_accumulation_steps": 2, "steps_per_generation": 4, **SAVED}
    settings |= {"dynamic_sampling_max_gen_batches": 0, "dynamic_sampling_stop_after": 1}
    run(lambda i: i == 2 and next(solved_once, False), max_steps=1, **settings)
    trainer = run(lambda i: i % 2, resumes=True, max_steps=6, **settings)  # all later groups would be accepted
    assert (trainer.state.global_step, trainer.stop.found_nothing) == (2, True)
    assert trainer._sampler.num_rollouts == 1


def test_zero_never_stops(run):
    trainer = run(never, dynamic_sampling_stop_after=0, max_steps=5)
    assert (trainer.state.global_step, trainer.stop.found_nothing) == (5, False)


def test_a_run_ends_once_its_tokens_are_generated_and_stays_ended(run, tmp_path):
    settings = {**SAVED, "save_steps": 100}
    for again in (False, True):
        # A rollout is 16 completions of 6 tokens, five characters and the end: 96 per step.
        trainer = run(resumes=again, max_tokens_generated=200, **settings)
        assert (trainer.state.global_step, trainer.stop.found_nothing) == (3, False)
        assert trainer._sampler.totals.tokens_generated == 288
        assert last_complete_checkpoint(tmp_path) == tmp_path / "checkpoint-3"
    assert run(resumes=True, max_tokens_generated=400, **settings).state.global_step == 5


def test_a_run_ends_at_its_limit_of_tokens_after_training_on_the_last_rollout(run, tmp_path):
    # A rollout is 16 completions of 6 tokens; 4 micro-batches make 2 optimizer steps.
    trainer = run(gradient_accumulation_steps=2, steps_per_generation=4, max_tokens_generated=97)
    assert trainer._sampler.totals.tokens_generated == 192
    assert trainer.state.global_step == 4
    assert last_complete_checkpoint(tmp_path) is None  # `save_strategy` is "no"


def test_totals_are_of_the_whole_run_through_a_resume(run):
    run(lambda i: i % 4, max_steps=1, **SAVED)
    totals = run(lambda i: i % 2, resumes=True, max_steps=3, **SAVED)._sampler.totals
    assert (totals.groups_sampled, totals.groups_trained) == (12, 3 + 2 + 2)
    assert totals.tokens_generated == 12 * 4 * 6


def test_two_processes_stop_at_the_same_step_also_if_one_cannot_score(tiny_model, tmp_path):
    result = launch("stops", tiny_model, tmp_path, num_processes=2)
    assert result.returncode == 0, result.stderr[-3000:]
    reports = [json.loads((tmp_path / f"report-2-{rank}.json").read_text()) for rank in (0, 1)]
    assert [(report["step"], report["found_nothing"]) for report in reports] == [(2, True)] * 2
    assert last_complete_checkpoint(tmp_path / "run") == tmp_path / "run" / "checkpoint-2"
    assert result.stderr.count("no group was accepted in the last 2 rollouts") == 1
    assert "The reward function 'fails' failed in line " in reports[1]["error"]
    assert "jobs.py with KeyError: 'no such column'" in reports[1]["error"]
    assert "failed on process 1" in reports[0]["error"]

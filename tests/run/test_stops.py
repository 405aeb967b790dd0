# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Ends of a run beside `max_steps`, and what of them outlives a resume."""

import json
import re

import pytest
from helpers import ScriptedTrainer, launch, number, prompts, tiny_config

from trl_dapo.run.checkpoint import last_complete_checkpoint


def make_trainer(tiny_model, output_dir, solved=lambda i: True, **settings):
    """4 prompts x 4 completions a rollout in one round, in order; of a prompt that is `solved` half are right."""
    settings = {"max_steps": 12, "dynamic_sampling_max_rounds": 1, "shuffle_dataset": False, **settings}
    return ScriptedTrainer(
        tiny_model,
        lambda completions, **kwargs: [float(completion == "1") for completion in completions],
        tiny_config(output_dir, **settings),
        train_dataset=prompts(40),
        script=lambda text, index: str(index % 2) if solved(number(text)) else "0",
    )


def test_a_run_stops_after_so_many_rollouts_in_a_row_that_found_nothing_with_a_checkpoint_and_advice(
    tiny_model, tmp_path, caplog
):
    trainer = make_trainer(tiny_model, tmp_path, lambda i: i in (4, 5), dynamic_sampling_stop_after=3)
    trainer.train()
    # Rollout 1 finds nothing, 2 (prompts 4 to 7) finds something, 3 to 5 find nothing.
    assert trainer.state.global_step == 5
    assert trainer.stop.found_nothing
    checkpoint = last_complete_checkpoint(tmp_path)
    assert checkpoint == tmp_path / "checkpoint-5"  # although `save_strategy` is "no"
    (said,) = [record.message for record in caplog.records if "Training stops" in record.message]
    assert "3 rollouts in a row found no group to train on (the last dropped: all_wrong 4)" in said
    assert "Most prompts are too hard for the model" in said
    assert f"{checkpoint} can be resumed" in said

    # As many tries again.
    trainer = make_trainer(tiny_model, tmp_path, lambda i: False, dynamic_sampling_stop_after=3)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 8


def test_a_rollout_without_a_limit_of_rounds_that_finds_nothing_stops_the_run_too(tiny_model, tmp_path, caplog):
    settings = {"dynamic_sampling_max_rounds": 0, "dynamic_sampling_stop_after": 2}
    trainer = make_trainer(tiny_model, tmp_path, lambda i: False, **settings)
    trainer.train()
    assert trainer.state.global_step == 1
    assert trainer.stop.found_nothing
    # Twice the ten rounds that a rollout has by default.
    (said,) = [record.message for record in caplog.records if "Training stops" in record.message]
    assert said.startswith("Training stops: a rollout of 20 rounds found no group to train on (the last dropped: ")
    (short,) = [record.message for record in caplog.records if "fell short" in record.message]
    assert short.startswith("Dynamic sampling fell short: 0 of 80 groups accepted in 20 rounds, 4 needed")
    assert short.endswith("Or raise `dynamic_sampling_stop_after`.")


def test_one_round_is_told_as_one(tiny_model, tmp_path, caplog):
    settings = {"dynamic_sampling_max_rounds": 1, "dynamic_sampling_stop_after": 1}
    make_trainer(tiny_model, tmp_path, lambda i: False, **settings).train()
    said = " ".join(record.message for record in caplog.records)
    assert "0 of 4 groups accepted in 1 round, 4 needed" in said
    assert "a rollout of 1 round found no group" in said


def test_zero_never_stops(tiny_model, tmp_path):
    trainer = make_trainer(tiny_model, tmp_path, lambda i: False, dynamic_sampling_stop_after=0, max_steps=5)
    trainer.train()
    assert trainer.state.global_step == 5
    assert not trainer.stop.found_nothing


def test_rollouts_that_found_nothing_are_counted_through_a_resume(tiny_model, tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 2, "dynamic_sampling_stop_after": 3}
    make_trainer(tiny_model, tmp_path, lambda i: False, max_steps=2, **settings).train()
    trainer = make_trainer(tiny_model, tmp_path, lambda i: False, **settings)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 3


def test_a_run_ends_once_its_passes_are_made_and_stays_ended(tiny_model, tmp_path):
    settings = {"max_passes": 0.25, "save_strategy": "steps", "save_steps": 100}
    trainer = make_trainer(tiny_model, tmp_path, **settings)  # 4 of 40 prompts a step
    trainer.train()
    assert trainer.state.global_step == 3
    assert trainer._sampler.stream.passes == pytest.approx(0.3)
    assert not trainer.stop.found_nothing
    assert last_complete_checkpoint(tmp_path) == tmp_path / "checkpoint-3"

    trainer = make_trainer(tiny_model, tmp_path, **settings)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 3
    assert trainer._sampler.stream.passes == pytest.approx(0.3)
    trainer = make_trainer(tiny_model, tmp_path, **{**settings, "max_passes": 0.5})
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 5


def test_a_run_ends_once_its_tokens_are_generated_and_what_was_sampled_has_trained(tiny_model, tmp_path):
    # A rollout is 16 completions of 2 tokens, a character and the end; 4 micro-batches make 2 optimizer steps.
    settings = {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "max_tokens_generated": 33}
    trainer = make_trainer(tiny_model, tmp_path, **settings)
    trainer.train()
    assert trainer._sampler.totals.tokens_generated == 64
    assert trainer.state.global_step == 4
    assert last_complete_checkpoint(tmp_path) is None  # `save_strategy` is "no"


def test_totals_are_of_the_whole_run_through_a_resume(tiny_model, tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 1}
    make_trainer(tiny_model, tmp_path, lambda i: i % 4, max_steps=1, **settings).train()
    trainer = make_trainer(tiny_model, tmp_path, lambda i: i % 2, max_steps=3, **settings)
    trainer.train(resume_from_checkpoint=True)
    totals = trainer._sampler.totals
    assert (totals.groups_sampled, totals.groups_trained) == (12, 3 + 2 + 2)
    assert totals.tokens_generated == 12 * 4 * 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"dynamic_sampling_stop_after": -1},
            "must be a whole number of at least 0, got -1. 0 is never.",
        ),
        ({"max_passes": 0}, "`max_passes` must be above 0 and finite, got 0. Leave it out"),
        ({"max_tokens_generated": 5, "use_dynamic_sampling": False}, "Set `max_steps` or `num_train_epochs`"),
        ({"logging_style": "json"}, "`logging_style` must be one of 'table', 'full'"),
    ],
    ids=str,
)
def test_an_end_that_cannot_be_honoured_is_refused(tmp_path, settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        tiny_config(tmp_path, **settings)


def test_two_processes_stop_at_the_same_step_and_before_it_where_one_cannot_score(tiny_model, tmp_path):
    result = launch("stops", tiny_model, tmp_path, num_processes=2)
    assert result.returncode == 0, result.stderr[-3000:]
    reports = [json.loads((tmp_path / f"report-2-{rank}.json").read_text()) for rank in (0, 1)]
    assert [(report["step"], report["found_nothing"]) for report in reports] == [(2, True)] * 2
    assert last_complete_checkpoint(tmp_path / "run") == tmp_path / "run" / "checkpoint-2"
    assert result.stderr.count("Training stops: 2 rollouts in a row") == 1
    assert "The reward function 'fails' failed with KeyError: 'no such column'" in reports[1]["error"]
    assert "failed on process 1" in reports[0]["error"]

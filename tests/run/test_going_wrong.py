# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Messages for a run that fails, and for a run that is resumed with other settings."""

import traceback

import pytest
from helpers import make_trainer, right

from trl_dapo.run.checkpoint import describe_failure, last_complete_checkpoint


def fails_from(step, error):
    """Return a reward function that raises an error from an optimizer step on."""

    def flaky_judge(completions, trainer_state, **kwargs):
        if trainer_state.global_step >= step:
            raise error
        return right(completions)

    return flaky_judge


class Unreachable(Exception):
    pass


def notes_of(tiny_model, folder, step, **settings):
    error = Unreachable("no answer from the judge")
    reward = fails_from(step, error)
    trainer = make_trainer(tiny_model, folder, reward_funcs=[right, reward], max_steps=4, **settings)
    with pytest.raises(Unreachable) as caught:
        trainer.train()
    assert caught.value is error
    assert str(error) == "no answer from the judge"
    return traceback.format_exception(error)[-len(error.__notes__) :], error


SAVED = {"save_strategy": "steps", "save_steps": 1, "dynamic_sampling_screen": "off"}


@pytest.mark.parametrize("dynamic", [{}, {"use_dynamic_sampling": False}], ids=["dynamic sampling", "without"])
def test_a_reward_function_that_fails_in_a_run_is_named_with_its_step_and_the_way_on(tiny_model, tmp_path, dynamic):
    settings = SAVED if not dynamic else {"save_strategy": "steps", "save_steps": 1, **dynamic}
    last, error = notes_of(tiny_model, tmp_path, 2, **settings)
    assert error.__notes__ == [
        "The reward function 'flaky_judge' raised this.",
        f"The run stopped after step 2. The last complete checkpoint is {tmp_path / 'checkpoint-2'}. Continue from "
        "there with `trainer.train(resume_from_checkpoint=True)`, or with `--resume_from_checkpoint true` on the "
        "command line.",
    ]
    assert [line.strip() for line in last] == error.__notes__  # the last that a traceback shows


def test_an_error_about_another_checkpoint_gets_advice_too(tiny_model, tmp_path):
    def judge(completions, trainer_state, **kwargs):
        if trainer_state.global_step:
            raise FileNotFoundError("the checkpoint of the judge is gone")
        return right(completions)

    trainer = make_trainer(tiny_model, tmp_path, reward_funcs=judge, **SAVED)
    with pytest.raises(FileNotFoundError, match="the checkpoint of the judge is gone") as caught:
        trainer.train()
    assert caught.value.__notes__[0] == "The reward function 'judge' raised this."
    assert f"The last complete checkpoint is {tmp_path / 'checkpoint-1'}" in caught.value.__notes__[1]


def test_a_missing_checkpoint_is_not_reported_as_a_failed_step(tiny_model, tmp_path):
    with pytest.raises(ValueError, match="valid checkpoint") as caught:
        make_trainer(tiny_model, tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-7"))
    assert not getattr(caught.value, "__notes__", [])


def test_a_failed_run_without_a_checkpoint_of_its_own_says_so(tiny_model, tmp_path):
    (tmp_path / "checkpoint-9").mkdir()  # of another run: this one has not come as far
    (tmp_path / "checkpoint-9" / "trainer_state.json").write_text("{}")
    _, error = notes_of(tiny_model, tmp_path, 1, dynamic_sampling_screen="off")
    assert error.__notes__[-1] == (
        f"The run stopped after step 1. There is no complete checkpoint of this run in {tmp_path}, so it has to start "
        "from the beginning. To save checkpoints more often, set `save_strategy='steps'` and a smaller `save_steps`."
    )


def test_a_run_that_failed_before_its_first_checkpoint_is_not_advised_to_save_more_often_than_each_step(
    tiny_model, tmp_path
):
    trainer = make_trainer(tiny_model, tmp_path, max_steps=1, **SAVED)

    def fail(*args, **kwargs):
        raise KeyError("eval_acc")

    trainer._save_checkpoint = fail
    with pytest.raises(KeyError) as caught:
        trainer.train()
    assert caught.value.__notes__[-1] == (
        f"The run stopped after step 1. There is no complete checkpoint of this run in {tmp_path}, so it has to start "
        "from the beginning."
    )


def resumed(tiny_model, folder, capsys, before, after):
    settings = {"save_strategy": "steps", "save_steps": 1, "learning_rate": 1e-3, "max_steps": 2}
    make_trainer(tiny_model, folder, **settings | before).train()
    capsys.readouterr()
    trainer = make_trainer(tiny_model, folder, **settings | after)
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-1"))
    said = " ".join(capsys.readouterr().out.split())
    return trainer, said


def test_settings_that_changed_are_named_once_at_a_resume_with_the_old_and_the_new_value(
    tiny_model, tmp_path, capsys, caplog
):
    after = {"max_steps": 3, "temperature": 0.7, "num_generations": 8, "logging_steps": 1, "epsilon_high": 0.3}
    _, said = resumed(tiny_model, tmp_path, capsys, {}, after)
    checkpoint = tmp_path / "checkpoint-1"
    assert f"These settings are not those of {checkpoint}: `epsilon_high` (0.28 there, 0.3 here)." in said
    assert "`max_steps` (" not in said + caplog.text  # more steps are what a run is resumed for
    # The others are the reason why something of the checkpoint is not used.
    assert f"{checkpoint} was written with other settings: " in caplog.text
    for change in ("`temperature` (1.0 there, 0.7 here)", "`num_generations` (4 there, 8 here)"):
        assert (change in caplog.text, change in said) == (True, False)
    assert "has no effect" not in said


def test_a_warning_says_that_a_changed_learning_rate_has_no_effect(tiny_model, tmp_path, capsys):
    """An optimizer's state holds its rate, and a schedule's the rate that it scales."""
    settings = {"lr_scheduler_type": "constant"}
    trainer, said = resumed(tiny_model, tmp_path, capsys, settings, settings | {"learning_rate": 1e-2})
    assert [log["learning_rate"] for log in trainer.state.log_history if "learning_rate" in log] == [1e-3, 1e-3]
    assert "`learning_rate` (0.001 there, 0.01 here)" in said
    assert "`learning_rate` has no effect, because the checkpoint's optimizer and schedule are restored." in said


@pytest.mark.parametrize("after", [{}, {"max_steps": 3}])
def test_without_changed_settings_there_is_no_warning(tiny_model, tmp_path, capsys, after):
    _, said = resumed(tiny_model, tmp_path, capsys, {}, after)
    assert "These settings" not in said


def cut_off(path):
    """Remove the last byte of a file, as if it had been written to a full disk."""
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "rng_state.pth"])
def test_a_checkpoint_with_a_file_that_is_cut_off_is_skipped_and_the_line_names_the_file(
    tiny_model, tmp_path, caplog, name
):
    make_trainer(tiny_model, tmp_path, max_steps=2, **SAVED).train()
    assert last_complete_checkpoint(tmp_path) == tmp_path / "checkpoint-2"
    cut_off(tmp_path / "checkpoint-2" / name)
    trainer = make_trainer(tiny_model, tmp_path, max_steps=2, **SAVED)
    trainer.train(resume_from_checkpoint=True)
    assert (
        f"{tmp_path / 'checkpoint-2'} is not complete: its `{name}` is damaged: the end of the file is missing. The "
        f"run continues from {tmp_path / 'checkpoint-1'} instead."
    ) in caplog.text


def test_an_error_while_a_damaged_checkpoint_is_loaded_names_the_file_and_the_checkpoint_before(tiny_model, tmp_path):
    """Neither that there is no checkpoint, nor to resume from the damaged one."""
    make_trainer(tiny_model, tmp_path, max_steps=2, **SAVED).train()
    cut_off(tmp_path / "checkpoint-2" / "model.safetensors")
    with pytest.raises(Exception, match="incomplete") as caught:
        make_trainer(tiny_model, tmp_path, **SAVED).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert caught.value.__notes__[-1].startswith(
        f"The run stopped before step 1 was complete. {tmp_path / 'checkpoint-2'} is not complete: its "
        f"`model.safetensors` is damaged: the end of the file is missing. {tmp_path / 'checkpoint-1'} is complete. "
        "If it is from this run, continue "
    )


def test_a_run_that_stops_before_its_first_checkpoint_is_not_advised_to_save_more_often(tmp_path):
    assert describe_failure(tmp_path, 0) == (
        f"The run stopped before step 1 was complete. {tmp_path} contains no complete checkpoint, so the run has to "
        "start from the beginning."
    )


def test_damaged_checkpoints_after_the_last_complete_one_are_named(tmp_path):
    for step, state in ((1, "{}"), (2, "{"), (3, None), (9, "{}")):
        (tmp_path / f"checkpoint-{step}").mkdir()
        if state is not None:
            (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(state)
    said = describe_failure(tmp_path, 3)  # 9 is of another run
    assert said.startswith(
        f"The run stopped after step 3. {tmp_path / 'checkpoint-3'} is not complete: it has no `trainer_state.json`, "
        f"which is written last. {tmp_path / 'checkpoint-2'} is not complete: its `trainer_state.json` is damaged. "
        f"The last complete checkpoint is {tmp_path / 'checkpoint-1'}. "
    )

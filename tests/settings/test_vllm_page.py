# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""docs/vllm_and_lora.md lists correctly what is supported, as far as settings alone decide it."""

import re
from pathlib import Path

import pytest

from trl_dapo import DAPOConfig
from trl_dapo.plan.recipe import read_values
from trl_dapo.settings.rules import why_refused


PAGE = (Path(__file__).parents[2] / "docs" / "vllm_and_lora.md").read_text()
TABLE = PAGE.partition("## What is supported?\n")[2].partition("\n## ")[0]
ROWS = [[cell.strip() for cell in line.split("|")[1:-1]] for line in TABLE.splitlines() if line.startswith("|")]
CELLS = {row[0]: row[1:] for row in ROWS[2:]}
WAYS = {
    "in the trainer's process": {"vllm_mode": "colocate"},
    "server": {"vllm_mode": "server"},
    "rollouts ahead": {"vllm_mode": "server", "rollouts_ahead": 1, "dynamic_sampling_surplus": "carry"},
}
# Values that change the distribution, by the name on the page.
SAMPLED = {
    **{"top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "vllm_structured_outputs_regex": "[0-9]+"},
    **{"temperature": 0.7, "vllm_enable_sleep_mode": True},
}
IN_KWARGS = {"presence_penalty": 1.0, "frequency_penalty": 0.5, "bad_words": ["x"], "logit_bias": {"1": 1.0}}
HARMLESS = {"stop": ["x"], "stop_token_ids": [1], "ignore_eos": True}
REFUSED_KWARGS = {"n": 2, "seed": 1, "logprobs": 1, "temperature": 1.0, "max_tokens": 8}
# Facts about the model and the trainer's arguments.
FACTS = {
    "QLoRA, or another base model in 4 or 8 bits": ["is_quantized"],
    "tools, environments": ["has_tools", "has_environments"],
    "`rollout_func`, images": ["has_rollout_func", "has_images"],
}


def refused(tmp_path, way, fact=None, **settings):
    """Return whether a trainer with these settings would raise an error."""
    try:
        args = DAPOConfig(str(tmp_path), use_vllm=True, report_to="none", use_cpu=True, bf16=False, **way, **settings)
    except ValueError:
        return True
    facts = dict.fromkeys((name for names in FACTS.values() for name in names), False)
    return fact is not None and why_refused(args, **facts | {fact: True}) is not None


@pytest.mark.parametrize(
    "name", [name for name in CELLS if "`" in name and "server" not in name and name not in FACTS]
)
def test_a_setting_is_refused_if_the_table_says_so(tmp_path, name):
    if "other than" in name:
        given = [{"generation_kwargs": {each: value}} for each, value in IN_KWARGS.items()]
        left = {each: HARMLESS[each] for each in re.findall(r"`(\w+)`", name)[1:]}
        assert not any(refused(tmp_path, way, generation_kwargs=left) for way in WAYS.values())
    elif "generation_kwargs" in name:
        given = [{"generation_kwargs": {each: REFUSED_KWARGS[each]}} for each in re.findall(r"`(\w+)`", name)[1:]]
    else:
        given = [{each: SAMPLED[each]} for each in re.findall(r"`(\w+)`", name)]
    for cell, way in zip(CELLS[name], WAYS.values(), strict=True):
        assert [refused(tmp_path, way, **settings) for settings in given] == [cell == "refused"] * len(given)


@pytest.mark.parametrize("name", FACTS)
def test_a_kind_of_model_is_refused_if_the_table_says_so(tmp_path, name):
    for cell, way in zip(CELLS[name], WAYS.values(), strict=True):
        assert [refused(tmp_path, way, fact) for fact in FACTS[name]] == [cell == "refused"] * len(FACTS[name])


def test_a_recipe_names_one_server():
    assert ROWS[0] == ["", *WAYS]
    assert CELLS["several servers"][1:] == ["refused"] * 2
    with pytest.raises(ValueError, match=r"`vllm_server_base_url` must be a text, got \['http://a', 'http://b'\]"):
        read_values({"vllm_server_base_url": ["http://a", "http://b"]})

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The recipe of a real language model: its problems, and a start with the model itself where it is there."""

import json
import os
import re

import pytest
import torch
from helpers import launch
from safetensors.torch import load_file

from trl_dapo.settings.recipe_files import RECIPES


MODEL = "TRL_DAPO_SMOLLM2"
needs_model = pytest.mark.skipif(
    MODEL not in os.environ, reason=f"{MODEL} names no folder with the model: see requirements/smollm2.txt"
)


def test_every_product_is_right_and_none_that_is_held_out_is_trained_on_the_other_way_round():
    rows = [json.loads(line) for line in (RECIPES / "smollm2_135m_cpu.jsonl").read_text().splitlines()]
    products, asked = [], re.compile(r"What is (\d+) \* (\d+)\? Answer with the number alone\.")
    for row in rows:
        a, b = map(int, asked.fullmatch(row["problem"]).groups())
        assert row["answer"] == str(a * b)
        products.append((a, b))
    assert sorted(products) == [(a, b) for a in range(3, 20) for b in range(3, 10)]
    trained, held_out = ({frozenset(pair) for pair in part} for part in (products[:95], products[95:]))
    assert trained & held_out == set()
    assert len(products[95:]) == 24


@needs_model
@pytest.mark.timeout(900)
def test_two_steps_move_every_layer_and_the_score_is_told_before_and_after(tmp_path):
    command = ["train", "--config", "smollm2_135m_cpu", "--output_dir", str(tmp_path)]
    sizes = "--max_steps 2 --prompts_per_rollout 2 --prompts_per_step 1 --eval_steps 2 --num_generations_eval 2"
    command += [*sizes.split(), "--eval_dataset_limit", "8", "--model_name_or_path", os.environ[MODEL]]
    result = launch("says", tmp_path, json.dumps(command), num_processes=1, timeout=800)
    assert result.returncode == 0, result.stderr[-3000:]
    said = " ".join(result.stdout.split())
    assert "A group is accepted if 'last_number_reward' differs between its completions." in said
    assert "'bare_number_reward', 'soft_overlong_punishment' only shape the advantages." in said
    assert "Ended: step 2 of 2" in said
    log = [json.loads(line) for line in (tmp_path / "log_history.jsonl").read_text().splitlines()]
    start, end = (entry["eval_avg@2"] for entry in log if "eval_avg@2" in entry)
    assert min(start, end) > 0  # of 8 products
    adapter = load_file(tmp_path / "adapter_model.safetensors")
    moved = [bool(torch.any(weights)) for name, weights in adapter.items() if "lora_B" in name]  # zero at first
    assert moved == [True] * 7 * 30  # linear layers of a layer, layers

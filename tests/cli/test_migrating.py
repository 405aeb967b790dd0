# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""What docs/migrating.md says to users of verl and ms-swift: their settings, checkpoints and datasets."""

import dataclasses
import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_dapo import DAPOConfig, DAPOTrainer
from trl_dapo.cli.train import launch


ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "migrating.md").read_text()
RECIPE = "model_name_or_path: merged\ndataset_name: train.parquet\nprompt_style: as_is\noutput_dir: out\n"


@pytest.mark.parametrize("schema", ["dapo_math_17k.jsonl", "ms_swift.jsonl"], ids=["verl", "ms-swift"])
def test_a_checkpoint_and_a_dataset_are_brought_as_the_page_says(tmp_path, monkeypatch, tiny_model, tiny, schema):
    assert "`model_name_or_path: merged`" in PAGE
    assert "`dataset_name: train.parquet`. `prompt_style: as_is` keeps their prompts" in PAGE
    monkeypatch.chdir(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16)  # as both write it
    model.save_pretrained("merged")
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained("merged")
    Path("merged/args.json").write_text('{"model_type": "qwen3"}')  # ms-swift's, beside transformers' files
    rows = [json.loads(line) for line in (ROOT / "tests/data/schemas" / schema).read_text().splitlines()]
    pq.write_table(pa.Table.from_pylist(rows), "train.parquet")
    Path("theirs.yaml").write_text(RECIPE)
    trained, train = [], DAPOTrainer.train

    def remember(trainer, **kwargs):
        loaded = dict(trainer.model.named_parameters())
        trained.append((trainer, {name: weight.detach().clone() for name, weight in loaded.items()}))
        return train(trainer, **kwargs)

    monkeypatch.setattr(DAPOTrainer, "train", remember)
    assert launch(["--config", "theirs.yaml", *tiny]) == 0
    ((trainer, weights),) = trained
    assert trainer.state.global_step == 1
    for name, weight in model.named_parameters():
        assert weights[name].dtype == torch.float32  # in which steps of 1e-6 are not lost
        assert torch.equal(weights[name], weight.float())
    assert trainer.train_dataset["prompt"][0] == rows[0].get("prompt", rows[0].get("messages"))
    assert trainer.train_dataset["solution"][0] == "5"


def test_what_the_table_calls_a_setting_of_this_package_is_one():
    table = PAGE.partition("## From another framework\n")[2].partition("\n## ")[0]
    head, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if "|" in line]
    assert head == ["here", "verl", "NeMo RL", "SkyRL", "slime", "ms-swift"]
    assert all(len(row) == len(head) for row in rows)
    named = {name for row in rows for name in re.findall(r"`(\w+)", row[0])}
    assert named - {field.name for field in dataclasses.fields(DAPOConfig)} == {"1"}  # of `1 + epsilon_high`

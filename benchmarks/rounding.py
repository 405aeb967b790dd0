# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
Loss from keeping weights in bfloat16: a step of AdamW is smaller than half the distance between two neighbors.

    trl-dapo fetch smollm2 --output_dir smollm2
    python -m benchmarks rounding --model smollm2        # ten minutes

The recipe smollm2_135m_cpu trains all weights for a few rollouts of one optimizer step each, in float32 and in
bfloat16, from weights that bfloat16 represents exactly. The distance that all weights have moved is the length of
their difference, divided by that in float32.
"""

import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from .frame.runs import Job
from .frame.tables import print_table
from .real_model.study import MEMORY
from .real_model.training import make_trainer


RATES = 1e-6, 1e-5
DTYPES = "float32", "bfloat16"


def weights_of(model):
    return torch.cat([weight.detach().float().flatten() for weight in model.parameters()])


def moved(before, after):
    """Return the share of the weights that have changed, and the length of the difference."""
    change = after - before
    return (change != 0).float().mean().item(), change.norm().item()


def train(model, dtype, rate, num_rollouts):
    """Return the weights after a few rollouts."""
    never = {"use_peft": False, "eval_strategy": "no", "eval_on_start": False, "save_strategy": "no"}
    settings = {"dtype": dtype, "learning_rate": rate, "max_steps": num_rollouts, **never}
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(Job("rounding", MEMORY, 0, settings), model, Path(folder))
        trainer.train()
        assert {weight.dtype for weight in trainer.model.parameters()} == {getattr(torch, dtype)}
        return weights_of(trainer.model)


def main(model: Path, num_rollouts=4):
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
        loaded.float().save_pretrained(folder)
        AutoTokenizer.from_pretrained(model).save_pretrained(folder)
        before = weights_of(loaded)
        for rate in RATES:
            found = {dtype: moved(before, train(folder, dtype, rate, num_rollouts)) for dtype in DTYPES}
            for dtype, (share, length) in found.items():
                rows.append([f"{rate:g}", dtype, f"{share:.1%}", f"{length / found['float32'][1]:.3f}"])
    print_table("", ("learning rate", "weights", "have moved", "how far, over float32"), rows, left=4)

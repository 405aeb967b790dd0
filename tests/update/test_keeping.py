# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""State that a block changes is restored, also if the block fails."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from trl_dapo.update.keeping import (
    SavedWeights,
    keeping_attributes,
    keeping_modules,
    keeping_random_state,
    keeping_state,
)


def test_random_states_go_on_as_if_the_block_had_not_been():
    def fail():
        with keeping_random_state():
            torch.rand(5), random.random(), np.random.rand()
            raise ValueError("stop")

    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    with pytest.raises(ValueError, match="stop"):
        fail()
    after = torch.rand(1).item(), random.random(), np.random.rand()
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    assert (torch.rand(1).item(), random.random(), np.random.rand()) == after


def test_attributes_that_were_changed_added_or_deleted_are_as_before():
    owner = SimpleNamespace(a=1, b=2)
    with keeping_attributes(owner):
        owner.a, owner.c = 3, 4
        del owner.b
    assert vars(owner) == {"a": 1, "b": 2}


def test_trained_weights_and_buffers_come_back_bit_for_bit():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[0].weight.data[0, 0] = -0.0  # a sum with 0 would be 0.0
    frozen = model[0].bias
    frozen.requires_grad = False
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    saved = SavedWeights(model)
    # 4 + 2 + 2 trained weights and 2 + 2 buffers of 4 bytes, and a counter of 8.
    assert saved.num_bytes == 12 * 4 + 8
    model(torch.rand(4, 2)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    saved.restore()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert torch.signbit(model[0].weight[0, 0])


def test_modes_come_back_part_by_part_without_gradients():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    model[1].eval()
    with keeping_modules(model):
        model.eval()
        model(torch.rand(1, 2)).sum().backward()
    assert [module.training for module in model.modules()] == [True, True, False]
    assert model[0].weight.grad is None


def test_buffers_and_numbers_that_a_part_of_a_model_replaces_come_back():
    # Like rotary embeddings whose frequencies depend on the longest text so far.
    model = nn.Sequential(nn.Module())
    model[0].register_buffer("frequencies", torch.ones(2), persistent=False)
    model[0].longest = 16
    with keeping_modules(model):
        model[0].register_buffer("frequencies", torch.zeros(2), persistent=False)
        model[0].register_buffer("more", torch.zeros(2))
        model[0].longest = 32
    assert torch.equal(model[0].frequencies, torch.ones(2))
    assert model[0].longest == 16
    assert [name for name, _ in model.named_buffers()] == ["0.frequencies"]


def test_an_optimizers_state_comes_back():
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    weight.sum().backward()
    optimizer.step()
    first = optimizer.state[weight]["exp_avg"].clone()
    with keeping_state(optimizer, None):
        optimizer.param_groups[0]["lr"] = 1.0
        optimizer.step()
    assert torch.equal(optimizer.state[weight]["exp_avg"], first)
    assert optimizer.param_groups[0]["lr"] == 0.1

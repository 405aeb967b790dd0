# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Recipes on disk."""

import json

import pytest


@pytest.fixture
def write(tmp_path):
    """Writes a recipe: its header's hardware and its fields."""

    def write_recipe(hardware, fields):
        path = tmp_path / "recipe.yaml"
        path.write_text(f"# Hardware: {hardware}.\n{json.dumps(fields)}\n")
        return str(path)

    return write_recipe


@pytest.fixture
def on_one_gpu(write):
    """The plan of `ONE_GPU`'s recipe with such fields, on its GPU of 80 GB."""
    from plan_helpers import ONE_GPU

    from trl_dapo.plan import plan

    return lambda fields=(), **options: plan(write("one GPU of 80 GB", {**ONE_GPU, **dict(fields)}), **options)

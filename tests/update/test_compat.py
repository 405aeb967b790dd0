# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Features that older releases lack, tested on a newer one."""

import re
from types import SimpleNamespace

import pytest
import torch
from update_helpers import ScriptedUpdate

from trl_dapo.update import compat


def refuses(monkeypatch, release, **of_trainer):
    """Return whether a trainer is refused on a release of transformers, with the versions in the message."""
    monkeypatch.setattr(compat.transformers, "__version__", f"{release}.0")
    state = SimpleNamespace(fsdp_plugin=of_trainer.pop("fsdp", None))
    trainer = SimpleNamespace(model=torch.nn.Linear(1, 1), ref_model=None, num_ranks_sharing_a_row=1)
    vars(trainer).update(accelerator=SimpleNamespace(state=state), **of_trainer)
    try:
        compat.check_release(trainer)
    except ValueError as error:
        return re.search(r"needs transformers>=(.*), but (.*) is installed\.", str(error)).groups()


def test_weights_sharded_at_load_need_a_transformers_that_knows_of_them(monkeypatch):
    assert refuses(monkeypatch, "5.18") is None
    monkeypatch.setattr(compat, "DTensor", torch.nn.Parameter)  # makes all weights count as sharded
    assert refuses(monkeypatch, "5.18") == ("5.19", "5.18.0")
    assert refuses(monkeypatch, "5.18", num_ranks_sharing_a_row=2) is None  # sharded by tensor parallelism
    assert refuses(monkeypatch, "5.19") is None
    monkeypatch.setattr(compat.transformers, "__version__", "5.18.0")
    with pytest.raises(ValueError, match="weights that were sharded when loaded"):
        ScriptedUpdate()


@pytest.mark.parametrize(
    ("version", "loads_once", "reference", "refused"),
    [(2, True, "model", True), (2, False, "model", False), (1, True, "model", False), (2, True, None, False)],
)
def test_a_reference_that_one_rank_loads_needs_a_newer_release(monkeypatch, version, loads_once, reference, refused):
    fsdp = SimpleNamespace(fsdp_version=version, cpu_ram_efficient_loading=loads_once)
    assert refuses(monkeypatch, "5.22", ref_model=reference, fsdp=fsdp) == (("5.23", "5.22.0") if refused else None)
    assert refuses(monkeypatch, "5.23", ref_model=reference, fsdp=fsdp) is None


@pytest.mark.parametrize(
    ("trainer", "ends"),
    [({"eos_token_ids": [2, 5]}, [2, 5]), ({}, [2])],
    ids=["all that the model ends by", "before TRL 1.14.2"],
)
def test_tokens_that_end_a_completion(trainer, ends):
    assert compat.end_tokens(SimpleNamespace(**trainer), 2) == ends

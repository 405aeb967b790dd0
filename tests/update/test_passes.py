# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Micro-batches whose gradients are not synchronized."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType

from trl_dapo.update.passes import accumulating, run_trimmed


MULTI_CPU, DEEPSPEED = DistributedType.MULTI_CPU, DistributedType.DEEPSPEED


@pytest.mark.parametrize(
    ("kind", "syncs", "defers", "inside"),
    [
        (MULTI_CPU, False, False, ["no sync"]),
        (MULTI_CPU, False, True, ["deferred"]),
        (MULTI_CPU, True, False, []),
        (DEEPSPEED, False, False, []),  # its engine counts micro-batches itself
        (DEEPSPEED, False, True, []),
    ],
)
def test_gradients_stay_on_their_rank_but_where_they_are_asked_for_or_deepspeed_counts(kind, syncs, defers, inside):
    told = []

    @contextmanager
    def note(what):
        told.append(what)
        yield
        told.append(f"end of {what}")

    state = SimpleNamespace(plugin_kwargs={"sync_each_batch": syncs}, _set_sync_gradients=told.append)
    accelerator = SimpleNamespace(distributed_type=kind, gradient_state=state, no_sync=lambda _: note("no sync"))
    with accumulating(accelerator, None, (lambda: note("deferred")) if defers else None):
        told.append("micro-batch")
    assert told == [False, *inside, "micro-batch", *(f"end of {what}" for what in inside), True]


def test_a_pass_more_than_there_are_rows_takes_one_token_of_the_first_row_and_changes_nothing():
    packer = SimpleNamespace(pack_without_gradient=lambda lengths, batch_size: [[0], []], multiple_of=None)
    asked, ids = [], torch.tensor([[5, 6, 7]])

    def run(ids, mask, num_columns):
        asked.append(ids.tolist())
        return ids[:, -num_columns:].float(), None

    found, entropies = run_trimmed(run, ids, torch.ones_like(ids), 2, 8, packer)
    assert (asked, found.tolist(), entropies) == ([[[5, 6, 7]], [[5, 6]]], [[6.0, 7.0]], None)

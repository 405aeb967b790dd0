# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Which micro-batches leave their gradients on their rank."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from accelerate.utils import DistributedType

from trl_dapo.update.passes import accumulating


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

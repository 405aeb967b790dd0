# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The peak of a process's memory, and which errors say that memory ran out."""

import errno
import sys

import pytest
import torch

from trl_dapo.run.peak_memory import PeakMemory, is_out_of_memory


MIB = 2**20


@pytest.mark.skipif(sys.platform != "linux", reason="Other systems keep a record that never falls.")
def test_what_a_block_allocates_and_gives_back_is_its_peak_and_not_that_of_the_next():
    memory = PeakMemory(torch.device("cpu"))
    memory.start()
    before = memory.peak()
    del_me = torch.ones(64 * MIB)  # 256 MiB
    del del_me
    assert memory.peak() - before == pytest.approx(256 * MIB, rel=0.1)
    memory.start()
    assert memory.peak() - before < 100 * MIB
    assert memory.peak() < memory.total


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (MemoryError(), True),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 8 bytes"),
            True,
        ),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (RuntimeError("The size of tensor a (3) must match"), False),
        (OSError("not enough memory"), False),
    ],
    ids=str,
)
def test_errors_of_memory_are_told_from_others(error, is_one):
    assert is_out_of_memory(error) is is_one

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Peak memory of a GPU, or of this process on a CPU."""

import errno
import gc
import os
import sys
from contextlib import suppress
from pathlib import Path

import torch


RESET, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")  # only on Linux
LIMIT_OF_CONTAINER = Path("/sys/fs/cgroup/memory.max")


class PeakMemory:
    """
    Peak memory since [`~PeakMemory.start`], in bytes.

    On a GPU all memory in use counts, including that of other processes. On a CPU only the memory of this process
    counts, as Linux records it. Other systems cannot reset their record: there it is the peak since the process began.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None

    @property
    def total(self) -> int:
        """Bytes of the GPU or of this machine; in a container, the bytes that it may use."""
        if self._device is not None:
            return torch.cuda.mem_get_info(self._device)[1]
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        with suppress(OSError, ValueError):  # there is no such file, or it contains `max`
            return min(physical, int(LIMIT_OF_CONTAINER.read_text()))
        return physical

    def start(self) -> None:
        """Reset the peak, and free unused memory."""
        gc.collect()
        if self._device is not None:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        with suppress(OSError):
            RESET.write_text("5")  # "the peak resident set size", in proc(5)

    def peak(self) -> int:
        """Return the peak in bytes."""
        if self._device is not None:
            torch.cuda.synchronize(self._device)
            free, total = torch.cuda.mem_get_info(self._device)
            not_torch = total - free - torch.cuda.memory_reserved(self._device)
            return not_torch + torch.cuda.max_memory_reserved(self._device)
        with suppress(OSError):
            for line in STATUS.read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return 1024 * int(line.split()[1])
        import resource  # does not exist on Windows

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else 1024 * peak


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that a GPU or the machine ran out of memory."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    said = str(error)
    return isinstance(error, RuntimeError) and any(
        words in said for words in ("out of memory", "can't allocate memory", "not enough memory", "_ALLOC_FAILED")
    )


def ran_out_of_memory(error: BaseException) -> bool:
    """Return whether an error, or one that caused it, means that memory ran out."""
    return is_out_of_memory(error) or (error.__cause__ is not None and ran_out_of_memory(error.__cause__))

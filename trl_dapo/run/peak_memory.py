# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The most memory in use since a moment: of a GPU, or of this process on a CPU."""

import gc
import os
import sys
from contextlib import suppress
from pathlib import Path

import torch


RESET, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")  # of Linux
LIMIT_OF_CONTAINER = Path("/sys/fs/cgroup/memory.max")


class PeakMemory:
    """
    The most memory in use since [`~PeakMemory.start`], in bytes.

    Of a GPU everything on it counts, what other processes have there too. Of a CPU the memory of this process counts,
    by Linux's own record. Other systems keep one record, which never falls: there it is the peak since the process
    began.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None

    @property
    def total(self) -> int:
        """Bytes that the GPU has, or this machine; of a container those that it may use."""
        if self._device is not None:
            return torch.cuda.mem_get_info(self._device)[1]
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        with suppress(OSError, ValueError):  # no such file, or `max`
            return min(physical, int(LIMIT_OF_CONTAINER.read_text()))
        return physical

    def start(self) -> None:
        """Forget the peak so far, and give back what nobody uses."""
        gc.collect()
        if self._device is not None:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        with suppress(OSError):
            RESET.write_text("5")  # "the peak resident set size", in proc(5)

    def peak(self) -> int:
        if self._device is not None:
            torch.cuda.synchronize(self._device)
            free, total = torch.cuda.mem_get_info(self._device)
            beside_torch = total - free - torch.cuda.memory_reserved(self._device)
            return beside_torch + torch.cuda.max_memory_reserved(self._device)
        with suppress(OSError):
            for line in STATUS.read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return 1024 * int(line.split()[1])
        import resource  # which Windows does not have

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else 1024 * peak


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out: that of a GPU, or that of the machine."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    said = str(error)
    return isinstance(error, RuntimeError) and any(
        words in said for words in ("out of memory", "can't allocate memory", "not enough memory")
    )

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""A terminal of 80 columns to run a program in, and the lines that it wrote there."""

import contextlib
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable


def run_in_terminal(
    command: list[str], *, timeout: float, interrupt_at: Callable[[str], bool] | None = None, **settings
) -> tuple[int, str]:
    """
    Runs a program whose standard streams are a terminal; Ctrl-C is pressed once `interrupt_at` says so of what was
    written. Returns its exit status and all that it wrote.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 80, 0, 0))
    written, deadline = b"", time.monotonic() + timeout

    def begin():
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # which a shell has its background jobs ignore
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, preexec_fn=begin, **settings)
    os.close(theirs)
    try:
        with contextlib.suppress(OSError):  # the other end was closed
            while part := os.read(ours, 65536):
                written += part
                if time.monotonic() > deadline:
                    raise TimeoutError(written.decode(errors="replace")[-2000:])
                if interrupt_at is not None and interrupt_at(written.decode(errors="replace")):
                    os.write(ours, b"\x03")
                    interrupt_at = None
        return process.wait(timeout=timeout), written.decode()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        os.close(ours)


def lines_of(written: str) -> list[str]:
    """What was written to such a terminal, line by line, without what moves the cursor."""
    return [line.rstrip() for line in re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written))]

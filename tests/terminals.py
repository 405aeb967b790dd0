# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""A terminal of 80 columns to run a job in, and the lines that the job wrote there."""

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import termios
import time
from collections.abc import Callable

import forks


def run_in_terminal(
    *command: object, timeout: float, interrupt_at: Callable[[str], object] = lambda written: False
) -> tuple[int, str]:
    """
    Return the exit status of a script and all that it wrote on a terminal. Ctrl-C is pressed once `interrupt_at` is
    true.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 80, 0, 0))
    tty, server, env = os.ttyname(theirs), forks.server_of(0, {**os.environ}), {**os.environ}
    written, is_pressed, deadline = b"", False, time.monotonic() + timeout
    pid = server.start(command=[*map(str, command)], env=env, stdin=tty, stdout=tty, stderr=tty)
    try:
        while ours in (ready := select.select([ours, server.said], [], [], max(deadline - time.monotonic(), 0))[0]):
            written += os.read(ours, 65536)
            if not is_pressed and interrupt_at(written.decode(errors="replace")):
                is_pressed = os.write(ours, b"\x03") > 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        status = int(server.said.readline())
        os.close(ours)
        os.close(theirs)
    assert ready, f"It has not ended after {timeout} s: {written.decode(errors='replace')[-2000:]}"
    return status, written.decode()


def lines_of(written: str) -> list[str]:
    """Return what was written to such a terminal, line by line, without codes that move the cursor."""
    return [line.rstrip() for line in re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written))]

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Jobs in processes that are forked from one that has imported torch and TRL, so that they start at once.

Each rank has a parent process of its own, since the iteration order of sets differs between processes that were
started separately. A job ends like a program, with everything that happens when the interpreter exits.
"""

import atexit
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path


IMPORTED = ("trl_dapo.trainer", "trl_dapo.cli.train", "peft", "datasets", "accelerate")


class Forks:
    """
    A process that forks on request. A line of JSON requests a job; it answers with a line with the pid, and with one
    with the exit code when the job ends.
    """

    def __init__(self, imported: tuple[str, ...], env: dict[str, str]) -> None:
        pipe = subprocess.PIPE
        command = [sys.executable, __file__, *imported]
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, bufsize=0, env=env)
        self.said = self._process.stdout
        atexit.register(self._process.stdin.close)

    def start(self, **job) -> int:
        self._process.stdin.write(json.dumps(job).encode() + b"\n")
        return int(self.said.readline())


_forks: dict[int, Forks] = {}  # by rank


def server_of(rank: int, env: dict[str, str], imported: tuple[str, ...] = IMPORTED) -> Forks:
    if rank not in _forks:
        _forks[rank] = Forks(imported, env)
    return _forks[rank]


def run(
    command: list[str],
    *,
    num_processes: int,
    timeout: float,
    env: dict[str, str],
    folder: Path,
    imported: tuple[str, ...] = IMPORTED,
) -> tuple[int, str, str]:
    """
    Run a script with its arguments in `num_processes` processes, which form a torch process group if there are
    several. If one fails, the others are ended, as by torchrun. Raises `subprocess.TimeoutExpired`.
    """
    ranks = [{**env, **group} for group in _process_groups(num_processes)]
    files = {name: str(folder / name) for name in ("stdout", "stderr")}
    for path in files.values():
        Path(path).touch()
    # start all at once, since each spends seconds on imports
    servers = [server_of(i, env, imported) for i in range(num_processes)]
    pids = [server.start(command=command, env=rank, **files) for server, rank in zip(servers, ranks, strict=True)]
    running, codes, deadline = dict(enumerate(pids)), [], time.monotonic() + timeout
    try:
        while running and not any(codes):
            said = {_forks[i].said: i for i in running}
            ready, _, _ = select.select(list(said), [], [], max(deadline - time.monotonic(), 0))
            if not ready:
                raise subprocess.TimeoutExpired(command, timeout, *(Path(path).read_text() for path in files.values()))
            for stream in ready:
                codes.append(int(stream.readline()))
                del running[said[stream]]
    finally:
        for i, pid in running.items():
            with suppress(ProcessLookupError):  # it ended by itself; its output is read all the same
                os.kill(pid, signal.SIGTERM if any(codes) else signal.SIGKILL)
                if not select.select([_forks[i].said], [], [], 30)[0]:
                    os.kill(pid, signal.SIGKILL)
            _forks[i].said.readline()
    code = next((code for code in codes if code), 0)
    return code, *(Path(path).read_text() for path in files.values())


def _process_groups(num_processes: int) -> list[dict[str, str]]:
    """Return the environment variables that torchrun sets for each process."""
    if num_processes == 1:
        return [{}]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    sizes = {"WORLD_SIZE": str(num_processes), "LOCAL_WORLD_SIZE": str(num_processes)}
    return [{**address, **sizes, "RANK": str(i), "LOCAL_RANK": str(i)} for i in range(num_processes)]


def serve() -> dict | None:
    """Fork for each line of stdin. Return the line in the process that is to execute it."""
    running: dict[int, int] = {}
    while True:
        for ready in select.select([0, *running], [], [])[0]:
            if ready:
                _, status = os.waitpid(running.pop(ready), 0)
                os.close(ready)
                _say(os.waitstatus_to_exitcode(status))
            elif not (line := _read_line()):
                return None
            elif pid := os.fork():
                running[os.pidfd_open(pid)] = pid
                _say(pid)
            else:
                return json.loads(line)


def _say(number: int) -> None:
    os.write(1, b"%d\n" % number)


def _read_line() -> bytes:
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(0, 1)):
        line += byte
    return line


def become(command: list[str], env: dict[str, str], stdout: str, stderr: str, stdin: str = os.devnull) -> None:
    """Run a script as if this process had been started with it. Its terminal is that of its standard streams."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell makes its background jobs ignore this signal
    append = os.O_WRONLY | os.O_APPEND
    for number, (path, flags) in enumerate([(stdin, os.O_RDONLY), (stdout, append), (stderr, append)]):
        os.dup2(os.open(path, flags), number)
    os.environ.clear()
    os.environ.update(env)
    sys.argv, sys.path[0] = command, str(Path(command[0]).parent)
    runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        __import__(name)
    if job := serve():
        become(**job)

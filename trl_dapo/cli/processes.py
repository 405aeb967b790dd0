# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Starting `trl-dapo train` in several processes with `accelerate launch`, and reporting how they ended."""

import logging
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command, launch_command_parser
from torch.distributed import distributed_c10d
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from ..config import DAPOConfig
from ..settings.environment import is_set, num_processes_of
from ..settings.ranges import COUNT_OR_NONE, check_value
from ..settings.recipe_files import find_accelerate_config
from ..update.patching import patched


# Option of `trl` and of this package for the `--config_file` of accelerate, which takes the name of a config, too.
OWN_OPTION = "accelerate_config"
NOT_OPTIONS = ("env", "module", "no_python")  # in a recipe `env` sets variables; the others are set here
PRINTED, WAIT_FOR_FIRST_RANK = "trl_dapo/told", timedelta(seconds=10)


def is_launched() -> bool:
    """Return whether `accelerate launch` or `torchrun` started this process, also if it is the only one."""
    return is_set("ACCELERATE_MIXED_PRECISION") or is_set("LOCAL_RANK")


def options_of_accelerate(fields: Collection[str]) -> dict[str, bool]:
    """Return the options of `accelerate launch` that are not fields of a recipe, and whether each takes a value."""
    options = {OWN_OPTION: True}
    for action in launch_command_parser()._actions:
        names = [word[2:].replace("-", "_") for word in action.option_strings if word.startswith("--")]
        options |= {name: action.nargs != 0 for name in names if name not in (*fields, *NOT_OPTIONS)}
    return options


def split_options(words: Iterable[str], options: dict[str, bool]) -> tuple[list[str], list[str]]:
    """Split a command line into the options of `accelerate launch`, with their values, and the other words."""
    theirs, others, words = [], [], iter(words)
    for word in words:
        name, equals, value = word.removeprefix("--").partition("=")
        name = name.replace("-", "_") if word.startswith("--") else ""
        if name not in options:
            others.append(word)
        elif options[name]:
            theirs.append(f"--{name}={value if equals else next(words, '')}")
        elif value.lower() != "false":  # a recipe may contain `multi_gpu: false`
            theirs.append(f"--{name}")
    return theirs, others


def read_options(words: Iterable[str], argv: Sequence[str]) -> Namespace:
    """
    Return the arguments of `accelerate launch` with which it starts `trl-dapo train`.

    Args:
        words (`Iterable[str]`):
            Options of `accelerate launch`.
        argv (`Sequence[str]`):
            The rest of the command line.

    Raises:
        ValueError: If the processes or machines could not start, or would wait for each other forever.
    """
    parser, own = launch_command_parser(), f"--{OWN_OPTION}="
    parser.error = _raise_value_error
    words = [
        f"--config_file={find_accelerate_config(word.removeprefix(own))}" if word.startswith(own) else word
        for word in words
    ]
    requested = parser.parse_args([*words, "--module", "trl_dapo.cli", "train", *argv])
    says_how = requested.config_file or requested.use_fsdp or requested.use_deepspeed or requested.cpu or requested.tpu
    num_requested = max(requested.num_processes or 1, requested.num_machines or 1)
    with nullcontext() if requested.config_file else suppress(OSError):  # the default file need not exist
        from_file = load_config_from_file(requested.config_file)
        for name in ("num_processes", "num_machines", "machine_rank", "main_process_ip"):
            if getattr(requested, name) is None:  # so that it is checked below
                setattr(requested, name, getattr(from_file, name, None))
        says_how = says_how and getattr(from_file, "distributed_type", None) != "NO"
    if num_requested > 1 and not says_how:
        requested.multi_gpu = True  # without it, one process is started on a machine without GPUs
    # With other values too few processes would start, or machines would wait for one another.
    check_value("num_processes", requested.num_processes, COUNT_OR_NONE)
    check_value("num_machines", requested.num_machines, COUNT_OR_NONE)
    machines, together = requested.num_machines or 1, requested.num_processes
    for what, got, is_valid in (
        ("a `num_processes` of all machines together that it divides", together, together and not together % machines),
        (
            f"a `machine_rank` from 0 to {machines - 1}",
            requested.machine_rank,
            requested.machine_rank in range(machines),
        ),
        ("`main_process_ip`, the address of machine 0", requested.main_process_ip, requested.main_process_ip),
    ):
        if not is_valid and (machines > 1 or got is not None):
            raise ValueError(f"`num_machines={machines}` needs {what}, got {got}. Set it on every machine.")
    return requested


def _raise_value_error(message: str) -> NoReturn:
    raise ValueError(message)


@contextmanager
def pretending_to_be_one_of(num_processes: int) -> Iterator[None]:
    """
    Let configs be created as if this was one of `num_processes` processes, to check them before these are started.

    Nothing is logged meanwhile, because the processes will log the same.
    """
    world_size, disabled_level = os.environ.get("WORLD_SIZE"), logging.root.manager.disable
    os.environ["WORLD_SIZE"] = str(num_processes)
    logging.disable(logging.WARNING)
    try:
        with patched(DAPOConfig, world_size=num_processes, device=torch.device("cpu")):
            yield
    finally:
        logging.disable(disabled_level)
        if world_size is None:
            del os.environ["WORLD_SIZE"]
        else:
            os.environ["WORLD_SIZE"] = world_size


def launch_processes(arguments: Namespace) -> int:
    """Run `accelerate launch`, and return the status of the first process that failed, or 0."""
    # The process that failed has printed why. The launcher's own traceback and its status 1 would add nothing.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    logging.getLogger("accelerate.commands.launch").setLevel(logging.ERROR)  # it warns about defaults
    try:
        launch_command(arguments)
    except subprocess.CalledProcessError as error:
        return error.returncode
    except ChildFailedError as error:
        return error.get_first_failure()[1].exitcode
    except SignalException as error:  # Ctrl-C, which the processes receive, too, or a signal of a job scheduler
        return 128 + error.sigval
    except KeyboardInterrupt:
        return 130
    return 0


def print_once(line: str) -> None:
    """
    Print the line that ends a run, but only on one process.

    This is the first process, or another one if the first does not print a line within a few seconds.
    """
    if num_processes_of("WORLD_SIZE") > 1:
        rank = PartialState().process_index  # also connects the processes if they are not yet connected
        store = distributed_c10d._get_default_store()
        if rank:
            line += f" (process {rank})"
        with suppress(dist.DistError):  # the store ends with the first process
            if rank:
                with suppress(dist.DistStoreError):  # the first process has not printed a line in time
                    store.wait([PRINTED], WAIT_FOR_FIRST_RANK)
            if store.add(PRINTED, 1) > 1:
                return
    print(line, file=sys.stderr)

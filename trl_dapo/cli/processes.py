# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""`trl-dapo train` in several processes: `accelerate launch`, which ends as the processes ended."""

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


OWN_OPTION = "accelerate_config"  # of `trl` and of this package: `--config_file` of accelerate's, by name
NOT_OPTIONS = ("env", "module", "no_python")  # in a recipe `env` sets variables; the others say what is launched
TOLD, WAIT_FOR_FIRST_RANK = "trl_dapo/told", timedelta(seconds=10)


def is_launched() -> bool:
    """Whether a launcher started this process: `accelerate launch`, with one process too, or `torchrun`."""
    return is_set("ACCELERATE_MIXED_PRECISION") or is_set("LOCAL_RANK")


def options_of_accelerate(fields: Collection[str]) -> dict[str, bool]:
    """Return the options of `accelerate launch` that are not fields of a recipe, and whether each takes a value."""
    options = {OWN_OPTION: True}
    for action in launch_command_parser()._actions:
        names = [word[2:].replace("-", "_") for word in action.option_strings if word.startswith("--")]
        options |= {name: action.nargs != 0 for name in names if name not in (*fields, *NOT_OPTIONS)}
    return options


def split_options(words: Iterable[str], options: dict[str, bool]) -> tuple[list[str], list[str]]:
    """Those words of a command line that are `accelerate launch`'s, each with its value, and the others."""
    theirs, others, words = [], [], iter(words)
    for word in words:
        name, equals, value = word.removeprefix("--").partition("=")
        name = name.replace("-", "_") if word.startswith("--") else ""
        if name not in options:
            others.append(word)
        elif options[name]:
            theirs.append(f"--{name}={value if equals else next(words, '')}")
        elif value.lower() != "false":  # of a recipe's `multi_gpu: false`
            theirs.append(f"--{name}")
    return theirs, others


def read_options(words: Iterable[str], argv: Sequence[str]) -> Namespace:
    """Return what `accelerate launch` reads from its options, for `trl-dapo train` with the rest of a command line."""
    parser, own = launch_command_parser(), f"--{OWN_OPTION}="
    parser.error = _refuse
    words = [
        f"--config_file={find_accelerate_config(word.removeprefix(own))}" if word.startswith(own) else word
        for word in words
    ]
    asked = parser.parse_args([*words, "--module", "trl_dapo.cli", "train", *argv])
    says_how = asked.config_file or asked.use_fsdp or asked.use_deepspeed or asked.cpu or asked.tpu
    num_asked = max(asked.num_processes or 1, asked.num_machines or 1)
    with nullcontext() if asked.config_file else suppress(OSError):  # there need be no file
        from_file = load_config_from_file(asked.config_file)
        for name in ("num_processes", "num_machines", "machine_rank", "main_process_ip"):
            if getattr(asked, name) is None:  # told now, to be checked
                setattr(asked, name, getattr(from_file, name, None))
        says_how = says_how and getattr(from_file, "distributed_type", None) != "NO"
    if num_asked > 1 and not says_how:
        asked.multi_gpu = True  # without it, one process is started on a machine without GPUs
    # What would start too few processes, or leave machines waiting for one another, is refused.
    check_value("num_processes", asked.num_processes, COUNT_OR_NONE)
    check_value("num_machines", asked.num_machines, COUNT_OR_NONE)
    machines, together = asked.num_machines or 1, asked.num_processes
    for what, got, is_valid in (
        ("a `num_processes` that it divides, those of all together", together, together and not together % machines),
        (f"a `machine_rank` from 0 to {machines - 1}", asked.machine_rank, asked.machine_rank in range(machines)),
        ("`main_process_ip`, the address of machine 0", asked.main_process_ip, asked.main_process_ip),
    ):
        if not is_valid and (machines > 1 or got is not None):
            raise ValueError(f"`num_machines={machines}` needs {what}, got {got}.")
    return asked


def _refuse(message: str) -> NoReturn:
    raise ValueError(message)


@contextmanager
def believing_in(num_processes: int) -> Iterator[None]:
    """Make a config as each of `num_processes` processes will make it, before they are started. Nothing is logged."""
    world_size, silenced = os.environ.get("WORLD_SIZE"), logging.root.manager.disable
    os.environ["WORLD_SIZE"] = str(num_processes)
    logging.disable(logging.WARNING)  # the processes will
    try:
        with patched(DAPOConfig, world_size=num_processes, device=torch.device("cpu")):
            yield
    finally:
        logging.disable(silenced)
        if world_size is None:
            del os.environ["WORLD_SIZE"]
        else:
            os.environ["WORLD_SIZE"] = world_size


def launch_processes(arguments: Namespace) -> int:
    """Runs `accelerate launch`; returns the status of the first process that failed."""
    # It would add a traceback, and end with status 1, where the process that failed has said why.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    logging.getLogger("accelerate.commands.launch").setLevel(logging.ERROR)  # values not passed to it
    try:
        launch_command(arguments)
    except subprocess.CalledProcessError as error:
        return error.returncode
    except ChildFailedError as error:
        return error.get_first_failure()[1].exitcode
    except SignalException as error:  # Ctrl-C, which reaches the processes too, and what a scheduler sends
        return 128 + error.sigval
    except KeyboardInterrupt:
        return 130
    return 0


def tell_once(line: str) -> None:
    """Prints what ended this process. A rank behind the first does so where the first has nothing to tell."""
    if num_processes_of("WORLD_SIZE") > 1:
        rank = PartialState().process_index  # the ranks meet there, if they have not yet
        store = distributed_c10d._get_default_store()
        if rank:
            line += f" (process {rank})"
        with suppress(dist.DistError):  # the store may have ended with the first rank
            if rank:
                with suppress(dist.DistStoreError):  # in time it has told nothing
                    store.wait([TOLD], WAIT_FOR_FIRST_RANK)
            if store.add(TOLD, 1) > 1:
                return
    print(line, file=sys.stderr)

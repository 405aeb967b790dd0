# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""`trl-dapo train` in several processes: `accelerate launch`, which ends as the processes ended."""

import logging
import subprocess
from collections.abc import Sequence

from accelerate.commands.launch import launch_command, launch_command_parser
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def launch_processes(argv: Sequence[str], num_processes: int | None, accelerate_config: str | None) -> int:
    """Runs `trl-dapo train` through `accelerate launch`; returns the status of the first process that failed."""
    options = [] if accelerate_config is None else ["--config_file", accelerate_config]
    if num_processes is not None:
        options += ["--num_processes", str(num_processes)]
        if accelerate_config is None and num_processes > 1:
            options.append("--multi_gpu")  # without it, one process is started on a machine without GPUs
    arguments = launch_command_parser().parse_args([*options, "--module", "trl_dapo.cli", "train", *argv])
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

# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
Many training runs, each in its own process with one thread, and a JSON file for each.

An interrupted call resumes where it stopped. An earlier result is used only for exactly the same run: the same job,
from the same checkpoint, by the same code, with the same versions of TRL, transformers and torch.
"""

import hashlib
import inspect
import json
import math
import multiprocessing
import os
import tempfile
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
import trl

import trl_dapo

from .tables import say


class Job(NamedTuple):
    """One run, with everything that decides its outcome. It ends at the first of its limits."""

    task: str
    arm: str
    seed: int
    settings: dict = {}  # noqa: RUF012 (of the trainer's configuration)
    rate: float | None = None  # if it distinguishes runs of an arm
    num_rollouts: int = 1_000_000
    target: float = math.inf  # accuracy
    max_tokens: float = math.inf  # generated
    max_seconds: float = math.inf  # of the CPU
    probe_every: int = 1  # rollouts
    min_rollouts: int = 0  # before these, neither the target nor `max_seconds` ends the run
    min_seconds: float = 0.0  # the same
    min_tokens: float = 0.0  # the same
    others: dict = {}  # noqa: RUF012

    @property
    def key(self):
        rate = [] if self.rate is None else [f"{self.rate:g}"]
        return self.task, self.arm, *rate, self.seed

    @property
    def name(self):
        """Name of its file."""
        return "-".join(map(str, self.key)).replace(", ", "-").replace(" ", "_")


@contextmanager
def clock(seconds):
    """A block whose CPU seconds are added to a list."""
    started = time.process_time()
    try:
        yield
    finally:
        seconds.append(time.process_time() - started)


def silent():
    """Silence all output except the caller's own."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")


def quiet():
    """Use one thread, and silence all output except the caller's own."""
    torch.set_num_threads(1)
    silent()


def fingerprint(function):
    """
    Return a hash that changes with the package, the frame, the files next to that of `function`, and the versions.
    """
    digest = hashlib.sha256(" ".join((trl.__version__, transformers.__version__, torch.__version__)).encode())
    beside = Path(inspect.getfile(function)).parent.glob("*.py")
    folders = Path(trl_dapo.__file__).parent.rglob("*.py"), Path(__file__).parent.glob("*.py"), beside
    for path in sorted({path for paths in folders for path in paths}):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def describe(job, result):
    last = result["curve"][-1]
    return (
        f"{', '.join(map(str, job.key[:-1]))}, seed {job.seed}: {last['accuracy']:.1%} after {last['tokens']:,.0f} "
        f"tokens and {last['seconds']:.0f} s"
    )


def run_all(function, jobs, checkpoint, folder, num_processes, describe=describe, runs_per_process=1):
    """
    Run the jobs that no earlier call has finished, and return all results by the keys of the jobs.

    `function` must be at the top level of a module. It takes a job, the checkpoint (whose name says how it was made)
    and a temporary folder, and returns what JSON can hold. `describe` makes a line of a job and its result.
    `runs_per_process` is the number of runs per process: more than one, if a run takes less time than the imports.
    """
    folder.mkdir(parents=True, exist_ok=True)
    code = fingerprint(function)
    results, missing = {}, []
    for job in jobs:
        path = folder / f"{job.name}.json"
        run = {"job": job._asdict(), "checkpoint": checkpoint.name, "code": code}
        kept = json.loads(path.read_text()) if path.exists() else {}
        if {name: kept.get(name) for name in run} == run:
            results[job.key] = kept
        else:
            missing.append((function, job, checkpoint, path, run))
    if results:
        say(f"{len(results)} runs are read from {folder}.")
    os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
    how = {"mp_context": multiprocessing.get_context("spawn"), "max_tasks_per_child": runs_per_process}
    with ProcessPoolExecutor(num_processes, **how) as pool:
        for job, result in pool.map(_run, missing):
            results[job.key] = result
            say(f"[{len(results)} of {len(jobs)}] {describe(job, result)}")
    return results


def _run(arguments):
    function, job, checkpoint, path, run = arguments
    quiet()
    with tempfile.TemporaryDirectory() as scratch:
        result = {**run, **function(job, checkpoint, Path(scratch))}
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(result) + "\n")
    partial.rename(path)
    return job, result

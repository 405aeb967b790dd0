# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
The benchmarks. A study is a file that says its arms, its tasks and what was predicted, and what they share is frame/.

    python -m benchmarks --list          # the studies, a line each
    python -m benchmarks NAME --help     # what a study does, and its options
    python -m benchmarks NAME            # runs it
    python -m benchmarks                 # those of RESULTS.md, within an hour on two cores, and writes it
    python -m benchmarks --from-kept     # writes every table of the pages again, from the runs that are kept

**An arm** is a line of the study's `ARMS` (of `MECHANISMS` in mechanisms/), with a line of `PREDICTIONS` and a row of
its section of EVIDENCE.md, committed before the first run. **A task** is a line of the study's `TASKS`; one of a new
kind brings a module with a checkpoint and a `train`, as larger/training.py is one. **A study** is a file here, or
study.py in a folder with its CSVs, whose `main` has its options for keywords and whose docstring begins with its line
of `--list`; one with tables on a page has a `fill_in` too.

Of those of RESULTS.md each runs in a process of its own. One that fails does not stop the others: its error stands in
the results, and the exit status is 1. Figures belong to the machine and the run they stand with; what travels are
ratios of two things measured in one run.
"""

import argparse
import ast
import datetime
import importlib
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from .frame.options import read_options


HERE = Path(__file__).parent
PACKAGES = ("trl-dapo", "trl", "transformers", "torch")


# ---- The studies ----


def read_studies():
    """The files with a `main`, and their docstrings, by name: that of their folder, or their own."""
    found = {}
    for path in sorted([*HERE.glob("*.py"), *HERE.glob("*/**/study.py")]):
        module = ast.parse(path.read_text())
        functions = {getattr(node, "name", "") for node in module.body}
        if path.stem != "__main__" and "main" in functions:
            found[path.relative_to(HERE).parts[0].removesuffix(".py")] = path, ast.get_docstring(module)
    return found


def load(path):
    return importlib.import_module(".".join(["benchmarks", *path.relative_to(HERE).with_suffix("").parts]))


def print_list(studies):
    for name, (_, docstring) in studies.items():
        print(f"{name:20} {docstring.splitlines()[0]}")


def run_study(name, argv):
    """Calls a study's `main` with the options that are given."""
    path, docstring = read_studies()[name]
    module = load(path)
    return module.main(**read_options(module.main, f"python -m benchmarks {name}", docstring, argv))


def fill_in_pages(studies):
    """Writes the tables of all pages from the runs that are kept."""
    for path in (*(path for path, _ in studies.values()), HERE / "pages.py"):
        if "fill_in" in path.read_text():  # the others import more than this needs
            load(path).fill_in()


# ---- RESULTS.md ----


BENCHMARKS = {
    "update_phase": "The update phase beside GRPOTrainer's",
    "sampling_policies": "What a sampling policy costs",
    "screening": "A few completions first, then the rest",
    "rewards": "math_verify_reward beside accuracy_reward",
    "drop_in": "A drop-in for GRPOTrainer",
    "time_to_accuracy": "Tokens and seconds to an accuracy",
    "overlap": "One rollout ahead beside taking turns",
    "groups_ahead": "Two rollouts ahead beside one",
    "memory_and_scale": "Own time and memory at the paper's size",
    "lora_sync": "What vLLM is handed of a model with LoRA",
    "ledger": "What the ledger costs",
    "gpu": "A training step on a GPU",
}


def machine():
    """Cores, memory and processor, as Linux tells them."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    names = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return f"{os.cpu_count()} cores, {memory:.0f} GiB, {names[0] if names else platform.machine()}"


def commit():
    """The commit the benchmarks ran on, and whether files differed from it."""
    run = {"cwd": HERE, "capture_output": True, "text": True, "check": True}
    try:
        name = subprocess.run(["git", "rev-parse", "--short", "HEAD"], **run).stdout.strip()
        # Results of benchmarks are no change to what they measure.
        status = subprocess.run(["git", "status", "--porcelain", ":!RESULTS.md"], **run).stdout
    except (OSError, subprocess.CalledProcessError):
        return "not a git checkout"
    return f"{name}, with uncommitted changes" if status.strip() else name


def command(name):
    return ["-m", "benchmarks", name]


def run(name):
    """Runs one benchmark and shows its output as it comes; returns output, end of errors, and status."""
    environment = {**os.environ, "TERM": "dumb", "NO_COLOR": "1", "TOKENIZERS_PARALLELISM": "false"}
    how = {"cwd": HERE.parent, "stdout": subprocess.PIPE, "text": True, "env": environment}
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen([sys.executable, "-u", *command(name)], stderr=errors, **how) as process,
    ):
        lines = []
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
        status = process.wait()
        errors.seek(0)
        return "".join(lines), "".join(errors.readlines()[-20:]), status


def block(text):
    """A block of code, which nothing in the text can end."""
    lines = "\n".join(line.rstrip() for line in text.strip("\n").split("\n"))
    return f"```\n{lines.replace(chr(96) * 3, chr(39) * 3)}\n```\n"


def section(name):
    """One benchmark's part of the results, and whether it failed."""
    started = time.monotonic()
    output, errors, status = run(name)
    minutes = (time.monotonic() - started) / 60
    text = f"## {BENCHMARKS[name]}\n\n    python {' '.join(command(name))}\n\n{block(output)}\n"
    if not status:
        return f"{text}{minutes:.1f} minutes.\n", False
    print(errors, file=sys.stderr)
    return f"{text}**Failed** with exit status {status} after {minutes:.1f} minutes:\n\n{block(errors)}", True


def write_results(path):
    versions = ", ".join(f"{package} {version(package)}" for package in PACKAGES)
    parts = [
        "# Results\n",
        "Written by `python -m benchmarks`. Figures belong to this machine and this run; what travels are ratios "
        "of two things measured in one run.\n",
        f"- commit: {commit()}\n- date: {datetime.datetime.now(datetime.UTC):%Y-%m-%d}\n"
        f"- versions: Python {platform.python_version()}, {versions}\n- machine: {machine()}\n",
    ]
    failures = []
    for name in BENCHMARKS:
        print(f"---- {name} ----", flush=True)
        text, failed = section(name)
        parts.append(text)
        failures += [name] * failed
        path.write_text("\n".join(parts))  # after every benchmark: an interrupted call leaves what it has
    if failures:
        print(f"Failed: {', '.join(failures)}", file=sys.stderr)
    return 1 if failures else 0


def main(argv):
    if argv and not argv[0].startswith("-") and argv[0] in read_studies():
        return run_study(argv[0], argv[1:])
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("name", nargs="?", choices=list(read_studies()), help="the study; its options follow")
    what.add_argument("--list", action="store_true", help="names the studies")
    what.add_argument("--from-kept", action="store_true", help="writes the pages' tables and runs nothing")
    parser.add_argument(
        "--output", type=Path, default=HERE / "RESULTS.md", help="where results go (default: %(default)s)"
    )
    args = parser.parse_args(argv)
    if args.list:
        return print_list(read_studies())
    if args.from_kept:
        return fill_in_pages(read_studies())
    return write_results(args.output)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

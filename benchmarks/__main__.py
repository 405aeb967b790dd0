# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
The benchmarks. A study is a file that says its arms, its tasks and what was predicted, and what they share is frame/.

    python -m benchmarks --list          # the studies, a line each
    python -m benchmarks NAME --help     # what a study does, and its options
    python -m benchmarks NAME            # runs it
    python -m benchmarks                 # those of RESULTS.md, an hour and a half on two cores, and writes it
    python -m benchmarks --from-kept     # writes every table of the pages again, from the runs that are kept

**An arm** is a line of the study's `ARMS` (of `MECHANISMS` in mechanisms/), with a line of `PREDICTIONS` and its rows
of EVIDENCE.md, in their order, committed before the first run. **A task** is a line of the study's `TASKS`; one of a
new kind brings what the study's `Task` names, as `countdown` of two_names/ does. **A study** is a file here, or
study.py in a folder with its CSVs, whose `main` has its options for keywords and whose docstring begins with its line
of `--list`; one with tables on a page has a `fill_in` too.

Of those of RESULTS.md each runs in a process of its own. One that fails does not stop the others: the results say so,
its error is on the terminal, and the exit status is 1. Figures belong to the machine and the run they stand with; what
travels are ratios of two things measured in one run.
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
    "rollout_seconds": "What each setting costs in seconds",
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


def describe_run():
    """The commit, whether files differ from it, the date, the versions and the machine, as Linux tells them."""
    git = "git describe --always --dirty=', with uncommitted changes'"
    commit = subprocess.run(git, shell=True, cwd=HERE, capture_output=True, text=True).stdout.strip()
    versions = ", ".join(f"{package} {version(package)}" for package in PACKAGES)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    names = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return (
        f"- commit: {commit or 'not a git checkout'}\n- date: {datetime.datetime.now(datetime.UTC):%Y-%m-%d}\n"
        f"- versions: Python {platform.python_version()}, {versions}\n"
        f"- machine: {os.cpu_count()} cores, {memory:.0f} GiB, {names[0] if names else platform.machine()}\n"
    )


def command(name):
    return ["-m", "benchmarks", name]


def run(name):
    """Runs one benchmark and shows its output as it comes; returns the output, and the exit status."""
    environment = {**os.environ, "TERM": "dumb", "NO_COLOR": "1", "TOKENIZERS_PARALLELISM": "false"}
    how = {"cwd": HERE.parent, "stdout": subprocess.PIPE, "text": True, "env": environment}
    lines = []
    with subprocess.Popen([sys.executable, "-u", *command(name)], **how) as process:
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    return "".join(lines), process.returncode


def write_results(path):
    parts = [
        "# Results\n",
        "Written by `python -m benchmarks`. Figures belong to this machine and this run; what travels are ratios "
        "of two things measured in one run.\n",
        describe_run(),
    ]
    failures = []
    for name, title in BENCHMARKS.items():
        print(f"---- {name} ----", flush=True)
        started = time.monotonic()
        output, status = run(name)
        minutes = (time.monotonic() - started) / 60
        ended = f"**Failed** with exit status {status} after {minutes:.1f}" if status else f"{minutes:.1f}"
        block = "\n".join(line.rstrip() for line in output.strip("\n").split("\n"))
        parts.append(f"## {title}\n\n    python {' '.join(command(name))}\n\n```\n{block}\n```\n\n{ended} minutes.\n")
        failures += [name] * bool(status)
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
        return print(*(f"{name:20} {text.splitlines()[0]}" for name, (_, text) in read_studies().items()), sep="\n")
    if args.from_kept:
        return fill_in_pages(read_studies())
    return write_results(args.output)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

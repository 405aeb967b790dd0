# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
Run the benchmarks, or write the tables of the pages from kept results.

    python -m benchmarks --list          # list the studies
    python -m benchmarks NAME --help     # describe a study and its options
    python -m benchmarks NAME            # run a study
    python -m benchmarks                 # run the studies of RESULTS.md and write it: an hour and a half on two cores
    python -m benchmarks --from-kept     # write every table of the pages from the kept results

**A study** is a file in this folder, or study.py in a folder with its CSV files. It names its arms, its tasks and its
predictions. The keywords of its `main` are its options, and its docstring begins with its line of `--list`. A study
with tables on a page has a function `fill_in`. What the studies share is in frame/. **An arm** is a line of the
study's `ARMS` (of `MECHANISMS` in mechanisms/), with a line of `PREDICTIONS` and its rows in EVIDENCE.md, in the same
order, committed before the first run. **A task** is a line of the study's `TASKS`. A new kind of task defines all
fields of the study's `Task`, as `countdown` of two_names/ does.

Each study of RESULTS.md runs in its own process. If one fails, the others run all the same: the results name the
failure, its error is on the terminal, and the exit status is 1. Figures are of one machine and one run. On other
machines, expect only the ratios of two things that were measured in the same run.
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
    """Return the files that define `main` with their docstrings, by the name of their folder or file."""
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
    """Call the `main` of a study with the options on the command line."""
    path, docstring = read_studies()[name]
    module = load(path)
    return module.main(**read_options(module.main, f"python -m benchmarks {name}", docstring, argv))


def fill_in_pages(studies):
    """Write the tables of all pages from the kept results."""
    for path in (*(path for path, _ in studies.values()), HERE / "pages.py"):
        if "fill_in" in path.read_text():  # importing the others would need more packages
            load(path).fill_in()


# ---- RESULTS.md ----


BENCHMARKS = {
    "update_phase": "The update phase compared with GRPOTrainer's",
    "sampling_policies": "What a sampling policy costs",
    "screening": "A few completions first, then the rest",
    "rollout_seconds": "What each setting costs in seconds",
    "rewards": "math_verify_reward compared with accuracy_reward",
    "drop_in": "A step without dynamic sampling compared with GRPOTrainer's",
    "time_to_accuracy": "Tokens and seconds to an accuracy",
    "overlap": "One rollout ahead compared with taking turns",
    "groups_ahead": "Two rollouts ahead compared with one",
    "memory_and_scale": "The package's own time and memory at the paper's size",
    "lora_sync": "What vLLM gets from a model with LoRA",
    "ledger": "What the ledger costs",
    "gpu": "A training step on a GPU",
}


def describe_run():
    """Return the commit, whether files differ from it, the date, the versions and the machine. Needs Linux."""
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
    """Run one benchmark and show its output as it comes. Return the output and the exit status."""
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
        "Written by `python -m benchmarks`. The figures are of this machine and this run. On other machines, expect "
        "only the ratios of two things that were measured in the same run.\n",
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
        path.write_text("\n".join(parts))  # after every benchmark, so that an interrupted call leaves its results
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
    what.add_argument(
        "name", nargs="?", choices=list(read_studies()), help="the study to run, followed by its options"
    )
    what.add_argument("--list", action="store_true", help="list the studies")
    what.add_argument(
        "--from-kept", action="store_true", help="write the tables of the pages without running anything"
    )
    parser.add_argument(
        "--output", type=Path, default=HERE / "RESULTS.md", help="the file to write results to (default: %(default)s)"
    )
    args = parser.parse_args(argv)
    if args.list:
        return print(*(f"{name:20} {text.splitlines()[0]}" for name, (_, text) in read_studies().items()), sep="\n")
    if args.from_kept:
        return fill_in_pages(read_studies())
    return write_results(args.output)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
